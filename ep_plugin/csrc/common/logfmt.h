// The 10-bit codes of partial rows in logfmt: a sign and 9 bits of a logarithm, for groups of kLlLogfmtGroup elements.
//
// The code of 0 is 0, and else sign << 9 | n with n from 1 to 511, for a magnitude of 2 to the power of
// low + (n - 1) * step. `low` is the logarithm of the smallest magnitude of the group that is not 0, or of amax * 2^-32
// if that is larger; smaller magnitudes become the latter. A group is coded if its amax is below 1 and it has no NaN.
// Otherwise its elements travel as they are, and `step` is negative.
//
// A coded group is 160 bytes: the lower 8 bits of each code, in order; then the upper 2 bits, four codes in a byte, the
// first code in the lowest bits.
#pragma once
#include <cmath>

#include "common/low_latency.h"

namespace ep {

struct LogfmtScale {
  float low;
  float step;
};
static_assert(sizeof(LogfmtScale) == kLlLogfmtScaleBytes, "the layout of partial rows has room for it");

constexpr uint32_t kLogfmtSign = 512;
constexpr int kLogfmtSteps = 510;   // between the smallest and the largest code
constexpr float kLogfmtRange = 32;  // octaves

// amin: the smallest magnitude that is not 0, amax: the largest one. Both 0: the group is all zeros. `coded`: amax is
// below 1 and there is no NaN.
EP_HD LogfmtScale logfmt_scale(float amin, float amax, bool coded) {
  if (!coded) return LogfmtScale{0.0f, -1.0f};
  if (amax == 0.0f) return LogfmtScale{0.0f, 0.0f};
  const float high = log2f(amax), least = log2f(amin);
  const float low = least < high - kLogfmtRange ? high - kLogfmtRange : least;
  return LogfmtScale{low, (high - low) / kLogfmtSteps};
}

EP_HD uint32_t logfmt_code(float value, const LogfmtScale& scale) {
  const float magnitude = fabsf(value);
  if (magnitude == 0.0f) return 0;
  const float place = scale.step == 0.0f ? 0.0f : (log2f(magnitude) - scale.low) / scale.step + 0.5f;
  const float within = place < 0.0f ? 0.0f : place > kLogfmtSteps ? kLogfmtSteps : place;
  return (value < 0.0f ? kLogfmtSign : 0u) | (static_cast<uint32_t>(within) + 1u);
}

EP_HD float logfmt_value(uint32_t code, const LogfmtScale& scale) {
  const uint32_t n = code & (kLogfmtSign - 1);
  if (n == 0) return 0.0f;
  const float magnitude = exp2f(scale.low + static_cast<float>(n - 1) * scale.step);
  return (code & kLogfmtSign) != 0 ? -magnitude : magnitude;
}

}  // namespace ep
