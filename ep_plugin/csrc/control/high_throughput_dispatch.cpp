#include <algorithm>

#include "common/board.h"
#include "control/high_throughput_operation.h"

namespace ep::control {

namespace {

int32_t int32_number() {
  static const int32_t number = dtype_number("int32");
  return number;
}

int32_t int64_number() {
  static const int32_t number = dtype_number("int64");
  return number;
}

// Whether `in_rank` [T, R] has the ranks to whose experts the ids [T, K] go, and no others.
template <class Id>
bool agree(const Id* ids, int64_t num_tokens, int64_t topk, int64_t local_experts, const DLTensor& in_rank) {
  const auto* given = static_cast<const uint8_t*>(in_rank.data);
  const int64_t ranks = in_rank.shape[1];
  std::vector<uint8_t> expected(ranks);
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::fill(expected.begin(), expected.end(), 0);
    for (int64_t k = 0; k < topk; ++k)
      if (const Id id = ids[t * topk + k]; id >= 0) expected[id / local_experts] = 1;
    for (int64_t r = 0; r < ranks; ++r)
      if (expected[r] != given[t * in_rank.strides[0] + r * in_rank.strides[1]]) return false;
  }
  return true;
}

PyObject* dispatch_name() {
  static PyObject* const name = interned("dispatch");
  return name;
}

}  // namespace

Dispatch::Dispatch(std::shared_ptr<HighThroughput> engine, const Given& given)
    : HighThroughputOperation(std::move(engine), dispatch_name(), given.door),
      has_handle_(given.routing != nullptr),
      given_handle_(Object(Py_XNewRef(given.handle))) {
  Inputs inputs;
  DLTensor x, ids, weights, scales, per_rank, in_rank{}, per_expert;
  if (!read(inputs, {{given.x, &x}, {given.ids, &ids}, {given.weights, &weights}, {given.scales, &scales}})) return;
  if (has_handle_ && !read_handle(inputs, given.routing)) return;
  if (is_for_buffer() && !has_handle_ &&
      (!read(inputs, {{given.in_rank, &in_rank}}, engine_->is_on_gpu() ? kUnread : kFixedRows) ||
       !read(inputs, {{given.per_rank, &per_rank}, {given.per_expert, &per_expert}}, kUnread)))
    return;
  if (x.num_dims != 2 || ids.num_dims != 2) return;
  form_ = inputs.form();
  nbytes_ = bytes_of(x);
  // The rows of a known routing differ from call to call. So its capacity is no part of the key, and use() checks it.
  const bool is_free = has_handle_ && PyLong_Check(given.capacity) && !PyBool_Check(given.capacity);
  if (has_handle_ && !is_free && given.capacity != Py_None) return;  // True would have the key of a number
  settings_ = {Object::borrowed(is_free ? Py_True : given.capacity), Object::borrowed(given.quantize)};
  if (is_for_buffer()) {
    settings_.push_back(Object::borrowed(given.alignment));
    settings_.push_back(Object::borrowed(given.sms));
    in_rank_ = Object(Py_XNewRef(given.in_rank));
    int overflow = 0;  // then the call has no key
    if (is_fresh()) expert_alignment_ = PyLong_AsLongLongAndOverflow(given.alignment, &overflow);
  }
  if (is_free) {
    int overflow = 0;
    given_capacity_ = PyLong_AsLongLongAndOverflow(given.capacity, &overflow);
    if (overflow != 0 || given_capacity_ < 0 || given_capacity_ > INT32_MAX) return;
  }
  send_.x = address_of(x);
  send_.x_stride = x.strides[0] * x.type_bits / 8;
  send_.scales = address_of(scales);
  send_.scale_stride = scales.num_dims == 2 ? scales.strides[0] * scales.type_bits / 8 : 0;
  send_.weights = address_of(weights);
  num_tokens_ = ids.shape[0];
  topk_ = ids.shape[1];
  ids_ = address_of(ids);
  id_bytes_ = ids.type_bits / 8;
  is_readable_ = true;
  const DispatchPlan* plan = find(engine_->dispatches);
  if (plan != nullptr && (engine_->is_on_gpu() || !has_bad_ids(in_rank))) use(*plan);
}

