// Plan: where each of this rank's tokens goes.
//
// Roles. A key is a rank or an expert; one CTA takes a key at a time. Its warps share out the pairs (or tokens) in
// order, count the key's hits in their part, learn from shared memory how many come before, and go over their part
// again to write positions. Positions are running counts in token order, so they do not depend on how many CTAs or
// warps there are. All CTAs together also write the int32 copy of the ids.
// Memory. Nothing is shared between CTAs: each word of send_pos, pair_pos and meta has one writer.
#include "kernels.h"
#include "launch.cuh"
#include "sync.cuh"

namespace ep::cuda {

namespace {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / kWarp;
constexpr int kAtOnce = 4;  // loads in flight per lane

struct Plan {
  const PlanArgs& args;
  Meta meta;
  int num_tokens, topk, num_experts, num_ranks;

  // The pair's expert, or -1: dropped, or not an expert at all.
  __device__ int expert(int64_t pair) const {
    const int64_t id = raw(pair);
    return id >= 0 && id < num_experts ? static_cast<int>(id) : -1;
  }
  __device__ int64_t raw(int64_t pair) const {
    return args.id_bytes == 8 ? at<const int64_t>(args.ids)[pair] : at<const int32_t>(args.ids)[pair];
  }
};

// Numbers [begin, end) of `total` that a warp goes over, in whole steps of 32.
struct Part {
  int64_t begin, end;
};
__device__ Part part_of_warp(int64_t total) {
  const int64_t size = align_up(ceil_div(total, kPlanWarps), kWarp);
  const int64_t begin = min(size * warp_id(), total);
  return Part{begin, min(begin + size, total)};
}

// How many hits the warps before this one have, and how many all have. All threads of the CTA call it.
__device__ int hits_before(int hits, int* total) {
  __shared__ int of_warp[kPlanWarps];
  __syncthreads();
  if (lane_id() == 0) of_warp[warp_id()] = hits;
  __syncthreads();
  int before = 0;
  *total = 0;
  for (int w = 0; w < kPlanWarps; ++w) {
    if (w < warp_id()) before += of_warp[w];
    *total += of_warp[w];
  }
  return before;
}

__device__ __forceinline__ int lanes_below(unsigned mask) { return __popc(mask & ((1u << lane_id()) - 1u)); }

__device__ void plan_expert(const Plan& plan, int expert) {
  const Part part = part_of_warp(static_cast<int64_t>(plan.num_tokens) * plan.topk);
  int32_t* pair_pos = at<int32_t>(plan.args.routing.pair_pos);
  int hits = 0, total;
  for (int64_t pair = part.begin + lane_id(); pair < part.end; pair += kWarp * kAtOnce)
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t p = pair + i * kWarp;
      hits += p < part.end && plan.expert(p) == expert;
    }
  hits = __reduce_add_sync(kAllLanes, hits);
  int position = hits_before(hits, &total);
  for (int64_t base = part.begin; base < part.end; base += kWarp * kAtOnce) {
    bool hit[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t p = base + i * kWarp + lane_id();
      hit[i] = p < part.end && plan.expert(p) == expert;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned mask = __ballot_sync(kAllLanes, hit[i]);
      if (hit[i]) pair_pos[base + i * kWarp + lane_id()] = position + lanes_below(mask);
      position += __popc(mask);
    }
  }
  if (threadIdx.x == 0) plan.meta.expert_count[expert] = total;
}

__device__ bool goes_to(const Plan& plan, int64_t token, int first, int past) {
  if (token >= plan.num_tokens) return false;
  bool hit = false;
  for (int k = 0; k < plan.topk; ++k) {
    const int expert = plan.expert(token * plan.topk + k);
    hit |= expert >= first && expert < past;
  }
  return hit;
}

__device__ void plan_rank(const Plan& plan, int rank) {
  const int per_rank = plan.num_experts / plan.num_ranks, chunk = chunk_tokens(plan.num_tokens);
  const int first = rank * per_rank, past = first + per_rank;
  const Part part = part_of_warp(plan.num_tokens);
  int32_t* send_pos = at<int32_t>(plan.args.routing.send_pos);
  int hits = 0, total;
  for (int64_t token = part.begin + lane_id(); token < part.end; token += kWarp)
    hits += goes_to(plan, token, first, past);
  hits = __reduce_add_sync(kAllLanes, hits);
  int position = hits_before(hits, &total);
  for (int64_t base = part.begin; base < part.end; base += kWarp) {
    const int64_t token = base + lane_id();
    const bool hit = token < part.end && goes_to(plan, token, first, past);
    const unsigned mask = __ballot_sync(kAllLanes, hit);
    if (token < part.end) send_pos[token * plan.num_ranks + rank] = hit ? position + lanes_below(mask) : -1;
    position += __popc(mask);
    const int64_t end = base + kWarp;  // a chunk is whole steps long
    if (lane_id() == 0 && (end % chunk == 0 || end >= plan.num_tokens))
      plan.meta.send_chunk_end[rank * kMaxChunks + base / chunk] = position;
  }
  if (threadIdx.x == 0) plan.meta.rank_count[rank] = total;
}

// The int32 copy of the ids; pairs that go nowhere get no position from any key.
__device__ void copy_ids(const Plan& plan) {
  const Comm& comm = plan.args.comm;
  int32_t* ids = at<int32_t>(plan.args.routing.topk_ids);
  int32_t* pair_pos = at<int32_t>(plan.args.routing.pair_pos);
  const int64_t pairs = static_cast<int64_t>(plan.num_tokens) * plan.topk;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; p < pairs;
       p += gridDim.x * blockDim.x) {
    const int64_t id = plan.raw(p);
    const int expert = plan.expert(p);
    ids[p] = expert;
    if (expert >= 0) continue;
    pair_pos[p] = -1;
    if (id != -1) fail(comm, kBadIds, kPlan, comm.rank, static_cast<int>(p / plan.topk), plan.num_experts, id);
  }
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanArgs args) {
  const Run run = enter(args.comm, kPlan);
  if (!run.ok) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(run);
  const Plan plan{args,
                  meta_of(args.comm, args.routing),
                  args.routing.num_tokens,
                  args.routing.topk,
                  args.comm.num_experts,
                  args.comm.num_ranks};
  copy_ids(plan);
  for (int key = blockIdx.x; key < plan.num_ranks + plan.num_experts; key += gridDim.x) {
    if (key < plan.num_ranks)
      plan_rank(plan, key);
    else
      plan_expert(plan, key - plan.num_ranks);
  }
}

}  // namespace

void plan(const PlanArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_sms(args.num_sms);
  require(args.id_bytes == 4 || args.id_bytes == 8, "id_bytes", "4 or 8", args.id_bytes);
  const int64_t keys = static_cast<int64_t>(args.comm.num_ranks) + args.comm.num_experts;
  launch<plan_kernel>("plan", std::min<int64_t>(keys, args.num_sms), kPlanThreads, 0, args.stream, args);
}

}  // namespace ep::cuda
