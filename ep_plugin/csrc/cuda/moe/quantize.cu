// Quantise: rows become e4m3 with scales, before they are packed for a rail. cuda/core/quantize.cuh has the arithmetic
// of dispatch send, so both give the same bits.
//
// Roles. The warps of the grid share the rows; a warp quantises one row at a time.
// Memory order. The kernel touches this rank's memory only, and waits for nothing.
#include "cuda/core/launch.cuh"
#include "cuda/core/quantize.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kWarps = 8;  // warps of a CTA
constexpr int64_t kMaxCtas = 4096;

template <class From>
__global__ void __launch_bounds__(kWarps* kWarp) ep_quantize(const __grid_constant__ QuantizeArgs args) {
  const int64_t scale_bytes = quantized_scale_bytes(args.hidden);
  for (int64_t row = blockIdx.x * int64_t{kWarps} + warp_id(); row < args.num_rows;
       row += gridDim.x * int64_t{kWarps}) {
    QuantizedRow<From> quantized(at<char>(args.x, row * args.x_stride), args.hidden);
    const uint64_t image = args.rows + row * args.hidden;
    SlotLayout lay{};  // the row is the whole image; its scales are elsewhere
    lay.scales = static_cast<int64_t>(args.scales + row * scale_bytes - image);
    quantized.write(&image, 1, lay);
  }
}

template <class From>
void launch_quantize(const QuantizeArgs& args) {
  const int64_t ctas = ceil_div(args.num_rows, kWarps);
  launch<ep_quantize<From>>("quantize", ctas < kMaxCtas ? ctas : kMaxCtas, kWarps * kWarp, 0, args.stream, args);
}

}  // namespace

void quantize(const QuantizeArgs& args) {
  require_quantizable(args.element);
  require(args.num_rows >= 0, "num_rows", "0 or more", args.num_rows);
  if (args.num_rows == 0) return;
  require(args.hidden > 0 && args.hidden <= kMaxRowBytes && args.hidden % kRowAlign == 0, "hidden",
          "a multiple of 16, at most 2**29", args.hidden);
  require_rows("x", args.x, args.num_rows > 1 ? args.x_stride : 0);
  require_rows("rows", args.rows);
  require(args.scales != 0 && args.scales % kScaleBytes == 0, "scales", "an address that is a multiple of 4",
          static_cast<int64_t>(args.scales));
  if (args.element == kBFloat16) return launch_quantize<FromBFloat16>(args);
  if (args.element == kFloat16) return launch_quantize<FromFloat16>(args);
  return launch_quantize<FromFloat32>(args);
}

}  // namespace ep::cuda
