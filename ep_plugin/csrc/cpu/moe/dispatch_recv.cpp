// Dispatch receive: copies received slots to output rows as their chunks arrive, source by source, this rank's own rows
// first.
//
// A chunk's arrival is loaded with acquire order, before its rows. When all rows are read, the sources receive the
// consumed word. After a fault, all outputs are filled with 0xFF bytes; the tables of counts and offsets are zeros.
#include <algorithm>
#include <cstring>

#include <sys/mman.h>

#include "cpu/moe/handle.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

struct Output {
  const DispatchRecvArgs& args;
  SlotLayout lay;
  Meta meta;
  int per_rank;
  int64_t required;  // rows that the layout needs
};

void copy_row(const Output& out, const char* slot, int64_t row) {
  const DispatchRecvArgs& args = out.args;
  std::memcpy(at<char>(args.tokens, row * args.header.row_bytes), slot + out.lay.row, args.header.row_bytes);
  if (args.header.scale_bytes != 0)
    std::memcpy(at<char>(args.scales, row * args.header.scale_bytes), slot + out.lay.scales, args.header.scale_bytes);
}

// Finds the local id of the pair's expert; -1 if another rank holds it or the pair is dropped. An invalid id is a
// fault.
bool local_id(const Run& run, const Output& out, const char* slot, int k, int source, int32_t* local) {
  const Comm& comm = run.comm;
  const int32_t id = reinterpret_cast<const int32_t*>(slot + out.lay.ids)[k];
  if (id < -1 || id >= comm.num_experts) return fail(comm, kBadData, run.step, source, k, comm.num_experts, id);
  const int32_t first = comm.rank * out.per_rank;
  *local = id >= first && id < first + out.per_rank ? id - first : -1;
  return true;
}

// Copies a slot to the FLAT row of each pair whose expert is on this rank. Rows past the capacity are dropped. `place`:
// source * O + origin of the slot.
bool receive_flat(const Run& run, const Output& out, const char* slot, int32_t* recv_rows, int source, int place) {
  const DispatchRecvArgs& args = out.args;
  const int64_t wb = args.header.weight_bytes;
  const int32_t* positions = reinterpret_cast<const int32_t*>(slot + out.lay.positions);
  const int32_t* base = out.meta.flat_base + static_cast<int64_t>(place) * out.per_rank;
  for (int k = 0; k < args.routing.topk; ++k) {
    int32_t local = -1;
    if (!local_id(run, out, slot, k, source, &local)) return false;
    const int64_t row = local < 0 ? -1 : static_cast<int64_t>(base[local]) + positions[k];
    if (local >= 0 && (row < 0 || row >= out.required))
      return fail(run.comm, kBadData, run.step, source, k, out.required, row);
    const bool kept = local >= 0 && row < args.capacity;
    if (recv_rows != nullptr) recv_rows[k] = kept ? static_cast<int32_t>(row) : -1;
    if (!kept) continue;
    copy_row(out, slot, row);
    if (wb != 0) std::memcpy(at<char>(args.weights, row * wb), slot + out.lay.weights + k * wb, wb);
    at<int32_t>(args.row_expert_ids)[row] = local;
  }
  return true;
}

// Copies a slot to its TOKEN_MAJOR row.
bool receive_token_major(const Run& run, const Output& out, const char* slot, int32_t* recv_rows, int64_t row,
                         int source) {
  const DispatchRecvArgs& args = out.args;
  const int K = args.routing.topk;
  const int64_t wb = args.header.weight_bytes;
  const bool kept = row < args.capacity;
  for (int k = 0; k < K; ++k) {
    int32_t local = -1;
    if (!local_id(run, out, slot, k, source, &local)) return false;
    if (recv_rows != nullptr) recv_rows[k] = kept && local >= 0 ? static_cast<int32_t>(row) : -1;
    if (!kept) continue;
    store_id(args, row * K + k, local);
    if (wb == 0) continue;
    char* weight = at<char>(args.weights, (row * K + k) * wb);
    if (local >= 0)
      std::memcpy(weight, slot + out.lay.weights + k * wb, wb);
    else
      std::memset(weight, 0, wb);
  }
  if (kept) copy_row(out, slot, row);
  return true;
}

