// What both kinds of message kernels share: a part of a message, its lane, and how an end begins and fails.
//
// Roles. Each CTA moves one part of the message; it meets only the CTA of the same part at the other end.
// Buffers. As in common/send_receive.h. No peer touches a tensor of this rank, so tensors may be any device memory.
// After a fault. A receiver fills what has not arrived with 0xFF bytes.
#pragma once
#include "common/send_receive.h"
#include "cuda/collectives/barrier.cuh"
#include "cuda/core/copy.cuh"

namespace ep::cuda {

__device__ inline DeviceLane& lane_at(const DeviceMessageArgs& args, int owner, int other) {
  DeviceLane* lanes = &peer::control<DeviceLane>(args.comm, owner);
  return lanes[args.message.channel * args.comm.num_ranks + other];
}

// This CTA's chunks of the message, numbered from 0.
struct Part {
  const MessageCut cut;
  const int64_t bytes;

  __device__ explicit Part(const Message& message) : cut(cut_message(message.bytes)), bytes(message.bytes) {}
  __device__ int chunks() const { return static_cast<int>((cut.chunks - 1 - blockIdx.x) / cut.parts) + 1; }
  __device__ int64_t begin(int chunk) const {
    return (static_cast<int64_t>(chunk) * cut.parts + blockIdx.x) * cut.chunk_bytes;
  }
  __device__ int64_t size(int chunk) const { return min(cut.chunk_bytes, bytes - begin(chunk)); }
};

__device__ __forceinline__ int at_most(uint64_t count, int chunks) {
  return count < static_cast<uint64_t>(chunks) ? static_cast<int>(count) : chunks;
}

__device__ inline Run begin(const Comm& comm, Step step) {
  Run run{comm, step, 0, true};
  run.ok = __syncthreads_or(faulted(comm)) == 0;
  return run;
}

__device__ inline bool check_header(const Run& run, const MessageHeader& theirs, const Message& message) {
  const int64_t bytes = ptx::ld_coherent(&theirs.bytes), dtype = ptx::ld_coherent(&theirs.dtype);
  if (bytes != message.bytes)
    return fail(run.comm, kDisagree, run.step, message.peer, kMessageBytes, message.bytes, bytes);
  if (dtype != message.dtype)
    return fail(run.comm, kDisagree, run.step, message.peer, kMessageDtype, message.dtype, dtype);
  return true;
}

// All threads: chunks from `first` on.
__device__ inline void poison(const Message& message, const Part& part, int first) {
  for (int chunk = first; chunk < part.chunks(); ++chunk)
    fill_bytes(message.data + static_cast<uint64_t>(part.begin(chunk)), part.size(chunk), 0xFF, threadIdx.x,
               blockDim.x);
}

}  // namespace ep::cuda
