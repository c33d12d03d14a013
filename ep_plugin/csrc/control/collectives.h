// All-gather and reduce-scatter inside a node, as the host runs them: what moves shards, the arguments of kernels, and
// their launch. One call of C runs an operation that is like an earlier one (KnownCollective). Python runs all others,
// and calls the same code for what happens inside a node (CollectiveNode).
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/collectives.h"
#include "control/operation.h"

namespace ep::control {

// What moves shards inside a node of GPUs, by the bytes of a shard and the object's `path`:
// - Words: up to kSmallBytes of all ranks together, every 16 bytes carry a flag. One kernel gathers or sums them.
// - Kernels: a kernel of a few CTAs pushes shards to peers, or sums them.
// - Copy engines, for gathers from `engines_from` bytes on. They leave all SMs to the model, and take longer to start.
struct Ways {
  std::string path;       // "auto"; "sm" or "copy_engine": nothing else
  int ranks;              // of the node
  int most_sum_sms;       // of a sum that is not small
  int64_t engines_from;   // bytes of all ranks' shards
  int64_t staging_bytes;  // of the block through which peers write to memory that they have not mapped

  bool is_small(int64_t bytes) const { return path == "auto" && bytes * ranks <= kSmallBytes; }
  // Bytes of each shard that fit into the staging block at a time.
  int64_t staged_bytes() const { return staging_bytes / ranks / 16 * 16; }
  // The CTAs of each kernel. They run at the same time, each on an SM of its own. push_ctas: 0 if copy engines push.
  int small_ctas(int64_t bytes) const;
  int push_ctas(int64_t bytes, bool is_mapped) const;
  int sum_ctas(int64_t bytes) const;
};

// One operation between the ranks of a node.
struct Shards {
  Address own;                 // gather: this rank's shard. Sum: where the sum goes
  int64_t bytes;               // of a shard
  int element;                 // of a sum; -1: gather
  double scale;                // of a sum
  std::vector<Address> parts;  // gather: where each rank's shard goes. Sum: this rank's shard for each rank
};

// The blocks that `allocate` makes tensors of, on all ranks of the node, by number. Kernels of CPUs read them.
struct PeerBlocks {
  Address addresses[kMaxPeerBlocks][kMaxRanks];  // as mapped here, 0: closed
  int64_t bytes[kMaxPeerBlocks];
  Address tables[kMaxPeerBlocks], host_tables[kMaxPeerBlocks];  // of the addresses, see AllGatherArgs
  int count;                                                    // one more than the largest number so far

  // Whether the rank with this index has the memory in a block.
  bool holds(int block, Address begin, int64_t size, int index) const {
    const Address address = addresses[block][index];
    return address != 0 && address <= begin && begin + size <= address + bytes[block];
  }
  // Returns the number of the block that has it, or -1.
  int find(Address begin, int64_t size, int index) const {
    for (int block = 0; block < count; ++block)
      if (holds(block, begin, size, index)) return block;
    return -1;
  }
};

// Memory of all ranks that operations on GPUs need, beside blocks. Python makes it when it is first needed.
struct Workspace {
  const char* name;
  Address table, host_table, own;  // own: 0 before it is made
};

// An engine of collectives, inside its node.
class CollectiveNode : public Engine {
 public:
  using Engine::Engine;

  // Runs or enqueues an operation, in a turn or in BaseEngine.run. Returns false with Python's error set.
  bool exchange(const Shards& shards, uint64_t stream, bool is_captured);
  // Whether it can do so without more memory.
  bool has_memory_for(const Shards& shards) const {
    const Workspace* needed = workspace_for(shards);
    return needed == nullptr || needed->own != 0;
  }

  Object comm_object;
  const Comm* comm = nullptr;  // of that object
  PeerBlocks blocks{};

  // On GPUs.
  const CollectiveKernels* kernels = nullptr;  // null: the kernels of CPUs
  Ways ways{};
  std::shared_ptr<StreamOrder> order;      // null: tests have no streams
  std::vector<Address> calls;              // each rank's ring of calls
  bool compares_calls = true;              // false: tests leave that to kernels
  Address stream_words = 0, progress = 0;  // see AllGatherArgs
  Workspace words{"words", 0, 0, 0}, cells{"cells", 0, 0, 0}, staging{"staging", 0, 0, 0};

 private:
  bool run_on_cpu(const Shards& shards) const;
  bool gather(const Shards& shards, uint64_t stream, bool is_captured);
  bool push(AllGatherArgs& args, uint64_t stream, bool is_captured);
  bool sum(const Shards& shards, uint64_t stream) const;
  bool exchange_words(const Shards& shards, uint64_t stream) const;
  template <class Args>
  bool launch(void (*kernel)(const Args&), Args& args, int sms, uint64_t stream) const;

  int block_of(const Shards& shards) const;
  const Workspace* workspace_for(const Shards& shards) const;
  bool make(const Workspace& space) const;
  bool compare(const Shards& shards);
  bool keep_blocks(const Shards& shards) const;

  uint64_t num_compared_ = 0, num_pushed_ = 0;
};

// The calls of one HierarchicalAllGather or HierarchicalReduceScatter whose arguments Python has checked.
class KnownCollective {
 public:
  using Kind = KnownCollective;
  struct Given {
    PyObject *output, *input;
    double scale;
  };
  static constexpr Py_ssize_t num_args = 3;
  static bool read(const KnownCollective&, PyObject* const* args, Given& given);

  // name: of the operation, a str. is_alone: the group has one rank, which only copies.
  KnownCollective(PyObject* name, bool gathers, bool is_alone)
      : is_alone(is_alone), name_(Object::borrowed(name)), gathers_(gathers) {}

  // Calls with tensors of this form need no check any more. bytes, element: as in Shards.
  void learn(PyObject* output, PyObject* input, int64_t bytes, int element);
  // Runs an operation. Returns True; None if Python must take or check the call; null with Python's error set.
  PyObject* run(const Given& given);

  std::shared_ptr<CollectiveNode> node;  // null: Python takes all calls of several ranks
  bool is_alone;                         // false after close
  int64_t num_calls = 0;                 // that ran here, for tests

 private:
  struct Plan {
    int64_t bytes;
    int element;
  };

  const Object name_;
  const bool gathers_;
  Plans<Plan> plans_;
};

}  // namespace ep::control
