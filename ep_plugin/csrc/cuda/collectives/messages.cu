// Send and receive inside a node: a kernel at each end moves a message through the receiver's cells. Each end chooses
// for itself whether it copies in bulk (message_copy.cuh). Cells and words are the same.
//
// Order. The host launches the messages of a lane on one stream, in the order of the calls.
// Co-residency. A CTA waits for the CTA of its part, so kernels of several parts are launched cooperatively.
#include "cuda/collectives/message_copy.cuh"

namespace ep::cuda {

namespace {

template <class Copy>
constexpr int kThreads = (Copy::kWarps + 1) * kWarp;
template <class Copy>
__device__ __forceinline__ bool is_guide() {
  return threadIdx.x == Copy::kWarps * kWarp;
}
template <class Copy>
__device__ __forceinline__ bool copies() {
  return threadIdx.x < Copy::kWarps * kWarp;
}

template <class Copy>
__global__ void __launch_bounds__(kThreads<Copy>)
    ep_send(const __grid_constant__ DeviceMessageArgs args, const __grid_constant__ Cut cut) {
  __shared__ Counters counters;
  counters.clear();
  const Message& message = args.message;
  DeviceLane& lane = lane_of_peer(args);  // loads while the CTA joins
  const Run run = begin(args.comm, kSend);
  if (!run.ok) return;
  const int index = static_cast<int>(blockIdx.x);
  PartWords& words = own_lane(args).words[index];
  const Part part(message);
  const int chunks = part.chunks();
  const uint64_t before = words.written;
  if (is_guide<Copy>()) {
    bool has_header = false;
    const auto allowed = [&](uint64_t* consumed) {
      *consumed = peer::acquire(&words.consumed);
      const int room = at_most(*consumed + kPartCells - before, chunks);
      if (!has_header && room > 0)
        lane.headers[before % kPartCells][index] = MessageHeader{0, message.bytes, message.dtype};
      has_header = room > 0;
      return room;
    };
    const auto signal = [&](int sent) { peer::store(&lane.words[index].sent, before + sent); };
    const auto next = [&](int sent) { return before + sent + 1 - kPartCells; };
    guide(run, counters, Copy::kWarps, chunks, message.peer, allowed, signal, next);
  } else if (copies<Copy>()) {
    Copy::send(run, cut, part, counters, at<const char>(message.data),
               [&](int chunk) { return lane.cells[(before + chunk) % kPartCells][index]; });
  }
  __syncthreads();
  if (threadIdx.x == 0 && counters.finished == chunks) words.written = before + chunks;
}

template <class Copy>
__global__ void __launch_bounds__(kThreads<Copy>)
    ep_receive(const __grid_constant__ DeviceMessageArgs args, const __grid_constant__ Cut cut) {
  __shared__ Counters counters;
  counters.clear();
  const Message& message = args.message;
  const Run run = begin(args.comm, kReceive);
  const Part part(message);
  if (!run.ok) return poison(message, part, 0);
  const int index = static_cast<int>(blockIdx.x);
  DeviceLane& lane = own_lane(args);
  PartWords& words = lane.words[index];
  const int chunks = part.chunks();
  const uint64_t before = words.read;
  if (is_guide<Copy>()) {
    bool checked = false;
    uint64_t* consumed = &lane_of_peer(args).words[index].consumed;
    const auto allowed = [&](uint64_t* sent) {
      *sent = peer::acquire(&words.sent);
      const int arrived = at_most(*sent - before, chunks);
      if (!checked && arrived > 0 && !check_header(run, lane.headers[before % kPartCells][index], message)) return -1;
      checked = arrived > 0;
      return arrived;
    };
    const auto signal = [&](int read) { peer::store(consumed, before + read); };
    const auto next = [&](int read) { return before + read + 1; };
    guide(run, counters, Copy::kWarps, chunks, message.peer, allowed, signal, next);
  } else if (copies<Copy>()) {
    Copy::receive(run, cut, part, counters, at<char>(message.data),
                  [&](int chunk) { return lane.cells[(before + chunk) % kPartCells][index]; });
  }
  __syncthreads();
  if (counters.finished < chunks) return poison(message, part, counters.finished);
  if (threadIdx.x == 0) words.read = before + chunks;
}

template <auto kKernel>
void launch_end(const char* name, const DeviceMessageArgs& args, int threads, const Cut& cut) {
  const int parts = cut_message(args.message.bytes).parts;
  if (parts == 1) return launch<kKernel>(name, 1, threads, cut.shared_bytes(), args.stream, args, cut);
  launch_cooperatively<kKernel>(name, parts, threads, cut.shared_bytes(), args.stream, args, cut);
}

template <class Copy>
void launch_message(const DeviceMessageArgs& args, const Cut& cut) {
  if (args.message.receives != 0)
    launch_end<ep_receive<Copy>>("receive", args, kThreads<Copy>, cut);
  else
    launch_end<ep_send<Copy>>("send", args, kThreads<Copy>, cut);
}

bool moves_in_bulk(const DeviceMessageArgs& args) {
  const KernelLimits limits = limits_of<ep_send<BulkCopy>>();
  return limits.bulk && args.comm.plain == 0 && BulkCopy::cut().shared_bytes() <= limits.shared_bytes &&
         args.message.bytes > 0 && (args.message.data | static_cast<uint64_t>(args.message.bytes)) % 16 == 0;
}

template <class Copy>
void load_both() {
  limits_of<ep_send<Copy>>();
  limits_of<ep_receive<Copy>>();
}

void move_message(const DeviceMessageArgs& args) {
  const Message& message = args.message;
  require_node(args.comm);
  require(message.peer >= 0 && message.peer < args.comm.num_ranks && message.peer != args.comm.rank, "peer",
          "another rank of the node", message.peer);
  require(message.channel >= 0 && message.channel < kMaxMessageChannels, "channel", "0 to 15", message.channel);
  require(message.bytes >= 0, "bytes", "0 or more", message.bytes);
  if (moves_in_bulk(args)) return launch_message<BulkCopy>(args, BulkCopy::cut());
  const Cut none{};
  switch (unit_of(message.data)) {
    case 16:
      return launch_message<PlainCopy<int4>>(args, none);
    case 8:
      return launch_message<PlainCopy<uint64_t>>(args, none);
    case 4:
      return launch_message<PlainCopy<uint32_t>>(args, none);
    case 2:
      return launch_message<PlainCopy<uint16_t>>(args, none);
    default:
      return launch_message<PlainCopy<unsigned char>>(args, none);
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
  load_both<PlainCopy<int4>>();
  load_both<PlainCopy<uint64_t>>();
  load_both<PlainCopy<uint32_t>>();
  load_both<PlainCopy<uint16_t>>();
  load_both<PlainCopy<unsigned char>>();
  load_both<BulkCopy>();
}

}  // namespace ep::cuda
