// Send and receive: messages, and the queues of CPU ranks.
#include "cpu/collectives/messages.h"
#include "bindings/bind.h"
#include "common/send_receive.h"

namespace ep::bindings {

void bind_messages(py::module_& m) {
  using cpu::Messages;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.attr("max_message_channels") = kMaxMessageChannels;
  m.def("message_memory_bytes", &message_memory_bytes);
  Struct<Message>(m, "Message")
      .field("peer", &Message::peer)
      .field("channel", &Message::channel)
      .field("receives", &Message::receives)
      .field("data", &Message::data)
      .field("bytes", &Message::bytes)
      .field("dtype", &Message::dtype);
  m.def("device_message_memory_bytes", &device_message_memory_bytes);
  m.def("message_sms", [](const Message& message) { return ceil_div(cut_message(message.bytes).parts, kPartsOfSm); });
  Struct<DeviceMessageArgs>(m, "DeviceMessageArgs")
      .field("comm", &DeviceMessageArgs::comm)
      .field("message", &DeviceMessageArgs::message)
      .field("stream", &DeviceMessageArgs::stream);
  py::class_<Messages>(m, "CpuMessages")
      .def(py::init<const Comm&, const std::vector<Address>&, int>())
      .def("post", &Messages::post, Unlocked())
      .def("is_over", &Messages::is_over, Unlocked())
      .def("is_done", &Messages::is_done, Unlocked())
      .def("wait",
           [](Messages& self, const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t timeout_ns) {
             WaitResult result;
             {
               py::gil_scoped_release release;
               result = self.wait(tickets, limit_ns, timeout_ns);
             }
             raise_interruption();
             return static_cast<int>(result);
           })
      .def("wait_for_sends",
           [](Messages& self, int64_t timeout_ns) {
             WaitResult result;
             {
               py::gil_scoped_release release;
               result = self.wait_for_sends(timeout_ns);
             }
             raise_interruption();
             return static_cast<int>(result);
           })
      .def("close", &Messages::close, Unlocked());
}

}  // namespace ep::bindings
