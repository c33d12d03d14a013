// Send and receive on CPUs, see messages.h.
// Roles. Whoever holds the mutex moves chunks of all open messages: a caller in post() or wait(), else the thread. The
// thread belongs to Lanes, not to Messages: it holds them while it runs, so a forked child destroys neither.
#include "cpu/collectives/messages.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "cpu/collectives/pieces.h"

namespace ep::cpu {

namespace {

constexpr int64_t kYieldNs = 400'000;  // as in low_latency.cpp
constexpr int64_t kNapNs = 1'000'000;
constexpr int64_t kMoveOnNs = 100'000;            // the thread goes on to look for so long after something has moved
constexpr std::chrono::milliseconds kPoll{1};     // between two looks of the thread
constexpr std::chrono::milliseconds kLinger{50};  // the thread goes on to poll for so long after the last message
constexpr int kChunksAtATime = 4;                 // of one lane, before the next lane has its turn

uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

}  // namespace

// The open messages of one rank, by lane and direction.
class Lanes : public std::enable_shared_from_this<Lanes> {
 public:
  Lanes(const Comm& comm, const std::vector<Address>& memory, int num_channels)
      : comm_(comm), memory_(memory), num_channels_(num_channels), process_(getpid()) {
    for (int channel = 0; channel < num_channels; ++channel)
      for (int peer = 0; peer < comm_.num_ranks; ++peer)
        for (const bool receives : {false, true})
          queues_.push_back(Queue{peer, receives,
                                  &lane_in(memory_[static_cast<size_t>(receives ? comm_.rank : peer)], comm_.num_ranks,
                                           channel, receives ? peer : comm_.rank)});
  }

  uint64_t post(const Message& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t ticket = ++tickets_;
    if (closed_ || !has_no_fault(comm_)) {
      failed_.insert(ticket);
      return ticket;
    }
    Queue& queue =
        queues_[static_cast<size_t>((message.channel * comm_.num_ranks + message.peer) * 2 + message.receives)];
    open_[ticket] = &queue;
    queue.open.push_back(Open{message, ticket});
    move(queue);
    if (!open_.empty() && !awake_) {
      if (!has_thread_) {
        std::thread([self = shared_from_this()] { self->work(); }).detach();
        has_thread_ = true;  // not if it cannot be made: close() waits for its end
      }
      awake_ = true;
      posted_.notify_one();
    }
    return ticket;
  }

  bool is_over(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_.count(ticket) != 0) move_all();
    return open_.count(ticket) == 0;
  }

  bool is_done(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_.count(ticket) == 0 && failed_.count(ticket) == 0;
  }

  WaitResult wait(const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    return wait_in(lock, tickets, limit_ns, timeout_ns);
  }

  void wait_for_sends(int64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<uint64_t> tickets;
    for (const Queue& queue : queues_)
      if (!queue.receives)
        for (const Open& one : queue.open) tickets.push_back(one.ticket);
    wait_in(lock, tickets, 0, timeout_ns);
  }

