// Combine add: adds the sums of a token's nodes to the bias, in the order of the nodes.
//
// Roles. The warps of the grid share the pieces of the tokens' rows. A piece's sums stay in registers (reduce.cuh), and
// are rounded once. The warp with a token's first piece also adds the values beside the row.
// Memory order. The kernel touches this rank's memory only, and waits for nothing.
// After a fault. All outputs are filled with 0xFF bytes.
#include "cuda/core/copy.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/moe/kernels.h"
#include "cuda/moe/reduce.cuh"

namespace ep::cuda {

namespace {

constexpr int kWarps = 16;  // warps of a CTA
constexpr int64_t kPieceBytes = kLaneVectors * kLanesBytes;

// Returns this lane's place for the token, or -1. This rank's node has no place.
__device__ int32_t place_of(const CombineAddArgs& args, int64_t token, int node) {
  if (node >= args.num_nodes || node == args.node) return -1;
  const int32_t place = at<const int32_t>(args.rail_rows)[token * args.num_nodes + node];
  if (place >= -1 && place < args.num_rows) return place;
  fail(args.comm, kBadHandle, kCombineAdd, args.comm.rank, static_cast<int>(token), args.num_rows, place);
  return -1;
}

// One warp calls add(row) for each row of the token, in the order of the nodes. `own` and `landed` have rows of `bytes`
// bytes.
template <class Add>
__device__ __forceinline__ void add_nodes(const CombineAddArgs& args, int64_t token, Address own, Address landed,
                                          int64_t bytes, Add add) {
  for (int first = 0; first < args.num_nodes; first += kWarp) {
    const int node = first + lane_id();
    const int32_t place = place_of(args, token, node);
    for (unsigned left = __ballot_sync(kAllLanes, place >= 0 || node == args.node); left != 0; left &= left - 1) {
      const int lane = __ffs(left) - 1;
      const int64_t row = __shfl_sync(kAllLanes, place, lane);
      add(first + lane == args.node ? at<char>(own, token * bytes) : at<char>(landed, row * bytes));
    }
  }
}

template <class Element>
__device__ void add_piece(const CombineAddArgs& args, int64_t token, int64_t row_bytes, int64_t begin) {
  const int64_t left = row_bytes - begin;
  const int vectors = static_cast<int>((left < kPieceBytes ? left : kPieceBytes) / kVectorBytes);
  Sums<Element, 0> sums;
  const Bias bias = bias_of(args.bias, args.wide_bias != 0, token, args.hidden, row_bytes);
  if (bias.from == nullptr)
    sums.clear();
  else
    sums.start(bias, begin, vectors);
  add_nodes(args, token, args.own, args.landed, row_bytes,
            [&](const char* row) { sums.template add<true>(row + begin, vectors, 1.0f); });
  sums.store(at<char>(args.out, token * row_bytes + begin), vectors);
}

__device__ void add_extra(const CombineAddArgs& args, int64_t token) {
  const int64_t K = args.topk;
  for (int64_t k = lane_id(); k - lane_id() < K; k += kWarp) {
    float sum = 0.0f;
    add_nodes(args, token, args.own_extra, args.landed_extra, 4 * K,
              [&](const char* row) { sum += k < K ? reinterpret_cast<const float*>(row)[k] : 0.0f; });
    if (k < K) at<float>(args.extra_out)[token * K + k] = sum;
  }
}

template <class Element>
__global__ void __launch_bounds__(kWarps* kWarp, 1) ep_combine_add(const __grid_constant__ CombineAddArgs args) {
  const Run run = enter(args.comm, kCombineAdd);
  const int64_t row_bytes = args.hidden / Element::kPerVector * kVectorBytes;
  if (run.ok) {
    const Team team = team_of_warps();
    const int64_t pieces = ceil_div(row_bytes, kPieceBytes);
    for (int64_t item = team.index; item < args.num_tokens * pieces; item += team.size) {
      const int64_t token = item / pieces, piece = item % pieces;
      add_piece<Element>(args, token, row_bytes, piece * kPieceBytes);
      if (piece == 0 && args.own_extra != 0) add_extra(args, token);
    }
  }
  if (!last_to_finish(run) || !__syncthreads_or(faulted(args.comm))) return;
  const int64_t tokens = args.num_tokens;
  fill_bytes(args.out, tokens * row_bytes, 0xFF, threadIdx.x, blockDim.x);
  if (args.own_extra != 0) fill_bytes(args.extra_out, tokens * args.topk * 4, 0xFF, threadIdx.x, blockDim.x);
}

template <class Element>
void launch_combine_add(const CombineAddArgs& args) {
  require(args.hidden > 0 && args.hidden % Element::kPerVector == 0, "hidden",
          "rows of a positive multiple of 16 bytes", args.hidden);
  launch<ep_combine_add<Element>>("combine_add", args.num_sms, kWarps * kWarp, 0, args.stream, args);
}

}  // namespace

void combine_add(const CombineAddArgs& args) {
  require_comm(args.comm);
  require_sms(args.num_sms);
  require(args.num_tokens >= 0, "num_tokens", "0 or more", args.num_tokens);
  require(args.num_nodes >= 1, "num_nodes", "1 or more", args.num_nodes);
  require(args.node >= 0 && args.node < args.num_nodes, "node", "one of the nodes", args.node);
  require(args.num_rows >= 0, "num_rows", "0 or more", args.num_rows);
  if (args.num_tokens == 0) return;
  require(args.rail_rows != 0, "rail_rows", "an address", 0);
  require_rows("own", args.own);
  require_rows("landed", args.landed);
  require_rows("bias", args.bias);
  require_rows("out", args.out);
  if (args.own_extra != 0) {
    require(args.topk >= 1 && args.topk <= kMaxTopk, "topk", "1 to 128", args.topk);
    require(args.extra_out != 0, "extra_out", "an address", 0);
    require(args.landed_extra != 0 || args.num_rows == 0, "landed_extra", "an address", 0);
  }
  switch (args.element) {
    case kFloat32:
      return launch_combine_add<Float32>(args);
    case kBFloat16:
      return launch_combine_add<BFloat16>(args);
    case kFloat16:
      return launch_combine_add<Float16>(args);
  }
  throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                              std::to_string(args.element));
}

}  // namespace ep::cuda
