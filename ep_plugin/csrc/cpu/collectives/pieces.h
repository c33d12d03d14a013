// How CPU ranks of one node read each other's pieces, chunk by chunk, in the order in which they become available.
//
// A rank posts chunks: it stores the count of its available chunks. Peers read a chunk in the owner's cells, or in its
// block, and store how many chunks they have read. A cell is used again when all peers have read its chunk. Counts go
// on over all operations.
// Buffers. CollectiveControl in common/collectives.h.
// Memory order. Counts are stored with release order and loaded with acquire order, so a chunk's bytes are there when
// it is posted, and read when it is consumed.
#pragma once
#include <algorithm>
#include <cstring>

#include "common/collectives.h"
#include "cpu/core/sync.h"

namespace ep::cpu {

// Empty shards may be at address 0, for which memmove and memset are undefined even with no bytes.
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
}
inline void poison(void* output, int64_t bytes) {
  if (bytes > 0) std::memset(output, 0xFF, static_cast<size_t>(bytes));
}

inline CollectiveControl& control_of(const Comm& comm, int rank) {
  return *at<CollectiveControl>(control_at(comm, rank));
}

// One rank's side of one operation of count() chunks, each of `chunk_bytes` of a shard. An empty shard has one chunk,
// too, because ranks compare sizes and types.
class Pieces {
 public:
  Pieces(const Run& run, const Piece& piece, CollectiveOp op, int64_t element, int64_t chunk_bytes);

  int64_t count() const { return count_; }
  int64_t begin_of(int64_t chunk) const { return chunk * chunk_bytes_; }
  int64_t bytes_of(int64_t chunk) const { return std::min(chunk_bytes_, piece_.bytes - begin_of(chunk)); }
  bool staged() const { return piece_.block < 0; }

  // Whether all peers have read the chunk that used this chunk's cell before.
  bool cell_is_free(int64_t chunk) const;
  char* cell(int64_t chunk) const;
  // Makes the chunks before `end` available to peers. The first call also posts the PieceHeader.
  void post(int64_t end);

  bool is_posted(int source, int64_t chunk) const;
  // The address of this chunk of `source`'s shard for rank `dest`; null after a fault. In a cell, the chunk begins at
  // `cell_offset`.
  const char* bytes_from(int source, int dest, int64_t chunk, int64_t cell_offset) const;
  // Signals to `source` that this rank has read its chunks before `end`.
  void consume(int source, int64_t end) const;

  // keep_waiting() of a wait until `source` has posted a chunk, or until the slowest peer has read one.
  bool keep_waiting_for(Deadline& deadline, int source, int64_t chunk) const;
  bool keep_waiting_for_reader(Deadline& deadline, int64_t chunk) const;

  // Ends the operation. If peers read this rank's block, waits until all have. False after a fault.
  bool finish();

 private:
  bool check_header(int source, const PieceHeader& theirs) const;
  int slowest_reader() const;

  const Run& run_;
  const Comm& comm_;
  const Piece& piece_;
  const CollectiveOp op_;
  const int64_t element_;
  const int64_t chunk_bytes_;
  const int64_t count_;
  const uint64_t base_;
  const uint64_t header_index_;
};

// False when an earlier kernel of this communicator has failed. Then the caller returns at once.
inline bool has_no_fault(const Comm& comm) { return __atomic_load_n(&state_of(comm).fault, __ATOMIC_ACQUIRE) == 0; }

}  // namespace ep::cpu
