// Words that a stream writes and waits for by itself, in any memory that the device reaches. They use no SM.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace ep::cuda {

// A list of such operations, enqueued at once and done in order. Writes come after all earlier work of the stream, with
// a system-wide fence; waits are for *address >= value.
class StreamOperations {
 public:
  void write(uint64_t address, uint64_t value);
  void wait(uint64_t address, uint64_t value);
  void enqueue(cudaStream_t stream);  // std::runtime_error when the driver has none, or refuses

 private:
  static constexpr unsigned kMost = 64;
  CUstreamBatchMemOpParams list_[kMost] = {};
  unsigned count_ = 0;
};

}  // namespace ep::cuda
