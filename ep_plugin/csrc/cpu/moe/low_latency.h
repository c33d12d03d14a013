// Functions that both low-latency kernels of CPUs share: waits that a mask ends, words, headers, and consumed words.
// common/low_latency.h has the layout and the rules.
#pragma once
#include <cstring>

#include "common/low_latency_args.h"
#include "cpu/core/sync.h"

namespace ep::cpu {

// One half of one operation. `run` names it in faults.
struct LlRun {
  const LlOperation& op;
  LlKind kind;
  Run run;
  int parity;

  LlState& state() const { return ll_state_of(op); }
  LlBlock block(int rank) const { return ll_block(op, rank); }
  LlBlock own() const { return block(op.comm.rank); }
  bool masked(int rank) const { return __atomic_load_n(&state().mask[rank], __ATOMIC_RELAXED) != 0; }
};

enum class Wait { kThere, kMasked, kFault };

// Begins a half of an operation. False if an earlier kernel of this communicator has failed.
bool ll_begin(const LlOperation& op, LlKind kind, LlPhase phase, LlRun* ll);
// Ends a send half: advances the epoch.
void ll_finish_send(const LlRun& ll);
// Ends a receive half: signals to the peers that this rank has read everything that they wrote.
void ll_finish_receive(const LlRun& ll);

// Wakes a peer that sleeps until this rank has written something, or every such peer. A peer that is not woken still
// sees the new data a moment later. So it is enough to call this after the last store that the peer waits for.
void ll_ring(const LlRun& ll, int peer);
void ll_ring_all(const LlRun& ll);

// These wait for a flag, for `bytes` bytes of words, and for a peer's consumed word. The time counts in wait_cost,
// except in the send half of a dispatch.
Wait ll_wait_flag(const LlRun& ll, int peer, const uint64_t* flag);
Wait ll_wait_words(const LlRun& ll, int peer, const LlWord* from, void* data, int64_t bytes);
Wait ll_wait_consumed(const LlRun& ll, int peer);

// Writes words with the tag of this epoch.
void ll_write_words(const LlRun& ll, LlWord* to, const void* data, int64_t bytes);
// Refreshes one of `count` words, see ll_refreshed(). is_written(index): this operation writes it anyway.
template <class IsWritten>
void ll_refresh(const LlRun& ll, LlWord* words, int64_t count, IsWritten is_written) {
  const int64_t index = ll_refreshed(ll.run.epoch, count);
  if (!is_written(index)) ll_write_words(ll, words + index, nullptr, 0);
}

// Returns this operation's header as this rank sends it.
LlHeader ll_own_header(const LlRun& ll);
// Waits for the header of `peer` in its words, compares it with this rank's, and adopts its masks.
Wait ll_open(const LlRun& ll, int peer, const LlWord* words, LlHeader* header);

}  // namespace ep::cpu
