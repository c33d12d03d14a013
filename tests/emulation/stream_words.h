// Replaces ep_plugin/csrc/cuda/collectives/stream_words.h on CPUs: copy engines and stream memory operations are not
// emulated.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>

namespace ep::cuda {

class StreamOperations {
 public:
  void write(uint64_t, uint64_t) {}
  void wait(uint64_t, uint64_t) {}
  void enqueue(cudaStream_t) { throw std::runtime_error("simt: expected a gather by a kernel, got copy engines"); }
};

}  // namespace ep::cuda
