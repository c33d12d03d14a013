// The host path: PyTorch's C functions, the form of a call's tensors, and operations that one call of C starts.
#include <pybind11/functional.h>

#include "bindings/functions.h"
#include "control/inputs.h"
#include "control/low_latency.h"

namespace ep::bindings {

namespace {

using control::LowLatency;
using control::LowLatencyCombinePlan;
using control::LowLatencyDispatchPlan;
using control::Object;
using Operation = control::LowLatencyOperation;

template <class Kind>
PyObject* run(LowLatency& engine, const typename Kind::Given& given) {
  return engine.run<Kind>(given);
}

template <class Kind>
PyObject* start(LowLatency& engine, const typename Kind::Given& given) {
  std::shared_ptr<Operation> started;
  if (!engine.start<Kind>(given, started)) return nullptr;
  return started == nullptr ? Py_NewRef(Py_None) : py::cast(started).release().ptr();
}

template <class Door>
void add_functions(py::dict& functions, const std::shared_ptr<LowLatency>& engine, const char* name,
                   const char* start_name) {
  functions[name] = function_of<Door, LowLatency, &run<typename Door::Kind>>(engine, name);
  functions[start_name] = function_of<Door, LowLatency, &start<typename Door::Kind>>(engine, start_name);
}

py::dict functions_of(const std::shared_ptr<LowLatency>& engine) {
  py::dict functions;
  add_functions<control::CommunicatorDispatch>(functions, engine, "dispatch", "start_dispatch");
  add_functions<control::CommunicatorCombine>(functions, engine, "combine", "start_combine");
  add_functions<control::OperatorDispatch>(functions, engine, "operator_dispatch", "start_operator_dispatch");
  add_functions<control::OperatorCombine>(functions, engine, "operator_combine", "start_operator_combine");
  add_functions<control::BufferDispatch>(functions, engine, "buffer_dispatch", "start_buffer_dispatch");
  add_functions<control::BufferCombine>(functions, engine, "buffer_combine", "start_buffer_combine");
  return functions;
}

void bind_started_operation(py::module_& m) {
  py::class_<Operation, std::shared_ptr<Operation>> started(m, "StartedOperation");
  started.attr("result") = py::none();
  started.def_readonly("kind", &Operation::kind)
      .def_readonly("capture", &Operation::capture)
      .def_readonly("is_received", &Operation::is_received)
      .def_property_readonly(
          "name", [](const Operation& operation) { return py::reinterpret_borrow<py::str>(operation.name()); })
      .def_property_readonly("nbytes", [](const Operation& operation) { return operation.logged().nbytes; })
      .def_readwrite("number", &Operation::number)
      .def_readwrite("is_dropped", &Operation::is_dropped)
      .def("receive", [](Operation& operation) { return returned(Object(operation.receive())); })
      .def("collect", [](Operation& operation) { return returned(Object(operation.collect())); })
      .def("results", [](const Operation& operation) { return returned(operation.results()); })
      .def("tensors", [](const Operation& operation) { return returned(operation.tensors()); })
      .def("made", [](const Operation& operation) { return returned(operation.made()); });
}

control::Settings settings_of(const py::tuple& settings) {
  return {&PyTuple_GET_ITEM(settings.ptr(), 0), PyTuple_GET_SIZE(settings.ptr())};
}

control::Door door_of(bool is_for_buffer) {
  return is_for_buffer ? control::Door::kBuffer : control::Door::kCommunicator;
}

LlPlanLayout layout_of(const LowLatency& engine, const LlHeader& header) {
  if (engine.comm == nullptr) throw py::value_error("comm: expected set_comm() before");
  return ll_plan_layout(engine.num_ranks(), engine.shared.shape.num_nodes, engine.local_experts, header.max_tokens,
                        header.topk);
}

LlOperation operation_of(const LowLatency& engine, const LlHeader& header) {
  LlOperation operation = engine.shared;
  operation.header = header;
  return operation;
}

py::object form_of(const py::args& tensors) {
  if (control::exchange_api() == nullptr) return py::none();
  control::Inputs inputs;
  for (py::handle tensor : tensors)
    if (!inputs.read(tensor.ptr())) return returned(Object(control::left()));
  return py::bytes(inputs.form());
}

// Makes a stream the current one of its device in a block of Python, by PyTorch's functions. Or does nothing.
class StreamSwitch {
 public:
  StreamSwitch() = default;
  StreamSwitch(py::object get_current, py::object set_current, int64_t stream_id, int64_t device, int64_t device_type)
      : get_(std::move(get_current)), set_(std::move(set_current)), device_(device) {
    stream_ = py::make_tuple(stream_id, device, device_type);
  }
  void enter() {
    if (!set_) return;
    before_ = get_(device_);
    set_(*stream_);
  }
  void exit(const py::args&) {
    if (set_) set_(*before_);
  }

