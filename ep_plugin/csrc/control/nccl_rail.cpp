#include "control/nccl_rail.h"

#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/views.h"

namespace ep::control {

namespace {
constexpr int kBytes = 1;  // ncclUint8

void* pointer(uint64_t address) { return at<void>(address); }

// A group of NCCL's calls, until the object is gone. One that stays open would swallow the thread's later calls, also
// the user's.
class Group {
 public:
  explicit Group(const NcclFunctions& nccl) : nccl_(nccl) {}
  ~Group() {
    if (is_open_) nccl_.group_end();
  }
  int end() {
    is_open_ = false;
    return nccl_.group_end();
  }

 private:
  const NcclFunctions& nccl_;
  bool is_open_ = true;
};

// Counts a thread while the object lives.
class Starting {
 public:
  explicit Starting(std::atomic<int>& count) : count_(count) { ++count_; }
  ~Starting() { --count_; }

 private:
  std::atomic<int>& count_;
};
}  // namespace

NcclRail::NcclRail(NcclFunctions nccl, Address comm, uint64_t stream, int device, Address word, MessageCalls calls)
    : nccl_(nccl), comm_(pointer(comm)), stream_(stream), device_(device), word_(word), calls_(std::move(calls)) {}

NcclRail::~NcclRail() {
  for (const uint64_t mark : marks_) calls_.drop_mark(mark);
}

uint64_t NcclRail::start(uint64_t after, uint64_t number, const std::vector<Message>& messages) {
  return run(after, number, [&] {
    for (const Message& one : messages) {
      check_not_ended();
      void* const address = pointer(one.address);
      const size_t bytes = static_cast<size_t>(one.bytes);
      const int error = one.is_sent ? nccl_.send(address, bytes, kBytes, one.node, comm_, pointer(stream_))
                                    : nccl_.receive(address, bytes, kBytes, one.node, comm_, pointer(stream_));
      if (error != 0) return error;
    }
    return 0;
  });
}

uint64_t NcclRail::gather(uint64_t after, uint64_t number, Address from, Address to, int64_t bytes) {
  return run(after, number, [&] {
    return nccl_.all_gather(pointer(from), pointer(to), static_cast<size_t>(bytes), kBytes, comm_, pointer(stream_));
  });
}

template <class Calls>
uint64_t NcclRail::run(uint64_t after, uint64_t number, const Calls& calls) {
  const Starting starting(starting_);
  check_not_ended();
  calls_.order_streams(stream_, after, device_);
  if (number != 0) calls_.write(word_, number, stream_);
  check(nccl_.group_start());
  Group group(nccl_);
  check(calls());
  check(group.end());
  if (number != 0) calls_.write(word_, 0, stream_);
  const uint64_t mark = calls_.mark(stream_, device_);
  const std::lock_guard<std::mutex> lock(mutex_);
  marks_.push_back(mark);
  if (marks_.size() > kMarks) {
    calls_.drop_mark(marks_.front());
    marks_.pop_front();
  }
  return ++tickets_;
}

void NcclRail::wait(uint64_t ticket, uint64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t newer = tickets_ - ticket;
  if (ticket == 0 || ticket > tickets_) throw std::invalid_argument("ticket: expected one that start() has returned");
  calls_.order_after(stream, newer < marks_.size() ? marks_[marks_.size() - 1 - newer] : marks_.front());
}

void NcclRail::end(double seconds) {
  is_ended_ = true;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (starting_ > 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

void NcclRail::check_not_ended() const {
  if (is_ended_) throw std::runtime_error("the rail has ended, by a failure of a communicator that shares it");
}

void NcclRail::check(int error) const {
  if (error != 0) throw std::runtime_error(std::string("NCCL: ") + nccl_.error_string(error));
}

}  // namespace ep::control
