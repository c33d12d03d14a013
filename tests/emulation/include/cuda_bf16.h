// Rounding to bfloat16, as the CPU's kernels do it.
#pragma once
#include "cpu/core/elements.h"

struct __nv_bfloat162 {
  ep::cpu::BFloat16 low, high;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  __nv_bfloat162 pair;
  ep::cpu::narrow(low, &pair.low);
  ep::cpu::narrow(high, &pair.high);
  return pair;
}
