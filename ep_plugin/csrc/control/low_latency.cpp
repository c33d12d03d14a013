#include "control/low_latency.h"

namespace ep::control {

// Whether C may run an operation now. Python runs those that are recorded, and the whole of those whose kind has
// un-received operations. It also keeps the order of started ones.
bool LowLatency::may_run(int kind, bool is_whole) const {
  return comm != nullptr && !(is_whole && is_busy[kind]) && !is_recording();
}

bool CommunicatorDispatch::read(const LowLatency& engine, PyObject* const* args, LowLatencyDispatch::Given& given) {
  const auto& [x, ids, weights, scales, previous, capacity, quantize] = *reinterpret_cast<PyObject* const(*)[7]>(args);
  given = {Door::kCommunicator, x, ids, Py_None, Py_None, previous, nullptr, {&capacity, 2}};
  if (previous != Py_None && (given.routing = engine.fields_of(previous)) == nullptr) return false;
  return weights == Py_None && scales == Py_None;
}

bool CommunicatorCombine::read(const LowLatency& engine, PyObject* const* args, LowLatencyCombine::Given& given) {
  const auto& [y, handle, weights, bias] = *reinterpret_cast<PyObject* const(*)[4]>(args);
  PyObject* const* routing = engine.fields_of(handle);
  if (routing == nullptr) return false;
  given = {Door::kCommunicator, y, weights, bias, routing[0], routing[1], nullptr, Py_None, Py_None, {}};
  return true;
}

bool BufferDispatch::read(const LowLatency&, PyObject* const* args, LowLatencyDispatch::Given& given) {
  given = {Door::kBuffer, args[0], args[1], args[2], args[3], Py_None, nullptr, {args + 4, 5}};
  return true;
}

bool BufferCombine::read(const LowLatency&, PyObject* const* args, LowLatencyCombine::Given& given) {
  const auto& [y, weights, ids, src_info, layout_range, out, wait_cost] =
      *reinterpret_cast<PyObject* const(*)[7]>(args);
  given = {Door::kBuffer, y, weights, Py_None, ids, src_info, layout_range, out, wait_cost, {args + 7, 4}};
  return true;
}

}  // namespace ep::control
