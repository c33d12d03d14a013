// Sums rows, each result from several, in float32 and in a fixed order.
//
// A job says which result comes next, its terms and where it goes; push and add are such jobs. A job has
//   struct Row                                       what it must remember of a result
//   Next next(bool may_block, Row* row)              the warp's next result; kNotYet only if it may not block
//   int describe(const Row& row, Term* terms)        its terms, in the order in which they are summed
//   const char* source(int32_t term_row)
//   char* target(const Row& row)
//   const char* bias(const Row& row)                 added last, or null
//   void finish(const Row& row)                      the result is written, by ordinary stores of all lanes
// all called by whole warps. A result is computed in pieces of up to 4 KiB, whose sums stay in registers.
//
// Bulk path: the terms of a piece come through the ring, loads running ahead to the end of the next result. Two lists
// of terms are kept: of the result being summed, and of the next.
#pragma once
#include "element.cuh"
#include "ring.cuh"

namespace ep::cuda {

constexpr int kReduceThreads = 384;
constexpr int kReduceWarps = kReduceThreads / kWarp;
constexpr int kReduceStages = 4;
constexpr int kReduceBytes = 4096;  // of a piece, at most
constexpr int kLaneVectors = kReduceBytes / 16 / kWarp;

// Pieces whose sums fit in registers, and whose rings fit in shared memory. Without bulk copies there are no stages.
inline Cut cut_for_sums(int64_t row_bytes, int list_entries, int64_t shared_bytes, bool bulk) {
  const int64_t room =
      (shared_bytes / kReduceWarps - 8 * (kReduceStages + list_entries)) / kReduceStages / kSlotAlign * kSlotAlign;
  const int64_t largest = bulk && room < kReduceBytes ? room : kReduceBytes;
  Cut cut = cut_row(row_bytes, largest, kReduceWarps, kReduceStages, list_entries);
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
    const int4* row = reinterpret_cast<const int4*>(from);
    int4 held[kLaneVectors];
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      const int at = v * kWarp + lane_id();
      held[v] = at >= vectors ? make_int4(0, 0, 0, 0) : kGlobal ? ptx::ld_coherent(row + at) : row[at];
    }
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) Element::add(of[v], held[v], factor);
  }
  __device__ __forceinline__ void store(char* to, int vectors) const {
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      const int at = v * kWarp + lane_id();
      if (at < vectors) reinterpret_cast<int4*>(to)[at] = Element::narrow(of[v]);
    }
  }
};

// Adds the bias and stores a piece.
template <class Element, class Job>
__device__ __forceinline__ void write_piece(const Job& job, const typename Job::Row& row, const Cut& cut, int piece,
                                            Sums<Element>& sums) {
  const int vectors = static_cast<int>(cut.piece_size(piece) / 16);
  const char* bias = job.bias(row);
  if (bias != nullptr) sums.template add<true>(bias + cut.piece_begin(piece), vectors, 1.0f);
  sums.store(job.target(row) + cut.piece_begin(piece), vectors);
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
      for (int piece = 0; piece < cut_.pieces; ++piece)
        if (!sum_piece(piece)) return;
      job_.finish(row_);
    }
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
    write_piece(job_, row_, cut_, piece, sums);
    return true;
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
  bool has_next_ = false;
  bool load_next_ = false;  // loads have moved on to the next row
};

template <class Element, class Job>
__device__ void reduce_rows_plain(Job& job, const Cut& cut) {
  Term* terms = TermLists(cut).of(0);
  typename Job::Row row{};
  while (job.next(true, &row) == kRow) {
    __syncwarp();
    const int count = job.describe(row, terms);
    __syncwarp();
    for (int piece = 0; piece < cut.pieces; ++piece) {
      Sums<Element> sums;
      sums.clear();
      const int vectors = static_cast<int>(cut.piece_size(piece) / 16);
      for (int t = 0; t < count; ++t)
        sums.template add<true>(job.source(terms[t].row) + cut.piece_begin(piece), vectors, terms[t].factor);
      write_piece(job, row, cut, piece, sums);
    }
    job.finish(row);
  }
}

template <class Element, bool kBulk, class Job>
__device__ __forceinline__ void reduce_rows(Job& job, const Run& run, const Cut& cut) {
  if constexpr (kBulk)
    BulkReducer<Element, Job>(job, run, cut).all();
  else
    reduce_rows_plain<Element>(job, cut);
}

}  // namespace ep::cuda
