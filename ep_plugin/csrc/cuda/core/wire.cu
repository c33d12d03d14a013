// The kernels of `ep-bench wire`: the rates of the links and of the SMs, without an exchange around them. common/wire.h
// describes the arguments.
//
// Roles. Bulk kinds: lane 0 of each warp moves chunks through the warp's stages of shared memory; the other lanes are
// idle. 16-byte kinds: all lanes of a warp move pieces of 4 KiB. Chunks go round the pairs, and consecutive chunks are
// on different SMs, so that all links are in use all the time.
// Buffers. Shared memory has four stages of one chunk for each warp, then an mbarrier for each stage.
// Memory order. A stage is stored when its mbarrier shows that the load is complete, and loaded again when that store
// is complete. A kernel ends when its stores are complete. The benchmark then joins the ranks before it checks.
#include "common/wire.h"

#include "cuda/core/launch.cuh"
#include "cuda/core/sync.cuh"

namespace ep::cuda {

namespace {

constexpr int kBulkStages = 4;
constexpr int kBulkAhead = 2;  // loads that run ahead of the stage that is stored
constexpr int kMaxWarps = 16;  // warps of a CTA
constexpr int kVectors = 8;    // 16-byte accesses of a lane in one piece
constexpr int kPiece = kVectors * kWarp * 16;
constexpr uint64_t kGiveUpNs = 5'000'000'000;

extern __shared__ __align__(128) char wire_shared[];

__device__ __forceinline__ int64_t chunks_of(const WireArgs& args) { return args.bytes / args.chunk_bytes; }
__device__ __forceinline__ int64_t units_of(const WireArgs& args) { return chunks_of(args) * args.num_pairs; }

// A unit is one chunk of one pair.
__device__ __forceinline__ const char* source_of(const WireArgs& args, int64_t unit) {
  return at<const char>(args.from[unit % args.num_pairs], unit / args.num_pairs * args.chunk_bytes);
}
__device__ __forceinline__ char* destination_of(const WireArgs& args, int64_t unit) {
  return at<char>(args.to[unit % args.num_pairs], unit / args.num_pairs * args.chunk_bytes);
}

__global__ void ep_wire_store(const __grid_constant__ WireArgs args) {
  const Team team = team_of_warps();
  for (int64_t unit = team.index; unit < units_of(args); unit += team.size) {
    int4* to = reinterpret_cast<int4*>(destination_of(args, unit));
    const int chunk = static_cast<int>(unit / args.num_pairs);
    const int4 value = make_int4(chunk, args.seed, ~chunk, 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) to[v * kWarp + lane_id()] = value;
  }
  ptx::fence_acq_rel_sys();
}

__global__ void ep_wire_load(const __grid_constant__ WireArgs args) {
  const Team team = team_of_warps();
  int mixed = 0;
  for (int64_t unit = team.index; unit < units_of(args); unit += team.size) {
    const int4* from = reinterpret_cast<const int4*>(source_of(args, unit));
    int4 values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) values[v] = ptx::ld_coherent(from + v * kWarp + lane_id());
    if (args.keep != 0) {
      int4* to = reinterpret_cast<int4*>(destination_of(args, unit));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) to[v * kWarp + lane_id()] = values[v];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) mixed ^= values[v].x ^ values[v].y ^ values[v].z ^ values[v].w;
  }
  // Never true, because `failed` is never null. Without a use, the compiler would remove the loads.
  if (mixed == 0x5EED5EED && args.failed == 0) *at<int>(args.to[0]) = mixed;
}

// One warp's part of shared memory.
struct Stages {
  char* bytes;
  uint64_t* full;
  int stage_bytes;

