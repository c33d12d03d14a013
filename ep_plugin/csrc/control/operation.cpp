#include "control/operation.h"

#include <algorithm>

#include "common/board.h"
#include "control/low_latency.h"

namespace ep::control {

namespace {

PyObject* part_of(int32_t phases) {
  static PyObject *const whole = interned(""), *const send = interned("send half"),
                         *const receive = interned("receive half");
  return phases == kWhole ? whole : phases == kLlSend ? send : receive;
}

PyObject* or_none(const Object& object) { return object ? object.get() : Py_None; }

Object tuple_of(std::initializer_list<PyObject*> fields) {
  Object values(PyTuple_New(static_cast<Py_ssize_t>(fields.size())));
  Py_ssize_t at = 0;
  for (PyObject* field : fields)
    if (values) PyTuple_SET_ITEM(values.get(), at++, Py_NewRef(field));
  return values;
}

// Returns a named tuple of the class `type`.
Object named_tuple(PyObject* type, std::initializer_list<PyObject*> fields) {
  static PyObject* const make = PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyTuple_Type), "__new__");
  const Object values = tuple_of(fields);
  return values ? Object(PyObject_CallFunctionObjArgs(make, type, values.get(), nullptr)) : Object();
}

// Words of int32, so that what follows is aligned.
int64_t aligned(int64_t words) { return (words + 31) / 32 * 32; }

// Makes objects of tensors, each for its owner. Returns false with Python's error set.
bool give(Results& made, const std::vector<Object*>& owners) {
  const Object list = made.to_objects();
  for (size_t i = 0; list && i < owners.size(); ++i)
    *owners[i] = Object::borrowed(PyList_GET_ITEM(list.get(), static_cast<Py_ssize_t>(i)));
  return static_cast<bool>(list);
}

}  // namespace

bool append_key(std::string& form, Door door, const Settings& settings) {
  form += static_cast<char>(door);
  for (Py_ssize_t i = 0; i < settings.count; ++i) {
    PyObject* value = settings.values[i];
    if (value == Py_None) {
      form += 'n';
    } else if (PyBool_Check(value)) {
      form += value == Py_True ? 't' : 'f';
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow != 0) return false;
      form.append(1, 'i').append(reinterpret_cast<const char*>(&number), sizeof(number));
    } else {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
      PyErr_Clear();  // of text that cannot be encoded
      if (text == nullptr) return false;
      form.append(1, 's').append(reinterpret_cast<const char*>(&size), sizeof(size)).append(text, size);
    }
  }
  return true;
}

PyObject* Operation::name() const {
  static PyObject* const names[] = {interned("dispatch"), interned("combine")};
  return names[kind];
}

bool Operation::read(Inputs& inputs, std::initializer_list<std::pair<PyObject*, DLTensor*>> tensors) {
  for (const auto& [object, tensor] : tensors) {
    if (!inputs.read(object)) {
      if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();  // not Ctrl-C
      return false;
    }
    *tensor = inputs.last();
    if (object != Py_None) inputs_.push_back(Object::borrowed(object));
  }
  return door_ == Door::kBuffer || !inputs.needs_grad();  // nothing of a Buffer is differentiable
}

bool Operation::has_valid_ids(const DLTensor& ids) const {
  if (engine_->is_on_gpu()) return true;
  BadId bad;
  return !find_bad_id(address_of(ids), ids.type_bits / 8, ids.shape[0], ids.shape[1], engine_->comm->num_experts, &bad);
}

Results Operation::new_results() const {
  const bool is_on_gpu = engine_->is_on_gpu();
  return Results(is_on_gpu ? kTorchCuda : kTorchCpu, is_on_gpu ? engine_->device_index : 0);
}

// Whether autograd must record the operation at its end.
bool Operation::needs_grad() const {
  static PyObject* const grad_name = interned("requires_grad");
  if (door_ == Door::kBuffer || !torch_functions().aoti_torch_grad_mode_is_enabled()) return false;
  for (const Object& input : inputs_)
    if (Object(PyObject_GetAttr(input.get(), grad_name)).get() != Py_False) return true;
  return false;
}

Object Operation::tensors() const {
  const Object made = results();
  Object all(PyTuple_New(static_cast<Py_ssize_t>(inputs_.size())));
  if (!made || !all) return Object();
  for (size_t i = 0; i < inputs_.size(); ++i)
    PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), Py_NewRef(inputs_[i].get()));
  return Object(PySequence_Concat(all.get(), made.get()));
}

void Operation::set_phases(int32_t phases) {
  shared().phases = phases;
  if (phases & kLlReceive) is_received_ = true;
}

// Runs the kernel after earlier operations. Call it without the interpreter's lock.
void Operation::run_in_order() {
  if (StreamOrder* const order = engine_->order.get()) {
    LlOperation& op = shared();
    op.num_sms = std::min(op.num_sms, order->usable());
    op.stream = order->enter(op.stream, op.num_sms);
  }
  run();
}

