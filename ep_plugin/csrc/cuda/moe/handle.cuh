// A handle's contents are checked before they are used, see common/handle.h.
#pragma once
#include "common/handle.h"
#include "cuda/core/sync.cuh"

namespace ep::cuda {

// All threads of a CTA check items [0, count) of the routing with `is_sound(item)`. A thread that finds an item that is
// not sound records the fault and returns false. The caller joins the CTA.
template <class Check>
__device__ __forceinline__ bool check_handle(const Run& run, int count, Check is_sound) {
  for (int item = static_cast<int>(threadIdx.x); item < count; item += static_cast<int>(blockDim.x))
    if (!is_sound(item)) return fail(run.comm, kBadHandle, run.step, run.comm.rank, item, 0, 0);
  return true;
}

}  // namespace ep::cuda
