// Push and add in one kernel, for few SMs: what an SM can load bounds such a combine, and an SM that only pushes or
// only adds waits for others where it could do the other.
//
// Roles. In each CTA the first warps push, the next one signals chunks, and the others add; each role is that of
// push.cu or add.cu, with its own part of the shared memory. Launched cooperatively, since CTAs both push and wait for
// rows: all of them run, so every rank's rows leave whatever its adders wait for. Memory order, and outputs after a
// fault: as in push.cu and add.cu.
#include "add_job.cuh"
#include "kernels.h"
#include "push_job.cuh"

namespace ep::cuda {

namespace {

// An expert's rows are about twice as many as partial rows.
constexpr int kPushWarps = 10;
constexpr int kAddWarps = kReduceWarps - 1 - kPushWarps;

template <class Element, bool kBulk>
__global__ void __launch_bounds__(kReduceWarps* kWarp, 1)
    push_and_add_kernel(const __grid_constant__ PushArgs push, const __grid_constant__ AddArgs add,
                        const __grid_constant__ Cut push_cut, const __grid_constant__ Cut add_cut) {
  __shared__ Order order;
  __shared__ Progress progress;
  __shared__ int32_t bases[kMaxRanks];
  const Comm& comm = push.comm;
  const Meta meta = meta_of(comm, push.routing);
  const Run pushing = enter(comm, kCombine), adding = enter(comm, kAdd);
  bool ok = pushing.ok && adding.ok;
  progress.clear();
  if (ok) {
    const bool may_write = destination_has_read(pushing, kCombinePool), fits = pushes_fit(push, meta);
    order.make(comm, meta);
    ok = partials_fit(adding, add, bases) && may_send(may_write && fits);
  }
  if (ok) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && order.chunks == 0) hold_at_gate(pushing);
    __syncwarp();
    if (warp_id() < push_cut.warps) {
      PushJob job(pushing, push, order, push_cut, progress);
      reduce_rows<Element, kBulk>(job, pushing, push_cut);
    } else if (warp_id() == push_cut.warps) {
      tell_started(pushing, kCombinePool);
      open_destinations(pushing, kCombinePool, push.header);
      signal_chunks(pushing, kCombinePool, progress, push_cut.warps,
                    PushedChunks{pushing, meta, order, push_cut.parts});
    } else if (open_sources_of_warp(adding, kCombinePool, add.header, nullptr)) {
      AddJob job(adding, add, add_cut, bases);
      reduce_rows<Element, kBulk>(job, adding, add_cut);
    }
  }
  if (last_to_finish(pushing) && !faulted(comm)) finish_sending(pushing, kCombinePool);
  if (last_to_finish(adding)) finish_adding(adding, add);
}

template <class Element>
void launch_both(const PushArgs& push, const AddArgs& add) {
  const Room room = room_for<push_and_add_kernel<Element, true>>();
  const bool bulk = room.bulk && push.comm.plain == 0;
  const int64_t for_pushes = room.shared_bytes * kPushWarps / (kPushWarps + kAddWarps);
  const int tokens = push.routing.num_tokens;
  const Cut push_cut = cut_for_sums(push.header.row_bytes, tokens, kPushWarps, 2 * push.routing.topk, for_pushes, bulk);
  const int64_t shared_begin = align_up(push_cut.shared_bytes(), kSlotAlign);
  Cut add_cut = cut_for_sums(add.header.row_bytes, tokens, kAddWarps, 2 * add.comm.num_ranks,
                             room.shared_bytes - shared_begin, bulk);
  add_cut.first_warp = kPushWarps + 1;
  add_cut.shared_begin = shared_begin;
  const int threads = kReduceWarps * kWarp;
  const int64_t shared_bytes = shared_begin + add_cut.shared_bytes();
  if (bulk)
    launch_cooperatively<push_and_add_kernel<Element, true>>("push_and_add", push.num_sms, threads, shared_bytes,
                                                             push.stream, push, add, push_cut, add_cut);
  else
    launch_cooperatively<push_and_add_kernel<Element, false>>("push_and_add", push.num_sms, threads, shared_bytes,
                                                              push.stream, push, add, push_cut, add_cut);
}

}  // namespace

void push_and_add(const PushArgs& push, const AddArgs& add) {
  require_push(push);
  require_add(add);
  require(push.element == add.element, "element of add", "that of push", add.element);
  require(push.num_sms == add.num_sms, "num_sms of add", "that of push", add.num_sms);
  require(push.stream == add.stream, "stream of add", "that of push", static_cast<int64_t>(add.stream));
  switch (push.element) {
    case kFloat32:
      return launch_both<Float32>(push, add);
    case kBFloat16:
      return launch_both<BFloat16>(push, add);
    case kFloat16:
      return launch_both<Float16>(push, add);
  }
  throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                              std::to_string(push.element));
}

}  // namespace ep::cuda
