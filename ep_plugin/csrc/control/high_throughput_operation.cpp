#include "control/high_throughput_operation.h"

#include <algorithm>

namespace ep::control {

Settings HighThroughputOperation::settings() const {
  static_assert(sizeof(Object) == sizeof(PyObject*), "settings are read as objects");
  return {reinterpret_cast<PyObject* const*>(settings_.data()), static_cast<Py_ssize_t>(settings_.size())};
}

bool HighThroughputOperation::read_handle(Inputs& inputs, PyObject* const* fields) {
  DLTensor ids, plan, recv_rows, totals;
  if (!read(inputs, {{fields[0], &ids}, {fields[1], &plan}})) return false;
  if (!read(inputs, {{fields[2], &recv_rows}}, kFreeRows) || !read(inputs, {{fields[3], &totals}})) return false;
  if (ids.num_dims != 2 || recv_rows.num_dims != 2 || totals.num_dims != 1 || totals.device_type != kDLCpu)
    return false;
  const int64_t before = door_ == Door::kBuffer;  // the communicator's number
  totals_ = static_cast<const int64_t*>(totals.data) + before;
  num_totals_ = totals.shape[0] - before;
  routing_ = routing_of(address_of(ids), address_of(plan), ids.shape[0], ids.shape[1]);
  routing_.recv_rows = address_of(recv_rows);
  routing_.slots = recv_rows.shape[0];
  handle_ = {Object::borrowed(fields[0]), Object::borrowed(fields[1]), Object::borrowed(fields[2]),
             Object::borrowed(fields[3])};
  return true;
}

bool HighThroughputOperation::has_sound_handle() const {
  const HighThroughput& engine = *engine_;
  if (door_ == Door::kBuffer && totals_[-1] != PyLong_AsLongLong(engine.number.get())) return false;
  return routing_.slots ==
         (has_bounded_handle() ? engine.size * std::max<int64_t>(engine.max_tokens, 0) : totals_[kTotalSlots]);
}

Routing HighThroughputOperation::routing_of(Address topk_ids, Address plan, int64_t num_tokens, int64_t topk) const {
  const HighThroughput& engine = *engine_;
  Routing routing{};
  routing.num_tokens = static_cast<int32_t>(num_tokens);
  routing.topk = static_cast<int32_t>(topk);
  routing.layout = engine.layout;
  routing.alignment = engine.alignment;
  routing.topk_ids = topk_ids;
  routing.meta = plan;
  routing.send_pos = plan + 4 * meta_layout(engine.size, engine.num_experts, 1).words;
  routing.pair_pos = routing.send_pos + 4 * num_tokens * engine.size;
  return routing;
}

bool HighThroughputOperation::whole() {
  is_whole_ = true;
  return start() && finish();
}

bool HighThroughputOperation::choose_stream() {
  if (!engine_->current_stream(&caller_)) return false;
  stream_ = is_whole_ ? caller_ : engine_->streams.own;
  return true;
}

void HighThroughputOperation::enter(const Sms& sms) const {
  engine_->order(stream_, caller_);
  engine_->enter(stream_, sms);
}

int64_t HighThroughputOperation::rows_of_handle() const {
  return has_bounded_handle() ? totals_[0] : totals_[engine_->is_flat() ? kTotalRows : kTotalSlots];
}

bool HighThroughputOperation::join() {
  if (!engine_->join()) return false;
  const Object call = std::exchange(recorder, Object());
  return !call || Object(PyObject_CallFunctionObjArgs(call.get(), handle_.plan.get(), handle_.topk_ids.get(), nullptr));
}

PyObject* const* BufferHandle::of(PyObject* handle) {
  constexpr Py_ssize_t num_parts = 6;
  if (!PyList_Check(handle) && !PyTuple_Check(handle)) return nullptr;
  parts = PyTuple_Check(handle) ? Object::borrowed(handle) : Object(PyList_AsTuple(handle));
  if (!parts || PyTuple_GET_SIZE(parts.get()) != num_parts) return nullptr;
  int to = 0;
  for (const int part : {2, 1, 3, 5}) fields[to++] = PyTuple_GET_ITEM(parts.get(), part);
  return fields;
}

PyObject* const* tensors_in(PyObject* list) {
  constexpr Py_ssize_t num_tensors = 4;
  if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != num_tensors) return nullptr;
  return &PyList_GET_ITEM(list, 0);
}

}  // namespace ep::control
