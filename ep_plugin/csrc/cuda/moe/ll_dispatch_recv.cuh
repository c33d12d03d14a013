// The receive half of low-latency dispatch. ll_dispatch.cu describes roles and memory order.
//
// Places. All tokens of all sources form one list, in the order of (source, token). Each CTA receives an equal share of
// it, which is contiguous. A pair's row in its expert's block is the number of earlier pairs of that expert in the
// list. So a CTA counts the pairs before its share, from the ids of all sources, and numbers its own pairs in order.
// It waits for no other CTA. A CTA that writes the tables of a source counts that source's pairs and those of earlier
// sources, too.
#pragma once
#include "cuda/moe/ll_words.cuh"
#include "cuda/moe/positions.cuh"

namespace ep::cuda {

constexpr int kPassPairs = 512;  // pairs that a CTA places at a time
constexpr int kRowVectors = 2;   // 16-byte vectors of a row that a lane copies at a time

// What a CTA knows of the sources, and the pairs of one pass. In shared memory.
struct Placed {
  int32_t tokens[kMaxRanks];                  // T of each source; 0: it is masked
  int32_t begin[kMaxRanks + 1];               // the source's first token in the list
  int32_t share[2];                           // this CTA's first token in the list, and the one after its last
  int32_t before[kMaxRanks];                  // pairs of the source before this CTA's share of the list
  int32_t lost[kMaxRanks];                    // 1: a wait for its words ended with a mask
  __align__(16) int32_t experts[kPassPairs];  // local expert of each pair, -1: none
  int32_t rows[kPassPairs];                   // row of each pair, -1: none
};

// Workers of a CTA call all functions. Those that return bool return the same for all workers: false after a fault.
class LlReceiver {
 public:
  // counts: [3][E_l], in shared memory.
  __device__ LlReceiver(const LlRun& ll, const LlDispatchArgs& args, Placed& placed, int32_t* counts)
      : ll_(ll),
        args_(args),
        header_(ll.op.header),
        plan_(ll_plan_of(ll.op, args.plan)),
        placed_(placed),
        pairs_of_(counts),
        ranks_(ll.op.comm.num_ranks),
        per_rank_(local_experts(ll.op.comm)) {}

