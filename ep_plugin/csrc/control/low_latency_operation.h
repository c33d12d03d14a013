// One low-latency operation: its arguments, its results, and its halves.
#pragma once
#include <memory>
#include <utility>

#include "common/low_latency_args.h"
#include "control/operation.h"

namespace ep::control {

class LowLatency;

enum LowLatencyKind : int { kDispatch = 0, kCombine = 1 };
constexpr int32_t kWhole = kLlSend | kLlReceive;

// What all calls of one key share.
struct LowLatencyDispatchPlan {
  LlDispatchArgs args;
  LlPlanLayout layout;
  int64_t columns;             // elements of an output row
  int64_t scales;              // columns of the scales; 0: the rows have none
  int32_t dtype, scale_dtype;  // as PyTorch numbers them
  Object rows_of;              // for rows that the owner's `rows_of` makes: its arguments, a tuple
};
struct LowLatencyCombinePlan {
  LlCombineArgs args;
  LlPlanLayout layout;
  int32_t dtype;
};

// Python sees it as _C.StartedOperation, after the send half.
class LowLatencyOperation : public Operation {
 public:
  LowLatencyOperation(std::shared_ptr<LowLatency> engine, int kind, Door door);

  // Runs these halves in a thread's turn. Returns false with Python's error set.
  bool launch(Turn& turn, int32_t phases);
  // Runs the receive half and returns what the door returns. None if Python must take the call; null with Python's
  // error set.
  PyObject* receive();
  // Runs the receive half on the caller's stream and returns results(). None if the communicator or the device has
  // another state than Python has found; null with Python's error set.
  PyObject* collect();
  // Gives the messages that are under way to Legs, which keeps them: nobody will wait for them.
  void abandon_legs();

  const int kind;
  uint64_t capture = 0;      // of the CUDA graph in which it was started; 0: none
  bool is_received = false;  // its receive half was launched, or never will be

 protected:
  // Whether ids are as dispatch checks them. True on GPUs, which check them in Python if they must.
  bool has_valid_ids(const DLTensor& ids) const;

  virtual LlOperation& shared() = 0;
  // The legs that follow the send half: rows, or weights before forwarding.
  virtual LlLeg first_leg() const = 0;
  virtual bool allocate(Turn& turn) = 0;  // false with Python's error set
  virtual void run() = 0;                 // the kernel, for the phases in shared()
  // Adds the operation to the load statistics. Null with Python's error set.
  virtual Object count(PyObject* load) const = 0;

  const std::shared_ptr<LowLatency> engine_;
  Object layer_;  // that has started the operation, if statistics are recorded

 private:
  bool prepare_to_send(Turn& turn);
  void run_in_order();
  // Several nodes. These return false with Python's error set.
  bool run_over_nodes(int32_t phases);
  bool run_phase(int32_t phase);
  bool begin_legs(LlLeg leg);
  bool wait_for_legs(LlLeg leg);

  Object legs_;  // that are under way
};

class LowLatencyDispatch : public LowLatencyOperation {
 public:
  // The arguments of a call.
  struct Given {
    Door door;
    PyObject *x, *ids, *cumulative, *wait_cost;  // Py_None: not given
    PyObject* handle;                            // of an earlier dispatch, or Py_None
    PyObject* const* routing;                    // its fields, or null
    Settings settings;                           // Buffer: T_max and E come first
  };
  LowLatencyDispatch(std::shared_ptr<LowLatency> engine, const Given& given);
  // Fills the arguments. Returns false for a call that Python must take or check.
  bool prepare(const Given& given);

  Object results() const override;
  Object made() const override;

 private:
  bool allocate(Turn& turn) override;
  bool allocate_rows(Results& made, std::vector<Object*>& owners, Turn& turn);
  LlOperation& shared() override { return plan_.args.op; }
  LlLeg first_leg() const override { return kLlRows; }
  void run() override;
  Object count(PyObject* load) const override;

  LowLatencyDispatchPlan plan_;  // with the arguments of this operation
  const bool is_fresh_;          // this dispatch makes the routing
  int64_t num_tokens_ = 0;
  Object handle_;
  Object max_tokens_, num_experts_;
  Object rows_, scales_, counts_, offsets_;
  Object topk_ids_, words_;         // the routing, for MoECommunicator
  Object unseen_words_;             // the plan of a dispatch that returns none
  Object src_info_, layout_range_;  // for Buffer
};

class LowLatencyCombine : public LowLatencyOperation {
 public:
  struct Given {
    Door door;
    PyObject *y, *weights, *bias, *ids;
    PyObject* plan;          // Buffer: src_info, a view of the plan, whose storage has nothing else
    PyObject* layout_range;  // Buffer only, or null
    PyObject *out, *wait_cost;
    Settings settings;
  };
  LowLatencyCombine(std::shared_ptr<LowLatency> engine, const Given& given)
      : LowLatencyOperation(std::move(engine), kCombine, given.door) {}
  bool prepare(const Given& given);

  Object results() const override;
  Object made() const override { return out_; }

 private:
  bool allocate(Turn& turn) override;
  LlOperation& shared() override { return plan_.args.op; }
  LlLeg first_leg() const override { return kLlWeights; }
  void run() override;
  Object count(PyObject* load) const override;

  LowLatencyCombinePlan plan_;
  int64_t num_tokens_ = 0;
  Object out_;
};

}  // namespace ep::control
