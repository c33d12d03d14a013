// Send and receive inside a node: one call of C starts the messages of a call, and one waits for them.
#pragma once
#include <memory>
#include <unordered_map>
#include <vector>

#include "common/message_queue.h"
#include "control/engine.h"
#include "control/inputs.h"

namespace ep::control {

class Messages;

// The messages that one call has started. Python sees it as _C.StartedMessages.
class StartedMessages {
 public:
  StartedMessages(std::shared_ptr<Messages> engine, const Call& call, Object memory)
      : call(call), memory(std::move(memory)), engine_(std::move(engine)) {}
  ~StartedMessages();
  StartedMessages(const StartedMessages&) = delete;
  StartedMessages& operator=(const StartedMessages&) = delete;

  // Waits until all messages of the call are over, at most limit_ns (0: no limit). Returns True, or False after the
  // limit; None if another device is current; null with Python's error set.
  PyObject* wait(int64_t limit_ns);
  // Whether those inside the node are over, or have arrived. Call them without the interpreter's lock.
  bool is_over() const;
  bool is_done() const;

  const Call call;
  Object memory;     // that messages use, until all are over: a list
  Object transfers;  // Python's object for messages with other nodes; none: there are none

 private:
  friend class Messages;

  const std::shared_ptr<Messages> engine_;
  std::vector<uint64_t> tickets_;
};

// The messages of one SendReceive.
class Messages : public Engine, public std::enable_shared_from_this<Messages> {
 public:
  using Engine::Engine;

  // Starts messages. args: for each of them whether it receives, its tensor, the other rank and the channel. `started`
  // stays null if Python must take or check the call. Returns false with Python's error set.
  bool start(PyObject* const* args, Py_ssize_t count, std::shared_ptr<StartedMessages>& started);
  // The parts of start(), in an operation that Python runs: keeps `memory` until all messages of the call are over, and
  // posts messages. These return null, and false, with Python's error set.
  std::shared_ptr<StartedMessages> keep(const Call& call, Object memory);
  bool post(StartedMessages& started, std::vector<Message> messages);
  PyObject* wait(StartedMessages& started, int64_t limit_ns);
  // The calls whose memory is kept.
  std::vector<std::shared_ptr<StartedMessages>> kept() const;
  // Ends everything, and keeps nothing any more.
  void close();
  // Whether the calling thread waits, below the handler of a signal.
  bool is_waiting() const;

  std::shared_ptr<MessageQueue> queue;
  const Comm* comm = nullptr;  // of the object below
  Object comm_object;
  std::vector<int> places;  // of the ranks of the group in the node; -1: on another node, or this rank
  int num_channels = 0;
  bool in_order = false;               // whether all ranks must start messages in one order
  Object codes;                        // a dict: the number of each dtype
  int64_t num_looks = 0;               // for kept calls that are over, for tests
  std::vector<unsigned long> waiters;  // threads

 private:
  bool read(PyObject* const* end, Inputs& inputs, Message& message) const;
  bool is_over(StartedMessages& started);
  void sweep();

  std::unordered_map<StartedMessages*, std::shared_ptr<StartedMessages>> kept_;
  size_t sweep_at_ = kKept;

  static constexpr size_t kKept = 16;  // with fewer calls, nobody looks for those that are over
};

}  // namespace ep::control
