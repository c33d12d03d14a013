// Signals, waits and faults of CPU kernels, see sync.h.
#include "cpu/core/sync.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/board.h"

namespace ep {

namespace {
bool (*interruption_wanted)() = nullptr;
}

void set_interruption(bool (*wanted)()) { interruption_wanted = wanted; }

namespace cpu {

namespace {
constexpr int64_t kYieldNs = 200'000;  // a wait yields its core for so long, then sleeps between polls
constexpr int64_t kSleepNs = 50'000;
constexpr int64_t kInterruptCheckNs = 20'000'000;  // a check may need the interpreter's lock

uint64_t load_acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

bool aborted(const Run& run) {
  const uint32_t by = __atomic_load_n(&board_of(run.comm).abort, __ATOMIC_ACQUIRE);
  if (by == 0) return false;
  fail(run.comm, kAborted, run.step, static_cast<int>(by) - 1, 0, 0, 0);
  return true;
}

// Records an interruption as an abort by this rank. The host then writes the reason to the peers' boards.
bool fail_interrupted(const Run& run) { return fail(run.comm, kAborted, run.step, run.comm.rank, 0, 0, 0); }

void pause(int64_t waited_ns) {
  if (waited_ns < kYieldNs) {
    sched_yield();
  } else {
    const timespec time{0, kSleepNs};
    nanosleep(&time, nullptr);
  }
}
}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void sleep_on(uint32_t* word, uint32_t seen, int64_t most_ns) {
  const timespec time{0, most_ns};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake(uint32_t* word, int sleepers) { syscall(SYS_futex, word, FUTEX_WAKE, sleepers, nullptr, nullptr, 0); }

bool interrupted(int64_t waited_ns, int64_t* checked_ns) {
  if (interruption_wanted == nullptr || waited_ns - *checked_ns < kInterruptCheckNs) return false;
  *checked_ns = waited_ns;
  return interruption_wanted();
}

bool begin(const Comm& comm, Step step, Run* run) {
  State& state = state_of(comm);
  if (__atomic_load_n(&state.fault, __ATOMIC_ACQUIRE) != 0) return false;
  run->step = step;
  run->epoch = state.epoch[step - 1] + 1;
  return true;
}

void finish(const Run& run) { state_of(run.comm).epoch[run.step - 1] = run.epoch; }

bool fail(const Comm& comm, FaultCode code, Step step, int peer, int field, int64_t expected, int64_t seen) {
  State& state = state_of(comm);
  uint64_t none = 0;
  if (__atomic_compare_exchange_n(&state.fault, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    Board& board = board_of(comm);
    board.fault = Fault{code, step, peer, field, expected, seen};
    __atomic_store_n(&board.fault_set, 1, __ATOMIC_RELEASE);
  }
  return false;
}

bool Deadline::lasts(const Run& run, int peer, uint64_t expected, uint64_t seen, int64_t* waited_ns) {
  const int64_t now = now_ns();
  if (since_ == 0) since_ = now;
  const int64_t waited = *waited_ns = now - since_;
  if (aborted(run)) return false;
  if (bounded_ && waited > run.comm.timeout_ns)
    return fail(run.comm, kTimeout, run.step, peer, 0, static_cast<int64_t>(expected), static_cast<int64_t>(seen));
  if (interrupted(waited, &checked_)) return fail_interrupted(run);
  return true;
}

bool Deadline::keep_waiting(const Run& run, int peer, uint64_t expected, uint64_t seen) {
  int64_t waited = 0;
  if (!lasts(run, peer, expected, seen, &waited)) return false;
  pause(waited);
  return true;
}

bool Deadline::met(const Run& run, int peer) const {
  if (since_ != 0) state_of(run.comm).waited_ns[peer] += now_ns() - since_;
  return true;
}

bool wait_at_least(const Run& run, const uint64_t* word, uint64_t value, int peer) {
  Deadline deadline;
  for (;;) {
    const uint64_t seen = load_acquire(word);
    if (seen >= value) return deadline.met(run, peer);
    if (!deadline.keep_waiting(run, peer, value, seen)) return false;
  }
}

bool wait_tagged(const Run& run, const uint64_t* word, int peer, uint32_t* value) {
  Deadline deadline;
  for (;;) {
    const uint64_t seen = load_acquire(word);
    *value = static_cast<uint32_t>(seen);
    if (has_tag(seen, run.epoch)) return deadline.met(run, peer);
    if (!deadline.keep_waiting(run, peer, run.epoch & UINT32_MAX, seen >> 32)) return false;
  }
}

void signal(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

bool hold_at_gate(const Run& run) {
  if (run.comm.gate != run.step) return true;
  Board& board = board_of(run.comm);
  __atomic_store_n(&board.gate_reached, static_cast<uint32_t>(run.step), __ATOMIC_RELEASE);
  const int64_t since = now_ns();
  int64_t checked = 0;
  while (__atomic_load_n(&board.gate_open, __ATOMIC_ACQUIRE) == 0) {
    if (aborted(run)) return false;
    const int64_t waited = now_ns() - since;
    if (waited > run.comm.timeout_ns) return fail(run.comm, kTimeout, run.step, run.comm.rank, 0, 1, 0);
    if (interrupted(waited, &checked)) return fail_interrupted(run);
    pause(kYieldNs);
  }
  return true;
}

bool open_destination(const Run& run, Pool pool, int owner, const Header& mine) {
  const Comm& comm = run.comm;
  if (!wait_at_least(run, consumed_word(comm, comm.rank, pool, owner), run.epoch - 1, owner)) return false;
  Opening* word = opening(comm, owner, pool, comm.rank);
  word->header = mine;
  signal(&word->flag, run.epoch);
  return true;
}

bool open_source(const Run& run, Pool pool, int source, const Header& mine, int64_t expected_tokens) {
  const Opening* word = opening(run.comm, run.comm.rank, pool, source);
  if (!wait_at_least(run, &word->flag, run.epoch, source)) return false;
  const int field = header_mismatch(mine, word->header);
  if (field >= 0) {
    const int64_t* ours = reinterpret_cast<const int64_t*>(&mine);
    const int64_t* theirs = reinterpret_cast<const int64_t*>(&word->header);
    return fail(run.comm, kDisagree, run.step, source, field, ours[field], theirs[field]);
  }
  if (expected_tokens >= 0 && word->header.num_tokens != expected_tokens)
    return fail(run.comm, kDisagree, run.step, source, kComparedFields, expected_tokens, word->header.num_tokens);
  return true;
}

void signal_chunk(const Run& run, Pool pool, int owner, int chunk, int begin, int end) {
  Arrival* word = arrival(run.comm, owner, pool, run.comm.rank, chunk);
  word->begin = begin;
  word->end = end;
  signal(&word->flag, run.epoch);
}

bool wait_chunk(const Run& run, Pool pool, int source, int chunk, int begin, int limit, int* end) {
  const Arrival* word = arrival(run.comm, run.comm.rank, pool, source, chunk);
  if (!wait_at_least(run, &word->flag, run.epoch, source)) return false;
  const int first = word->begin, last = word->end;
  if (first != begin || last < first || last > limit)
    return fail(run.comm, kBadData, run.step, source, chunk, begin, first != begin ? first : last);
  *end = last;
  return true;
}

}  // namespace cpu

}  // namespace ep
