// The common part of both ways to receive a low-latency dispatch: the headers and first ids of all sources, and the
// tables of counts. ll_dispatch.cu describes roles and memory order.
#pragma once
#include "cuda/moe/ll_words.cuh"

namespace ep::cuda {

constexpr int kPassPairs = 512;  // pairs that a CTA places at a time, in a dispatch that is not small
constexpr int kEarlyPairs = kLlEarlyWords * kLlIdsPerWord;

// The facts that a CTA knows about the sources, and the pairs of one pass. They are in shared memory.
struct Placed {
  int32_t tokens[kMaxRanks];  // T of each source; 0: it is masked
  int32_t lost[kMaxRanks];    // 1: a wait for its words ended with a mask
  // For a dispatch that is not small:
  LlPeers peers;                              // with shrink: as all CTAs see them
  int32_t begin[kMaxRanks + 1];               // the source's first token in the list
  int32_t share[2];                           // this CTA's first token in the list, and the one after its last
  int32_t before[kMaxRanks];                  // pairs of the source before this CTA's share of the list
  __align__(16) int32_t experts[kPassPairs];  // local expert of each pair, -1: none
  int32_t rows[kPassPairs];                   // row of each pair, -1: none
};

// The experts of the first pairs of each source, in dynamic shared memory. Behind them are counts [3][E_l].
using EarlyPairs = int16_t[kEarlyPairs];  // local expert of each pair, -1: none
EP_HD constexpr int64_t placed_bytes(int ranks, int per_rank) {
  return static_cast<int64_t>(sizeof(EarlyPairs)) * ranks + 3 * 4 * static_cast<int64_t>(per_rank);
}

// Workers of a CTA call all functions. A function that returns bool returns the same to all workers: false after a
// fault.
class LlSources {
 public:
  __device__ LlSources(const LlRun& ll, const LlDispatchArgs& args, Placed& placed)
      : ll_(ll),
        args_(args),
        header_(ll.op.header),
        plan_(ll_plan_of(ll.op, args.plan)),
        placed_(placed),
        early_(reinterpret_cast<EarlyPairs*>(dynamic_shared)),
        pairs_of_(reinterpret_cast<int32_t*>(early_ + ll.op.comm.num_ranks)),
        ranks_(ll.op.comm.num_ranks),
        per_rank_(local_experts(ll.op.comm)) {}

  // The last warp waits for the headers first. All threads wait for the early words.
  __device__ bool open() {
    bool ok = true;
#pragma unroll 1
    for (int source = lane_id(); warp_id() == num_workers() - 1 && source < ranks_; source += kWarp) {
      LlHeader header;
      const Found found = ll_open(ll_, source, words_of(source), &header);
      ok = ok && found != Found::kGaveUp;
      placed_.tokens[source] = found == Found::kThere ? header.num_tokens : 0;
      placed_.lost[source] = found == Found::kMasked;
    }
    const int words = ll_early_words(header_.max_tokens, header_.topk), polls = words < kLlEarlyWords ? ll_.polls() : 1;
#pragma unroll 1
    for (int i = threadIdx.x; ok && i < ranks_ * kLlEarlyWords; i += worker_threads())
      if (i % kLlEarlyWords < words) ok = take_early(i / kLlEarlyWords, i % kLlEarlyWords, polls);
    return join_workers(ok);
  }

 protected:
  __device__ const LlWord* words_of(int source) const { return ll_.own().ids(ll_.parity, source); }
  __device__ __forceinline__ Found wait_ids(int source, int word, LlData* data, int polls = 1) const {
    return ll_wait_words<1>(ll_, source, words_of(source) + kLlHeaderWords + word, data, polls);
  }

  // The id of pair `i` of a word.
  static __device__ __forceinline__ int id_in(const LlData& data, int i) {
    return static_cast<int16_t>(data.unit[i / 2] >> 16 * (i % 2));
  }
  // The local expert of an id; -1: it is on another rank, or dropped.
  __device__ __forceinline__ int local_of(int id) const {
    const int local = id - ll_.op.comm.rank * per_rank_;
    return id >= 0 && local >= 0 && local < per_rank_ ? local : -1;
  }
  __device__ bool check_ids(const LlData& data, int source) const {
    int worst = 0;  // an invalid id
#pragma unroll
    for (int i = 0; i < kLlIdsPerWord; ++i)
      if (const int id = id_in(data, i); id < -1 || id >= ll_.op.comm.num_experts) worst = id;
    return worst == 0 || ll_fail(ll_, kBadData, source, 0, ll_.op.comm.num_experts, worst);
  }

  // One thread: writes the entries of the tables for an expert and a source. earlier: pairs of earlier sources. rows:
  // pairs of this source.
  __device__ __forceinline__ bool write_tables(int e, int s, int32_t earlier, int32_t rows) const {
    plan_.layout_range[e * ranks_ + s] = static_cast<int64_t>(earlier) << 32 | rows;
    if (e == 0) plan_.src_tokens[s] = placed_.tokens[s];
    if (s == ranks_ - 1) {
      at<int32_t>(args_.expert_count)[e] = earlier + rows;
      if (args_.cumulative != 0) at<int32_t>(args_.cumulative)[e] += earlier + rows;
      at<int32_t>(args_.expert_offset)[e + 1] = static_cast<int32_t>((e + 1) * plan_.expert_rows);
      if (e == 0) at<int32_t>(args_.expert_offset)[0] = 0;
    }
    return rows <= placed_.tokens[s] || too_many(s, rows);
  }
  __device__ bool too_many(int source, int rows) const {
    return ll_fail(ll_, kBadData, source, 1, placed_.tokens[source], rows);
  }

  LlRun ll_;
  const LlDispatchArgs& args_;
  const LlHeader& header_;
  const LlPlan plan_;
  Placed& placed_;
  EarlyPairs* const early_;
  int32_t* const pairs_of_;
  const int ranks_;
  const int per_rank_;

 private:
  __device__ __forceinline__ bool take_early(int source, int word, int polls) {
    LlData data{};
    const Found found = wait_ids(source, word, &data, polls);
    if (found == Found::kGaveUp) return false;
    if (found == Found::kMasked) data = LlData{{~0u, ~0u, ~0u}};
    if (!check_ids(data, source)) return false;
    uint32_t* to = reinterpret_cast<uint32_t*>(early_[source]) + word * kLlWordUnits;
#pragma unroll
    for (int u = 0; u < kLlWordUnits; ++u)
      to[u] = (static_cast<uint32_t>(local_of(id_in(data, 2 * u))) & 0xFFFFu) |
              static_cast<uint32_t>(local_of(id_in(data, 2 * u + 1))) << 16;
    return true;
  }
};

}  // namespace ep::cuda
