// How CPU kernels signal peers, wait for them, and fail. Every wait ends by the value, an abort, or the deadline.
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

// Whether the host wants a wait to end that has lasted `waited_ns`. Asks now and then: `asked_ns` is when it last did.
bool interrupted(int64_t waited_ns, int64_t* asked_ns);

// False when an earlier kernel of this communicator has failed: the caller leaves at once.
bool begin(const Comm& comm, Step step, Run* run);
void finish(const Run& run);

// One wait. Call keep_waiting() after every poll that found nothing.
class Patience {
 public:
  // False, with the fault recorded (blaming `peer`), on a deadline, an abort or an interruption; else rests a little.
  bool keep_waiting(const Run& run, int peer, uint64_t expected, uint64_t seen);

 private:
  int64_t since_ = 0;
  int64_t asked_ = 0;
};

// Waits until *word >= value. On a deadline or an abort: records the fault (blaming `peer`) and returns false.
bool wait_at_least(const Run& run, const uint64_t* word, uint64_t value, int peer);
// Likewise until *word has this epoch's tag; `value` is the rest of it.
bool wait_tagged(const Run& run, const uint64_t* word, int peer, uint32_t* value);

// Stores with release order: a thread that acquires the value sees everything written before.
void signal(uint64_t* word, uint64_t value);

// Records the first fault of this communicator; later kernels leave at once. Always returns false.
bool fail(const Comm& comm, FaultCode code, Step step, int peer, int field, int64_t expected, int64_t seen);

// Holds a rank at its test gate; without one, returns true at once.
bool gate(const Run& run);

// Waits for a source's Opening and checks it against this rank's header.
bool open_source(const Run& run, Pool pool, int source, const Header& mine, int64_t expected_tokens);

// Writes this rank's Opening at an owner, after the owner has read the previous epoch's rows.
bool open_destination(const Run& run, Pool pool, int owner, const Header& mine);

// Signals to `owner` that rows [begin, end) of this rank's chunk are in its pool.
void signal_chunk(const Run& run, Pool pool, int owner, int chunk, int begin, int end);

// Waits for a chunk of `source` and checks its range: it continues at `begin` and stays within `limit`.
bool wait_chunk(const Run& run, Pool pool, int source, int chunk, int begin, int limit, int* end);

}  // namespace ep::cpu
