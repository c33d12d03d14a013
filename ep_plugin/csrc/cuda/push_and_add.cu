// Push and add in one kernel, for few SMs: what an SM can load bounds such a combine, and an SM that only pushes or
// only adds waits for others where it could do the other.
//
// Roles. In each CTA the first warps push, the next ones add, and the last signals chunks; a warp that has no more to
// push adds, too. Each role is that of push.cu or add.cu. Launched cooperatively, since CTAs both push and wait for
// rows: all of them run, so every rank's rows leave whatever its adders wait for. Memory order, and outputs after a
// fault: as in push.cu and add.cu.
#include <algorithm>

#include "add_job.cuh"
#include "kernels.h"
#include "push_job.cuh"

namespace ep::cuda {

namespace {

constexpr int kReducers = kReduceWarps - 1;
// More than pushing takes of the whole, since those that push add afterwards, and rows are there to add only then.
constexpr int kPushWarps = 12;

template <class Element, bool kBulk>
__global__ void __launch_bounds__(kReduceWarps* kWarp, 1)
    push_and_add_kernel(const __grid_constant__ PushArgs push, const __grid_constant__ AddArgs add,
                        const __grid_constant__ Cut cut) {
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
    if (warp_id() == kReducers) {
      tell_started(pushing, kCombinePool);
      open_destinations(pushing, kCombinePool, push.header);
      signal_chunks(pushing, kCombinePool, progress, kPushWarps, PushedChunks{pushing, meta, order, cut.parts});
    } else {
      ReduceRing<kBulk> ring(cut);
      const bool pushes = warp_id() < kPushWarps;
      bool go_on = true;
      if (pushes) {
        PushJob job(pushing, push, order, cut, kPushWarps, progress);
        go_on = reduce_rows<Element>(job, pushing, cut, ring);
      }
      if (go_on && open_sources_of_warp(adding, kCombinePool, add.header, nullptr)) {
        const NextRow parts(adding, kAdded, parts_to_add(add, cut), kPushWarps, kReducers - kPushWarps, !pushes);
        AddJob job(adding, add, cut, bases, parts);
        reduce_rows<Element>(job, adding, cut, ring);
      }
    }
  }
  if (last_to_finish(pushing) && !faulted(comm)) finish_sending(pushing, kCombinePool);
  if (last_to_finish(adding)) finish_adding(adding, add);
}

template <class Element>
void launch_both(const PushArgs& push, const AddArgs& add) {
  const Room room = room_for<push_and_add_kernel<Element, true>>();
  const bool bulk = room.bulk && push.comm.plain == 0;
  const int terms = std::max(push.routing.topk, add.comm.num_ranks);
  const Cut cut =
      cut_for_sums(push.header.row_bytes, push.routing.num_tokens, kReducers, 2 * terms, room.shared_bytes, bulk);
  const int threads = kReduceWarps * kWarp;
  if (bulk)
    launch_cooperatively<push_and_add_kernel<Element, true>>("push_and_add", push.num_sms, threads, cut.shared_bytes(),
                                                             push.stream, push, add, cut);
  else
    launch_cooperatively<push_and_add_kernel<Element, false>>("push_and_add", push.num_sms, threads, cut.shared_bytes(),
                                                              push.stream, push, add, cut);
}

}  // namespace

void push_and_add(const PushArgs& push, const AddArgs& add) {
  require_push(push);
  require_add(add);
  require(push.element == add.element, "element of add", "that of push", add.element);
  require(push.header.row_bytes == add.header.row_bytes, "row_bytes of add", "those of push", add.header.row_bytes);
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