 private:
  py::object get_, set_, stream_, before_;
  int64_t device_ = 0;
};

void bind_low_latency_engine(py::module_& m) {
  py::class_<LowLatency, std::shared_ptr<LowLatency>>(m, "LowLatency")
      .def(py::init([](const py::object& owner, const py::object& running, const py::object& device,
                       std::shared_ptr<control::CallLog> log, const std::string& name, Address board, int device_index,
                       Address table, std::shared_ptr<control::StreamOrder> order, int local_experts,
                       const LlShape& shape, bool shrink, int num_sms, Address state, int node, Address places) {
        auto engine = std::make_shared<LowLatency>(owner.ptr(), running.ptr(), device.ptr(), std::move(log), name,
                                                   board, device_index);
        engine->run_dispatch = at<KernelTable>(table)->ll_dispatch;
        engine->run_combine = at<KernelTable>(table)->ll_combine;
        engine->order = std::move(order);
        engine->local_experts = local_experts;
        engine->shared.shape = shape;
        engine->shared.shrink = shrink;
        engine->shared.num_sms = num_sms;
        engine->shared.state = state;
        engine->shared.node = node;
        engine->shared.places = places;
        return engine;
      }))
      .def("functions", &functions_of)
      .def("set_comm", &set_comm<LowLatency>)
      .def("set_legs",
           [](LowLatency& engine, const py::object& legs, bool pads) {
             engine.legs = Object(kept(legs));
             engine.pads_legs = pads;
           })
      .def("set_caller",
           [](LowLatency& engine, const py::object& streams) {
             engine.caller = [streams] { return streams.attr("caller")().cast<uint64_t>(); };
           })
      .def("un_received", &LowLatency::un_received)
      .def("forget", &LowLatency::forget)
      .def("close", &LowLatency::close)
      .def("set_number", [](LowLatency& engine, const py::int_& number) { engine.number = Object(kept(number)); })
      .def("set_serves",
           [](LowLatency& engine, const py::tuple& served_as) { engine.serves = Object(kept(served_as)); })
      .def_readonly("num_calls", &LowLatency::num_calls)
      .def_readonly("leg_bytes_received", &LowLatency::leg_bytes_received)
      .def("remember_dispatch",
           [](LowLatency& engine, bool is_for_buffer, const std::string& form, const py::tuple& settings,
              const LlHeader& header, int64_t x_stride, int id_bytes, int element, int64_t columns,
              const std::string& dtype, int64_t scales, const std::string& scale_dtype, const py::object& rows_of) {
             LowLatencyDispatchPlan plan{{},
                                         layout_of(engine, header),
                                         columns,
                                         scales,
                                         control::dtype_number(dtype),
                                         control::dtype_number(scale_dtype),
                                         rows_of.is_none() ? Object() : Object(kept(rows_of))};
             plan.args.op = operation_of(engine, header);
             plan.args.x_stride = x_stride;
             plan.args.id_bytes = id_bytes;
             plan.args.element = element;
             engine.dispatches.remember(form, door_of(is_for_buffer), settings_of(settings), plan);
           })
      .def("remember_combine",
           [](LowLatency& engine, bool is_for_buffer, const std::string& form, const py::tuple& settings,
              const LlHeader& header, int id_bytes, int element, int64_t hidden, const std::string& dtype) {
             LowLatencyCombinePlan plan{{}, layout_of(engine, header), control::dtype_number(dtype)};
             plan.args.op = operation_of(engine, header);
             plan.args.id_bytes = id_bytes;
             plan.args.element = element;
             plan.args.hidden = hidden;
             engine.combines.remember(form, door_of(is_for_buffer), settings_of(settings), plan);
           });
}

}  // namespace

Address address_of(py::handle tensor) {
  if (tensor.is_none()) return 0;
  if (control::exchange_api() == nullptr || !control::is_plain(tensor.ptr()))
    return tensor.attr("data_ptr")().cast<Address>();
  DLTensor found;
  if (control::exchange_api()->from_object(tensor.ptr(), &found) != 0) throw py::error_already_set();
  return control::address_of(found);
}

void bind_control(py::module_& m) {
  m.def("find_torch", [](const py::module_& torch) {
    if (!control::find_torch(torch.ptr())) throw py::error_already_set();
  });
  m.def("form_of", &form_of);
  py::class_<StreamSwitch>(m, "StreamSwitch")
      .def(py::init<>())
      .def(py::init<py::object, py::object, int64_t, int64_t, int64_t>())
      .def("__enter__", &StreamSwitch::enter)
      .def("__exit__", &StreamSwitch::exit);
  py::class_<control::SmBudget, std::shared_ptr<control::SmBudget>>(m, "SmBudget")
      .def(py::init(
          [](int device, int sms) { return std::make_shared<control::SmBudget>(device, sms, control::cuda_calls()); }))
      .def(py::init([](int device, int sms, std::function<uint64_t(uint64_t, int)> stream_capture,
                       std::function<void(uint64_t, uint64_t, int)> order_streams) {
        const control::CudaCalls calls{std::move(stream_capture), std::move(order_streams)};
        return std::make_shared<control::SmBudget>(device, sms, calls);
      }))
      .def("reserve", &control::SmBudget::reserve)
      .def_property_readonly("usable", &control::SmBudget::usable);
  const auto enter = [](control::StreamOrder& order, uint64_t current, int sms, std::optional<int> needed) {
    return order.enter(current, sms, needed.value_or(sms));
  };
  py::class_<control::StreamOrder, std::shared_ptr<control::StreamOrder>>(m, "StreamOrder")
      .def(py::init<std::shared_ptr<control::SmBudget>, bool>(), py::arg("budget"), py::pos_only(),
           py::arg("of_messages") = false)
      .def("enter", enter, py::arg("current"), py::arg("sms"), py::pos_only(), py::arg("needed") = py::none(),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("usable", &control::StreamOrder::usable);
  py::class_<control::Call>(m, "Call")
      .def("end", [](const control::Call& call) { control::CallLog::end(call); })
      .def_readonly("nbytes", &control::Call::nbytes);
  py::class_<control::CallLog, std::shared_ptr<control::CallLog>>(m, "CallLog")
      .def(py::init([](const py::object& calls, const py::dict& epochs) {
        return std::make_shared<control::CallLog>(calls.ptr(), epochs.ptr());
      }))
      .def("begin", [](control::CallLog& log, const py::str& kind, const py::str& part, int64_t nbytes,
                       const control::Call* continues) {
        control::Call call;
        if (!log.begin(call, kind.ptr(), part.ptr(), nbytes, continues)) throw py::error_already_set();
        return call;
      });
  m.attr("num_kept_calls") = control::kKeptCalls;
  m.def("kept_calls", [] {
    Object kept = control::CallLog::kept();
    if (!kept) throw py::error_already_set();
    return py::reinterpret_steal<py::list>(kept.release());
  });
  m.def("forget_calls", &control::CallLog::forget);
  m.def("set_python_objects", [](const py::object& output_type, const py::object& handle_type,
                                 const py::object& nothing, const py::object& int64, const py::dict& num_served,
                                 const py::dict& num_served_of_kind, const py::object& sums) {
    control::python_objects() = {kept(output_type), kept(handle_type),        kept(nothing), kept(int64),
                                 kept(num_served),  kept(num_served_of_kind), kept(sums)};
  });
  bind_started_operation(m);
  bind_low_latency_engine(m);
}

}  // namespace ep::bindings