// Whether ids are wrong in a way that only their values show. in_rank: empty, or a Buffer's is_token_in_rank.
bool Dispatch::has_bad_ids(const DLTensor& in_rank) const {
  const int64_t local = engine_->local_experts;
  BadId bad;
  if (find_bad_id(ids_, id_bytes_, num_tokens_, topk_, engine_->num_experts, &bad)) return true;
  if (in_rank.num_dims == 0) return false;
  return id_bytes_ == 8 ? !agree(at<const int64_t>(ids_), num_tokens_, topk_, local, in_rank)
                        : !agree(at<const int32_t>(ids_), num_tokens_, topk_, local, in_rank);
}

void Dispatch::learn(const DispatchPlan& plan) {
  if (!is_readable_) return;
  remember(engine_->dispatches, plan);
  use(plan);
}

void Dispatch::learn_from(const Dispatch& same) {
  const int32_t weights = same.plan_.weight_dtype;
  if (same.is_known_ && (weights < 0 || weights == float32_number())) learn(same.plan_);
}

void Dispatch::use(const DispatchPlan& plan) {
  plan_ = plan;
  if (has_handle_) {
    if (!has_sound_handle()) return;
    plan_.capacity = is_for_buffer() && has_bounded_handle() ? totals_[0] : given_capacity_;
    const int64_t rows = rows_of_handle();
    if (is_bounded() && (plan_.capacity < rows || (has_bounded_handle() && plan_.capacity > rows))) return;
    known_ = has_bounded_handle() ? nullptr : totals_;
  }
  is_known_ = true;
}

int64_t Dispatch::pool_bytes() const {
  const HighThroughput& engine = *engine_;
  const int64_t slot = slot_layout_of(plan_.header).bytes;
  if (engine.max_tokens >= 0) return engine.size * engine.max_tokens * slot;
  return known_ == nullptr ? -1 : engine.room_for(kDispatchPool, engine.size * known_[kTotalMaxRows] * slot);
}

Rows Dispatch::output_rows() const {
  const HighThroughput& engine = *engine_;
  if (plan_.capacity >= 0) return {plan_.capacity, engine.size * std::max<int64_t>(engine.max_tokens, 0)};
  return {known_[engine.is_flat() ? kTotalRows : kTotalSlots], known_[kTotalSlots]};
}

// Makes all small results that need no totals.
bool Dispatch::make_small_results() {
  const HighThroughput& engine = *engine_;
  const int64_t local = engine.local_experts, T = num_tokens_, K = topk_;
  const int64_t plan_words = meta_layout(engine.size, engine.num_experts, 1).words + T * (engine.size + K);
  Address plan = 0, ids = 0;
  const auto unless_for_buffer = [&](Object& owner) { return is_for_buffer() ? nullptr : &owner; };
  // A Buffer returns none of the first three. The plan, or the counts, then hold the block.
  std::vector<Part> parts{{is_fresh() ? unless_for_buffer(counts_) : &counts_, local, 0, &recv_.expert_count},
                          {unless_for_buffer(offsets_), local + 1, 0, &recv_.expert_offset}};
  if (is_bounded()) parts.push_back({unless_for_buffer(limits_), 2 + kRailOverflowWords, 0, &recv_.overflow});
  if (is_fresh()) {
    const int64_t blocks = plan_blocks(T) * plan_block_words(engine.size, engine.num_experts);
    parts.push_back({&handle_.plan, plan_words, 0, &plan});
    parts.push_back({&handle_.topk_ids, T, K, &ids});
    parts.push_back({shares_memory ? nullptr : &block_counts_, blocks, 0, &block_counts_at_});
  }
  Results made = engine.new_results();
  std::vector<Object*> owners;
  bool is_made = make_parts(made, owners, parts, shares_memory);
  if (is_for_buffer() && is_fresh()) {
    is_made = is_made && made.view(0, {engine.size, engine.size}, (plan - recv_.expert_count) / 4);  // see MetaLayout
    owners.push_back(&rank_rows_);
  }
  if (is_bounded() && door_ == Door::kCommunicator)
    for (Object* one : {&overflow_, &required_}) {
      is_made = is_made && made.view(0, {}, (recv_.overflow - recv_.expert_count) / 4 + (one == &required_));
      owners.push_back(one);
    }
  if (!is_made || !give(made, owners)) return false;
  if (is_fresh()) routing_ = routing_of(ids, plan, T, K);
  return make_host_results();
}

