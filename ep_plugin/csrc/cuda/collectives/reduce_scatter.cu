// Reduce-scatter inside a node: each rank pushes its shards to the ranks that sum them, in float32 and in rank order.
//
// Shards travel in chunks, through slots at the rank that sums; the CTAs of one index on all ranks are a lane, with
// slots and chunks of its own (collectives.h). Nobody but a rank itself touches its input and output: any memory will
// do, and ranks need not have come to the operation before its first chunk is pushed.
//
// Roles. In each CTA some warps push, some sum, and two keep the books with the peers, so that the others look at
// shared memory alone. Pushing warps take chunks for one rank after the other, as far as slots are free there. The
// sender tells each rank how many have landed. The receiver finds out how many have landed from all ranks; summing
// warps take those row by row; and it tells all ranks how many chunks have been read.
// Progress. A push waits for the sums of lane_slots chunks before, a sum for the pushes of its own chunk: the first
// chunk that is not summed everywhere never waits for a later one. A warp that waits for a slot has counted all that
// it has pushed. Launched cooperatively: a CTA waits for those of its index on the peers.
// Memory order. A chunk's bulk store is complete before it is counted, with release in the CTA (plain path: lanes
// store, and join). The sender acquires that, fences at system scope, once for all chunks that it tells of, and stores
// the word. The receiver acquires it at system scope and passes it on with release in the CTA, where who sums acquires
// it. Reads are over before they are counted, and told of in the same way. Fences are what this kernel has least of:
// each waits for all that its SM has under way.
#include "cuda/collectives/rendezvous.cuh"
#include "cuda/core/copy.cuh"
#include "cuda/core/element.cuh"

namespace ep::cuda {

namespace {

constexpr int kSumWarps = 14;
constexpr int kSendWarps = 4;
constexpr int kSender = kSumWarps + kSendWarps, kReceiver = kSender + 1;  // a warp each
constexpr int kThreads = (kReceiver + 1) * kWarp;
constexpr int kAhead = 4;  // words of one thread under way, of each of ...
constexpr int kTerms = 2;  // ... so many ranks

// What the warps of a CTA tell each other, in chunks of this operation. Words only grow.
struct Books {
  int32_t landed;                             // from all ranks
  int32_t rows_read[kMostLaneSlots];          // of the chunks in these slots, over the whole operation
  int32_t room[kMaxRanks];                    // chunks that the slots of a rank have room for
  int32_t pushed[kMaxRanks][kMostLaneSlots];  // one more than the last chunk that has been pushed to the slot

  // All threads, before the CTA's next barrier.
  __device__ void clear() {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Books) / 4); i += blockDim.x)
      reinterpret_cast<int32_t*>(this)[i] = 0;
  }
};

// This CTA's part of the operation. Its chunks are numbered from 0 here, and its rows through all of them.
class Lane {
 public:
  __device__ Lane(const ReduceScatterArgs& args, const Run& run, int chunk_shift, Books& books)
      : args_(args),
        run_(run),
        control_(device_control(args.comm, args.comm.rank)),
        index_(static_cast<int>(blockIdx.x)),
        chunk_shift_(chunk_shift),
        slots_(lane_slots(args.comm.num_ranks)),
        before_(control_.chunks[index_]),
        books_(books) {}

  __device__ int chunks() const {
    const int64_t all = ceil_div(args_.bytes, kSumRowBytes << chunk_shift_);
    return static_cast<int>(all <= index_ ? 0 : (all - 1 - index_) / gridDim.x + 1);
  }
  // In the shard, the row of this number in the lane; rows follow each other as the numbers do.
  __device__ int64_t row_of_shard(int row) const { return row_of_chunk(chunk_of(row)) + row_in_chunk(row); }
  // Of another rank than the source.
  __device__ char* slot(int owner, int source, int chunk) const {
    const int place = source < owner ? source : source - 1;
    const int64_t slot = (index_ * (args_.comm.num_ranks - 1) + place) * slots_ + slot_index(chunk);
    return at<char>(args_.slots[owner], slot * kLaneSlotBytes);
  }

