// One end of a message inside a node: its part, its lane, and the guide, which meets the peer.
//
// Roles. Each CTA moves one part of the message; it meets only the CTA of the same part at the other end. Some warps
// copy (message_copy.cuh). One more thread, the guide, reads and writes the words that the two ends share. It tells the
// copying warps how many chunks they may copy, and counts those that they have copied.
// Buffers. As in common/send_receive.h. No peer touches a tensor of this rank, so tensors may be any device memory.
// Memory order. The guide acquires a word of the peer at system scope and releases the count in its CTA, where warps
// acquire it. A warp that has copied its share counts it, with release order in the CTA. The guide acquires the counts
// of all warps, fences once at system scope, and signals. The fence waits for all stores of its SM, so threads
// that copy leave it to the guide.
// After a fault. A receiver fills what has not arrived with 0xFF bytes.
#pragma once
#include "common/send_receive.h"
#include "cuda/collectives/barrier.cuh"
#include "cuda/core/copy.cuh"

namespace ep::cuda {

// The lane of this rank for the peer of a message, and the peer's lane for this rank.
__device__ inline DeviceLane& own_lane(const DeviceMessageArgs& args) {
  return at<DeviceLane>(args.comm.own_control)[args.message.channel * args.comm.num_ranks + args.message.peer];
}
__device__ inline DeviceLane& lane_of_peer(const DeviceMessageArgs& args) {
  const Address memory = address_in(args.comm.control, args.message.peer);
  return at<DeviceLane>(memory)[args.message.channel * args.comm.num_ranks + args.comm.rank];
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

// What the guide and the copying warps of a CTA share. In shared memory.
struct Counters {
  int32_t allowed;             // chunks that warps may copy
  int32_t copied[kPartCells];  // by chunk % kPartCells: warps that have copied their share, over all chunks
  int32_t finished;            // chunks that the guide has signalled

  // All threads.
  __device__ void clear() {
    if (threadIdx.x < sizeof(Counters) / 4) reinterpret_cast<int32_t*>(this)[threadIdx.x] = 0;
    __syncthreads();
  }
  // A copying warp: how many chunks it may copy.
  __device__ int look_allowed() {
    int count = 0;
    if (lane_id() == 0) count = ptx::ld_acquire_cta(&allowed);
    count = __shfl_sync(kAllLanes, count, 0);
    __syncwarp();  // what lane 0 has acquired, all lanes may read
    return count;
  }
  // Waits until it may copy `chunk`, and returns how many chunks it may copy. 0 after a fault.
  __device__ int wait_allowed(const Comm& comm, int chunk) {
    int count = look_allowed();
    while (count <= chunk) {
      if (__any_sync(kAllLanes, faulted(comm))) return 0;
      __nanosleep(40);
      count = look_allowed();
    }
    return count;
  }
  // A copying warp, when it has copied its share.
  __device__ void count_copied(int chunk) {
    __syncwarp();
    if (lane_id() == 0) ptx::red_add_release_cta(&copied[chunk % kPartCells], 1);
  }
  // The guide: whether all of `warps` have copied the chunk. No warp is at the chunk that has this one's place next.
  __device__ bool is_copied(int chunk, int warps) {
    return ptx::ld_acquire_cta(&copied[chunk % kPartCells]) >= warps * (chunk / kPartCells + 1);
  }
};

// The guide's loop. allowed(): how many chunks may be copied now, as far as the peer's word, `seen`, says; -1 after a
// fault. signal(n): tells the peer that n chunks have been copied. next(n): the value of the peer's word that allows
// more than n chunks. warps: those that copy.
template <class Allowed, class Signal, class Next>
__device__ void guide(const Run& run, Counters& counters, int warps, int chunks, int peer, Allowed allowed,
                      Signal signal, Next next) {
  int may_copy = 0, finished = 0;
  Deadline deadline;
  while (finished < chunks) {
    uint64_t seen = 0;
    const int now = may_copy < chunks ? allowed(&seen) : may_copy;
    if (now < 0) return;
    const bool has_more = now > may_copy;
    if (has_more) {
      may_copy = now;
      ptx::fence_proxy_async();  // bulk copies come after what the peer has done
      ptx::red_max_release_cta(&counters.allowed, may_copy);
    }
    int copied = finished;
    while (copied < may_copy && counters.is_copied(copied, warps)) ++copied;
    if (copied > finished) {
      finished = copied;
      peer::fence();
      signal(finished);
      counters.finished = finished;
    }
    if (has_more || finished < may_copy) {
      deadline = Deadline{};
      __nanosleep(20);
    } else if (finished < chunks && !deadline.keep_waiting(run, peer, 0, next(may_copy), seen)) {
      return;
    }
    if (faulted(run.comm)) return;
  }
}

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
