#include "control/stream_order.h"

#include <algorithm>

namespace ep::control {

CudaCalls& cuda_calls() {
  static CudaCalls calls{};
  return calls;
}

void SmBudget::reserve(int sms) {
  const std::lock_guard<std::mutex> guard(mutex_);
  reserved_ = std::max(reserved_, sms);
}

int SmBudget::usable() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return std::max(1, sms_ - reserved_);
}

StreamOrder::StreamOrder(std::shared_ptr<SmBudget> budget, bool of_messages)
    : budget_(std::move(budget)), of_messages_(of_messages) {
  const std::lock_guard<std::mutex> guard(budget_->mutex_);
  budget_->orders_.push_back(this);
}

StreamOrder::~StreamOrder() {
  const std::lock_guard<std::mutex> guard(budget_->mutex_);
  std::vector<StreamOrder*>& orders = budget_->orders_;
  orders.erase(std::find(orders.begin(), orders.end(), this));
}

uint64_t StreamOrder::enter(uint64_t current, int sms, int needed) {
  const std::lock_guard<std::mutex> guard(budget_->mutex_);
  if (has_last_ && last_ != current && may_order(current))
    budget_->cuda_.order_streams(current, last_, budget_->device_);
  if (sms > 0) make_room(current, needed);
  last_ = current;
  has_last_ = true;
  most_ = std::max(most_, sms);
  last_used_ = ++budget_->clock_;
  return current;
}

// Whether `current` can be ordered after this order's stream.
bool StreamOrder::may_order(uint64_t current) const {
  const CudaCalls& cuda = budget_->cuda_;
  return cuda.stream_capture(current, budget_->device_) == cuda.stream_capture(last_, budget_->device_);
}

void StreamOrder::make_room(uint64_t current, int needed) const {
  // Kernels on the current stream are over when this one starts. A message leaves room for one more CTA.
  const bool skips_messages = of_messages_ || needed == 1;
  const auto is_beside = [&](const StreamOrder* other) {
    return other != this && other->most_ > 0 && other->last_ != current && !(skips_messages && other->of_messages_);
  };
  std::vector<const StreamOrder*> beside;
  std::copy_if(budget_->orders_.begin(), budget_->orders_.end(), std::back_inserter(beside), is_beside);
  std::sort(beside.begin(), beside.end(),
            [](const auto* one, const auto* other) { return one->last_used_ > other->last_used_; });
  int left = std::max(1, budget_->sms_ - budget_->reserved_) - needed;
  for (const StreamOrder* other : beside) {
    if (other->most_ <= left)
      left -= other->most_;
    else if (other->may_order(current))
      budget_->cuda_.order_streams(current, other->last_, budget_->device_);
  }
}

}  // namespace ep::control
