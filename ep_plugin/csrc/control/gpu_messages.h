// Send and receive on GPUs. A kernel serves each end of a message, on a stream for each lane and direction, so no
// message waits for one of another lane. The host waits only in a wait with a limit and in wait_for_sends().
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "common/message_queue.h"
#include "control/stream_order.h"

namespace ep::control {

// What messages call of a build with CUDA; empty in others. bindings/device.cpp sets them. A mark is the work that a
// stream has at one time.
struct MessageCalls {
  std::function<void()> load;  // both kernels
  std::function<void(const DeviceMessageArgs&)> send, receive;
  std::function<uint64_t(int device)> make_stream;
  std::function<void(uint64_t stream)> drop_stream;
  std::function<uint64_t(uint64_t stream, int device)> mark;
  std::function<void(uint64_t mark)> drop_mark;
  std::function<bool(uint64_t mark)> is_over;
  std::function<void(uint64_t stream, uint64_t mark)> order_after;
  std::function<void(uint64_t mark)> wait_on_host;
  std::function<void(Address to, int byte, int64_t count, uint64_t stream)> fill;
  // Of rails.
  std::function<void(uint64_t later, uint64_t earlier, int device)> order_streams;
  std::function<void(Address word, uint64_t value, uint64_t stream)> write;
};
MessageCalls& message_calls();

class GpuMessages : public MessageQueue {
 public:
  // comm: it outlives this object. board: as the host maps it. calls: message_calls(), or others for tests.
  GpuMessages(const Comm& comm, Address board, std::shared_ptr<SmBudget> budget, int device, MessageCalls calls);
  ~GpuMessages() override;

  uint64_t post(const Message& message, uint64_t stream) override;
  bool is_over(uint64_t ticket) override;
  bool is_done(uint64_t ticket) override;
  WaitResult wait(const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t, uint64_t stream) override;
  void wait_for_sends(int64_t) override;
  void forget(const std::vector<uint64_t>& tickets) override;
  void close() override;

 private:
  struct Lane;
  struct Posted;
  using Found = std::shared_ptr<Posted>;

  Lane& lane_of(const Message& message);
  Found find(uint64_t ticket);
  WaitResult wait_for(const std::vector<Found>& all, int64_t limit_ns, uint64_t stream);
  void set_fault(bool is_set);
  static void drop_over(std::vector<Found>& messages);

  const Comm& comm_;
  const Address board_;
  const std::shared_ptr<SmBudget> budget_;
  const int device_;
  const std::shared_ptr<const MessageCalls> calls_;
  uint64_t aside_;  // a stream that waits for no message
  // Callers of post(), wait_for_sends() and close() take turns.
  std::map<std::tuple<int, int, int>, std::unique_ptr<Lane>> lanes_;  // by peer, channel and direction
  std::vector<Found> receives_;                                       // that may be open
  size_t sweep_at_ = kKept;
  std::mutex mutex_;  // guards what follows. Nothing is called with it that may wait for the device or an interpreter
  std::map<uint64_t, Found> posted_;  // by ticket
  uint64_t tickets_ = 0;
  int waiters_ = 0;
  std::condition_variable ended_;  // the waits
  std::atomic<bool> is_closed_{false};

  static constexpr size_t kKept = 16;  // with fewer receives, nobody looks for those that are over
};

}  // namespace ep::control
