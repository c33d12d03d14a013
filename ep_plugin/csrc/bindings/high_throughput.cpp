// The engine of high-throughput dispatch and combine, and their operations.
#include "bindings/functions.h"
#include "control/high_throughput_operation.h"
#include "control/segments.h"

namespace ep::bindings {

namespace {

using control::Combine;
using control::CombinePlan;
using control::Dispatch;
using control::DispatchPlan;
using control::HighThroughput;
using control::HighThroughputOperation;
using control::Object;

// A kernel that is a function of Python. control calls it without the interpreter's lock.
template <class... Args>
void assign(std::function<void(const Args&...)>& kernel, const py::object& kernels, const char* name) {
  kernel = [kernels, name](const Args&... args) {
    {
      const py::gil_scoped_acquire held;
      try {
        kernels.attr(name)(py::cast(const_cast<Args*>(&args), py::return_value_policy::reference)...);
        return;
      } catch (py::error_already_set& error) {
        error.restore();
      }
    }
    throw std::runtime_error(name);  // control then finds Python's error
  };
}

// Takes the kernels of a module of _C, or functions of Python with their names.
void set_kernels(HighThroughput& engine, const py::object& kernels) {
  control::HighThroughputKernels& to = engine.kernels;
  if (py::isinstance<py::module_>(kernels)) {
    const KernelTable& table = *at<KernelTable>(kernels.attr("table").cast<Address>());
    to = {table.plan,     table.notify,       table.dispatch_send, table.dispatch_recv,
          table.dispatch, table.combine_send, table.combine_recv,  table.combine,
          table.layout,   table.place,        table.positions};
    return;
  }
  assign(to.plan, kernels, "plan");
  assign(to.notify, kernels, "notify");
  assign(to.dispatch_send, kernels, "dispatch_send");
  assign(to.dispatch_recv, kernels, "dispatch_recv");
  assign(to.dispatch, kernels, "dispatch");
  assign(to.combine_send, kernels, "combine_send");
  assign(to.combine_recv, kernels, "combine_recv");
  assign(to.combine, kernels, "combine");
  assign(to.layout, kernels, "layout");
  assign(to.place, kernels, "place");
  assign(to.positions, kernels, "positions");
}

// Takes the streams of an engine. functions: None, or an object whose methods order them in the place of C. order: null
// if nothing needs ordering.
void set_streams(HighThroughput& engine, uint64_t own, const py::object& functions,
                 const std::shared_ptr<control::StreamOrder>& order) {
  engine.streams = {own, {}, {}};
  engine.caller = {};
  if (!functions.is_none()) {
    engine.caller = [functions] { return functions.attr("caller")().cast<uint64_t>(); };
    engine.streams.order = [functions](uint64_t later, uint64_t earlier) {
      const py::gil_scoped_acquire held;
      functions.attr("order_after")(later, earlier);
    };
    engine.streams.enter = [functions](uint64_t stream, int sms, int needed) {
      const py::gil_scoped_acquire held;
      functions.attr("enter_on")(stream, sms, needed);
    };
  } else if (engine.is_on_gpu()) {
    engine.streams.order = [device = engine.device_index](uint64_t later, uint64_t earlier) {
      control::cuda_calls().order_streams(later, earlier, device);
    };
    engine.streams.enter = [order](uint64_t stream, int sms, int needed) { order->enter(stream, sms, needed); };
  }
}

int32_t number_of(const std::string& dtype) {
  const int32_t number = control::dtype_number(dtype);
  if (number < 0) throw py::value_error("dtype: expected one of PyTorch's C interface, got " + dtype);
  return number;
}

int32_t float_number(int64_t bytes) { return bytes == 0 ? -1 : number_of(bytes == 8 ? "float64" : "float32"); }

template <class Door>
py::object whole(const std::shared_ptr<HighThroughput>& engine, const char* name) {
  return function_of<Door, HighThroughput, &control::run_whole<typename Door::Kind>>(engine, name);
}

// Makes an operation from its operator's arguments without the last two.
template <class Door>
std::shared_ptr<typename Door::Kind> made_of(const std::shared_ptr<HighThroughput>& engine, const py::args& given) {
  typename Door::Kind::Given read{};
  if (given.size() != Door::num_args || !Door::read(*engine, &PyTuple_GET_ITEM(given.ptr(), 0), read))
    throw py::value_error("expected the arguments of an operator");
  auto operation = std::make_shared<typename Door::Kind>(engine, read);
  require(PyErr_Occurred() == nullptr);
  return operation;
}

// Returns the functions of deep_ep.Buffer's calls, whose handles are tuples of the class `handle_type`.
py::tuple buffer_functions(const std::shared_ptr<HighThroughput>& engine, const py::type& handle_type) {
  engine->buffer_handle = Object(kept(handle_type));
  return py::make_tuple(whole<control::DispatchOfBuffer>(engine, "buffer_dispatch"),
                        whole<control::CombineOfBuffer>(engine, "buffer_combine"));
}

// Makes a Buffer's call known, which has passed all checks and was run as the operator's call. Both: the arguments.
template <class Door, class OfOperator>
void learn_buffer(const std::shared_ptr<HighThroughput>& engine, const py::tuple& of_buffer,
                  const py::args& of_operator) {
  typename Door::Kind::Given read{};
  if (of_buffer.size() != Door::num_args || !Door::read(*engine, &PyTuple_GET_ITEM(of_buffer.ptr(), 0), read)) return;
  typename Door::Kind(engine, read).learn_from(*made_of<OfOperator>(engine, of_operator));
  require(PyErr_Occurred() == nullptr);
}

void bind_engine(py::module_& m) {
  py::class_<HighThroughput, std::shared_ptr<HighThroughput>>(m, "HighThroughput")
      .def(
          py::init([](const py::object& owner, const py::object& running, const py::object& device,
                      std::shared_ptr<control::CallLog> log, const std::string& name, Address board, int device_index) {
            return std::make_shared<HighThroughput>(owner.ptr(), running.ptr(), device.ptr(), std::move(log), name,
                                                    board, device_index);
          }))
      .def("set_facts",
           [](HighThroughput& engine, int layout, int alignment, int size, int num_experts, int64_t max_tokens,
              int64_t totals_ns) {
             engine.layout = layout;
             engine.alignment = alignment;
             engine.size = size;
             engine.num_experts = num_experts;
             engine.local_experts = num_experts / size;
             engine.max_tokens = max_tokens;
             engine.totals_ns = totals_ns;
           })
      .def("set_comm", &set_comm<HighThroughput>)
      .def("set_kernels", &set_kernels)
      .def("set_streams", &set_streams)
      .def("set_number", [](HighThroughput& engine, const py::int_& number) { engine.number = Object(kept(number)); })
      .def("set_serves",
           [](HighThroughput& engine, const py::tuple& served_as) { engine.serves = Object(kept(served_as)); })
      .def("forget_plans",
           [](HighThroughput& engine) {
             engine.dispatches.clear();
             engine.combines.clear();
           })
      .def("dispatch_function",
           [](const std::shared_ptr<HighThroughput>& engine) {
             return whole<control::DispatchOfCommunicator>(engine, "dispatch");
           })
      .def("combine_function",
           [](const std::shared_ptr<HighThroughput>& engine) {
             return whole<control::CombineOfCommunicator>(engine, "combine");
           })
      .def("dispatch_operator",
           [](const std::shared_ptr<HighThroughput>& engine) {
             return whole<control::DispatchOfOperator>(engine, "dispatch");
           })
      .def("combine_operator",
           [](const std::shared_ptr<HighThroughput>& engine) {
             return whole<control::CombineOfOperator>(engine, "combine");
           })
      .def("buffer_functions", &buffer_functions)
      .def("learn_buffer_dispatch", &learn_buffer<control::DispatchOfBuffer, control::DispatchOfOperator>)
      .def("learn_buffer_combine", &learn_buffer<control::CombineOfBuffer, control::CombineOfOperator>)
      .def("new_dispatch", &made_of<control::DispatchOfOperator>)
      .def("new_combine", &made_of<control::CombineOfOperator>)
      .def(
          "enter",
          [](const HighThroughput& engine, uint64_t stream, const std::pair<int, int>& sms) {
            engine.enter(stream, {sms.first, sms.second});
          },
          py::call_guard<py::gil_scoped_release>())
      .def("room_for", &HighThroughput::room_for)
      .def("reserve", [](HighThroughput& engine, int pool, int64_t nbytes) { require(engine.reserve(pool, nbytes)); })
      .def("next_ticket", &HighThroughput::next_ticket)
      .def("wait_totals", [](HighThroughput& engine, uint64_t ticket) { require(engine.wait_totals(ticket)); })
      .def_readonly("num_calls", &HighThroughput::num_calls)
      .def_readonly("reserved", &HighThroughput::reserved)
      .def_readwrite("is_busy", &HighThroughput::is_busy)
      .def_readwrite("denies_totals", &HighThroughput::denies_totals);
}

// A function of an operation that enqueues the kernels of a segment.
template <class Segmented, bool (Segmented::*run)(const HighThroughput&, const control::Sms&, int) const>
void run_segment(const Segmented& operation, const HighThroughput& engine, const std::pair<int, int>& sms,
                 int segment) {
  require((operation.*run)(engine, {sms.first, sms.second}, segment));
}

void bind_segments(py::module_& m) {
  using control::SegmentedCombine;
  using control::SegmentedDispatch;
  using control::SegmentedRouting;
  EP_STRUCT(m, SegmentedRouting, nodes, plan, recv_rows, tokens, slots, topk);
  m.def("segment_of", &control::segment_of);
  EP_STRUCT(m, SegmentedDispatch, routing, header, ids, id_bytes, padded, own_ids, messages, block_counts, own, landed,
            landed_ids, output)
      .def("lay_out",
           [](const SegmentedDispatch& self, const HighThroughput& engine) { require(self.lay_out(engine)); })
      .def("notify", [](const SegmentedDispatch& self, const HighThroughput& engine, const std::pair<int, int>& sms,
                        uint64_t ticket) { require(self.notify(engine, {sms.first, sms.second}, ticket)); })
      .def("send", &run_segment<SegmentedDispatch, &SegmentedDispatch::send>)
      .def("receive", &run_segment<SegmentedDispatch, &SegmentedDispatch::receive>);
  EP_STRUCT(m, SegmentedCombine, routing, header, rows, sums, extras)
      .def("send", &run_segment<SegmentedCombine, &SegmentedCombine::send>)
      .def("receive", &run_segment<SegmentedCombine, &SegmentedCombine::receive>);
}

void bind_expected(py::module_& m) {
  py::class_<control::Expected>(m, "Expected")
      .def(py::init<>())
      .def("saw", [](control::Expected& expected, int64_t num_tokens, int64_t topk, int64_t output,
                     int64_t slots) { expected.saw(num_tokens, topk, {output, slots}); })
      .def("guess", [](const control::Expected& expected, int64_t num_tokens, int64_t topk) -> py::object {
        control::Rows room{};
        if (!expected.guess(num_tokens, topk, &room)) return py::none();
        return py::make_tuple(room.output, room.slots);
      });
}

// Runs the whole operation, or what is left of it. recorder: records it once all its kernels are enqueued.
template <bool (HighThroughputOperation::*run)()>
void run_to_end(HighThroughputOperation& operation, const py::object& recorder) {
  operation.recorder = Object(kept(recorder));
  const bool is_done = (operation.*run)();
  operation.recorder = Object();  // it may hold the operation
  require(is_done);
}

void bind_operations(py::module_& m) {
  py::class_<HighThroughputOperation, std::shared_ptr<HighThroughputOperation>>(m, "HighThroughputOperation")
      .def_property_readonly("is_known", &HighThroughputOperation::is_known)
      .def_readwrite("shares_memory", &HighThroughputOperation::shares_memory)
      .def("start", [](HighThroughputOperation& operation) { require(operation.start()); })
      .def("finish", &run_to_end<&HighThroughputOperation::finish>)
      .def("whole", &run_to_end<&HighThroughputOperation::whole>)
      .def("results", [](const HighThroughputOperation& operation) { return returned(operation.results()); })
      .def("tensors", [](const HighThroughputOperation& operation) { return returned(operation.tensors()); });
  py::class_<Dispatch, HighThroughputOperation, std::shared_ptr<Dispatch>>(m, "Dispatch")
      .def("learn", [](Dispatch& operation, const Header& header, const std::pair<int, int>& sms, int64_t columns,
                       const std::string& dtype, int64_t scale_columns, const std::string& scale_dtype,
                       const std::string& id_dtype, int quantize, int element, int64_t capacity) {
        operation.learn({header,
                         {sms.first, sms.second},
                         columns,
                         scale_columns,
                         number_of(dtype),
                         number_of(scale_dtype),
                         float_number(header.weight_bytes),
                         number_of(id_dtype),
                         quantize,
                         element,
                         capacity});
      });
  py::class_<Combine, HighThroughputOperation, std::shared_ptr<Combine>>(m, "Combine")
      .def("learn", [](Combine& operation, const Header& header, const std::pair<int, int>& sms,
                       const std::string& dtype, int element, bool is_per_row, bool has_wide_bias) {
        operation.learn({header,
                         {sms.first, sms.second},
                         number_of(dtype),
                         float_number(header.weight_bytes),
                         element,
                         is_per_row,
                         has_wide_bias});
      });
}

}  // namespace

void bind_high_throughput(py::module_& m) {
  bind_engine(m);
  bind_segments(m);
  bind_expected(m);
  bind_operations(m);
}

}  // namespace ep::bindings
