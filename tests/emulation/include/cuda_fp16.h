// Rounding to float16, as the CPU's kernels do it.
#pragma once
#include "cpu/core/elements.h"
#include "cuda_runtime.h"

struct __half2 {
  ep::cpu::Float16 low, high;
};
inline __half2 __floats2half2_rn(float low, float high) {
  __half2 pair;
  ep::cpu::narrow(low, &pair.low);
  ep::cpu::narrow(high, &pair.high);
  return pair;
}
inline float2 __half22float2(__half2 pair) { return {ep::cpu::widen(pair.low), ep::cpu::widen(pair.high)}; }
