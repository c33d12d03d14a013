// Send and receive inside a node: a kernel at each end moves a message through the receiver's slots.
//
// Roles. Each CTA moves one part of the message; it meets only the CTA of the same part at the other end. The sender
// waits for a free slot, copies a chunk into it, and signals. The receiver waits for the chunk, compares its header,
// copies it into its tensor, and signals that the slot is free.
// Buffers. As in common/send_receive.h. No peer touches a tensor of this rank, so tensors may be any device memory.
// Memory order. The threads of a CTA copy, then join. Thread 0 fences at system scope and signals. At the other end
// thread 0 acquires the word at system scope, then joins its CTA.
// Order. The host launches the messages of a lane on one stream, in the order of the calls.
// Co-residency. A CTA waits for the CTA of its part, so the kernels are launched cooperatively.
// After a fault. A receiver fills what has not arrived with 0xFF bytes.
#include "common/send_receive.h"
#include "cuda/collectives/barrier.cuh"
#include "cuda/core/copy.cuh"

namespace ep::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;  // units that one thread loads at a time

__device__ DeviceLane& lane_at(const DeviceMessageArgs& args, int owner, int other) {
  DeviceLane* lanes = &peer::control<DeviceLane>(args.comm, owner);
  return lanes[args.message.channel * args.comm.num_ranks + other];
}

// A CTA's chunks of the message, one after the other.
struct Part {
  const MessageCut cut;
  const int64_t bytes;
  int64_t chunk;

  __device__ explicit Part(const Message& message)
      : cut(cut_message(message.bytes)), bytes(message.bytes), chunk(blockIdx.x) {}
  __device__ bool is_left() const { return chunk < cut.chunks; }
  __device__ int64_t begin() const { return chunk * cut.chunk_bytes; }
  __device__ int64_t size() const { return min(cut.chunk_bytes, bytes - begin()); }
  __device__ void next() { chunk += cut.parts; }
};

// All threads. `from` and `to` are multiples of the unit's size.
template <class Unit>
__device__ void copy_chunk(char* to, const char* from, int64_t bytes) {
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = threadIdx.x; first < units; first += kInFlight * kThreads) {
    Unit values[kInFlight] = {};
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * kThreads < units)
        values[v] = load_shared(reinterpret_cast<const Unit*>(from) + first + v * kThreads);
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * kThreads < units) reinterpret_cast<Unit*>(to)[first + v * kThreads] = values[v];
  }
  const int64_t rest = units * static_cast<int64_t>(sizeof(Unit)) + threadIdx.x;
  if (rest < bytes) to[rest] = ptx::ld_coherent(from + rest);
}

__device__ Run begin(const Comm& comm, Step step) {
  Run run{comm, step, 0, true};
  run.ok = __syncthreads_or(faulted(comm)) == 0;
  return run;
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) ep_send(const __grid_constant__ DeviceMessageArgs args) {
  const Message& message = args.message;
  const Run run = begin(args.comm, kSend);
  if (!run.ok) return;
  const int index = static_cast<int>(blockIdx.x);
  PartWords& words = lane_at(args, args.comm.rank, message.peer).words[index];
  DeviceLane& lane = lane_at(args, message.peer, args.comm.rank);
  uint64_t written = words.written;
  for (Part part(message); part.is_left(); part.next(), ++written) {
    const uint64_t least = written < kPartSlots ? 0 : written + 1 - kPartSlots;  // has been read: the slot is free
    const bool ok = threadIdx.x != 0 || peer::wait_at_least(run, &words.consumed, least, message.peer);
    if (__syncthreads_and(ok) == 0) return;
    PartSlot& slot = lane.slots[index][written % kPartSlots];
    copy_chunk<Unit>(slot.data, at<const char>(message.data, part.begin()), part.size());
    if (threadIdx.x == 0) slot.header = MessageHeader{0, message.bytes, message.dtype};
    __syncthreads();
    if (threadIdx.x == 0) {
      peer::fence();
      peer::signal(&lane.words[index].sent, written + 1);
    }
  }
  if (threadIdx.x == 0) words.written = written;
}

__device__ bool check_header(const Run& run, const MessageHeader& theirs, const Message& message) {
  const int64_t bytes = ptx::ld_coherent(&theirs.bytes), dtype = ptx::ld_coherent(&theirs.dtype);
  if (bytes != message.bytes)
    return fail(run.comm, kDisagree, run.step, message.peer, kMessageBytes, message.bytes, bytes);
  if (dtype != message.dtype)
    return fail(run.comm, kDisagree, run.step, message.peer, kMessageDtype, message.dtype, dtype);
  return true;
}

__device__ void poison(const Message& message, Part part) {
  for (; part.is_left(); part.next())
    fill_bytes(message.data + static_cast<uint64_t>(part.begin()), part.size(), 0xFF, threadIdx.x, blockDim.x);
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) ep_receive(const __grid_constant__ DeviceMessageArgs args) {
  const Message& message = args.message;
  const Run run = begin(args.comm, kReceive);
  if (!run.ok) return poison(message, Part(message));
  const int index = static_cast<int>(blockIdx.x);
  DeviceLane& lane = lane_at(args, args.comm.rank, message.peer);
  PartWords& words = lane.words[index];
  uint64_t* consumed = &lane_at(args, message.peer, args.comm.rank).words[index].consumed;
  uint64_t read = words.read;
  for (Part part(message); part.is_left(); part.next(), ++read) {
    const PartSlot& slot = lane.slots[index][read % kPartSlots];
    const bool ok = threadIdx.x != 0 || (peer::wait_at_least(run, &words.sent, read + 1, message.peer) &&
                                         check_header(run, slot.header, message));
    if (__syncthreads_and(ok) == 0) return poison(message, part);
    copy_chunk<Unit>(at<char>(message.data, part.begin()), slot.data, part.size());
    __syncthreads();
    if (threadIdx.x == 0) peer::signal(consumed, read + 1);
  }
  if (threadIdx.x == 0) words.read = read;
}

template <class Unit>
void launch_message(const DeviceMessageArgs& args) {
  const int parts = cut_message(args.message.bytes).parts;
  if (args.message.receives != 0)
    launch_cooperatively<ep_receive<Unit>>("receive", parts, kThreads, 0, args.stream, args);
  else
    launch_cooperatively<ep_send<Unit>>("send", parts, kThreads, 0, args.stream, args);
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

}  // namespace ep::cuda
