// All-gather: every rank posts its shard and copies the shards of its peers to its outputs.
#include "cpu/collectives/pieces.h"

namespace ep::cpu {

namespace {

// Moves whatever can be moved: this rank's next chunk into a slot, or the next chunk of a peer out of one.
class AllGather {
 public:
  AllGather(const Run& run, const CpuAllGatherArgs& args)
      : run_(run),
        args_(args),
        comm_(args.comm),
        pieces_(run, args.piece, kOpAllGather, 0, gather_chunk_bytes()),
        offered_(0),
        left_(comm_.num_ranks - 1) {}

  bool run() {
    offer();
    if (!gate(run_)) return false;
    Patience patience;
    while (offered_ < pieces_.count() || left_ > 0) {
      bool moved = offer();
      for (int step = 1; step < comm_.num_ranks; ++step) {
        const int source = (comm_.rank + step) % comm_.num_ranks;
        if (read_[source] == pieces_.count() || !pieces_.is_posted(source, read_[source])) continue;
        if (!take(source)) return false;
        moved = true;
      }
      if (moved)
        patience = Patience{};
      else if (!keep_waiting(patience))
        return false;
    }
    return pieces_.finish();
  }

 private:
  bool offer() {
    if (offered_ == pieces_.count() || !pieces_.slot_is_free(offered_)) return false;
    if (pieces_.staged()) {
      copy_bytes(pieces_.slot(offered_), at<char>(args_.input, pieces_.begin_of(offered_)), pieces_.bytes_of(offered_));
      ++offered_;
    } else {
      offered_ = pieces_.count();
    }
    pieces_.post(offered_);
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

  bool keep_waiting(Patience& patience) {
    for (int step = 1; step < comm_.num_ranks; ++step) {
      const int source = (comm_.rank + step) % comm_.num_ranks;
      if (read_[source] < pieces_.count()) return pieces_.keep_waiting_for(patience, source, read_[source]);
    }
    return pieces_.keep_waiting_for_reader(patience, offered_);
  }

  const Run& run_;
  const CpuAllGatherArgs& args_;
  const Comm& comm_;
  Pieces pieces_;
  int64_t offered_;
  int left_;
  int64_t read_[kMaxRanks] = {};
};

}  // namespace

void all_gather(const CpuAllGatherArgs& args) {
  const Comm& comm = args.comm;
  const Run run{comm, kAllGather, 0};
  const int64_t bytes = args.piece.bytes;
  if (is_well(comm)) {
    if (args.outputs[comm.rank] != args.input)
      copy_bytes(at<char>(args.outputs[comm.rank]), at<char>(args.input), bytes);
    if (AllGather(run, args).run()) return;
  }
  for (int r = 0; r < comm.num_ranks; ++r)
    if (r != comm.rank) poison(at<char>(args.outputs[r]), bytes);
}

}  // namespace ep::cpu