  // --- Summing warps
  // Where rank `source`'s term of a row lies.
  __device__ const char* term(int row, int source) const {
    const int rank = args_.comm.rank;
    if (source == rank) return at<const char>(args_.inputs[rank], row_of_shard(row) * kSumRowBytes);
    return slot(rank, source, chunk_of(row)) + row_in_chunk(row) * kSumRowBytes;
  }
  // Waits until the chunk of a row has landed from all ranks; `known` is what this warp has heard of before.
  __device__ bool wait_landed(int row, int* known) const {
    const int chunk = chunk_of(row);
    if (chunk < *known) return true;
    if (!reaches(&books_.landed, chunk + 1, true)) return false;
    int landed = 0;
    if (lane_id() == 0) landed = ptx::read_acquire_cta(&books_.landed);
    *known = __shfl_sync(kAllLanes, landed, 0);
    __syncwarp();
    return true;
  }
  // All lanes: this warp has read the row, from all ranks.
  __device__ void count_read(int row) const {
    __syncwarp();
    if (lane_id() == 0) ptx::add_release_cta(&books_.rows_read[slot_index(chunk_of(row))], 1);
  }

  // --- Pushing warps
  __device__ bool has_room(int chunk, int to, bool may_wait) const {
    return reaches(&books_.room[to], chunk + 1, may_wait);
  }
  // This rank's chunk for rank `to`.
  __device__ const char* chunk_for(int chunk, int to) const {
    return at<const char>(args_.inputs[to], row_of_chunk(chunk) * kSumRowBytes);
  }
  __device__ int64_t chunk_bytes(int chunk) const {
    return min(args_.bytes - row_of_chunk(chunk) * kSumRowBytes, kSumRowBytes << chunk_shift_);
  }
  // One thread: its stores are complete.
  __device__ void count_pushed(int chunk, int to) const {
    ptx::raise_release_cta(&books_.pushed[to][slot_index(chunk)], chunk + 1);
  }

  // --- The sender; a lane for each rank
  __device__ void tell_what_lands() const {
    const Comm& comm = args_.comm;
    const int to = lane_id(), all = chunks();
    const bool is_peer = to < comm.num_ranks && to != comm.rank;
    const uint64_t* freed = &control_.freed[index_][is_peer ? to : 0];
    int told = is_peer ? 0 : all, room = is_peer ? 0 : all;
    int pushed = told;
    Patience patience;
    while (__any_sync(kAllLanes, told < all)) {
      const int pushed_before = pushed, room_before = room;
      if (room < all && room - pushed <= slots_ / 2)
        room = static_cast<int>(ptx::ld_acquire_sys(freed) - before_) + slots_;
      if (room > room_before) {
        ptx::fence_proxy_async();  // bulk stores overwrite what that rank has read
        ptx::raise_release_cta(&books_.room[to], room);
      }
      while (pushed < all && ptx::read_acquire_cta(&books_.pushed[to][slot_index(pushed)]) > pushed) ++pushed;
      const int untold = __reduce_add_sync(kAllLanes, pushed - told);  // few enough to leave room for more
      if (untold >= kSendWarps || __any_sync(kAllLanes, told < pushed && pushed == all)) {
        ptx::fence_acq_rel_sys();
        if (pushed > told)
          ptx::st_relaxed_sys(&device_control(comm, to).landed[index_][comm.rank], before_ + pushed,
                              sum_word(args_.bytes, args_.element, run_.epoch));
        told = pushed;
        continue;
      }
      const bool waits = pushed < all && pushed == room;  // for that rank; otherwise for warps of this CTA
      if (!waits || pushed > pushed_before || room > room_before) patience = Patience{};
      const bool go_on =
          !waits || patience.keep_waiting(run_, to, 0, before_ + room - slots_ + 1, before_ + room - slots_);
      if (!__all_sync(kAllLanes, go_on && !faulted(comm))) return;
    }
  }

  // --- The receiver; a lane for each rank
  __device__ void find_what_lands() const {
    const Comm& comm = args_.comm;
    const int from = lane_id(), all = chunks();
    const bool is_peer = from < comm.num_ranks && from != comm.rank;
    const Landed* word = &control_.landed[index_][is_peer ? from : 0];
    int landed = 0, read = 0, told = 0;
    Patience patience;
    while (told < all) {
      bool go_on = true;
      int here = all;
      if (is_peer && landed < all) {
        uint64_t count, what;
        ptx::ld_acquire_sys(word, &count, &what);
        here = static_cast<int>(count - before_);
        go_on = here <= 0 || check(what, here >= all, from);
      }
      const int landed_before = landed, read_before = read;
      landed = max(landed, min(all, static_cast<int>(__reduce_min_sync(kAllLanes, here))));
      if (!__all_sync(kAllLanes, go_on)) return;
      __syncwarp();  // what any lane has acquired, lane 0 may pass on
      if (landed > landed_before && lane_id() == 0) ptx::raise_release_cta(&books_.landed, landed);
      read = chunks_read(read, landed);
      if (read - told >= slots_ / 4 || read == all) {
        __syncwarp();
        ptx::fence_acq_rel_sys();
        if (is_peer) ptx::st_relaxed_sys(&device_control(comm, from).freed[index_][comm.rank], before_ + read);
        told = read;
      }
      if (landed > landed_before || read > read_before) {
        patience = Patience{};
        continue;
      }
      if (is_peer && here <= landed)
        go_on = is_alike(run_, from, args_.bytes) && patience.keep_waiting(run_, from, 0, landed + 1, here);
      if (!__all_sync(kAllLanes, go_on && !faulted(comm))) return;
    }
  }

