// The receive half of a low-latency dispatch that is not small. ll_dispatch.cu describes roles and memory order.
//
// Places. All tokens of all sources form one list, in the order of (source, token). Each CTA receives an equal share of
// it, which is contiguous. A pair's row in its expert's block is the number of earlier pairs of that expert in the
// list. So a CTA counts the pairs before its share, from the ids of all sources, and numbers its own pairs in order.
// It waits for no other CTA. A CTA that writes the tables of a source also counts the pairs of that source and of
// earlier sources.
#pragma once
#include "cuda/moe/ll_rows.cuh"
#include "cuda/moe/ll_sources.cuh"
#include "cuda/moe/positions.cuh"

namespace ep::cuda {

// Workers of a CTA call all functions. A function that returns bool returns the same to all workers: false after a
// fault.
class LlReceiver : public LlSources {
 public:
  using LlSources::LlSources;

  // After open(). False after a fault.
  __device__ bool run() {
    const int grid = static_cast<int>(gridDim.x);
    int table = grid - 1 - static_cast<int>(blockIdx.x);  // the source whose tables this CTA writes, if there is one
    for (bool settled = false;;) {
      list_sources();
      if (!count_pairs(table < ranks_ ? table : -1)) return false;
      if (!settled && settle()) continue;
      settled = true;
      if (table < ranks_ && !write_tables_of(table)) return false;
      table += grid;
      if (table >= ranks_) break;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(ll_.run);
    __syncwarp();
    const LlRowWriter writer(ll_, args_, plan_.expert_rows);
    const int end = placed_.share[1];
    for (int first = placed_.share[0]; first < end; first += per_pass()) {
      const int tokens = min(per_pass(), end - first);
      if (first != placed_.share[0]) find_experts(first, tokens);
      if (!place(first, tokens) || !join_workers(copy_rows(writer, first, tokens))) return false;
    }
    return true;
  }

 private:
  // --- Sources

  __device__ int pairs_of_source(int source) const { return placed_.tokens[source] * header_.topk; }
  __device__ int per_pass() const { return max(1, kPassPairs / header_.topk); }  // tokens of a pass

  __device__ void list_sources() {
    if (threadIdx.x == 0) {
      placed_.begin[0] = 0;
#pragma unroll 1
      for (int s = 0; s < ranks_; ++s) placed_.begin[s + 1] = placed_.begin[s] + placed_.tokens[s];
      // At most 72 * 4096 tokens and 10,000 CTAs: the products fit in 32 bits.
      const unsigned tokens = placed_.begin[ranks_], cta = blockIdx.x;
      placed_.share[0] = static_cast<int>(tokens * cta / gridDim.x);
      placed_.share[1] = static_cast<int>(tokens * (cta + 1) / gridDim.x);
    }
    join_workers();
#pragma unroll 1
    for (int s = static_cast<int>(threadIdx.x); s < ranks_; s += worker_threads()) {
      const int before = min(max(placed_.share[0] - placed_.begin[s], 0), placed_.tokens[s]);
      placed_.before[s] = before * header_.topk;
    }
  }

  // With shrink, CTAs may see a source differently: its words arrive while its deadline passes. The first CTA to
  // decide does so for all. Returns true if this CTA must count again. Then it took a source for lost that is there, or
  // it has counted a lost source, perhaps in part.
  __device__ bool settle() {
    if (ll_.op.shrink == 0) return false;
    bool changed = false;
#pragma unroll 1
    for (int peer = lane_id(); warp_id() == 0 && peer < ranks_; peer += kWarp)
      placed_.peers.block[peer] = ll_.peers->block[peer];
#pragma unroll 1
    for (int base = 0; warp_id() == 0 && base < ranks_; base += kWarp) {
      const int source = base + lane_id();
      const bool lost = source < ranks_ && placed_.lost[source] != 0, there = source < ranks_ && decide(source, !lost);
      const unsigned masked = __ballot_sync(kAllLanes, source < ranks_ && !there);
      if (lane_id() == 0) placed_.peers.masked[base / kWarp] = masked;
      __syncwarp();
      if (source >= ranks_) continue;
      ll_.peers = &placed_.peers;
      changed = changed || (there ? lost : placed_.tokens[source] != 0);
      LlHeader header;
      if (there && lost && ll_open(ll_, source, words_of(source), &header) == Found::kThere)
        placed_.tokens[source] = header.num_tokens;
      if (!there) placed_.tokens[source] = 0;
      placed_.lost[source] = !there;
    }
    changed = !join_workers(!changed);
    ll_.peers = &placed_.peers;
    return changed;
  }
  // The verdict is epoch * 2, plus 1 if the words are there.
  __device__ bool decide(int source, bool there) const {
    uint64_t* verdict = &ll_.state().verdict[source];
    ptx::fence_acq_rel_gpu();
    uint64_t held = ptx::ld_relaxed_gpu(verdict);
    while (held >> 1 != ll_.run.epoch) {
      const uint64_t before = ptx::atom_cas_relaxed_gpu(verdict, held, ll_.run.epoch << 1 | (there ? 1u : 0u));
      held = before == held ? ll_.run.epoch << 1 | (there ? 1u : 0u) : before;
    }
    ptx::fence_acq_rel_gpu();
    return (held & 1u) != 0;
  }

  // --- Counts

  // Waits for the ids of all sources. Counts three sets of their pairs by local expert: the pairs before this CTA's
  // share, the pairs of sources before `table`, and the pairs of `table`. With `table` -1 it counts only the first set.
  // Also finds the experts of the first pass.
  __device__ bool count_pairs(int table) {
#pragma unroll 1
    for (int e = threadIdx.x; e < 3 * per_rank_; e += worker_threads()) pairs_of_[e] = 0;
    join_workers();
    int most = 0;
#pragma unroll 1
    for (int s = 0; s < ranks_; ++s) most = max(most, placed_.tokens[s]);
    const int words = ll_sent_id_words(header_, most);
    bool ok = true;
#pragma unroll 1
    for (int at = threadIdx.x; ok && at < ranks_ * words; at += worker_threads())
      ok = count_word(at / words, at % words, table);
    return join_workers(ok);
  }

  __device__ __forceinline__ bool count_word(int source, int word, int table) {
    const int pairs = pairs_of_source(source), first = word * kLlIdsPerWord;
    if (first >= pairs) return true;
    LlData data;
    const Found found = wait_ids(source, word, &data);
    if (found == Found::kMasked) placed_.lost[source] = 1;
    if (found != Found::kThere) return found == Found::kMasked;
    if (!check_ids(data, source)) return false;
    const int share = placed_.share[0], left = pairs - first, before = placed_.before[source] - first;
    const int place = (placed_.begin[source] - share) * header_.topk + first;  // the first pair's place in the pass
    const int end = min(per_pass(), placed_.share[1] - share) * header_.topk;
#pragma unroll
    for (int i = 0; i < kLlIdsPerWord; ++i) {
      const int local = local_of(id_in(data, i));
      if (i < left && place + i >= 0 && place + i < end) placed_.experts[place + i] = local;
      if (i < left && local >= 0 && i < before) atomicAdd(pairs_of_ + local, 1);
      if (i < left && local >= 0 && source <= table)
        atomicAdd(pairs_of_ + (source < table ? 1 : 2) * per_rank_ + local, 1);
    }
    return true;
  }

  // Writes the tables of a source, whose pairs this CTA has counted.
  __device__ bool write_tables_of(int s) const {
    bool ok = true;
#pragma unroll 1
    for (int e = threadIdx.x; e < per_rank_; e += worker_threads())
      ok = write_tables(e, s, pairs_of_[per_rank_ + e], pairs_of_[2 * per_rank_ + e]) && ok;
    return join_workers(ok);
  }

  // --- Rows of a pass

  __device__ int source_of(int listed) const {
    int source = 0;
#pragma unroll 1
    while (listed >= placed_.begin[source + 1]) ++source;
    return source;
  }

  // The experts of the pairs of `tokens` tokens of the list.
  __device__ void find_experts(int first, int tokens) {
    const int K = header_.topk, pairs = tokens * K;
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += worker_threads()) {
      const int listed = first + i / K, s = source_of(listed);
      const int pair = (listed - placed_.begin[s]) * K + i % K;
      LlData data;
      uint64_t seen;
      ll_load_words<1>(ll_, words_of(s) + kLlHeaderWords + pair / kLlIdsPerWord, &data, &seen);
      const int j = pair % kLlIdsPerWord;
      const uint32_t unit = j < 2 ? data.unit[0] : j < 4 ? data.unit[1] : data.unit[2];
      placed_.experts[i] = local_of(static_cast<int16_t>(unit >> 16 * (j % 2)));
    }
    join_workers();
  }

