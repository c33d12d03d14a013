// Send and receive on CPUs. common/send_receive.h has the layout.
//
// A message moves when one of these calls finds something to do: post(), wait(), or the thread of this object, which
// looks about once a millisecond while messages are open and nobody waits. So a message moves on while its rank
// computes, and two ranks that send to each other before they receive do not block each other.
#pragma once
#include <memory>
#include <vector>

#include "common/message_queue.h"

namespace ep::cpu {

class Lanes;

class Messages : public MessageQueue {
 public:
  // memory[r]: the memory of rank r of the node as mapped here, message_memory_bytes() each.
  Messages(const Comm& comm, const std::vector<Address>& memory, int num_channels);
  ~Messages() override;

  uint64_t post(const Message& message, uint64_t) override;
  bool is_over(uint64_t ticket) override;
  bool is_done(uint64_t ticket) override;
  WaitResult wait(const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t timeout_ns, uint64_t) override;
  void wait_for_sends(int64_t timeout_ns) override;
  void close() override;

 private:
  std::shared_ptr<Lanes> lanes_;
};

}  // namespace ep::cpu
