// Place: gives the rows of a dispatch over several nodes their places in the rail's buffers and in the output.
//
// Roles. CTA 0 places the rows of the output. A warp takes one kind of rows at a time: the slots, or the pairs for one
// local expert. First all kinds are counted, then every kind gets its first row, and then every source. Its first warp
// also counts who was late (NodeWaits). The other CTAs place the rows that leave: each computes where the rows of every
// leg begin, and adds that to its part of rail_rows.
// Memory order. The kernel touches this rank's memory only, and waits for nothing. Each word has one writer at a time:
// the lanes of a warp, which meet between two writes.
#include <algorithm>

#include "common/nodes.h"
#include "cuda/core/launch.cuh"
#include "cuda/core/sync.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

// CTA 0: int64 [1 + E_l] rows of each kind, then [2 + E_l] where they begin. Other CTAs: where the legs begin, [C][N].
extern __shared__ __align__(128) char dynamic_shared[];

namespace {

constexpr int kPlaceThreads = 512;
constexpr int kMaxSenders = 64;  // CTAs for the rows that leave

__device__ int64_t* shared_words() { return reinterpret_cast<int64_t*>(dynamic_shared); }

// One warp: the rows of one kind.
__device__ int64_t count_rows(const PlaceArgs& args, int local) {
  int64_t sum = 0;
  for (int first = 0; first < num_output_sources(args); first += kWarp) {
    OutputSource source;
    const int number = first + lane_id();
    const bool exists = number < num_output_sources(args) && output_source(args, number, &source);
    const int32_t rows = exists ? source.rows(args.comm, local) : 0;
    sum += __shfl_sync(kAllLanes, sum_through(rows), kWarp - 1);
  }
  return sum;
}

// One warp: writes where the rows of one kind begin in the output, from `start` on.
__device__ void place_received(const PlaceArgs& args, int local, int64_t start) {
  const int R = args.comm.num_ranks, segments = args.nodes.num_chunks + 1;
  for (int i = lane_id(); i < segments * R; i += kWarp) begin_bases(args, i / R, i % R, local);
  __syncwarp();
  for (int first = 0; first < num_output_sources(args); first += kWarp) {
    OutputSource source;
    const int number = first + lane_id();
    const bool exists = number < num_output_sources(args) && output_source(args, number, &source);
    const int32_t rows = exists ? source.rows(args.comm, local) : 0;
    const int32_t through = sum_through(rows);
    if (exists) source.base(args.comm, local) += static_cast<int32_t>(start + through - rows);
    start += __shfl_sync(kAllLanes, through, kWarp - 1);
  }
}

// One warp: writes a value of all segments.
template <class Write>
__device__ void write_segments(const PlaceArgs& args, Write write) {
  for (int segment = lane_id(); segment <= args.nodes.num_chunks; segment += kWarp) write(segment_meta(args, segment));
}

// All threads of CTA 0.
__device__ void place_output(const PlaceArgs& args) {
  const int kinds = 1 + local_experts(args.comm), warps = kPlaceThreads / kWarp;
  int64_t *rows = shared_words(), *starts = rows + kinds;
  for (int kind = warp_id(); kind < kinds; kind += warps) {
    const int64_t count = count_rows(args, kind - 1);
    if (lane_id() == 0) rows[kind] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t start = 0;
    starts[0] = 0;
    for (int kind = 1; kind < kinds; ++kind) {
      starts[kind] = start;
      start += align_up(rows[kind], args.alignment);
    }
    starts[kinds] = start;
    if (start > INT32_MAX) fail(args.comm, kTooSmall, kPlan, args.comm.rank, 1, INT32_MAX, start);
  }
  __syncthreads();
  for (int kind = warp_id(); kind < kinds; kind += warps) {
    const int local = kind - 1;
    place_received(args, local, starts[kind]);
    if (kind == 0) {
      const int32_t* rail_overflow = segment_meta(args, 1).rail_overflow;
      write_segments(args, [&](const Meta& meta) {
        for (int i = 0; i < kRailOverflowWords; ++i) meta.rail_overflow[i] = rail_overflow[i];
        *meta.token_rows = static_cast<int32_t>(rows[0]);
        meta.expert_offset[kinds - 1] = static_cast<int32_t>(starts[kinds]);
      });
    } else {
      write_segments(args, [&](const Meta& meta) {
        meta.expert_offset[local] = static_cast<int32_t>(starts[kind]);
        meta.expert_rows[local] = static_cast<int32_t>(rows[kind]);
      });
    }
  }
}

// One warp: counts what this rank has waited longer than the rank of its rail that came last, one of them if several
// did.
__device__ void count_wait(const PlaceArgs& args) {
  const int N = num_nodes_of(args.comm, args.nodes);
  int64_t least = INT64_MAX;
  int last = 0;
  for (int node = lane_id(); node < N; node += kWarp) {
    const int64_t waited = waited_of(args, node);
    if (waited < least) {
      least = waited;
      last = node;
    }
  }
  const int64_t of_all = -max_of_warp(-least);
  const int lane = __ffs(__ballot_sync(kAllLanes, least == of_all)) - 1;
  last = __shfl_sync(kAllLanes, last, lane);
  if (lane_id() == 0) at<int64_t>(args.nodes.waits)[kWaitedFor + last] += waited_of(args, args.nodes.node) - of_all;
}

// One warp: where the rows of each leg begin, [C][N].
__device__ void begin_legs(const PlaceArgs& args, int64_t* begins) {
  const int N = num_nodes_of(args.comm, args.nodes), legs = args.nodes.num_chunks * (N - 1);
  int64_t start = 0;
  for (int first = 0; first < legs; first += kWarp) {
    const int leg = first + lane_id();
    const int32_t rows = leg < legs ? static_cast<int32_t>(rows_of_leg(args, leg)) : 0;
    const int32_t through = sum_through(rows);
    if (leg < legs) begins[leg / (N - 1) * N + node_of_leg(args, leg)] = start + through - rows;
    start += __shfl_sync(kAllLanes, through, kWarp - 1);
  }
}

// All threads of the other CTAs.
__device__ void place_sent(const PlaceArgs& args) {
  const int N = num_nodes_of(args.comm, args.nodes), C = args.nodes.num_chunks, T = args.num_tokens;
  if (warp_id() == 0) begin_legs(args, shared_words());
  __syncthreads();
  const int64_t threads = static_cast<int64_t>(gridDim.x - 1) * kPlaceThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x - 1) * kPlaceThreads + threadIdx.x;
  for (int64_t i = first; i < static_cast<int64_t>(T) * N; i += threads) {
    const int token = static_cast<int>(i / N), node = static_cast<int>(i % N);
    int chunk = static_cast<int>(static_cast<int64_t>(token) * C / T);  // or a later one
    while (chunk + 1 < C && token >= chunk_begin(T, chunk + 1, C)) ++chunk;
    int32_t& row = at<int32_t>(args.rail_rows)[i];
    if (row >= 0) row += static_cast<int32_t>(shared_words()[chunk * N + node]);
  }
}

