// Send and receive inside a node: a kernel at each end moves a message through the receiver's slots.
//
// Roles. Each CTA moves one part of the message; it meets only the CTA of the same part at the other end. Eight warps
// copy. One more thread, the guide, reads and writes the words that the two ends share. It tells the copying warps how
// many chunks they may copy, and counts those that they have copied.
// Buffers. As in common/send_receive.h. No peer touches a tensor of this rank, so tensors may be any device memory.
// Memory order. The guide acquires a word of the peer at system scope and releases the count in its CTA, where warps
// acquire it. A warp that has copied its share counts it, with release order in the CTA. The guide acquires the counts
// of all warps, fences once at system scope, and signals.
// Order. The host launches the messages of a lane on one stream, in the order of the calls.
// Co-residency. A CTA waits for the CTA of its part, so the kernels are launched cooperatively.
// After a fault. A receiver fills what has not arrived with 0xFF bytes.
#include "common/send_receive.h"
#include "cuda/collectives/barrier.cuh"
#include "cuda/core/copy.cuh"

namespace ep::cuda {

namespace {

constexpr int kCopyWarps = 8;
constexpr int kCopyThreads = kCopyWarps * kWarp;
constexpr int kThreads = kCopyThreads + kWarp;
constexpr int kInFlight = 8;  // units that one thread loads at a time

__device__ DeviceLane& lane_at(const DeviceMessageArgs& args, int owner, int other) {
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

__device__ __forceinline__ int at_most(uint64_t count, int chunks) {
  return count < static_cast<uint64_t>(chunks) ? static_cast<int>(count) : chunks;
}

__device__ Run begin(const Comm& comm, Step step) {
  Run run{comm, step, 0, true};
  run.ok = __syncthreads_or(faulted(comm)) == 0;
  return run;
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
      if (threadIdx.x == 0) slot.header = MessageHeader{0, message.bytes, message.dtype};
      copy_chunk<Unit>(slot.data, at<const char>(message.data, part.begin(chunk)), part.size(chunk));
      counters.count_copied(chunk);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && counters.finished == chunks) words.written = before + chunks;
}

__device__ bool check_header(const Run& run, const MessageHeader& theirs, const Message& message) {
  const int64_t bytes = ptx::ld_coherent(&theirs.bytes), dtype = ptx::ld_coherent(&theirs.dtype);
  if (bytes != message.bytes)
    return fail(run.comm, kDisagree, run.step, message.peer, kMessageBytes, message.bytes, bytes);
  if (dtype != message.dtype)
    return fail(run.comm, kDisagree, run.step, message.peer, kMessageDtype, message.dtype, dtype);
  return true;
}

// All threads: chunks from `first` on.
__device__ void poison(const Message& message, const Part& part, int first) {
  for (int chunk = first; chunk < part.chunks(); ++chunk)
    fill_bytes(message.data + static_cast<uint64_t>(part.begin(chunk)), part.size(chunk), 0xFF, threadIdx.x,
               blockDim.x);
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
    int checked = 0;
    const auto allowed = [&](uint64_t* sent) {
      *sent = peer::acquire(&words.sent);
      const int arrived = at_most(*sent - before, chunks);
      for (; checked < arrived; ++checked)
        if (!check_header(run, slot_of(checked).header, message)) return -1;
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

template <class Unit>
void launch_message(const DeviceMessageArgs& args) {
  const int parts = cut_message(args.message.bytes).parts;
  if (args.message.receives != 0)
    launch_cooperatively<ep_receive<Unit>>("receive", parts, kThreads, 0, args.stream, args);
  else
    launch_cooperatively<ep_send<Unit>>("send", parts, kThreads, 0, args.stream, args);
}

template <class Unit>
void load_both() {
  limits_of<ep_send<Unit>>();
  limits_of<ep_receive<Unit>>();
}

void move_message(const DeviceMessageArgs& args) {
  const Message& message = args.message;
  require_node(args.comm);
  require(message.peer >= 0 && message.peer < args.comm.num_ranks && message.peer != args.comm.rank, "peer",
          "another rank of the node", message.peer);
  require(message.channel >= 0 && message.channel < kMaxMessageChannels, "channel", "0 to 15", message.channel);
  require(message.bytes >= 0, "bytes", "0 or more", message.bytes);
  switch (unit_of(message.data)) {
    case 16:
      return launch_message<int4>(args);
    case 8:
      return launch_message<uint64_t>(args);
    case 4:
      return launch_message<uint32_t>(args);
    case 2:
      return launch_message<uint16_t>(args);
    default:
      return launch_message<unsigned char>(args);
  }
}

}  // namespace

void send_message(const DeviceMessageArgs& args) {
  require(args.message.receives == 0, "receives", "0", args.message.receives);
  move_message(args);
}

void receive_message(const DeviceMessageArgs& args) {
  require(args.message.receives == 1, "receives", "1", args.message.receives);
  move_message(args);
}

void load_message_kernels() {
  load_both<int4>();
  load_both<uint64_t>();
  load_both<uint32_t>();
  load_both<uint16_t>();
  load_both<unsigned char>();
}

}  // namespace ep::cuda
