// Quantise: rows become e4m3 with scales, before they are packed for a rail.
#include "cpu/core/quantize.h"

#include "common/views.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

void quantize(const QuantizeArgs& args) {
  require_quantizable(args.element);
  const int64_t scales = quantized_scale_bytes(args.hidden) / kScaleBytes;
  with_element(args.element, [&](auto element) {
    for (int64_t i = 0; i < args.num_rows; ++i)
      quantize_row(at<const decltype(element)>(args.x, i * args.x_stride), args.hidden,
                   at<uint8_t>(args.rows) + i * args.hidden, at<float>(args.scales) + i * scales);
  });
}

}  // namespace ep::cpu
