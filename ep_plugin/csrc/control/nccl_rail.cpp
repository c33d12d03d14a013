#include "control/nccl_rail.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "common/views.h"

namespace ep::control {

namespace {
constexpr int kBytes = 1;  // ncclUint8

void* pointer(uint64_t address) { return at<void>(address); }
}  // namespace

RailCalls& rail_calls() {
  static RailCalls calls;
  return calls;
}

NcclRail::NcclRail(NcclFunctions nccl, Address comm, uint64_t stream, int device, Address word, RailCalls calls)
    : nccl_(nccl), comm_(pointer(comm)), stream_(stream), device_(device), word_(word), calls_(std::move(calls)) {}

NcclRail::~NcclRail() {
  for (const uint64_t mark : marks_) calls_.drop_mark(mark);
}

uint64_t NcclRail::start(uint64_t after, uint64_t number, const std::vector<Message>& messages) {
  return run(after, number, [&] {
    for (const Message& one : messages) {
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
  calls_.order_streams(stream_, after, device_);
  if (number != 0) calls_.write(word_, number, stream_);
  check(nccl_.group_start());
  const int begun = calls();
  // A group that stays open would swallow this thread's later calls, also the user's.
  const int ended = nccl_.group_end();
  check(begun);
  check(ended);
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

void NcclRail::check(int error) const {
  if (error != 0) throw std::runtime_error(std::string("NCCL: ") + nccl_.error_string(error));
}

}  // namespace ep::control
