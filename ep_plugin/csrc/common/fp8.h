// The arithmetic that quantises rows to e4m3. Host and device share it, so that both give the same bits. It uses
// float32, and rounds each result once.
//
// Each block of kScaleBlock elements has one scale. amax is the largest magnitude among its elements that are not NaN;
// scale = amax / 448, or 1 if that is 0. An element x becomes x / scale, rounded to nearest, ties to even, and limited
// to 448 in magnitude. It keeps the sign of x. NaN stays NaN. With an infinity in the block, the scale is infinite, the
// infinity becomes NaN, and finite elements become 0.
#pragma once
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/api.h"

namespace ep {

constexpr int kScaleBlock = 128;
constexpr float kMaxE4m3 = 448.0f;
constexpr int64_t kScaleBytes = 4;

EP_HD constexpr int64_t quantized_scale_bytes(int64_t hidden) { return ceil_div(hidden, kScaleBlock) * kScaleBytes; }

// Throws std::invalid_argument if rows of this element type cannot be quantised.
inline void require_quantizable(int32_t element) {
  if (element != kFloat32 && element != kBFloat16 && element != kFloat16)
    throw std::invalid_argument("element: expected float32, bfloat16 or float16, got " + std::to_string(element));
}
// Throws std::invalid_argument if a dispatch with this header and element type cannot quantise.
inline void require_quantizable(const Header& header, int32_t element) {
  require_quantizable(element);
  const int64_t expected = quantized_scale_bytes(header.row_bytes);
  if (header.scale_bytes != expected)
    throw std::invalid_argument("scale_bytes: expected " + std::to_string(expected) + ", got " +
                                std::to_string(header.scale_bytes));
}

EP_HD float e4m3_scale(float amax) {
  const float scale = amax / kMaxE4m3;
  return scale == 0.0f ? 1.0f : scale;
}

// The smallest power of two that is not below `scale`, at least 2^-126. An infinite scale stays infinite.
EP_HD float pow2_scale(float scale) {
  constexpr uint32_t kSmallestNormal = 0x00800000u, kInfinity = 0x7F800000u, kMantissa = 0x007FFFFFu;
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  bits = bits < kSmallestNormal ? kSmallestNormal : (bits + kMantissa) & kInfinity;
  std::memcpy(&scale, &bits, 4);
  return scale;
}
// Returns the ue8m0 code of a scale that is a power of two: its exponent with bias 127. Infinity becomes 255, NaN.
EP_HD uint8_t ue8m0_of(float pow2) {
  uint32_t bits;
  std::memcpy(&bits, &pow2, 4);
  return static_cast<uint8_t>(bits >> 23);
}

// The e4m3 of a magnitude or NaN: 4 bits of exponent with bias 7, and 3 bits of mantissa. It has no branches, so that
// compilers can vectorise it.
EP_HD uint32_t e4m3_magnitude(float value) {
  constexpr uint32_t kSmallestNormal = 0x3C800000u;  // 2^-6 as a float
  constexpr uint32_t kInfinity = 0x7F800000u;
  constexpr uint32_t kMaxFinite = 0x7Eu;   // 448; one more is NaN
  constexpr float kSubnormals = 16384.0f;  // a float of this size has units of 2^-9, like an e4m3 subnormal
  constexpr uint32_t kSubnormalsBits = 0x46800000u;
  const float sum = value + kSubnormals;
  uint32_t bits, sum_bits;
  std::memcpy(&bits, &value, 4);
  std::memcpy(&sum_bits, &sum, 4);
  bits &= 0x7FFFFFFFu;
  const uint32_t normal = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - ((127u - 7u) << 3);
  const uint32_t is_normal = 0u - static_cast<uint32_t>(bits >= kSmallestNormal);
  const uint32_t finite = (normal & is_normal) | ((sum_bits - kSubnormalsBits) & ~is_normal);
  const uint32_t saturated = finite < kMaxFinite ? finite : kMaxFinite;
  return saturated | static_cast<uint32_t>(bits > kInfinity);
}

// Divides many magnitudes by one scale, with the bits of a float division. The reciprocal is computed once, to twice
// the precision of a float. The quotient from it is off by less than one unit in the last place. Its remainder is
// exact, and corrects it to the rounded quotient (Markstein 1990). A scale far from 1 is multiplied by a power of two,
// and so are the magnitudes. So nothing overflows, and only quotients that become 0 in e4m3 (below 2^-10) can
// underflow.
struct Divisor {
  float scale, high, low, lift;

  EP_HD explicit Divisor(float by) {
    constexpr float kSmall = 0x1p-60f, kLarge = 0x1p60f, kUp = 0x1p100f, kDown = 0x1p-100f;
    lift = by < kSmall ? kUp : by > kLarge ? kDown : 1.0f;
    const bool infinite = by > 0x1.fffffep127f;
    scale = infinite ? 0.0f : by * lift;  // finite / infinite = 0, without a remainder
    high = infinite ? 0.0f : 1.0f / scale;
    low = fmaf(-high, scale, 1.0f) * high;
  }
  EP_HD Divisor(float scale_, float high_, float lift_)
      : scale(scale_), high(high_), low(fmaf(-high_, scale_, 1.0f) * high_), lift(lift_) {}

  EP_HD float divide(float magnitude) const {
    const float lifted = magnitude * lift;
    const float quotient = fmaf(lifted, high, lifted * low);
    return fmaf(fmaf(-quotient, scale, lifted), high, quotient);
  }
};

}  // namespace ep