bool Operation::launch(Turn& turn, int32_t phases) {
  LlOperation& op = shared();
  const bool sends = (phases & kLlSend) != 0;
  if (sends && !engine_->count_served()) return false;
  if (!turn.begin(name(), part_of(phases), nbytes_, sends ? nullptr : &call_)) return false;
  if (sends) {
    call_ = turn.logged();
    op.comm = *engine_->comm;
    op.slot = engine_->next_slot(kind, false);
  }
  set_phases(phases);
  return turn.run([&] { run_in_order(); });
}

PyObject* Operation::receive() {
  if (is_received_ || is_watched() || needs_grad()) return left();
  return in_turn(*engine_, [&](Turn& turn) -> PyObject* {
    uint64_t stream = 0;
    if (!turn.enter() || !engine_->find_stream(&stream)) return left();
    if (stream != shared().stream) return left();  // Python passes another stream to the allocator
    return launch(turn, kLlReceive) ? made().release() : nullptr;
  });
}

Object Operation::finish() {
  if (!engine_->find_stream(&shared().stream)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "expected the current device to be the communicator's");
    return Object();
  }
  set_phases(kLlReceive);
  return run_unlocked([&] { run_in_order(); }) && engine_->check() ? results() : Object();
}

Dispatch::Dispatch(std::shared_ptr<LowLatency> engine, const Given& given)
    : Operation(std::move(engine), kDispatch, given.door), handle_(Object::borrowed(given.handle)) {
  if (door_ != Door::kBuffer) return;
  max_tokens_ = Object::borrowed(given.settings.values[0]);
  num_experts_ = Object::borrowed(given.settings.values[1]);
}

bool Dispatch::prepare(const Given& given, Turn& turn) {
  Inputs inputs;
  DLTensor x, ids, old_ids{}, cumulative, wait_cost, none;
  const bool is_fresh = given.routing == nullptr;
  if (!read(inputs, {{given.x, &x},
                     {given.ids, &ids},
                     {Py_None, &none},
                     {Py_None, &none},
                     {given.cumulative, &cumulative},
                     {given.wait_cost, &wait_cost}}))
    return false;
  if (!is_fresh && !read(inputs, {{given.routing[0], &old_ids}, {given.routing[1], &none}})) return false;
  const DispatchPlan* plan = engine_->find<DispatchPlan>(inputs.form(), given.door, given.settings);
  if (plan == nullptr) return false;
  plan_ = *plan;
  LlDispatchArgs& op = plan_.args;
  if (!engine_->find_stream(&op.op.stream) || !has_valid_ids(ids)) return false;
  nbytes_ = bytes_of(x);
  op.x = address_of(x);
  op.ids = address_of(is_fresh ? ids : old_ids);  // the same ids give the same routing
  op.cumulative = address_of(cumulative);
  op.op.wait_cost = address_of(wait_cost);
  return allocate(ids.shape[0], turn);
}

// One block of int32 has all small results. Each begins where a tensor of its own might. A Buffer's plan has a storage
// of its own.
bool Dispatch::allocate(int64_t num_tokens, Turn& turn) {
  static const int32_t int32 = dtype_number("int32");
  static PyObject* const view_name = interned("view");
  LlDispatchArgs& op = plan_.args;
  const LlPlanLayout& layout = plan_.layout;
  const bool is_for_buffer = door_ == Door::kBuffer, has_handle = !is_for_buffer && handle_.get() == Py_None;
  const int64_t local = engine_->local_experts, topk = op.op.header.topk;
  int64_t words = 0;
  auto place = [&](int64_t needed) { return std::exchange(words, words + aligned(needed)); };
  if (!is_for_buffer) place(layout.words);
  const int64_t at_ids = place(has_handle ? num_tokens * topk : 0), at_counts = place(local),
                at_offsets = place(local + 1);

  Results made = new_results();
  std::vector<Object*> owners;
  auto view = [&](Object& owner, size_t of, std::initializer_list<int64_t> sizes, int64_t begin) {
    owners.push_back(&owner);
    return made.view(of, sizes, begin);
  };
  Address block = 0;
  bool is_made = made.empty({words}, int32, &block);
  op.plan = block;
  if (is_for_buffer) is_made = is_made && made.empty({layout.words}, int32, &op.plan);
  is_made = is_made && view(counts_, 0, {local}, at_counts);
  if (is_for_buffer) {
    const int64_t ranks = engine_->comm->num_ranks;
    is_made = is_made && view(src_info_, 1, {local, ranks * op.op.header.max_tokens}, layout.src_info) &&
              view(layout_range_, 1, {local, 2 * ranks}, layout.layout_range);
  } else {
    is_made = is_made && view(offsets_, 0, {local + 1}, at_offsets);
  }
  if (has_handle)
    is_made = is_made && view(topk_ids_, 0, {num_tokens, topk}, at_ids) && view(words_, 0, {layout.words}, 0);
  if (!is_made || !allocate_rows(made, owners, turn)) return false;
  if (is_for_buffer) made.drop(1);
  made.drop(0);
  if (!give(made, owners)) return false;
  op.topk_ids = has_handle ? block + 4 * at_ids : 0;
  op.expert_count = block + 4 * at_counts;
  op.expert_offset = block + 4 * at_offsets;
  if (is_for_buffer) layout_range_ = call(layout_range_.get(), view_name, LowLatency::objects.int64);
  return !is_for_buffer || layout_range_;
}

