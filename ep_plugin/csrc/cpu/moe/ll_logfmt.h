// Groups of 128 sums in logfmt, in low-latency combine. common/logfmt.h has the codes.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/logfmt.h"
#include "common/low_latency.h"
#include "cpu/core/sums.h"

namespace ep::cpu {

constexpr int kCodeBytes = kLlLogfmtGroup;                      // the lower 8 bits of a group's codes
constexpr int kGroupBytes = kLlLogfmtGroup * sizeof(BFloat16);  // a group's place in a slot

inline void encode_group(const float* values, char* to, LogfmtScale* scale) {
  float amin = std::numeric_limits<float>::infinity(), amax = 0.0f;
  bool coded = true;
  for (int i = 0; i < kLlLogfmtGroup; ++i) {
    const float magnitude = std::fabs(values[i]);
    coded &= magnitude < 1.0f;  // false for NaN
    amax = std::max(amax, magnitude);
    if (magnitude != 0.0f) amin = std::min(amin, magnitude);
  }
  *scale = logfmt_scale(amin, amax, coded);
  if (!coded) {
    for (int i = 0; i < kLlLogfmtGroup; ++i) narrow(values[i], reinterpret_cast<BFloat16*>(to) + i);
    return;
  }
  uint8_t* low = reinterpret_cast<uint8_t*>(to);
  std::fill_n(low + kCodeBytes, kCodeBytes / 4, uint8_t{0});
  for (int i = 0; i < kLlLogfmtGroup; ++i) {
    const uint32_t code = logfmt_code(values[i], *scale);
    low[i] = static_cast<uint8_t>(code);
    low[kCodeBytes + i / 4] |= static_cast<uint8_t>(code >> 8 << (2 * (i % 4)));
  }
}

inline void add_group(const char* from, const LogfmtScale& scale, float* sum) {
  if (scale.step < 0.0f) return accumulate<BFloat16>(sum, reinterpret_cast<const BFloat16*>(from), kLlLogfmtGroup);
  const uint8_t* low = reinterpret_cast<const uint8_t*>(from);
  for (int i = 0; i < kLlLogfmtGroup; ++i)
    sum[i] += logfmt_value(low[i] | (low[kCodeBytes + i / 4] >> (2 * (i % 4)) & 3u) << 8, scale);
}

}  // namespace ep::cpu
