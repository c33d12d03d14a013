#include "control/low_latency.h"

#include <tuple>

#include "common/board.h"
#include "control/inputs.h"

namespace ep::control {

LowLatencyObjects LowLatency::objects{};

namespace {

PyObject* name_of(int kind) {
  static PyObject* const names[] = {interned("dispatch"), interned("combine")};
  return names[kind];
}

// Leaves a call to Python, unless the interpreter has an error to raise, such as that of a signal's handler.
PyObject* left() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

// Words of int32, so that what follows is aligned.
int64_t aligned(int64_t words) { return (words + 31) / 32 * 32; }

// Reads tensors in turn. Returns false for a call that Python must take, which then raises what is wrong with them.
bool read(Inputs& inputs, std::initializer_list<std::pair<PyObject*, DLTensor*>> tensors) {
  for (const auto& [object, tensor] : tensors) {
    if (!inputs.read(object)) {
      if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();  // not Ctrl-C
      return false;
    }
    *tensor = inputs.last();
  }
  return !inputs.needs_grad();
}

// Returns a named tuple of the class `type`.
Object named_tuple(PyObject* type, std::initializer_list<PyObject*> fields) {
  static PyObject* const make = PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyTuple_Type), "__new__");
  const Object values(PyTuple_New(static_cast<Py_ssize_t>(fields.size())));
  if (!values) return Object();
  Py_ssize_t at = 0;
  for (PyObject* field : fields) PyTuple_SET_ITEM(values.get(), at++, Py_NewRef(field));
  return Object(PyObject_CallFunctionObjArgs(make, type, values.get(), nullptr));
}

// Returns the fields of a handle that the communicator `number` has made, or null.
PyObject* const* fields_of(PyObject* handle, const Object& number) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(handle)) != LowLatency::objects.handle_type) return nullptr;
  if (PyTuple_GET_SIZE(handle) != 5) return nullptr;
  PyObject* const* fields = &PyTuple_GET_ITEM(handle, 0);
  return PyObject_RichCompareBool(fields[4], number.get(), Py_EQ) == 1 ? fields : nullptr;
}

}  // namespace

bool LowLatency::append_settings(std::string& form, PyObject* capacity, PyObject* quantize) {
  int64_t rows = -1;
  int overflow = 0;
  if (capacity != Py_None) {
    if (!PyLong_CheckExact(capacity)) return false;
    rows = PyLong_AsLongLongAndOverflow(capacity, &overflow);
    if (rows < 0 || overflow != 0) return false;
  }
  form.append(reinterpret_cast<const char*>(&rows), sizeof(rows));
  if (quantize == Py_None) return true;
  Py_ssize_t bytes = 0;
  const char* name = PyUnicode_CheckExact(quantize) ? PyUnicode_AsUTF8AndSize(quantize, &bytes) : nullptr;
  PyErr_Clear();  // text that cannot be encoded is no known name
  if (name != nullptr) form.append(1, '=').append(name, bytes);
  return name != nullptr;
}

// Whether kernels may run on the caller's stream now, which it sets. Python runs those in CUDA graphs, those whose
// kind has un-received operations, and those that are recorded.
bool LowLatency::may_run(LlOperation& op, int kind) const {
  static PyObject* const recording = interned("recording");
  if (comm == nullptr || is_busy[kind]) return false;
  if (Object(PyObject_GetAttr(objects.sums, recording)).get() != Py_False) return false;
  op.stream = 0;
  if (!is_on_gpu()) return true;
  const Object device(PyObject_CallNoArgs(objects.current_device));
  void* stream = nullptr;
  if (!device || PyLong_AsLongLong(device.get()) != device_index ||
      exchange_api()->current_stream(kDLCuda, device_index, &stream) != 0)
    return false;
  op.stream = reinterpret_cast<uint64_t>(stream);
  try {
    return cuda_calls().stream_capture(op.stream, device_index) == 0;
  } catch (const std::exception&) {
    return false;  // Python finds the same error
  }
}

// Counts an operation, and sets its arguments that no other operation has. Returns false with Python's error set.
bool LowLatency::start(Turn& turn, LlOperation& op, int kind, int64_t nbytes) {
  const Object one(PyLong_FromLong(1));
  if (!Object(PyObject_CallFunctionObjArgs(objects.served, serves.get(), one.get(), objects.served_kind, nullptr)))
    return false;
  if (!turn.begin(name_of(kind), nbytes)) return false;
  op.comm = *comm;
  op.phases = kLlSend | kLlReceive;
  op.slot = next_slot(kind, false);
  return true;
}

// Orders the caller's stream after earlier operations. Call it without the interpreter's lock.
void LowLatency::order_stream(LlOperation& op) {
  if (order != nullptr) op.stream = order->enter(op.stream);
}

PyObject* LowLatency::run(PyObject* (LowLatency::*operation)(Turn&, PyObject* const*), PyObject* const* args) {
  Turn turn(*this);
  PyObject* result = nullptr;
  try {
    result = turn.enter() ? (this->*operation)(turn, args) : left();
  } catch (const std::exception& error) {  // there is no more memory
    PyErr_SetString(PyExc_MemoryError, error.what());
  }
  return turn.leave(result);
}

