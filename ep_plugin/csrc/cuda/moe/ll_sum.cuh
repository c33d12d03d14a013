// Sums of rows in low-latency combine, in float32 and in a fixed order, and their form in logfmt.
//
// A lane sums one unit of a row: a vector of 16 bytes, or the 12 bytes of a word, which are a vector whose last 4 bytes
// are zeros.
#pragma once
#include "common/logfmt.h"
#include "cuda/core/element.cuh"
#include "cuda/moe/ll_words.cuh"

namespace ep::cuda {

constexpr int kTermsAtOnce = 4;             // terms whose loads are in flight together
constexpr int kGroupLanes = 16;             // lanes that share a group of logfmt; each has 8 elements
constexpr int kGroupBytes = 256;            // a group's place in a slot
constexpr int kCodeBytes = kLlLogfmtGroup;  // the lower 8 bits of a group's codes

template <class Element>
struct LaneSum {
  static constexpr int kElements = Element::kPerVector;
  float of[kElements] = {};

  // Adds `count` terms. load(i) returns the unit of term i, and factor(i) its factor. Each is called once, in order.
  template <class Load, class Factor>
  __device__ __forceinline__ void add(int count, Load load, Factor factor) {
#pragma unroll 1
    for (int first = 0; first < count; first += kTermsAtOnce) {
      int4 held[kTermsAtOnce];
#pragma unroll
      for (int i = 0; i < kTermsAtOnce; ++i)
        if (first + i < count) held[i] = load(first + i);
#pragma unroll
      for (int i = 0; i < kTermsAtOnce; ++i)
        if (first + i < count) Element::add(of, held[i], factor(first + i));
    }
  }
  __device__ __forceinline__ int4 rounded() const { return Element::narrow(of); }
};

// The bytes of word `word` of a row of `units` 4-byte units.
__device__ __forceinline__ int4 load_word_unit(const char* row, int word, int units) {
  return make_int4(static_cast<int>(ll_unit(row, kLlWordUnits * word, units)),
                   static_cast<int>(ll_unit(row, kLlWordUnits * word + 1, units)),
                   static_cast<int>(ll_unit(row, kLlWordUnits * word + 2, units)), 0);
}
__device__ __forceinline__ int4 vector_of(const LlData& data) {
  return make_int4(static_cast<int>(data.unit[0]), static_cast<int>(data.unit[1]), static_cast<int>(data.unit[2]), 0);
}
__device__ __forceinline__ LlData data_of(int4 vector) {
  return LlData{{static_cast<uint32_t>(vector.x), static_cast<uint32_t>(vector.y), static_cast<uint32_t>(vector.z)}};
}
__device__ __forceinline__ const int4* vector_in(const char* row, int unit) {
  return reinterpret_cast<const int4*>(row) + unit;
}

// --- logfmt --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ char* group_in(char* slot, int unit) { return slot + unit / kGroupLanes * kGroupBytes; }

// All lanes: encodes the sums of vector `unit` of a row of `hidden` elements into a slot. Rows end with a whole group.
__device__ inline void store_coded(char* slot, int64_t hidden, int unit, bool in, const LaneSum<BFloat16>& sum) {
  float least = INFINITY, most = 0.0f;
  bool below = true;
#pragma unroll
  for (int i = 0; i < BFloat16::kPerVector; ++i) {
    const float magnitude = fabsf(sum.of[i]);
    below &= magnitude < 1.0f;  // false for NaN
    most = fmaxf(most, magnitude);
    if (magnitude != 0.0f) least = fminf(least, magnitude);
  }
#pragma unroll
  for (int apart = 1; apart < kGroupLanes; apart *= 2) {
    least = fminf(least, __shfl_xor_sync(kAllLanes, least, apart));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, apart));
  }
  const unsigned all = __ballot_sync(kAllLanes, below) >> (lane_id() & kGroupLanes);
  const LogfmtScale scale = logfmt_scale(least, most, (all & 0xFFFFu) == 0xFFFFu);
  if (!in) return;
  const int lane = unit % kGroupLanes;
  char* group = group_in(slot, unit);
  if (lane == 0) reinterpret_cast<LogfmtScale*>(slot + 2 * hidden)[unit / kGroupLanes] = scale;
  if (scale.step < 0.0f) {
    reinterpret_cast<int4*>(group)[lane] = sum.rounded();
    return;
  }
  uint32_t low[2] = {}, high = 0;
#pragma unroll
  for (int i = 0; i < BFloat16::kPerVector; ++i) {
    const uint32_t code = logfmt_code(sum.of[i], scale);
    low[i / 4] |= (code & 0xFFu) << 8 * (i % 4);
    high |= code >> 8 << 2 * i;
  }
  reinterpret_cast<uint2*>(group)[lane] = make_uint2(low[0], low[1]);
  reinterpret_cast<uint16_t*>(group + kCodeBytes)[lane] = static_cast<uint16_t>(high);
}

// Adds vector `unit` of a slot that store_coded() has written to the sums.
__device__ inline void add_coded(const char* slot, int64_t hidden, int unit, LaneSum<BFloat16>& sum) {
  const int lane = unit % kGroupLanes;
  const char* group = group_in(const_cast<char*>(slot), unit);
  const int64_t scale_bits = ptx::ld_coherent(reinterpret_cast<const int64_t*>(slot + 2 * hidden) + unit / kGroupLanes);
  const int64_t low = ptx::ld_coherent(reinterpret_cast<const int64_t*>(group) + lane);
  const uint32_t both =
      static_cast<uint32_t>(ptx::ld_coherent(reinterpret_cast<const int32_t*>(group + kCodeBytes) + lane / 2));
  const uint32_t high = both >> 16 * (lane % 2);
  const LogfmtScale scale{__int_as_float(static_cast<int>(scale_bits)),
                          __int_as_float(static_cast<int>(scale_bits >> 32))};
  if (scale.step < 0.0f) {
    BFloat16::add(sum.of, ptx::ld_coherent(vector_in(group, lane)), 1.0f);
    return;
  }
#pragma unroll
  for (int i = 0; i < BFloat16::kPerVector; ++i)
    sum.of[i] += logfmt_value((static_cast<uint32_t>(low >> 8 * i) & 0xFFu) | (high >> 2 * i & 3u) << 8, scale);
}

}  // namespace ep::cuda
