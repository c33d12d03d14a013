// Sums rows in float32 and in a fixed order. Each result is the sum of several rows, its terms.
//
// A job finds the next result, its terms, and its target. The jobs are CombineSendJob and CombineRecvJob. A job has
//   struct Row                                       identifies a result; `piece` is the first piece to sum
//   Next next(bool may_block, Row* row)              the warp's next result; kNotYet only if it may not block
//   int list_terms(const Row& row, Term* terms)     lists its terms in summing order; returns how many
//   const char* source(int32_t term_row)             the address of a term's row
//   char* target(const Row& row)                     the address of the result
//   Bias bias(const Row& row)                        the row at which the sum starts
//   void set_factors(const Row& row, Term* terms)   the last chance to set the factors of its terms
//   void prefetch(int unit, int units)              bulk path, before each piece: may find the next result
//   void finish(const Row& row)                      the result is written; writes the values beside it
//   void completed(uint32_t results)                 this many results of the warp are written, and its lanes joined
// Whole warps call all of them. A result is summed in pieces of up to 3.5 KiB, whose sums stay in registers. In small
// batches, warps take single pieces. The list above calls both a result.
//
// Bulk path. The terms of a piece come through the ring (ring.cuh), and loads run ahead to the end of the next result.
// So a warp has two lists of terms: one of the result that it sums, and one of the next result. Sums are written with
// ordinary stores, because bulk stores would wait in the SM's copy engine behind the loads that run ahead.
#pragma once
#include <type_traits>

#include "cuda/core/element.cuh"
#include "cuda/core/ring.cuh"

namespace ep::cuda {

constexpr int kReduceWarps = 16;  // all warps of a CTA, in any role. With more, a warp has too few registers
constexpr int kReduceStages = 4;
constexpr int kVectorBytes = 16;
constexpr int kLaneVectors = 7;  // most vectors of a piece for each lane
constexpr int kLanesBytes = kWarp * kVectorBytes;

// Cuts rows into pieces whose sums fit in registers and whose rings fit in shared memory. In all pieces but the last,
// all lanes have equally many vectors. Without bulk copies there are no stages.
inline Cut cut_for_sums(int64_t row_bytes, int num_tokens, int warps, int list_entries, int64_t shared_bytes,
                        bool bulk) {
  const int64_t room =
      (shared_bytes / warps - 8 * (kReduceStages + list_entries)) / kReduceStages / kLanesBytes * kLanesBytes;
  const int64_t largest = bulk && room < kLaneVectors * kLanesBytes ? room : kLaneVectors * kLanesBytes;
  Cut cut = cut_row(row_bytes, largest, warps, kReduceStages, list_entries, kLanesBytes);
  if (!bulk) cut.stage_bytes = 0;
  if (num_tokens <= kTokensInParts) cut.parts = cut.pieces;
  return cut;
}

// A row of elements, or of float32 with `wide`; null: there is none.
struct Bias {
  const char* from;
  bool wide;
};
// The row of a [T, hidden] bias for one token. `base`: 0: there is none.
__device__ __forceinline__ Bias bias_of(Address base, bool wide, int64_t token, int64_t hidden, int64_t row_bytes) {
  if (base == 0) return {nullptr, false};
  return {at<const char>(base, token * (wide ? hidden * 4 : row_bytes)), wide};
}

struct Term {
  int32_t row;
  float factor;
};
static_assert(sizeof(Term) == 8, "a list entry of a warp");

// The sums of one piece. kExact: the number of vectors of each lane; 0: not known when compiled, and lanes may differ.
template <class Element, int kExact>
struct Sums {
  static constexpr int kMaxVectors = kExact != 0 ? kExact : kLaneVectors;
  float of[kMaxVectors][Element::kPerVector];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v)
#pragma unroll
      for (int i = 0; i < Element::kPerVector; ++i) of[v][i] = 0.0f;
  }
  // Adds `vectors` 16-byte vectors of a row in shared memory, or global memory with kGlobal. All loads come before the
  // first use. kFirst: starts from 0.
  template <bool kGlobal, bool kFirst = false>
  __device__ __forceinline__ void add(const char* from, int vectors, float factor) {
    const int4* row = reinterpret_cast<const int4*>(from) + lane_id();
    int4 held[kMaxVectors];
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v)
      held[v] = has(v, vectors) ? load<kGlobal>(row + v * kWarp) : make_int4(0, 0, 0, 0);
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) Element::template add<kFirst>(of[v], held[v], factor);
  }
  // Starts from `vectors` vectors of the bias, which begins `begin` bytes into a row of elements.
  __device__ __forceinline__ void start(const Bias& bias, int64_t begin, int vectors) {
    if (!bias.wide) return add<true, true>(bias.from + begin, vectors, 1.0f);
    constexpr int kParts = Element::kPerVector / Float32::kPerVector;  // vectors of float32 for one of elements
    const int4* row = reinterpret_cast<const int4*>(bias.from + begin * kParts);
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int4* from = row + (v * kWarp + lane_id()) * kParts + part;
        Float32::widen(of[v] + part * Float32::kPerVector, has(v, vectors) ? ptx::ld_coherent(from) : int4{});
      }
  }
  __device__ __forceinline__ void store(char* to, int vectors) const {
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v)
      if (has(v, vectors)) reinterpret_cast<int4*>(to)[v * kWarp + lane_id()] = Element::narrow(of[v]);
  }

 private:
  static __device__ __forceinline__ bool has(int v, int vectors) {
    return kExact != 0 || v * kWarp + lane_id() < vectors;
  }
  template <bool kGlobal>
  static __device__ __forceinline__ int4 load(const int4* from) {
    if constexpr (kGlobal)
      return ptx::ld_coherent(from);
    else
      return *from;
  }
};

