// One communicator, as the host path sees it, and a thread's turn on its device.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "control/call_log.h"
#include "control/stream_order.h"
#include "control/torch_c.h"

namespace ep::control {

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

 private:
  friend class Turn;
  const Object owner_, running_, device_;  // owner_: a weak reference
  const std::shared_ptr<CallLog> log_;
  uint64_t thread_ = 0;  // the last that ran an operation here, by a number that no other thread gets
};

// A thread that comes back while the interpreter ends waits for ever: Python would end it in the middle of this code.
void wait_if_finalizing();

// Runs `kernel` without the interpreter's lock. Returns false with Python's error set, also by the handler of a signal
// during a wait.
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
  if (!problem.empty()) PyErr_SetString(PyExc_RuntimeError, problem.c_str());
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
  // Runs `kernel` as run_unlocked() does. Returns false with Python's error set; peers then abort.
  template <class Kernel>
  bool run(const Kernel& kernel) {
    return run_unlocked(kernel) && engine_.check() ? ended() : failed();
  }
  // Gives the lock back, and returns `result`. Null with Python's error set if that fails, or if `result` is null.
  PyObject* leave(PyObject* result);
  PyObject* owner() const { return owner_.get(); }
  const Call& logged() const { return call_; }

 private:
  bool may_run();
  bool ended();
  bool failed();

  Engine& engine_;
  Object owner_, lock_, kind_;
  Call call_{};
  bool is_running_ = false;
};

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
