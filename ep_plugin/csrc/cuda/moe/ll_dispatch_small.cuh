// The receive half of a small low-latency dispatch: all sources together have at most kSmallPairs pairs. ll_dispatch.cu
// describes roles and memory order.
//
// Places. Each CTA has the experts of all pairs in shared memory. A warp that copies a piece of a token finds the row
// of each of the token's pairs by itself: it counts the earlier pairs of the same expert. So no thread waits for
// another after the ids have arrived.
//
// Tasks. The pieces of all tokens go round the warps of all CTAs but the last ones, which write the tables of counts.
#pragma once
#include "cuda/moe/ll_rows.cuh"
#include "cuda/moe/ll_sources.cuh"

namespace ep::cuda {

constexpr int kSmallPairs = 1024;  // with more, it takes less time to count experts once for all tokens of a CTA

// Workers of a CTA call run(), after open().
class LlSmallReceiver : public LlSources {
 public:
  using LlSources::LlSources;

  // Whether the dispatch is small, and all its pairs are in `early`. With shrink, CTAs must agree on the sources first.
  __device__ bool serves() const {
    const int K = header_.topk, most = ll_early_words(header_.max_tokens, K) * kLlIdsPerWord;
    int pairs = 0;
    bool early = K <= kWarp && ll_.op.shrink == 0;
#pragma unroll 1
    for (int s = 0; s < ranks_; ++s) {
      early = early && placed_.tokens[s] * K <= most;
      pairs += placed_.tokens[s] * K;
    }
    return early && pairs <= kSmallPairs;
  }

  // False after a fault.
  __device__ bool run() const {
    const int grid = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    const int copying = grid > ranks_ ? grid - ranks_ : grid;  // CTAs
    bool ok = true;
#pragma unroll 1
    for (int table = grid - 1 - cta; ok && table < ranks_; table += grid) ok = count(table) && write_tables(table);
    if (cta == 0 && threadIdx.x == 0) hold_at_gate(ll_.run);
    __syncwarp();
    if (cta >= copying || !ok) return ok;
    const LlRowWriter writer(ll_, args_, plan_.expert_rows);
    const int tokens = all_tokens(), pieces = writer.pieces();
#pragma unroll 1
    for (int task = warp_id() * copying + cta; ok && task < tokens * pieces; task += num_workers() * copying)
      ok = copy(writer, task / pieces, task % pieces);
    return ok;
  }

 private:
  __device__ int all_tokens() const {
    int tokens = 0;
#pragma unroll 1
    for (int s = 0; s < ranks_; ++s) tokens += placed_.tokens[s];
    return tokens;
  }

  // Counts the pairs of the sources before `table`, and those of `table`, by expert.
  __device__ bool count(int table) const {
#pragma unroll 1
    for (int e = threadIdx.x; e < 2 * per_rank_; e += worker_threads()) pairs_of_[per_rank_ + e] = 0;
    join_workers();
#pragma unroll 1
    for (int s = 0; s <= table; ++s) {
      const int pairs = placed_.tokens[s] * header_.topk;
#pragma unroll 1
      for (int i = threadIdx.x; i < pairs; i += worker_threads())
        if (const int expert = placed_.early[s][i]; expert >= 0)
          atomicAdd(pairs_of_ + (s < table ? 1 : 2) * per_rank_ + expert, 1);
    }
    return join_workers();
  }

  // All lanes: a piece of the token at `listed` of the list of all tokens.
  __device__ __forceinline__ bool copy(const LlRowWriter& writer, int listed, int piece) const {
    int source = 0, token = listed;
#pragma unroll 1
    for (; token >= placed_.tokens[source]; ++source) token -= placed_.tokens[source];
    bool ok = true;
    const int row = place(source, token, piece == 0, &ok);
    return __all_sync(kAllLanes, ok) != 0 &&
           writer.copy(source, placed_.tokens[source], token, piece, [=](int) { return row; });
  }

  // In lane k: the row of the token's pair k, -1: none. With `writes`, also writes the plan's rows and src_info.
  __device__ __forceinline__ int place(int source, int token, bool writes, bool* ok) const {
    const int K = header_.topk, k = lane_id(), first = token * K;
    const int expert = k < K ? placed_.early[source][first + k] : -1;
    int row = -1;
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, expert >= 0); left != 0; left &= left - 1) {
      const int owner = __ffs(static_cast<int>(left)) - 1, wanted = __shfl_sync(kAllLanes, expert, owner);
      int equal = 0;  // earlier pairs of this expert, as this lane sees them
#pragma unroll 1
      for (int s = 0; s <= source; ++s) {
        const int end = s < source ? placed_.tokens[s] * K : first + owner;
        for (int i = lane_id(); i < end; i += kWarp) equal += placed_.early[s][i] == wanted;
      }
      const int position = __reduce_add_sync(kAllLanes, equal);
      if (position >= plan_.expert_rows)
        *ok = too_many(source, position);
      else if (k == owner)
        row = static_cast<int>(wanted * plan_.expert_rows) + position;
    }
    if (writes && k < K) {
      plan_.rows[(int64_t{source} * header_.max_tokens + token) * K + k] = row;
      if (row >= 0) plan_.src_info[row] = token;
    }
    return row;
  }
};

}  // namespace ep::cuda
