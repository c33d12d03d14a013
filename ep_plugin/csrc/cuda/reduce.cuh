// Sums rows, each result from several, in float32 and in a fixed order.
//
// A job says which result comes next, its terms and where it goes; push and add are such jobs. A job has
//   struct Row                                       what it must remember of a result
//   Next next(bool may_block, Row* row)              the warp's next result; kNotYet only if it may not block
//   int describe(const Row& row, Term* terms)        its terms, in the order in which they are summed
//   const char* source(int32_t term_row)
//   char* target(const Row& row)
//   const char* bias(const Row& row)                 added last, or null
//   void settle(const Row& row, Term* terms)         the last moment for the factors of its terms
//   void ahead(int piece, int pieces)                bulk path, before each piece: it may look for the next result
//   void finish(const Row& row)                      the result is summed: stores what goes beside it
//   void completed(uint32_t results)                 so many results of this warp are written
//   static constexpr bool kBulkStores                bulk path: results leave through shared memory
// all called by whole warps. A result is computed in pieces of up to 4 KiB, whose sums stay in registers.
//
// Bulk path: the terms of a piece come through the ring, loads running ahead to the end of the next result. Two lists
// of terms are kept: of the result being summed, and of the next. With kBulkStores the sums of a piece go to a stage of
// their own, which is stored while the next piece is summed. A result is written before more than one piece of the next
// is stored: more under way would queue in the links, and all be late.
#pragma once
#include "element.cuh"
#include "ring.cuh"

namespace ep::cuda {

constexpr int kReduceWarps = 12;  // of a CTA, with those that do something else: more would have too few registers
constexpr int kReduceStages = 4;
constexpr int kReduceBytes = 4096;  // of a piece, at most
constexpr int kLaneVectors = kReduceBytes / 16 / kWarp;

// Pieces whose sums fit in registers, and whose rings fit in shared memory. Without bulk copies there are no stages.
template <class Job>
Cut cut_for_sums(int64_t row_bytes, int warps, int list_entries, int64_t shared_bytes, bool bulk) {
  const int stages = kReduceStages + (Job::kBulkStores ? 1 : 0);
  const int64_t room = (shared_bytes / warps - 8 * (stages + list_entries)) / stages / kSlotAlign * kSlotAlign;
  const int64_t largest = bulk && room < kReduceBytes ? room : kReduceBytes;
  Cut cut = cut_row(row_bytes, largest, warps, stages, list_entries);
  if (!bulk) cut.stage_bytes = 0;
  return cut;
}

struct Term {
  int32_t row;
  float factor;
};
static_assert(sizeof(Term) == 8, "a list entry of a warp");

template <class Element>
struct Sums {
  float of[kLaneVectors][Element::kPerVector];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v)
#pragma unroll
      for (int i = 0; i < Element::kPerVector; ++i) of[v][i] = 0.0f;
  }
  // `vectors` 16-byte vectors of a row, in shared or (kGlobal) global memory. All loads before the first use.
  template <bool kGlobal>
  __device__ __forceinline__ void add(const char* from, int vectors, float factor) {
    const int4* row = reinterpret_cast<const int4*>(from) + lane_id();
    int4 held[kLaneVectors];
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      if (v * kWarp >= vectors) break;  // the same for all lanes
      if ((v + 1) * kWarp <= vectors)
        held[v] = load<kGlobal>(row + v * kWarp);
      else
        held[v] = v * kWarp + lane_id() < vectors ? load<kGlobal>(row + v * kWarp) : make_int4(0, 0, 0, 0);
    }
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      if (v * kWarp >= vectors) break;
      Element::add(of[v], held[v], factor);
    }
  }
  __device__ __forceinline__ void store(char* to, int vectors) const {
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      const int at = v * kWarp + lane_id();
      if (at < vectors) reinterpret_cast<int4*>(to)[at] = Element::narrow(of[v]);
    }
  }

 private:
  template <bool kGlobal>
  static __device__ __forceinline__ int4 load(const int4* from) {
    if constexpr (kGlobal)
      return ptx::ld_coherent(from);
    else
      return *from;
  }
};

// Adds the bias and writes a piece to `to`.
template <class Element, class Job>
__device__ __forceinline__ void write_piece(const Job& job, const typename Job::Row& row, const Cut& cut, int piece,
                                            Sums<Element>& sums, char* to) {
  const int vectors = static_cast<int>(cut.piece_size(piece) / 16);
  const char* bias = job.bias(row);
  if (bias != nullptr) sums.template add<true>(bias + cut.piece_begin(piece), vectors, 1.0f);
  sums.store(to, vectors);
}

// A warp's two lists of terms, used in turns.
struct TermLists {
  Term* lists;
  int entries;  // of one
  __device__ explicit TermLists(const Cut& cut)
      : lists(reinterpret_cast<Term*>(list_of_warp(cut))), entries(cut.list_entries / 2) {}
  __device__ Term* of(int turn) const { return lists + turn * entries; }
};

template <class Element, class Job>
class BulkReducer {
 public:
  __device__ BulkReducer(Job& job, const Run& run, const Cut& cut)
      : job_(job), run_(run), cut_(cut), ring_(cut), lists_(cut) {}

