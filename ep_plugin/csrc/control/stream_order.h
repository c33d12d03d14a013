// The order of kernels that wait for peers, on one device, and the SMs that they may occupy at the same time.
//
// A kernel that waits for peers keeps its SMs until they run theirs. So if one fills the device of this rank, and
// another fills that of a peer, each keeps out the kernel that the other one waits for. A stream is therefore ordered
// before such a kernel is enqueued: after the streams whose kernels do not fit beside it. The streams that were used
// last are the first to stay beside it. All ranks call their operations in one order, and an operation only waits for
// earlier ones. So no two ranks wait for each other.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ep::control {

// What the host path calls of a build with CUDA; empty in others. bindings/device.cpp sets them.
struct CudaCalls {
  std::function<uint64_t(uint64_t stream, int device)> stream_capture;  // 0: no capture
  std::function<void(uint64_t later, uint64_t earlier, int device)> order_streams;
  std::function<void(uint64_t to, uint64_t from, int64_t bytes, uint64_t stream)> copy{};  // on the current device
};
CudaCalls& cuda_calls();

class StreamOrder;

// The SMs of one device, which all communicators of the process share.
class SmBudget {
 public:
  // cuda: cuda_calls(), or others for tests.
  SmBudget(int device, int sms, CudaCalls cuda) : device_(device), sms_(sms), cuda_(std::move(cuda)) {}
  // Leaves `sms` SMs to kernels of others, from now on. Calls do not add up.
  void reserve(int sms);
  int usable() const;
  const CudaCalls& cuda() const { return cuda_; }

 private:
  friend class StreamOrder;

  const int device_, sms_;
  const CudaCalls cuda_;
  mutable std::mutex mutex_;  // guards all that follows, and all orders
  int reserved_ = 0;
  uint64_t clock_ = 0;
  std::vector<StreamOrder*> orders_;
};

// One kernel at a time: each is ordered after the one before it, in the order of the calls, even on different streams.
class StreamOrder {
 public:
  // of_messages: kernels of messages do not wait for each other, since ranks call them in any order.
  explicit StreamOrder(std::shared_ptr<SmBudget> budget, bool of_messages = false);
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Returns `current`, ordered for a kernel of `sms` SMs. It comes after the stream of the kernel before, and after
  // other streams, so that `needed` SMs are left for it. sms: 0 for work that occupies no SM while it waits. needed:
  // `sms`, or 1 if its CTAs need not run at the same time, so that one SM is enough for it to end. Only streams of one
  // capture of a CUDA graph are ordered, or of none. CUDA may wait for its queue, so call it without the interpreter's
  // lock.
  uint64_t enter(uint64_t current, int sms, int needed);
  uint64_t enter(uint64_t current, int sms) { return enter(current, sms, sms); }
  int usable() const { return budget_->usable(); }

 private:
  void make_room(uint64_t current, int needed) const;
  bool may_order(uint64_t current) const;

  const std::shared_ptr<SmBudget> budget_;
  const bool of_messages_;
  uint64_t last_ = 0;  // the stream of the latest kernel
  bool has_last_ = false;
  int most_ = 0;            // the most SMs of a kernel
  uint64_t last_used_ = 0;  // by the budget's clock
};

}  // namespace ep::control
