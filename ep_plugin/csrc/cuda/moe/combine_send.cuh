// A sending warp of combine, and the checks before it sends. combine_send.cu and combine.cu are the kernels; their
// headers describe roles and memory order.
#pragma once
#include "cuda/core/launch.cuh"
#include "cuda/moe/handle.cuh"
#include "cuda/moe/reduce.cuh"
#include "cuda/moe/signals.cuh"

namespace ep::cuda {

// The order in which a combine sends its rows: chunk by chunk of the owners' tokens, and in each chunk all owners in
// turn, starting with the next rank. Rows are numbered in this order. An item is one (chunk, owner).
// Buffers. At the begin of dynamic shared memory: the number of chunks, then for each owner where its combine pool has
// the partial row of this rank's received slot 0, as if that were there; then the items, and one more, which begins
// after the last row.
class SendOrder {
 public:
  struct Item {
    int32_t begin;  // number of the item's first row
    int32_t slot;   // slot of the item's first row
    int32_t owner;
  };

  static EP_HD int64_t shared_bytes(int R) {
    return align_up(8 + 8 * R + static_cast<int64_t>(sizeof(Item)) * (kMaxChunks * R + 1), kSlotAlign);
  }

  __device__ explicit SendOrder(const Comm& comm) : comm_(comm) {}

  __device__ int chunks() const { return *reinterpret_cast<const int32_t*>(dynamic_shared); }
  __device__ Address pool(int owner) const { return pools()[owner]; }
  __device__ const Item& item(int number) const { return items()[number]; }
  // The number of the first row of a chunk; of the chunk after the last one: the number of rows.
  __device__ int32_t begin_of(int chunk) const { return items()[chunk * comm_.num_ranks].begin; }
  __device__ int32_t rows() const { return begin_of(kMaxChunks); }

  // All threads. Joins the CTA.
  __device__ void make(const Meta& meta, int64_t partial_bytes) const {
    const int R = comm_.num_ranks;
    for (int i = threadIdx.x; i < kMaxChunks * R; i += blockDim.x) {
      const int chunk = i / R, owner = (comm_.rank + 1 + i % R) % R;
      const int32_t* ends = meta.recv_chunk_end + owner * kMaxChunks;
      // No load depends on another one, so all are in flight together.
      const int32_t offset = meta.recv_offset[owner], tokens = meta.src_tokens[owner];
      const int32_t before = chunk > 0 ? ends[chunk - 1] : 0, end = ends[chunk];
      const bool here = chunk < num_chunks(tokens);
      items()[i].slot = offset + (here ? before : 0);
      items()[i].owner = owner;
      items()[i + 1].begin = here ? end - before : 0;
      if (chunk == 0)
        pools()[owner] = address_in(comm_.pool[kCombinePool], owner) +
                         static_cast<uint64_t>((int64_t{meta.combine_base[owner]} - offset) * partial_bytes);
    }
    __syncthreads();
    if (warp_id() == 0) sum_counts(meta);
    __syncthreads();
  }

 private:
  __device__ Address* pools() const { return reinterpret_cast<Address*>(dynamic_shared + 8); }
  __device__ Item* items() const { return reinterpret_cast<Item*>(dynamic_shared + 8 + 8 * comm_.num_ranks); }

  __device__ void sum_counts(const Meta& meta) const {
    int32_t rows = 0;
    const int count = kMaxChunks * comm_.num_ranks;
    for (int base = 0; base < count; base += kWarp) {
      const int item = base + lane_id();
      int32_t through = item < count ? items()[item + 1].begin : 0;
      for (int step = 1; step < kWarp; step *= 2) {
        const int32_t below = __shfl_up_sync(kAllLanes, through, step);
        if (lane_id() >= step) through += below;
      }
      if (item < count) items()[item + 1].begin = rows + through;
      rows += __shfl_sync(kAllLanes, through, kWarp - 1);
    }
    int of_owner = 0;
    for (int owner = lane_id(); owner < comm_.num_ranks; owner += kWarp)
      of_owner = max(of_owner, num_chunks(meta.src_tokens[owner]));
    const int most = __reduce_max_sync(kAllLanes, of_owner);
    if (lane_id() == 0) items()[0].begin = 0, *reinterpret_cast<int32_t*>(dynamic_shared) = most;
  }

  const Comm& comm_;
};

// The chunks of a combine send, for signal_chunks(). A chunk has the rows for all owners.
struct PartialChunks {
  const Run& run;
  const Meta& meta;
  const SendOrder& order;
  const int parts;  // parts of a row

