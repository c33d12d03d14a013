// Backward of combine's weights: the dot product of each row's gradient and the row that was combined. Then the
// gradient is multiplied by the row's weight, in place. Both rows are read once; the gradient is written once.
//
// Roles. The warps of the grid share the rows. Each lane sums its vectors in order, and a fixed tree adds the sums of
// the lanes. So the same rows give the same bits.
// Memory order. The kernel touches this rank's memory only, and waits for nothing.
#include "cuda/core/element.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/ptx.cuh"
#include "cuda/core/sync.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kWarps = 8;         // warps of a CTA
constexpr int kVectorsAhead = 4;  // vectors of each row that a lane loads at a time
constexpr int64_t kMaxCtas = 4096;

template <class Element>
__global__ void __launch_bounds__(kWarps* kWarp) ep_weight_grad(const __grid_constant__ WeightGradArgs args) {
  constexpr int kPer = Element::kPerVector;
  const int64_t vectors = args.hidden / kPer;
  for (int64_t row = blockIdx.x * int64_t{kWarps} + warp_id(); row < args.num_rows;
       row += gridDim.x * int64_t{kWarps}) {
    const int4* y = at<const int4>(args.y) + row * vectors;
    int4* rows = at<int4>(args.rows) + row * vectors;
    const float factor = at<const float>(args.factors)[row];
    float sum = 0.0f;
    for (int64_t first = lane_id(); first < vectors; first += kWarp * kVectorsAhead) {
      int4 ours[kVectorsAhead], theirs[kVectorsAhead];
#pragma unroll
      for (int v = 0; v < kVectorsAhead; ++v) {
        const int64_t vector = first + v * kWarp;
        ours[v] = vector < vectors ? y[vector] : make_int4(0, 0, 0, 0);
        theirs[v] = vector < vectors ? rows[vector] : make_int4(0, 0, 0, 0);
      }
#pragma unroll
      for (int v = 0; v < kVectorsAhead; ++v) {
        float a[kPer], b[kPer];
        Element::widen(a, ours[v]);
        Element::widen(b, theirs[v]);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          sum = fmaf(a[i], b[i], sum);
          b[i] *= factor;
        }
        const int64_t vector = first + v * kWarp;
        if (vector < vectors) rows[vector] = Element::narrow(b);
      }
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (lane_id() == 0) at<float>(args.dots)[row] = sum;
  }
}

template <class Element>
void launch_weight_grad(const WeightGradArgs& args) {
  const int64_t ctas = ceil_div(args.num_rows, kWarps);
  launch<ep_weight_grad<Element>>("weight_grad", ctas < kMaxCtas ? ctas : kMaxCtas, kWarps * kWarp, 0, args.stream,
                                  args);
}

}  // namespace

void weight_grad(const WeightGradArgs& args) {
  require(args.num_rows >= 0, "num_rows", "0 or more", args.num_rows);
  if (args.num_rows == 0) return;
  require(args.hidden > 0 && args.hidden * (args.element == kFloat32 ? 4 : 2) % kRowAlign == 0, "hidden",
          "rows of a positive multiple of 16 bytes", args.hidden);
  require_rows("y", args.y);
  require_rows("rows", args.rows);
  switch (args.element) {
    case kFloat32:
      return launch_weight_grad<Float32>(args);
    case kBFloat16:
      return launch_weight_grad<BFloat16>(args);
    case kFloat16:
      return launch_weight_grad<Float16>(args);
  }
  throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                              std::to_string(args.element));
}

}  // namespace ep::cuda
