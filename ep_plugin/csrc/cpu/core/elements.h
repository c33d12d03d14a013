// Element types on CPUs, and the type in which elements are summed.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "common/api.h"

namespace ep::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};

template <class T>
struct Sum {
  using type = float;
};
template <>
struct Sum<double> {
  using type = double;
};

inline float widen(float v) { return v; }
inline double widen(double v) { return v; }
inline float widen(Float16 v) { return static_cast<float>(v.value); }
inline float widen(BFloat16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void narrow(float v, float* out) { *out = v; }
inline void narrow(double v, double* out) { *out = v; }
inline void narrow(float v, Float16* out) { out->value = static_cast<_Float16>(v); }
inline void narrow(float v, BFloat16* out) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  out->bits = static_cast<uint16_t>(nan ? 0x7FC0 : rounded);
}

// Calls visit(T{}) with the C++ type of `element`.
template <class Visit>
void with_element(int32_t element, Visit visit) {
  switch (element) {
    case kFloat32:
      return visit(float{});
    case kBFloat16:
      return visit(BFloat16{});
    case kFloat16:
      return visit(Float16{});
    case kFloat64:
      return visit(double{});
  }
  throw std::invalid_argument("element: expected one of Element, got " + std::to_string(element));
}

}  // namespace ep::cpu
