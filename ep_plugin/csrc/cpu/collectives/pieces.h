// How CPU ranks of one node read each other's pieces, chunk by chunk, in whatever order they become available.
#pragma once
#include <algorithm>
#include <cstring>

#include "common/collectives.h"
#include "cpu/core/sync.h"

namespace ep::cpu {

// Empty shards may lie at null, which the standard's functions refuse even for no bytes.
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
}
inline void poison(void* output, int64_t bytes) {
  if (bytes > 0) std::memset(output, 0xFF, static_cast<size_t>(bytes));
}

inline CollectiveControl& control_of(const Comm& comm, int rank) { return *at<CollectiveControl>(comm.control[rank]); }

// One rank's side of one operation of `count` chunks, `chunk_bytes` of a shard each; of nothing it is one, since ranks
// compare what they offer.
class Pieces {
 public:
  Pieces(const Run& run, const Piece& piece, CollectiveOp op, int64_t element, int64_t chunk_bytes);

  int64_t count() const { return count_; }
  int64_t begin_of(int64_t chunk) const { return chunk * chunk_bytes_; }
  int64_t bytes_of(int64_t chunk) const { return std::min(chunk_bytes_, piece_.bytes - begin_of(chunk)); }
  bool staged() const { return piece_.block < 0; }

  // Whether peers have left the slot that this chunk goes to.
  bool slot_is_free(int64_t chunk) const;
  char* slot(int64_t chunk) const;
  // Makes the chunks before `end` available to peers; the first time with the Offer.
  void post(int64_t end);

  bool is_posted(int source, int64_t chunk) const;
  // The bytes of `source`'s shard for rank `dest`, this chunk of it, or null with a fault recorded. In a slot they lie
  // `slot_offset` from its beginning.
  const char* bytes_from(int source, int dest, int64_t chunk, int64_t slot_offset) const;
  // Signals to `source` that this rank has read its chunks before `end`.
  void consume(int source, int64_t end) const;

  // Whether to go on waiting for `source` to post a chunk, or for the slowest peer to read one.
  bool keep_waiting_for(Patience& patience, int source, int64_t chunk) const;
  bool keep_waiting_for_reader(Patience& patience, int64_t chunk) const;

  // Ends the operation: peers have read what they read in place, and the next one's chunks follow.
  bool finish();

 private:
  bool check_offer(int source, const Offer& theirs) const;
  int slowest_reader() const;

  const Run& run_;
  const Comm& comm_;
  const Piece& piece_;
  const CollectiveOp op_;
  const int64_t element_;
  const int64_t chunk_bytes_;
  const int64_t count_;
  const uint64_t base_;
  const uint64_t offer_;
};

// False when an earlier kernel of this communicator has failed: the caller leaves at once.
inline bool is_well(const Comm& comm) { return __atomic_load_n(&state_of(comm).fault, __ATOMIC_ACQUIRE) == 0; }

}  // namespace ep::cpu