PyObject* LowLatency::dispatch(Turn& turn, PyObject* const* args) {
  static PyObject* const rows_of = interned("rows_of");
  const auto& [x_object, ids_object, weights, given_scales, previous, capacity, quantize] =
      *reinterpret_cast<PyObject* const(*)[7]>(args);
  if (weights != Py_None || given_scales != Py_None || is_watched()) return left();
  PyObject* const* routing = nullptr;
  if (previous != Py_None && (routing = fields_of(previous, number)) == nullptr) return left();
  Inputs inputs;
  DLTensor x, ids, old_ids, none;
  bool is_read = read(
      inputs,
      {{x_object, &x}, {ids_object, &ids}, {Py_None, &none}, {Py_None, &none}, {Py_None, &none}, {Py_None, &none}});
  if (is_read && routing != nullptr) is_read = read(inputs, {{routing[0], &old_ids}, {routing[1], &none}});
  std::string key = inputs.form();
  if (!is_read || !append_settings(key, capacity, quantize)) return left();
  const auto found = dispatches_.find(key);
  if (found == dispatches_.end()) return left();
  const DispatchPlan plan = found->second;  // plans may change while the code below runs Python
  LlDispatchArgs op = plan.args;
  if (!may_run(op.op, kDispatch)) return left();
  const int64_t T = ids.shape[0], K = ids.shape[1], local = local_experts, per_expert = plan.per_expert;
  BadId bad;
  if (!is_on_gpu() && find_bad_id(address_of(ids), ids.type_bits / 8, T, K, comm->num_experts, &bad)) return left();

  // One block of int32 has all small results. Each begins where a tensor of its own might.
  static const int32_t int32 = dtype_number("int32");
  Results made(is_on_gpu() ? kTorchCuda : kTorchCpu, is_on_gpu() ? device_index : 0);
  const bool is_fresh = routing == nullptr;
  const int64_t at_ids = aligned(plan.plan_words), at_counts = at_ids + (is_fresh ? aligned(T * K) : 0),
                at_offsets = at_counts + aligned(local);
  Address block = 0;
  bool is_made = made.empty({at_offsets + local + 1}, int32, &block) && made.view(0, {local}, at_counts) &&
                 made.view(0, {local + 1}, at_offsets);
  if (is_fresh) is_made = is_made && made.view(0, {T, K}, at_ids) && made.view(0, {plan.plan_words}, 0);
  if (plan.scales > 0) {
    const int64_t strides[3] = {plan.scales * per_expert, 1, per_expert};  // transposed
    is_made = is_made && made.empty({local, per_expert, plan.scales}, plan.scale_dtype, &op.scales, strides);
  }
  Object tokens;
  if (plan.rows_of) {
    tokens =
        call(turn.owner(), rows_of, PyTuple_GET_ITEM(plan.rows_of.get(), 0), PyTuple_GET_ITEM(plan.rows_of.get(), 1));
    DLTensor rows{};
    is_made = is_made && tokens && exchange_api()->from_object(tokens.get(), &rows) == 0;
    op.tokens = address_of(rows);
  } else {
    is_made = is_made && made.empty({local, per_expert, plan.columns}, plan.dtype, &op.tokens);
  }
  if (!is_made) return left();
  made.drop(0);
  const Object list = made.to_objects();
  if (!list) return left();
  size_t next = 0;
  auto take = [&](bool is_there) { return is_there ? PyList_GET_ITEM(list.get(), next++) : Py_None; };
  PyObject *counts = take(true), *offsets = take(true), *topk_ids = take(is_fresh), *words = take(is_fresh),
           *scales = take(plan.scales > 0), *rows = plan.rows_of ? tokens.get() : take(true);

  op.x = address_of(x);
  op.ids = address_of(is_fresh ? ids : old_ids);
  op.plan = block;
  op.topk_ids = is_fresh ? block + 4 * at_ids : 0;
  op.expert_count = block + 4 * at_counts;
  op.expert_offset = block + 4 * at_offsets;
  if (!start(turn, op.op, kDispatch, bytes_of(x))) return nullptr;
  if (!turn.run([&] { order_stream(op.op), run_dispatch(op); })) return nullptr;
  PyObject* const nothing = Py_None;
  const Object output = named_tuple(
      objects.output_type, {rows, scales, nothing, nothing, nothing, counts, nothing, offsets, nothing, nothing});
  const Object handle =
      is_fresh ? named_tuple(objects.handle_type, {topk_ids, words, objects.nothing, objects.nothing, number.get()})
               : Object::borrowed(previous);
  return output && handle ? PyTuple_Pack(2, output.get(), handle.get()) : nullptr;
}

PyObject* LowLatency::combine(Turn& turn, PyObject* const* args) {
  const auto& [y_object, handle, weights_object, bias_object] = *reinterpret_cast<PyObject* const(*)[4]>(args);
  PyObject* const* routing = fields_of(handle, number);
  if (routing == nullptr || is_watched()) return left();
  Inputs inputs;
  DLTensor y, weights, bias, ids, words, none;
  if (!read(inputs, {{y_object, &y},
                     {weights_object, &weights},
                     {bias_object, &bias},
                     {routing[0], &ids},
                     {routing[1], &words},
                     {Py_None, &none},
                     {Py_None, &none}}))
    return left();
  const auto found = combines_.find(inputs.form());
  if (found == combines_.end()) return left();
  const CombinePlan plan = found->second;
  LlCombineArgs op = plan.args;
  if (!may_run(op.op, kCombine)) return left();
  Results made(is_on_gpu() ? kTorchCuda : kTorchCpu, is_on_gpu() ? device_index : 0);
  if (!made.empty({ids.shape[0], op.hidden}, plan.dtype, &op.out)) return left();
  const Object list = made.to_objects();
  if (!list) return left();
  op.y = address_of(y);
  op.ids = address_of(ids);
  op.weights = address_of(weights);
  op.plan = address_of(words);
  op.bias = address_of(bias);
  if (!start(turn, op.op, kCombine, bytes_of(y))) return nullptr;
  if (!turn.run([&] { order_stream(op.op), run_combine(op); })) return nullptr;
  return Py_NewRef(PyList_GET_ITEM(list.get(), 0));
}

}  // namespace ep::control
