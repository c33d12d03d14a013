// Stream memory operations through the driver API.
#include "cuda/collectives/stream_words.h"

#include <stdexcept>
#include <string>

#include "cuda/core/launch.cuh"

namespace ep::cuda {

namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

// This extension does not link libcuda, so the runtime looks up the driver's function.
BatchMemOp batch_mem_op() {
  static const BatchMemOp found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    throw_on_error(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &function, 12000, cudaEnableDefault, &result),
                   "cudaGetDriverEntryPointByVersion");
#else
    throw_on_error(cudaGetDriverEntryPoint("cuStreamBatchMemOp", &function, cudaEnableDefault, &result),
                   "cudaGetDriverEntryPoint");
#endif
    if (result != cudaDriverEntryPointSuccess || function == nullptr)
      throw std::runtime_error("stream memory operations: expected a driver that has cuStreamBatchMemOp, got none");
    return reinterpret_cast<BatchMemOp>(function);
  }();
  return found;
}

}  // namespace

void StreamOperations::write(uint64_t address, uint64_t value) {
  require(count_ < kMaxOperations, "stream memory operations", "at most 144 at a time", count_);
  CUstreamBatchMemOpParams& one = list_[count_++] = {};
  one.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  one.writeValue.address = address;
  one.writeValue.value64 = value;
  one.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
}

void StreamOperations::wait(uint64_t address, uint64_t value) {
  require(count_ < kMaxOperations, "stream memory operations", "at most 144 at a time", count_);
  CUstreamBatchMemOpParams& one = list_[count_++] = {};
  one.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  one.waitValue.address = address;
  one.waitValue.value64 = value;
  one.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
}

void StreamOperations::enqueue(cudaStream_t stream) {
  if (count_ == 0) return;
  const CUresult error = batch_mem_op()(stream, count_, list_, 0);
  if (error != CUDA_SUCCESS)
    throw std::runtime_error("stream memory operations: the driver returned error " + std::to_string(error));
  count_ = 0;
}

}  // namespace ep::cuda