  __device__ explicit Stages(int chunk_bytes) : stage_bytes(chunk_bytes) {
    const int warps = static_cast<int>(blockDim.x / kWarp);
    bytes = wire_shared + static_cast<int64_t>(warp_id()) * kBulkStages * stage_bytes;
    full = reinterpret_cast<uint64_t*>(wire_shared + static_cast<int64_t>(warps) * kBulkStages * stage_bytes) +
           warp_id() * kBulkStages;
  }
  __device__ char* of(int64_t turn) const { return bytes + turn % kBulkStages * stage_bytes; }
  __device__ void load(int64_t turn, const char* from) const {
    uint64_t* barrier = full + turn % kBulkStages;
    ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(stage_bytes));
    ptx::bulk_load(of(turn), from, static_cast<uint32_t>(stage_bytes), barrier);
  }
  __device__ bool wait(int64_t turn) const {
    const uint32_t parity = static_cast<uint32_t>(turn / kBulkStages % 2);
    if (ptx::mbarrier_try_wait(full + turn % kBulkStages, parity)) return true;
    const uint64_t since = ptx::globaltimer();
    while (!ptx::mbarrier_try_wait(full + turn % kBulkStages, parity))
      if (ptx::globaltimer() - since > kGiveUpNs) return false;
    return true;
  }
};

// Lane 0 of a warp: loads the warp's units, ahead of their turn, and if `store`, stores them from their stages.
__device__ bool move_units(const WireArgs& args, const Stages& stages, const Team& team, bool store) {
  const int64_t units = units_of(args);
  const int64_t turns = team.index < units ? (units - 1 - team.index) / team.size + 1 : 0;
  const int ahead = store ? kBulkAhead : kBulkStages;
  int64_t loaded = 0;
  for (int64_t turn = 0; turn < turns; ++turn) {
    for (; loaded < turns && loaded < turn + ahead; ++loaded) {
      // The store of unit `loaded - kBulkStages` must be complete. The stores after it may be in flight.
      if (store && loaded >= kBulkStages) ptx::bulk_wait<kBulkStages - kBulkAhead>();
      stages.load(loaded, source_of(args, team.index + loaded * team.size));
    }
    if (!stages.wait(turn)) return false;
    if (store) {
      ptx::bulk_store(destination_of(args, team.index + turn * team.size), stages.of(turn),
                      static_cast<uint32_t>(args.chunk_bytes));
      ptx::bulk_commit();
    }
  }
  ptx::bulk_wait<0>();
  return true;
}

__global__ void ep_wire_bulk_load(const __grid_constant__ WireArgs args, bool store) {
  const Stages stages(args.chunk_bytes);
  if (lane_id() != 0) return;
  for (int s = 0; s < kBulkStages; ++s) ptx::mbarrier_init(stages.full + s, 1);
  ptx::fence_mbarrier_init();
  ptx::fence_proxy_async();
  if (!move_units(args, stages, team_of_warps(), store)) ptx::atom_add_acq_rel_gpu(at<uint32_t>(args.failed), 1u);
  ptx::fence_proxy_async();
  ptx::fence_acq_rel_sys();
}

// Stores the same chunk again and again, from each warp's first stage: the rate of stores alone.
__global__ void ep_wire_bulk_store(const __grid_constant__ WireArgs args) {
  const Stages stages(args.chunk_bytes);
  const int4* from = at<const int4>(args.from[0]);
  for (int i = lane_id(); i < args.chunk_bytes / 16; i += kWarp) reinterpret_cast<int4*>(stages.of(0))[i] = from[i];
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane_id() != 0) return;
  const Team team = team_of_warps();
  for (int64_t unit = team.index; unit < units_of(args); unit += team.size) {
    ptx::bulk_store(destination_of(args, unit), stages.of(0), static_cast<uint32_t>(args.chunk_bytes));
    ptx::bulk_commit();
  }
  ptx::bulk_wait<0>();
  ptx::fence_proxy_async();
  ptx::fence_acq_rel_sys();
}

__global__ void ep_hold(const __grid_constant__ HoldArgs args) {
  const uint64_t since = ptx::globaltimer();
  const uint64_t* stop = at<const uint64_t>(args.stop);
  while (ptx::globaltimer() - since < static_cast<uint64_t>(args.nanoseconds) && ptx::ld_relaxed_gpu(stop) == 0)
    __nanosleep(1000);
}

