#include "control/engine.h"

#include <unistd.h>

#include "common/board.h"
#include "common/views.h"

namespace ep::control {

namespace {

// An error that waits while Python runs something else. If that fails, its error is raised, in the context of this one.
class Pending {
 public:
  Pending() { PyErr_Fetch(&type_, &value_, &trace_); }
  ~Pending() {
    if (type_ == nullptr) return;
    if (!PyErr_Occurred()) {
      PyErr_Restore(type_, value_, trace_);
      return;
    }
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyException_SetContext(value, Py_NewRef(normalized()));
    PyErr_Restore(type, value, trace);
    for (PyObject* object : {type_, value_, trace_}) Py_XDECREF(object);
  }
  // The exception itself, with its traceback.
  PyObject* normalized() {
    PyErr_NormalizeException(&type_, &value_, &trace_);
    if (trace_ != nullptr) PyException_SetTraceback(value_, trace_);
    return value_;
  }

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// Adds 1 to a number of a dict, which begins at 0. Returns false with Python's error set.
bool increment(PyObject* numbers, PyObject* key) {
  PyObject* before = PyDict_GetItemWithError(numbers, key);
  if (before == nullptr && PyErr_Occurred()) return false;
  const Object after(PyLong_FromLongLong(before == nullptr ? 1 : PyLong_AsLongLong(before) + 1));
  return after && PyDict_SetItem(numbers, key, after.get()) == 0;
}

// Returns the object of a weak reference; none if it is gone.
Object object_of(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference, &found);
  return Object(found);
#else
  PyObject* found = PyWeakref_GetObject(reference);
  return found == Py_None ? Object() : Object::borrowed(found);
#endif
}

}  // namespace

PythonObjects& python_objects() {
  static PythonObjects objects{};
  return objects;
}

bool is(PyObject* object, PyObject* attribute, PyObject* wanted) {
  return Object(PyObject_GetAttr(object, attribute)).get() == wanted;
}

PyObject* left() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

Engine::Engine(PyObject* owner, PyObject* running, PyObject* device, std::shared_ptr<CallLog> log, std::string name,
               Address board, int device_index)
    : name(std::move(name)),
      board(board),
      device_index(device_index),
      number(PyUnicode_FromString("")),
      serves(Py_BuildValue("(ss)", "", "")),
      log_(std::move(log)),
      owner_(PyWeakref_NewRef(owner, nullptr)),
      running_(Object::borrowed(running)),
      device_(Object::borrowed(device)) {}

bool Engine::check() const {
  static PyObject* const check_name = interned("check");
  const Object owner = object_of(owner_.get());
  return is_quiet(board) || !owner || call(owner.get(), check_name);
}

Object Engine::owner() const { return object_of(owner_.get()); }

void Engine::failed(PyObject* kind) const {
  static PyObject* const failed_name = interned("operation_failed");
  Pending pending;
  if (const Object owner = this->owner()) call(owner.get(), failed_name, pending.normalized(), kind);
}

void Engine::close_if_asked() const {
  static PyObject *const close_name = interned("_to_close"), *const close = interned("close");
  Pending pending;
  const Object owner = this->owner();
  if (owner && !is(owner.get(), close_name, Py_False)) call(owner.get(), close);
}

bool Engine::current_stream(uint64_t* stream) const {
  *stream = caller ? caller() : 0;
  return caller || !is_on_gpu() || torch_stream(device_index, stream);
}

bool Engine::find_stream(uint64_t* stream, uint64_t* capture) const {
  if (!current_stream(stream)) return false;
  *capture = capturing ? capturing() : 0;
  if (capturing || !is_on_gpu()) return true;
  try {
    *capture = cuda_calls().stream_capture(*stream, device_index);
    return true;
  } catch (const std::exception&) {
    return false;  // Python finds the same error
  }
}

bool Engine::count_served() const {
  const PythonObjects& objects = python_objects();
  return increment(objects.num_served, PyTuple_GET_ITEM(serves.get(), 0)) &&
         increment(objects.num_served_of_kind, serves.get());
}

bool Engine::is_recording() {
  static PyObject* const recording = interned("recording");
  return !is(python_objects().sums, recording, Py_False);
}

PyObject* const* Engine::fields_of(PyObject* handle) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(handle)) != python_objects().handle_type) return nullptr;
  if (PyTuple_GET_SIZE(handle) != 5) return nullptr;
  PyObject* const* fields = &PyTuple_GET_ITEM(handle, 0);
  return PyObject_RichCompareBool(fields[4], number.get(), Py_EQ) == 1 ? fields : nullptr;
}

bool Turn::enter() {
  static PyObject *const lock_name = interned("lock"), *const acquire = interned("acquire");
  owner_ = object_of(engine_.owner_.get());
  if (!owner_) return false;
  Object lock(PyObject_GetAttr(owner(), lock_name));
  if (!lock || !call(lock.get(), acquire)) return false;
  lock_ = std::move(lock);
  // The lock lets its thread in again, from the handler of a signal.
  return PyDict_Contains(engine_.running_.get(), engine_.device_.get()) == 0 && may_run();
}

// Whether the communicator is open and has no error.
bool Turn::may_run() {
  static PyObject *const error_name = interned("_error"), *const closed_name = interned("closed");
  return is(owner(), error_name, Py_None) && is(owner(), closed_name, Py_False) && is_quiet(engine_.board);
}

bool Turn::begin(PyObject* kind, PyObject* part, int64_t nbytes, const Call* continues) {
  static PyObject* const used_name = interned("used_by_this_thread");
  if (!engine_.log_->begin(call_, kind, part, nbytes, continues)) return false;
  is_running_ = PyDict_SetItem(engine_.running_.get(), engine_.device_.get(), owner()) == 0;
  if (!is_running_) return false;
  const uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
  if (engine_.thread_ != thread && !call(owner(), used_name)) return false;
  engine_.thread_ = thread;
  std::string& activity = engine_.activities_[kind];
  if (activity.empty()) {
    const char* text = PyUnicode_AsUTF8(kind);
    if (text == nullptr) return false;
    activity = std::string("in ") + text + " of " + engine_.name;
  }
  announce(activity);
  kind_ = Object::borrowed(kind);
  ++engine_.num_calls;
  return true;
}

bool Turn::ended() {
  CallLog::end(call_);
  return true;
}

bool Turn::failed() {
  engine_.failed(kind_.get());
  return false;
}

PyObject* Turn::leave(PyObject* result) {
  static PyObject* const release = interned("release");
  Object returned(result);
  if (is_running_) {
    Pending pending;
    PyDict_DelItem(engine_.running_.get(), engine_.device_.get());
  }
  if (is_running_) engine_.close_if_asked();
  if (lock_) {
    Pending pending;
    call(lock_.get(), release);
  }
  return PyErr_Occurred() ? nullptr : returned.release();
}

void wait_if_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool is_finalizing = Py_IsFinalizing();
#else
  const bool is_finalizing = _Py_IsFinalizing();
#endif
  while (is_finalizing) pause();
}

}  // namespace ep::control
