// Typed pointers into the memory that common/layout.h describes, and small functions that read it. CPU and CUDA kernels
// share them.
#pragma once
#include "common/api.h"

namespace ep {

template <class T>
EP_HD T* at(Address base, int64_t offset = 0) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset));
}

// The entry of a table of addresses.
EP_HD Address address_in(Address table, int rank) {
#if defined(__CUDA_ARCH__)
  return __ldg(at<const Address>(table) + rank);
#else
  return at<const Address>(table)[rank];
#endif
}
EP_HD Address control_at(const Comm& comm, int rank) {
  return rank == comm.rank ? comm.own_control : address_in(comm.control, rank);
}
EP_HD Address pool_at(const Comm& comm, int pool, int rank) {
  return rank == comm.rank ? comm.own_pool[pool] : address_in(comm.pool[pool], rank);
}

EP_HD int local_experts(const Comm& comm) { return comm.num_experts / comm.num_ranks; }

EP_HD State& state_of(const Comm& comm) { return *at<State>(comm.state); }
EP_HD Board& board_of(const Comm& comm) { return *at<Board>(comm.board); }
EP_HD int64_t* board_totals(const Comm& comm, int segment) {
  return at<int64_t>(comm.board, sizeof(Board)) + int64_t{segment} * (kTotals + local_experts(comm));
}

// In rank `owner`'s control block: the epoch up to which `peer` has read what `owner` wrote to it. kind: a Pool or
// kConsumedCounts.
EP_HD uint64_t* consumed_word(const Comm& comm, int owner, int kind, int peer) {
  const ControlLayout lay = control_layout(comm.num_ranks, comm.num_experts, comm.num_origins);
  return at<uint64_t>(control_at(comm, owner), lay.consumed) + static_cast<int64_t>(kind) * comm.num_ranks + peer;
}
EP_HD uint64_t* count_words(const Comm& comm, int owner, int parity, int source) {
  const ControlLayout lay = control_layout(comm.num_ranks, comm.num_experts, comm.num_origins);
  const int64_t row = static_cast<int64_t>(parity) * comm.num_ranks + source;
  return at<uint64_t>(control_at(comm, owner),
                      lay.count_rows + row * count_row_bytes(comm.num_ranks, comm.num_experts, comm.num_origins));
}
EP_HD Opening* opening(const Comm& comm, int owner, int pool, int source) {
  const ControlLayout lay = control_layout(comm.num_ranks, comm.num_experts, comm.num_origins);
  return at<Opening>(control_at(comm, owner), lay.opening) + static_cast<int64_t>(pool) * comm.num_ranks + source;
}
EP_HD Arrival* arrival(const Comm& comm, int owner, int pool, int source, int chunk) {
  const ControlLayout lay = control_layout(comm.num_ranks, comm.num_experts, comm.num_origins);
  const int64_t row = static_cast<int64_t>(pool) * comm.num_ranks + source;
  return at<Arrival>(control_at(comm, owner), lay.arrival) + row * kMaxChunks + chunk;
}

// The ids of a TOKEN_MAJOR output: the bytes of one, and a store to the id of a pair.
EP_HD int64_t id_bytes_of(const DispatchRecvArgs& args) { return args.wide_ids != 0 ? 8 : 4; }
EP_HD void store_id(const DispatchRecvArgs& args, int64_t pair, int32_t id) {
  if (args.wide_ids != 0)
    at<int64_t>(args.topk_ids)[pair] = id;
  else
    at<int32_t>(args.topk_ids)[pair] = id;
}

// A handle's routing metadata with its parts named.
struct Meta {
  int32_t *rank_prefix, *rank_count, *expert_count, *send_base, *combine_base, *recv_offset, *src_tokens, *token_base,
      *token_rows, *flat_base, *expert_offset, *expert_rows, *origin_end, *origin_rows, *send_chunk_end,
      *recv_chunk_end, *max_rows, *rail_overflow;
};
EP_HD Meta meta_at(const Comm& comm, Address meta) {
  const MetaLayout lay = meta_layout(comm.num_ranks, comm.num_experts, comm.num_origins);
  int32_t* words = at<int32_t>(meta);
  return Meta{words + lay.rank_prefix,    words + lay.rank_count,    words + lay.expert_count,
              words + lay.send_base,      words + lay.combine_base,  words + lay.recv_offset,
              words + lay.src_tokens,     words + lay.token_base,    words + lay.token_rows,
              words + lay.flat_base,      words + lay.expert_offset, words + lay.expert_rows,
              words + lay.origin_end,     words + lay.origin_rows,   words + lay.send_chunk_end,
              words + lay.recv_chunk_end, words + lay.max_rows,      words + lay.rail_overflow};
}
EP_HD Meta meta_of(const Comm& comm, const Routing& routing) { return meta_at(comm, routing.meta); }

// Whether the tokens of a notify have come from other nodes.
EP_HD bool has_origins(const NotifyArgs& args) { return args.origins.messages != 0; }

// The origin of row `position` among the rows of `source`. The last one, if the position is past all rows.
EP_HD int origin_of(const Comm& comm, const Meta& meta, int source, int32_t position) {
  const int32_t* ends = meta.origin_end + static_cast<int64_t>(source) * comm.num_origins;
  int first = 0, last = comm.num_origins - 1;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (position < ends[middle])
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

EP_HD SlotLayout slot_layout_of(const Header& header) {
  return slot_layout(header.row_bytes, header.scale_bytes, header.weight_bytes, header.topk);
}
EP_HD PartialLayout partial_layout_of(const Header& header) {
  return partial_layout(header.row_bytes, header.weight_bytes, header.topk);
}

EP_HD int32_t region_slots_of(const Comm& comm, const Header& header) {
  return region_slots(comm.pool_bytes[kDispatchPool], slot_layout_of(header).bytes, comm.num_ranks);
}

// Whether some rank sends more rows to another than a region of the pool has slots. Pools have one size on all ranks,
// and all ranks know the largest count, so all ranks get the same result. If true, no rank signals its rows; the hosts
// grow the pools and launch the send again.
EP_HD bool pools_must_grow(const Comm& comm, const Header& header, const Meta& meta) {
  return *meta.max_rows > region_slots_of(comm, header);
}

// The number of rows that the output of a dispatch needs.
EP_HD int64_t rows_required(const DispatchRecvArgs& args, const Meta& meta) {
  return args.routing.layout == kFlat ? meta.expert_offset[local_experts(args.comm)] : *meta.token_rows;
}

// Whether a dispatch receive that was enqueued before the host knew the totals must be launched again, because its
// output is too small or the send signalled no rows. The host computes the same from the totals.
EP_HD bool must_relaunch(const DispatchRecvArgs& args, const Meta& meta) {
  return rows_required(args, meta) > args.capacity || meta.recv_offset[args.comm.num_ranks] > args.routing.slots ||
         pools_must_grow(args.comm, args.header, meta);
}

// The index of the first compared field in which two headers differ, or -1.
EP_HD int header_mismatch(const Header& mine, const Header& theirs) {
  const int64_t* a = reinterpret_cast<const int64_t*>(&mine);
  const int64_t* b = reinterpret_cast<const int64_t*>(&theirs);
  for (int field = 0; field < kComparedFields; ++field)
    if (a[field] != b[field]) return field;
  return -1;
}

}  // namespace ep
