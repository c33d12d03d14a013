// The engine of low-latency dispatch and combine, and the functions by which Python calls it: each runs an operation,
// or its send half, by one call of C, without gradients.
#pragma once
#include <memory>
#include <utility>

#include "control/engine.h"
#include "control/low_latency_operation.h"

namespace ep::control {

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
  bool start(const typename Kind::Given& given, std::shared_ptr<LowLatencyOperation>& started) {
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
  void (*run_dispatch)(const LlDispatchArgs&) = nullptr;
  void (*run_combine)(const LlCombineArgs&) = nullptr;
  std::shared_ptr<StreamOrder> order;  // null on the CPU
  const Comm* comm = nullptr;          // of the object below; null until the communicator has memory
  int local_experts = 0;
  bool is_busy[2] = {};  // some operations of a kind are un-received
  Object comm_object;
  Plans<LowLatencyDispatchPlan> dispatches;
  Plans<LowLatencyCombinePlan> combines;

 private:
  // Takes the turn and fills an operation. Null, perhaps with Python's error set, if Python must take the call.
  template <class Kind>
  std::shared_ptr<Kind> prepared(const typename Kind::Given& given, Turn& turn, bool is_whole) {
    auto operation = std::make_shared<Kind>(shared_from_this(), given);
    if (is_watched() || !turn.enter() || !may_run(operation->kind, is_whole)) return nullptr;
    return operation->prepare(given, turn) ? operation : nullptr;
  }
  bool may_run(int kind, bool is_whole) const;

  int64_t issued_[2] = {};  // operations of each kind
};

// The functions of Python: their number of arguments, and how these are read. read() returns false for a call that
// Python must take.
struct CommunicatorDispatch {  // as MoECommunicator.dispatch
  using Kind = LowLatencyDispatch;
  static constexpr Py_ssize_t num_args = 7;
  static bool read(const LowLatency& engine, PyObject* const* args, LowLatencyDispatch::Given& given);
};
struct CommunicatorCombine {  // as MoECommunicator.combine
  using Kind = LowLatencyCombine;
  static constexpr Py_ssize_t num_args = 4;
  static bool read(const LowLatency& engine, PyObject* const* args, LowLatencyCombine::Given& given);
};
struct BufferDispatch {  // x, ids, cumulative, wait_cost, T_max, E, use_fp8, round_scale, use_ue8m0
  using Kind = LowLatencyDispatch;
  static constexpr Py_ssize_t num_args = 9;
  static bool read(const LowLatency& engine, PyObject* const* args, LowLatencyDispatch::Given& given);
};
struct BufferCombine {  // y, weights, ids, src_info, layout_range, out, wait_cost, T_max, H, E, use_logfmt
  using Kind = LowLatencyCombine;
  static constexpr Py_ssize_t num_args = 11;
  static bool read(const LowLatency& engine, PyObject* const* args, LowLatencyCombine::Given& given);
};

}  // namespace ep::control