// Makes the totals and the counts for the host, in its memory.
bool Dispatch::make_host_results() {
  const int64_t local = engine_->local_experts, num_totals = is_bounded() ? 1 : kTotals + local;
  const int64_t before = is_for_buffer();  // the communicator's number
  if ((is_bounded() || is_for_buffer()) && !is_fresh()) return true;
  Results made(kTorchCpu, 0);
  std::vector<Object*> owners;
  Address counts = 0, totals = 0;
  bool is_made = true;
  auto add = [&](Object& owner, int64_t size, Address* address) {
    is_made = is_made && made.empty({size}, int64_number(), address);
    owners.push_back(&owner);
  };
  if (!is_bounded() && !is_for_buffer()) add(host_counts_, local, &counts);
  if (is_fresh()) add(handle_.totals, before + num_totals, &totals);
  if (!is_made || !give(made, owners)) return false;
  host_totals_ = at<int64_t>(totals, 8 * before);
  host_counts_at_ = at<int64_t>(counts);
  if (is_for_buffer()) host_totals_[-1] = PyLong_AsLongLong(engine_->number.get());
  if (is_bounded()) *host_totals_ = plan_.capacity;
  if (!is_fresh()) std::copy_n(totals_ + kTotals, local, host_counts_at_);
  return true;
}

DispatchSendArgs Dispatch::send_args() const {
  DispatchSendArgs args = send_;
  args.comm = *engine_->comm;
  args.routing = routing_;
  args.header = plan_.header;
  args.num_sms = plan_.sms.sending;
  args.optimistic = !is_reserved_;
  args.quantize = plan_.quantize;
  args.element = plan_.element;
  args.stream = stream_;
  return args;
}

bool Dispatch::start() {
  HighThroughput& engine = *engine_;
  if (!choose_stream() || !make_small_results()) return false;
  if (is_fresh() && !is_bounded()) ticket_ = engine.next_ticket();
  const int64_t needed = pool_bytes();
  if (needed >= 0) {
    if (!engine.reserve(kDispatchPool, needed)) return false;  // a graph's capture may refuse it
    is_reserved_ = true;
  }
  const bool is_one_kernel = plan_.sms.receiving == 0;
  is_sent_ = !is_one_kernel && (is_reserved_ || engine.comm->pool_bytes[kDispatchPool] > 0);
  const PlanArgs plan{*engine.comm, routing_, {}, {}, ids_, block_counts_at_, id_bytes_, 0, stream_};
  const NotifyArgs notify{*engine.comm, routing_, plan_.header, {}, {}, block_counts_at_, ticket_, 0, 0, stream_};
  const bool is_launched = engine.run(
      [&] {
        enter(plan_.sms);
        if (is_fresh()) engine.kernels.plan(plan);
      },
      [&] {
        if (is_fresh()) engine.kernels.notify(notify);
      },
      [&] {
        if (is_sent_) engine.kernels.dispatch_send(send_args());
      });
  return is_launched && (!is_one_kernel || send_and_receive_in_one());
}

