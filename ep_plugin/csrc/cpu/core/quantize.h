// Quantises one row to e4m3. common/fp8.h defines the arithmetic; cuda/core/quantize.cuh is the same for CUDA.
#pragma once
#include <cmath>
#include <cstring>

#include "common/fp8.h"
#include "cpu/core/elements.h"

namespace ep::cpu {

// Quantises a row of `hidden` elements. pow2: scales are powers of two. The maximum is taken over the bits of the
// magnitudes: compilers vectorise it, but not a maximum of floats that may be NaN.
template <class T>
void quantize_row(const T* row, int64_t hidden, uint8_t* out, float* scales, bool pow2 = false) {
  for (int64_t begin = 0; begin < hidden; begin += kScaleBlock) {
    const int count = static_cast<int>(hidden - begin < kScaleBlock ? hidden - begin : kScaleBlock);
    float values[kScaleBlock], amax;
    int32_t most = 0;
    for (int i = 0; i < count; ++i) values[i] = static_cast<float>(widen(row[begin + i]));
    for (int i = 0; i < count; ++i) {
      int32_t bits;
      std::memcpy(&bits, values + i, 4);
      bits &= 0x7FFFFFFF;
      const int32_t counted = bits > 0x7F800000 ? 0 : bits;
      most = counted > most ? counted : most;
    }
    std::memcpy(&amax, &most, 4);
    const float exact = e4m3_scale(amax), scale = pow2 ? pow2_scale(exact) : exact;
    scales[begin / kScaleBlock] = scale;
    for (int i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i, 4);
      out[begin + i] = static_cast<uint8_t>(e4m3_magnitude(std::fabs(values[i]) / scale) | (bits >> 31 << 7));
    }
  }
}

}  // namespace ep::cpu
