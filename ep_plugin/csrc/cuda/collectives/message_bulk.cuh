// Messages by bulk copies, which need addresses and sizes that are multiples of 16: one warp moves a part.
//
// Roles. Lane 0 does all; the other lanes wait with it for the warp's ring.
// Buffers. A ring of stages in shared memory. The sender loads its tensor's chunks into stages and stores them into the
// receiver's slots. The receiver loads slots into stages and stores them into its tensor.
// Memory order. The sender waits until its bulk stores of chunks are written, fences once at system scope for several
// chunks, and signals them. The receiver acquires the signal at system scope and fences the async proxy before it loads
// the slots. It signals that it has read them when they are in its stages. The sender acquires that and fences the
// async proxy before it stores into these slots again.
#pragma once
#include "cuda/collectives/message_part.cuh"

namespace ep::cuda {

constexpr int kStages = 6;
constexpr int kStoring = 2;  // chunks whose stores may be under way
constexpr int kLoading = kStages - kStoring;
constexpr int kChunksPerSignal = kPartSlots / 4;

inline Cut stages_of_part() { return cut_row(kPartSlotBytes, kPartSlotBytes, 1, kStages, 0); }

// All lanes. A CTA must not exit with loads in flight.
__device__ inline void finish_loads(Ring<kStages>& ring, const Run& run) {
  while (ring.in_flight() > 0 && ring.wait(run)) ++ring.taken;
}

__global__ void __launch_bounds__(kWarp)
    ep_send_bulk(const __grid_constant__ DeviceMessageArgs args, const __grid_constant__ Cut cut) {
  const Message& message = args.message;
  const Run run = begin(args.comm, kSend);
  if (!run.ok) return;
  const int index = static_cast<int>(blockIdx.x);
  PartWords& words = lane_at(args, args.comm.rank, message.peer).words[index];
  DeviceLane& lane = lane_at(args, message.peer, args.comm.rank);
  const Part part(message);
  const int chunks = part.chunks();
  const uint64_t before = words.written;
  Ring<kStages> ring(cut);
  const auto load_next = [&] {
    const int chunk = static_cast<int>(ring.issued);
    if (chunk < chunks) ring.load(at<const char>(message.data, part.begin(chunk)), part.size(chunk));
  };
  for (int i = 0; i < kLoading; ++i) load_next();
  int room = 0, signalled = 0;  // in chunks of this message; of lane 0
  const auto signal = [&](int sent) {
    peer::fence();
    peer::store(&lane.words[index].sent, before + sent);
    signalled = sent;
  };
  const auto has_room = [&](int chunk) {
    if (chunk < room) return true;
    uint64_t consumed = peer::acquire(&words.consumed);
    if (consumed + kPartSlots <= before + chunk) {
      ptx::bulk_wait<0>();
      if (signalled < chunk) signal(chunk);
      if (!peer::wait_at_least(run, &words.consumed, before + chunk + 1 - kPartSlots, message.peer)) return false;
      consumed = peer::acquire(&words.consumed);
    }
    room = at_most(consumed + kPartSlots - before, chunks);
    ptx::fence_proxy_async();
    return true;
  };
  int chunk = 0;
  for (; chunk < chunks; ++chunk) {
    const bool ok = lane_id() != 0 || has_room(chunk);
    if (!__all_sync(kAllLanes, ok) || !ring.wait(run)) break;
    if (lane_id() == 0) {
      PartSlot& slot = lane.slots[index][(before + chunk) % kPartSlots];
      if (chunk == 0) slot.header = MessageHeader{0, message.bytes, message.dtype};
      peer::store_bulk(slot.data, ring.stage(ring.taken), static_cast<uint32_t>(part.size(chunk)));
      ptx::bulk_commit();
      ptx::bulk_wait<kStoring>();
      const int sent = chunk + 1 - kStoring;
      if (sent - signalled >= kChunksPerSignal) signal(sent);
    }
    __syncwarp();
    ++ring.taken;
    load_next();
  }
  if (lane_id() == 0) {
    ptx::bulk_wait<0>();
    if (chunk == chunks) {
      signal(chunks);
      words.written = before + chunks;
    }
  }
  __syncwarp();
  finish_loads(ring, run);
}

__global__ void __launch_bounds__(kWarp)
    ep_receive_bulk(const __grid_constant__ DeviceMessageArgs args, const __grid_constant__ Cut cut) {
  const Message& message = args.message;
  const Run run = begin(args.comm, kReceive);
  const Part part(message);
  if (!run.ok) return poison(message, part, 0);
  const int index = static_cast<int>(blockIdx.x);
  DeviceLane& lane = lane_at(args, args.comm.rank, message.peer);
  PartWords& words = lane.words[index];
  uint64_t& consumed = lane_at(args, message.peer, args.comm.rank).words[index].consumed;
  const int chunks = part.chunks();
  const uint64_t before = words.read;
  const auto slot_of = [&](int chunk) -> PartSlot& { return lane.slots[index][(before + chunk) % kPartSlots]; };
  // Lane 0: how many chunks have arrived; -1 after a fault. At least `least`, for which it waits.
  const auto look = [&](int known, int least) {
    if (least > known && !peer::wait_at_least(run, &words.sent, before + least, message.peer)) return -1;
    const int now = at_most(peer::acquire(&words.sent) - before, chunks);
    if (known == 0 && now > 0 && !check_header(run, slot_of(0).header, message)) return -1;
    if (now > known) ptx::fence_proxy_async();
    return now;
  };
  Ring<kStages> ring(cut);
  int arrived = 0, signalled = 0, chunk = 0;
  for (; chunk < chunks; ++chunk) {
    const int ahead = min(chunks, chunk + kLoading);
    if (arrived < ahead) {
      int now = 0;
      if (lane_id() == 0) now = look(arrived, chunk + 1);
      now = __shfl_sync(kAllLanes, now, 0);
      if (now < 0) break;
      arrived = now;
    }
    while (static_cast<int>(ring.issued) < min(ahead, arrived)) {
      const int next = static_cast<int>(ring.issued);
      ring.load(slot_of(next).data, part.size(next));
    }
    if (!ring.wait(run)) break;
    if (lane_id() == 0) {
      const int read = chunk + 1;
      if (read - signalled >= kChunksPerSignal || read == chunks) {
        peer::signal(&consumed, before + read);
        signalled = read;
      }
      ptx::bulk_store(at<char>(message.data, part.begin(chunk)), ring.stage(ring.taken),
                      static_cast<uint32_t>(part.size(chunk)));
      ptx::bulk_commit();
      ptx::bulk_wait_read<kStoring>();
    }
    __syncwarp();
    ++ring.taken;
  }
  if (lane_id() == 0) {
    ptx::bulk_wait<0>();
    if (chunk == chunks) words.read = before + chunks;
  }
  __syncwarp();
  finish_loads(ring, run);
  if (chunk < chunks) poison(message, part, chunk);
}

}  // namespace ep::cuda
