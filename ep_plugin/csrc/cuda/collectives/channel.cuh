// A channel of a reduce-scatter: the CTAs of one index on all ranks, their cells, and the counts of chunks in them.
//
// Roles. The warps of a CTA share counters in shared memory. The send-signal warps signal to each rank how many chunks
// have arrived in its cells, and read how many cells are free there. The receive-signal warp reads how many chunks
// have arrived here, and signals to all ranks how many of them have been read. reduce_scatter.cu has the other warps.
// Buffers. cells[owner] is [channel][source][cell]; a cell is one chunk. Chunks are counted over all operations of the
// communicator. A chunk's cell is its number modulo the number of cells.
// Memory order. A chunk's bulk store is complete before the chunk is counted, with release order in the CTA (plain
// path: lanes store, then join). The send-signal warp acquires the count, fences once at system scope for all chunks,
// and stores the words. The peer's receive-signal warp acquires them at system scope and releases them in its CTA,
// where summing warps acquire them. The way back is the same: reads end before they are counted. A system fence waits
// for everything that its SM has in flight, so both warps fence as rarely as the number of cells allows.
#pragma once
#include "cuda/collectives/barrier.cuh"

namespace ep::cuda {

constexpr int kWarps = 20;  // with more, a thread has too few registers
constexpr int kThreads = kWarps * kWarp;
constexpr int kSendWarps = 4;

// The warps of a CTA: those that sum, kSendWarps that send, the receive-signal warp, and the send-signal warps, which
// have a lane for each rank.
struct Roles {
  int send, recv_signal, send_signal;  // the first warp of each

  EP_HD explicit Roles(int ranks)
      : send(kWarps - static_cast<int>(ceil_div(ranks, kWarp)) - 1 - kSendWarps),
        recv_signal(send + kSendWarps),
        send_signal(recv_signal + 1) {}
};

// Counters that the warps of a CTA share, in chunks of this operation. They only grow. In shared memory.
struct Counters {
  int32_t arrived;                      // chunks that have arrived from all ranks
  int32_t rows_read[kMaxChannelCells];  // by cell: rows of its chunks that have been read, over the whole operation
  int32_t room[kMaxRanks];              // by rank: chunks for which its cells have room, over the whole operation
  int32_t sent[kMaxSourceCells];        // by rank and cell: 1 + the last chunk that was sent there

  // All threads, before the CTA's next barrier.
  __device__ void clear() {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Counters) / 4); i += blockDim.x)
      reinterpret_cast<int32_t*>(this)[i] = 0;
  }
};

// This CTA's channel in one operation. The channel's chunks are numbered from 0, and so are the rows of all its chunks.
class Channel {
 public:
  __device__ Channel(const ReduceScatterArgs& args, const Run& run, int chunk_shift, Counters& counters)
      : args_(args),
        run_(run),
        control_(device_control(args.comm, args.comm.rank)),
        index_(static_cast<int>(blockIdx.x)),
        chunk_shift_(chunk_shift),
        cells_(channel_cells(args.comm.num_ranks)),
        before_(control_.chunks[index_]),
        counters_(counters) {}

  __device__ int chunks() const {
    const int64_t all = ceil_div(args_.bytes, kSumRowBytes << chunk_shift_);
    return static_cast<int>(all <= index_ ? 0 : (all - 1 - index_) / gridDim.x + 1);
  }
  // The row of the shard that is the channel's row of this number. Both numbers grow together.
  __device__ int64_t row_of_shard(int row) const { return row_of_chunk(chunk_of(row)) + row_in_chunk(row); }
  // The cell at rank `owner` for a chunk of another rank, `source`.
  __device__ char* cell(int owner, int source, int chunk) const {
    const int other = source < owner ? source : source - 1;
    const int64_t cell = (index_ * (args_.comm.num_ranks - 1) + other) * cells_ + cell_index(chunk);
    const Address cells = owner == args_.comm.rank ? args_.own_cells : address_in(args_.cells, owner);
    return at<char>(cells, cell * kChannelCellBytes);
  }

