// Low-latency dispatch and combine, each by one call of C: the whole of an operation, without gradients.
#pragma once
#include <memory>
#include <unordered_map>

#include "common/low_latency_args.h"
#include "control/engine.h"

namespace ep::control {

enum LowLatencyKind { kDispatch = 0, kCombine = 1 };

// What all calls of one form and settings share.
struct DispatchPlan {
  LlDispatchArgs args;
  int64_t per_expert;  // rows of an expert's block
  int64_t columns;     // elements of an output row
  int64_t scales;      // columns of the scales; 0: the rows have none
  int64_t plan_words;
  int32_t dtype, scale_dtype;  // as PyTorch numbers them
  Object rows_of;              // for rows that the owner's `rows_of` makes: its arguments, a tuple
};
struct CombinePlan {
  LlCombineArgs args;
  int32_t dtype;
};

// Objects of Python that live as long as the process.
struct LowLatencyObjects {
  PyObject *output_type, *handle_type;  // DispatchOutput, DispatchHandle
  PyObject* nothing;                    // in the place of the tensors that low latency's handles do not need
  PyObject *served, *served_kind;       // counts.served and its argument
  PyObject* sums;                       // statistics.Sums
  PyObject* current_device;             // returns the number of the current GPU
};

class LowLatency : public Engine {
 public:
  using Engine::Engine;

  // Each operation returns the result of MoECommunicator's method, with the same arguments in the same order; None if
  // Python must take the call; null with Python's error set.
  PyObject* dispatch(Turn& turn, PyObject* const* args);
  PyObject* combine(Turn& turn, PyObject* const* args);
  // Runs an operation in a turn of the calling thread.
  PyObject* run(PyObject* (LowLatency::*operation)(Turn&, PyObject* const*), PyObject* const* args);

  // Returns the entry of the epochs that the next operation of a kind uses.
  int32_t next_slot(int kind, bool is_captured) { return static_cast<int32_t>(++issued_[kind] % 2) + 2 * is_captured; }

  // Python bounds their number: it forgets all when it has too many.
  void remember(const std::string& key, const DispatchPlan& plan) { dispatches_[key] = plan; }
  void remember(const std::string& key, const CombinePlan& plan) { combines_[key] = plan; }
  void forget() {
    dispatches_.clear();
    combines_.clear();
  }
  // Appends a dispatch's settings to the form of its tensors. Returns false for settings that Python must check.
  static bool append_settings(std::string& form, PyObject* capacity, PyObject* quantize);

  void (*run_dispatch)(const LlDispatchArgs&) = nullptr;
  void (*run_combine)(const LlCombineArgs&) = nullptr;
  std::shared_ptr<StreamOrder> order;  // null on the CPU
  const Comm* comm = nullptr;          // of the object below; null until the communicator has memory
  int local_experts = 0;
  bool is_busy[2] = {};  // some operations of a kind are un-received
  Object comm_object;
  Object number, serves;  // of the communicator; the integration that counts its operations
  static LowLatencyObjects objects;

 private:
  bool may_run(LlOperation& op, int kind) const;
  void order_stream(LlOperation& op);
  bool start(Turn& turn, LlOperation& op, int kind, int64_t nbytes);

  int64_t issued_[2] = {};  // operations of each kind
  std::unordered_map<std::string, DispatchPlan> dispatches_;
  std::unordered_map<std::string, CombinePlan> combines_;
};

}  // namespace ep::control