  __device__ int count() const { return order.chunks(); }
  __device__ int32_t end(int chunk) const { return order.begin_of(chunk + 1) * parts; }
  __device__ bool may_signal() const { return true; }
  __device__ void signal(int owner, int chunk) const {
    const int32_t* ends = meta.recv_chunk_end + owner * kMaxChunks;
    if (chunk < num_chunks(meta.src_tokens[owner]))
      signal_chunk(run, kCombinePool, owner, chunk, chunk == 0 ? 0 : ends[chunk - 1], ends[chunk]);
  }
};

// The slots that one warp reduces and sends: a job of reduce_rows() (reduce.cuh).
class CombineSendJob {
 public:
  struct Row {
    int32_t slot;
    int32_t piece;
    char* target;
  };

  // The first `warps` warps of each CTA have one.
  __device__ CombineSendJob(const Run& run, const CombineSendArgs& args, const SendOrder& order, const Cut& cut,
                            int warps, Progress& progress)
      : run_(run),
        args_(args),
        lay_(partial_layout_of(args.header)),
        order_(order),
        parts_(cut.parts),
        rows_(NextRow(run, kCombineSendRows, order.rows() * parts_, 0, warps), progress),
        flat_(args.routing.layout == kFlat) {}

  __device__ Next next(bool may_block, Row* row) {
    if (!may_block && next_.slot == kUnknown) return kNotYet;
    find_next();
    if (next_.slot == kNone) return kEnd;
    *row = next_;
    next_.slot = kUnknown;
    return kRow;
  }

  __device__ void prefetch(int unit, int units) {
    if (unit == 0) rows_.request();
    if (unit == min(1, units - 1)) find_next();
  }

  // Call both for the row that was found last, before the next row is found.
  __device__ int list_terms(const Row& row, Term* terms) {
    return flat_ ? list_flat_terms(row, terms) : list_token_term(row, terms);
  }
  __device__ void set_factors(const Row& row, Term* terms) const {
    if (!flat_) return set_token_factor(row, terms);
    if (term_ >= 0) terms[term_].factor = weight_;
  }

  __device__ const char* source(int32_t term_row) const {
    return at<char>(args_.y, int64_t{term_row} * static_cast<int32_t>(args_.header.row_bytes));
  }
  __device__ Bias bias(const Row&) const { return {nullptr, false}; }
  __device__ char* target(const Row& row) const { return row.target; }

  __device__ void finish(const Row& row) const {
    if (args_.header.weight_bytes != 0 && row.piece == 0) write_extra(row);
  }
  __device__ void completed(uint32_t results) { rows_.written(results); }

 private:
  static constexpr int32_t kUnknown = -1, kNone = -2;  // in place of a slot

  // Finds the next row and begins to load its first pairs.
  __device__ void find_next() {
    if (next_.slot != kUnknown) return;
    const int32_t part = rows_.next();
    next_.slot = kNone;
    if (part == kNoMore) return;
    const int32_t number = parts_ == 1 ? part : part / parts_;
    while (number >= order_.item(item_ + 1).begin) ++item_;
    const SendOrder::Item& item = order_.item(item_);
    const int32_t slot = item.slot + number - item.begin;
    next_ = Row{slot, parts_ == 1 ? 0 : part % parts_,
                at<char>(order_.pool(item.owner), int64_t{slot} * static_cast<int32_t>(lay_.bytes))};
    from_ = lane_id() < args_.routing.topk ? recv_row(next_, lane_id()) : -1;
  }

  __device__ int32_t recv_row(const Row& row, int k) const {
    return at<const int32_t>(args_.routing.recv_rows)[static_cast<int64_t>(row.slot) * args_.routing.topk + k];
  }

  __device__ bool refuse(int k, int32_t from) const {
    return fail(run_.comm, kBadHandle, kCombineSend, run_.comm.rank, k, args_.rows, from);
  }

  // The row of y for pair k, or -1 if the pair did not come to this rank.
  __device__ int32_t term_of(const Row& row, int k) const {
    const int32_t from = k < kWarp ? from_ : k < args_.routing.topk ? recv_row(row, k) : -1;
    return from >= 0 && (from < args_.rows || refuse(k, from)) ? from : -1;
  }

  // Lists one term for each pair that came here. set_factors() stores the weights of the first pairs. Their loads are
  // in flight until then.
  __device__ int list_flat_terms(const Row& row, Term* terms) {
    const int K = args_.routing.topk;
    int count = 0;
    for (int k = lane_id(); k - lane_id() < K; k += kWarp) {
      const int32_t from = term_of(row, k);
      const float factor = from >= 0 && args_.weights != 0 ? at<const float>(args_.weights)[from] : 1.0f;
      const unsigned mask = __ballot_sync(kAllLanes, from >= 0);
      const int term = count + __popc(mask & ((1u << lane_id()) - 1u));
      if (from >= 0) terms[term].row = from;
      if (k < kWarp) {
        term_ = from >= 0 ? term : -1;
        weight_ = factor;
      } else if (from >= 0) {
        terms[term].factor = factor;
      }
      count += __popc(mask);
    }
    return count;
  }

