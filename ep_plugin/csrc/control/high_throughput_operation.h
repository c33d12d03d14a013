// One high-throughput dispatch or combine: start enqueues its sending kernels, finish its receiving kernels.
//
// A dispatch that makes its routing runs plan, notify and send. While rows are sent, the host reads the totals,
// allocates the output, and enqueues receive behind send, which lets it start. Rows that have arrived would wait for
// the host meanwhile. So if earlier dispatches of that shape all brought about the same number of rows, receive is
// enqueued early: before the totals are known, into an output with room for a little more. A dispatch over known
// routing and one with a capacity wait for no totals. The same path serves CPU and CUDA.
//
// A whole operation runs on the caller's stream. One that Python starts and finishes apart runs on the communicator's
// own stream, so that other work may run beside it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "control/high_throughput.h"

namespace ep::control {

// A handle: tensors [T, K], [words], [S, K] and the totals in host memory. A Buffer's handle has the communicator's
// number before the totals.
struct HandleFields {
  Object topk_ids, plan, recv_rows, totals;
  Object tuple() const { return tuple_of({or_none(topk_ids), or_none(plan), or_none(recv_rows), or_none(totals)}); }
};

class HighThroughputOperation : public Operation {
 public:
  HighThroughputOperation(std::shared_ptr<HighThroughput> engine, PyObject* name, Door door)
      : Operation(name, door), engine_(std::move(engine)) {}

  // Whether Python has checked a call like this one. Only then may it start.
  bool is_known() const { return is_known_; }
  // Each returns false with Python's error set.
  virtual bool start() = 0;
  virtual bool finish() = 0;
  bool whole();
  int64_t nbytes() const { return nbytes_; }

  bool shares_memory = true;  // small results may be views of one block
  Object recorder;  // Python's, for statistics: called once with a handle's plan and ids, when kernels may read these

 protected:
  // Reads a handle's tensors. Returns false if they are none of a handle.
  bool read_handle(Inputs& inputs, PyObject* const* fields);
  // Whether the received slots are as many as the handle's totals say. A Buffer's handle must also have this
  // communicator's number.
  bool has_sound_handle() const;
  bool has_bounded_handle() const { return num_totals_ == 1; }  // its totals are the capacity alone
  int64_t rows_of_handle() const;                               // rows of its dispatch's output
  Routing routing_of(Address topk_ids, Address plan, int64_t num_tokens, int64_t topk) const;
  // Chooses the operation's stream. Returns false with Python's error set.
  bool choose_stream();
  // Orders the operation's stream after what the caller has enqueued, which may use the memory that torch has just
  // made, and for the operation's kernels.
  void enter(const Sms& sms) const;
  // Joins the caller's stream, and adds the operation to the statistics there. Returns false with Python's error set.
  bool join();
  // Finds what Python has learned of a call like this one; null: nothing.
  template <class Plan>
  const Plan* find(const Plans<Plan>& plans) const {
    return plans.find(std::string(form_), key_door(), settings());
  }
  // Makes calls like this one known.
  template <class Plan>
  void remember(Plans<Plan>& plans, const Plan& plan) const {
    plans.remember(form_, key_door(), settings(), plan);
  }

  const std::shared_ptr<HighThroughput> engine_;
  bool is_readable_ = false, is_known_ = false, is_whole_ = false;
  uint64_t stream_ = 0, caller_ = 0;
  std::string form_;
  std::vector<Object> settings_;
  HandleFields handle_;
  Routing routing_{};
  const int64_t* totals_ = nullptr;  // of the given handle
  int64_t num_totals_ = 0;

 private:
  Settings settings() const;
  Door key_door() const { return door_ == Door::kBuffer ? Door::kBuffer : Door::kCommunicator; }
};

// The tensors of a Buffer's handle, in the order of DispatchHandle.
struct BufferHandle {
  Object parts;  // another thread may empty a list
  PyObject* fields[4];
  // Returns the fields; null if these are not the parts of a handle.
  PyObject* const* of(PyObject* handle);
};

class Dispatch : public HighThroughputOperation {
 public:
  struct Given {
    Door door;
    PyObject *x, *ids, *weights, *scales, *capacity, *quantize;
    PyObject* const* routing;  // the tensors of an earlier handle, or null
    PyObject* handle;          // that handle, if made() returns it
    // Of a Buffer: num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, expert_alignment and the SMs.
    PyObject *per_rank = nullptr, *in_rank = nullptr, *per_expert = nullptr, *alignment = nullptr, *sms = nullptr;
    BufferHandle parts{};
  };
  Dispatch(std::shared_ptr<HighThroughput> engine, const Given& given);
  // Makes calls like this one known.
  void learn(const DispatchPlan& plan);
  // Makes calls like this one of a Buffer known, for which the communicator has run `same`. Calls whose results differ
  // stay unknown.
  void learn_from(const Dispatch& same);

  bool start() override;
  bool finish() override;
  Object results() const override;
  Object made() const override;

 private:
  void use(const DispatchPlan& plan);
  bool has_bad_ids(const DLTensor& in_rank) const;
  Object made_for_buffer() const;
  bool is_fresh() const { return !has_handle_; }
  bool is_for_buffer() const { return door_ == Door::kBuffer; }
  bool is_bounded() const { return plan_.capacity >= 0; }
  bool make_small_results();
  bool make_host_results();
  bool make_output(const Rows& room);
  bool give_output(const Rows& rows);
  DispatchSendArgs send_args() const;
  bool send_and_receive_in_one();
  bool receive();
  bool receive_by_totals();
  bool receive_early(Rows* room, bool* is_early);
  bool wait_totals();
  bool reserve_by_totals(bool* sends_again);
  int64_t pool_bytes() const;  // -1: the totals are not known yet
  Rows output_rows() const;

