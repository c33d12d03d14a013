#include "control/engine.h"

#include "common/board.h"
#include "common/views.h"

namespace ep::control {

namespace {

bool is_quiet(Address address) {
  const Board& board = *at<Board>(address);
  return __atomic_load_n(&board.fault_set, __ATOMIC_ACQUIRE) == 0 &&
         __atomic_load_n(&board.abort, __ATOMIC_ACQUIRE) == 0;
}

// Whether an attribute is `wanted`. False with Python's error set if there is none.
bool is(PyObject* object, PyObject* attribute, PyObject* wanted) {
  return Object(PyObject_GetAttr(object, attribute)).get() == wanted;
}

// An exception that waits while Python runs something else.
class Pending {
 public:
  Pending() { PyErr_Fetch(&type_, &value_, &trace_); }
  ~Pending() { PyErr_Restore(type_, value_, trace_); }
  // The exception itself, with its traceback.
  PyObject* normalized() {
    PyErr_NormalizeException(&type_, &value_, &trace_);
    if (trace_ != nullptr) PyException_SetTraceback(value_, trace_);
    return value_;
  }

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

}  // namespace

CudaCalls& cuda_calls() {
  static CudaCalls calls{};
  return calls;
}

uint64_t StreamOrder::enter(uint64_t current) {
  const CudaCalls& cuda = cuda_calls();
  if (has_last_ && last_ != current && cuda.stream_capture(current, device_) == cuda.stream_capture(last_, device_))
    cuda.order_streams(current, last_, device_);
  last_ = current;
  has_last_ = true;
  return current;
}

Engine::Engine(PyObject* owner, PyObject* running, PyObject* device, std::shared_ptr<CallLog> log, std::string name,
               Address board, int device_index)
    : name(std::move(name)),
      board(board),
      device_index(device_index),
      owner_(PyWeakref_NewRef(owner, nullptr)),
      running_(Object::borrowed(running)),
      device_(Object::borrowed(device)),
      log_(std::move(log)) {}

bool Turn::enter() {
  static PyObject *const lock_name = interned("lock"), *const acquire = interned("acquire");
  owner_ = Object::borrowed(PyWeakref_GetObject(engine_.owner_.get()));
  if (owner_.get() == Py_None) return false;
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

bool Turn::begin(PyObject* kind, int64_t nbytes) {
  static PyObject *const used_name = interned("used_by_this_thread"), *const no_part = interned("");
  if (!engine_.log_->begin(call_, kind, no_part, nbytes, nullptr)) return false;
  const uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
  if (engine_.thread_ != thread && !call(owner(), used_name)) return false;
  engine_.thread_ = thread;
  const char* text = PyUnicode_AsUTF8(kind);
  if (text == nullptr) return false;
  announce(std::string("in ") + text + " of " + engine_.name);
  kind_ = Object::borrowed(kind);
  is_running_ = PyDict_SetItem(engine_.running_.get(), engine_.device_.get(), owner()) == 0;
  engine_.num_calls += is_running_;
  return is_running_;
}

bool Turn::ended(const std::string& problem) {
  static PyObject* const check_name = interned("check");
  if (!problem.empty()) PyErr_SetString(PyExc_RuntimeError, problem.c_str());
  if (PyErr_Occurred()) return failed();  // also of a signal's handler, during a wait
  if (!is_quiet(engine_.board) && !call(owner(), check_name)) return failed();
  CallLog::end(call_);
  return true;
}

// Makes peers and later calls raise after an error, which stays set. Returns false.
bool Turn::failed() {
  static PyObject* const failed_name = interned("operation_failed");
  Pending pending;
  if (!call(owner(), failed_name, pending.normalized(), kind_.get())) PyErr_Clear();  // the first error is raised
  return false;
}

Turn::~Turn() {
  static PyObject *const close_name = interned("_to_close"), *const close = interned("close"),
                         *const release = interned("release");
  if (!lock_) return;
  Pending pending;
  bool is_well = true;
  if (is_running_) {
    is_well = PyDict_DelItem(engine_.running_.get(), engine_.device_.get()) == 0;
    if (!is(owner(), close_name, Py_False)) is_well = is_well && call(owner(), close);
  }
  if (!call(lock_.get(), release) || !is_well) PyErr_WriteUnraisable(owner());
}

}  // namespace ep::control