  __device__ void all() {
    while (find_next(true)) {
      row_ = next_row_;
      count_ = next_count_;
      has_next_ = false;
      turn_ ^= 1;
      if (!load_next_) load_piece_ = load_term_ = 0;
      load_next_ = false;
      job_.settle(row_, lists_.of(turn_));
      __syncwarp();
      for (int piece = 0; piece < cut_.pieces; ++piece) {
        job_.ahead(piece, cut_.pieces);
        if (!sum_piece(piece)) return wait_until_written();
      }
      job_.finish(row_);
      ++results_;
    }
    wait_until_written();
    job_.completed(results_);
  }

 private:
  __device__ bool find_next(bool may_block) {
    if (has_next_) return true;
    if (job_.next(may_block, &next_row_) != kRow) return false;
    __syncwarp();
    next_count_ = job_.describe(next_row_, lists_.of(turn_ ^ 1));
    __syncwarp();
    return has_next_ = true;
  }

  __device__ bool sum_piece(int piece) {
    Sums<Element> sums;
    sums.clear();
    const int vectors = static_cast<int>(cut_.piece_size(piece) / 16);
    const Term* terms = lists_.of(turn_);
    for (int t = 0; t < count_; ++t) {
      load_ahead();
      const char* stage = ring_.wait(run_);
      if (stage == nullptr) return false;
      sums.template add<false>(stage, vectors, terms[t].factor);
      __syncwarp();
      ++ring_.taken;
    }
    if constexpr (Job::kBulkStores)
      store_piece(piece, sums);
    else
      write_piece(job_, row_, cut_, piece, sums, job_.target(row_) + cut_.piece_begin(piece));
    return true;
  }

  __device__ __forceinline__ void store_piece(int piece, Sums<Element>& sums) {
    char* const stage = stages_of_warp(cut_) + static_cast<int64_t>(kReduceStages) * cut_.stage_bytes;
    if (piece == 1) {
      if (lane_id() == 0) ptx::bulk_wait<1>();  // all but the piece before this one
      __syncwarp();
      job_.completed(results_);
    } else if (cut_.pieces == 1) {
      wait_until_written();
      job_.completed(results_);
    }
    if (lane_id() == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
    write_piece(job_, row_, cut_, piece, sums, stage);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_id() == 0) {
      char* to = job_.target(row_) + cut_.piece_begin(piece);
      ptx::bulk_store(to, stage, static_cast<uint32_t>(cut_.piece_size(piece)));
      ptx::bulk_commit();
    }
  }

  // What this warp has stored in bulk.
  __device__ void wait_until_written() const {
    if (Job::kBulkStores && lane_id() == 0) ptx::bulk_wait<0>();
    __syncwarp();
  }

  // Issues loads while stages are free: of the row being summed, then of the next one, if it is known to be ready.
  __device__ void load_ahead() {
    while (ring_.loading() < kReduceStages) {
      const int count = load_next_ ? next_count_ : count_;
      if (count == 0 || load_piece_ == cut_.pieces) {
        if (load_next_ || !find_next(false)) return;
        load_next_ = true;
        load_piece_ = load_term_ = 0;
        continue;
      }
      const int32_t from = lists_.of(load_next_ ? turn_ ^ 1 : turn_)[load_term_].row;
      ring_.load(job_.source(from) + cut_.piece_begin(load_piece_), cut_.piece_size(load_piece_));
      if (++load_term_ == count) {
        load_term_ = 0;
        ++load_piece_;
      }
    }
  }

  Job& job_;
  const Run& run_;
  const Cut& cut_;
  Ring<kReduceStages> ring_;
  TermLists lists_;
  typename Job::Row row_{}, next_row_{};
  int count_ = 0, next_count_ = 0;
  int load_piece_ = 0, load_term_ = 0;
  int turn_ = 0;
  uint32_t results_ = 0;  // summed
  bool has_next_ = false;
  bool load_next_ = false;  // loads have moved on to the next row
};

template <class Element, class Job>
__device__ void reduce_rows_plain(Job& job, const Cut& cut) {
  Term* terms = TermLists(cut).of(0);
  typename Job::Row row{};
  uint32_t results = 0;
  while (job.next(true, &row) == kRow) {
    __syncwarp();
    const int count = job.describe(row, terms);
    job.settle(row, terms);
    __syncwarp();
    for (int piece = 0; piece < cut.pieces; ++piece) {
      Sums<Element> sums;
      sums.clear();
      const int vectors = static_cast<int>(cut.piece_size(piece) / 16);
      for (int t = 0; t < count; ++t)
        sums.template add<true>(job.source(terms[t].row) + cut.piece_begin(piece), vectors, terms[t].factor);
      write_piece(job, row, cut, piece, sums, job.target(row) + cut.piece_begin(piece));
    }
    job.finish(row);
    __syncwarp();
    job.completed(++results);
  }
  job.completed(results);
}

template <class Element, bool kBulk, class Job>
__device__ __forceinline__ void reduce_rows(Job& job, const Run& run, const Cut& cut) {
  if constexpr (kBulk)
    BulkReducer<Element, Job>(job, run, cut).all();
  else
    reduce_rows_plain<Element>(job, cut);
}

}  // namespace ep::cuda
