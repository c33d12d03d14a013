// Send and receive inside a node: the engine in control, and the messages of CPU and GPU ranks.
#include "control/messages.h"

#include <cstring>
#include <tuple>

#include "bindings/functions.h"
#include "control/gpu_messages.h"
#include "control/nccl_rail.h"
#include "cpu/collectives/messages.h"

namespace ep::bindings {

namespace {

using control::GpuMessages;
using control::Messages;
using control::Object;
using control::StartedMessages;
using Unlocked = py::call_guard<py::gil_scoped_release>;

PyObject* start(Messages& engine, PyObject* const* args, Py_ssize_t count) {
  std::shared_ptr<StartedMessages> started;
  if (!engine.start(args, count, started)) return nullptr;
  return started == nullptr ? Py_NewRef(Py_None) : py::cast(started).release().ptr();
}

py::object object_of(const Object& object) {
  return object ? py::reinterpret_borrow<py::object>(object.get()) : py::none();
}

// A function of Python in the place of one of CUDA. control calls it without the interpreter's lock.
template <class Result, class... Args>
void assign(std::function<Result(Args...)>& function, const py::object& functions, const char* name) {
  function = [functions, name](Args... args) -> Result {
    const py::gil_scoped_acquire held;
    return functions.attr(name)(args...).template cast<Result>();
  };
}

control::MessageCalls calls_of(const py::object& functions) {
  if (functions.is_none()) return control::message_calls();
  control::MessageCalls calls;
  assign(calls.load, functions, "load_message_kernels");
  assign(calls.send, functions, "send_message");
  assign(calls.receive, functions, "receive_message");
  assign(calls.make_stream, functions, "make_stream");
  assign(calls.drop_stream, functions, "drop_stream");
  assign(calls.mark, functions, "mark");
  assign(calls.drop_mark, functions, "drop_mark");
  assign(calls.is_over, functions, "is_over");
  assign(calls.order_after, functions, "order_after");
  assign(calls.wait_on_host, functions, "wait_on_host");
  assign(calls.fill, functions, "fill");
  assign(calls.order_streams, functions, "order_streams");
  assign(calls.write, functions, "write");
  return calls;
}

// The functions of NCCL at these addresses, in the order of the struct.
control::NcclFunctions nccl_at(const std::vector<Address>& addresses) {
  control::NcclFunctions nccl;
  if (addresses.size() != sizeof(nccl) / sizeof(Address))
    throw py::value_error("functions: expected " + std::to_string(sizeof(nccl) / sizeof(Address)) + " addresses, got " +
                          std::to_string(addresses.size()));
  std::memcpy(&nccl, addresses.data(), sizeof(nccl));
  return nccl;
}

void bind_rail(py::module_& m) {
  using control::NcclRail;
  py::class_<NcclRail>(m, "NcclRail")
      .def(py::init([](const std::vector<Address>& functions, Address comm, uint64_t stream, int device, Address word,
                       const py::object& calls) {
             return std::make_unique<NcclRail>(nccl_at(functions), comm, stream, device, word, calls_of(calls));
           }),
           py::arg("functions"), py::arg("comm"), py::arg("stream"), py::arg("device"), py::arg("word"), py::kw_only(),
           py::arg("calls") = py::none())
      .def("start",
           [](NcclRail& rail, uint64_t after, uint64_t number,
              const std::vector<std::tuple<int, Address, int64_t, bool>>& given) {
             std::vector<NcclRail::Message> messages;
             for (const auto& [node, address, bytes, is_sent] : given)
               messages.push_back({node, address, bytes, is_sent});
             const py::gil_scoped_release released;
             return rail.start(after, number, messages);
           })
      .def("gather", &NcclRail::gather, Unlocked())
      .def("wait", &NcclRail::wait, Unlocked())
      .def("end", &NcclRail::end, Unlocked());
}

void bind_queues(py::module_& m) {
  py::class_<MessageQueue, std::shared_ptr<MessageQueue>>(m, "MessageQueue")
      .def(
          "post", [](MessageQueue& queue, const Message& message) { return queue.post(message, 0); }, Unlocked())
      .def(
          "wait",
          [](MessageQueue& queue, const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t timeout_ns) {
            return static_cast<int>(queue.wait(tickets, limit_ns, timeout_ns, 0));
          },
          Unlocked())
      .def("close", &MessageQueue::close, Unlocked());
  py::class_<cpu::Messages, MessageQueue, std::shared_ptr<cpu::Messages>>(m, "CpuMessages")
      .def(py::init<const Comm&, const std::vector<Address>&, int>());
  py::class_<GpuMessages, MessageQueue, std::shared_ptr<GpuMessages>>(m, "GpuMessages")
      .def(py::init([](const Comm& comm, Address board, std::shared_ptr<control::SmBudget> budget, int device,
                       const py::object& calls) {
             return std::make_shared<GpuMessages>(comm, board, std::move(budget), device, calls_of(calls));
           }),
           py::arg("comm"), py::arg("board"), py::arg("budget"), py::arg("device"), py::pos_only(),
           py::arg("calls") = py::none(), py::keep_alive<1, 2>());
}

void bind_engine(py::module_& m) {
  py::class_<Messages, std::shared_ptr<Messages>>(m, "Messages")
      .def(py::init([](const py::object& owner, const py::object& running, const py::object& device,
                       std::shared_ptr<control::CallLog> log, const std::string& name, Address board, int device_index,
                       const py::object& comm, std::shared_ptr<MessageQueue> queue, std::vector<int> places,
                       int num_channels, bool in_order, const py::dict& codes) {
        auto engine = std::make_shared<Messages>(owner.ptr(), running.ptr(), device.ptr(), std::move(log), name, board,
                                                 device_index);
        engine->comm = &comm.cast<const Comm&>();
        engine->comm_object = Object(kept(comm));
        engine->queue = std::move(queue);
        engine->places = std::move(places);
        engine->num_channels = num_channels;
        engine->in_order = in_order;
        engine->codes = Object(kept(codes));
        return engine;
      }))
      .def("start_function",
           [](const std::shared_ptr<Messages>& engine) { return fast_function<Messages, &start>(engine, "start"); })
      .def_readonly("num_calls", &Messages::num_calls)
      .def_readonly("num_looks", &Messages::num_looks)
      .def_property_readonly("num_waiters", [](const Messages& engine) { return engine.waiters.size(); })
      .def_property_readonly("is_waiting", &Messages::is_waiting)
      .def("keep",
           [](Messages& engine, const control::Call& call, const py::list& memory) {
             std::shared_ptr<StartedMessages> started = engine.keep(call, Object(kept(memory)));
             require(started != nullptr);
             return started;
           })
      .def("post", [](Messages& engine, StartedMessages& started,
                      std::vector<Message> messages) { require(engine.post(started, std::move(messages))); })
      .def("kept", &Messages::kept)
      .def("wait_for_sends",
           [](const Messages& engine) {
             require(control::run_unlocked([&] { engine.queue->wait_for_sends(engine.comm->timeout_ns); }));
           })
      .def("close", &Messages::close);
  py::class_<StartedMessages, std::shared_ptr<StartedMessages>>(m, "StartedMessages")
      .def_property(
          "transfers", [](const StartedMessages& started) { return object_of(started.transfers); },
          [](StartedMessages& started, const py::object& transfers) { started.transfers = Object(kept(transfers)); })
      .def_property_readonly("memory", [](const StartedMessages& started) { return object_of(started.memory); })
      .def_property_readonly("nbytes", [](const StartedMessages& started) { return started.call.nbytes; })
      .def("wait", [](const std::shared_ptr<StartedMessages>& started,
                      int64_t limit_ns) { return returned(Object(started->wait(limit_ns))); })
      .def("is_over", &StartedMessages::is_over, Unlocked())
      .def("is_done", &StartedMessages::is_done, Unlocked());
}

}  // namespace

void bind_messages(py::module_& m) {
  m.attr("max_message_channels") = kMaxMessageChannels;
  m.def("message_memory_bytes", &message_memory_bytes);
  m.def("device_message_memory_bytes", &device_message_memory_bytes);
  m.def("message_sms", &message_sms);
  EP_STRUCT(m, Message, peer, channel, receives, data, bytes, dtype);
  EP_STRUCT(m, DeviceMessageArgs, comm, message, stream);
  bind_queues(m);
  bind_rail(m);
  bind_engine(m);
}

}  // namespace ep::bindings