bool receive_source(const Run& run, const Output& out, int source) {
  const DispatchRecvArgs& args = out.args;
  const Comm& comm = args.comm;
  const int64_t first = out.meta.recv_offset[source];
  const int rows = static_cast<int>(out.meta.recv_offset[source + 1] - first);
  const int32_t region = region_slots_of(comm, args.header), limit = std::min(rows, region);
  const int64_t region_begin = static_cast<int64_t>(source) * region;
  int begin = 0;
  for (int c = 0; c < num_chunks(out.meta.src_tokens[source]); ++c) {
    int end;
    if (!wait_chunk(run, kDispatchPool, source, c, begin, limit, &end)) return false;
    for (int64_t i = begin; i < end; ++i) {
      const char* slot = at<char>(comm.own_pool[kDispatchPool], (region_begin + i) * out.lay.bytes);
      int32_t* recv_rows = args.fresh ? at<int32_t>(args.routing.recv_rows) + (first + i) * args.routing.topk : nullptr;
      const int place = source * comm.num_origins + origin_of(comm, out.meta, source, static_cast<int32_t>(i));
      const bool ok = args.routing.layout == kFlat
                          ? receive_flat(run, out, slot, recv_rows, source, place)
                          : receive_token_major(run, out, slot, recv_rows, out.meta.token_base[place] + i, source);
      if (!ok) return false;
    }
    if (args.fresh) out.meta.recv_chunk_end[source * kMaxChunks + c] = end;
    begin = end;
  }
  return begin == rows || fail(comm, kBadData, run.step, source, 0, rows, begin);
}

