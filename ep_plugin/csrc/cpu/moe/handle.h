// A handle's contents are checked before they are used, see common/handle.h.
#pragma once
#include "common/handle.h"
#include "cpu/core/sync.h"

namespace ep::cpu {

// Checks items [0, count) of the routing with `is_sound(item)`. If an item is not sound, records the fault and returns
// false.
template <class Check>
bool check_handle(const Run& run, int count, Check is_sound) {
  for (int item = 0; item < count; ++item)
    if (!is_sound(item)) return fail(run.comm, kBadHandle, run.step, run.comm.rank, item, 0, 0);
  return true;
}

}  // namespace ep::cpu
