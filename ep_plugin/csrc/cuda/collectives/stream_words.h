// Stream memory operations: a stream itself writes words and waits for them, in any memory that the device reaches.
// They use no SM.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"

namespace ep::cuda {

// A list of operations, enqueued together and executed in order. A write comes after all earlier work of the stream,
// with a system fence. A wait ends when *address >= value.
class StreamOperations {
 public:
  void write(uint64_t address, uint64_t value);
  void wait(uint64_t address, uint64_t value);
  void enqueue(cudaStream_t stream);  // throws std::runtime_error if the driver lacks them or refuses

 private:
  static constexpr unsigned kMaxOperations = 2 * kMaxRanks;  // a handshake
  static_assert(kMaxOperations <= 256, "the most that the driver takes");
  CUstreamBatchMemOpParams list_[kMaxOperations];
  unsigned count_ = 0;
};

}  // namespace ep::cuda