 private:
  __device__ int slot_index(int chunk) const { return static_cast<int>(before_ + chunk) & (slots_ - 1); }
  __device__ int chunk_of(int row) const { return row >> chunk_shift_; }
  __device__ int row_in_chunk(int row) const { return row & ((1 << chunk_shift_) - 1); }
  __device__ int64_t row_of_chunk(int chunk) const {
    return (static_cast<int64_t>(chunk) * gridDim.x + index_) << chunk_shift_;
  }

  // All lanes: whether a word of this CTA's books has come to `value`, at least; may_wait: until it has, or a fault.
  __device__ bool reaches(int32_t* word, int value, bool may_wait) const {
    int there = 0;
    if (lane_id() == 0) {
      for (;;) {
        there = ptx::read_acquire_cta(word) >= value ? 1 : 0;
        if (there || !may_wait || faulted(args_.comm)) break;
        __nanosleep(100);
      }
    }
    there = __shfl_sync(kAllLanes, there, 0);
    __syncwarp();  // what lane 0 has acquired, all lanes may read
    return there != 0;
  }

  // How many chunks have been read, knowing that `read` have and that `landed` have landed. Each slot's rows are
  // counted over the whole operation.
  __device__ int chunks_read(int read, int landed) const {
    const int chunk = read + lane_id();
    bool done = false;
    if (lane_id() < slots_ && chunk < landed) {
      const int64_t rows = ceil_div(args_.bytes, kSumRowBytes) - row_of_chunk(chunk);
      const int of_chunk = static_cast<int>(min(rows, int64_t{1} << chunk_shift_));
      const int earlier = chunk / slots_ << chunk_shift_;  // only the last chunk has fewer
      done = ptx::read_acquire_cta(&books_.rows_read[slot_index(chunk)]) >= earlier + of_chunk;
    }
    const unsigned not_done = ~__ballot_sync(kAllLanes, done);
    return read + (not_done == 0 ? kWarp : __ffs(static_cast<int>(not_done)) - 1);
  }

  // What a peer says beside its count. It may be at a later operation when all of this one's chunks have landed.
  __device__ bool check(uint64_t theirs, bool all_landed, int peer) const {
    const uint64_t mine = sum_word(args_.bytes, args_.element, run_.epoch);
    if (theirs == mine || (all_landed && sum_epoch(theirs) != sum_epoch(mine))) return true;
    const int64_t bytes = sum_bytes(theirs), element = sum_element(theirs);
    return bytes != args_.bytes ? fail(run_.comm, kDisagree, run_.step, peer, 1, args_.bytes, bytes)
                                : fail(run_.comm, kDisagree, run_.step, peer, 2, args_.element, element);
  }

  const ReduceScatterArgs& args_;
  const Run& run_;
  DeviceControl& control_;
  const int index_;
  const int chunk_shift_;  // of the rows of a chunk
  const int slots_;        // for each source
  const uint64_t before_;  // chunks of earlier operations
  Books& books_;
};

// One element as the lowest of a vector, for shards that do not lie on 16 bytes.
template <class Element>
struct Single {
  using Word = typename std::conditional<Element::kPerVector == 4, uint32_t, uint16_t>::type;
  static __device__ __forceinline__ int4 load(const Word* from) {
    const volatile Word* word = from;
    return make_int4(static_cast<int>(*word), 0, 0, 0);
  }
  static __device__ __forceinline__ void store(Word* to, const float* sum) {
    *to = static_cast<Word>(Element::narrow(sum).x);
  }
};
template <class Element>
struct Whole {
  using Word = int4;
  static __device__ __forceinline__ int4 load(const int4* from) { return ptx::ld_coherent(from); }
  static __device__ __forceinline__ void store(int4* to, const float* sum) { *to = Element::narrow(sum); }
};