// Starts the sums of a piece from the bias. False if there is none.
template <class Element, int kExact, class Job>
__device__ __forceinline__ bool start_from_bias(const Job& job, const typename Job::Row& row, const Cut& cut, int piece,
                                                Sums<Element, kExact>& sums) {
  const Bias bias = job.bias(row);
  if (bias.from == nullptr) return false;
  sums.start(bias, cut.piece_begin(piece), cut.piece_size(piece) / kVectorBytes);
  return true;
}

template <class Element, int kExact, class Job>
__device__ __forceinline__ void write_piece(const Job& job, const typename Job::Row& row, const Cut& cut, int piece,
                                            const Sums<Element, kExact>& sums) {
  sums.store(job.target(row) + cut.piece_begin(piece), cut.piece_size(piece) / kVectorBytes);
}

// A warp's two lists of terms, used in turns.
struct TermLists {
  Term* lists;
  int entries;  // entries of one list
  __device__ explicit TermLists(const Cut& cut)
      : lists(reinterpret_cast<Term*>(list_of_warp(cut))), entries(cut.list_entries / 2) {}
  __device__ Term* of(int turn) const { return lists + turn * entries; }
};

template <class Element, class Job>
class BulkReducer {
 public:
  __device__ BulkReducer(Job& job, const Run& run, const Cut& cut, Ring<kReduceStages>& ring)
      : job_(job), run_(run), cut_(cut), ring_(ring), lists_(cut) {}

  __device__ bool all() {
    while (find_next(true)) {
      row_ = next_row_;
      count_ = next_count_;
      next_count_ = kNoNext;
      turn_ ^= 1;
      if (load_terms_ != lists_.of(turn_)) begin_loads(row_, count_, turn_);
      job_.set_factors(row_, lists_.of(turn_));
      __syncwarp();
      const int units = cut_.units();
      for (int unit = 0; unit < units; ++unit) {
        job_.prefetch(unit, units);
        if (!sum_piece(row_.piece + unit)) return false;
      }
      job_.finish(row_);
      __syncwarp();
      job_.completed(++results_);
    }
    job_.completed(results_);
    return true;
  }

 private:
  __device__ bool find_next(bool may_block) {
    if (next_count_ != kNoNext) return true;
    if (job_.next(may_block, &next_row_) != kRow) return false;
    __syncwarp();
    next_count_ = job_.list_terms(next_row_, lists_.of(turn_ ^ 1));
    __syncwarp();
    return true;
  }

  // The rows of models in use are cut into pieces of 7, 6 or 4 vectors per lane.
  __device__ __forceinline__ bool sum_piece(int piece) {
    const int32_t bytes = cut_.piece_size(piece);
    if (bytes == 7 * kLanesBytes) return sum_exactly<7>(piece);
    if (bytes == 6 * kLanesBytes) return sum_exactly<6>(piece);
    if (bytes == 4 * kLanesBytes) return sum_exactly<4>(piece);
    return sum_exactly<0>(piece);
  }

  template <int kExact>
  __device__ __forceinline__ bool sum_exactly(int piece) {
    load_ahead();
    Sums<Element, kExact> sums;
    const int vectors = cut_.piece_size(piece) / kVectorBytes;
    const Term* terms = lists_.of(turn_);
    const bool has_bias = start_from_bias(job_, row_, cut_, piece, sums);
    if (!has_bias) {
      if (count_ == 0)
        sums.clear();
      else if (!take_term<true>(sums, vectors, terms[0].factor))
        return false;
    }
    for (int t = has_bias ? 0 : 1; t < count_; ++t) {
      // Fills two or more stages at a time, because the whole warp computes the addresses, and does so before all loads
      // in flight are summed.
      if (load_left_ > 0 && ring_.in_flight() <= kReduceStages / 2) fill_stages();
      if (!take_term<false>(sums, vectors, terms[t].factor)) return false;
    }
    write_piece(job_, row_, cut_, piece, sums);
    return true;
  }
  template <bool kFirst, int kExact>
  __device__ __forceinline__ bool take_term(Sums<Element, kExact>& sums, int vectors, float factor) {
    if (!ring_.wait(run_)) return false;
    sums.template add<false, kFirst>(ring_.stage(ring_.taken), vectors, factor);
    __syncwarp();
    ++ring_.taken;
    return true;
  }

