// Send and receive on CPUs. common/send_receive.h has the layout.
//
// A message moves when one of these calls finds something to do: post(), wait(), or the thread of this object, which
// looks about once a millisecond while messages are open and nobody waits. So a message moves on while its rank
// computes, and two ranks that send to each other before they receive do not block each other.
#pragma once
#include <memory>
#include <vector>

#include "common/board.h"
#include "common/send_receive.h"

namespace ep::cpu {

class MessageQueues;

// The messages of one rank. All methods may be called by several threads at once.
class Messages {
 public:
  // memory[r]: the memory of rank r of the node as mapped here, message_memory_bytes() each.
  Messages(const Comm& comm, const std::vector<Address>& memory, int num_channels);
  ~Messages();

  // Queues a message, and moves it as far as it can go now. Returns its ticket, 1 for the first.
  uint64_t post(const Message& message);
  // Whether the message is over, with or without an error.
  bool is_over(uint64_t ticket);
  // Whether the message is over and has not failed.
  bool is_done(uint64_t ticket);
  // Waits until the messages are over: kReady, or kFaulted if one of them has failed. kOverdue after limit_ns (0: no
  // limit), without a fault. A wait in which none of these moves for timeout_ns records a fault.
  WaitResult wait(const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t timeout_ns);
  // Waits in this way as long as messages to peers are open.
  WaitResult wait_for_sends(int64_t timeout_ns);
  // Ends everything. Messages that are open fail. In a forked child it does nothing.
  void close();

 private:
  std::shared_ptr<MessageQueues> queues_;
};

}  // namespace ep::cpu
