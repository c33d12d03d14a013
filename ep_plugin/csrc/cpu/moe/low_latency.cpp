// Waits, words and headers of low-latency kernels, see low_latency.h.
#include "cpu/moe/low_latency.h"

#include <sched.h>

#include <algorithm>

namespace ep::cpu {

namespace {

Step step_of(LlKind kind, LlPhase phase) {
  if (kind == kLlDispatch) return phase == kLlSend ? kLlDispatchSend : kLlDispatchRecv;
  return phase == kLlReceive ? kLlCombineRecv : kLlCombineSend;
}

void mask(const LlRun& ll, int peer) { __atomic_store_n(&ll.state().mask[peer], 1, __ATOMIC_RELAXED); }

// Signals to the peers whether this rank waits for another one.
void announce_wait(const LlRun& ll, bool waits) {
  uint64_t& count = ll.state().waits;
  if (count % 2 == static_cast<uint64_t>(waits)) return;
  ++count;
  for (int peer = 0; peer < ll.op.comm.num_ranks; ++peer)
    __atomic_store_n(ll.block(peer).waiting(ll.op.comm.rank), static_cast<uint32_t>(count), __ATOMIC_RELAXED);
}

// The deadline after which a wait with `shrink` masks its peer. A peer that has waited itself gets more time, see
// low_latency.h.
class MaskDeadline {
 public:
  bool passed(const LlRun& ll, int peer, int64_t now) {
    const auto waits = [&] { return __atomic_load_n(ll.own().waiting(peer), __ATOMIC_RELAXED); };
    if (since_ == 0) since_ = now, waits_ = waits();
    const int64_t waited = now - since_, most = ll.op.comm.timeout_ns;
    if (waited > most / 2) announce_wait(ll, true);
    if (waited <= most) return false;
    const uint32_t latest = waits();
    const bool has_waited = latest % 2 != 0 || latest != waits_;
    if (!has_waited || ++renewed_ > ll.op.comm.num_ranks) return true;
    since_ = now, waits_ = latest;
    return false;
  }

