#include <algorithm>

#include "control/high_throughput_operation.h"

namespace ep::control {

namespace {

PyObject* combine_name() {
  static PyObject* const name = interned("combine");
  return name;
}

}  // namespace

Combine::Combine(std::shared_ptr<HighThroughput> engine, const Given& given)
    : HighThroughputOperation(std::move(engine), combine_name(), given.door) {
  Inputs inputs;
  DLTensor y, weights, bias, extra;
  if (!read_handle(inputs, given.routing)) return;
  // Without a capacity the number of rows differs from call to call.
  const RowsInForm rows = has_bounded_handle() ? kFixedRows : kFreeRows;
  if (!read(inputs, {{given.y, &y}, {given.weights, &weights}, {given.extra, &extra}}, rows) ||
      !read(inputs, {{given.bias, &bias}}) || y.num_dims != 2)
    return;
  form_ = inputs.form();
  nbytes_ = bytes_of(y);
  settings_ = {Object::borrowed(given.is_per_row ? Py_True : Py_False)};
  if (door_ == Door::kBuffer) settings_.push_back(Object::borrowed(given.sms));
  rows_ = y.shape[0];
  for (const DLTensor* beside : {&weights, &extra})
    if (beside->num_dims > 0 && beside->shape[0] != rows_) return;
  send_.y = address_of(y);
  send_.rows = rows_;
  send_.weights = address_of(weights);
  send_.extra = address_of(extra);
  send_.hidden = recv_.hidden = y.shape[1];
  recv_.bias = address_of(bias);
  has_extra_ = extra.num_dims > 0;
  is_readable_ = true;
  const CombinePlan* plan = find(engine_->combines);
  if (plan != nullptr) use(*plan);
}

void Combine::learn(const CombinePlan& plan) {
  if (!is_readable_) return;
  remember(engine_->combines, plan);
  use(plan);
}

void Combine::learn_from(const Combine& same) {
  if (same.is_known_ && (!has_extra_ || same.plan_.extra_dtype == float32_number())) learn(same.plan_);
}

void Combine::use(const CombinePlan& plan) {
  plan_ = plan;
  const int64_t needed = rows_of_handle();
  is_known_ = has_sound_handle() && rows_ >= needed && (!has_bounded_handle() || rows_ == needed);
}

int64_t Combine::pool_bytes() const {
  const HighThroughput& engine = *engine_;
  const int64_t partial = partial_layout_of(plan_.header).bytes;
  if (engine.max_tokens >= 0) return engine.max_tokens * std::min<int64_t>(engine.size, routing_.topk) * partial;
  return engine.room_for(kCombinePool, totals_[kTotalMaxSent] * partial);
}

bool Combine::start() {
  HighThroughput& engine = *engine_;
  const bool is_one_kernel = plan_.sms.receiving == 0;
  if (!choose_stream() || !engine.reserve(kCombinePool, pool_bytes())) return false;
  if (is_one_kernel && !make_sums()) return false;
  send_.comm = recv_.comm = *engine.comm;
  send_.routing = recv_.routing = routing_;
  send_.header = recv_.header = plan_.header;
  send_.element = recv_.element = plan_.element;
  send_.per_row = plan_.per_row;
  send_.num_sms = plan_.sms.sending;
  recv_.num_sms = is_one_kernel ? plan_.sms.sending : plan_.sms.receiving;
  recv_.wide_bias = plan_.wide_bias;
  send_.stream = recv_.stream = stream_;
  is_enqueued_ = is_one_kernel;
  return engine.run([&] {
    enter(plan_.sms);
    if (is_one_kernel)
      engine.kernels.combine(send_, recv_);
    else
      engine.kernels.combine_send(send_);
  });
}

bool Combine::finish() {
  HighThroughput& engine = *engine_;
  if (is_enqueued_) return join();
  if (!make_sums() || !engine.current_stream(&caller_)) return false;
  const bool is_received = engine.run([&] {
    if (!is_whole_) enter(plan_.sms);
    engine.kernels.combine_recv(recv_);
  });
  return is_received && join();
}

bool Combine::make_sums() {
  HighThroughput& engine = *engine_;
  Results made = engine.new_results();
  recv_.in_order = made.are_filled();
  std::vector<Object*> owners{&out_};
  const int64_t T = routing_.num_tokens;
  bool is_made = made.empty({T, send_.hidden}, plan_.dtype, &recv_.out);
  if (has_extra_) {
    owners.push_back(&extra_out_);
    is_made = is_made && made.empty({T, routing_.topk}, plan_.extra_dtype, &recv_.extra);
  }
  return is_made && give(made, owners);
}

bool CombineOfCommunicator::read(const HighThroughput& engine, PyObject* const* args, Combine::Given& given) {
  const auto& [y, handle, weights, bias] = *reinterpret_cast<PyObject* const(*)[num_args]>(args);
  given = {Door::kCommunicator, y, weights, bias, Py_None, false, engine.fields_of(handle)};
  return given.routing != nullptr;
}

bool CombineOfBuffer::read(const HighThroughput&, PyObject* const* args, Combine::Given& given) {
  const auto& [x, handle, weights, bias, sms] = *reinterpret_cast<PyObject* const(*)[num_args]>(args);
  given = {Door::kBuffer, x, Py_None, bias, weights, true, nullptr, sms};
  return (given.routing = given.parts.of(handle)) != nullptr;
}

bool CombineOfOperator::read(const HighThroughput&, PyObject* const* args, Combine::Given& given) {
  const auto& [y, weights, bias, extra, is_per_row, routing] = *reinterpret_cast<PyObject* const(*)[num_args]>(args);
  given = {Door::kOperator, y, weights, bias, extra, is_per_row == Py_True, tensors_in(routing)};
  return given.routing != nullptr;
}

}  // namespace ep::control
