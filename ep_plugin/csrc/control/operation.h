// One low-latency operation that is like an earlier one: its arguments, its results, and its halves.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/low_latency_args.h"
#include "control/engine.h"
#include "control/inputs.h"

namespace ep::control {

class LowLatency;

enum LowLatencyKind : int { kDispatch = 0, kCombine = 1 };
constexpr int32_t kWhole = kLlSend | kLlReceive;

// Who calls. Each checks its arguments by rules of its own, so no door may rely on the checks of another.
enum class Door : char { kCommunicator = 'c', kBuffer = 'b' };  // MoECommunicator, deep_ep.Buffer

// The arguments of a call that are no tensors.
struct Settings {
  PyObject* const* values = nullptr;
  Py_ssize_t count = 0;
};

// Appends the door and the settings to the form of a call's tensors. Calls of one key need one check. Returns false for
// settings that are neither None nor of the types bool, int and str, and for numbers and text that no setting has.
bool append_key(std::string& form, Door door, const Settings& settings);

// What all calls of one key share.
struct DispatchPlan {
  LlDispatchArgs args;
  LlPlanLayout layout;
  int64_t columns;             // elements of an output row
  int64_t scales;              // columns of the scales; 0: the rows have none
  int32_t dtype, scale_dtype;  // as PyTorch numbers them
  Object rows_of;              // for rows that the owner's `rows_of` makes: its arguments, a tuple
};
struct CombinePlan {
  LlCombineArgs args;
  LlPlanLayout layout;
  int32_t dtype;
};

// It holds all tensors that its kernels use. All of it needs the interpreter's lock.
//
// Python sees it as _C.StartedOperation, after the send half.
class Operation {
 public:
  Operation(std::shared_ptr<LowLatency> engine, int kind, Door door)
      : kind(kind), engine_(std::move(engine)), door_(door) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Runs these halves in a thread's turn. Returns false as Turn::begin() does.
  bool launch(Turn& turn, int32_t phases);
  // Runs the receive half and returns what the door returns. None if Python must do it; null with Python's error set.
  PyObject* receive();
  // Runs the receive half within a call that Python has begun, and returns results(). Null with Python's error set.
  Object finish();

  virtual Object results() const = 0;  // those of the operator, a tuple
  virtual Object made() const = 0;     // what the door returns
  Object tensors() const;              // all that kernels use, a tuple

  const int kind;
  PyObject* name() const;   // a str, which lives as long as the process
  int64_t number = 0;       // Python finds it by this
  bool is_dropped = false;  // the caller has deleted its Work without waiting
  bool is_received() const { return is_received_; }
  const Call& logged() const { return call_; }

 protected:
  // Reads and holds tensors in turn. Returns false for a call that Python must take.
  bool read(Inputs& inputs, std::initializer_list<std::pair<PyObject*, DLTensor*>> tensors);
  // Whether ids are as dispatch checks them. True on GPUs, which check them in Python if they must.
  bool has_valid_ids(const DLTensor& ids) const;
  Results new_results() const;

  virtual LlOperation& shared() = 0;
  virtual void run() = 0;  // the kernel, for the phases in shared()

  const std::shared_ptr<LowLatency> engine_;
  const Door door_;
  int64_t nbytes_ = 0;

 private:
  bool needs_grad() const;
  void set_phases(int32_t phases);
  void run_in_order();

  std::vector<Object> inputs_;
  Call call_{};
  bool is_received_ = false;
};

class Dispatch : public Operation {
 public:
  // The arguments of a call.
  struct Given {
    Door door;
    PyObject *x, *ids, *cumulative, *wait_cost;  // Py_None: not given
    PyObject* handle;                            // of an earlier dispatch, or Py_None
    PyObject* const* routing;                    // its fields, or null
    Settings settings;                           // Buffer: T_max and E come first
  };
  using Plan = DispatchPlan;

  Dispatch(std::shared_ptr<LowLatency> engine, const Given& given);
  // Fills the arguments and allocates the results. Returns false for a call that Python must take.
  bool prepare(const Given& given, Turn& turn);

  Object results() const override;
  Object made() const override;

 private:
  bool allocate(int64_t num_tokens, Turn& turn);
  bool allocate_rows(Results& made, std::vector<Object*>& owners, Turn& turn);
  LlOperation& shared() override { return plan_.args.op; }
  void run() override;

  DispatchPlan plan_;  // with the arguments of this operation
  Object handle_;      // Py_None: this dispatch makes the routing
  Object max_tokens_, num_experts_;
  Object rows_, scales_, counts_, offsets_;
  Object topk_ids_, words_;         // the routing, for MoECommunicator
  Object src_info_, layout_range_;  // for Buffer
};

class Combine : public Operation {
 public:
  struct Given {
    Door door;
    PyObject *y, *weights, *bias, *ids;
    PyObject* plan;          // Buffer: src_info, a view of the plan, whose storage has nothing else
    PyObject* layout_range;  // Buffer only, or null
    PyObject *out, *wait_cost;
    Settings settings;
  };
  using Plan = CombinePlan;

  Combine(std::shared_ptr<LowLatency> engine, const Given& given)
      : Operation(std::move(engine), kCombine, given.door) {}
  bool prepare(const Given& given, Turn& turn);

  Object results() const override;
  Object made() const override { return out_; }

 private:
  LlOperation& shared() override { return plan_.args.op; }
  void run() override;

  CombinePlan plan_;
  Object out_;
};

}  // namespace ep::control