  // Lists one term if any pair came here. All such pairs name the same row.
  __device__ int list_token_term(const Row& row, Term* terms) {
    int32_t least = INT32_MAX, most = -1;
    for (int k = lane_id(); k - lane_id() < args_.routing.topk; k += kWarp) {
      const int32_t from = term_of(row, k);
      if (k < kWarp) weight_ = weight_of_pair(from, k);
      if (from >= 0) least = min(least, from), most = max(most, from);
    }
    least = __reduce_min_sync(kAllLanes, least);
    most = __reduce_max_sync(kAllLanes, most);
    if (most < 0) return 0;
    if (lane_id() == 0 && least != most) refuse(0, most);
    if (lane_id() == 0) terms[0].row = most;
    return 1;
  }

  // The factor is the sum of the weights of the pairs that came here, in the order of the pairs.
  __device__ void set_token_factor(const Row& row, Term* terms) const {
    const bool weighted = args_.weights != 0;
    float factor = weighted ? 0.0f : 1.0f;
    for (int k = lane_id(); weighted && k - lane_id() < args_.routing.topk; k += kWarp) {
      const int32_t from = term_of(row, k);
      const float weight = k < kWarp ? weight_ : weight_of_pair(from, k);
      for (unsigned left = __ballot_sync(kAllLanes, from >= 0); left != 0; left &= left - 1)
        factor += __shfl_sync(kAllLanes, weight, __ffs(left) - 1);
    }
    if (lane_id() == 0) terms[0].factor = factor;
  }

  // The TOKEN_MAJOR weight of pair k, whose row of y is `from`.
  __device__ float weight_of_pair(int32_t from, int k) const {
    return from >= 0 && args_.weights != 0
               ? at<const float>(args_.weights)[static_cast<int64_t>(from) * args_.routing.topk + k]
               : 0.0f;
  }

  __device__ void write_extra(const Row& row) const {
    const int K = args_.routing.topk;
    float* to = reinterpret_cast<float*>(target(row) + lay_.extra);
    const bool per_row = args_.per_row != 0 && args_.extra != 0;
    const int32_t of_token = per_row ? token_row(row) : -1;
    for (int k = lane_id(); k < K; k += kWarp) {
      const int32_t from = per_row ? of_token : recv_row(row, k);
      const int64_t index = flat_ ? from : static_cast<int64_t>(from) * K + k;
      const bool given = args_.extra != 0 && from >= 0 && from < args_.rows;
      to[k] = given ? at<const float>(args_.extra)[index] : 0.0f;
    }
  }

  // The TOKEN_MAJOR row of y, or -1.
  __device__ int32_t token_row(const Row& row) const {
    int32_t most = -1;
    for (int k = lane_id(); k < args_.routing.topk; k += kWarp) most = max(most, recv_row(row, k));
    return __reduce_max_sync(kAllLanes, most);
  }

  const Run& run_;
  const CombineSendArgs& args_;
  const PartialLayout lay_;
  const SendOrder& order_;
  const int parts_;  // parts of a row
  RowQueue rows_;
  const bool flat_;
  int item_ = 0;                    // the item of order_ to which the row found last belongs
  Row next_{kUnknown, 0, nullptr};  // the row found last
  int32_t from_ = -1;               // recv_row of this lane's pair of that row
  int term_ = -1;                   // index of this lane's pair among the terms
  float weight_ = 0.0f;
};

// All threads call it, and share the owners. Returns whether the handle is sound. Also checks that each owner's rows on
// this rank end within its combine pool and the handle's recv_rows.
__device__ inline bool partials_fit(const Run& run, const CombineSendArgs& args, const Meta& meta) {
  const Comm& comm = args.comm;
  bool ok =
      check_handle(run, returned_items(comm), [&](int item) { return returned_is_sound(args.routing, meta, item); });
  for (int owner = static_cast<int>(threadIdx.x); owner < comm.num_ranks; owner += static_cast<int>(blockDim.x)) {
    const int64_t rows = meta.recv_offset[owner + 1] - meta.recv_offset[owner];
    const int64_t end = (meta.combine_base[owner] + rows) * partial_layout_of(args.header).bytes;
    if (rows > 0 && end > comm.pool_bytes[kCombinePool])
      ok = fail(comm, kTooSmall, kCombineSend, owner, 0, comm.pool_bytes[kCombinePool], end);
    if (meta.recv_offset[owner + 1] > args.routing.slots)
      ok = fail(comm, kTooSmall, kCombineSend, owner, 1, args.routing.slots, meta.recv_offset[owner + 1]);
  }
  return ok;
}

inline void require_combine_send(const CombineSendArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_header(args.header, args.routing);
  require_sms(args.num_sms);
  require_elements(args.header, args.hidden, args.element);
  require_rows("y", args.y);
  require(args.per_row == 0 || args.routing.layout == kTokenMajor, "per_row", "0 but in TOKEN_MAJOR", args.per_row);
}

}  // namespace ep::cuda
