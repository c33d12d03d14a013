#include "control/high_throughput.h"

#include <algorithm>

#include "common/board.h"

namespace ep::control {

namespace {

constexpr int64_t kSpareRows = 256;
constexpr int64_t kMostSpread = 16;  // remembered counts may differ by this part of the largest, plus kSpareRows
constexpr int64_t kLeastPool = 4096;

}  // namespace

void Expected::saw(int64_t num_tokens, int64_t topk, const Rows& rows) {
  if (num_tokens != num_tokens_ || topk != topk_) count_ = 0;
  num_tokens_ = num_tokens;
  topk_ = topk;
  seen_[count_++ % kRemembered] = rows;
}

bool Expected::guess(int64_t num_tokens, int64_t topk, Rows* room) const {
  if (num_tokens != num_tokens_ || topk != topk_ || count_ == 0) return false;
  const auto end = seen_.begin() + std::min<int64_t>(count_, kRemembered);
  for (int64_t Rows::* field : {&Rows::output, &Rows::slots}) {
    const auto [least, most] =
        std::minmax_element(seen_.begin(), end, [&](const Rows& a, const Rows& b) { return a.*field < b.*field; });
    const int64_t largest = (*most).*field;
    if (largest - (*least).*field > largest / kMostSpread + kSpareRows) return false;
    room->*field = largest + largest / 64 + kSpareRows;
  }
  return true;
}

int64_t HighThroughput::room_for(int pool, int64_t needed) const {
  return needed <= comm->pool_bytes[pool] ? needed : std::max(needed + needed / 4, kLeastPool);
}

bool HighThroughput::reserve(int pool, int64_t nbytes) {
  static PyObject* const grow = interned("grow");
  if (comm->pool_bytes[pool] < nbytes) {
    const Object of(PyLong_FromLong(pool)), to(PyLong_FromLongLong(nbytes));
    if (!of || !to || !call_owner(grow, of.get(), to.get())) return false;
  }
  __atomic_store_n(&at<Board>(board)->reserved_pools, ++reserved, __ATOMIC_RELEASE);
  return true;
}

bool HighThroughput::has_totals(uint64_t ticket) const {
  return !denies_totals && __atomic_load_n(&at<Board>(board)->ticket, __ATOMIC_ACQUIRE) >= ticket;
}

bool HighThroughput::wait_totals(uint64_t ticket) const {
  static PyObject* const overdue = interned("totals_are_overdue");
  WaitResult result = kReady;
  if (!run_unlocked([&] { result = wait_ticket(board, ticket, totals_ns); })) return false;
  return result == kReady || call_owner(overdue);  // which raises
}

bool HighThroughput::join() const {
  uint64_t caller = 0;
  return current_stream(&caller) && run([&] {
           if (streams.enter) streams.enter(caller, 0, 0);
         });
}

}  // namespace ep::control