  __device__ void run() {
    if (!open()) return;
    const int grid = static_cast<int>(gridDim.x);
    int table = grid - 1 - static_cast<int>(blockIdx.x);  // the source whose tables this CTA writes, if there is one
    for (bool settled = false;;) {
      list_sources();
      if (!count_pairs(table < ranks_ ? table : -1)) return;
      if (!settled && settle()) continue;
      settled = true;
      if (table < ranks_ && !write_tables(table)) return;
      table += grid;
      if (table >= ranks_) break;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(ll_.run);
    __syncwarp();
    const int end = placed_.share[1];
    bool ok = true;
    for (int first = placed_.share[0]; first < end; first += per_pass()) {
      const int tokens = min(per_pass(), end - first);
      if (first != placed_.share[0]) find_experts(first, tokens);
      if (!place(first, tokens)) return;
      ok = copy_rows(first, tokens);
      if (!join_workers(ok)) return;
    }
  }

 private:
  // --- Sources

  __device__ const LlWord* words_of(int source) const { return ll_.own().ids(ll_.parity, source); }
  __device__ int pairs_of_source(int source) const { return placed_.tokens[source] * header_.topk; }
  __device__ int per_pass() const { return max(1, kPassPairs / header_.topk); }  // tokens

  // The last warp waits for the headers. If ids are few, the other threads wait for the ids that they count first.
  __device__ bool open() {
    bool ok = true;
    const int source = lane_id();
    if (warp_id() == num_workers() - 1 && source < ranks_) {
      LlHeader header;
      const Found found = ll_open(ll_, source, words_of(source), &header);
      ok = found != Found::kGaveUp;
      placed_.tokens[source] = found == Found::kThere ? header.num_tokens : 0;
      placed_.lost[source] = found == Found::kMasked;
    }
    if (ll_ids_are_few(header_)) {
      const int words = ll_sent_id_words(header_, 0), at = static_cast<int>(threadIdx.x);
      if (at < ranks_ * words) early_found_ = wait_ids(at / words, at % words, &early_);
      is_early_ = true;
    }
    return join_workers(ok && early_found_ != Found::kGaveUp);
  }
  __device__ __forceinline__ Found wait_ids(int source, int word, LlData* data) const {
    return ll_wait_words<1>(ll_, source, words_of(source) + kLlHeaderWords + word, data);
  }

  __device__ void list_sources() {
    if (threadIdx.x == 0) {
      placed_.begin[0] = 0;
#pragma unroll 1
      for (int s = 0; s < ranks_; ++s) placed_.begin[s + 1] = placed_.begin[s] + placed_.tokens[s];
      // At most 65536 tokens and as many CTAs: the products fit in 32 bits.
      const unsigned tokens = placed_.begin[ranks_], cta = blockIdx.x;
      placed_.share[0] = static_cast<int>(tokens * cta / gridDim.x);
      placed_.share[1] = static_cast<int>(tokens * (cta + 1) / gridDim.x);
    }
    join_workers();
    if (const int s = static_cast<int>(threadIdx.x); s < ranks_) {
      const int before = min(max(placed_.share[0] - placed_.begin[s], 0), placed_.tokens[s]);
      placed_.before[s] = before * header_.topk;
    }
  }

  // With shrink, CTAs may see a source differently: its words arrive while its deadline passes. The first CTA decides
  // for all. True if this CTA must count again: a source is there that it took for lost, or it has counted, perhaps in
  // part, one that is lost.
  __device__ bool settle() {
    if (ll_.op.shrink == 0) return false;
    bool changed = false;
    const int source = lane_id();
    if (warp_id() == 0 && source < ranks_) {
      const bool lost = placed_.lost[source] != 0, there = decide(source, !lost);
      changed = there ? lost : placed_.tokens[source] != 0;
      if (there) ll_.masked &= ~(1u << source);
      LlHeader header;
      if (changed && there && ll_open(ll_, source, words_of(source), &header) == Found::kThere)
        placed_.tokens[source] = header.num_tokens;
      if (!there) placed_.tokens[source] = 0;
      placed_.lost[source] = !there;
    }
    changed = !join_workers(!changed);
    ll_.masked = 0;
#pragma unroll 1
    for (int s = 0; s < ranks_; ++s) ll_.masked |= static_cast<uint32_t>(placed_.lost[s]) << s;
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

  // Waits for the ids of all sources, and counts their pairs by local expert: those before this CTA's share, those of
  // the sources before `table`, and those of `table`; -1: neither. Finds the experts of the first pass, too.
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
      ok = count_word(at / words, at % words, table, is_early_ && at == static_cast<int>(threadIdx.x));
    is_early_ = false;
    return join_workers(ok);
  }

  __device__ __forceinline__ bool count_word(int source, int word, int table, bool is_early) {
    const int pairs = pairs_of_source(source), first = word * kLlIdsPerWord;
    if (first >= pairs) return true;
    LlData data = early_;
    const Found found = is_early ? early_found_ : wait_ids(source, word, &data);
    if (found == Found::kMasked) placed_.lost[source] = 1;
    if (found != Found::kThere) return found == Found::kMasked;
    const int before = placed_.before[source], share = placed_.share[0];
    const int pairs_of_pass = min(per_pass(), placed_.share[1] - share) * header_.topk;
    int place = (placed_.begin[source] - share) * header_.topk + first;  // of the pair in the first pass
    uint64_t ids = static_cast<uint64_t>(data.unit[1]) << 32 | data.unit[0], rest = data.unit[2];
#pragma unroll 1
    for (int pair = first; pair < min(first + kLlIdsPerWord, pairs);
         ++pair, ++place, ids = ids >> 16 | rest << 48, rest >>= 16) {
      const int id = static_cast<int16_t>(ids);
      if (id < -1 || id >= ll_.op.comm.num_experts)
        return ll_fail(ll_, kBadData, source, 0, ll_.op.comm.num_experts, id);
      const int local = local_of(id);
      if (place >= 0 && place < pairs_of_pass) placed_.experts[place] = local;
      if (local >= 0 && pair < before) atomicAdd(pairs_of_ + local, 1);
      if (local >= 0 && source <= table) atomicAdd(pairs_of_ + (source < table ? 1 : 2) * per_rank_ + local, 1);
    }
    return true;
  }

  // The local expert of an id; -1: it is on another rank, or dropped.
  __device__ __forceinline__ int local_of(int id) const {
    const int local = id - ll_.op.comm.rank * per_rank_;
    return id >= 0 && local >= 0 && local < per_rank_ ? local : -1;
  }

  // --- Tables. One CTA writes those of one source, while rows are under way.

  __device__ bool write_tables(int s) const {
    bool ok = true;
#pragma unroll 1
    for (int e = threadIdx.x; e < per_rank_; e += worker_threads()) {
      const int32_t earlier = pairs_of_[per_rank_ + e], rows = pairs_of_[2 * per_rank_ + e];
      plan_.layout_range[e * ranks_ + s] = static_cast<int64_t>(earlier) << 32 | rows;
      if (s == ranks_ - 1) {
        at<int32_t>(args_.expert_count)[e] = earlier + rows;
        if (args_.cumulative != 0) at<int32_t>(args_.cumulative)[e] += earlier + rows;
      }
      if (rows > placed_.tokens[s]) ok = too_many(s, rows);
    }
    if (threadIdx.x == 0) plan_.src_tokens[s] = placed_.tokens[s];
#pragma unroll 1
    for (int e = threadIdx.x; s == 0 && e <= per_rank_; e += worker_threads())
      at<int32_t>(args_.expert_offset)[e] = static_cast<int32_t>(e * plan_.expert_rows);
    return join_workers(ok);
  }
  __device__ bool too_many(int source, int rows) const {
    return ll_fail(ll_, kBadData, source, 1, placed_.tokens[source], rows);
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

  // Copies the images of these tokens to their rows. A warp takes pieces of images, the scales as a piece of their own.
  __device__ bool copy_rows(int first, int tokens) const {
    const int64_t image_bytes = ll_image_bytes(header_.row_bytes, header_.scale_bytes);
    const int row_pieces = static_cast<int>(ceil_div(header_.row_bytes, kRowVectors * kWarp * 16));
    const int slot_pieces = row_pieces + (header_.scale_bytes != 0 ? 1 : 0);
    const int word_pieces = static_cast<int>(ceil_div(ll_words(image_bytes), kWarp));
    const int pieces = max(slot_pieces, word_pieces);
#pragma unroll 1
    for (int task = warp_id(); task < tokens * pieces; task += num_workers()) {
      const int i = task / pieces, piece = task - i * pieces, s = source_of(first + i);
      const bool words = ll_rows_are_words(placed_.tokens[s]);
      const int32_t* rows = placed_.rows + i * header_.topk;
      if (piece >= (words ? word_pieces : slot_pieces) || !any_row(rows)) continue;
      const int token = first + i - placed_.begin[s];
      bool ok;
      if (words) {
        ok = copy_words(s, token, piece, rows, static_cast<int>(image_bytes / 4));
      } else {
        const Found found = ll_wait_rows(ll_, s, token / ll_group_tokens(placed_.tokens[s]));
        ok = found != Found::kGaveUp;
        const char* image = found == Found::kThere ? ll_.own().slot(ll_.kind, ll_.parity, s, token) : nullptr;
        if (ok && piece < row_pieces) copy_piece(image, piece, rows);
        if (ok && piece == row_pieces) copy_scales(image, rows);
      }
      if (!__all_sync(kAllLanes, ok)) return false;
    }
    return true;
  }

  __device__ bool any_row(const int32_t* rows) const {
    bool any = false;
#pragma unroll 1
    for (int k = lane_id(); k < header_.topk; k += kWarp) any |= rows[k] >= 0;
    return __any_sync(kAllLanes, any) != 0;
  }
  // All lanes: calls store(row) for each row of a token.
  template <class Store>
  __device__ __forceinline__ void each_row(const int32_t* rows, Store store) const {
#pragma unroll 1
    for (int base = 0; base < header_.topk; base += kWarp) {
      const int k = base + lane_id(), row = k < header_.topk ? rows[k] : -1;
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1)
        store(__shfl_sync(kAllLanes, row, __ffs(static_cast<int>(left)) - 1));
    }
  }

  // The image is null if its source was masked: the rows become zeros.
  __device__ __forceinline__ void copy_piece(const char* image, int piece, const int32_t* rows) const {
    const int first = piece * kRowVectors * kWarp + lane_id(), vectors = header_.row_bytes / 16;
    int4 held[kRowVectors];
#pragma unroll
    for (int v = 0; v < kRowVectors; ++v) {
      held[v] = make_int4(0, 0, 0, 0);
      if (image != nullptr && first + v * kWarp < vectors)
        held[v] = ptx::ld_coherent(reinterpret_cast<const int4*>(image) + first + v * kWarp);
    }
    each_row(rows, [&](int row) {
      int4* to = at<int4>(args_.tokens, int64_t{row} * header_.row_bytes);
#pragma unroll
      for (int v = 0; v < kRowVectors; ++v)
        if (first + v * kWarp < vectors) to[first + v * kWarp] = held[v];
    });
  }

  // The address of column `column` of the scales of a row. A column is a float32, or four exponents.
  __device__ __forceinline__ int32_t* scale_of(int row, int column) const {
    const unsigned rows = static_cast<unsigned>(plan_.expert_rows);
    const unsigned expert = static_cast<unsigned>(row) / rows;
    const int columns = static_cast<int>(ceil_div(header_.scale_bytes, kScaleBytes));
    return at<int32_t>(args_.scales) + (int64_t{expert} * columns + column) * rows + (row - expert * rows);
  }
  __device__ void copy_scales(const char* image, const int32_t* rows) const {
    const int columns = static_cast<int>(ceil_div(header_.scale_bytes, kScaleBytes));
#pragma unroll 1
    for (int base = 0; base < columns; base += kWarp) {
      const int column = base + lane_id();
      int32_t held = 0;
      if (image != nullptr && column < columns)
        held = ptx::ld_coherent(reinterpret_cast<const int32_t*>(image + header_.row_bytes) + column);
      each_row(rows, [&](int row) {
        if (column < columns) *scale_of(row, column) = held;
      });
    }
  }

  // The same for 32 words of an image of `units` 4-byte units.
  __device__ bool copy_words(int source, int token, int piece, const int32_t* rows, int units) const {
    const int word = piece * kWarp + lane_id(), row_units = header_.row_bytes / 4;
    const LlWord* from = ll_.own().row_words(ll_.kind, ll_.parity, source, token) + word;
    LlData data{};
    Found found = Found::kThere;
    if (word * kLlWordUnits < units) found = ll_wait_words<1>(ll_, source, from, &data);
    if (!__all_sync(kAllLanes, found != Found::kGaveUp)) return false;
    if (found == Found::kMasked) data = LlData{};
    each_row(rows, [&](int row) {
      int32_t* to = at<int32_t>(args_.tokens, int64_t{row} * header_.row_bytes);
#pragma unroll
      for (int u = 0; u < kLlWordUnits; ++u) {
        const int unit = word * kLlWordUnits + u;
        if (unit >= units) continue;
        *(unit < row_units ? to + unit : scale_of(row, unit - row_units)) = static_cast<int32_t>(data.unit[u]);
      }
    });
    return true;
  }

  LlRun ll_;
  const LlDispatchArgs& args_;
  const LlHeader& header_;
  const LlPlan plan_;
  Placed& placed_;
  int32_t* const pairs_of_;  // by local expert: the pairs before those that are placed next; then the other two counts
  LlData early_{};           // the word of this thread's first place in the list of words, where ids are few
  Found early_found_ = Found::kThere;  // how the wait for it ended
  bool is_early_ = false;              // early_ is not counted yet
  const int ranks_;
  const int per_rank_;
};

}  // namespace ep::cuda
