// Messages of a rail over NCCL, on a stream of the rail. A backend of PyTorch has made the communicator and ends it;
// starting messages through it would take the host some five times as long, since it keeps records of each.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "control/gpu_messages.h"

namespace ep::control {

// Functions of the loaded NCCL, as nccl.h declares them.
struct NcclFunctions {
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int type, int peer, void* comm, void* stream);
  int (*receive)(void* to, size_t count, int type, int peer, void* comm, void* stream);
  int (*all_gather)(const void* from, void* to, size_t count, int type, void* comm, void* stream);
  const char* (*error_string)(int error);
};

class NcclRail {
 public:
  struct Message {
    int node;
    Address address;
    int64_t bytes;
    bool is_sent;
  };

  // comm: of NCCL; a node is a rank of it. stream: of `device`, for this rail alone. word: in host memory, as the
  // device maps it. calls: message_calls(), or others for tests.
  NcclRail(NcclFunctions nccl, Address comm, uint64_t stream, int device, Address word, MessageCalls calls);
  ~NcclRail();
  NcclRail(const NcclRail&) = delete;
  NcclRail& operator=(const NcclRail&) = delete;

  // Each starts messages after the work that `after` has now, and returns a ticket for wait(). While the messages are
  // the rail's turn, the word has this number; then 0. number 0: the word stays as it is. Throws std::runtime_error.
  uint64_t start(uint64_t after, uint64_t number, const std::vector<Message>& messages);
  // Fills `to` with `bytes` bytes of every node, by node.
  uint64_t gather(uint64_t after, uint64_t number, Address from, Address to, int64_t bytes);
  // Orders `stream` after messages that have started.
  void wait(uint64_t ticket, uint64_t stream);
  // Starts nothing more: call it before the communicator is gone. Waits at most so long for another thread that is
  // starting messages. NCCL may keep that thread until the communicator is aborted.
  void end(double seconds);

 private:
  template <class Calls>
  uint64_t run(uint64_t after, uint64_t number, const Calls& calls);
  void check(int error) const;
  void check_not_ended() const;

  // With more tickets, wait() for one that is older orders after the oldest of these.
  static constexpr size_t kMarks = 256;

  const NcclFunctions nccl_;
  void* const comm_;
  const uint64_t stream_;
  const int device_;
  const Address word_;
  const MessageCalls calls_;
  std::atomic<bool> is_ended_{false};
  std::atomic<int> starting_{0};  // threads
  std::mutex mutex_;              // guards what follows
  std::deque<uint64_t> marks_;    // of the latest tickets
  uint64_t tickets_ = 0;
};

}  // namespace ep::control