void require_wire(const WireArgs& args) {
  require(args.kind >= kWireStore && args.kind <= kWireEngine, "kind", "0 to 4", args.kind);
  require(args.num_pairs >= 1 && args.num_pairs <= kMaxPairs, "num_pairs", "1 to 16", args.num_pairs);
  require(args.bytes > 0 && args.bytes % 16 == 0, "bytes", "a multiple of 16", args.bytes);
  for (int pair = 0; pair < args.num_pairs; ++pair) {
    require_rows("from", args.from[pair]);
    require_rows("to", args.to[pair]);
  }
  if (args.kind == kWireEngine) return;
  require_sms(args.num_sms);
  require(args.chunk_bytes > 0 && args.chunk_bytes % 16 == 0, "chunk_bytes", "a multiple of 16", args.chunk_bytes);
  require(args.bytes % args.chunk_bytes == 0, "chunk_bytes", "a divisor of bytes", args.chunk_bytes);
  if (args.kind == kWireStore || args.kind == kWireLoad)
    require(args.chunk_bytes == kPiece, "chunk_bytes", "4096 for 16-byte accesses", args.chunk_bytes);
  require(args.failed != 0, "failed", "an address", 0);
}

template <auto kKernel, class... More>
void launch_bulk(const char* name, const WireArgs& args, More... more) {
  const KernelLimits limits = limits_of<kKernel>();
  require(limits.bulk, "device", "one with bulk copies (sm_90 or later)", 0);
  const int64_t per_warp = kBulkStages * (static_cast<int64_t>(args.chunk_bytes) + 8);
  const int64_t fit = limits.shared_bytes / per_warp;
  require(fit >= 1, "chunk_bytes", "four stages of it within shared memory", args.chunk_bytes);
  const int warps = fit < kMaxWarps ? static_cast<int>(fit) : kMaxWarps;
  launch<kKernel>(name, args.num_sms, warps * kWarp, warps * per_warp, args.stream, args, more...);
}

void copy_by_engine(const WireArgs& args) {
  for (int pair = 0; pair < args.num_pairs; ++pair)
    throw_on_error(cudaMemcpyAsync(at<char>(args.to[pair]), at<const char>(args.from[pair]),
                                   static_cast<size_t>(args.bytes), cudaMemcpyDeviceToDevice, stream_of(args.stream)),
                   "cudaMemcpyAsync");
}

}  // namespace

}  // namespace ep::cuda

namespace ep {

void wire(const WireArgs& args) {
  using namespace cuda;
  require_wire(args);
  switch (args.kind) {
    case kWireStore:
      return launch<ep_wire_store>("wire store", args.num_sms, kMaxWarps * kWarp, 0, args.stream, args);
    case kWireLoad:
      return launch<ep_wire_load>("wire load", args.num_sms, kMaxWarps * kWarp, 0, args.stream, args);
    case kWireBulkStore:
      return launch_bulk<ep_wire_bulk_store>("wire bulk store", args);
    case kWireBulkLoad:
      return launch_bulk<ep_wire_bulk_load>("wire bulk load", args, args.keep != 0);
    default:
      return copy_by_engine(args);
  }
}

void hold(const HoldArgs& args) {
  using namespace cuda;
  require_sms(args.num_sms);
  require(args.nanoseconds > 0 && args.nanoseconds <= 1'000'000'000, "nanoseconds", "1 to 1e9", args.nanoseconds);
  require(args.stop != 0 && args.stop % 8 == 0, "stop", "an address that is a multiple of 8",
          static_cast<int64_t>(args.stop));
  // Nearly all shared memory of an SM: no second CTA of this kernel, nor a tile of a matrix product, fits beside it.
  launch<ep_hold>("hold", args.num_sms, kWarp, limits_of<ep_hold>().shared_bytes, args.stream, args);
}

}  // namespace ep
