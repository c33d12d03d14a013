// Low-latency combine: owners send the weights of their tokens to all ranks; holders sum rows to partial rows and store
// them in the owners' slots; owners add the partial rows. An owner with few pairs gets their rows and sums them itself.
// Over several nodes, forwarders add the partial rows of their node. common/low_latency.h and
// common/low_latency_legs.h have the layout and the rules.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/moe/kernels.h"
#include "cpu/moe/ll_combine_recv.h"
#include "cpu/moe/ll_combine_send.h"

namespace ep::cpu {

namespace {

bool check_ids(const LlRun& ll, const LlCombineArgs& args) {
  const Comm& comm = ll.op.comm;
  const int K = ll.op.header.topk, experts = comm.num_experts * ll.op.shape.num_nodes;
  for (int64_t pair = 0; pair < static_cast<int64_t>(ll.op.header.num_tokens) * K; ++pair)
    if (const int64_t id = id_of(args, pair); id < -1 || id >= experts)
      return fail(comm, kBadIds, ll.run.step, comm.rank, static_cast<int>(pair / K), experts, id);
  return true;
}

// Whether the plan's numbers of tokens are those of a dispatch.
bool check_plan(const LlRun& ll, const LlPlan& plan) {
  const Comm& comm = ll.op.comm;
  const int most = ll.op.header.max_tokens;
  for (int rank = 0; rank < ll_num_ranks(ll.op); ++rank)
    for (const int32_t tokens : {plan.src_tokens[rank], plan.src_rows[rank]})
      if (tokens < 0 || tokens > most) return fail(comm, kBadHandle, ll.run.step, comm.rank, rank, most, tokens);
  return true;
}

template <class T>
bool send_all(const LlRun& ll, const LlCombineArgs& args) {
  using S = typename Sum<T>::type;
  const Comm& comm = ll.op.comm;
  const int R = comm.num_ranks;
  const LlPlan plan = ll_plan_of(ll.op, args.plan);
  if (!check_ids(ll, args) || !check_plan(ll, plan)) return false;
  for (int step = 1; step <= R; ++step)
    if (send_weights<S>(ll, args, (comm.rank + step) % R) == Wait::kFault) return false;
  refresh_pairs(ll, args);
  ll_ring_all(ll);
  if (!write_weight_legs<S>(ll, args, plan) || !hold_at_gate(ll.run)) return false;
  Holder<T> holder(ll, args);
  for (int step = 1; step <= R; ++step) {
    const int owner = (comm.rank + step) % R, tokens = plan.src_tokens[ll_rank_here(ll.op, owner)];
    if (ll_has_few_pairs(ll.op, tokens) && !holder.send_rows(owner)) return false;
  }
  for (int step = 1; step <= R; ++step)
    if (!holder.reduce_for((comm.rank + step) % R)) return false;
  return true;
}

// -- forward -------------------------------------------------------------------------------------------------------

// Adds the partial rows that have come for the legs of this rank, and writes the legs with the sums.
template <class T>
bool add_partials(const LlRun& ll, const LlCombineArgs& args) {
  using S = typename Sum<T>::type;
  const LlOperation& op = ll.op;
  const int G = op.comm.num_ranks;
  const LlLegs own = ll_legs(op, op.comm.rank);
  const LlPlan plan = ll_plan_of(op, args.plan);
  const LlLegLayout lay = ll_leg_layout(kLlSums, op.header, op.shape);
  std::vector<S> sum(args.hidden);
  for (int origin = 0; origin < own.origins; ++origin) {
    for (int holder = 0; holder < G; ++holder)
      if (ll_wait_flag(ll, holder, own.stored(ll.parity, holder, origin)) != Wait::kThere) return false;
    char* leg = own.leg(kLlSums, kLlOut, op.slot, origin);
    int32_t& rows = ll_begin_leg(ll, kLlSums, leg).num_rows;
    rows = plan.src_rows[ll_rank_at(op, ll_node_of(op.node, origin) * G + op.comm.rank)];
    for (int row = 0; row < rows; ++row) {
      std::fill(sum.begin(), sum.end(), S(0));
      for (int holder = 0; holder < G; ++holder)
        if (*own.tag(ll.parity, holder, origin, row) == ll.run.epoch)
          accumulate<T>(sum.data(), reinterpret_cast<const T*>(own.partial(ll.parity, holder, origin, row)),
                        static_cast<int>(args.hidden));
      narrow_all(sum.data(), static_cast<int>(args.hidden), reinterpret_cast<T*>(leg + lay.rows + row * lay.row_bytes));
    }
  }
  return true;
}

template <class T>
bool forward_all(const LlRun& ll, const LlCombineArgs& args) {
  const Comm& comm = ll.op.comm;
  const LlPlan plan = ll_plan_of(ll.op, args.plan);
  if (!check_plan(ll, plan) || !ll_relay(ll, kLlWeights, &plan)) return false;
  Holder<T> holder(ll, args);
  for (int step = 1; step <= comm.num_ranks; ++step)
    for (int origin = 0; origin + 1 < ll.op.shape.num_nodes; ++origin)
      if (!holder.reduce_leg((comm.rank + step) % comm.num_ranks, origin)) return false;
  return add_partials<T>(ll, args);
}

}  // namespace

void ll_combine(const LlCombineArgs& args) {
  const LlHeader& header = args.op.header;
  if (header.format == kLlLogfmt && (args.element != kBFloat16 || args.hidden % kLlLogfmtGroup != 0))
    throw std::invalid_argument("logfmt: expected bfloat16 rows of a multiple of " + std::to_string(kLlLogfmtGroup) +
                                " elements, got " + std::to_string(args.hidden));
  LlRun ll{args.op, kLlCombine, {args.op.comm, kNoStep, 0}, 0};
  bool done = true;
  with_element(args.element, [&](auto type) {
    using T = decltype(type);
    if ((args.op.phases & kLlSend) != 0 && ll_begin(args.op, kLlCombine, kLlSend, &ll) && send_all<T>(ll, args))
      ll_finish_send(ll);
    if ((args.op.phases & kLlForward) != 0 && ll_begin(args.op, kLlCombine, kLlForward, &ll)) forward_all<T>(ll, args);
    if ((args.op.phases & kLlReceive) == 0) return;
    done = ll_begin(args.op, kLlCombine, kLlReceive, &ll) && Owner<T>(ll, args).run();
    if (done) ll_finish_receive(ll);
  });
  if (!done) std::memset(at<char>(args.out), 0xFF, static_cast<int64_t>(header.num_tokens) * header.row_bytes);
}

}  // namespace ep::cpu
