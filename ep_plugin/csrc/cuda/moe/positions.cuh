// The part of notify that waits for no peer. It computes the position of every token among this rank's tokens for each
// of its ranks, and the position of every pair among this rank's pairs for its expert. Positions are running counts in
// token order.
//
// Roles. Each CTA handles one block of tokens. All its warps sum the counts of the blocks before it. Then the CTA
// passes over the block in order, some tokens at a time: one thread per pair counts the earlier pairs of the same
// expert, and the last warp computes the positions of tokens.
// Buffers. `counts`, in shared memory, has the running counts: tokens for each rank, then pairs for each expert.
// Memory order. Barriers of the CTA separate the passes. The send may read positions when all CTAs have computed their
// own (State::positions_ready).
#pragma once
#include "cuda/moe/tokens.cuh"

namespace ep::cuda {

__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1u; }

constexpr unsigned kBlocksAtOnce = 8;  // blocks whose counts a thread loads at once

// All threads: sets `counts` to the sums over blocks [0, end). Joins the CTA. Threads form teams, and blocks go round
// the teams. A thread sums four counts over its team's blocks.
__device__ inline void sum_block_counts(const Comm& comm, Address block_counts, int end) {
  const unsigned vectors = static_cast<unsigned>(plan_block_words(comm.num_ranks, comm.num_experts) / 4);
  const unsigned blocks = static_cast<unsigned>(end), teams = max(blockDim.x / vectors, 1u);
  const unsigned team = threadIdx.x / vectors;
  for (unsigned i = threadIdx.x; i < 4 * vectors; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (unsigned i = threadIdx.x % vectors; team < teams && i < vectors; i += blockDim.x) {
    int4 sum = make_int4(0, 0, 0, 0);
    for (unsigned first = team; first < blocks; first += kBlocksAtOnce * teams) {
      int4 held[kBlocksAtOnce];
#pragma unroll
      for (unsigned j = 0; j < kBlocksAtOnce; ++j) {
        const unsigned block = first + j * teams;
        held[j] = block < blocks ? at<const int4>(block_counts)[block * vectors + i] : make_int4(0, 0, 0, 0);
      }
#pragma unroll
      for (unsigned j = 0; j < kBlocksAtOnce; ++j) {
        sum.x += held[j].x;
        sum.y += held[j].y;
        sum.z += held[j].z;
        sum.w += held[j].w;
      }
    }
    if (sum.x != 0) atomicAdd(counts + 4 * i, sum.x);
    if (sum.y != 0) atomicAdd(counts + 4 * i + 1, sum.y);
    if (sum.z != 0) atomicAdd(counts + 4 * i + 2, sum.z);
    if (sum.w != 0) atomicAdd(counts + 4 * i + 3, sum.w);
  }
  __syncthreads();
}

constexpr int kPairsAtOnce = 512;  // in one pass of the CTA, one per thread; one more warp handles the tokens
constexpr int kTokenWarp = kPairsAtOnce / kWarp;

// Tokens in one pass: a divisor of kUnitTokens, so that a pass never crosses the end of a chunk.
__device__ inline int tokens_at_once(int topk) {
  int tokens = kUnitTokens;
  while (tokens * topk > kPairsAtOnce) tokens /= 2;
  return tokens;
}

// The number of entries of `experts` before `index` that are `expert`.
__device__ inline int equal_before(const int32_t* experts, int index, int expert) {
  int found = 0, i = 0;
#pragma unroll 4
  for (; i + 4 <= index; i += 4) {
    const int4 held = *reinterpret_cast<const int4*>(experts + i);
    found += (held.x == expert) + (held.y == expert) + (held.z == expert) + (held.w == expert);
  }
  for (; i < index; ++i) found += experts[i] == expert;
  return found;
}

// One warp, one lane per token: writes the token's position for each of the ranks [base, base + 32), or -1 for ranks to
// which it does not go. `ids`: the experts of the token's pairs. `here`: whether this lane has a token. `positions`: of
// the token, by rank. `tokens`: the tokens for rank base + lane so far; returns it with these tokens.
__device__ inline int assign_token_positions(const WarpTokens& warp, int R, int base, const int32_t* ids, bool here,
                                             int32_t* positions, int tokens) {
  unsigned bits = 0;
  for (int k = 0; here && k < warp.topk; ++k) bits |= warp.rank_bit(ids[k], base);
  const int ranks = min(R - base, kWarp);
  for (int r = 0; r < ranks; ++r) {
    const bool goes = bits >> r & 1u;
    const unsigned mask = __ballot_sync(kAllLanes, goes);
    const int before = __shfl_sync(kAllLanes, tokens, r) + __popc(mask & lanes_below());
    if (here) positions[base + r] = goes ? before : -1;
    if (lane_id() == r) tokens += __popc(mask);
  }
  return tokens;
}

// All threads, after sum_block_counts.
__device__ inline void assign_in_order(const Comm& comm, const Routing& routing, const Block& block) {
  __shared__ __align__(16) int32_t experts[kPairsAtOnce];
  const WarpTokens warp(comm, routing.topk);
  const Meta meta = meta_of(comm, routing);
  const int R = comm.num_ranks, K = routing.topk, at_once = tokens_at_once(K), me = static_cast<int>(threadIdx.x);
  const Chunks chunks = chunks_of(routing.num_tokens);
  for (int first = block.begin; first < block.end; first += at_once) {
    const int end = min(first + at_once, block.end), pairs = (end - first) * K;
    const int64_t pair = static_cast<int64_t>(first) * K + me;
    const int expert = me < pairs ? at<const int32_t>(routing.topk_ids)[pair] : -1;
    if (me < kPairsAtOnce) experts[me] = expert;
    __syncthreads();
    if (warp_id() == kTokenWarp) {
      const int64_t token = first + lane_id();
      int32_t* positions = at<int32_t>(routing.send_pos) + token * R;
      const int chunk = chunks.of(first);
      for (int base = 0; base < R; base += kWarp) {
        const int rank = base + lane_id(), before = rank < R ? counts[rank] : 0;
        const int tokens =
            assign_token_positions(warp, R, base, experts + lane_id() * K, token < end, positions, before);
        if (rank < R) counts[rank] = tokens;
        if (rank < R && end == chunks.end(chunk)) meta.send_chunk_end[rank * kMaxChunks + chunk] = tokens;
      }
    } else if (me < pairs) {
      at<int32_t>(routing.pair_pos)[pair] = expert < 0 ? -1 : counts[R + expert] + equal_before(experts, me, expert);
    }
    __syncthreads();
    if (expert >= 0) atomicAdd(counts + R + expert, 1);
  }
}

// All threads of a CTA. If plan has failed, ids and counts may be missing. Summing such counts does no harm, but ids
// that were not checked must not be used as indices.
__device__ inline void assign_positions(const Comm& comm, const Routing& routing, Address block_counts, int block) {
  const bool failed = faulted(comm);
  sum_block_counts(comm, block_counts, block);
  if (!__syncthreads_or(failed)) assign_in_order(comm, routing, Block(routing.num_tokens, block));
}

}  // namespace ep::cuda
