// Combine send reduces the expert rows of each received slot to one partial row, and stores it in the combine pool of
// the token's owner. Combine receive adds the partial rows of each token to the bias, in rank order.
//
// Both sum in the element's Sum type and in a fixed order, so the result does not depend on the order of arrival. A
// send waits for consumed words only. A slot of the combine pool is [row | extra[K]], see PartialLayout. A chunk's
// arrival is stored with release order after the chunk's rows, and loaded with acquire order before them. After a
// fault, the outputs are filled with 0xFF bytes.
#include <algorithm>
#include <cstring>
#include <string>

#include "cpu/core/sums.h"
#include "cpu/moe/handle.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

// The rows of y that make up a slot's partial row, and their factors.
template <class S>
struct Terms {
  int count = 0;
  int64_t row[kMaxTopk];
  S factor[kMaxTopk];
};

template <class S>
bool gather_terms(const Run& run, const CombineSendArgs& args, int64_t slot, Terms<S>* terms) {
  const int K = args.routing.topk;
  const bool flat = args.routing.layout == kFlat, weighted = args.weights != 0;
  const int32_t* rows = at<const int32_t>(args.routing.recv_rows) + slot * K;
  terms->count = 0;
  for (int k = 0; k < K; ++k) {
    if (rows[k] < 0) continue;
    if (rows[k] >= args.rows || (!flat && terms->count > 0 && rows[k] != terms->row[0]))
      return fail(run.comm, kBadHandle, run.step, run.comm.rank, k, args.rows, rows[k]);
    const S weight = weighted ? at<const S>(args.weights)[flat ? rows[k] : int64_t{rows[k]} * K + k] : S(1);
    if (flat || terms->count == 0) {
      terms->row[terms->count] = rows[k];
      terms->factor[terms->count++] = weight;
    } else if (weighted) {
      terms->factor[0] += weight;
    }
  }
  return true;
}

template <class T>
void reduce_row(const CombineSendArgs& args, const Terms<typename Sum<T>::type>& terms, T* out) {
  using S = typename Sum<T>::type;
  if (terms.count == 1 && args.weights == 0) {
    std::memcpy(out, at<T>(args.y) + terms.row[0] * args.hidden, args.hidden * sizeof(T));
    return;
  }
  S sum[kSumBlock];
  for (int64_t h = 0; h < args.hidden; h += kSumBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kSumBlock, args.hidden - h));
    std::fill_n(sum, count, S(0));
    for (int i = 0; i < terms.count; ++i) {
      const T* row = at<const T>(args.y) + terms.row[i] * args.hidden + h;
      if (args.weights != 0)
        accumulate<T>(sum, row, count, terms.factor[i]);
      else
        accumulate<T>(sum, row, count);
    }
    narrow_all(sum, count, out + h);
  }
}

// Writes the extra values of a slot, whose TOKEN_MAJOR row is `row`; -1: it has none.
void copy_extra(const CombineSendArgs& args, int64_t slot, int64_t row, char* to) {
  const int K = args.routing.topk;
  const int64_t wb = args.header.weight_bytes;
  const int32_t* rows = at<const int32_t>(args.routing.recv_rows) + slot * K;
  const bool flat = args.routing.layout == kFlat, per_row = !flat && args.per_row != 0;
  for (int k = 0; k < K; ++k) {
    const int64_t from = per_row ? row : rows[k];
    if (args.extra == 0 || from < 0)
      std::memset(to + k * wb, 0, wb);
    else
      std::memcpy(to + k * wb, at<char>(args.extra, (flat ? from : from * K + k) * wb), wb);
  }
}

template <class T>
bool send_slot(const Run& run, const CombineSendArgs& args, const Meta& meta, int owner, int index) {
  const Comm& comm = args.comm;
  const int64_t slot = meta.recv_offset[owner] + index;
  const PartialLayout lay = partial_layout_of(args.header);
  const int64_t offset = (meta.combine_base[owner] + static_cast<int64_t>(index)) * lay.bytes;
  if (offset + lay.bytes > comm.pool_bytes[kCombinePool])
    return fail(comm, kTooSmall, run.step, owner, 0, comm.pool_bytes[kCombinePool], offset + lay.bytes);
  Terms<typename Sum<T>::type> terms;
  if (!gather_terms(run, args, slot, &terms)) return false;
  char* to = at<char>(pool_at(comm, kCombinePool, owner), offset);
  reduce_row<T>(args, terms, reinterpret_cast<T*>(to));
  if (args.header.weight_bytes != 0) copy_extra(args, slot, terms.count > 0 ? terms.row[0] : -1, to + lay.extra);
  return true;
}

// Sends chunk by chunk of the owners' tokens. In each chunk it serves all owners in turn, starting with the next rank,
// so that no two ranks write to one owner at the same time.
template <class T>
bool send_all(const Run& run, const CombineSendArgs& args) {
  const Comm& comm = args.comm;
  const int R = comm.num_ranks;
  const Meta meta = meta_of(comm, args.routing);
  if (!check_handle(run, returned_items(comm), [&](int i) { return returned_is_sound(args.routing, meta, i); }))
    return false;
  for (int owner = 0; owner < R; ++owner)
    if (!open_destination(run, kCombinePool, owner, args.header)) return false;
  for (int c = 0; c < kMaxChunks; ++c) {
    for (int step = 1; step <= R; ++step) {
      const int owner = (comm.rank + step) % R;
      if (c >= num_chunks(meta.src_tokens[owner])) continue;
      const int32_t* ends = meta.recv_chunk_end + owner * kMaxChunks;
      const int begin = c == 0 ? 0 : ends[c - 1];
      for (int i = begin; i < ends[c]; ++i)
        if (!send_slot<T>(run, args, meta, owner, i)) return false;
      signal_chunk(run, kCombinePool, owner, c, begin, ends[c]);
    }
    if (c == 0 && !hold_at_gate(run)) return false;
  }
  return true;
}

