// What both low-latency kernels of CPUs share: waits that a mask ends, words, headers, and the consumed words.
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

// False when an earlier kernel of this communicator has failed.
bool ll_begin(const LlOperation& op, LlKind kind, LlPhase phase, LlRun* ll);
// Ends a send half: advances the epoch.
void ll_finish_send(const LlRun& ll);
// Ends a receive half: signals to the peers that what they wrote has been read.
void ll_finish_receive(const LlRun& ll);

// Wakes a peer that sleeps until this rank has written something, or every such peer. A peer that is not woken sees
// what was written a moment later, so it is enough to do so after the last of what it waits for.
void ll_ring(const LlRun& ll, int peer);
void ll_ring_all(const LlRun& ll);

// Wait for a flag, for `bytes` bytes of words, and for a peer's consumed word. All but a dispatch's send half count in
// wait_cost.
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

// This operation's header as this rank sends it.
LlHeader ll_own_header(const LlRun& ll);
// Waits for the header of `peer` in its words, compares it with this rank's, and adopts its masks.
Wait ll_open(const LlRun& ll, int peer, const LlWord* words, LlHeader* header);

}  // namespace ep::cpu