template <class Element, class Access>
__device__ void sum_row(const ReduceScatterArgs& args, const Lane& lane, int row) {
  using Word = typename Access::Word;
  const int R = args.comm.num_ranks;
  const int64_t begin = lane.row_of_shard(row) * kSumRowBytes;
  const int words = static_cast<int>(min(args.bytes - begin, kSumRowBytes) / static_cast<int64_t>(sizeof(Word)));
  const float scale = static_cast<float>(args.scale);
  for (int first = lane_id(); first < words; first += kAhead * kWarp) {
    float sums[kAhead][Element::kPerVector] = {};
    for (int rank = 0; rank < R; rank += kTerms) {
      int4 values[kTerms][kAhead];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const Word* from = reinterpret_cast<const Word*>(lane.term(row, min(rank + t, R - 1)));
#pragma unroll
        for (int v = 0; v < kAhead; ++v) {
          const bool is_there = rank + t < R && first + v * kWarp < words;
          values[t][v] = is_there ? Access::load(from + first + v * kWarp) : make_int4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
#pragma unroll
        for (int v = 0; v < kAhead; ++v) Element::add(sums[v], values[t][v], 1.0f);
    }
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
      if (first + v * kWarp >= words) continue;
      if (scale != 1.0f)
        for (int e = 0; e < Element::kPerVector; ++e) sums[v][e] *= scale;
      Access::store(at<Word>(args.output, begin) + first + v * kWarp, sums[v]);
    }
  }
}

// A warp of those that sum.
template <class Element, class Access>
__device__ void sum_rows(const ReduceScatterArgs& args, const Lane& lane) {
  int known = 0;
  for (int row = warp_id(); lane.row_of_shard(row) * kSumRowBytes < args.bytes; row += kSumWarps) {
    if (!lane.wait_landed(row, &known)) return;
    sum_row<Element, Access>(args, lane, row);
    lane.count_read(row);
  }
}

// A warp of those that push. Its items are chunks, of each one for every peer in turn.
class Pusher {
 public:
  __device__ Pusher(const ReduceScatterArgs& args, const Run& run, const Lane& lane)
      : args_(args), run_(run), lane_(lane), items_(lane.chunks() * (args.comm.num_ranks - 1)) {}

  // An item is loaded while the one before is stored, and counted when the store of the one after has begun.
  __device__ void push_in_bulk(const Cut& cut) const {
    Ring<2> ring(cut);
    const int first = warp_in(cut);
    int uncounted = -1;
    if (first < items_) load(ring, first);
    for (int item = first; item < items_; item += kSendWarps) {
      if (!ring.wait(run_)) break;
      if (!has_room(item, false)) {
        if (uncounted >= 0 && lane_id() == 0) {
          ptx::bulk_wait<0>();
          count(uncounted);
        }
        uncounted = -1;
        if (!has_room(item, true)) break;
      }
      if (lane_id() == 0) {
        ptx::bulk_store(there(item), ring.stage(ring.taken), static_cast<uint32_t>(align_up(bytes(item), 16)));
        ptx::bulk_commit();
        ptx::bulk_wait<1>();
      }
      __syncwarp();
      ++ring.taken;
      if (item + kSendWarps < items_) load(ring, item + kSendWarps);
      if (uncounted >= 0 && lane_id() == 0) count(uncounted);
      uncounted = item;
    }
    if (lane_id() == 0) {
      ptx::bulk_wait<0>();
      if (uncounted >= 0) count(uncounted);
    }
    __syncwarp();
  }

  __device__ void push_plain() const {
    for (int item = warp_id() - kSumWarps; item < items_; item += kSendWarps) {
      if (!has_room(item, true)) return;
      copy_bytes(there(item), here(item), bytes(item));
      __syncwarp();
      if (lane_id() == 0) count(item);
    }
  }

 private:
  __device__ int chunk(int item) const { return item / (args_.comm.num_ranks - 1); }
  __device__ int peer(int item) const {
    const int R = args_.comm.num_ranks;
    return (args_.comm.rank + 1 + item % (R - 1)) % R;
  }
  __device__ bool has_room(int item, bool may_wait) const { return lane_.has_room(chunk(item), peer(item), may_wait); }
  __device__ const char* here(int item) const { return lane_.chunk_for(chunk(item), peer(item)); }
  __device__ char* there(int item) const { return lane_.slot(peer(item), args_.comm.rank, chunk(item)); }
  __device__ int64_t bytes(int item) const { return lane_.chunk_bytes(chunk(item)); }
  __device__ void count(int item) const { lane_.count_pushed(chunk(item), peer(item)); }

