#include "control/low_latency.h"

namespace ep::control {

LowLatencyObjects LowLatency::objects{};

namespace {

// Returns the fields of a handle that the communicator has made, or null.
PyObject* const* fields_of(PyObject* handle, const LowLatency& engine) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(handle)) != LowLatency::objects.handle_type) return nullptr;
  if (PyTuple_GET_SIZE(handle) != 5) return nullptr;
  PyObject* const* fields = &PyTuple_GET_ITEM(handle, 0);
  return PyObject_RichCompareBool(fields[4], engine.number.get(), Py_EQ) == 1 ? fields : nullptr;
}

}  // namespace

PyObject* left() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

// Whether C may run an operation now. Python runs those that are recorded, and the whole of those whose kind has
// un-received operations. It also keeps the order of started ones.
bool LowLatency::may_run(int kind, bool is_whole) const {
  static PyObject* const recording = interned("recording");
  if (comm == nullptr || (is_whole && is_busy[kind])) return false;
  return Object(PyObject_GetAttr(objects.sums, recording)).get() == Py_False;
}

bool LowLatency::find_stream(uint64_t* stream) const {
  *stream = 0;
  if (!is_on_gpu()) return true;
  const Object device(PyObject_CallNoArgs(objects.current_device));
  void* current = nullptr;
  if (!device || PyLong_AsLongLong(device.get()) != device_index ||
      exchange_api()->current_stream(kDLCuda, device_index, &current) != 0)
    return false;
  *stream = reinterpret_cast<uint64_t>(current);
  try {
    return cuda_calls().stream_capture(*stream, device_index) == 0;
  } catch (const std::exception&) {
    return false;  // Python finds the same error
  }
}

bool LowLatency::count_served() const {
  const Object one(PyLong_FromLong(1));
  return static_cast<bool>(
      Object(PyObject_CallFunctionObjArgs(objects.served, serves.get(), one.get(), objects.served_kind, nullptr)));
}

bool CommunicatorDispatch::read(const LowLatency& engine, PyObject* const* args, Dispatch::Given& given) {
  const auto& [x, ids, weights, scales, previous, capacity, quantize] = *reinterpret_cast<PyObject* const(*)[7]>(args);
  given = {Door::kCommunicator, x, ids, Py_None, Py_None, previous, nullptr, {&capacity, 2}};
  if (previous != Py_None && (given.routing = fields_of(previous, engine)) == nullptr) return false;
  return weights == Py_None && scales == Py_None;
}

bool CommunicatorCombine::read(const LowLatency& engine, PyObject* const* args, Combine::Given& given) {
  const auto& [y, handle, weights, bias] = *reinterpret_cast<PyObject* const(*)[4]>(args);
  PyObject* const* routing = fields_of(handle, engine);
  if (routing == nullptr) return false;
  given = {Door::kCommunicator, y, weights, bias, routing[0], routing[1], nullptr, Py_None, Py_None, {}};
  return true;
}

bool BufferDispatch::read(const LowLatency&, PyObject* const* args, Dispatch::Given& given) {
  given = {Door::kBuffer, args[0], args[1], args[2], args[3], Py_None, nullptr, {args + 4, 5}};
  return true;
}

bool BufferCombine::read(const LowLatency&, PyObject* const* args, Combine::Given& given) {
  const auto& [y, weights, ids, src_info, layout_range, out, wait_cost] =
      *reinterpret_cast<PyObject* const(*)[7]>(args);
  given = {Door::kBuffer, y, weights, Py_None, ids, src_info, layout_range, out, wait_cost, {args + 7, 4}};
  return true;
}

}  // namespace ep::control
