// Calls that hosts post in host memory that all ranks of the node map, so that the host that posts second compares
// them.
// Memory order. A row is like a seqlock: its number is 0 while the words change. A reader loads the number, the words,
// and the number again.
#include "common/collectives.h"
#include "common/views.h"

namespace ep {

namespace {

CallRow& row_of(Address ring, uint64_t number) { return at<CallRow>(ring)[number % kCalls]; }

void post(CallRow& row, uint64_t number, const CallWords& words) {
  __atomic_store_n(&row.number, 0, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);  // a reader that sees a new word also sees that the number has changed
  for (int field = 0; field < kCallFields; ++field) __atomic_store_n(&row.words[field], words[field], __ATOMIC_RELAXED);
  __atomic_store_n(&row.number, number, __ATOMIC_RELEASE);
}

// Reads a row. False if its rank has not posted `number`, or has begun to overwrite the row.
bool read(const CallRow& row, uint64_t number, CallWords* words) {
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
  // Of two ranks that post at the same time, at least one sees the other's call.
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
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
