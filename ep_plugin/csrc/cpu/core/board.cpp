// The host's functions for boards, declared in common/board.h.
#include "common/board.h"

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <vector>

#include "cpu/core/sync.h"

namespace ep {

namespace {
Board& board_at(Address address) { return *at<Board>(address); }

std::mutex listing;
std::vector<Address> listed;
std::string announced;  // on all of them; empty: not on all

template <class Id>
bool find_bad_id_as(const Id* ids, int64_t num_tokens, int64_t topk, int64_t num_experts, BadId* found) {
  std::vector<int64_t> last_token(static_cast<size_t>(num_experts), -1);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t id = ids[t * topk + k];
      if (id == -1) continue;
      const bool inside = id >= 0 && id < num_experts;
      if (inside && last_token[id] != t) {
        last_token[id] = t;
        continue;
      }
      *found = BadId{t, k, id, inside};
      return true;
    }
  }
  return false;
}
}  // namespace

WaitResult wait_ticket(Address address, uint64_t ticket, int64_t timeout_ns) {
  const uint64_t* word = at<const uint64_t>(address, offsetof(Board, ticket));
  return wait_until([=] { return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= ticket; }, address, timeout_ns);
}

WaitResult wait_until(const std::function<bool()>& there, Address address, int64_t timeout_ns) {
  const Board& board = board_at(address);
  const int64_t since = cpu::now_ns();
  int64_t checked = 0;
  for (;;) {
    if (there()) return kReady;
    if (__atomic_load_n(&board.fault_set, __ATOMIC_ACQUIRE) != 0) return kFaulted;
    if (__atomic_load_n(&board.abort, __ATOMIC_ACQUIRE) != 0) return kAbortedByPeer;
    const int64_t waited = cpu::now_ns() - since;
    if (waited > timeout_ns) return kOverdue;
    if (cpu::interrupted(waited, &checked)) return kInterrupted;
    if (waited > 20'000'000) {  // sleeping sooner would delay hosts that are far ahead of their devices
      const timespec pause{0, 50'000};
      nanosleep(&pause, nullptr);
    } else if (waited > 50'000) {
      sched_yield();
    }
  }
}

void abort_board(Address address, int rank, const std::string& reason) {
  Board& board = board_at(address);
  uint32_t none = 0;
  const uint32_t me = static_cast<uint32_t>(rank + 1);
  if (!__atomic_compare_exchange_n(&board.abort_claim, &none, me, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
  std::snprintf(board.reason, sizeof(board.reason), "%s", reason.c_str());
  __atomic_store_n(&board.abort, me, __ATOMIC_RELEASE);
}

void fault_board(Address address, int code, int step, int peer, int64_t expected, int64_t seen) {
  Board& board = board_at(address);
  if (__atomic_load_n(&board.fault_set, __ATOMIC_ACQUIRE) != 0) return;
  board.fault = Fault{code, step, peer, 0, expected, seen};
  __atomic_store_n(&board.fault_set, 1u, __ATOMIC_RELEASE);
}

void list_board(Address address) {
  const std::lock_guard<std::mutex> lock(listing);
  listed.push_back(address);
  announced.clear();
}

void unlist_board(Address address) {
  const std::lock_guard<std::mutex> lock(listing);
  listed.erase(std::remove(listed.begin(), listed.end(), address), listed.end());
}

void announce(const std::string& text) {
  const std::lock_guard<std::mutex> lock(listing);
  if (text == announced) return;
  announced = text;
  for (const Address address : listed) {
    Board& board = board_at(address);
    std::snprintf(board.activity, sizeof(board.activity), "%s", text.c_str());
  }
}

bool find_bad_id(Address ids, int id_bytes, int64_t num_tokens, int64_t topk, int64_t num_experts, BadId* found) {
  return id_bytes == 8 ? find_bad_id_as(at<const int64_t>(ids), num_tokens, topk, num_experts, found)
                       : find_bad_id_as(at<const int32_t>(ids), num_tokens, topk, num_experts, found);
}

}  // namespace ep
