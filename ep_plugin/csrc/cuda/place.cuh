// The part of notify that waits for nobody: every token's position among those for its ranks, and every pair's among
// those for its expert. Positions are running counts in token order.
//
// Roles. A CTA places one block of tokens: all its warps add up the counts of the blocks before it, then one warp goes
// over the block in order.
#pragma once
#include "tokens.cuh"

namespace ep::cuda {

__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1u; }

// All threads: `counts` become the sums over blocks [0, end). Joins the CTA.
__device__ inline void add_up_blocks(const Comm& comm, Address block_counts, int end) {
  const int vectors = static_cast<int>(plan_block_words(comm.num_ranks, comm.num_experts) / 4);
  const int warps = static_cast<int>(blockDim.x / kWarp);
  for (int i = threadIdx.x; i < 4 * vectors; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (int i = lane_id(); i < vectors; i += kWarp) {
    int4 sum = make_int4(0, 0, 0, 0);
#pragma unroll 8
    for (int block = warp_id(); block < end; block += warps) {
      const int4 of_block = at<const int4>(block_counts)[static_cast<int64_t>(block) * vectors + i];
      sum = make_int4(sum.x + of_block.x, sum.y + of_block.y, sum.z + of_block.z, sum.w + of_block.w);
    }
    if (sum.x != 0) atomicAdd(&counts[4 * i], sum.x);
    if (sum.y != 0) atomicAdd(&counts[4 * i + 1], sum.y);
    if (sum.z != 0) atomicAdd(&counts[4 * i + 2], sum.z);
    if (sum.w != 0) atomicAdd(&counts[4 * i + 3], sum.w);
  }
  __syncthreads();
}

// One warp: each lane's pair gets its position among the expert's, and is counted.
__device__ inline int place_pair(int32_t* count_of_expert, int expert) {
  const unsigned same = __match_any_sync(kAllLanes, expert < 0 ? -1 - lane_id() : expert);
  const int before = __popc(same & lanes_below());
  const int position = expert < 0 ? -1 : count_of_expert[expert] + before;
  __syncwarp();
  if (expert >= 0 && before == 0) count_of_expert[expert] += __popc(same);
  __syncwarp();
  return position;
}

// One warp: each token whose lanes' `bits` name its ranks gets its position among each rank's, -1 where it does not go.
// `tokens`: in lane r, those for rank r so far.
__device__ inline void place_tokens(const Step32& step, int R, unsigned bits, bool here, int32_t* positions,
                                    int* tokens) {
  const bool speaks = here && step.k() == 0;
  for (int r = 0; r < R; ++r) {
    const bool goes = speaks && (bits >> r & 1u);
    const unsigned mask = __ballot_sync(kAllLanes, goes);
    const int before = __shfl_sync(kAllLanes, *tokens, r) + __popc(mask & lanes_below());
    if (speaks) positions[r] = goes ? before : -1;
    if (lane_id() == r) *tokens += __popc(mask);
  }
}

// One warp, after add_up_blocks.
__device__ inline void place_in_order(const Comm& comm, const Routing& routing, const Block& block) {
  const Step32 step(comm, routing.topk);
  const Meta meta = meta_of(comm, routing);
  const int R = comm.num_ranks, K = routing.topk;
  const Chunks chunks = chunks_of(routing.num_tokens);
  const int32_t* ids = at<const int32_t>(routing.topk_ids);
  int tokens = lane_id() < R ? counts[lane_id()] : 0;
  for (int unit = block.begin; unit < block.end; unit += kUnitTokens) {
    const int unit_end = min(unit + kUnitTokens, block.end);
    for (int first = unit; first < unit_end; first += step.tokens()) {
      const int64_t token = first + step.token();
      const bool here = token < unit_end;
      unsigned bits = 0;
      for (int k = step.k(); k - step.k() < K; k += kWarp) {
        const bool has_pair = here && k < K;
        const int expert = has_pair ? ids[token * K + k] : -1;
        const int position = place_pair(counts + R, expert);
        if (has_pair) at<int32_t>(routing.pair_pos)[token * K + k] = position;
        bits |= step.rank_bit(expert);
      }
      place_tokens(step, R, step.bits_of_token(bits), here, at<int32_t>(routing.send_pos) + token * R, &tokens);
    }
    const int chunk = chunks.of(unit);
    if (lane_id() < R && unit_end == chunks.end(chunk)) meta.send_chunk_end[lane_id() * kMaxChunks + chunk] = tokens;
  }
}

// All threads of a CTA.
__device__ inline void place_block(const Comm& comm, const Routing& routing, Address block_counts, int block) {
  add_up_blocks(comm, block_counts, block);
  if (warp_id() == 0) place_in_order(comm, routing, Block(routing.num_tokens, block));
}

}  // namespace ep::cuda
