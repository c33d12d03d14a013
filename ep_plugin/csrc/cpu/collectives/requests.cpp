// Requests for blocks and releases, in host memory that all ranks of the node map. collectives/blocks.py uses them.
// Memory order. Posts and releases are stored with release order and loaded with acquire order, so a peer that sees a
// request also sees the releases before it.
#include "common/collectives.h"
#include "common/views.h"

namespace ep {

namespace {
uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
}  // namespace

void post_request(Address requests, uint64_t number, int64_t bytes, Address uses) {
  Requests& mine = *at<Requests>(requests);
  uint64_t free = 0;
  for (int block = 0; block < kMaxPeerBlocks; ++block)
    if (load(mine.released[block]) == at<const uint64_t>(uses)[block]) free |= uint64_t{1} << block;
  Request& row = mine.rows[number % kRequests];
  row.bytes = bytes;
  row.free = free;
  __atomic_store_n(&row.number, number, __ATOMIC_RELEASE);
}

void release_block(Address requests, int block, uint64_t uses) {
  uint64_t& released = at<Requests>(requests)->released[block];
  if (load(released) < uses) __atomic_store_n(&released, uses, __ATOMIC_RELEASE);
}

WaitResult was_free(Address requests, int block, uint64_t uses, uint64_t number, Address board, int64_t timeout_ns,
                    bool* free) {
  const Requests& theirs = *at<const Requests>(requests);
  const Request& row = theirs.rows[number % kRequests];
  const auto known = [&] {
    *free = load(theirs.released[block]) >= uses;  // before the post is looked for
    if (load(row.number) != number) return *free;
    *free = (row.free >> block & 1) != 0;
    return true;
  };
  return wait_until(known, board, timeout_ns);
}

}  // namespace ep
