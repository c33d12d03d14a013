// Plan: counts, for each block of tokens, the tokens for each rank and the pairs for each expert. Notify computes the
// positions while it exchanges counts, because the exchange needs only the counts.
//
// Roles. Each CTA counts one block of tokens in shared memory, and writes the int32 copy of the block's ids.
// Buffers. block_counts[block] is the tokens for each rank, then the pairs for each expert (common/layout.h).
// Memory order. Each word has one writer. Notify reads the words after this kernel has ended.
#include "common/nodes.h"
#include "cuda/core/launch.cuh"
#include "cuda/moe/kernels.h"
#include "cuda/moe/tokens.cuh"

namespace ep::cuda {

namespace {

constexpr int kPlanThreads = 256;

// Returns the pair's expert on this node, or -1 if the pair is dropped. An id that is no expert is a fault, and counts
// as dropped.
__device__ int read_expert(const PlanArgs& args, int token, int64_t pair) {
  if (is_padding(args, token)) return -1;
  const int64_t id = args.id_bytes == 8 ? at<const int64_t>(args.ids)[pair] : at<const int32_t>(args.ids)[pair];
  const int num_experts = num_experts_of(args);
  if (id >= 0 && id < num_experts) return on_this_node(args, static_cast<int>(id));
  if (id != -1) fail(args.comm, kBadIds, kPlan, args.comm.rank, token, num_experts, id);
  return -1;
}

// Counts the tokens for ranks [base, base + 32). The first of these passes also counts the pairs, and copies the ids.
template <bool kFirst>
__device__ __forceinline__ void count_block(const PlanArgs& args, const Block& block, int base) {
  const WarpTokens warp(args.comm, args.routing.topk);
  const int ranks = min(args.comm.num_ranks - base, kWarp), warps = kPlanThreads / kWarp;
  int tokens = 0;  // in lane r: tokens for rank base + r
  for (int first = block.begin + warp_id() * warp.tokens(); first < block.end; first += warps * warp.tokens()) {
    const int token = first + warp.token();
    unsigned bits = 0;
    for (int k = warp.k(); k - warp.k() < warp.topk; k += kWarp) {
      if (token >= block.end || k >= warp.topk) continue;
      const int64_t pair = static_cast<int64_t>(token) * warp.topk + k;
      int32_t* id = at<int32_t>(args.routing.topk_ids) + pair;
      const int expert = kFirst ? read_expert(args, token, pair) : *id;
      bits |= warp.rank_bit(expert, base);
      if (!kFirst) continue;
      *id = expert;
      if (expert >= 0) atomicAdd(&counts[args.comm.num_ranks + expert], 1);
    }
    __syncwarp();
    bits = warp.bits_of_token(bits);
    for (int r = 0; r < ranks; ++r) {
      const unsigned mask = __ballot_sync(kAllLanes, warp.k() == 0 && (bits >> r & 1u));
      if (lane_id() == r) tokens += __popc(mask);
    }
  }
  if (tokens > 0) atomicAdd(&counts[base + lane_id()], tokens);
}

__global__ void __launch_bounds__(kPlanThreads) ep_plan(const __grid_constant__ PlanArgs args) {
  ptx::launch_dependents();
  const Run run = enter(args.comm, kPlan);
  if (!run.ok) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (follows_messages(args)) {
      uint64_t* waits = at<uint64_t>(args.nodes.waits);
      waits[kWaited] = ptx::globaltimer() - waits[kMessagesWritten];
    }
    hold_at_gate(run);
  }
  const int64_t words = plan_block_words(args.comm.num_ranks, args.comm.num_experts);
  for (int i = threadIdx.x; i < words; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const Block block(args.routing.num_tokens, blockIdx.x);
  count_block<true>(args, block, 0);
  for (int base = kWarp; base < args.comm.num_ranks; base += kWarp) count_block<false>(args, block, base);
  __syncthreads();
  int32_t* of_block = at<int32_t>(args.block_counts) + blockIdx.x * words;
  for (int i = threadIdx.x; i < words; i += blockDim.x) of_block[i] = counts[i];
}

}  // namespace

void plan(const PlanArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require(args.id_bytes == 4 || args.id_bytes == 8, "id_bytes", "4 or 8", args.id_bytes);
  require(num_keys(args.comm) <= kMaxKeys, "num_experts", "at most 8000 with the ranks on CUDA", num_keys(args.comm));
  require(args.routing.num_tokens <= kMaxTokens, "num_tokens", "at most 29826161 with the ranks on CUDA",
          args.routing.num_tokens);
  require_rows("block_counts", args.block_counts);
  const int64_t words = plan_block_words(args.comm.num_ranks, args.comm.num_experts);
  launch<ep_plan>("plan", plan_blocks(args.routing.num_tokens), kPlanThreads, 4 * words, args.stream, args);
}

}  // namespace ep::cuda
