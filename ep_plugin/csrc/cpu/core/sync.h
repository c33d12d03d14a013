// Functions with which CPU kernels begin and end a step, signal peers, wait for them, and record faults.
// cuda/core/sync.cuh, cuda/core/peer.cuh and cuda/moe/signals.cuh are the same for CUDA. common/layout.h has the words.
//
// Memory order. signal() stores with release order, and waits load with acquire order. So a rank that has waited for a
// word sees everything that its writer wrote before it.
// Waits. A wait ends when the value arrives, at an abort, at an interruption by the host, or at the deadline.
#pragma once
#include <ctime>

#include "common/views.h"

namespace ep::cpu {

// One kernel's execution of one step.
struct Run {
  const Comm& comm;
  Step step;
  uint64_t epoch;
};

int64_t now_ns();

// Sleeps until another process wakes sleepers on *word, at most for `most_ns`. Returns at once unless *word == seen.
void sleep_on(uint32_t* word, uint32_t seen, int64_t most_ns);
// Wakes up to `sleepers` threads that sleep on *word. The caller has changed its value.
void wake(uint32_t* word, int sleepers);

// Whether the host wants a wait that has lasted `waited_ns` to end (set_interruption). It checks now and then;
// `checked_ns` is the time of the last check.
bool interrupted(int64_t waited_ns, int64_t* checked_ns);

// False when an earlier kernel of this communicator has failed. Then the caller returns at once.
bool begin(const Comm& comm, Step step, Run* run);
// Advances the step's epoch.
void finish(const Run& run);

// The deadline of one wait. Call keep_waiting() after every poll that found nothing, or lasts() and pause otherwise.
class Deadline {
 public:
  // bounded: false if the caller ends the wait in time.
  explicit Deadline(bool bounded = true) : bounded_(bounded) {}

  // Pauses and returns true, or records a fault and returns false. A timeout names `peer`.
  bool keep_waiting(const Run& run, int peer, uint64_t expected, uint64_t seen);
  // Does the same without a pause. waited_ns: the time since the first call.
  bool lasts(const Run& run, int peer, uint64_t expected, uint64_t seen, int64_t* waited_ns);
  // Adds the time since the first call to State::waited_ns. Always returns true.
  bool met(const Run& run, int peer) const;

 private:
  bool bounded_;
  int64_t since_ = 0;
  int64_t checked_ = 0;
};

// Waits until *word >= value. False after a fault. A timeout names `peer`.
bool wait_at_least(const Run& run, const uint64_t* word, uint64_t value, int peer);
// Waits in the same way until *word has the tag of this epoch. `value` receives the rest of the word.
bool wait_tagged(const Run& run, const uint64_t* word, int peer, uint32_t* value);

// Stores with release order.
void signal(uint64_t* word, uint64_t value);

// Records the first fault of this communicator; later kernels exit at once. Always returns false.
bool fail(const Comm& comm, FaultCode code, Step step, int peer, int field, int64_t expected, int64_t seen);

// Stops at this step's test gate until the test opens it. Returns true at once if the step has no gate.
bool hold_at_gate(const Run& run);

// Waits for a source's Opening and compares it with this rank's header.
bool open_source(const Run& run, Pool pool, int source, const Header& mine, int64_t expected_tokens);

// Writes this rank's Opening at an owner, after the owner has read the previous epoch's rows.
bool open_destination(const Run& run, Pool pool, int owner, const Header& mine);

// Signals to `owner` that rows [begin, end) of this rank's chunk are in its pool.
void signal_chunk(const Run& run, Pool pool, int owner, int chunk, int begin, int end);

// Waits for a chunk of `source` and checks its range: it must begin at `begin` and end at or before `limit`.
bool wait_chunk(const Run& run, Pool pool, int source, int chunk, int begin, int limit, int* end);

}  // namespace ep::cpu
