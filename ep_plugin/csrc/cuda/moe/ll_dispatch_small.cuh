// The receive half of a small low-latency dispatch: all sources together have at most kSmallPairs pairs. ll_dispatch.cu
// describes roles and memory order.
//
// Places. Each CTA has the experts of all pairs in shared memory. A warp that copies a piece of a token finds the row
// of each of the token's pairs by itself: it counts the earlier pairs of the same expert. A warp that writes the tables
// of some experts counts all their pairs. So no thread waits for another after the ids have arrived.
//
// Tasks. The pieces of all tokens, then the tables, go round the warps of all CTAs.
#pragma once
#include "cuda/moe/ll_rows.cuh"
#include "cuda/moe/ll_sources.cuh"

namespace ep::cuda {

constexpr int kSmallPairs = 1024;  // with more, it takes less time to count experts once for all tokens of a CTA
constexpr int kTableParts = 4;     // lanes that share an expert of the tables
constexpr int kTableExperts = kWarp / kTableParts;

// Whether every dispatch with these bounds is small. With shrink, CTAs must agree on the sources first.
inline bool ll_always_small(const LlOperation& op) {
  const int64_t pairs = int64_t{op.header.max_tokens} * op.header.topk;
  return op.header.topk <= kWarp && op.shrink == 0 && pairs <= kEarlyPairs && pairs * op.comm.num_ranks <= kSmallPairs;
}

// Workers of a CTA call run(), after open().
class LlSmallReceiver : public LlSources {
 public:
  using LlSources::LlSources;

  // Whether this dispatch is small, and all its pairs are in `early`.
  __device__ bool serves() const {
    const int K = header_.topk, most = ll_early_words(header_.max_tokens, K) * kLlIdsPerWord;
    bool early = K <= kWarp && ll_.op.shrink == 0;
#pragma unroll 1
    for (int s = 0; s < ranks_; ++s) early = early && placed_.tokens[s] * K <= most;
    return early && all_tokens() * K <= kSmallPairs;
  }

  // False after a fault.
  __device__ bool run() const {
    if (blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(ll_.run);
    __syncwarp();
    const LlRowWriter writer(ll_, args_, plan_.expert_rows);
    const int pieces = writer.pieces(), copies = all_tokens() * pieces;
    const int tables = (per_rank_ + kTableExperts - 1) / kTableExperts;
    const Team team = team_of_workers();
    bool ok = true;
#pragma unroll 1
    for (int task = static_cast<int>(team.index); ok && task < copies + tables; task += static_cast<int>(team.size))
      ok = task < copies ? copy(writer, task / pieces, task % pieces) : count_experts((task - copies) * kTableExperts);
    return ok;
  }

 private:
  __device__ int all_tokens() const {
    int tokens = 0;
#pragma unroll 1
    for (int s = 0; s < ranks_; ++s) tokens += placed_.tokens[s];
    return tokens;
  }

  // All lanes: writes the tables of kTableExperts experts for all sources.
  __device__ __forceinline__ bool count_experts(int first) const {
    const int e = first + lane_id() / kTableParts, part = lane_id() % kTableParts;
    bool ok = true;
    int earlier = 0;
#pragma unroll 1
    for (int s = 0; s < ranks_; ++s) {
      int rows = equal_pairs(s, placed_.tokens[s] * header_.topk, e, part, kTableParts);
#pragma unroll
      for (int apart = 1; apart < kTableParts; apart *= 2) rows += __shfl_xor_sync(kAllLanes, rows, apart);
      if (part == 0 && e < per_rank_) ok = write_tables(e, s, earlier, rows) && ok;
      earlier += rows;
    }
    return __all_sync(kAllLanes, ok) != 0;
  }

  // All lanes: copies a piece of the token at place `listed` of the list of all tokens.
  __device__ __forceinline__ bool copy(const LlRowWriter& writer, int listed, int piece) const {
    int source = 0, token = listed;
#pragma unroll 1
    for (; token >= placed_.tokens[source]; ++source) token -= placed_.tokens[source];
    bool ok = true;
    const int row = place(source, token, piece == 0, &ok);
    return __all_sync(kAllLanes, ok) != 0 &&
           writer.copy(source, placed_.tokens[source], token, piece, [=](int) { return row; });
  }

  // Returns, in lane k, the row of the token's pair k; -1: none. With `writes`, also writes the plan's rows and
  // src_info. The lanes k, k + width, ... share the count for pair k.
  __device__ __forceinline__ int place(int source, int token, bool writes, bool* ok) const {
    const int K = header_.topk, first = token * K;
    int width = 1, shift = 0;
#pragma unroll 1
    for (; width < K; width *= 2) ++shift;
    const int k = lane_id() & (width - 1);
    const int expert = k < K ? early_[source][first + k] : -1;
    int position = 0;
#pragma unroll 1
    for (int s = 0; expert >= 0 && s <= source; ++s)
      position +=
          equal_pairs(s, s < source ? placed_.tokens[s] * K : first + k, expert, lane_id() >> shift, kWarp >> shift);
#pragma unroll 1
    for (int apart = width; apart < kWarp; apart *= 2) position += __shfl_xor_sync(kAllLanes, position, apart);
    int row = -1;
    if (expert >= 0 && position >= plan_.expert_rows)
      *ok = too_many(source, position);
    else if (expert >= 0 && lane_id() < width)
      row = static_cast<int>(expert * plan_.expert_rows) + position;
    if (writes && lane_id() < K) {
      plan_.rows[(int64_t{source} * header_.max_tokens + token) * K + k] = row;
      if (row >= 0) plan_.src_info[row] = token;
    }
    return row;
  }

  // Counts the pairs of a source before `end` that have this expert. Pairs are taken in groups of eight. This function
  // counts in the groups part, part + parts, ...
  __device__ __forceinline__ int equal_pairs(int source, int end, int expert, int part, int parts) const {
    constexpr int kPairs = 8;
    int equal = 0;
#pragma unroll 1
    for (int i = part * kPairs; i < end; i += parts * kPairs) {
      const int4 held = *reinterpret_cast<const int4*>(&early_[source][i]);
      const int words[] = {held.x, held.y, held.z, held.w};
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        equal += i + j < end && static_cast<int16_t>(words[j / 2] >> 16 * (j % 2)) == expert ? 1 : 0;
    }
    return equal;
  }
};

}  // namespace ep::cuda
