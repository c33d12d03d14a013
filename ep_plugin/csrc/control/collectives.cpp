#include "control/collectives.h"

#include <algorithm>
#include <set>

namespace ep::control {

namespace {

constexpr int kMostPushCtas = 64;
constexpr int64_t kBytesPerCta = 16 << 10;         // of a shard
constexpr int64_t kSmallBytesPerCta = 4 << 10;     // to or from one peer
constexpr int64_t kSmallBytesPerRound = 12 << 10;  // two words for each thread of a CTA

int ctas_for(int64_t bytes, int64_t bytes_per_cta, int64_t most) {
  return static_cast<int>(std::max<int64_t>(1, std::min(most, bytes / bytes_per_cta)));
}

// Copies memory of `like`'s device, also on the caller's stream.
bool copy(Address to, Address from, int64_t bytes, const DLTensor& like) {
  if (to == from || bytes == 0) return true;
  return run_unlocked([&] { copy_bytes(to, from, bytes, like); });
}

bool overlap(Address one, Address other, int64_t bytes) {
  const auto size = static_cast<Address>(bytes);
  return one != other && one < other + size && other < one + size;
}

}  // namespace

// At most as many CTAs for each peer as send the largest small shard in one round.
int Ways::small_ctas(int64_t bytes) const {
  const int64_t most = (kSmallBytes / ranks + kSmallBytesPerRound - 1) / kSmallBytesPerRound;
  return (ranks - 1) * ctas_for(bytes, kSmallBytesPerCta, most);
}

int Ways::push_ctas(int64_t bytes, bool is_mapped) const {
  // A kernel copies out of the staging block sooner than copy engines do.
  const bool may_choose = path == "auto" && is_mapped;
  if (path == "copy_engine" || (may_choose && bytes * ranks >= engines_from)) return 0;
  return ctas_for(is_mapped ? bytes : std::min(bytes, staged_bytes()), kBytesPerCta, kMostPushCtas);
}

int Ways::sum_ctas(int64_t bytes) const { return ctas_for(bytes, kBytesPerCta, most_sum_sms); }

// The block in which all parts lie, or -1.
int CollectiveNode::block_of(const Shards& shards) const {
  if (shards.bytes == 0) return -1;
  const int block = blocks.find(shards.parts[0], shards.bytes, comm->rank);
  const auto is_there = [&](Address part) { return blocks.holds(block, part, shards.bytes, comm->rank); };
  return block >= 0 && std::all_of(shards.parts.begin(), shards.parts.end(), is_there) ? block : -1;
}

bool CollectiveNode::exchange(const Shards& shards, uint64_t stream, bool is_captured) {
  if (kernels == nullptr) return run_on_cpu(shards);
  const Workspace* space = workspace_for(shards);
  const bool is_missing = space != nullptr && space->own == 0;
  if (is_missing && is_captured && !make(*space)) return false;  // Python refuses it
  // In CUDA graphs kernels compare the calls.
  if (is_captured ? !keep_blocks(shards) : !compare(shards)) return false;
  if (is_missing && !make(*space)) return false;
  if (shards.bytes == 0) return true;
  if (ways.is_small(shards.bytes)) return exchange_words(shards, stream);
  return shards.element < 0 ? gather(shards, stream, is_captured) : sum(shards, stream);
}

bool CollectiveNode::run_on_cpu(const Shards& shards) const {
  const bool gathers = shards.element < 0;
  Shards contributed = shards;  // peers read it in place if all of it is in one block
  if (gathers) contributed.parts = {shards.own};
  Piece piece{shards.bytes,
              block_of(contributed),
              kMaxPeerBlocks,
              {},
              reinterpret_cast<Address>(blocks.addresses),
              reinterpret_cast<Address>(blocks.bytes)};
  if (piece.block >= 0)
    for (size_t i = 0; i < contributed.parts.size(); ++i)
      piece.offset[i] = static_cast<int64_t>(contributed.parts[i] - blocks.addresses[piece.block][comm->rank]);
  if (gathers) {
    CpuAllGatherArgs args{*comm, piece, shards.own, {}};
    std::copy(shards.parts.begin(), shards.parts.end(), args.outputs);
    return run_unlocked([&] { cpu::all_gather(args); });
  }
  CpuReduceScatterArgs args{*comm, piece, {}, shards.own, shards.scale, shards.element, 0};
  std::copy(shards.parts.begin(), shards.parts.end(), args.inputs);
  return run_unlocked([&] { cpu::reduce_scatter(args); });
}

// --- GPUs ------------------------------------------------------------------------------------------------------------

// The memory that an operation needs, or null.
const Workspace* CollectiveNode::workspace_for(const Shards& shards) const {
  if (kernels == nullptr || shards.bytes == 0) return nullptr;
  if (ways.is_small(shards.bytes)) return &words;
  if (shards.element >= 0) return &cells;
  return block_of(shards) < 0 ? &staging : nullptr;
}

// Makes it, collectively. Python refuses that while a CUDA graph is captured.
bool CollectiveNode::make(const Workspace& space) const {
  static PyObject* const make_name = interned("make_workspace");
  const Object name(PyUnicode_FromString(space.name));
  return name && call_owner(make_name, name.get());
}

// Raises DisagreementError if a peer's call of this number differs. Whichever rank calls second compares, before it
// enqueues anything; its abort ends what the others have enqueued.
bool CollectiveNode::compare(const Shards& shards) {
  static PyObject* const differ = interned("calls_differ");
  const bool gathers = shards.element < 0;
  int64_t place = 0;
  if (gathers) {
    const int block = ways.is_small(shards.bytes) ? -1 : block_of(shards);
    place = block < 0 ? place_word(kStagingBlock, 0)
                      : place_word(block, static_cast<int64_t>(shards.parts[0] - blocks.addresses[block][comm->rank]));
  }
  CallDifference found;
  if (!compares_calls || !post_call(reinterpret_cast<Address>(calls.data()), comm->num_ranks, comm->rank,
                                    ++num_compared_, {shards.bytes, std::max(shards.element, 0), place}, &found))
    return true;
  const Object difference(Py_BuildValue("(iiiLL)", gathers ? kAllGather : kReduceScatter, found.peer, found.field,
                                        static_cast<long long>(found.mine), static_cast<long long>(found.theirs)));
  return difference && call_owner(differ, difference.get());
}

// Blocks that a CUDA graph uses are never used again.
bool CollectiveNode::keep_blocks(const Shards& shards) const {
  static PyObject* const keep = interned("keep_block");
  std::set<int> kept;
  for (const Address part : shards.parts)
    if (shards.element < 0 && shards.bytes > 0) kept.insert(blocks.find(part, shards.bytes, comm->rank));
  kept.erase(-1);
  return std::all_of(kept.begin(), kept.end(), [&](int block) {
    const Object number(PyLong_FromLong(block));
    return number && call_owner(keep, number.get());
  });
}

template <class Args>
bool CollectiveNode::launch(void (*kernel)(const Args&), Args& args, int sms, uint64_t stream) const {
  return run_unlocked([&] {
    args.stream = order == nullptr ? stream : order->enter(stream, sms);
    kernel(args);
  });
}

bool CollectiveNode::exchange_words(const Shards& shards, uint64_t stream) const {
  SmallExchangeArgs args{};
  args.comm = *comm;
  args.words = words.table;
  args.own_words = words.own;
  std::copy(shards.parts.begin(), shards.parts.end(), args.shards);
  args.own = shards.own;
  args.bytes = shards.bytes;
  args.scale = shards.scale;
  args.element = shards.element;
  args.num_ctas = ways.small_ctas(shards.bytes);
  return launch(kernels->small_exchange, args, args.num_ctas, stream);
}

bool CollectiveNode::sum(const Shards& shards, uint64_t stream) const {
  ReduceScatterArgs args{};
  args.comm = *comm;
  std::copy(shards.parts.begin(), shards.parts.end(), args.inputs);
  args.cells = cells.table;
  args.own_cells = cells.own;
  args.output = shards.own;
  args.bytes = shards.bytes;
  args.scale = shards.scale;
  args.element = shards.element;
  args.num_ctas = ways.sum_ctas(shards.bytes);
  return launch(kernels->reduce_scatter, args, args.num_ctas, stream);
}

bool CollectiveNode::gather(const Shards& shards, uint64_t stream, bool is_captured) {
  const int block = block_of(shards), rank = comm->rank;
  const auto& parts = shards.parts;
  AllGatherArgs args{};
  args.comm = *comm;
  if (block >= 0) {
    const Address own = blocks.addresses[block][rank];
    args.input = shards.own;
    args.bytes = shards.bytes;
    args.blocks = blocks.tables[block];
    args.host_blocks = blocks.host_tables[block];
    args.offset = static_cast<int64_t>(parts[rank] - own);
    args.place = place_word(block, static_cast<int64_t>(parts[0] - own));
    args.block = block;
    std::copy(parts.begin(), parts.end(), args.outputs);
    return push(args, stream, is_captured);
  }
  args.blocks = staging.table;
  args.host_blocks = staging.host_table;
  args.staging = staging.own;
  args.place = place_word(kStagingBlock, 0);
  args.block = kStagingBlock;
  const int64_t step = ways.staged_bytes();
  for (int64_t begin = 0; begin < shards.bytes; begin += step) {
    args.input = shards.own + begin;
    args.bytes = std::min(step, shards.bytes - begin);
    args.offset = rank * args.bytes;
    std::transform(parts.begin(), parts.end(), args.outputs, [=](Address part) { return part + begin; });
    if (!push(args, stream, is_captured)) return false;
  }
  return true;
}

// Enqueues a gather. Python watches gathers whose stream waits for peers' copy engines.
bool CollectiveNode::push(AllGatherArgs& args, uint64_t stream, bool is_captured) {
  static PyObject* const begin = interned("begin_stream_wait");
  args.num_ctas = ways.push_ctas(args.bytes, args.staging == 0);
  args.captured = is_captured;
  args.stream_words = stream_words;
  args.begun = progress;
  args.finished = progress + sizeof(uint64_t);
  if (args.num_ctas == 0 && !is_captured) {
    args.number = ++num_pushed_;
    const Object written(PyList_New(0));
    for (int source = 0; written && source < comm->num_ranks; ++source) {
      const Address to = args.staging == 0 ? args.outputs[source] : args.staging + source * args.bytes;
      const Object address(PyLong_FromUnsignedLongLong(to));
      if (!address || (source != comm->rank && PyList_Append(written.get(), address.get()) != 0)) return false;
    }
    const Object gather(Py_BuildValue("(KiOL)", static_cast<unsigned long long>(args.number), args.block, written.get(),
                                      static_cast<long long>(args.bytes)));
    if (!gather || !call_owner(begin, gather.get())) return false;
  }
  return launch(kernels->all_gather, args, std::max(args.num_ctas, args.captured), stream);  // handshakes take an SM
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
  if (is_alone) {
    if (given.scale != 1 || overlap(to, from, plan.bytes)) return left();
    if (!copy(to, from, plan.bytes, output)) return nullptr;
    ++num_calls;
    return Py_NewRef(Py_True);
  }
  const std::shared_ptr<CollectiveNode> held = node;
  Shards shards{to, plan.bytes, plan.element, given.scale, {}};
  for (int rank = 0; rank < held->comm->num_ranks; ++rank)
    shards.parts.push_back((gathers_ ? to : from) + rank * plan.bytes);
  if (gathers_) shards.own = shards.parts[held->comm->rank];
  if (gathers_ && overlap(shards.own, from, plan.bytes)) return left();
  return in_turn(*held, [&](Turn& turn) -> PyObject* {
    uint64_t stream = 0;
    if (!turn.enter() || !held->find_stream(&stream) || !held->has_memory_for(shards)) return left();
    if (!turn.begin(name_.get(), whole, plan.bytes, nullptr)) return nullptr;
    const bool is_done = (!gathers_ || copy(shards.own, from, plan.bytes, output)) &&
                         held->exchange(shards, stream, false) && held->check();
    if (!turn.end(is_done)) return nullptr;
    ++num_calls;
    return Py_NewRef(Py_True);
  });
}

}  // namespace ep::control
