// Reduce-scatter on CPUs: every rank posts its shard for each rank, and sums all ranks' shards for itself in rank
// order. pieces.h describes buffers and memory order. After a fault, the output is filled with 0xFF bytes.
#include "cpu/collectives/pieces.h"
#include "cpu/core/sums.h"

namespace ep::cpu {

namespace {

template <class T>
void sum_chunk(const T* const* from, int ranks, int64_t elements, double scale, T* out) {
  using S = typename Sum<T>::type;
  S sums[kSumBlock];
  S* const sum = sums;
  for (int64_t first = 0; first < elements; first += kSumBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kSumBlock, elements - first));
    vectorize(EP_LOOP {
      for (int i = 0; i < count; ++i) sum[i] = widen(from[0][first + i]);
    });
    for (int r = 1; r < ranks; ++r) accumulate<T>(sum, from[r] + first, count);
    if (scale != 1.0)
      for (int i = 0; i < count; ++i) sum[i] *= static_cast<S>(scale);
    narrow_all(sum, count, out + first);
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
    post_next();
    if (!hold_at_gate(run_)) return false;
    Deadline deadline;
    while (posted_ < pieces_.count() || summed_ < pieces_.count()) {
      const bool moved = post_next();
      const int missing = summed_ < pieces_.count() ? first_missing() : -1;
      if (summed_ < pieces_.count() && missing < 0) {
        if (!sum()) return false;
        deadline = Deadline{};
      } else if (moved) {
        deadline = Deadline{};
      } else if (missing >= 0 ? !pieces_.keep_waiting_for(deadline, missing, summed_)
                              : !pieces_.keep_waiting_for_reader(deadline, posted_)) {
        return false;
      }
    }
    return pieces_.finish();
  }

 private:
  bool post_next() {
    if (posted_ == pieces_.count() || !pieces_.cell_is_free(posted_)) return false;
    if (pieces_.staged()) {
      for (int r = 0; r < comm_.num_ranks; ++r)
        if (r != comm_.rank)
          copy_bytes(pieces_.cell(posted_) + r * part_, at<char>(args_.inputs[r], pieces_.begin_of(posted_)),
                     pieces_.bytes_of(posted_));
      ++posted_;
    } else {
      posted_ = pieces_.count();
    }
    pieces_.post(posted_);
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
      const bool own = r == comm_.rank;  // its address may be 0 if the shard is empty
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
  int64_t posted_ = 0;
  int64_t summed_ = 0;
};

}  // namespace

void reduce_scatter(const CpuReduceScatterArgs& args) {
  const Comm& comm = args.comm;
  const Run run{comm, kReduceScatter, 0};
  bool done = false;
  if (has_no_fault(comm))
    with_element(args.element, [&](auto type) { done = ReduceScatter<decltype(type)>(run, args).run(); });
  if (!done) poison(at<char>(args.output), args.piece.bytes);
}

}  // namespace ep::cpu