  // What does not lie on 16 bytes is loaded by the lanes.
  __device__ void load(Ring<2>& ring, int item) const {
    if ((reinterpret_cast<uint64_t>(here(item)) | static_cast<uint64_t>(bytes(item))) % 16 == 0)
      return ring.load(here(item), bytes(item));
    copy_bytes(ring.stage(ring.issued), here(item), bytes(item));
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_id() == 0) ptx::mbarrier_arrive_expect_tx(ring.full + ring.issued % 2, 0);
    ++ring.issued;
  }

  const ReduceScatterArgs& args_;
  const Run& run_;
  const Lane& lane_;
  const int items_;
};

// kBulk: this code has bulk copies.
template <class Element, class Access, bool kBulk>
__global__ void __launch_bounds__(kThreads, 1) ep_reduce_scatter(const __grid_constant__ ReduceScatterArgs args,
                                                                 const __grid_constant__ Cut cut, int chunk_shift) {
  __shared__ Books books;
  books.clear();
  const Run run = enter_collective(args.comm, kReduceScatter);
  DeviceControl& control = device_control(args.comm, args.comm.rank);
  const Lane lane(args, run, chunk_shift, books);
  if (run.ok) {
    tell_size(run, args.bytes);
    if (warp_id() < kSumWarps)
      sum_rows<Element, Access>(args, lane);
    else if (warp_id() == kSender)
      lane.tell_what_lands();
    else if (warp_id() == kReceiver)
      lane.find_what_lands();
    else if constexpr (kBulk)
      Pusher(args, run, lane).push_in_bulk(cut);
    else
      Pusher(args, run, lane).push_plain();
  }
  const bool ok = __syncthreads_or(faulted(args.comm)) == 0;
  if (!ok) fill_bytes(args.output, args.bytes, 0xFF, threadIdx.x, blockDim.x);  // each CTA that fails: others may not
  if (ok && threadIdx.x == 0) control.chunks[blockIdx.x] += static_cast<uint64_t>(lane.chunks());
  leave_collective(run, ok);
}

// As many rows as a chunk may have; fewer where there would be no item for each pushing warp.
int chunk_shift_of(const ReduceScatterArgs& args) {
  const int64_t rows = ceil_div(args.bytes, kSumRowBytes * args.num_ctas);  // of a lane
  int shift = 0;
  while (2 << shift <= kMostChunkRows && rows * (args.comm.num_ranks - 1) >= 2 * kSendWarps << shift) ++shift;
  return shift;
}

template <class Element, class Access>
void launch_sum(const ReduceScatterArgs& args) {
  Cut cut = cut_row(kLaneSlotBytes, kLaneSlotBytes, kSendWarps, 2, 0);
  cut.first_warp = kSumWarps;
  const Room room = room_for<ep_reduce_scatter<Element, Access, true>>();
  if (room.bulk && cut.shared_bytes() <= room.shared_bytes)
    launch_cooperatively<ep_reduce_scatter<Element, Access, true>>(
        "reduce-scatter", args.num_ctas, kThreads, cut.shared_bytes(), args.stream, args, cut, chunk_shift_of(args));
  else
    launch_cooperatively<ep_reduce_scatter<Element, Access, false>>("reduce-scatter", args.num_ctas, kThreads, 0,
                                                                    args.stream, args, cut, chunk_shift_of(args));
}

template <class Element>
void sum(const ReduceScatterArgs& args) {
  const uint64_t own = args.inputs[args.comm.rank];  // what else is summed lies in slots
  if (unit_of(args.output | static_cast<uint64_t>(args.bytes) | own) == 16)
    return launch_sum<Element, Whole<Element>>(args);
  launch_sum<Element, Single<Element>>(args);
}

}  // namespace

void reduce_scatter(const ReduceScatterArgs& args) {
  require_node(args.comm);
  require(args.bytes > 0, "bytes", "1 or more", args.bytes);
  require(args.num_ctas >= 1 && args.num_ctas <= kMostLanes, "num_ctas", "1 to 64", args.num_ctas);
  switch (args.element) {
    case kFloat32:
      return sum<Float32>(args);
    case kBFloat16:
      return sum<BFloat16>(args);
    case kFloat16:
      return sum<Float16>(args);
    default:
      require(false, "element", "0 to 2 on CUDA", args.element);
  }
}

}  // namespace ep::cuda
