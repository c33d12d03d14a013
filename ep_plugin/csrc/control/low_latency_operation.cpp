#include "control/low_latency_operation.h"

#include <algorithm>

#include "common/board.h"
#include "control/low_latency.h"

namespace ep::control {

namespace {

PyObject* name_of(int kind) {
  static PyObject *const dispatch = interned("dispatch"), *const combine = interned("combine");
  return kind == kDispatch ? dispatch : combine;
}

PyObject* part_of(int32_t phases) {
  static PyObject *const whole = interned(""), *const send = interned("send half"),
                         *const receive = interned("receive half");
  return phases == kWhole ? whole : phases == kLlSend ? send : receive;
}

}  // namespace

LowLatencyOperation::LowLatencyOperation(std::shared_ptr<LowLatency> engine, int kind, Door door)
    : Operation(name_of(kind), door), kind(kind), engine_(std::move(engine)) {}

bool LowLatencyOperation::has_valid_ids(const DLTensor& ids) const {
  if (engine_->is_on_gpu()) return true;
  BadId bad;
  return !find_bad_id(address_of(ids), ids.type_bits / 8, ids.shape[0], ids.shape[1], engine_->num_experts(), &bad);
}

// Runs the kernel after earlier operations. Call it without the interpreter's lock.
void LowLatencyOperation::run_in_order() {
  if (StreamOrder* const order = engine_->order.get()) {
    LlOperation& op = shared();
    op.num_sms = std::min(op.num_sms, order->usable());
    op.stream = order->enter(op.stream, op.num_sms);
  }
  run();
}

// What a send half needs besides the arguments of the call.
bool LowLatencyOperation::prepare_to_send(Turn& turn) {
  static PyObject* const started = interned("started");
  LlOperation& op = shared();
  call_ = turn.logged();
  if (Engine::is_recording()) {
    const Object load = turn.load(), counted(load ? call(load.get(), started) : Object());  // (wait_cost, layer)
    if (!counted) return false;
    if (op.wait_cost == 0) op.wait_cost = hold(Object::borrowed(PyTuple_GET_ITEM(counted.get(), 0)));
    layer_ = Object::borrowed(PyTuple_GET_ITEM(counted.get(), 1));
  }
  if (!allocate(turn)) return false;
  op.comm = *engine_->comm;
  op.slot = engine_->next_slot(kind, capture != 0);
  return true;
}

bool LowLatencyOperation::launch(Turn& turn, int32_t phases) {
  const bool sends = (phases & kLlSend) != 0, receives = (phases & kLlReceive) != 0;
  if (sends && !engine_->count_served()) return false;
  if (!turn.begin(name(), part_of(phases), nbytes_, sends ? nullptr : &call_)) return false;
  if (sends && !prepare_to_send(turn)) return turn.failed();
  if (receives) engine_->forget(*this);
  const bool has_run = engine_->legs ? run_over_nodes(phases) : run_phase(phases);
  if (!has_run || !receives || !Engine::is_recording()) return turn.end(has_run);
  const Object load = turn.load();
  return turn.end(load && count(load.get()));
}

bool LowLatencyOperation::run_phase(int32_t phase) {
  shared().phases = phase;
  return run_unlocked([&] { run_in_order(); }) && engine_->check();
}

bool LowLatencyOperation::run_over_nodes(int32_t phases) {
  const LlLeg first = first_leg();
  if ((phases & kLlSend) != 0) {
    if (!run_phase(kLlSend) || !begin_legs(first)) return false;
    if (first == kLlWeights && !(wait_for_legs(first) && run_phase(kLlForward) && begin_legs(kLlSums))) return false;
  }
  if ((phases & kLlReceive) == 0) return true;
  return wait_for_legs(first == kLlWeights ? kLlSums : first) && run_phase(kLlReceive);
}

// Passes for each other node where its leg begins in this rank's block, the bytes that are sent, and the most that may
// come. If legs are not padded these are all that the memory has room for, so that the leg of a rank that disagrees
// fits.
bool LowLatencyOperation::begin_legs(LlLeg leg) {
  static PyObject* const start = interned("start");
  const LlOperation& op = shared();
  const LlLegsLayout lay = ll_legs_layout(op.comm.num_ranks, op.shape);
  const LlLegLayout rows = ll_leg_layout(leg, op.header, op.shape);
  Object sends(PyList_New(0)), receives(PyList_New(0));
  const auto add = [&](const Object& list, int origin, LlDirection direction, int64_t bytes) {
    const int64_t begin = ll_leg_offset(lay, op.shape, leg, direction, op.slot, origin);
    const Object piece(Py_BuildValue("iLL", ll_node_of(op.node, origin), static_cast<long long>(begin),
                                     static_cast<long long>(bytes)));
    return piece && PyList_Append(list.get(), piece.get()) == 0;
  };
  if (!sends || !receives) return false;
  for (int origin = 0; origin + 1 < op.shape.num_nodes; ++origin) {
    const auto* out = at<LlLegHeader>(op.comm.own_control, ll_leg_offset(lay, op.shape, leg, kLlOut, op.slot, origin));
    const int64_t padded = rows.bytes(op.header.max_tokens);
    const int64_t sent = engine_->pads_legs ? padded : rows.bytes(out->num_rows);
    const int64_t most = engine_->pads_legs ? padded : lay.leg_bytes[leg];
    if (!add(sends, origin, kLlOut, sent) || !add(receives, origin, kLlIn, most)) return false;
  }
  const Object kind(PyLong_FromLong(leg)), entry(PyLong_FromLong(op.slot));
  if (kind && entry) legs_ = call(engine_->legs.get(), start, kind.get(), entry.get(), sends.get(), receives.get());
  return kind && entry && legs_;
}

void LowLatencyOperation::abandon_legs() {
  static PyObject* const abandon = interned("abandon");
  const Object under_way = std::exchange(legs_, Object());
  if (under_way && !call(engine_->legs.get(), abandon, under_way.get())) PyErr_WriteUnraisable(under_way.get());
}

bool LowLatencyOperation::wait_for_legs(LlLeg leg) {
  static PyObject* const wait = interned("wait");
  const LlOperation& op = shared();
  const Object under_way = std::exchange(legs_, Object());
  const Object waited(call(engine_->legs.get(), wait, under_way.get()));  // nanoseconds, by node
  if (!waited) return false;
  const LlLegsLayout lay = ll_legs_layout(op.comm.num_ranks, op.shape);
  const LlLegLayout rows = ll_leg_layout(leg, op.header, op.shape);
  for (int origin = 0; origin + 1 < op.shape.num_nodes; ++origin) {
    const int node = ll_node_of(op.node, origin);
    const auto* in = at<LlLegHeader>(op.comm.own_control, ll_leg_offset(lay, op.shape, leg, kLlIn, op.slot, origin));
    engine_->leg_bytes_received += rows.bytes(engine_->pads_legs ? op.header.max_tokens : in->num_rows);
    if (op.wait_cost != 0)
      at<int64_t>(op.wait_cost)[ll_rank_at(op, node * op.comm.num_ranks + op.comm.rank)] +=
          PyLong_AsLongLong(PyList_GET_ITEM(waited.get(), node));
  }
  return !PyErr_Occurred();
}

PyObject* LowLatencyOperation::receive() {
  if (is_watched() || needs_grad()) return left();
  return in_turn(*engine_, [&](Turn& turn) -> PyObject* {
    uint64_t stream = 0, current_capture = 0;
    if (!turn.enter() || is_received || !engine_->find_stream(&stream, &current_capture)) return left();
    // Python says which captures do not fit, and passes another stream to the allocator.
    if (current_capture != capture || stream != shared().stream) return left();
    return launch(turn, kLlReceive) ? made().release() : nullptr;
  });
}

PyObject* LowLatencyOperation::collect() {
  return in_turn(*engine_, [&](Turn& turn) -> PyObject* {
    uint64_t current_capture = 0;
    if (!turn.enter() || !engine_->find_stream(&shared().stream, &current_capture)) return left();
    return launch(turn, kLlReceive) ? results().release() : nullptr;
  });
}

LowLatencyDispatch::LowLatencyDispatch(std::shared_ptr<LowLatency> engine, const Given& given)
    : LowLatencyOperation(std::move(engine), kDispatch, given.door),
      is_fresh_(given.routing == nullptr),
      handle_(Object::borrowed(given.handle)) {
  if (door_ != Door::kBuffer) return;
  max_tokens_ = Object::borrowed(given.settings.values[0]);
  num_experts_ = Object::borrowed(given.settings.values[1]);
}

bool LowLatencyDispatch::prepare(const Given& given) {
  Inputs inputs;
  DLTensor x, ids, old_ids{}, cumulative, wait_cost, none;
  if (!read(inputs, {{given.x, &x},
                     {given.ids, &ids},
                     {Py_None, &none},
                     {Py_None, &none},
                     {given.cumulative, &cumulative},
                     {given.wait_cost, &wait_cost}}))
    return false;
  if (!is_fresh_ && !read(inputs, {{given.routing[0], &old_ids}, {given.routing[1], &none}})) return false;
  const LowLatencyDispatchPlan* plan = engine_->dispatches.find(inputs.take_form(), given.door, given.settings);
  if (plan == nullptr) return false;
  plan_ = *plan;
  LlDispatchArgs& op = plan_.args;
  if (!engine_->find_stream(&op.op.stream, &capture) || !has_valid_ids(ids)) return false;
  nbytes_ = bytes_of(x);
  num_tokens_ = ids.shape[0];
  op.x = address_of(x);
  op.ids = address_of(is_fresh_ ? ids : old_ids);  // the same ids give the same routing
  op.cumulative = address_of(cumulative);
  op.op.wait_cost = address_of(wait_cost);
  return true;
}

// A Buffer's plan has a storage of its own. So has each result of the operator.
bool LowLatencyDispatch::allocate(Turn& turn) {
  static const int32_t int32 = dtype_number("int32");
  static PyObject* const view_name = interned("view");
  LlDispatchArgs& op = plan_.args;
  const LlPlanLayout& layout = plan_.layout;
  const bool is_for_buffer = door_ == Door::kBuffer, has_handle = !is_for_buffer && is_fresh_;
  const int64_t local = engine_->local_experts, topk = op.op.header.topk;
  std::vector<Part> parts{{&counts_, local, 0, &op.expert_count},
                          {is_for_buffer ? nullptr : &offsets_, local + 1, 0, &op.expert_offset}};
  if (!is_for_buffer) parts.push_back({has_handle ? &words_ : &unseen_words_, layout.words, 0, &op.plan});
  op.topk_ids = 0;
  if (has_handle) parts.push_back({&topk_ids_, num_tokens_, topk, &op.topk_ids});
  Results made = engine_->new_results();
  std::vector<Object*> owners;
  if (!make_parts(made, owners, parts, door_ != Door::kOperator)) return false;
  if (is_for_buffer) {
    const size_t plan = made.size();
    const int64_t ranks = engine_->num_ranks();
    if (!made.empty({layout.words}, int32, &op.plan) ||
        !made.view(plan, {local, ranks * op.op.header.max_tokens}, layout.src_info) ||
        !made.view(plan, {local, 2 * ranks}, layout.layout_range))
      return false;
    owners.insert(owners.end(), {nullptr, &src_info_, &layout_range_});
  }
  if (!allocate_rows(made, owners, turn) || !give(made, owners)) return false;
  if (is_for_buffer) layout_range_ = call(layout_range_.get(), view_name, python_objects().int64);
  return !is_for_buffer || layout_range_;
}

bool LowLatencyDispatch::allocate_rows(Results& made, std::vector<Object*>& owners, Turn& turn) {
  static PyObject* const rows_of = interned("rows_of");
  LlDispatchArgs& op = plan_.args;
  const int64_t local = engine_->local_experts, per_expert = engine_->num_ranks() * op.op.header.max_tokens;
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

Object LowLatencyDispatch::count(PyObject* load) const {
  static PyObject* const dispatched = interned("dispatched");
  const Object& ranges = door_ == Door::kBuffer ? layout_range_ : words_;
  return call(load, dispatched, is_fresh_ ? ranges.get() : Py_None, or_none(layer_));
}

void LowLatencyDispatch::run() { engine_->run_dispatch(plan_.args); }

Object LowLatencyDispatch::results() const {
  if (door_ == Door::kBuffer)
    return tuple_of({rows_.get(), or_none(scales_), counts_.get(), src_info_.get(), layout_range_.get()});
  const Object outputs =
      tuple_of({rows_.get(), or_none(scales_), Py_None, Py_None, counts_.get(), offsets_.get(), Py_None, Py_None});
  if (!topk_ids_ || !outputs) return outputs;
  const Object routing = tuple_of({topk_ids_.get(), words_.get()});
  return routing ? Object(PySequence_Concat(outputs.get(), routing.get())) : Object();
}

Object LowLatencyDispatch::made() const {
  const PythonObjects& objects = python_objects();
  if (door_ == Door::kBuffer) {
    const Object hidden(PyLong_FromLongLong(plan_.columns));
    if (!hidden) return Object();
    const Object received = scales_ ? tuple_of({rows_.get(), scales_.get()}) : rows_;
    const Object handle =
        tuple_of({src_info_.get(), layout_range_.get(), max_tokens_.get(), hidden.get(), num_experts_.get()});
    return received && handle ? tuple_of({received.get(), counts_.get(), handle.get()}) : Object();
  }
  const Object output =
      named_tuple(objects.output_type, {rows_.get(), or_none(scales_), Py_None, Py_None, Py_None, counts_.get(),
                                        Py_None, offsets_.get(), Py_None, Py_None, Py_None, Py_None});
  const Object handle = topk_ids_ ? named_tuple(objects.handle_type, {topk_ids_.get(), words_.get(), objects.nothing,
                                                                      objects.nothing, engine_->number.get()})
                                  : handle_;
  return output && handle ? tuple_of({output.get(), handle.get()}) : Object();
}

bool LowLatencyCombine::prepare(const Given& given) {
  Inputs inputs;
  DLTensor y, weights, bias, ids, words, out, wait_cost, none;
  if (!read(inputs,
            {{given.y, &y}, {given.weights, &weights}, {given.bias, &bias}, {given.ids, &ids}, {given.plan, &words}}))
    return false;
  const int64_t begin = inputs.begin(), storage_bytes = inputs.storage_bytes();
  if (given.layout_range != nullptr && !read(inputs, {{given.layout_range, &none}})) return false;
  if (!read(inputs, {{given.out, &out}, {given.wait_cost, &wait_cost}})) return false;
  const LowLatencyCombinePlan* plan = engine_->combines.find(inputs.take_form(), given.door, given.settings);
  if (plan == nullptr) return false;
  plan_ = *plan;
  LlCombineArgs& op = plan_.args;
  if (!engine_->find_stream(&op.op.stream, &capture)) return false;
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
  num_tokens_ = ids.shape[0];
  if (given.out != Py_None) out_ = Object::borrowed(given.out);
  return true;
}

bool LowLatencyCombine::allocate(Turn&) {
  if (out_) return true;
  LlCombineArgs& op = plan_.args;
  Results made = engine_->new_results();
  return made.empty({num_tokens_, op.hidden}, plan_.dtype, &op.out) && give(made, {&out_});
}

void LowLatencyCombine::run() { engine_->run_combine(plan_.args); }

Object LowLatencyCombine::count(PyObject* load) const {
  static PyObject* const combined = interned("combined");
  return call(load, combined);
}

Object LowLatencyCombine::results() const { return tuple_of({out_.get(), Py_None}); }

}  // namespace ep::control
