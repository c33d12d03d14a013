// All-gather on CPUs: every rank posts its shard, and copies the shards of its peers to its outputs. pieces.h describes
// buffers and memory order. After a fault, the outputs of peers' shards are filled with 0xFF bytes.
#include "cpu/collectives/pieces.h"

namespace ep::cpu {

namespace {

// One gather. It moves any chunk that can move: this rank's next chunk into a cell, or a peer's next chunk to its
// output.
class AllGather {
 public:
  AllGather(const Run& run, const CpuAllGatherArgs& args)
      : run_(run),
        args_(args),
        comm_(args.comm),
        pieces_(run, args.piece, kOpAllGather, 0, gather_chunk_bytes()),
        posted_(0),
        left_(comm_.num_ranks - 1) {}

  bool run() {
    post_next();
    if (!hold_at_gate(run_)) return false;
    Deadline deadline;
    while (posted_ < pieces_.count() || left_ > 0) {
      bool moved = post_next();
      for (int step = 1; step < comm_.num_ranks; ++step) {
        const int source = (comm_.rank + step) % comm_.num_ranks;
        if (read_[source] == pieces_.count() || !pieces_.is_posted(source, read_[source])) continue;
        if (!take(source)) return false;
        moved = true;
      }
      if (moved)
        deadline = Deadline{};
      else if (!keep_waiting(deadline))
        return false;
    }
    return pieces_.finish();
  }

 private:
  bool post_next() {
    if (posted_ == pieces_.count() || !pieces_.cell_is_free(posted_)) return false;
    if (pieces_.staged()) {
      copy_bytes(pieces_.cell(posted_), at<char>(args_.input, pieces_.begin_of(posted_)), pieces_.bytes_of(posted_));
      ++posted_;
    } else {
      posted_ = pieces_.count();
    }
    pieces_.post(posted_);
    return true;
  }

  bool take(int source) {
    const int64_t chunk = read_[source];
    const char* from = pieces_.bytes_from(source, 0, chunk, 0);
    if (from == nullptr) return false;
    copy_bytes(at<char>(args_.outputs[source], pieces_.begin_of(chunk)), from, pieces_.bytes_of(chunk));
    read_[source] = chunk + 1;
    pieces_.consume(source, chunk + 1);
    if (read_[source] == pieces_.count()) --left_;
    return true;
  }

  bool keep_waiting(Deadline& deadline) {
    for (int step = 1; step < comm_.num_ranks; ++step) {
      const int source = (comm_.rank + step) % comm_.num_ranks;
      if (read_[source] < pieces_.count()) return pieces_.keep_waiting_for(deadline, source, read_[source]);
    }
    return pieces_.keep_waiting_for_reader(deadline, posted_);
  }

  const Run& run_;
  const CpuAllGatherArgs& args_;
  const Comm& comm_;
  Pieces pieces_;
  int64_t posted_;
  int left_;
  int64_t read_[kMaxRanks] = {};
};

}  // namespace

void all_gather(const CpuAllGatherArgs& args) {
  const Comm& comm = args.comm;
  const Run run{comm, kAllGather, 0};
  const int64_t bytes = args.piece.bytes;
  if (has_no_fault(comm)) {
    if (args.outputs[comm.rank] != args.input)
      copy_bytes(at<char>(args.outputs[comm.rank]), at<char>(args.input), bytes);
    if (AllGather(run, args).run()) return;
  }
  for (int r = 0; r < comm.num_ranks; ++r)
    if (r != comm.rank) poison(at<char>(args.outputs[r]), bytes);
}

}  // namespace ep::cpu
