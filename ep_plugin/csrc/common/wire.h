// Kernels of `ep-bench wire`, which measures the links: copies between blocks of memory. Also a kernel that occupies
// SMs, for tests. Dispatch and combine use neither.
#pragma once
#include <cstdint>

#include "common/api.h"

namespace ep {

enum WireKind : int32_t {
  kWireStore = 0,      // 16-byte stores of (unit, seed, ~unit, 0) to the destinations; nothing is read
  kWireLoad = 1,       // 16-byte loads from the sources into registers; with `keep` also stored to the destinations
  kWireBulkStore = 2,  // bulk stores of the first source's first chunk from shared memory to the destinations
  kWireBulkLoad = 3,   // bulk loads from the sources into shared memory; with `keep` also stored to the destinations
  kWireEngine = 4      // copy engines: one asynchronous copy for each pair, in order
};

constexpr int kMaxPairs = 16;

// `num_pairs` copies of `bytes` bytes each, at the same time, chunk by chunk in turn. Addresses and sizes are multiples
// of 16.
struct WireArgs {
  int32_t kind;
  int32_t num_pairs;
  int32_t num_sms;
  int32_t keep;  // loads: 1 stores the loaded bytes, for checks; 0 does not, for timing
  int32_t seed;
  int32_t chunk_bytes;  // a divisor of `bytes`; 4096 for 16-byte accesses
  int64_t bytes;
  Address from[kMaxPairs];
  Address to[kMaxPairs];
  Address failed;  // u32 in device memory: counts warps whose wait for a load ran past its deadline
  Address stream;
};

// Occupies `num_sms` SMs, one CTA each, until `nanoseconds` have passed or the u64 at `stop` is not zero.
struct HoldArgs {
  int64_t nanoseconds;
  int32_t num_sms;
  int32_t reserved;
  Address stop;  // device memory
  Address stream;
};

// Both enqueue a kernel and return. They throw std::invalid_argument for wrong arguments, and std::runtime_error when a
// launch fails.
void wire(const WireArgs& args);
void hold(const HoldArgs& args);

}  // namespace ep
