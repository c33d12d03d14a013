// Messages by ordinary loads and stores: of any address and size, and on GPUs without bulk copies.
//
// Roles. In each CTA eight warps copy. One more thread, the guide, reads and writes the words that the two ends share.
// It tells the copying warps how many chunks they may copy, and counts those that they have copied.
// Memory order. The guide acquires a word of the peer at system scope and releases the count in its CTA, where warps
// acquire it. A warp that has copied its share counts it, with release order in the CTA. The guide acquires the counts
// of all warps, fences once at system scope, and signals.
#pragma once
#include "cuda/collectives/message_part.cuh"

namespace ep::cuda {

constexpr int kCopyThreads = kCopyWarps * kWarp;
constexpr int kThreads = kCopyThreads + kWarp;
constexpr int kInFlight = 4;  // units that one thread loads at a time

// What the guide and the copying warps of a CTA share. In shared memory.
struct Counters {
  int32_t allowed;             // chunks that warps may copy
  int32_t copied[kPartSlots];  // by chunk % kPartSlots: warps that have copied their share, over all chunks
  int32_t finished;            // chunks that the guide has signalled

  // All threads.
  __device__ void clear() {
    if (threadIdx.x < sizeof(Counters) / 4) reinterpret_cast<int32_t*>(this)[threadIdx.x] = 0;
    __syncthreads();
  }
  // A copying warp: waits until it may copy the chunk. False after a fault.
  __device__ bool wait_allowed(const Comm& comm, int chunk) {
    int there = 0;
    if (lane_id() == 0) {
      for (;;) {
        there = ptx::ld_acquire_cta(&allowed) > chunk ? 1 : 0;
        if (there || faulted(comm)) break;
        __nanosleep(40);
      }
    }
    there = __shfl_sync(kAllLanes, there, 0);
    __syncwarp();  // what lane 0 has acquired, all lanes may read
    return there != 0;
  }
  // A copying warp, when it has copied its share.
  __device__ void count_copied(int chunk) {
    __syncwarp();
    if (lane_id() == 0) ptx::red_add_release_cta(&copied[chunk % kPartSlots], 1);
  }
  // The guide: whether all warps have copied the chunk. No warp is at the chunk that has this one's place next.
  __device__ bool is_copied(int chunk) {
    return ptx::ld_acquire_cta(&copied[chunk % kPartSlots]) >= kCopyWarps * (chunk / kPartSlots + 1);
  }
};

// A copying thread. `from` and `to` are multiples of the unit's size.
template <class Unit>
__device__ void copy_chunk(char* to, const char* from, int64_t bytes) {
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = threadIdx.x; first < units; first += kInFlight * kCopyThreads) {
    Unit values[kInFlight] = {};
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * kCopyThreads < units)
        values[v] = load_shared(reinterpret_cast<const Unit*>(from) + first + v * kCopyThreads);
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * kCopyThreads < units) reinterpret_cast<Unit*>(to)[first + v * kCopyThreads] = values[v];
  }
  const int64_t rest = units * static_cast<int64_t>(sizeof(Unit)) + threadIdx.x;
  if (rest < bytes) to[rest] = ptx::ld_coherent(from + rest);
}

// The guide's loop. allowed(): how many chunks may be copied now, as far as the peer's word, `seen`, says; -1 after a
// fault. signal(n): tells the peer that n chunks have been copied. next(n): the value of the peer's word that allows
// more than n chunks.
template <class Allowed, class Signal, class Next>
__device__ void guide(const Run& run, Counters& counters, int chunks, int peer, Allowed allowed, Signal signal,
                      Next next) {
  int may_copy = 0, finished = 0;
  Deadline deadline;
  while (finished < chunks) {
    uint64_t seen = 0;
    const int now = may_copy < chunks ? allowed(&seen) : may_copy;
    if (now < 0) return;
    const bool has_more = now > may_copy;
    if (has_more) {
      may_copy = now;
      ptx::red_max_release_cta(&counters.allowed, may_copy);
    }
    int copied = finished;
    while (copied < may_copy && counters.is_copied(copied)) ++copied;
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

__device__ __forceinline__ bool is_guide() { return threadIdx.x == kCopyThreads; }
__device__ __forceinline__ bool copies() { return threadIdx.x < kCopyThreads; }

template <class Unit>
__global__ void __launch_bounds__(kThreads) ep_send(const __grid_constant__ DeviceMessageArgs args) {
  __shared__ Counters counters;
  counters.clear();
  const Message& message = args.message;
  const Run run = begin(args.comm, kSend);
  if (!run.ok) return;
  const int index = static_cast<int>(blockIdx.x);
  PartWords& words = lane_at(args, args.comm.rank, message.peer).words[index];
  DeviceLane& lane = lane_at(args, message.peer, args.comm.rank);
  const Part part(message);
  const int chunks = part.chunks();
  const uint64_t before = words.written;
  if (is_guide()) {
    const auto allowed = [&](uint64_t* consumed) {
      *consumed = peer::acquire(&words.consumed);
      return at_most(*consumed + kPartSlots - before, chunks);
    };
    const auto signal = [&](int sent) { peer::store(&lane.words[index].sent, before + sent); };
    const auto next = [&](int sent) { return before + sent + 1 - kPartSlots; };
    guide(run, counters, chunks, message.peer, allowed, signal, next);
  } else if (copies()) {
    for (int chunk = 0; chunk < chunks && counters.wait_allowed(args.comm, chunk); ++chunk) {
      PartSlot& slot = lane.slots[index][(before + chunk) % kPartSlots];
      if (threadIdx.x == 0 && chunk == 0) slot.header = MessageHeader{0, message.bytes, message.dtype};
      copy_chunk<Unit>(slot.data, at<const char>(message.data, part.begin(chunk)), part.size(chunk));
      counters.count_copied(chunk);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && counters.finished == chunks) words.written = before + chunks;
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) ep_receive(const __grid_constant__ DeviceMessageArgs args) {
  __shared__ Counters counters;
  counters.clear();
  const Message& message = args.message;
  const Run run = begin(args.comm, kReceive);
  const Part part(message);
  if (!run.ok) return poison(message, part, 0);
  const int index = static_cast<int>(blockIdx.x);
  DeviceLane& lane = lane_at(args, args.comm.rank, message.peer);
  PartWords& words = lane.words[index];
  const int chunks = part.chunks();
  const uint64_t before = words.read;
  const auto slot_of = [&](int chunk) -> PartSlot& { return lane.slots[index][(before + chunk) % kPartSlots]; };
  if (is_guide()) {
    bool checked = false;
    const auto allowed = [&](uint64_t* sent) {
      *sent = peer::acquire(&words.sent);
      const int arrived = at_most(*sent - before, chunks);
      if (!checked && arrived > 0 && !check_header(run, slot_of(0).header, message)) return -1;
      checked = arrived > 0;
      return arrived;
    };
    const auto signal = [&](int read) {
      peer::store(&lane_at(args, message.peer, args.comm.rank).words[index].consumed, before + read);
    };
    const auto next = [&](int read) { return before + read + 1; };
    guide(run, counters, chunks, message.peer, allowed, signal, next);
  } else if (copies()) {
    for (int chunk = 0; chunk < chunks && counters.wait_allowed(args.comm, chunk); ++chunk) {
      copy_chunk<Unit>(at<char>(message.data, part.begin(chunk)), slot_of(chunk).data, part.size(chunk));
      counters.count_copied(chunk);
    }
  }
  __syncthreads();
  if (counters.finished < chunks) return poison(message, part, counters.finished);
  if (threadIdx.x == 0) words.read = before + chunks;
}

}  // namespace ep::cuda