  const bool has_handle_;
  const Object given_handle_;
  int64_t expert_alignment_ = 1;  // of a Buffer's list of counts
  int64_t num_tokens_ = 0, topk_ = 0, given_capacity_ = -1;
  Address ids_ = 0;
  int32_t id_bytes_ = 4;
  DispatchPlan plan_{};
  DispatchSendArgs send_{};
  DispatchRecvArgs recv_{};
  Address block_counts_at_ = 0;
  int64_t *host_totals_ = nullptr, *host_counts_at_ = nullptr;
  uint64_t ticket_ = 0;              // names the totals that the host waits for; 0: it waits for none
  const int64_t* known_ = nullptr;   // the totals, once the host knows them
  bool is_reserved_ = false;         // the pool is known to be large enough
  bool is_sent_ = false;             // send is enqueued. Without is_reserved_ it sends nothing into too small a pool
  bool is_enqueued_ = false;         // so is all else
  std::unique_ptr<Results> output_;  // until its tensors are objects
  Rows room_{};                      // of the output
  Object rows_, scales_, weights_, row_ids_, counts_, offsets_, limits_, overflow_, required_, host_counts_,
      block_counts_, rank_rows_, in_rank_;
};

class Combine : public HighThroughputOperation {
 public:
  struct Given {
    Door door;
    PyObject *y, *weights, *bias, *extra;
    bool is_per_row;
    PyObject* const* routing;  // the tensors of the handle
    PyObject* sms = nullptr;   // of a Buffer
    BufferHandle parts{};
  };
  Combine(std::shared_ptr<HighThroughput> engine, const Given& given);
  // These are as Dispatch's.
  void learn(const CombinePlan& plan);
  void learn_from(const Combine& same);

  bool start() override;
  bool finish() override;
  Object results() const override { return tuple_of({or_none(out_), or_none(extra_out_)}); }
  Object made() const override { return door_ == Door::kBuffer ? results() : out_; }

 private:
  void use(const CombinePlan& plan);
  bool make_sums();
  int64_t pool_bytes() const;

  CombinePlan plan_{};
  CombineSendArgs send_{};
  CombineRecvArgs recv_{};
  int64_t rows_ = 0;
  bool has_extra_ = false;
  bool is_enqueued_ = false;  // one kernel sends and receives
  Object out_, extra_out_;
};

// Runs a whole operation like an earlier one, a Dispatch or Combine. Returns what its door returns; None if Python must
// take the call; null with Python's error set.
template <class Kind>
PyObject* run_whole(HighThroughput& engine, const typename Kind::Given& given) {
  return in_turn(engine, [&](Turn& turn) -> PyObject* {
    static PyObject* const whole = interned("");
    uint64_t stream = 0;
    if (is_watched() || !turn.enter() || !engine.may_run() || !engine.find_stream(&stream)) return left();
    Kind operation(engine.shared_from_this(), given);
    if (!operation.is_known()) return left();
    if (!engine.count_served() || !turn.begin(operation.name(), whole, operation.nbytes(), nullptr)) return nullptr;
    if (!turn.end(operation.whole() && engine.check())) return nullptr;
    return (given.door == Door::kOperator ? operation.results() : operation.made()).release();
  });
}

// Returns the tensors in a list; null if these are none of a handle.
PyObject* const* tensors_in(PyObject* list);

// The functions of Python: their number of arguments, and how these are read. read() returns false for a call that
// Python must take.
struct DispatchOfCommunicator {  // as MoECommunicator.dispatch
  using Kind = Dispatch;
  static constexpr Py_ssize_t num_args = 7;
  static bool read(const HighThroughput& engine, PyObject* const* args, Dispatch::Given& given);
};
struct CombineOfCommunicator {  // as MoECommunicator.combine
  using Kind = Combine;
  static constexpr Py_ssize_t num_args = 4;
  static bool read(const HighThroughput& engine, PyObject* const* args, Combine::Given& given);
};
struct DispatchOfOperator {  // as ops.dispatch without its last two arguments
  using Kind = Dispatch;
  static constexpr Py_ssize_t num_args = 7;
  static bool read(const HighThroughput& engine, PyObject* const* args, Dispatch::Given& given);
};
struct CombineOfOperator {  // as ops.combine without its last two arguments
  using Kind = Combine;
  static constexpr Py_ssize_t num_args = 6;
  static bool read(const HighThroughput& engine, PyObject* const* args, Combine::Given& given);
};
struct DispatchOfBuffer {  // x, handle, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
  using Kind = Dispatch;   // topk_weights, expert_alignment, num_worst_tokens, SMs
  static constexpr Py_ssize_t num_args = 10;
  static bool read(const HighThroughput& engine, PyObject* const* args, Dispatch::Given& given);
};
struct CombineOfBuffer {  // x, handle, topk_weights, bias, SMs
  using Kind = Combine;
  static constexpr Py_ssize_t num_args = 5;
  static bool read(const HighThroughput& engine, PyObject* const* args, Combine::Given& given);
};

}  // namespace ep::control
