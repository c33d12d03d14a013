// The checks of a handle's words before a kernel computes addresses from them.
//
// A handle is the caller's memory, so anything may have been written over it. Host and device run the same checks. Each
// item is checked independently of the others, so threads can share the items in any order.
// Shapes: R ranks, C = kMaxChunks, E_l local experts, O origins.
#pragma once
#include "common/views.h"

namespace ep {

// Whether chunk `chunk` of `chunks` ends at a row that is not before its begin, nor past `rows`. The last chunk must
// end at `rows`.
EP_HD bool chunk_is_sound(const int32_t* ends, int chunk, int chunks, int64_t rows) {
  if (chunk >= chunks) return true;
  const int32_t begin = chunk == 0 ? 0 : ends[chunk - 1], end = ends[chunk];
  return 0 <= begin && begin <= end && (chunk + 1 < chunks ? end <= rows : end == rows);
}

// Item chunk + C * dest: the rows that this rank sends to rank `dest`, and where their partial rows come back to.
EP_HD int sent_items(const Comm& comm) { return comm.num_ranks * kMaxChunks; }
EP_HD bool sent_is_sound(const Routing& routing, const Meta& meta, int item) {
  const int dest = item / kMaxChunks, chunk = item % kMaxChunks;
  const int64_t rows = meta.rank_count[dest];
  const int64_t base = dest == 0 ? 0 : static_cast<int64_t>(meta.send_base[dest - 1]) + meta.rank_count[dest - 1];
  return 0 <= rows && rows <= routing.num_tokens && base == meta.send_base[dest] &&
         chunk_is_sound(meta.send_chunk_end + dest * kMaxChunks, chunk, num_chunks(routing.num_tokens), rows);
}

// Item `source`: the slots that this rank receives from rank `source`.
EP_HD bool received_is_sound(const Routing& routing, const Meta& meta, int source) {
  const int64_t begin = meta.recv_offset[source], end = meta.recv_offset[source + 1];
  return (source == 0 ? begin == 0 : begin >= 0) && begin <= end && end <= routing.slots &&
         end - begin <= meta.src_tokens[source];
}

// Item chunk + C * owner: the partial rows that this rank returns to rank `owner`.
EP_HD int returned_items(const Comm& comm) { return comm.num_ranks * kMaxChunks; }
EP_HD bool returned_is_sound(const Routing& routing, const Meta& meta, int item) {
  const int owner = item / kMaxChunks, chunk = item % kMaxChunks;
  const int64_t rows = static_cast<int64_t>(meta.recv_offset[owner + 1]) - meta.recv_offset[owner];
  return received_is_sound(routing, meta, owner) && meta.combine_base[owner] >= 0 &&
         chunk_is_sound(meta.recv_chunk_end + owner * kMaxChunks, chunk, num_chunks(meta.src_tokens[owner]), rows);
}

// Item `local`: the rows of one local expert.
EP_HD bool expert_is_sound(const Meta& meta, int local) {
  const int64_t begin = meta.expert_offset[local], rows = meta.expert_rows[local];
  return (local == 0 ? begin == 0 : begin >= 0) && rows >= 0 && begin + rows <= meta.expert_offset[local + 1];
}

// Item origin + O * source: the TOKEN_MAJOR rows of the slots that this rank receives from rank `source`.
EP_HD int placed_items(const Comm& comm) { return comm.num_ranks * comm.num_origins; }
EP_HD bool placed_is_sound(const Comm& comm, const Meta& meta, int item) {
  const int source = item / comm.num_origins, origin = item % comm.num_origins;
  const int64_t begin = origin == 0 ? 0 : meta.origin_end[item - 1], end = meta.origin_end[item];
  const int64_t rows = static_cast<int64_t>(meta.recv_offset[source + 1]) - meta.recv_offset[source];
  const int64_t base = meta.token_base[item];
  return 0 <= begin && begin <= end && (origin + 1 < comm.num_origins ? end <= rows : end == rows) &&
         base + begin >= 0 && base + end <= *meta.token_rows;
}

// A cached dispatch receive reads these items: those of each rank and origin, then one of each local expert.
EP_HD int cached_items(const Comm& comm) { return placed_items(comm) + local_experts(comm); }
EP_HD bool cached_is_sound(const Comm& comm, const Routing& routing, const Meta& meta, int item) {
  const int placed = placed_items(comm);
  return item < placed ? received_is_sound(routing, meta, item / comm.num_origins) && placed_is_sound(comm, meta, item)
                       : expert_is_sound(meta, item - placed);
}

}  // namespace ep
