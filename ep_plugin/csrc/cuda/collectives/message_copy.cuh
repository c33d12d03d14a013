// How the warps of a CTA copy the chunks of its part, for messages. A kind of copy has
//   static constexpr int kWarps                        that copy
//   send(run, cut, part, counters, tensor, cell_of)    chunks of this rank's tensor into cells of the peer
//   receive(...)                                       chunks in cells of this rank into its tensor
// All threads of the copying warps call send or receive. cell_of(chunk): where the chunk's bytes are in the lane.
#pragma once
#include "cuda/collectives/message_part.cuh"

namespace ep::cuda {

constexpr int kInFlight = 4;  // units that one thread loads at a time

// A copying thread. `from` and `to` are multiples of the unit's size.
template <class Unit, int kThreads>
__device__ void copy_chunk(char* to, const char* from, int64_t bytes) {
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = threadIdx.x; first < units; first += kInFlight * kThreads) {
    Unit values[kInFlight] = {};
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * kThreads < units)
        values[v] = load_shared(reinterpret_cast<const Unit*>(from) + first + v * kThreads);
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * kThreads < units) reinterpret_cast<Unit*>(to)[first + v * kThreads] = values[v];
  }
  const int64_t rest = units * static_cast<int64_t>(sizeof(Unit)) + threadIdx.x;
  if (rest < bytes) to[rest] = ptx::ld_coherent(from + rest);
}

// By ordinary loads and stores: of any address and size, and on GPUs without bulk copies.
template <class Unit>
struct PlainCopy {
  static constexpr int kWarps = kCopyWarps;

  template <class CellOf>
  static __device__ void send(const Run& run, const Cut&, const Part& part, Counters& counters, const char* tensor,
                              CellOf cell_of) {
    for (int chunk = 0; chunk < part.chunks() && counters.wait_allowed(run.comm, chunk) > 0; ++chunk) {
      copy_chunk<Unit, kWarps * kWarp>(cell_of(chunk), tensor + part.begin(chunk), part.size(chunk));
      counters.count_copied(chunk);
    }
  }
  template <class CellOf>
  static __device__ void receive(const Run& run, const Cut&, const Part& part, Counters& counters, char* tensor,
                                 CellOf cell_of) {
    for (int chunk = 0; chunk < part.chunks() && counters.wait_allowed(run.comm, chunk) > 0; ++chunk) {
      copy_chunk<Unit, kWarps * kWarp>(tensor + part.begin(chunk), cell_of(chunk), part.size(chunk));
      counters.count_copied(chunk);
    }
  }
};

// By bulk copies through a ring of stages in shared memory: of addresses and sizes that are multiples of 16. Lane 0 of
// the one warp copies, and the others wait with it.
struct BulkCopy {
  static constexpr int kWarps = 1;
  static constexpr int kStages = 3;  // little shared memory, so that the CTAs of 16 messages fit on a GPU (H100)
  static constexpr int kStores = 2;  // send: chunks whose stores to the peer may be under way
  static constexpr int kLoads = 2;   // receive: chunks whose loads from cells may be under way

  static Cut cut() { return cut_row(kPartCellBytes, kPartCellBytes, kWarps, kStages, 0); }

  // A chunk is copied when its store is written. The stores of up to kStores later chunks are under way meanwhile.
  template <class CellOf>
  static __device__ void send(const Run& run, const Cut& cut, const Part& part, Counters& counters, const char* tensor,
                              CellOf cell_of) {
    Ring<kStages> ring(cut);
    const int chunks = part.chunks();
    const auto load_until = [&](int end) {
      for (int next = static_cast<int>(ring.issued); next < min(end, chunks); ++next)
        ring.load(tensor + part.begin(next), part.size(next));
    };
    int allowed = 0, counted = 0, chunk = 0;
    const auto count_until = [&](int end) {
      for (; counted < end; ++counted) counters.count_copied(counted);
    };
    const auto count_all = [&] {
      if (lane_id() == 0) ptx::bulk_wait<0>();
      count_until(chunk);
    };
    load_until(kStages - kStores);
    for (; chunk < chunks; ++chunk) {
      if (allowed <= chunk) allowed = counters.look_allowed();
      if (allowed <= chunk) {
        count_all();  // the peer may wait for them before there is room
        allowed = counters.wait_allowed(run.comm, chunk);
      }
      if (allowed == 0 || !ring.wait(run)) break;
      if (lane_id() == 0) {
        peer::store_bulk(cell_of(chunk), ring.stage(ring.taken), static_cast<uint32_t>(part.size(chunk)));
        ptx::bulk_commit();
        ptx::bulk_wait<kStores>();
      }
      ++ring.taken;
      count_until(chunk + 1 - kStores);
      __syncwarp();
      load_until(chunk + 1 + kStages - kStores);
    }
    count_all();
    finish_loads(run, ring);
  }

  // A chunk is copied, as far as its cell is concerned, when it is in its stage.
  template <class CellOf>
  static __device__ void receive(const Run& run, const Cut& cut, const Part& part, Counters& counters, char* tensor,
                                 CellOf cell_of) {
    Ring<kStages> ring(cut);
    const int chunks = part.chunks();
    int allowed = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int ahead = min(chunks, chunk + kLoads), before = allowed;
      if (allowed < ahead) allowed = allowed > chunk ? counters.look_allowed() : counters.wait_allowed(run.comm, chunk);
      if (allowed == 0) break;
      if (allowed > before) ptx::fence_proxy_async();
      for (int next = static_cast<int>(ring.issued); next < min(ahead, allowed); ++next)
        ring.load(cell_of(next), part.size(next));
      if (!ring.wait(run)) break;
      counters.count_copied(chunk);
      if (lane_id() == 0) {
        ptx::bulk_store(tensor + part.begin(chunk), ring.stage(ring.taken), static_cast<uint32_t>(part.size(chunk)));
        ptx::bulk_commit();
        ptx::bulk_wait_read<kStages - kLoads>();
      }
      __syncwarp();
      ++ring.taken;
    }
    if (lane_id() == 0) ptx::bulk_wait<0>();
    finish_loads(run, ring);
  }

  // A CTA must not exit with loads in flight.
  static __device__ void finish_loads(const Run& run, Ring<kStages>& ring) {
    while (ring.in_flight() > 0 && ring.wait(run)) ++ring.taken;
  }
};

}  // namespace ep::cuda
