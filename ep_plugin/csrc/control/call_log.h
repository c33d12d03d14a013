// The latest calls of this process's communicators, in a ring. All of it needs the interpreter's lock.
#pragma once
#include <cstdint>

#include "control/torch_c.h"

namespace ep::control {

inline constexpr int64_t kKeptCalls = 1000;

// One call of an operation, or of a part of it.
struct Call {
  int64_t place;   // among all calls of the process
  int64_t number;  // the count of the operation in its communicator, 1 for the first
  int64_t epoch;   // its count among the operations of its kind
  int64_t nbytes;  // that this rank passes in
};

// The calls of one communicator.
class CallLog {
 public:
  // calls: Python's description of the communicator, which the ring shows. epochs: a dict that counts operations by
  // kind.
  CallLog(PyObject* calls, PyObject* epochs) : calls_(Object::borrowed(calls)), epochs_(Object::borrowed(epochs)) {}

  // Counts and keeps a call. kind, part: strings. continues: the call that has begun the same operation, or null.
  // Returns false with Python's error set.
  bool begin(Call& call, PyObject* kind, PyObject* part, int64_t nbytes, const Call* continues);
  // Notes that a call has returned.
  static void end(const Call& call);
  // Returns the kept calls, the oldest first: (calls, kind, part, number, epoch, nbytes, began, ended), with times in
  // seconds since 1970, and None for one that has not ended. Null with Python's error set.
  static Object kept();
  static void forget();

 private:
  const Object calls_, epochs_;
  int64_t number_ = 0;
};

}  // namespace ep::control