 private:
  int64_t since_ = 0;
  uint32_t waits_ = 0;
  int renewed_ = 0;
};

// A wait yields its core for this long, since the peer may run on the same core. Then it sleeps until a peer rings.
constexpr int64_t kYieldNs = 400'000;
constexpr int64_t kNapNs = 1'000'000;  // the longest sleep between two looks at the deadline, at masks and at aborts

// Sleeps until `peer` rings, if arrived() is still false. The fence guarantees that this rank sees what has arrived, or
// the peer sees that this rank waits for it.
template <class Arrived>
void sleep(const LlRun& ll, int peer, Arrived arrived) {
  LlBell& bell = ll.own().bell();
  __atomic_store_n(&bell.awaits, static_cast<uint32_t>(peer) + 1, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  const uint32_t rings = __atomic_load_n(&bell.rings, __ATOMIC_ACQUIRE);
  if (!arrived()) sleep_on(&bell.rings, rings, kNapNs);
  __atomic_store_n(&bell.awaits, 0, __ATOMIC_RELAXED);
}

// Waits until arrived() returns true. `seen` is the value at which arrived() has looked last.
template <class Arrived>
Wait wait(const LlRun& ll, int peer, uint64_t expected, const uint64_t& seen, Arrived arrived) {
  Deadline deadline(ll.op.shrink == 0);
  MaskDeadline to_mask;
  int64_t since = 0, waited = 0;
  for (;;) {
    if (ll.masked(peer)) return Wait::kMasked;
    if (arrived()) break;
    const int64_t now = now_ns();
    if (since == 0) since = now;
    if (ll.op.shrink != 0 && to_mask.passed(ll, peer, now)) {
      mask(ll, peer);
      return Wait::kMasked;
    }
    if (!deadline.lasts(ll.run, peer, expected, seen, &waited)) return Wait::kFault;
    if (waited < kYieldNs)
      sched_yield();
    else
      sleep(ll, peer, arrived);
  }
  if (since != 0 && ll.run.step != kLlDispatchSend && ll.op.wait_cost != 0)
    at<int64_t>(ll.op.wait_cost)[ll_rank_here(ll.op, peer)] += now_ns() - since;
  return Wait::kThere;
}

}  // namespace

bool ll_begin(const LlOperation& op, LlKind kind, LlPhase phase, LlRun* ll) {
  if (__atomic_load_n(&state_of(op.comm).fault, __ATOMIC_ACQUIRE) != 0) return false;
  const LlState& state = ll->state();
  ll->run.step = step_of(kind, phase);
  ll->run.epoch = phase == kLlSend ? state.epoch[kind] + 1 : state.slot_epoch[kind][op.slot];
  ll->parity = ll_parity(ll->run.epoch);
  return true;
}

void ll_ring(const LlRun& ll, int peer) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  LlBell& bell = ll.block(peer).bell();
  if (__atomic_load_n(&bell.awaits, __ATOMIC_RELAXED) != static_cast<uint32_t>(ll.op.comm.rank) + 1) return;
  __atomic_fetch_add(&bell.rings, 1, __ATOMIC_RELEASE);
  wake(&bell.rings, 1);
}

void ll_finish_send(const LlRun& ll) {
  announce_wait(ll, false);
  ll.state().epoch[ll.kind] = ll.run.epoch;
  ll.state().slot_epoch[ll.kind][ll.op.slot] = ll.run.epoch;
}

void ll_ring_all(const LlRun& ll) {
  for (int peer = 0; peer < ll.op.comm.num_ranks; ++peer)
    if (!ll.masked(peer)) ll_ring(ll, peer);
}

void ll_finish_receive(const LlRun& ll) {
  announce_wait(ll, false);
  const Comm& comm = ll.op.comm;
  for (int peer = 0; peer < comm.num_ranks; ++peer)
    if (!ll.masked(peer)) signal(ll.block(peer).consumed(ll.kind, ll.parity, comm.rank), ll.run.epoch);
  ll_ring_all(ll);
}

Wait ll_wait_flag(const LlRun& ll, int peer, const uint64_t* flag) {
  uint64_t seen = 0;
  return wait(ll, peer, ll.run.epoch, seen, [&] {
    seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    return seen >= ll.run.epoch;
  });
}

Wait ll_wait_consumed(const LlRun& ll, int peer) {
  if (ll.run.epoch <= kLlParities) return ll.masked(peer) ? Wait::kMasked : Wait::kThere;
  const uint64_t* word = ll.own().consumed(ll.kind, ll.parity, peer);
  const uint64_t wanted = ll.run.epoch - kLlParities;
  uint64_t seen = 0;
  return wait(ll, peer, wanted, seen, [&] {
    seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    return seen >= wanted;
  });
}

Wait ll_wait_words(const LlRun& ll, int peer, const LlWord* from, void* data, int64_t bytes) {
  const uint32_t tag = static_cast<uint32_t>(ll.run.epoch);
  uint64_t seen = 0;
  for (int64_t done = 0; done < bytes; done += kLlWordBytes, ++from) {
    const Wait found = wait(ll, peer, tag, seen, [&] {
      seen = __atomic_load_n(&from->epoch, __ATOMIC_ACQUIRE);
      return seen == tag;
    });
    if (found != Wait::kThere) return found;
    std::memcpy(static_cast<char*>(data) + done, from->unit, std::min<int64_t>(kLlWordBytes, bytes - done));
  }
  return Wait::kThere;
}

void ll_write_words(const LlRun& ll, LlWord* to, const void* data, int64_t bytes) {
  const uint32_t tag = static_cast<uint32_t>(ll.run.epoch);
  const int64_t words = std::max<int64_t>(1, ll_words(bytes));
  for (int64_t word = 0; word < words; ++word) {
    const int64_t done = word * kLlWordBytes, count = std::min<int64_t>(kLlWordBytes, bytes - done);
    if (count > 0) std::memcpy(to[word].unit, static_cast<const char*>(data) + done, count);
    __atomic_store_n(&to[word].epoch, tag, __ATOMIC_RELEASE);
  }
}

LlHeader ll_own_header(const LlRun& ll) {
  LlHeader header = ll.op.header;
  for (uint32_t& word : header.mask) word = 0;
  for (int rank = 0; rank < ll.op.comm.num_ranks; ++rank)
    header.mask[rank / 32] |= static_cast<uint32_t>(ll.masked(rank)) << rank % 32;
  return header;
}

Wait ll_open(const LlRun& ll, int peer, const LlWord* words, LlHeader* header) {
  const Comm& comm = ll.op.comm;
  const Wait found = ll_wait_words(ll, peer, words, header, sizeof(LlHeader));
  if (found != Wait::kThere) return found;
  const LlHeader& mine = ll.op.header;
  const int field = ll_header_mismatch(mine, *header);
  if (field >= 0) {
    const int32_t ours = reinterpret_cast<const int32_t*>(&mine)[field];
    fail(comm, kDisagree, ll.run.step, peer, field, ours, reinterpret_cast<const int32_t*>(header)[field]);
    return Wait::kFault;
  }
  if (header->num_tokens < 0 || header->num_tokens > mine.max_tokens) {
    fail(comm, kBadData, ll.run.step, peer, 0, mine.max_tokens, header->num_tokens);
    return Wait::kFault;
  }
  if (has_rank(header->mask, comm.rank)) {
    fail(comm, kMasked, ll.run.step, peer, 0, 0, 1);
    return Wait::kFault;
  }
  for (int rank = 0; rank < comm.num_ranks; ++rank)
    if (has_rank(header->mask, rank)) mask(ll, rank);
  return Wait::kThere;
}

}  // namespace ep::cpu
