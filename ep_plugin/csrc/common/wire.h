// What the benchmark measures the wire with: copies between blocks of memory, and a kernel that holds SMs. No part of
// dispatch or combine.
#pragma once
#include <cstdint>

#include "common/api.h"

namespace ep {

enum WireKind : int32_t {
  kWireStore = 0,      // 16-byte stores of (unit, seed, ~unit, 0) to the destinations; nothing is read
  kWireLoad = 1,       // 16-byte loads from the sources, into registers; with `keep` into the destinations as well
  kWireBulkStore = 2,  // bulk stores of the first source's first chunk, from shared memory, to the destinations
  kWireBulkLoad = 3,   // bulk loads from the sources into shared memory; with `keep` into the destinations as well
  kWireBulkCopy = 4,   // bulk loads from the sources, then bulk stores to the destinations
  kWireEngine = 5      // copy engines: one asynchronous copy for each pair, in the order given
};

// `num_pairs` copies of `bytes` each at the same time, chunk by chunk in turn. Addresses and sizes are multiples of 16.
struct WireArgs {
  int32_t kind;
  int32_t num_pairs;
  int32_t num_sms;
  int32_t keep;  // loads: 1 writes what was loaded, which is how it is checked; 0 is how it is timed
  int32_t seed;
  int32_t chunk_bytes;  // a divisor of `bytes`; 16-byte accesses take no other than 4096
  int64_t bytes;
  Address from[kMaxRanks];
  Address to[kMaxRanks];
  Address failed;  // u32 in device memory: counts warps that gave up waiting for a load
  Address stream;
};

// Takes `num_sms` SMs, one CTA each, which do nothing until `nanoseconds` have passed or the u64 at `stop` is not zero.
struct HoldArgs {
  int64_t nanoseconds;
  int32_t num_sms;
  int32_t reserved;
  Address stop;  // device memory
  Address stream;
};

// Enqueue only. std::invalid_argument for arguments that cannot be, std::runtime_error when a launch fails.
void wire(const WireArgs& args);
void hold(const HoldArgs& args);

}  // namespace ep