// For a new output of many megabytes, page faults cost more time than copies. Huge pages avoid most of them.
void ask_for_huge_pages(Address memory, int64_t bytes) {
  constexpr uintptr_t kHuge = 2u << 20;
  const uintptr_t begin = (static_cast<uintptr_t>(memory) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (static_cast<uintptr_t>(memory) + bytes) / kHuge * kHuge;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void clear_rows(const Output& out, int64_t begin, int64_t end) {
  const DispatchRecvArgs& args = out.args;
  end = std::min(end, args.capacity);
  if (begin >= end) return;
  const int K = args.routing.topk;
  const int64_t rows = end - begin, weights = args.routing.layout == kFlat ? 1 : K;
  const int64_t row_bytes = args.header.row_bytes, scale_bytes = args.header.scale_bytes;
  const int64_t weight_bytes = args.header.weight_bytes * weights;
  std::memset(at<char>(args.tokens, begin * row_bytes), 0, rows * row_bytes);
  if (scale_bytes != 0) std::memset(at<char>(args.scales, begin * scale_bytes), 0, rows * scale_bytes);
  if (weight_bytes != 0) std::memset(at<char>(args.weights, begin * weight_bytes), 0, rows * weight_bytes);
  if (args.row_expert_ids != 0) std::fill_n(at<int32_t>(args.row_expert_ids) + begin, rows, -1);
  const int64_t ids_bytes = id_bytes_of(args) * K;
  if (args.topk_ids != 0) std::memset(at<char>(args.topk_ids, begin * ids_bytes), 0xFF, rows * ids_bytes);
}

// Writes the tables of counts and offsets, and clears the output rows for which nothing was sent.
void finish_layout(const Output& out) {
  const DispatchRecvArgs& args = out.args;
  const int64_t capacity = args.capacity;
  const bool flat = args.routing.layout == kFlat;
  for (int local = 0; local < out.per_rank; ++local) {
    const int64_t offset = out.meta.expert_offset[local], rows = out.meta.expert_rows[local];
    const int64_t present = flat ? std::clamp<int64_t>(capacity - offset, 0, rows) : rows;
    at<int32_t>(args.expert_count)[local] = static_cast<int32_t>(present);
    at<int32_t>(args.expert_offset)[local] = static_cast<int32_t>(flat ? std::min(offset, capacity) : offset);
    if (flat) clear_rows(out, offset + rows, out.meta.expert_offset[local + 1]);
  }
  const int64_t last = out.meta.expert_offset[out.per_rank];
  at<int32_t>(args.expert_offset)[out.per_rank] = static_cast<int32_t>(flat ? std::min(last, capacity) : last);
  if (args.optimistic == 0) clear_rows(out, out.required, capacity);
  if (args.overflow == 0) return;
  at<int32_t>(args.overflow)[0] = out.required > capacity;
  at<int32_t>(args.overflow)[1] = static_cast<int32_t>(out.required);
  std::copy_n(out.meta.rail_overflow, kRailOverflowWords, at<int32_t>(args.overflow) + 2);
}

bool receive_all(const Run& run, const DispatchRecvArgs& args) {
  const Comm& comm = args.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int R = comm.num_ranks, per_rank = local_experts(comm);
  const int64_t slots = meta.recv_offset[R];
  if (args.header.op == kOpCachedDispatch &&
      !check_handle(run, cached_items(comm), [&](int i) { return cached_is_sound(comm, args.routing, meta, i); }))
    return false;
  const Output out{args, slot_layout_of(args.header), meta, per_rank, rows_required(args, meta)};
  if (pools_must_grow(comm, args.header, meta))
    return fail(comm, kTooSmall, run.step, comm.rank, 0, region_slots_of(comm, args.header), *meta.max_rows);
  if (slots > args.routing.slots) return fail(comm, kTooSmall, run.step, comm.rank, 1, args.routing.slots, slots);
  ask_for_huge_pages(args.tokens, args.capacity * args.header.row_bytes);
  for (int step = 0; step < R; ++step) {
    const int source = (comm.rank + step) % R;
    if (!open_source(run, kDispatchPool, source, args.header, meta.src_tokens[source])) return false;
    if (!receive_source(run, out, source)) return false;
    if (step == 0 && !hold_at_gate(run)) return false;
  }
  finish_layout(out);
  return true;
}

// Fills the outputs after a fault.
void poison(const DispatchRecvArgs& args) {
  const int64_t capacity = args.capacity, K = args.routing.topk, per_rank = local_experts(args.comm);
  const int64_t weights = args.header.weight_bytes * (args.routing.layout == kFlat ? 1 : K);
  auto fill = [](Address to, int64_t bytes, int value) {
    if (to != 0) std::memset(at<char>(to), value, bytes);
  };
  fill(args.tokens, capacity * args.header.row_bytes, 0xFF);
  fill(args.scales, capacity * args.header.scale_bytes, 0xFF);
  fill(args.weights, capacity * weights, 0xFF);
  fill(args.topk_ids, capacity * K * id_bytes_of(args), 0xFF);
  fill(args.row_expert_ids, capacity * 4, 0xFF);
  fill(args.expert_count, per_rank * 4, 0);
  fill(args.expert_offset, (per_rank + 1) * 4, 0);
  fill(args.overflow, 4 * (2 + kRailOverflowWords), 0);
}

}  // namespace

void dispatch_recv(const DispatchRecvArgs& args) {
  const Comm& comm = args.comm;
  Run run{comm, kDispatchRecv, 0};
  const bool begun = begin(comm, kDispatchRecv, &run);
  if (begun && args.optimistic != 0 && must_relaunch(args, meta_of(comm, args.routing))) return;
  if (!begun || !receive_all(run, args)) return poison(args);
  for (int source = 0; source < comm.num_ranks; ++source)
    signal(consumed_word(comm, source, kDispatchPool, comm.rank), run.epoch);
  finish(run);
}

}  // namespace ep::cpu
