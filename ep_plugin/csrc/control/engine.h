// One communicator, as the host path sees it, and a thread's turn on its device.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "control/call_log.h"
#include "control/stream_order.h"
#include "control/torch_c.h"

namespace ep::control {

// Objects of Python that live as long as the process.
struct PythonObjects {
  PyObject *output_type, *handle_type;        // DispatchOutput, DispatchHandle
  PyObject* nothing;                          // in the place of the tensors that low latency's handles do not need
  PyObject* int64;                            // torch's dtype
  PyObject *num_served, *num_served_of_kind;  // of counts
  PyObject* sums;                             // statistics.Sums
};
PythonObjects& python_objects();

// Leaves a call to Python and returns None; null if there is an error to raise, such as that of a signal's handler.
PyObject* left();

// A communicator. Its lock and first error are those of Python's BaseEngine.
class Engine {
 public:
  // owner: the BaseEngine, of which it keeps a weak reference. running: the dict of the engines whose operation runs,
  // by device. device_index: -1 for the CPU.
  Engine(PyObject* owner, PyObject* running, PyObject* device, std::shared_ptr<CallLog> log, std::string name,
         Address board, int device_index);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  bool is_on_gpu() const { return device_index >= 0; }

  const std::string name;
  const Address board;
  const int device_index;
  int64_t num_calls = 0;  // operations, or halves of them, that ran here, for tests

  // Raises the communicator's error, if there is one. Returns false with Python's error set.
  bool check() const;
  // Sets the caller's stream. Returns false, maybe with Python's error set, if the device is not the current one.
  bool current_stream(uint64_t* stream) const;
  // Does the same, and sets the id of the capture of a CUDA graph that it is in (0: none).
  bool find_stream(uint64_t* stream, uint64_t* capture) const;
  // Does the same, and returns false also in a capture.
  bool find_stream(uint64_t* stream) const {
    uint64_t capture = 0;
    return find_stream(stream, &capture) && capture == 0;
  }
  // Calls a method of the BaseEngine. Returns false with Python's error set.
  template <class... Args>
  bool call_owner(PyObject* method, Args... args) const {
    const Object owner = this->owner();
    return owner && call(owner.get(), method, args...);
  }
  // Counts an operation for `serves`. Returns false with Python's error set.
  bool count_served() const;
  // Whether operations are recorded for statistics, or Python has failed to say so, with its error set.
  static bool is_recording();
  Results new_results() const { return Results(is_on_gpu() ? kTorchCuda : kTorchCpu, is_on_gpu() ? device_index : 0); }
  // Returns the fields of a handle that the communicator has made, or null.
  PyObject* const* fields_of(PyObject* handle) const;

  Object number, serves;  // of the communicator; the integration that counts its operations, and their kind
  // Tests: return the caller's stream, and its capture, in PyTorch's and CUDA's place.
  std::function<uint64_t()> caller, capturing;

 protected:
  Object owner() const;  // none, if it is gone
  // Makes peers and later calls raise after an error, which stays set. kind: the operation's name, a str.
  void failed(PyObject* kind) const;
  // Closes the communicator if the handler of a signal has tried that while it was in use.
  void close_if_asked() const;

  const std::shared_ptr<CallLog> log_;

 private:
  friend class Turn;

  const Object owner_, running_, device_;        // owner_: a weak reference
  std::map<PyObject*, std::string> activities_;  // what peers read of this rank, by the operation's name
  uint64_t thread_ = 0;  // the last that ran an operation here, by a number that no other thread gets
};

// A thread that comes back while the interpreter ends waits for ever: Python would end it in the middle of this code.
void wait_if_finalizing();

// Runs `kernel` without the interpreter's lock. Returns false with Python's error set, also by the handler of a signal
// during a wait, or by a function of Python in a kernel's place.
template <class Kernel>
bool run_unlocked(const Kernel& kernel) {
  std::string problem;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    kernel();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  wait_if_finalizing();
  PyEval_RestoreThread(state);
  if (!problem.empty() && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, problem.c_str());
  return !PyErr_Occurred();
}

// A thread's turn: from the device's lock to its release, with all that BaseEngine.run does around an operation.
//
// It serves calls that need nothing but kernels. Its caller leaves any other call to Python, which raises the errors.
class Turn {
 public:
  explicit Turn(Engine& engine) : engine_(engine) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Takes the lock. Returns false if Python must take the call, or with Python's error set. Call leave() in any case.
  bool enter();
  // Counts and logs the operation, and marks it as running. `kind`: its name, a str. part, continues: as in CallLog.
  // Returns false with Python's error set.
  bool begin(PyObject* kind, PyObject* part, int64_t nbytes, const Call* continues);
  // Runs `kernel` as run_unlocked() does, and then `record`, which may run Python. Returns false with Python's error
  // set; peers then abort.
  template <class Kernel, class Record>
  bool run(const Kernel& kernel, const Record& record) {
    return run_unlocked(kernel) && engine_.check() && record() ? ended() : failed();
  }
  template <class Kernel>
  bool run(const Kernel& kernel) {
    return run(kernel, [] { return true; });
  }
  // Ends the operation. is_done: false with Python's error set. Returns it.
  bool end(bool is_done) { return is_done ? ended() : failed(); }
  // Makes peers and later calls raise after an error, which stays set. Returns false.
  bool failed();
  // Gives the lock back, and returns `result`. Null with Python's error set if that fails, or if `result` is null.
  PyObject* leave(PyObject* result);
  PyObject* owner() const { return owner_.get(); }
  // Returns the owner's load statistics. None with Python's error set.
  Object load() const {
    static PyObject* const name = interned("load");
    return Object(PyObject_GetAttr(owner(), name));
  }
  const Call& logged() const { return call_; }

 private:
  bool may_run();
  bool ended();

  Engine& engine_;
  Object owner_, lock_, kind_;
  Call call_{};
  bool is_running_ = false;
};

// Whether an attribute is `wanted`. False with Python's error set if there is none.
bool is(PyObject* object, PyObject* attribute, PyObject* wanted);

// Returns operation(turn), which runs in a turn of the calling thread. Null with Python's error set.
template <class Function>
PyObject* in_turn(Engine& engine, const Function& operation) {
  Turn turn(engine);
  PyObject* result = nullptr;
  try {
    result = operation(turn);
  } catch (const std::exception& error) {  // there is no more memory
    PyErr_SetString(PyExc_MemoryError, error.what());
  }
  return turn.leave(result);
}

}  // namespace ep::control
