#include "control/low_latency.h"

namespace ep::control {

void LowLatency::forget(LowLatencyOperation& operation) {
  operation.is_received = true;
  for (auto& kept : un_received_[operation.kind])
    if (kept.get() == &operation) const auto freed = std::exchange(kept, nullptr);
}

void LowLatency::close() {
  for (auto& of_kind : un_received_) {
    for (auto& kept : of_kind) {
      const auto freed = std::exchange(kept, nullptr);
      if (freed != nullptr) freed->abandon_legs();
    }
  }
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

bool OperatorDispatch::read(const LowLatency&, PyObject* const* args, LowLatencyDispatch::Given& given) {
  PyObject* const* routing = args[6] == Py_None ? nullptr : args + 6;
  given = {Door::kOperator, args[0], args[1], args[2], args[3], Py_None, routing, {args + 4, 2}};
  return true;
}

bool OperatorCombine::read(const LowLatency&, PyObject* const* args, LowLatencyCombine::Given& given) {
  const Settings settings{args + 7, args[7] == Py_True};  // MoECommunicator's calls have none
  given = {Door::kOperator, args[0], args[1], args[2], args[3], args[4], nullptr, args[5], args[6], settings};
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
