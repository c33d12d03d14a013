// Dispatch send: stores each row once into a slot on every rank that holds one of its experts. The head before the row
// says which output rows it becomes. Rows go chunk by chunk, so that receivers start before the last row has left. Rows
// leave while notify, ahead in the stream, waits for peers. They are signalled when notify is done.
//
// Roles. Sending warps share the tokens (rows.cuh). Lane 0 loads a row into shared memory, and all lanes write the head
// before it. Then lane 0 stores head and row to each destination with one bulk store. The last warp of each CTA signals
// chunks (signals.cuh).
// Waits. Before writing, a send waits for consumed words and for the CTAs of this rank's notify that compute positions.
// Before signalling, it also waits for all of notify. It never waits for rows. When all its CTAs run and the counts are
// known, it lets the receive start, which then cannot take their SMs and wait there for peers.
// Buffers. A slot is [pad | ids[K] | positions[K] | weights[K] | scales | row], see SlotLayout.
// Memory order. The head is written with ordinary stores to shared memory. Each lane fences the async proxy before lane
// 0 stores the slot in bulk. signals.cuh describes the order that peers see.
//
// Quantised rows. All lanes write head, scales and row into a stage (quantize.cuh), then fence and store as above. A
// slot that is longer than any stage takes the plain path.
#include "cuda/moe/dispatch_send.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kMaxWarps = 12;
constexpr int kMaxThreads = (kMaxWarps + 1) * kWarp;
constexpr int64_t kBytesInFlight = 256 * 1024;  // rows of a CTA in flight: more would wait in the links' queues

// Thread 0 waits until notify, ahead in the stream, has computed the positions of this rank's rows. A reused routing
// has them already.
__device__ bool positions_are_ready(const Run& run, const Header& header) {
  if (threadIdx.x != 0 || header.op != kOpDispatch) return true;
  return peer::wait_at_least(run, &state_of(run.comm).positions_ready, run.epoch, run.comm.rank, kOwnKernel);
}

// All threads. From: as for send_rows().
template <bool kBulk, class From>
__device__ __forceinline__ void send_all(const DispatchSendArgs& args, const Cut& cut) {
  __shared__ Progress progress;
  Run run = enter(args.comm, kDispatchSend);
  run.ok = run.ok && destinations_have_read(run, kDispatchPool) && positions_are_ready(run, args.header);
  if (!__syncthreads_and(run.ok)) return;
  const Meta meta = meta_of(args.comm, args.routing);
  if (!__syncthreads_and(sends_fit(run, args, meta))) return;  // an optimistic receive, next in the stream, exits, too
  progress.clear();
  run.ok = may_send(!faulted(args.comm));
  if (run.ok) {
    if (args.routing.num_tokens == 0 && blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(run);
    if (warp_id() == cut.warps) {
      open_destinations(run, kDispatchPool, args.header);
      const SentChunks chunks(run, args, meta, cut.parts);
      ptx::launch_dependents();  // the receive, once all CTAs of this kernel run
      signal_chunks(run, kDispatchPool, progress, cut.warps, chunks);
    } else {
      DispatchSendJob<ThroughPool> job(run, args, meta, cut, progress);
      send_rows<kBulk, From>(job, run, cut);
    }
  }
  if (!last_to_finish(run)) return;
  ptx::wait_on_dependency();
  const bool signalled = !pools_must_grow(args.comm, args.header, meta);
  if (!signalled && args.optimistic == 0 && threadIdx.x == 0) fail_too_small(run, args.header, meta);
  if (!faulted(args.comm)) finish_sending(run, kDispatchPool, signalled);
}

template <bool kBulk, class From>
__global__ void __launch_bounds__(kMaxThreads, 1)
    ep_dispatch_send(const __grid_constant__ DispatchSendArgs args, const __grid_constant__ Cut cut) {
  send_all<kBulk, From>(args, cut);
  // One CTA stays, so that the next kernel in the stream runs after notify. All CTAs would occupy SMs while peers are
  // late.
  if (blockIdx.x == 0) ptx::wait_on_dependency();
}

// A send that follows its notify is launched early, because its rows need only the positions.
template <bool kBulk, class From>
void launch_send(const DispatchSendArgs& args, const Cut& cut) {
  constexpr auto kKernel = ep_dispatch_send<kBulk, From>;
  const auto launch_it = args.header.op == kOpDispatch ? launch_early<kKernel, DispatchSendArgs, Cut>
                                                       : launch<kKernel, DispatchSendArgs, Cut>;
  launch_it("dispatch_send", args.num_sms, (cut.warps + 1) * kWarp, cut.shared_bytes(), args.stream, args, cut);
}

// Each warp has one row in flight, so the number of warps bounds the bytes in flight. Warps that quantise compute most
// of the time; as many run as fit.
template <class From>
int most_warps(const SlotLayout& lay) {
  const int64_t busy = ceil_div(kBytesInFlight, lay.image);
  if (!std::is_void_v<From> || busy > kMaxWarps) return kMaxWarps;
  return busy < kMinCopyWarps ? kMinCopyWarps : static_cast<int>(busy);
}

template <class From>
void choose_send(const DispatchSendArgs& args) {
  using Job = DispatchSendJob<ThroughPool>;
  const KernelLimits limits = limits_of<ep_dispatch_send<true, From>>();
  const int list = Job::list_size(args.comm.num_ranks);
  const SlotLayout lay = slot_layout_of(args.header);
  const bool in_parts = std::is_void_v<From> && args.routing.num_tokens <= kTokensInParts;
  const Cut cut =
      in_parts ? cut_in_parts(lay.image, lay.row, kMaxWarps, Job::kStages, Job::kStages * list, limits.shared_bytes)
               : cut_for_warps(lay.image, kMinSendWarps<From>, most_warps<From>(lay), Job::kStages, Job::kStages * list,
                               limits.shared_bytes);
  if (limits.bulk && args.comm.plain == 0 && cut.warps >= 1 && sends_in_bulk<From>(lay, cut))
    launch_send<true, From>(args, cut);
  else
    launch_send<false, From>(args, uncut(lay.image, kMaxWarps, list));
}

}  // namespace

void dispatch_send(const DispatchSendArgs& args) {
  require_dispatch_send(args);
  if (args.quantize == 0) return choose_send<void>(args);
  if (args.element == kBFloat16) return choose_send<FromBFloat16>(args);
  if (args.element == kFloat16) return choose_send<FromFloat16>(args);
  return choose_send<FromFloat32>(args);
}

}  // namespace ep::cuda
