// The engine of high-throughput dispatch and combine among the ranks of one node.
//
// Shapes: R ranks, T tokens of this rank, K experts per token, E_l local experts, N output rows, S received slots.
#pragma once
#include <array>
#include <functional>
#include <memory>

#include "common/views.h"
#include "control/operation.h"

namespace ep::control {

// The kernels of dispatch and combine. Tests put functions of Python in their place.
struct HighThroughputKernels {
  std::function<void(const PlanArgs&)> plan;
  std::function<void(const NotifyArgs&)> notify;
  std::function<void(const DispatchSendArgs&)> dispatch_send;
  std::function<void(const DispatchRecvArgs&)> dispatch_recv;
  std::function<void(const DispatchSendArgs&, const DispatchRecvArgs&)> dispatch;
  std::function<void(const CombineSendArgs&)> combine_send;
  std::function<void(const CombineRecvArgs&)> combine_recv;
  std::function<void(const CombineSendArgs&, const CombineRecvArgs&)> combine;
  // Of several nodes.
  std::function<void(const LayoutArgs&)> layout;
  std::function<void(const PlaceArgs&)> place;
  std::function<void(const PlanArgs&)> positions;
};

// The streams of operations.
struct OperationStreams {
  uint64_t own = 0;  // of operations in flight; others run on the caller's
  // These are as order_streams() and StreamOrder::enter(). Empty: nothing needs ordering.
  std::function<void(uint64_t later, uint64_t earlier)> order;
  std::function<void(uint64_t stream, int sms, int needed)> enter;
};

// The SMs of an operation's two kernels. receiving = 0: one kernel sends and receives.
struct Sms {
  int32_t sending, receiving;
};

// Numbers of a dispatch's output rows and of its received slots: how many there are, or how many have room.
struct Rows {
  int64_t output, slots;
  bool fit(const Rows& room) const { return output <= room.output && slots <= room.slots; }
};

// Guesses how many rows a dispatch brings, from the latest dispatches that made a routing from ids [T, K] of one shape.
// An output that is made before its size is known takes memory that it may not need.
class Expected {
 public:
  void saw(int64_t num_tokens, int64_t topk, const Rows& rows);
  // Sets room that is probably enough for the next dispatch, and little more. Returns false if no guess is possible.
  bool guess(int64_t num_tokens, int64_t topk, Rows* room) const;

 private:
  static constexpr int kRemembered = 16;
  std::array<Rows, kRemembered> seen_{};
  int64_t count_ = 0, num_tokens_ = -1, topk_ = -1;
};

// Facts that all dispatches of one key share.
struct DispatchPlan {
  Header header;
  Sms sms;
  int64_t columns, scale_columns;                      // of an output row; scale_columns 0: rows have no scales
  int32_t dtype, scale_dtype, weight_dtype, id_dtype;  // as PyTorch numbers them; weight_dtype -1: no weights travel
  int32_t quantize, element;                           // as in DispatchSendArgs
  int64_t capacity;                                    // rows of the output; -1: the host waits for the totals
};
// Facts that all combines of one key share.
struct CombinePlan {
  Header header;
  Sms sms;
  int32_t dtype, extra_dtype, element, per_row, wide_bias;
};

class HighThroughput : public Engine, public std::enable_shared_from_this<HighThroughput> {
 public:
  using Engine::Engine;

  // Facts that hold as long as the communicator.
  int32_t layout = kFlat, alignment = 1, size = 1, num_experts = 1, local_experts = 1;
  int64_t max_tokens = -1;  // of a rank; -1: the configuration has no bound
  int64_t totals_ns = 0;    // the longest wait for totals. The kernel's own deadline passes first, and says more
  Comm* comm = nullptr;     // of the object below
  Object comm_object;

  HighThroughputKernels kernels;
  OperationStreams streams;
  Plans<DispatchPlan> dispatches;
  Plans<CombinePlan> combines;
  Expected expected;
  Object buffer_handle;        // deep_ep.Handle, once a Buffer has asked for its functions
  bool is_busy = false;        // an operation is in flight
  bool denies_totals = false;  // tests: the host has always come before the totals
  uint64_t reserved = 0;       // operations for which a pool was large enough or has been grown

  // Whether whole operations may run in C now. Python runs those that are recorded, and completes those in flight.
  bool may_run() const { return !is_busy && !is_recording(); }
  bool is_flat() const { return layout == kFlat; }
  void order(uint64_t later, uint64_t earlier) const {
    if (streams.order && later != earlier) streams.order(later, earlier);
  }
  // Orders `stream` after the operation before, and so that notify and the kernels that send and receive fit beside
  // other kernels that wait. CTAs of two kernels need not run at the same time.
  void enter(uint64_t stream, const Sms& sms) const {
    const int most = 1 + sms.sending + sms.receiving;
    if (streams.enter) streams.enter(stream, most, sms.receiving > 0 ? 1 : most);
  }
  // Returns `needed` if the pool has as many bytes, else a quarter more, so that slow growth replaces pools rarely.
  int64_t room_for(int pool, int64_t needed) const;
  // Makes every rank's pool at least this large, collectively. Returns false with Python's error set.
  bool reserve(int pool, int64_t nbytes);
  uint64_t next_ticket() { return ++tickets_; }
  bool has_totals(uint64_t ticket) const;
  // Waits for the totals of a notify. Returns false with Python's error set.
  bool wait_totals(uint64_t ticket) const;
  // The totals, then the rows of each local expert.
  const int64_t* totals() const { return at<int64_t>(board, sizeof(Board)); }

  // Orders the caller's stream after the latest operation. Returns false with Python's error set.
  bool join() const;

  // Runs kernels in turn, without the interpreter's lock. After an error, such as that of a signal's handler while a
  // kernel of a CPU waits, the next ones do not run. Returns false with Python's error set.
  template <class... Kernels>
  bool run(const Kernels&... given) const {
    if (is_on_gpu()) return run_unlocked([&] { (given(), ...); });
    return (run_unlocked(given) && ...);
  }

 private:
  uint64_t tickets_ = 0;
};

}  // namespace ep::control
