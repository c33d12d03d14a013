// Pack: copies rows, weights, scales and ids of this rank's tokens into the buffers that a rail sends.
//
// Roles. The warps of the grid share the tokens. One lane per node reads the token's place in the buffers. All lanes
// load a part of the token, then store it once for each node that it goes to.
// Memory order. The kernel touches this rank's memory only, and waits for nothing.
#include "cuda/core/copy.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kWarps = 16;  // warps of a CTA

// One warp copies `bytes` bytes to rows of `to`: row `place` of each lane in `nodes`.
template <class Unit>
__device__ __forceinline__ void copy_units_to(const char* from, char* to, int64_t bytes, unsigned nodes,
                                              int32_t place) {
  const Unit* source = reinterpret_cast<const Unit*>(from) + lane_id();
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t base = 0; base < count; base += kWarp * kVectorsAtOnce) {
    Unit held[kVectorsAtOnce];
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; ++i)
      if (base + i * kWarp + lane_id() < count) held[i] = source[base + i * kWarp];
    for (unsigned left = nodes; left != 0; left &= left - 1) {
      const int64_t row = __shfl_sync(kAllLanes, place, __ffs(left) - 1);
      Unit* target = reinterpret_cast<Unit*>(to + row * bytes) + lane_id();
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i)
        if (base + i * kWarp + lane_id() < count) target[base + i * kWarp] = held[i];
    }
  }
}

// Does so in the widest units that the addresses allow. `from`: the tensor, with tokens `stride` bytes apart; 0: copies
// nothing.
__device__ void copy_to(Address from, int64_t stride, int64_t token, Address to, int64_t bytes, unsigned nodes,
                        int32_t place) {
  if (from == 0) return;
  const char* source = at<char>(from, token * stride);
  const uint64_t low = reinterpret_cast<uint64_t>(source) | to | static_cast<uint64_t>(bytes);
  if (low % 16 == 0)
    copy_units_to<int4>(source, at<char>(to), bytes, nodes, place);
  else if (low % 4 == 0)
    copy_units_to<int32_t>(source, at<char>(to), bytes, nodes, place);
  else
    copy_units_to<char>(source, at<char>(to), bytes, nodes, place);
}

// Returns this lane's place for the token, or -1.
__device__ int32_t place_of(const PackArgs& args, int64_t token, int node) {
  if (node >= args.num_nodes) return -1;
  const int32_t place = at<const int32_t>(args.rail_rows)[token * args.num_nodes + node];
  if (place >= -1 && place < args.num_rows) return place;
  fail(args.comm, kBadHandle, kPack, args.comm.rank, static_cast<int>(token), args.num_rows, place);
  return -1;
}

__global__ void __launch_bounds__(kWarps* kWarp) ep_pack(const __grid_constant__ PackArgs args) {
  if (!enter(args.comm, kPack).ok) return;
  const Team team = team_of_warps();
  const int64_t id_bytes = 4 * static_cast<int64_t>(args.topk);
  for (int64_t token = team.index; token < args.num_tokens; token += team.size) {
    for (int first = 0; first < args.num_nodes; first += kWarp) {
      const int32_t place = place_of(args, token, first + lane_id());
      const unsigned nodes = __ballot_sync(kAllLanes, place >= 0);
      if (nodes == 0) continue;
      copy_to(args.x, args.x_stride, token, args.rows, args.row_bytes, nodes, place);
      copy_to(args.weights, args.weight_bytes, token, args.packed_weights, args.weight_bytes, nodes, place);
      copy_to(args.scales, args.scale_stride, token, args.packed_scales, args.scale_bytes, nodes, place);
      copy_to(args.ids, id_bytes, token, args.packed_ids, id_bytes, nodes, place);
    }
  }
}

void require_part(const char* what, Address from, int64_t bytes, Address to) {
  if (from == 0) return;
  require(bytes >= 1 && bytes <= kMaxRowBytes, what, "1 to 2**29 bytes of each token", bytes);
  require(to != 0, what, "an address to copy to", 0);
}

}  // namespace

void pack(const PackArgs& args) {
  require_comm(args.comm);
  require_sms(args.num_sms);
  require(args.num_tokens >= 0, "num_tokens", "0 or more", args.num_tokens);
  require(args.num_nodes >= 1, "num_nodes", "1 or more", args.num_nodes);
  require(args.num_rows >= 0, "num_rows", "0 or more", args.num_rows);
  if (args.num_tokens == 0) return;
  require(args.rail_rows != 0, "rail_rows", "an address", 0);
  if (args.num_rows > 0) {
    require_part("rows", args.x, args.row_bytes, args.rows);
    require_part("weights", args.weights, args.weight_bytes, args.packed_weights);
    require_part("scales", args.scales, args.scale_bytes, args.packed_scales);
    require_part("ids", args.ids, 4 * static_cast<int64_t>(args.topk), args.packed_ids);
  }
  launch<ep_pack>("pack", args.num_sms, kWarps * kWarp, 0, args.stream, args);
}

}  // namespace ep::cuda