// Sends and receives in one kernel. So the output must exist before anything is sent.
bool Dispatch::send_and_receive_in_one() {
  HighThroughput& engine = *engine_;
  bool sends_again = false;
  if (ticket_ != 0 && !wait_totals()) return false;
  if (!reserve_by_totals(&sends_again) || !make_output(output_rows())) return false;
  const DispatchSendArgs send = send_args();
  recv_.num_sms = plan_.sms.sending;
  is_enqueued_ = engine.run([&] {
    engine.order(stream_, caller_);  // another thread may have used the output's memory on it until now
    engine.kernels.dispatch(send, recv_);
  });
  return is_enqueued_ && give_output(output_rows());
}

bool Dispatch::finish() {
  if (is_enqueued_) return join();
  recv_.num_sms = plan_.sms.receiving;
  if (ticket_ != 0) return receive_by_totals();
  const Rows rows = output_rows();
  return make_output(rows) && receive() && give_output(rows);
}

// Receives early if possible, and waits for the totals. If that failed or had too little room, receives then.
bool Dispatch::receive_by_totals() {
  HighThroughput& engine = *engine_;
  Rows room{};
  bool is_early = false, sends_again = false;
  if (is_sent_ && !receive_early(&room, &is_early)) return false;
  if (!wait_totals()) return false;
  const Rows needed = output_rows();
  engine.expected.saw(num_tokens_, topk_, needed);
  if (!reserve_by_totals(&sends_again)) return false;
  if (sends_again) {
    if (!engine.run([&] { engine.kernels.dispatch_send(send_args()); })) return false;
  } else if (is_early && needed.fit(room)) {
    return give_output(needed);
  }
  // A receive that came too early has left its memory alone.
  return make_output(needed) && receive() && give_output(needed);
}

// Receives before the totals are known. It receives nothing if they are known, will never come, or cannot be guessed.
bool Dispatch::receive_early(Rows* room, bool* is_early) {
  HighThroughput& engine = *engine_;
  if (engine.has_totals(ticket_) || !is_quiet(engine.board) || !engine.expected.guess(num_tokens_, topk_, room))
    return true;
  if (!make_output(*room)) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
    PyErr_Clear();  // of memory that is short, which the output may not need
    return true;
  }
  *is_early = true;
  recv_.optimistic = 1;
  const bool is_received = receive();
  recv_.optimistic = 0;
  return is_received;
}

bool Dispatch::receive() {
  HighThroughput& engine = *engine_;
  if (!engine.current_stream(&caller_)) return false;
  const bool is_received = engine.run([&] {
    if (!is_whole_) enter(plan_.sms);
    engine.kernels.dispatch_recv(recv_);
  });
  return is_received && join();
}

bool Dispatch::wait_totals() {
  HighThroughput& engine = *engine_;
  if (!engine.wait_totals(ticket_)) return false;
  const int64_t num_totals = kTotals + engine.local_experts;
  std::copy_n(engine.totals(), num_totals, host_totals_);
  if (!is_for_buffer()) std::copy_n(host_totals_ + kTotals, engine.local_experts, host_counts_at_);
  known_ = host_totals_;
  return true;
}

// Grows every rank's pool if the pool of any rank is too small. Sets whether rows must be sent, or sent again.
bool Dispatch::reserve_by_totals(bool* sends_again) {
  HighThroughput& engine = *engine_;
  if (is_reserved_) return true;
  const int64_t before = engine.comm->pool_bytes[kDispatchPool];
  if (!engine.reserve(kDispatchPool, pool_bytes())) return false;
  is_reserved_ = true;
  *sends_again = !is_sent_ || engine.comm->pool_bytes[kDispatchPool] != before;
  return true;
}

