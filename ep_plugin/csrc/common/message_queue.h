// The messages of one rank inside a node, as ranks on CPUs and on GPUs move them.
#pragma once
#include <vector>

#include "common/board.h"
#include "common/send_receive.h"

namespace ep {

// Several threads may call all of it at once, and hold no lock of the interpreter while they wait. stream: the caller's
// on a GPU.
class MessageQueue {
 public:
  virtual ~MessageQueue() = default;
  // Queues a message, after what the stream has now, and moves it as far as it can go now. Returns its ticket, 1 for
  // the first.
  virtual uint64_t post(const Message& message, uint64_t stream) = 0;
  // Whether the message is over, with or without an error.
  virtual bool is_over(uint64_t ticket) = 0;
  // Whether the message is over and has not failed.
  virtual bool is_done(uint64_t ticket) = 0;
  // Waits until the messages are over: kReady, or kFaulted if one of them has failed. kOverdue after limit_ns (0: no
  // limit), without a fault. On GPUs the stream waits, and the host only with a limit. On CPUs a wait in which none of
  // these moves for timeout_ns records a fault.
  virtual WaitResult wait(const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t timeout_ns,
                          uint64_t stream) = 0;
  // Waits as long as messages to peers are open, on GPUs also for those that a stream waits for. There the others fail.
  virtual void wait_for_sends(int64_t timeout_ns) = 0;
  // Nobody asks for these tickets again.
  virtual void forget(const std::vector<uint64_t>&) {}
  // Ends everything. Messages that are open fail. In a forked child it does nothing.
  virtual void close() = 0;
};

}  // namespace ep