  // --- Summing warps
  // Rank `source`'s term of a row.
  __device__ const char* term(int row, int source) const {
    const int rank = args_.comm.rank;
    if (source == rank) return at<const char>(args_.inputs[rank], row_of_shard(row) * kSumRowBytes);
    return cell(rank, source, chunk_of(row)) + row_in_chunk(row) * kSumRowBytes;
  }
  // Waits until the chunk of a row has arrived from all ranks. `known`: the number of arrived chunks that this warp has
  // seen.
  __device__ bool wait_arrived(int row, int* known) const {
    const int chunk = chunk_of(row);
    if (chunk < *known) return true;
    if (!reaches(&counters_.arrived, chunk + 1, true)) return false;
    int arrived = 0;
    if (lane_id() == 0) arrived = ptx::ld_acquire_cta(&counters_.arrived);
    *known = __shfl_sync(kAllLanes, arrived, 0);
    __syncwarp();
    return true;
  }
  // All lanes: counts the row, of which this warp has read the terms of all ranks.
  __device__ void count_read(int row) const {
    __syncwarp();
    if (lane_id() == 0) ptx::red_add_release_cta(&counters_.rows_read[cell_index(chunk_of(row))], 1);
  }

  // --- Sending warps
  __device__ bool has_room(int chunk, int to, bool may_wait) const {
    return reaches(&counters_.room[to], chunk + 1, may_wait);
  }
  // This rank's chunk for rank `to`.
  __device__ const char* chunk_for(int chunk, int to) const {
    return at<const char>(args_.inputs[to], row_of_chunk(chunk) * kSumRowBytes);
  }
  __device__ int64_t chunk_bytes(int chunk) const {
    return min(args_.bytes - row_of_chunk(chunk) * kSumRowBytes, kSumRowBytes << chunk_shift_);
  }
  // One thread, when its stores of the chunk are complete.
  __device__ void count_sent(int chunk, int to) const { ptx::red_max_release_cta(sent_word(chunk, to), chunk + 1); }

  // --- The send-signal warps: one lane per rank
  __device__ void signal_arrived() const {
    const Comm& comm = args_.comm;
    const int to = static_cast<int>(threadIdx.x) - Roles(comm.num_ranks).send_signal * kWarp, all = chunks();
    const bool is_peer = to < comm.num_ranks && to != comm.rank;
    const uint64_t* consumed = &control_.consumed[index_][is_peer ? to : 0];
    int signalled = is_peer ? 0 : all, room = is_peer ? 0 : all;
    int sent = signalled;
    Deadline deadline;
    while (__any_sync(kAllLanes, signalled < all)) {
      const int sent_before = sent, room_before = room;
      if (room < all && room - sent <= cells_ / 2) room = static_cast<int>(peer::acquire(consumed) - before_) + cells_;
      if (room > room_before) {
        ptx::fence_proxy_async();  // bulk stores overwrite what that rank has read
        ptx::red_max_release_cta(&counters_.room[to], room);
      }
      while (sent < all && ptx::ld_acquire_cta(sent_word(sent, to)) > sent) ++sent;
      const int unsignalled = __reduce_add_sync(kAllLanes, sent - signalled);  // signalled before they fill the cells
      if (unsignalled >= kSendWarps || __any_sync(kAllLanes, signalled < sent && sent == all)) {
        peer::fence();
        if (sent > signalled)
          peer::store(&device_control(comm, to).arrived[index_][comm.rank], before_ + sent,
                      sum_word(args_.bytes, args_.element, run_.epoch));
        signalled = sent;
        continue;
      }
      const bool waits = sent < all && sent == room;  // for that rank. Otherwise for warps of this CTA
      if (!waits || sent > sent_before || room > room_before) deadline = Deadline{};
      const bool go_on =
          !waits || deadline.keep_waiting(run_, to, 0, before_ + room - cells_ + 1, before_ + room - cells_);
      if (!__all_sync(kAllLanes, go_on && !faulted(comm))) return;
    }
  }