  void close() {
    if (getpid() != process_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    fail_all();
    posted_.notify_one();
    ended_.wait(lock, [this] { return !has_thread_ && waiters_ == 0; });
  }

 private:
  struct Open {
    Message message;
    uint64_t ticket;
  };
  struct Queue {
    int peer;
    bool receives;
    Lane* lane;
    std::deque<Open> open = {};
    int64_t moved = 0;    // bytes of the first open message
    uint64_t number = 0;  // messages that are over
    uint64_t chunks = 0;  // that this rank has written or read
    uint64_t moves = 0;   // moves_ after the last of them
  };

  static Step step_of(const Queue& queue) { return queue.receives ? kReceive : kSend; }

  // What the queue waits for: the number of chunks that the peer has read, or has written.
  uint64_t awaited(const Queue& queue) const {
    return queue.receives ? queue.chunks + 1 : queue.chunks + 1 - std::min<uint64_t>(queue.chunks + 1, kLaneCells);
  }
  static uint64_t seen(const Queue& queue) { return load(queue.receives ? queue.lane->sent : queue.lane->consumed); }

  // Moves chunks of the first messages of a queue. Whether it has moved any.
  bool move(Queue& queue) {
    int chunks = 0;
    for (; chunks < kChunksAtATime && !queue.open.empty() && seen(queue) >= awaited(queue); ++chunks) {
      const Open& first = queue.open.front();
      const Message& message = first.message;
      LaneCell& cell = queue.lane->cells[queue.chunks % kLaneCells];
      const int64_t bytes = std::min(message.bytes - queue.moved, kLaneCellBytes);
      if (queue.receives) {
        if (!check(queue, cell.header)) return true;
        copy_bytes(at<char>(message.data, queue.moved), cell.data, bytes);
        signal(&queue.lane->consumed, ++queue.chunks);
      } else {
        cell.header = MessageHeader{queue.number + 1, message.bytes, message.dtype};
        copy_bytes(cell.data, at<char>(message.data, queue.moved), bytes);
        signal(&queue.lane->sent, ++queue.chunks);
      }
      queue.moves = ++moves_;
      queue.moved += bytes;
      if (queue.moved < message.bytes) continue;
      open_.erase(first.ticket);
      queue.open.pop_front();
      queue.moved = 0;
      ++queue.number;
    }
    if (chunks > 0) ring(queue.peer);
    return chunks > 0;
  }

  bool move_all() {
    bool moved = false;
    for (Queue& queue : queues_)
      if (!queue.open.empty()) moved |= move(queue);
    if (!has_no_fault(comm_)) fail_all();
    return moved;
  }

  bool check(const Queue& queue, const MessageHeader& theirs) const {
    const Message& mine = queue.open.front().message;
    const Step step = step_of(queue);
    if (theirs.bytes != mine.bytes)
      return fail(comm_, kDisagree, step, queue.peer, kMessageBytes, mine.bytes, theirs.bytes);
    if (theirs.dtype != mine.dtype)
      return fail(comm_, kDisagree, step, queue.peer, kMessageDtype, mine.dtype, theirs.dtype);
    const uint64_t number = queue.number + 1;
    if (theirs.number != number)
      return fail(comm_, kBadData, step, queue.peer, kMessageNumber, static_cast<int64_t>(number),
                  static_cast<int64_t>(theirs.number));
    return true;
  }

  // After a fault: what was to be received is filled with 0xFF bytes.
  void fail_all() {
    for (Queue& queue : queues_) {
      for (const Open& one : queue.open) {
        if (queue.receives) poison(at<char>(one.message.data), one.message.bytes);
        failed_.insert(one.ticket);
      }
      queue.open.clear();
    }
    open_.clear();
  }

  // What is left of these messages. A change of `open` or `moves` is progress of theirs; other messages do not count.
  struct Rest {
    size_t open = 0;
    uint64_t moves = 0;
    const Queue* first = nullptr;  // the queue of the first open one
  };
  Rest rest_of(const std::vector<uint64_t>& tickets) const {
    Rest rest;
    for (const uint64_t ticket : tickets) {
      const auto found = open_.find(ticket);
      if (found == open_.end()) continue;
      if (rest.open++ == 0) rest.first = found->second;
      rest.moves = std::max(rest.moves, found->second->moves);
    }
    return rest;
  }

  WaitResult wait_in(std::unique_lock<std::mutex>& lock, const std::vector<uint64_t>& tickets, int64_t limit_ns,
                     int64_t timeout_ns) {
    const int64_t begun = limit_ns > 0 ? now_ns() : 0;
    Comm comm = comm_;
    comm.timeout_ns = timeout_ns;
    WaitResult result = kReady;
    Deadline deadline;
    Rest last;
    ++waiters_;
    for (;;) {
      const bool moved = move_all();
      const Rest rest = rest_of(tickets);
      if (rest.open == 0) break;
      if (rest.open != last.open || rest.moves != last.moves) deadline = Deadline{};
      last = rest;
      if (limit_ns > 0 && now_ns() - begun > limit_ns) {
        result = kOverdue;
        break;
      }
      const Queue& queue = *rest.first;
      const Run run{comm, step_of(queue), 0};
      const uint64_t expected = awaited(queue), found = seen(queue);
      lock.unlock();
      int64_t waited = 0;
      if (deadline.lasts(run, queue.peer, expected, found, &waited) && !moved) {
        if (waited < kYieldNs)
          sched_yield();
        else
          sleep();
      }
      lock.lock();
    }
    if (--waiters_ == 0) {
      if (closed_)
        ended_.notify_all();
      else if (!open_.empty())
        posted_.notify_one();
    }
    const bool failed =
        std::any_of(tickets.begin(), tickets.end(), [this](uint64_t one) { return failed_.count(one) != 0; });
    return result == kReady && failed ? kFaulted : result;
  }

  // Sleeps until a peer rings, if nothing can be moved. The fence lets either this rank see what has arrived, or the
  // peer see that this rank sleeps.
  void sleep() {
    MessageBell& bell = bell_in(memory_[static_cast<size_t>(comm_.rank)]);
    __atomic_fetch_add(&bell.sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t rings = __atomic_load_n(&bell.rings, __ATOMIC_ACQUIRE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!can_move()) sleep_on(&bell.rings, rings, kNapNs);
    __atomic_fetch_sub(&bell.sleepers, 1, __ATOMIC_RELAXED);
  }

  bool can_move() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(queues_.begin(), queues_.end(),
                       [this](const Queue& queue) { return !queue.open.empty() && seen(queue) >= awaited(queue); });
  }

  void ring(int peer) const {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    MessageBell& bell = bell_in(memory_[static_cast<size_t>(peer)]);
    if (__atomic_load_n(&bell.sleepers, __ATOMIC_RELAXED) == 0) return;
    __atomic_fetch_add(&bell.rings, 1, __ATOMIC_RELEASE);
    wake(&bell.rings, INT_MAX);
  }

  // The thread.
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    auto last = std::chrono::steady_clock::now();
    while (!closed_) {
      const auto now = std::chrono::steady_clock::now();
      if (!open_.empty()) last = now;
      if (now - last > kLinger) {
        awake_ = false;
        posted_.wait(lock);
        continue;
      }
      posted_.wait_for(lock, kPoll);
      for (int64_t moved_at = now_ns();
           !closed_ && waiters_ == 0 && !open_.empty() && now_ns() - moved_at < kMoveOnNs;) {
        if (move_all() || aborted()) moved_at = now_ns();
        lock.unlock();
        sched_yield();
        lock.lock();
      }
    }
    has_thread_ = false;
    ended_.notify_all();
  }

