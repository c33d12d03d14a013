#include "control/collectives.h"

#include <algorithm>
#include <cstring>

#include "common/views.h"

namespace ep::control {

namespace {

constexpr int kMostPushCtas = 64;
constexpr int64_t kBytesPerCta = 16 << 10;         // of a shard
constexpr int64_t kSmallBytesPerCta = 4 << 10;     // to or from one peer
constexpr int64_t kSmallBytesPerRound = 12 << 10;  // two words for each thread of a CTA

int ctas_for(int64_t bytes, int64_t bytes_per_cta, int64_t most) {
  return static_cast<int>(std::max<int64_t>(1, std::min(most, bytes / bytes_per_cta)));
}

// Copies on the caller's stream; null: on the CPU.
bool copy(Address to, Address from, int64_t bytes, const uint64_t* stream) {
  if (to == from || bytes == 0) return true;
  return run_unlocked([&] {
    if (stream == nullptr)
      std::memcpy(at<void>(to), at<void>(from), bytes);
    else
      cuda_calls().copy(to, from, bytes, *stream);
  });
}

// Whether a tensor of `bytes` shares memory with `count` shards of as many bytes, without being the shard of `rank`.
bool overlap(Address one, Address shards, int64_t bytes, int count, int rank) {
  const auto size = static_cast<Address>(bytes);
  return one != shards + size * rank && one < shards + size * count && shards < one + size;
}

}  // namespace

// At most as many CTAs for each peer as send the largest small shard in one round.
int Ways::small_ctas(int64_t bytes) const {
  const int64_t most = (kSmallBytes / ranks + kSmallBytesPerRound - 1) / kSmallBytesPerRound;
  return (ranks - 1) * ctas_for(bytes, kSmallBytesPerCta, most);
}

int Ways::gather_ctas(int64_t bytes, bool is_mapped) const {
  if (is_small(bytes)) return small_ctas(bytes);
  // A kernel copies out of the staging block sooner than copy engines do.
  if (path == "copy_engine" || (path == "auto" && is_mapped && bytes * ranks >= engines_from)) return 0;
  return ctas_for(is_mapped ? bytes : std::min(bytes, staged_bytes()), kBytesPerCta, kMostPushCtas);
}

int Ways::sum_ctas(int64_t bytes) const {
  return is_small(bytes) ? small_ctas(bytes) : ctas_for(bytes, kBytesPerCta, most_sum_sms);
}

// The block in which all parts lie, or -1.
int CollectiveNode::block_of(const Shards& shards) const {
  const int block = shards.bytes == 0 ? -1 : memories.find(shards.parts[0], shards.bytes);
  const auto is_there = [&](Address part) { return memories.holds(block, part, shards.bytes); };
  return block >= 0 && std::all_of(shards.parts.begin(), shards.parts.end(), is_there) ? block : -1;
}

bool CollectiveNode::exchange(const Shards& shards, uint64_t stream, bool is_captured) {
  if (kernels == 0) return run_on_cpu(shards);
  const auto& [own, bytes, element, scale, parts] = shards;
  const int home = home_of(shards), sms = ways.sum_ctas(bytes);
  const bool is_missing = !has_memory_for(shards);
  if (is_missing && is_captured) return make(home);    // Python refuses it
  if (!is_captured && !compare(shards)) return false;  // kernels compare the calls of CUDA graphs
  if (is_missing && !make(home)) return false;
  if (home == kWords) {
    SmallExchangeArgs args{*comm, memories.tables[home], memories.own[home], {}, own, bytes, scale, element, sms, 0};
    std::copy(parts.begin(), parts.end(), args.shards);
    return launch(&CollectiveKernels::small_exchange, args, sms, stream);
  }
  if (home == kCells) {
    ReduceScatterArgs args{*comm, {}, memories.tables[home], memories.own[home], own, bytes, scale, element, sms, 0};
    std::copy(parts.begin(), parts.end(), args.inputs);
    return launch(&CollectiveKernels::reduce_scatter, args, sms, stream);
  }
  return home < 0 || gather(shards, home, stream, is_captured);
}

bool CollectiveNode::run_on_cpu(const Shards& shards) const {
  const auto& [own, bytes, element, scale, parts] = shards;
  Shards given = shards;  // peers read it in place if all of it is in one block
  if (element < 0) given.parts = {own};
  Piece piece{bytes,
              block_of(given),
              kMaxPeerBlocks,
              {},
              reinterpret_cast<Address>(memories.addresses),
              reinterpret_cast<Address>(memories.bytes)};
  for (size_t i = 0; piece.block >= 0 && i < given.parts.size(); ++i)
    piece.offset[i] = static_cast<int64_t>(given.parts[i] - memories.own[piece.block]);
  if (element < 0) {
    CpuAllGatherArgs args{*comm, piece, own, {}};
    std::copy(parts.begin(), parts.end(), args.outputs);
    return run_unlocked([&] { cpu::all_gather(args); });
  }
  CpuReduceScatterArgs args{*comm, piece, {}, own, scale, element, 0};
  std::copy(parts.begin(), parts.end(), args.inputs);
  return run_unlocked([&] { cpu::reduce_scatter(args); });
}

// --- GPUs ------------------------------------------------------------------------------------------------------------

// The number of the memory through which shards go: a block, or one of the others; -1: none.
int CollectiveNode::home_of(const Shards& shards) const {
  if (kernels == 0 || shards.bytes == 0) return -1;
  if (ways.is_small(shards.bytes)) return kWords;
  if (shards.element >= 0) return kCells;
  const int block = block_of(shards);
  return block < 0 ? kStagingBlock : block;
}

// The place of rank 0's shard, if it is in a block.
int64_t CollectiveNode::place_of(const Shards& shards, int home) const {
  const bool is_mapped = home >= 0 && home < kStagingBlock;
  return is_mapped ? place_word(home, static_cast<int64_t>(shards.parts[0] - memories.own[home]))
                   : place_word(kStagingBlock, 0);
}

// Makes memory, collectively. Python refuses that while a CUDA graph is captured.
bool CollectiveNode::make(int number) const {
  static PyObject* const make_name = interned("make_workspace");
  const Object which(PyLong_FromLong(number));
  return which && call_owner(make_name, which.get());
}

// Raises DisagreementError if a peer's call of this number differs. Whichever rank calls second compares, before it
// enqueues anything; its abort ends what the others have enqueued.
bool CollectiveNode::compare(const Shards& shards) {
  static PyObject* const differ = interned("calls_differ");
  const int64_t place = shards.element < 0 ? place_of(shards, home_of(shards)) : 0;
  const CallWords words{shards.bytes, std::max(shards.element, 0), place};
  CallDifference found;
  if (!compares_calls ||
      !post_call(reinterpret_cast<Address>(calls.data()), comm->num_ranks, comm->rank, ++num_compared_, words, &found))
    return true;
  const Object difference(Py_BuildValue("(iiiLL)", shards.element < 0 ? kAllGather : kReduceScatter, found.peer,
                                        found.field, static_cast<long long>(found.mine),
                                        static_cast<long long>(found.theirs)));
  return difference && call_owner(differ, difference.get());
}

template <class Args>
bool CollectiveNode::launch(void (*CollectiveKernels::*kernel)(const Args&), Args& args, int sms,
                            uint64_t stream) const {
  return run_unlocked([&] {
    args.stream = order == nullptr ? stream : order->enter(stream, sms);
    (at<const CollectiveKernels>(kernels)->*kernel)(args);
  });
}

// In one piece into a block, else piece by piece through the staging block.
bool CollectiveNode::gather(const Shards& shards, int home, uint64_t stream, bool is_captured) {
  const bool is_staged = home == kStagingBlock;
  const int64_t step = is_staged ? ways.staged_bytes() : shards.bytes, rank = comm->rank;
  AllGatherArgs args{};
  args.comm = *comm;
  args.blocks = memories.tables[home];
  args.host_blocks = memories.host_tables[home];
  args.staging = is_staged ? memories.own[home] : 0;
  args.place = place_of(shards, home);
  args.block = home;
  args.captured = is_captured;
  args.stream_words = stream_words;
  args.begun = progress;
  args.finished = progress + sizeof(uint64_t);
  for (int64_t begin = 0; begin < shards.bytes; begin += step) {
    args.input = shards.own + begin;
    args.bytes = std::min(step, shards.bytes - begin);
    args.offset = is_staged ? rank * args.bytes : static_cast<int64_t>(shards.parts[rank] - memories.own[home]);
    args.num_ctas = ways.gather_ctas(args.bytes, !is_staged);
    for (int source = 0; source < comm->num_ranks; ++source) args.outputs[source] = shards.parts[source] + begin;
    if (args.num_ctas == 0 && !is_captured && !watch(args)) return false;
    const int sms = std::max(args.num_ctas, args.captured);  // handshakes in a graph take an SM
    if (!launch(&CollectiveKernels::all_gather, args, sms, stream)) return false;
  }
  return true;
}

// Makes Python watch a gather whose stream waits for peers' copy engines.
bool CollectiveNode::watch(AllGatherArgs& args) {
  static PyObject* const begin = interned("begin_stream_wait");
  args.number = ++num_watched_;
  Address written[kMaxRanks];  // by each source, on this rank
  for (int source = 0; source < comm->num_ranks; ++source)
    written[source] = args.staging == 0 ? args.outputs[source] : args.staging + source * args.bytes;
  const Object gather(Py_BuildValue(
      "(KiLN)", static_cast<unsigned long long>(args.number), args.block, static_cast<long long>(args.bytes),
      PyBytes_FromStringAndSize(reinterpret_cast<const char*>(written), comm->num_ranks * sizeof(Address))));
  return gather && call_owner(begin, gather.get());
}

// --- Known calls -----------------------------------------------------------------------------------------------------

bool KnownCollective::read(const KnownCollective&, PyObject* const* args, Given& given) {
  given = {args[0], args[1], PyFloat_AsDouble(args[2])};
  return !PyErr_Occurred();
}

void KnownCollective::learn(PyObject* output, PyObject* input, int64_t bytes, int element) {
  Inputs inputs;
  if (inputs.read(output) && inputs.read(input))
    plans_.remember(inputs.take_form(), Door::kCommunicator, {}, {bytes, element});
}

PyObject* KnownCollective::run(const Given& given) {
  static PyObject* const whole = interned("");
  if ((node == nullptr && !is_alone) || is_watched()) return left();
  Inputs inputs;
  if (!inputs.read(given.output)) return left();
  const DLTensor output = inputs.last();
  if (!inputs.read(given.input)) return left();
  const Plan* found = plans_.find(inputs.take_form(), Door::kCommunicator, {});
  if (found == nullptr) return left();
  const Plan plan = *found;  // the lock may let others in
  const Address to = address_of(output), from = address_of(inputs.last());
  uint64_t stream = 0;
  const bool is_on_gpu = output.device_type == kDLCuda;
  const uint64_t* const on = is_on_gpu ? &stream : nullptr;
  if (is_alone) {
    if (given.scale != 1 || overlap(to, from, plan.bytes, 1, 0)) return left();
    if (is_on_gpu && !torch_stream(output.device_id, &stream)) return left();
    if (!copy(to, from, plan.bytes, on)) return nullptr;
    ++num_calls;
    return Py_NewRef(Py_True);
  }
  const std::shared_ptr<CollectiveNode> held = node;
  Shards shards{to, plan.bytes, plan.element, given.scale, {}};
  for (int rank = 0; rank < held->comm->num_ranks; ++rank)
    shards.parts.push_back((gathers_ ? to : from) + rank * plan.bytes);
  if (gathers_) shards.own = shards.parts[held->comm->rank];
  if (overlap(gathers_ ? from : to, shards.parts[0], plan.bytes, held->comm->num_ranks, held->comm->rank))
    return left();
  return in_turn(*held, [&](Turn& turn) -> PyObject* {
    if (!turn.enter() || !held->find_stream(&stream) || !held->has_memory_for(shards)) return left();
    if (!turn.begin(name_.get(), whole, plan.bytes, nullptr)) return nullptr;
    const bool is_done =
        (!gathers_ || copy(shards.own, from, plan.bytes, on)) && held->exchange(shards, stream, false) && held->check();
    if (!turn.end(is_done)) return nullptr;
    ++num_calls;
    return Py_NewRef(Py_True);
  });
}

}  // namespace ep::control
