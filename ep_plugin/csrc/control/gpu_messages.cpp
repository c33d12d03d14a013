#include "control/gpu_messages.h"

#include <algorithm>

namespace ep::control {

MessageCalls& message_calls() {
  static MessageCalls calls{};
  return calls;
}

// The stream of a lane in one direction, and the last message that it sends.
struct GpuMessages::Lane {
  uint64_t stream;
  StreamOrder order;
  Found last_send;
};

struct GpuMessages::Posted {
  Posted(std::shared_ptr<const MessageCalls> calls, uint64_t mark, bool is_captured)
      : calls(std::move(calls)), mark(mark), is_captured(is_captured) {}
  ~Posted() { calls->drop_mark(mark); }
  Posted(const Posted&) = delete;
  Posted& operator=(const Posted&) = delete;

  // A message in a CUDA graph counts as over, since it cannot be queried.
  bool is_over() const { return is_captured || calls->is_over(mark); }

  const std::shared_ptr<const MessageCalls> calls;
  const uint64_t mark;  // of its kernel
  const bool is_captured;
  std::atomic<bool> is_joined{false};  // a stream of the caller's waits for it
  std::atomic<bool> has_failed{false};
  std::atomic<bool> is_done{false};  // it has arrived. A later failure does not change that
};

GpuMessages::GpuMessages(const Comm& comm, Address board, std::shared_ptr<SmBudget> budget, int device,
                         MessageCalls calls)
    : comm_(comm),
      board_(board),
      budget_(std::move(budget)),
      device_(device),
      calls_(std::make_shared<MessageCalls>(std::move(calls))) {
  calls_->load();
  aside_ = calls_->make_stream(device_);
  set_fault(false);  // loads what it needs: the driver may wait for kernels that spin before it loads anything
}

GpuMessages::~GpuMessages() = default;

// Kernels that see a fault give up.
void GpuMessages::set_fault(bool is_set) {
  calls_->fill(comm_.state + offsetof(State, fault), is_set ? 0xFF : 0, sizeof(State::fault), aside_);
}

GpuMessages::Lane& GpuMessages::lane_of(const Message& message) {
  std::unique_ptr<Lane>& lane = lanes_[{message.peer, message.channel, message.receives}];
  if (lane == nullptr) lane.reset(new Lane{calls_->make_stream(device_), StreamOrder(budget_, true), nullptr});
  return *lane;
}

uint64_t GpuMessages::post(const Message& message, uint64_t stream) {
  Lane& lane = lane_of(message);
  const CudaCalls& cuda = budget_->cuda();
  cuda.order_streams(lane.stream, stream, device_);
  lane.order.enter(lane.stream, message_sms(message.bytes));
  (message.receives != 0 ? calls_->receive : calls_->send)(DeviceMessageArgs{comm_, message, lane.stream});
  const bool is_captured = cuda.stream_capture(stream, device_) != 0;
  const auto posted = std::make_shared<Posted>(calls_, calls_->mark(lane.stream, device_), is_captured);
  if (message.receives == 0) {
    lane.last_send = posted;
  } else {
    if (receives_.size() >= sweep_at_ && !is_captured) {  // a capture must not ask for marks
      drop_over(receives_);
      sweep_at_ = std::max(kKept, 2 * receives_.size());
    }
    receives_.push_back(posted);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  posted_[++tickets_] = posted;
  return tickets_;
}

void GpuMessages::drop_over(std::vector<Found>& messages) {
  const auto is_over = [](const Found& one) { return one->is_over(); };
  messages.erase(std::remove_if(messages.begin(), messages.end(), is_over), messages.end());
}

GpuMessages::Found GpuMessages::find(uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return posted_.at(ticket);
}

bool GpuMessages::is_over(uint64_t ticket) { return find(ticket)->is_over(); }

bool GpuMessages::is_done(uint64_t ticket) {
  const Found posted = find(ticket);
  if (posted->is_done) return true;
  if (!posted->is_over() || posted->has_failed) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return posted->is_done = is_closed_ || is_quiet(board_);
}

WaitResult GpuMessages::wait(const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t, uint64_t stream) {
  std::vector<Found> all;
  for (const uint64_t ticket : tickets) all.push_back(find(ticket));
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiters_;  // close() leaves the board until this ends
  lock.unlock();
  const WaitResult result = wait_for(all, limit_ns, stream);
  lock.lock();
  if (--waiters_ == 0) ended_.notify_all();
  return result;
}

WaitResult GpuMessages::wait_for(const std::vector<Found>& all, int64_t limit_ns, uint64_t stream) {
  if (limit_ns > 0) {
    const auto are_over = [&] {
      return is_closed_ || std::all_of(all.begin(), all.end(), [](const Found& one) { return one->is_over(); });
    };
    const WaitResult result = wait_until(are_over, board_, limit_ns);
    if (result == kOverdue || result == kInterrupted) return result;
  }
  bool has_failed = !is_closed_ && !is_quiet(board_);
  for (const Found& one : all) {
    calls_->order_after(stream, one->mark);
    one->is_joined = true;
    has_failed |= one->has_failed;
  }
  return has_failed ? kFaulted : kReady;
}

void GpuMessages::wait_for_sends(int64_t) {
  std::vector<Found> awaited;
  for (const auto& [key, lane] : lanes_)
    if (lane->last_send != nullptr) awaited.push_back(lane->last_send);
  std::copy_if(receives_.begin(), receives_.end(), std::back_inserter(awaited),
               [](const Found& one) { return one->is_joined.load(); });
  for (const Found& one : awaited)
    if (!one->is_captured) calls_->wait_on_host(one->mark);
  drop_over(receives_);
  for (const Found& one : receives_) one->has_failed = true;
  if (!receives_.empty()) set_fault(true);
}

void GpuMessages::forget(const std::vector<uint64_t>& tickets) {
  std::vector<Found> freed;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const uint64_t ticket : tickets) {
    freed.push_back(std::move(posted_[ticket]));
    posted_.erase(ticket);
  }
}

void GpuMessages::close() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_closed_.exchange(true)) return;
    ended_.wait(lock, [this] { return waiters_ == 0; });
  }
  receives_.clear();
  for (const auto& [key, lane] : lanes_) calls_->drop_stream(lane->stream);
  lanes_.clear();
  calls_->drop_stream(aside_);
}

}  // namespace ep::control