// Makes the output with this room. Its tensors become objects by give_output().
bool Dispatch::make_output(const Rows& room) {
  HighThroughput& engine = *engine_;
  const int64_t K = topk_, N = room.output;
  output_.reset(new Results(engine.new_results()));
  recv_.in_order = output_->are_filled();
  room_ = room;
  Address ids = 0;
  recv_.scales = recv_.weights = 0;
  const auto rows_of = [&](int64_t columns, int32_t dtype, Address* address) {
    return columns == 0 ? output_->empty({N}, dtype, address) : output_->empty({N, columns}, dtype, address);
  };
  const int64_t beside = engine.is_flat() ? 0 : K;
  const bool is_made = rows_of(plan_.columns, plan_.dtype, &recv_.tokens) && rows_of(beside, plan_.id_dtype, &ids) &&
                       (plan_.weight_dtype < 0 || rows_of(beside, plan_.weight_dtype, &recv_.weights)) &&
                       (plan_.scale_columns == 0 || rows_of(plan_.scale_columns, plan_.scale_dtype, &recv_.scales)) &&
                       (!is_fresh() || output_->empty({room.slots, K}, int32_number(), &routing_.recv_rows));
  if (!is_made) return false;
  if (is_fresh()) routing_.slots = room.slots;
  recv_.comm = *engine.comm;
  recv_.stream = stream_;
  recv_.routing = routing_;
  recv_.header = plan_.header;
  recv_.fresh = is_fresh();
  recv_.capacity = N;
  recv_.row_expert_ids = engine.is_flat() ? ids : 0;
  recv_.topk_ids = engine.is_flat() ? 0 : ids;
  recv_.wide_ids = !engine.is_flat() && plan_.id_dtype == int64_number();
  return true;
}

// Makes objects of the output's tensors, cut to these rows.
bool Dispatch::give_output(const Rows& rows) {
  const std::unique_ptr<Results> made = std::move(output_);
  const int64_t beside = engine_->is_flat() ? 0 : topk_;
  std::vector<Object*> owners;
  std::vector<std::pair<int64_t, int64_t>> sizes;
  const auto add = [&](Object& owner, int64_t count, int64_t columns) {
    owners.push_back(&owner);
    sizes.emplace_back(count, columns);
  };
  add(rows_, rows.output, plan_.columns);
  add(row_ids_, rows.output, beside);
  if (plan_.weight_dtype >= 0) add(weights_, rows.output, beside);
  if (plan_.scale_columns > 0) add(scales_, rows.output, plan_.scale_columns);
  if (is_fresh()) add(handle_.recv_rows, rows.slots, topk_);
  if (rows.output == room_.output && rows.slots == room_.slots) return give(*made, owners);
  const std::vector<Object*> cut = owners;
  bool is_made = true;
  for (size_t i = 0; i < cut.size(); ++i) {
    const auto [count, columns] = sizes[i];
    is_made = is_made && (columns == 0 ? made->view(i, {count}, 0) : made->view(i, {count, columns}, 0));
    owners[i] = nullptr;
  }
  owners.insert(owners.end(), cut.begin(), cut.end());
  return is_made && give(*made, owners);
}

Object Dispatch::results() const {
  const Object outputs = tuple_of({or_none(rows_), or_none(scales_), or_none(weights_), or_none(row_ids_),
                                   or_none(counts_), or_none(offsets_), or_none(limits_), or_none(host_counts_)});
  if (has_handle_ || !outputs) return outputs;
  const Object routing = handle_.tuple();
  return routing ? Object(PySequence_Concat(outputs.get(), routing.get())) : Object();
}

Object Dispatch::made() const {
  if (is_for_buffer()) return made_for_buffer();
  const PythonObjects& objects = python_objects();
  const bool is_flat = engine_->is_flat();
  const Object output = named_tuple(
      objects.output_type, {rows_.get(), or_none(scales_), or_none(weights_), is_flat ? Py_None : row_ids_.get(),
                            is_flat ? row_ids_.get() : Py_None, counts_.get(), or_none(host_counts_), offsets_.get(),
                            or_none(overflow_), or_none(required_), Py_None, Py_None});
  const Object handle = has_handle_ ? given_handle_
                                    : named_tuple(objects.handle_type,
                                                  {handle_.topk_ids.get(), handle_.plan.get(), handle_.recv_rows.get(),
                                                   handle_.totals.get(), engine_->number.get()});
  return output && handle ? tuple_of({output.get(), handle.get()}) : Object();
}

