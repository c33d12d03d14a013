// The engine of low-latency dispatch and combine, and the functions by which Python calls it: each runs an operation,
// or its send half, by one call of C.
//
// Dispatches use two entries of the epochs in turn, and so do combines. So an operation may begin when the last but one
// of its kind is received. Operations in CUDA graphs have two entries of their own, since a graph may be replayed while
// other operations are un-received.
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
  // take or check the call; null with Python's error set.
  template <class Kind>
  PyObject* run(const typename Kind::Given& given) {
    if (given.door == Door::kCommunicator && is_watched()) return left();
    return in_turn(*this, [&](Turn& turn) -> PyObject* {
      const auto operation = prepared<Kind>(given, turn);
      if (operation == nullptr) return left();
      if (!operation->launch(turn, kWhole)) return nullptr;
      return (given.door == Door::kOperator ? operation->results() : operation->made()).release();
    });
  }

  // Runs its send half and sets `started`, which stays null if Python must take or check the call. Its results are not
  // seen before its end, so autograd records it there. Returns false with Python's error set.
  template <class Kind>
  bool start(typename Kind::Given given, std::shared_ptr<LowLatencyOperation>& started) {
    if (given.door == Door::kCommunicator) given.door = Door::kOperator;
    const Object done(in_turn(*this, [&](Turn& turn) -> PyObject* {
      const auto operation = prepared<Kind>(given, turn);
      if (operation == nullptr) return left();
      if (!operation->launch(turn, kLlSend)) return nullptr;
      started = un_received_[operation->kind][issued_[operation->kind] % 2] = operation;
      return Py_NewRef(Py_None);
    }));
    return static_cast<bool>(done);
  }

  // Returns the entry of the epochs that the next operation of a kind uses.
  int32_t next_slot(int kind, bool is_captured) { return static_cast<int32_t>(++issued_[kind] % 2) + 2 * is_captured; }
  // Returns the last but one operation of a kind, or, with `newest`, the last one; null if it is received.
  const std::shared_ptr<LowLatencyOperation>& un_received(int kind, bool newest) const {
    return un_received_[kind][(issued_[kind] + !newest) % 2];
  }
  // Ranks and experts of all nodes.
  int num_ranks() const { return comm->num_ranks * shared.shape.num_nodes; }
  int num_experts() const { return comm->num_experts * shared.shape.num_nodes; }
  // Counts an operation as received.
  void forget(LowLatencyOperation& operation);
  // Drops all operations.
  void close();

  void (*run_dispatch)(const LlDispatchArgs&) = nullptr;
  void (*run_combine)(const LlCombineArgs&) = nullptr;
  LlOperation shared{};                // what all operations share
  std::shared_ptr<StreamOrder> order;  // null on the CPU
  const Comm* comm = nullptr;          // of the object below; null until the communicator has memory
  int local_experts = 0;
  Object legs;                     // Python's Legs, which sends to other nodes; none on one node
  bool pads_legs = true;           // legs have T_max rows, not only the rows that there are
  int64_t leg_bytes_received = 0;  // from other nodes
  Object comm_object;
  Plans<LowLatencyDispatchPlan> dispatches;
  Plans<LowLatencyCombinePlan> combines;

 private:
  // Takes the turn and fills an operation. Null, perhaps with Python's error set, if Python must take or check the
  // call.
  template <class Kind>
  std::shared_ptr<Kind> prepared(const typename Kind::Given& given, Turn& turn) {
    auto operation = std::make_shared<Kind>(shared_from_this(), given);
    if (!turn.enter() || comm == nullptr || un_received(operation->kind, false) != nullptr) return nullptr;
    return operation->prepare(given) ? operation : nullptr;
  }

  int64_t issued_[2] = {};                                  // operations of each kind
  std::shared_ptr<LowLatencyOperation> un_received_[2][2];  // by kind and entry
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
struct OperatorDispatch {  // x, topk_ids, cumulative, wait_cost, capacity, quantize, topk_ids and plan of a handle
  using Kind = LowLatencyDispatch;
  static constexpr Py_ssize_t num_args = 8;
  static bool read(const LowLatency& engine, PyObject* const* args, LowLatencyDispatch::Given& given);
};
struct OperatorCombine {  // y, weights, bias, topk_ids, plan, out, wait_cost, logfmt
  using Kind = LowLatencyCombine;
  static constexpr Py_ssize_t num_args = 8;
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