  // Places these pairs, whose experts are known, and writes the plan's rows and src_info.
  __device__ bool place(int first, int tokens) {
    const int K = header_.topk, pairs = tokens * K;
    bool ok = true;
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += worker_threads()) {
      const int expert = placed_.experts[i], listed = first + i / K, s = source_of(listed);
      const int token = listed - placed_.begin[s];
      int row = -1;
      if (expert >= 0) {
        const int position = pairs_of_[expert] + equal_before(placed_.experts, i, expert);
        if (position < plan_.expert_rows) {
          row = static_cast<int>(expert * plan_.expert_rows) + position;
          plan_.src_info[row] = token;
        } else {
          ok = too_many(s, position);
        }
      }
      placed_.rows[i] = row;
      plan_.rows[(int64_t{s} * header_.max_tokens + token) * K + i % K] = row;
    }
    if (!join_workers(ok)) return false;
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs; i += worker_threads())
      if (placed_.experts[i] >= 0) atomicAdd(pairs_of_ + placed_.experts[i], 1);
    return true;
  }

  // Copies the images of these tokens to their rows. Warps take pieces of images in turn.
  __device__ bool copy_rows(const LlRowWriter& writer, int first, int tokens) const {
    const int pieces = writer.pieces();
    bool ok = true;
#pragma unroll 1
    for (int task = warp_id(); ok && task < tokens * pieces; task += num_workers()) {
      const int i = task / pieces, s = source_of(first + i);
      const int32_t* rows = placed_.rows + i * header_.topk;
      ok = writer.copy(s, placed_.tokens[s], first + i - placed_.begin[s], task - i * pieces,
                       [=](int k) { return rows[k]; });
    }
    return ok;
  }
};

}  // namespace ep::cuda
