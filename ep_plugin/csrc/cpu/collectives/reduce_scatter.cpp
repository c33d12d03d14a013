// Reduce-scatter: every rank offers a shard for each rank, and sums those for itself in the order of the ranks.
#include "cpu/collectives/pieces.h"
#include "cpu/core/elements.h"

namespace ep::cpu {

namespace {

constexpr int kBlock = 512;  // elements summed at a time: the sums stay in the first-level cache

template <class T>
void sum_chunk(const T* const* from, int ranks, int64_t elements, double scale, T* out) {
  using S = typename Sum<T>::type;
  S sum[kBlock];
  for (int64_t first = 0; first < elements; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, elements - first));
    for (int i = 0; i < count; ++i) sum[i] = widen(from[0][first + i]);
    for (int r = 1; r < ranks; ++r) {
      const T* row = from[r] + first;
      for (int i = 0; i < count; ++i) sum[i] += widen(row[i]);
    }
    if (scale != 1.0)
      for (int i = 0; i < count; ++i) sum[i] *= static_cast<S>(scale);
    for (int i = 0; i < count; ++i) narrow(sum[i], out + first + i);
  }
}

template <class T>
class ReduceScatter {
 public:
  ReduceScatter(const Run& run, const CpuReduceScatterArgs& args)
      : run_(run),
        args_(args),
        comm_(args.comm),
        part_(scatter_chunk_bytes(comm_.num_ranks)),
        pieces_(run, args.piece, kOpReduceScatter, args.element, part_) {}

  bool run() {
    offer();
    if (!gate(run_)) return false;
    Patience patience;
    while (offered_ < pieces_.count() || summed_ < pieces_.count()) {
      const bool moved = offer();
      const int missing = summed_ < pieces_.count() ? first_missing() : -1;
      if (summed_ < pieces_.count() && missing < 0) {
        if (!sum()) return false;
        patience = Patience{};
      } else if (moved) {
        patience = Patience{};
      } else if (missing >= 0 ? !pieces_.keep_waiting_for(patience, missing, summed_)
                              : !pieces_.keep_waiting_for_reader(patience, offered_)) {
        return false;
      }
    }
    return pieces_.finish();
  }

 private:
  bool offer() {
    if (offered_ == pieces_.count() || !pieces_.slot_is_free(offered_)) return false;
    if (pieces_.staged()) {
      for (int r = 0; r < comm_.num_ranks; ++r)
        if (r != comm_.rank)
          copy_bytes(pieces_.slot(offered_) + r * part_, at<char>(args_.inputs[r], pieces_.begin_of(offered_)),
                     pieces_.bytes_of(offered_));
      ++offered_;
    } else {
      offered_ = pieces_.count();
    }
    pieces_.post(offered_);
    return true;
  }

  int first_missing() const {
    for (int step = 1; step < comm_.num_ranks; ++step) {
      const int source = (comm_.rank + step) % comm_.num_ranks;
      if (!pieces_.is_posted(source, summed_)) return source;
    }
    return -1;
  }

  bool sum() {
    const T* from[kMaxRanks];
    for (int r = 0; r < comm_.num_ranks; ++r) {
      const bool own = r == comm_.rank;  // of no elements it may lie nowhere
      const char* bytes = own ? at<char>(args_.inputs[r], pieces_.begin_of(summed_))
                              : pieces_.bytes_from(r, comm_.rank, summed_, comm_.rank * part_);
      if (bytes == nullptr && !own) return false;
      from[r] = reinterpret_cast<const T*>(bytes);
    }
    sum_chunk<T>(from, comm_.num_ranks, pieces_.bytes_of(summed_) / static_cast<int64_t>(sizeof(T)), args_.scale,
                 at<T>(args_.output, pieces_.begin_of(summed_)));
    ++summed_;
    for (int r = 0; r < comm_.num_ranks; ++r)
      if (r != comm_.rank) pieces_.consume(r, summed_);
    return true;
  }

  const Run& run_;
  const CpuReduceScatterArgs& args_;
  const Comm& comm_;
  const int64_t part_;
  Pieces pieces_;
  int64_t offered_ = 0;
  int64_t summed_ = 0;
};

}  // namespace

void reduce_scatter(const CpuReduceScatterArgs& args) {
  const Comm& comm = args.comm;
  const Run run{comm, kReduceScatter, 0};
  bool done = false;
  if (is_well(comm))
    with_element(args.element, [&](auto type) { done = ReduceScatter<decltype(type)>(run, args).run(); });
  if (!done) poison(at<char>(args.output), args.piece.bytes);
}

}  // namespace ep::cpu
