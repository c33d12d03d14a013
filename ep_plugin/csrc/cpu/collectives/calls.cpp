#include "common/collectives.h"
#include "common/views.h"

namespace ep {

namespace {

Call& row_of(Address ring, uint64_t number) { return at<Call>(ring)[number % kCalls]; }

void post(Call& row, uint64_t number, const CallWords& words) {
  __atomic_store_n(&row.number, 0, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);  // whoever reads one of the next words finds the number gone
  for (int field = 0; field < kCallFields; ++field) __atomic_store_n(&row.words[field], words[field], __ATOMIC_RELAXED);
  __atomic_store_n(&row.number, number, __ATOMIC_RELEASE);
}

// Whether the row is that of `number`, read before its rank has begun another.
bool read(const Call& row, uint64_t number, CallWords* words) {
  if (__atomic_load_n(&row.number, __ATOMIC_ACQUIRE) != number) return false;
  for (int field = 0; field < kCallFields; ++field)
    (*words)[field] = __atomic_load_n(&row.words[field], __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&row.number, __ATOMIC_RELAXED) == number;
}

}  // namespace

bool post_call(Address rings, int num_ranks, int rank, uint64_t number, const CallWords& words, CallDifference* found) {
  const Address* ring = at<const Address>(rings);
  post(row_of(ring[rank], number), number, words);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // of two ranks that post at once, one sees the other's
  for (int peer = 0; peer < num_ranks; ++peer) {
    CallWords theirs;
    if (peer == rank || !read(row_of(ring[peer], number), number, &theirs)) continue;
    for (int field = 0; field < kCallFields; ++field) {
      if (theirs[field] == words[field]) continue;
      *found = CallDifference{peer, field + 1, words[field], theirs[field]};
      return true;
    }
  }
  return false;
}

}  // namespace ep