// Returns the rows, their ids and weights, the list of counts, and the handle: the results of Buffer.dispatch without
// its event.
Object Dispatch::made_for_buffer() const {
  const Object rows = scales_ ? tuple_of({rows_.get(), scales_.get()}) : rows_;
  if (has_handle_ || !rows) return rows ? tuple_of({rows.get(), Py_None, Py_None, Py_None, Py_None}) : Object();
  const int64_t listed = is_bounded() ? 0 : engine_->local_experts;
  const Object counts(PyList_New(listed));
  for (int64_t i = 0; counts && i < listed; ++i) {
    const int64_t rows = host_totals_[kTotals + i], past = rows % expert_alignment_;
    PyList_SET_ITEM(counts.get(), i, PyLong_FromLongLong(past == 0 ? rows : rows - past + expert_alignment_));
  }
  const Object handle =
      named_tuple(engine_->buffer_handle.get(), {rank_rows_.get(), handle_.plan.get(), handle_.topk_ids.get(),
                                                 handle_.recv_rows.get(), in_rank_.get(), handle_.totals.get()});
  if (!counts || !handle || PyErr_Occurred()) return Object();
  return tuple_of({rows.get(), row_ids_.get(), or_none(weights_), counts.get(), handle.get()});
}

bool DispatchOfBuffer::read(const HighThroughput& engine, PyObject* const* args, Dispatch::Given& given) {
  const auto& [x, handle, per_rank, in_rank, per_expert, ids, weights, alignment, worst, sms] =
      *reinterpret_cast<PyObject* const(*)[num_args]>(args);
  given = {Door::kBuffer, x,       ids,      weights, Py_None,    Py_None,   Py_None,
           nullptr,       nullptr, per_rank, in_rank, per_expert, alignment, sms};
  if (PyTuple_CheckExact(x) && PyTuple_GET_SIZE(x) == 2 && PyTuple_GET_ITEM(x, 1) != Py_None) {
    given.x = PyTuple_GET_ITEM(x, 0);
    given.scales = PyTuple_GET_ITEM(x, 1);
  }
  if (handle != Py_None) {
    given.alignment = Py_None;
    given.ids = (given.routing = given.parts.of(handle)) == nullptr ? Py_None : given.routing[0];
    return ids == Py_None && weights == Py_None && given.ids != Py_None;
  }
  // Without ids, ranks exchange more than rows. The engine with a bound on tokens serves calls with num_worst_tokens.
  if (ids == Py_None || !PyLong_CheckExact(worst) || !PyLong_CheckExact(alignment)) return false;
  if (PyObject_IsTrue(worst) == 1) given.capacity = worst;
  return (given.capacity != Py_None) == (engine.max_tokens >= 0);
}

bool DispatchOfCommunicator::read(const HighThroughput& engine, PyObject* const* args, Dispatch::Given& given) {
  const auto& [x, ids, weights, scales, previous, capacity, quantize] =
      *reinterpret_cast<PyObject* const(*)[num_args]>(args);
  given = {Door::kCommunicator, x, ids, weights, scales, capacity, quantize, nullptr, previous};
  return previous == Py_None || (given.routing = engine.fields_of(previous)) != nullptr;
}

bool DispatchOfOperator::read(const HighThroughput&, PyObject* const* args, Dispatch::Given& given) {
  const auto& [x, ids, weights, scales, capacity, quantize, previous] =
      *reinterpret_cast<PyObject* const(*)[num_args]>(args);
  given = {Door::kOperator, x, ids, weights, scales, capacity, quantize, tensors_in(previous), nullptr};
  return given.routing != nullptr || (PyList_CheckExact(previous) && PyList_GET_SIZE(previous) == 0);
}

}  // namespace ep::control