  // Whether a peer has aborted. Then everything fails.
  bool aborted() {
    if (__atomic_load_n(&board_of(comm_).abort, __ATOMIC_ACQUIRE) == 0) return false;
    fail_all();
    return true;
  }

  const Comm comm_;
  const std::vector<Address> memory_;
  const int num_channels_;
  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable posted_, ended_;
  std::vector<Queue> queues_;        // [channel][peer][receives]
  std::map<uint64_t, Queue*> open_;  // by ticket
  std::set<uint64_t> failed_;
  uint64_t tickets_ = 0;
  uint64_t moves_ = 0;  // chunks of all queues
  int waiters_ = 0;
  bool has_thread_ = false;
  bool awake_ = false;  // the thread polls
  bool closed_ = false;
};

Messages::Messages(const Comm& comm, const std::vector<Address>& memory, int num_channels)
    : lanes_(std::make_shared<Lanes>(comm, memory, num_channels)) {}

Messages::~Messages() { lanes_->close(); }

uint64_t Messages::post(const Message& message, uint64_t) { return lanes_->post(message); }
bool Messages::is_over(uint64_t ticket) { return lanes_->is_over(ticket); }
bool Messages::is_done(uint64_t ticket) { return lanes_->is_done(ticket); }
WaitResult Messages::wait(const std::vector<uint64_t>& tickets, int64_t limit_ns, int64_t timeout_ns, uint64_t) {
  return lanes_->wait(tickets, limit_ns, timeout_ns);
}
void Messages::wait_for_sends(int64_t timeout_ns) { lanes_->wait_for_sends(timeout_ns); }
void Messages::close() { lanes_->close(); }

}  // namespace ep::cpu
