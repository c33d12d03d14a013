// Rows quantised to e4m3 as they are sent: what a block's scale is and which eight bits stand for an element, for host
// and device alike, so that both give the same bits. float32 arithmetic, each result rounded once.
//
// For each block of kScaleBlock elements: amax, over the elements that are no NaN; scale = amax / 448, or 1 where that
// is 0; an element becomes x / scale rounded to nearest, ties to even, never beyond 448. It keeps the sign of x. NaN
// becomes NaN; an infinity makes its block's scale infinite, itself NaN and the block's finite elements 0.
#pragma once
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/api.h"

namespace ep {

constexpr int kScaleBlock = 128;
constexpr float kMostE4m3 = 448.0f;
constexpr int64_t kScaleBytes = 4;

EP_HD constexpr int64_t quantized_scale_bytes(int64_t hidden) { return ceil_div(hidden, kScaleBlock) * kScaleBytes; }

// Throws std::invalid_argument if the header or element type does not fit a dispatch that quantises.
inline void require_quantizable(const Header& header, int32_t element) {
  if (element != kFloat32 && element != kBFloat16 && element != kFloat16)
    throw std::invalid_argument("element: expected float32, bfloat16 or float16, got " + std::to_string(element));
  const int64_t expected = quantized_scale_bytes(header.row_bytes);
  if (header.scale_bytes != expected)
    throw std::invalid_argument("scale_bytes: expected " + std::to_string(expected) + ", got " +
                                std::to_string(header.scale_bytes));
}

EP_HD float e4m3_scale(float amax) {
  const float scale = amax / kMostE4m3;
  return scale == 0.0f ? 1.0f : scale;
}

// The e4m3 of a magnitude (or of NaN): 4 bits of exponent, bias 7, and 3 of mantissa. Without a choice that compilers
// could make a branch of, so that they make vectors of it.
EP_HD uint32_t e4m3_magnitude(float value) {
  constexpr uint32_t kSmallestNormal = 0x3C800000u;  // 2^-6 as a float
  constexpr uint32_t kInfinity = 0x7F800000u;
  constexpr uint32_t kMost = 0x7Eu;        // 448; one more is NaN
  constexpr float kSubnormals = 16384.0f;  // the last bit of floats of this size is worth 2^-9, as that of subnormals
  constexpr uint32_t kSubnormalsBits = 0x46800000u;
  const float sum = value + kSubnormals;
  uint32_t bits, sum_bits;
  std::memcpy(&bits, &value, 4);
  std::memcpy(&sum_bits, &sum, 4);
  bits &= 0x7FFFFFFFu;
  const uint32_t normal = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - ((127u - 7u) << 3);
  const uint32_t is_normal = 0u - static_cast<uint32_t>(bits >= kSmallestNormal);
  const uint32_t finite = (normal & is_normal) | ((sum_bits - kSubnormalsBits) & ~is_normal);
  const uint32_t saturated = finite < kMost ? finite : kMost;
  return saturated | static_cast<uint32_t>(bits > kInfinity);
}

// Division of many magnitudes by one scale: the reciprocal is found once, to twice the precision of a float. The
// quotient from it is off by less than a unit in the last place; its remainder is exact, and corrects it to what one
// division rounds to (Markstein 1990). Scales far from 1 are lifted by a power of two, and the magnitudes with them,
// so that nothing overflows and nothing that matters underflows: quotients below 2^-10 are 0 in the end.
struct Divisor {
  float scale, high, low, lift;

  EP_HD explicit Divisor(float by) {
    constexpr float kSmall = 0x1p-60f, kLarge = 0x1p60f, kUp = 0x1p100f, kDown = 0x1p-100f;
    lift = by < kSmall ? kUp : by > kLarge ? kDown : 1.0f;
    const bool infinite = by > 0x1.fffffep127f;
    scale = infinite ? 0.0f : by * lift;  // finite / infinite: without a remainder
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
