// The host's functions for boards: wait for totals, record faults and aborts. common/layout.h defines the Board.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "common/views.h"

namespace ep {

// Sets a function that every wait of the host and of the CPU kernels calls now and then, in the waiting thread. If it
// returns true, the wait ends as if this rank had aborted. Call it once, before anything waits.
void set_interruption(bool (*wanted)());

enum WaitResult : int { kReady = 0, kFaulted = 1, kAbortedByPeer = 2, kOverdue = 3, kInterrupted = 4 };

// Waits, spinning briefly and then sleeping, until the notify `ticket` has stored its totals, a fault is recorded,
// a peer has aborted, the wait is interrupted, or `timeout_ns` has passed.
WaitResult wait_ticket(Address board, uint64_t ticket, int64_t timeout_ns);

// Waits in the same way until `there` returns true.
WaitResult wait_until(const std::function<bool()>& there, Address board, int64_t timeout_ns);

// Whether the board has neither a fault nor an abort.
inline bool is_quiet(Address board) {
  const Board& words = *at<Board>(board);
  return __atomic_load_n(&words.fault_set, __ATOMIC_ACQUIRE) == 0 &&
         __atomic_load_n(&words.abort, __ATOMIC_ACQUIRE) == 0;
}

// Writes an abort by `rank` to a board. The first abort stays.
void abort_board(Address board, int rank, const std::string& reason);

// Records a fault, which the host has found, on this rank's board. The first fault stays.
void fault_board(Address board, int code, int step, int peer, int64_t expected, int64_t seen);

// These keep a list of the boards of this process's communicators. announce() writes `text` to each board, as the
// host's activity.
void list_board(Address board);
void unlist_board(Address board);
void announce(const std::string& text);

// The first id that is outside [-1, num_experts) or repeated within its token. find_bad_id() returns false if there is
// none.
struct BadId {
  int64_t token;
  int64_t k;
  int64_t id;
  bool repeated;
};
bool find_bad_id(Address ids, int id_bytes, int64_t num_tokens, int64_t topk, int64_t num_experts, BadId* found);

}  // namespace ep