  // Begins to fill the free stages with terms of this result, then of the next one, if it is known. Called while the
  // warp has no sums in registers, because finding a result needs registers, too.
  __device__ __forceinline__ void load_ahead() {
    fill_stages();
    if (load_left_ > 0 || load_terms_ != lists_.of(turn_) || !find_next(false)) return;
    begin_loads(next_row_, next_count_, turn_ ^ 1);
    fill_stages();
  }
  // One lane per stage, for as many stages as are free and have a known term.
  __device__ __forceinline__ void fill_stages() {
    const int units = min(kReduceStages - ring_.in_flight(), load_left_);
    if (lane_id() < units) {
      const uint32_t unit = load_unit_ + lane_id();
      const uint32_t turn = load_count_ == 1 ? unit : __umulhi(unit, load_inverse_);
      const int piece = load_piece_ + static_cast<int>(turn);
      const Term& term = load_terms_[unit - turn * load_count_];
      ring_.fill(ring_.issued + lane_id(), job_.source(term.row) + cut_.piece_begin(piece), cut_.piece_size(piece));
    }
    __syncwarp();
    ring_.issued += units;
    load_unit_ += units;
    load_left_ -= units;
  }
  __device__ __forceinline__ void begin_loads(const typename Job::Row& row, int count, int turn) {
    load_terms_ = lists_.of(turn);
    load_piece_ = row.piece;
    load_count_ = count;
    load_left_ = count * cut_.units();
    load_unit_ = 0;
    if (count > 1) load_inverse_ = UINT32_MAX / count + 1;  // exact, because units are few
  }

  static constexpr int kNoNext = -1;  // in place of a count of terms

  Job& job_;
  const Run& run_;
  const Cut& cut_;
  Ring<kReduceStages>& ring_;
  TermLists lists_;
  typename Job::Row row_{}, next_row_{};
  int count_ = 0, next_count_ = kNoNext;
  const Term* load_terms_ = nullptr;            // terms of the result that is being loaded: this one or the next
  uint32_t load_count_ = 0, load_inverse_ = 0;  // number of these terms, and its inverse
  int load_piece_ = 0;                          // first piece of that result
  uint32_t load_unit_ = 0;
  int load_left_ = 0;  // units that are left to load
  int turn_ = 0;
  uint32_t results_ = 0;  // results that are written
};

template <class Element, class Job>
__device__ void reduce_rows_plain(Job& job, const Cut& cut) {
  Term* terms = TermLists(cut).of(0);
  typename Job::Row row{};
  uint32_t results = 0;
  while (job.next(true, &row) == kRow) {
    __syncwarp();
    const int count = job.list_terms(row, terms);
    job.set_factors(row, terms);
    __syncwarp();
    for (int piece = row.piece; piece < row.piece + cut.units(); ++piece) {
      Sums<Element, 0> sums;
      if (!start_from_bias(job, row, cut, piece, sums)) sums.clear();
      const int vectors = cut.piece_size(piece) / kVectorBytes;
      for (int t = 0; t < count; ++t)
        sums.template add<true>(job.source(terms[t].row) + cut.piece_begin(piece), vectors, terms[t].factor);
      write_piece(job, row, cut, piece, sums);
    }
    job.finish(row);
    __syncwarp();
    job.completed(++results);
  }
  job.completed(results);
}

struct NoRing {
  __device__ explicit NoRing(const Cut&) {}
};
// A warp's ring, which it uses for one job after the other. The plain path has none.
template <bool kBulk>
using ReduceRing = std::conditional_t<kBulk, Ring<kReduceStages>, NoRing>;

// Sums all results of this warp. False if its own loads did not end by the deadline; some may still be in flight.
template <class Element, class Job>
__device__ __forceinline__ bool reduce_rows(Job& job, const Run& run, const Cut& cut, Ring<kReduceStages>& ring) {
  return BulkReducer<Element, Job>(job, run, cut, ring).all();
}
template <class Element, class Job>
__device__ __forceinline__ bool reduce_rows(Job& job, const Run&, const Cut& cut, NoRing&) {
  reduce_rows_plain<Element>(job, cut);
  return true;
}

}  // namespace ep::cuda
