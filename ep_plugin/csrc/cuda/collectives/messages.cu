// Send and receive inside a node: a kernel at each end moves a message through the receiver's slots. Each end chooses
// for itself between bulk copies (message_bulk.cuh) and plain ones (message_plain.cuh). Slots and words are the same.
//
// Order. The host launches the messages of a lane on one stream, in the order of the calls.
// Co-residency. A CTA waits for the CTA of its part, so kernels of several parts are launched cooperatively.
#include "cuda/collectives/message_bulk.cuh"
#include "cuda/collectives/message_plain.cuh"

namespace ep::cuda {

namespace {

template <auto kKernel, class... More>
void launch_end(const char* name, const DeviceMessageArgs& args, int threads, int64_t shared_bytes,
                const More&... more) {
  const int parts = cut_message(args.message.bytes).parts;
  if (parts == 1) return launch<kKernel>(name, 1, threads, shared_bytes, args.stream, args, more...);
  launch_cooperatively<kKernel>(name, parts, threads, shared_bytes, args.stream, args, more...);
}

template <class Unit>
void launch_plain(const DeviceMessageArgs& args) {
  if (args.message.receives != 0)
    launch_end<ep_receive<Unit>>("receive", args, kThreads, 0);
  else
    launch_end<ep_send<Unit>>("send", args, kThreads, 0);
}

void launch_bulk(const DeviceMessageArgs& args) {
  const Cut cut = stages_of_part();
  if (args.message.receives != 0)
    launch_end<ep_receive_bulk>("receive", args, kWarp, cut.shared_bytes(), cut);
  else
    launch_end<ep_send_bulk>("send", args, kWarp, cut.shared_bytes(), cut);
}

bool moves_in_bulk(const DeviceMessageArgs& args) {
  const KernelLimits limits = limits_of<ep_send_bulk>();
  return limits.bulk && args.comm.plain == 0 && stages_of_part().shared_bytes() <= limits.shared_bytes &&
         args.message.bytes > 0 && (args.message.data | static_cast<uint64_t>(args.message.bytes)) % 16 == 0;
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
  if (moves_in_bulk(args)) return launch_bulk(args);
  switch (unit_of(message.data)) {
    case 16:
      return launch_plain<int4>(args);
    case 8:
      return launch_plain<uint64_t>(args);
    case 4:
      return launch_plain<uint32_t>(args);
    case 2:
      return launch_plain<uint16_t>(args);
    default:
      return launch_plain<unsigned char>(args);
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
  limits_of<ep_send_bulk>();
  limits_of<ep_receive_bulk>();
}

}  // namespace ep::cuda