__global__ void __launch_bounds__(kPlaceThreads) ep_place(const __grid_constant__ PlaceArgs args) {
  if (!enter(args.comm, kPlan).ok) return;
  if (blockIdx.x == 0) {
    if (args.nodes.waits != 0 && warp_id() == 0) count_wait(args);
    place_output(args);
  } else {
    place_sent(args);
  }
}

}  // namespace

void place(const PlaceArgs& args) {
  require_comm(args.comm);
  require(args.nodes.rank_place != 0, "rank_place", "an address", 0);
  require(args.nodes.num_ranks >= 2 * args.comm.num_ranks, "num_ranks", "those of several nodes", args.nodes.num_ranks);
  require(args.nodes.num_chunks >= 1, "num_chunks", "1 or more", args.nodes.num_chunks);
  require(args.alignment >= 1, "alignment", "1 or more", args.alignment);
  require(args.metas != 0 && args.messages != 0, "metas", "addresses", 0);
  const int64_t N = num_nodes_of(args.comm, args.nodes), cells = N * args.num_tokens;
  const int64_t kinds = 2 * (1 + static_cast<int64_t>(local_experts(args.comm))) + 1, legs = N * args.nodes.num_chunks;
  const int64_t senders = std::min<int64_t>(ceil_div(cells, 4 * kPlaceThreads), kMaxSenders);
  const int64_t bytes = 8 * std::max(kinds, legs), most = limits_of<ep_place>().shared_bytes;
  require(bytes <= most, "num_experts, num_nodes", "as many as fit in shared memory", bytes);
  launch<ep_place>("place", 1 + senders, kPlaceThreads, bytes, args.stream, args);
}

}  // namespace ep::cuda
