// The host path: PyTorch's C functions, the form of a call's tensors, and operations that one call of C starts.
#include "bindings/bind.h"
#include "control/inputs.h"
#include "control/low_latency.h"

namespace ep::bindings {

namespace {

using control::CombinePlan;
using control::DispatchPlan;
using control::LowLatency;
using control::Object;

PyObject* kept(const py::object& object) { return py::object(object).release().ptr(); }

// A function of Python that runs an operation of `engine`, with exactly as many positional arguments as it takes.
template <PyObject* (LowLatency::*operation)(control::Turn&, PyObject* const*), int num_args>
py::object function_of(const std::shared_ptr<LowLatency>& engine, const char* name) {
  using Held = std::shared_ptr<LowLatency>;
  const auto function = +[](PyObject* self, PyObject* const* args, Py_ssize_t given) -> PyObject* {
    if (given != num_args) return PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", num_args, given);
    return static_cast<Held*>(PyCapsule_GetPointer(self, nullptr))->get()->run(operation, args);
  };
  static PyMethodDef definition{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                                METH_FASTCALL, nullptr};
  const py::capsule self(new Held(engine), [](void* held) { delete static_cast<Held*>(held); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

py::object form_of(const py::args& tensors) {
  if (control::exchange_api() == nullptr) return py::none();
  control::Inputs inputs;
  for (py::handle tensor : tensors)
    if (!inputs.read(tensor.ptr())) {
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();  // as by Ctrl-C
      PyErr_Clear();
      return py::none();
    }
  return py::bytes(inputs.form());
}

void bind_low_latency_engine(py::module_& m) {
  py::class_<LowLatency, std::shared_ptr<LowLatency>>(m, "LowLatency")
      .def(py::init([](const py::object& owner, const py::object& running, const py::object& device,
                       std::shared_ptr<control::CallLog> log, const std::string& name, Address board, int device_index,
                       Address table, std::shared_ptr<control::StreamOrder> order, int local_experts) {
        auto engine = std::make_shared<LowLatency>(owner.ptr(), running.ptr(), device.ptr(), std::move(log), name,
                                                   board, device_index);
        engine->run_dispatch = at<KernelTable>(table)->ll_dispatch;
        engine->run_combine = at<KernelTable>(table)->ll_combine;
        engine->order = std::move(order);
        engine->local_experts = local_experts;
        engine->number = engine->serves = Object(py::str("").release().ptr());
        return engine;
      }))
      .def_property_readonly("dispatch",
                             [](const std::shared_ptr<LowLatency>& engine) {
                               return function_of<&LowLatency::dispatch, 7>(engine, "dispatch");
                             })
      .def_property_readonly("combine",
                             [](const std::shared_ptr<LowLatency>& engine) {
                               return function_of<&LowLatency::combine, 4>(engine, "combine");
                             })
      .def("next_slot", &LowLatency::next_slot)
      .def("forget", &LowLatency::forget)
      .def("set_comm",
           [](LowLatency& engine, const py::object& comm) {
             engine.comm = &comm.cast<const Comm&>();
             engine.comm_object = Object(kept(comm));
           })
      .def("set_busy", [](LowLatency& engine, int kind, bool is_busy) { engine.is_busy[kind] = is_busy; })
      .def("set_number", [](LowLatency& engine, const py::int_& number) { engine.number = Object(kept(number)); })
      .def("set_serves", [](LowLatency& engine, const py::str& name) { engine.serves = Object(kept(name)); })
      .def_readonly("num_calls", &LowLatency::num_calls)
      .def("remember_dispatch",
           [](LowLatency& engine, const std::string& form, const py::object& capacity, const py::object& quantize,
              const LlDispatchArgs& args, int64_t per_expert, int64_t columns, const std::string& dtype, int64_t scales,
              const std::string& scale_dtype, int64_t plan_words, const py::object& rows_of) {
             const DispatchPlan plan{args,
                                     per_expert,
                                     columns,
                                     scales,
                                     plan_words,
                                     control::dtype_number(dtype),
                                     control::dtype_number(scale_dtype),
                                     rows_of.is_none() ? Object() : Object(kept(rows_of))};
             std::string key = form;
             if (plan.dtype >= 0 && LowLatency::append_settings(key, capacity.ptr(), quantize.ptr()))
               engine.remember(key, plan);
           })
      .def("remember_combine",
           [](LowLatency& engine, const std::string& form, const LlCombineArgs& args, const std::string& dtype) {
             const CombinePlan plan{args, control::dtype_number(dtype)};
             if (plan.dtype >= 0) engine.remember(form, plan);
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
  py::class_<control::StreamOrder, std::shared_ptr<control::StreamOrder>>(m, "StreamOrder")
      .def(py::init<int>())
      .def("enter", &control::StreamOrder::enter, py::call_guard<py::gil_scoped_release>());
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
  m.def("set_low_latency_objects",
        [](const py::object& output_type, const py::object& handle_type, const py::object& nothing,
           const py::object& served, const py::object& served_kind, const py::object& sums,
           const py::object& current_device) {
          LowLatency::objects = {kept(output_type), kept(handle_type), kept(nothing),       kept(served),
                                 kept(served_kind), kept(sums),        kept(current_device)};
        });
  bind_low_latency_engine(m);
}

}  // namespace ep::bindings
