// The engine of low-latency dispatch and combine, and the functions by which Python calls it: each runs an operation,
// or its send half, by one call of C, without gradients.
#pragma once
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "control/engine.h"
#include "control/operation.h"

namespace ep::control {

// Objects of Python that live as long as the process.
struct LowLatencyObjects {
  PyObject *output_type, *handle_type;  // DispatchOutput, DispatchHandle
  PyObject* nothing;                    // in the place of the tensors that low latency's handles do not need
  PyObject* int64;                      // torch's dtype
  PyObject *served, *served_kind;       // counts.served and its argument
  PyObject* sums;                       // statistics.Sums
  PyObject* current_device;             // returns the number of the current GPU
};

// Leaves a call to Python and returns None; null if there is an error to raise, such as that of a signal's handler.
PyObject* left();

class LowLatency : public Engine, public std::enable_shared_from_this<LowLatency> {
 public:
  using Engine::Engine;

  // Runs an operation like an earlier one, a Dispatch or Combine. Returns what given.door returns; None if Python must
  // take the call; null with Python's error set.
  template <class Kind>
  PyObject* run(const typename Kind::Given& given) {
    return in_turn(*this, [&](Turn& turn) -> PyObject* {
      const auto operation = prepared<Kind>(given, turn, true);
      if (operation == nullptr) return left();
      return operation->launch(turn, kWhole) ? operation->made().release() : nullptr;
    });
  }

  // Runs its send half and sets `started`, which stays null if Python must take the call. Returns false with Python's
  // error set.
  template <class Kind>
  bool start(const typename Kind::Given& given, std::shared_ptr<Operation>& started) {
    const Object done(in_turn(*this, [&](Turn& turn) -> PyObject* {
      const auto operation = prepared<Kind>(given, turn, false);
      if (operation == nullptr) return left();
      if (!operation->launch(turn, kLlSend)) return nullptr;
      started = operation;
      return Py_NewRef(Py_None);
    }));
    return static_cast<bool>(done);
  }

  // Returns the entry of the epochs that the next operation of a kind uses.
  int32_t next_slot(int kind, bool is_captured) { return static_cast<int32_t>(++issued_[kind] % 2) + 2 * is_captured; }
  // Sets the caller's stream. Returns false if the device is not the current one, or captures a CUDA graph.
  bool find_stream(uint64_t* stream) const;
  // Counts an operation for `serves`. Returns false with Python's error set.
  bool count_served() const;

  template <class Plan>
  void remember(std::string form, Door door, const Settings& settings, const Plan& plan) {
    auto& plans = plans_of<Plan>();
    if (!append_key(form, door, settings)) return;
    if (plans.size() >= kMostPlans) plans.clear();
    plans[form] = plan;
  }
  // Returns the plan of calls of one key, or null. It holds until the next remember().
  template <class Plan>
  const Plan* find(std::string form, Door door, const Settings& settings) {
    if (!append_key(form, door, settings)) return nullptr;
    const auto found = plans_of<Plan>().find(form);
    return found == plans_of<Plan>().end() ? nullptr : &found->second;
  }

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
  static constexpr size_t kMostPlans = 512;

  // Takes the turn and fills an operation. Null, perhaps with Python's error set, if Python must take the call.
  template <class Kind>
  std::shared_ptr<Kind> prepared(const typename Kind::Given& given, Turn& turn, bool is_whole) {
    auto operation = std::make_shared<Kind>(shared_from_this(), given);
    if (is_watched() || !turn.enter() || !may_run(operation->kind, is_whole)) return nullptr;
    return operation->prepare(given, turn) ? operation : nullptr;
  }
  bool may_run(int kind, bool is_whole) const;

  template <class Plan>
  std::unordered_map<std::string, Plan>& plans_of() {
    if constexpr (std::is_same_v<Plan, DispatchPlan>)
      return dispatches_;
    else
      return combines_;
  }

  int64_t issued_[2] = {};  // operations of each kind
  std::unordered_map<std::string, DispatchPlan> dispatches_;
  std::unordered_map<std::string, CombinePlan> combines_;
};

// The functions of Python: their number of arguments, and how these are read. read() returns false for a call that
// Python must take.
struct CommunicatorDispatch {  // as MoECommunicator.dispatch
  using Kind = Dispatch;
  static constexpr Py_ssize_t num_args = 7;
  static bool read(const LowLatency& engine, PyObject* const* args, Dispatch::Given& given);
};
struct CommunicatorCombine {  // as MoECommunicator.combine
  using Kind = Combine;
  static constexpr Py_ssize_t num_args = 4;
  static bool read(const LowLatency& engine, PyObject* const* args, Combine::Given& given);
};
struct BufferDispatch {  // x, ids, cumulative, wait_cost, T_max, E, use_fp8, round_scale, use_ue8m0
  using Kind = Dispatch;
  static constexpr Py_ssize_t num_args = 9;
  static bool read(const LowLatency& engine, PyObject* const* args, Dispatch::Given& given);
};
struct BufferCombine {  // y, weights, ids, src_info, layout_range, out, wait_cost, T_max, H, E, use_logfmt
  using Kind = Combine;
  static constexpr Py_ssize_t num_args = 11;
  static bool read(const LowLatency& engine, PyObject* const* args, Combine::Given& given);
};

}  // namespace ep::control
