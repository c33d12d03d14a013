#include "control/call_log.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace ep::control {

namespace {

struct Kept {
  Object calls, kind, part;
  Call call;
  double began, ended;  // 0: it has not ended
};

// Never freed: the interpreter may be gone when the process's objects are.
std::vector<Kept>& ring = *new std::vector<Kept>(kKeptCalls);
int64_t num_calls = 0;

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

bool CallLog::begin(Call& call, PyObject* kind, PyObject* part, int64_t nbytes, const Call* continues) {
  if (continues != nullptr) {
    call = {num_calls, continues->number, continues->epoch, nbytes};
  } else {
    PyObject* before = PyDict_GetItemWithError(epochs_.get(), kind);
    if (before == nullptr && PyErr_Occurred()) return false;
    call = {num_calls, number_ + 1, before == nullptr ? 1 : PyLong_AsLongLong(before) + 1, nbytes};
    const Object epoch(PyLong_FromLongLong(call.epoch));
    if (!epoch || PyDict_SetItem(epochs_.get(), kind, epoch.get()) != 0) return false;
    ++number_;
  }
  ++num_calls;
  // What is freed here may run Python, and that may begin a call.
  const Kept freed = std::exchange(ring[call.place % kKeptCalls],
                                   Kept{calls_, Object::borrowed(kind), Object::borrowed(part), call, now(), 0});
  return true;
}

void CallLog::end(const Call& call) {
  Kept& kept = ring[call.place % kKeptCalls];
  if (kept.calls && kept.call.place == call.place) kept.ended = now();
}

Object CallLog::kept() {
  Object list(PyList_New(0));
  for (int64_t place = std::max<int64_t>(0, num_calls - kKeptCalls); list && place < num_calls; ++place) {
    const Kept& kept = ring[place % kKeptCalls];
    if (!kept.calls) continue;
    const Object ended = kept.ended > 0 ? Object(PyFloat_FromDouble(kept.ended)) : Object::borrowed(Py_None);
    const Object row(Py_BuildValue("(OOOLLLdO)", kept.calls.get(), kept.kind.get(), kept.part.get(),
                                   static_cast<long long>(kept.call.number), static_cast<long long>(kept.call.epoch),
                                   static_cast<long long>(kept.call.nbytes), kept.began, ended.get()));
    if (!row || PyList_Append(list.get(), row.get()) != 0) return Object();
  }
  return list;
}

void CallLog::forget() { const std::vector<Kept> freed = std::exchange(ring, std::vector<Kept>(kKeptCalls)); }

}  // namespace ep::control