// Finds the slot of each rank's partial row of token t in this rank's pool: slot[R], -1: that rank sent none.
bool find_partials(const Run& run, const CombineRecvArgs& args, const Meta& meta, int t, int64_t* slot) {
  const int R = run.comm.num_ranks;
  const int32_t* positions = at<const int32_t>(args.routing.send_pos) + static_cast<int64_t>(t) * R;
  for (int d = 0; d < R; ++d) {
    if (positions[d] >= meta.rank_count[d])
      return fail(run.comm, kBadHandle, run.step, run.comm.rank, t, meta.rank_count[d], positions[d]);
    slot[d] = positions[d] < 0 ? -1 : meta.send_base[d] + static_cast<int64_t>(positions[d]);
  }
  return true;
}

template <class T>
void receive_token(const CombineRecvArgs& args, const PartialLayout& lay, const int64_t* slot, int t) {
  const Comm& comm = args.comm;
  const T* rows[kMaxRanks];
  int count = 0;
  for (int d = 0; d < comm.num_ranks; ++d)
    if (slot[d] >= 0) rows[count++] = at<const T>(comm.own_pool[kCombinePool], slot[d] * lay.bytes);
  const Start bias = start_of<T>(args.bias, args.wide_bias != 0, t, args.hidden);
  sum_rows<T>(rows, count, args.hidden, at<T>(args.out) + t * args.hidden, bias);
}

template <class S>
void add_extra(const CombineRecvArgs& args, const PartialLayout& lay, const int64_t* slot, int t) {
  const Comm& comm = args.comm;
  const int K = args.routing.topk;
  S* to = at<S>(args.extra) + static_cast<int64_t>(t) * K;
  std::fill_n(to, K, S(0));
  for (int d = 0; d < comm.num_ranks; ++d) {
    if (slot[d] < 0) continue;
    const S* from = at<const S>(comm.own_pool[kCombinePool], slot[d] * lay.bytes + lay.extra);
    for (int k = 0; k < K; ++k) to[k] += from[k];
  }
}

template <class T>
bool receive_all(const Run& run, const CombineRecvArgs& args) {
  const Comm& comm = args.comm;
  const int R = comm.num_ranks;
  const Chunks chunks = chunks_of(args.routing.num_tokens);
  const Meta meta = meta_of(comm, args.routing);
  const PartialLayout lay = partial_layout_of(args.header);
  if (!check_handle(run, sent_items(comm), [&](int i) { return sent_is_sound(args.routing, meta, i); })) return false;
  int64_t slot[kMaxRanks];
  for (int d = 0; d < R; ++d) {
    if (!open_source(run, kCombinePool, d, args.header, -1)) return false;
    if ((meta.send_base[d] + static_cast<int64_t>(meta.rank_count[d])) * lay.bytes > comm.pool_bytes[kCombinePool])
      return fail(comm, kTooSmall, run.step, d, 0, comm.pool_bytes[kCombinePool], lay.bytes);
  }
  for (int c = 0; c < chunks.count; ++c) {
    for (int d = 0; d < R; ++d) {
      const int32_t* ends = meta.send_chunk_end + d * kMaxChunks;
      int end;
      if (!wait_chunk(run, kCombinePool, d, c, c == 0 ? 0 : ends[c - 1], ends[c], &end)) return false;
      if (end != ends[c]) return fail(comm, kBadData, run.step, d, c, ends[c], end);
    }
    for (int t = chunks.begin(c); t < chunks.end(c); ++t) {
      if (!find_partials(run, args, meta, t, slot)) return false;
      receive_token<T>(args, lay, slot, t);
      if (args.extra != 0) add_extra<typename Sum<T>::type>(args, lay, slot, t);
    }
  }
  return true;
}

}  // namespace

void combine_send(const CombineSendArgs& args) {
  Run run{args.comm, kCombineSend, 0};
  if (!begin(args.comm, kCombineSend, &run)) return;
  bool done = false;
  with_element(args.element, [&](auto type) { done = send_all<decltype(type)>(run, args); });
  if (done) finish(run);
}

void combine_recv(const CombineRecvArgs& args) {
  const Comm& comm = args.comm;
  Run run{comm, kCombineRecv, 0};
  bool done = false;
  if (begin(comm, kCombineRecv, &run))
    with_element(args.element, [&](auto type) { done = receive_all<decltype(type)>(run, args); });
  if (!done) {
    std::memset(at<char>(args.out), 0xFF, args.routing.num_tokens * args.header.row_bytes);
    if (args.extra != 0)
      std::memset(at<char>(args.extra), 0xFF,
                  static_cast<int64_t>(args.routing.num_tokens) * args.routing.topk * args.header.weight_bytes);
    return;
  }
  for (int d = 0; d < comm.num_ranks; ++d) signal(consumed_word(comm, d, kCombinePool, comm.rank), run.epoch);
  finish(run);
}

}  // namespace ep::cpu
