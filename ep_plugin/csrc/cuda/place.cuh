// The part of notify that waits for nobody: every token's position among those for its ranks, and every pair's among
// those for its expert. Positions are running counts in token order.
//
// Roles. A CTA places one block of tokens: all its warps add up the counts of the blocks before it, then one warp goes
// over the block in order.
#pragma once
#include "tokens.cuh"

namespace ep::cuda {

__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1u; }

constexpr int kVectorsToAdd = 8;  // of block counts, that a thread has under way

// All threads: `counts` become the sums over blocks [0, end). Joins the CTA.
__device__ inline void add_up_blocks(const Comm& comm, Address block_counts, int end) {
  const unsigned vectors = static_cast<unsigned>(plan_block_words(comm.num_ranks, comm.num_experts) / 4);
  const unsigned all = vectors * static_cast<unsigned>(end);  // they lie one behind the other
  for (unsigned i = threadIdx.x; i < 4 * vectors; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (unsigned base = threadIdx.x; base < all; base += kVectorsToAdd * blockDim.x) {
    int4 held[kVectorsToAdd];
#pragma unroll
    for (unsigned j = 0; j < kVectorsToAdd; ++j) {
      const unsigned i = base + j * blockDim.x;
      held[j] = i < all ? at<const int4>(block_counts)[i] : make_int4(0, 0, 0, 0);
    }
#pragma unroll
    for (unsigned j = 0; j < kVectorsToAdd; ++j) {
      int32_t* to = counts + (base + j * blockDim.x) % vectors * 4;
      if (held[j].x != 0) atomicAdd(to, held[j].x);
      if (held[j].y != 0) atomicAdd(to + 1, held[j].y);
      if (held[j].z != 0) atomicAdd(to + 2, held[j].z);
      if (held[j].w != 0) atomicAdd(to + 3, held[j].w);
    }
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

constexpr int kStepsAtOnce = 8;  // whose ids are loaded together: one after the other they would take most of the time

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
    for (int first = unit; first < unit_end; first += kStepsAtOnce * step.tokens()) {
      int32_t held[kStepsAtOnce];  // ids of the lane's first pair in each step
#pragma unroll
      for (int j = 0; j < kStepsAtOnce; ++j) {
        const int64_t token = first + j * step.tokens() + step.token();
        held[j] = token < unit_end && step.k() < K ? ids[token * K + step.k()] : -1;
      }
#pragma unroll
      for (int j = 0; j < kStepsAtOnce; ++j) {
        if (first + j * step.tokens() >= unit_end) break;
        const int64_t token = first + j * step.tokens() + step.token();
        const bool here = token < unit_end;
        unsigned bits = 0;
        for (int k = step.k(); k - step.k() < K; k += kWarp) {
          const bool has_pair = here && k < K;
          const int expert = k == step.k() ? held[j] : has_pair ? ids[token * K + k] : -1;
          const int position = place_pair(counts + R, expert);
          if (has_pair) at<int32_t>(routing.pair_pos)[token * K + k] = position;
          bits |= step.rank_bit(expert);
        }
        place_tokens(step, R, step.bits_of_token(bits), here, at<int32_t>(routing.send_pos) + token * R, &tokens);
      }
    }
    const int chunk = chunks.of(unit);
    if (lane_id() < R && unit_end == chunks.end(chunk)) meta.send_chunk_end[lane_id() * kMaxChunks + chunk] = tokens;
  }
}

// All threads of a CTA. Where plan has failed, its CTAs may have written neither ids nor counts: sums of whatever lies
// there do no harm, and nothing is looked up by such ids.
__device__ inline void place_block(const Comm& comm, const Routing& routing, Address block_counts, int block) {
  const bool failed = faulted(comm);
  add_up_blocks(comm, block_counts, block);
  if (warp_id() == 0 && !__any_sync(kAllLanes, failed)) place_in_order(comm, routing, Block(routing.num_tokens, block));
}

}  // namespace ep::cuda
