// Pieces and their chunks, see pieces.h.
#include "cpu/collectives/pieces.h"

namespace ep {

namespace cpu {

namespace {
uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
}  // namespace

Pieces::Pieces(const Run& run, const Piece& piece, CollectiveOp op, int64_t element, int64_t chunk_bytes)
    : run_(run),
      comm_(run.comm),
      piece_(piece),
      op_(op),
      element_(element),
      chunk_bytes_(chunk_bytes),
      count_(std::max<int64_t>(1, ceil_div(piece.bytes, chunk_bytes))),
      base_(control_of(run.comm, run.comm.rank).chunks),
      header_index_(control_of(run.comm, run.comm.rank).operations % kCells) {}

int Pieces::slowest_reader() const {
  const CollectiveControl& mine = control_of(comm_, comm_.rank);
  int slowest = comm_.rank;
  uint64_t least = UINT64_MAX;
  for (int r = 0; r < comm_.num_ranks; ++r) {
    if (r == comm_.rank) continue;
    const uint64_t seen = load(mine.consumed[r].value);
    if (seen < least) least = seen, slowest = r;
  }
  return slowest;
}

bool Pieces::cell_is_free(int64_t chunk) const {
  const uint64_t needed = base_ + static_cast<uint64_t>(chunk) + 1;
  if (needed <= kCells) return true;
  const CollectiveControl& mine = control_of(comm_, comm_.rank);
  for (int r = 0; r < comm_.num_ranks; ++r)
    if (r != comm_.rank && load(mine.consumed[r].value) < needed - kCells) return false;
  return true;
}

char* Pieces::cell(int64_t chunk) const {
  return control_of(comm_, comm_.rank).cells[(base_ + static_cast<uint64_t>(chunk)) % kCells];
}

void Pieces::post(int64_t end) {
  CollectiveControl& mine = control_of(comm_, comm_.rank);
  if (load(mine.posted) == base_) {
    PieceHeader& header = mine.headers[header_index_];
    header.op = op_;
    header.bytes = piece_.bytes;
    header.element = element_;
    header.block = piece_.block;
    std::copy_n(piece_.offset, kMaxRanks, header.offset);
  }
  signal(&mine.posted, base_ + static_cast<uint64_t>(end));
}

bool Pieces::is_posted(int source, int64_t chunk) const {
  return load(control_of(comm_, source).posted) > base_ + static_cast<uint64_t>(chunk);
}

bool Pieces::check_header(int source, const PieceHeader& theirs) const {
  const int64_t mine[kPieceFields] = {op_, piece_.bytes, element_};
  const int64_t seen[kPieceFields] = {theirs.op, theirs.bytes, theirs.element};
  for (int field = 0; field < kPieceFields; ++field)
    if (seen[field] != mine[field]) return fail(comm_, kDisagree, run_.step, source, field, mine[field], seen[field]);
  return true;
}

const char* Pieces::bytes_from(int source, int dest, int64_t chunk, int64_t cell_offset) const {
  const CollectiveControl& theirs = control_of(comm_, source);
  const PieceHeader& header = theirs.headers[header_index_];
  if (!check_header(source, header)) return nullptr;
  const int64_t block = header.block, offset = header.offset[dest];
  if (block < 0) return theirs.cells[(base_ + static_cast<uint64_t>(chunk)) % kCells] + cell_offset;
  const Address from = block < piece_.num_blocks ? at<Address>(piece_.blocks)[block * kMaxRanks + source] : 0;
  if (from == 0) return fail(comm_, kBadData, run_.step, source, 0, piece_.num_blocks, block), nullptr;
  const int64_t limit = at<int64_t>(piece_.block_bytes)[block] - piece_.bytes;
  if (offset < 0 || offset > limit) return fail(comm_, kBadData, run_.step, source, 1, limit, offset), nullptr;
  return at<char>(from, offset + begin_of(chunk));
}

void Pieces::consume(int source, int64_t end) const {
  signal(&control_of(comm_, source).consumed[comm_.rank].value, base_ + static_cast<uint64_t>(end));
}

bool Pieces::keep_waiting_for(Deadline& deadline, int source, int64_t chunk) const {
  return deadline.keep_waiting(run_, source, base_ + static_cast<uint64_t>(chunk) + 1,
                               load(control_of(comm_, source).posted));
}

bool Pieces::keep_waiting_for_reader(Deadline& deadline, int64_t chunk) const {
  const int slowest = slowest_reader();
  const uint64_t needed = base_ + static_cast<uint64_t>(chunk) + 1;
  return deadline.keep_waiting(run_, slowest, needed > kCells ? needed - kCells : 0,
                               load(control_of(comm_, comm_.rank).consumed[slowest].value));
}

bool Pieces::finish() {
  CollectiveControl& mine = control_of(comm_, comm_.rank);
  const uint64_t end = base_ + static_cast<uint64_t>(count_);
  if (!staged())
    for (int r = 0; r < comm_.num_ranks; ++r)
      if (r != comm_.rank && !wait_at_least(run_, &mine.consumed[r].value, end, r)) return false;
  mine.chunks = end;
  ++mine.operations;
  return true;
}

}  // namespace cpu

}  // namespace ep