  // --- The receive-signal warp: its lanes share the ranks
  __device__ void signal_consumed() const {
    const Comm& comm = args_.comm;
    const int all = chunks();
    int arrived = 0, read = 0, signalled = 0;
    Deadline deadline;
    while (signalled < all) {
      bool go_on = true;
      int here = all, last = -1;  // chunks that have come from all ranks of this lane, and the rank that is behind
      for (int from = lane_id(); arrived < all && from < comm.num_ranks; from += kWarp) {
        if (from == comm.rank) continue;
        uint64_t count, properties;
        peer::acquire(&control_.arrived[index_][from], &count, &properties);
        const int of_rank = static_cast<int>(count - before_);
        go_on = go_on && (of_rank <= 0 || check(properties, of_rank >= all, from));
        if (of_rank < here) here = of_rank, last = from;
      }
      const int arrived_before = arrived, read_before = read;
      arrived = max(arrived, min(all, static_cast<int>(__reduce_min_sync(kAllLanes, here))));
      if (!__all_sync(kAllLanes, go_on)) return;
      __syncwarp();  // what any lane has acquired, lane 0 may pass on
      if (arrived > arrived_before && lane_id() == 0) ptx::red_max_release_cta(&counters_.arrived, arrived);
      read = chunks_read(read, arrived);
      if (read - signalled >= cells_ / 4 || read == all) {
        __syncwarp();
        peer::fence();
        for (int from = lane_id(); from < comm.num_ranks; from += kWarp)
          if (from != comm.rank) peer::store(&device_control(comm, from).consumed[index_][comm.rank], before_ + read);
        signalled = read;
      }
      if (arrived > arrived_before || read > read_before) {
        deadline = Deadline{};
        continue;
      }
      if (last >= 0 && here <= arrived)
        go_on = check_size(run_, last, args_.bytes) && deadline.keep_waiting(run_, last, 0, arrived + 1, here);
      if (!__all_sync(kAllLanes, go_on && !faulted(comm))) return;
    }
  }

 private:
  __device__ int32_t* sent_word(int chunk, int to) const { return &counters_.sent[to * cells_ + cell_index(chunk)]; }
  __device__ int cell_index(int chunk) const { return static_cast<int>(before_ + chunk) & (cells_ - 1); }
  __device__ int chunk_of(int row) const { return row >> chunk_shift_; }
  __device__ int row_in_chunk(int row) const { return row & ((1 << chunk_shift_) - 1); }
  __device__ int64_t row_of_chunk(int chunk) const {
    return (static_cast<int64_t>(chunk) * gridDim.x + index_) << chunk_shift_;
  }

  // All lanes: whether a word of this CTA's counters is at least `value`. With may_wait, waits until it is, or a fault.
  __device__ bool reaches(int32_t* word, int value, bool may_wait) const {
    int there = 0;
    if (lane_id() == 0) {
      for (;;) {
        there = ptx::ld_acquire_cta(word) >= value ? 1 : 0;
        if (there || !may_wait || faulted(args_.comm)) break;
        __nanosleep(100);
      }
    }
    there = __shfl_sync(kAllLanes, there, 0);
    __syncwarp();  // what lane 0 has acquired, all lanes may read
    return there != 0;
  }

  // The number of chunks that have been read. At least `read` have been, and `arrived` have arrived. The rows of each
  // cell are counted over the whole operation.
  __device__ int chunks_read(int read, int arrived) const {
    const int chunk = read + lane_id();
    bool done = false;
    if (lane_id() < cells_ && chunk < arrived) {
      const int64_t rows = ceil_div(args_.bytes, kSumRowBytes) - row_of_chunk(chunk);
      const int of_chunk = static_cast<int>(min(rows, int64_t{1} << chunk_shift_));
      // Rows of earlier chunks in this cell. Only the last chunk of all has fewer rows than others.
      const int earlier = chunk / cells_ << chunk_shift_;
      done = ptx::ld_acquire_cta(&counters_.rows_read[cell_index(chunk)]) >= earlier + of_chunk;
    }
    const unsigned not_done = ~__ballot_sync(kAllLanes, done);
    return read + (not_done == 0 ? kWarp : __ffs(static_cast<int>(not_done)) - 1);
  }

  // Checks the word beside a peer's count. The peer may be at a later operation if all chunks of this one have arrived.
  __device__ bool check(uint64_t theirs, bool all_arrived, int peer) const {
    const uint64_t mine = sum_word(args_.bytes, args_.element, run_.epoch);
    if (theirs == mine || (all_arrived && sum_epoch(theirs) != sum_epoch(mine))) return true;
    const int64_t bytes = sum_bytes(theirs), element = sum_element(theirs);
    return bytes != args_.bytes ? fail(run_.comm, kDisagree, run_.step, peer, 1, args_.bytes, bytes)
                                : fail(run_.comm, kDisagree, run_.step, peer, 2, args_.element, element);
  }

  const ReduceScatterArgs& args_;
  const Run& run_;
  DeviceControl& control_;
  const int index_;
  const int chunk_shift_;  // log2 of the rows of a chunk
  const int cells_;        // for each source
  const uint64_t before_;  // chunks of earlier operations
  Counters& counters_;
};

}  // namespace ep::cuda
