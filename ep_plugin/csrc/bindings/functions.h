// Functions of Python that call control without pybind11: it would take longer than the call itself.
#pragma once
#include <memory>

#include "bindings/bind.h"
#include "control/engine.h"

namespace ep::bindings {

// A function with any positional arguments. It calls `call` with the engine and the arguments.
template <class Engine, PyObject* (*call)(Engine&, PyObject* const*, Py_ssize_t)>
py::object fast_function(const std::shared_ptr<Engine>& engine, const char* name) {
  using Held = std::shared_ptr<Engine>;
  static PyMethodDef definition{
      name,
      reinterpret_cast<PyCFunction>(
          reinterpret_cast<void (*)()>(+[](PyObject* self, PyObject* const* args, Py_ssize_t given) -> PyObject* {
            return call(**static_cast<Held*>(PyCapsule_GetPointer(self, nullptr)), args, given);
          })),
      METH_FASTCALL, nullptr};
  const py::capsule self(new Held(engine), [](void* held) { delete static_cast<Held*>(held); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
}

template <class Door, class Engine, PyObject* (*call)(Engine&, const typename Door::Kind::Given&)>
PyObject* call_through(Engine& engine, PyObject* const* args, Py_ssize_t given) {
  if (given != Door::num_args)
    return PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", Door::num_args, given);
  typename Door::Kind::Given read{};
  return Door::read(engine, args, read) ? call(engine, read) : control::left();
}

// A function with as many positional arguments as `Door` takes. It calls `call` with the engine and the arguments as
// the door reads them.
template <class Door, class Engine, PyObject* (*call)(Engine&, const typename Door::Kind::Given&)>
py::object function_of(const std::shared_ptr<Engine>& engine, const char* name) {
  return fast_function<Engine, &call_through<Door, Engine, call>>(engine, name);
}

// A reference that lives as long as its holder.
inline PyObject* kept(const py::object& object) { return py::object(object).release().ptr(); }

// Returns the object, or raises Python's error.
inline py::object returned(control::Object owned) {
  PyObject* object = owned.release();
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// Gives an engine the communicator as kernels see it.
template <class Engine>
void set_comm(Engine& engine, const py::object& comm) {
  engine.comm = &comm.cast<Comm&>();
  engine.comm_object = control::Object(kept(comm));
}

// Raises Python's error unless it is done.
inline void require(bool is_done) {
  if (!is_done) throw py::error_already_set();
}

}  // namespace ep::bindings