bool Dispatch::allocate_rows(Results& made, std::vector<Object*>& owners, Turn& turn) {
  static PyObject* const rows_of = interned("rows_of");
  LlDispatchArgs& op = plan_.args;
  const int64_t local = engine_->local_experts, per_expert = engine_->comm->num_ranks * op.op.header.max_tokens;
  if (plan_.scales > 0) {
    const int64_t strides[3] = {plan_.scales * per_expert, 1, per_expert};  // transposed
    owners.push_back(&scales_);
    if (!made.empty({local, per_expert, plan_.scales}, plan_.scale_dtype, &op.scales, strides)) return false;
  }
  if (!plan_.rows_of) {
    owners.push_back(&rows_);
    return made.empty({local, per_expert, plan_.columns}, plan_.dtype, &op.tokens);
  }
  PyObject* const* given = &PyTuple_GET_ITEM(plan_.rows_of.get(), 0);
  rows_ = call(turn.owner(), rows_of, given[0], given[1]);
  DLTensor rows{};
  if (!rows_ || exchange_api()->from_object(rows_.get(), &rows) != 0) return false;
  op.tokens = address_of(rows);
  return true;
}

void Dispatch::run() { engine_->run_dispatch(plan_.args); }

Object Dispatch::results() const {
  if (door_ == Door::kBuffer)
    return tuple_of({rows_.get(), or_none(scales_), counts_.get(), src_info_.get(), layout_range_.get()});
  const Object outputs =
      tuple_of({rows_.get(), or_none(scales_), Py_None, Py_None, counts_.get(), offsets_.get(), Py_None, Py_None});
  if (!topk_ids_ || !outputs) return outputs;
  const Object routing = tuple_of({topk_ids_.get(), words_.get()});
  return routing ? Object(PySequence_Concat(outputs.get(), routing.get())) : Object();
}

Object Dispatch::made() const {
  const LowLatencyObjects& objects = LowLatency::objects;
  if (door_ == Door::kBuffer) {
    const Object hidden(PyLong_FromLongLong(plan_.columns));
    if (!hidden) return Object();
    const Object received = scales_ ? tuple_of({rows_.get(), scales_.get()}) : rows_;
    const Object handle =
        tuple_of({src_info_.get(), layout_range_.get(), max_tokens_.get(), hidden.get(), num_experts_.get()});
    return received && handle ? tuple_of({received.get(), counts_.get(), handle.get()}) : Object();
  }
  const Object output = named_tuple(objects.output_type, {rows_.get(), or_none(scales_), Py_None, Py_None, Py_None,
                                                          counts_.get(), Py_None, offsets_.get(), Py_None, Py_None});
  const Object handle = topk_ids_ ? named_tuple(objects.handle_type, {topk_ids_.get(), words_.get(), objects.nothing,
                                                                      objects.nothing, engine_->number.get()})
                                  : handle_;
  return output && handle ? tuple_of({output.get(), handle.get()}) : Object();
}

bool Combine::prepare(const Given& given, Turn&) {
  Inputs inputs;
  DLTensor y, weights, bias, ids, words, out, wait_cost, none;
  if (!read(inputs,
            {{given.y, &y}, {given.weights, &weights}, {given.bias, &bias}, {given.ids, &ids}, {given.plan, &words}}))
    return false;
  const int64_t begin = inputs.begin(), storage_bytes = inputs.storage_bytes();
  if (given.layout_range != nullptr && !read(inputs, {{given.layout_range, &none}})) return false;
  if (!read(inputs, {{given.out, &out}, {given.wait_cost, &wait_cost}})) return false;
  const CombinePlan* plan = engine_->find<CombinePlan>(inputs.form(), given.door, given.settings);
  if (plan == nullptr) return false;
  plan_ = *plan;
  LlCombineArgs& op = plan_.args;
  if (!engine_->find_stream(&op.op.stream)) return false;
  nbytes_ = bytes_of(y);
  op.y = address_of(y);
  op.ids = address_of(ids);
  op.weights = address_of(weights);
  op.plan = address_of(words);
  op.bias = address_of(bias);
  op.out = address_of(out);
  op.op.wait_cost = address_of(wait_cost);
  if (door_ == Door::kBuffer) {
    const LlPlanLayout& layout = plan_.layout;
    if (begin != 4 * layout.src_info || storage_bytes != 4 * layout.words || !has_valid_ids(ids)) return false;
    op.plan -= 4 * layout.src_info;
  }
  if (given.out != Py_None) {
    out_ = Object::borrowed(given.out);
    return true;
  }
  Results made = new_results();
  return made.empty({ids.shape[0], op.hidden}, plan_.dtype, &op.out) && give(made, {&out_});
}

void Combine::run() { engine_->run_combine(plan_.args); }

Object Combine::results() const { return tuple_of({out_.get(), Py_None}); }

}  // namespace ep::control
