// All-gather and reduce-scatter inside a node, as the host runs them: what moves shards, the arguments of kernels, and
// their launch. One call of C runs an operation that is like an earlier one (KnownCollective). Python runs all others,
// and calls the same code for what happens inside a node (CollectiveNode).
#pragma once
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
class Ways {
 public:
  std::string path;       // "auto"; "sm" or "copy_engine": nothing else
  int ranks;              // of the node
  int most_sum_sms;       // of a sum that is not small
  int64_t engines_from;   // bytes of all ranks' shards
  int64_t staging_bytes;  // of the block through which peers write to memory that they have not mapped

  bool is_small(int64_t bytes) const { return path == "auto" && bytes * ranks <= kSmallBytes; }
  // Bytes of each shard that fit into the staging block at a time.
  int64_t staged_bytes() const { return staging_bytes / ranks / 16 * 16; }
  // The CTAs of the kernel. They run at the same time, each on an SM of its own. gather_ctas: 0 if copy engines push.
  int gather_ctas(int64_t bytes, bool is_mapped) const;
  int sum_ctas(int64_t bytes) const;

 private:
  int small_ctas(int64_t bytes) const;
};

// One operation between the ranks of a node.
struct Shards {
  Address own;                 // gather: this rank's shard. Sum: where the sum goes
  int64_t bytes;               // of a shard
  int element;                 // of a sum; -1: gather
  double scale;                // of a sum
  std::vector<Address> parts;  // gather: where each rank's shard goes. Sum: this rank's shard for each rank
};

// Memory of all ranks of the node, by number: the blocks that `allocate` makes tensors of, and what GPUs need besides,
// which Python makes when it is first needed.
constexpr int kWords = kStagingBlock + 1, kCells = kStagingBlock + 2, kMemories = kStagingBlock + 3;
struct Memories {
  Address addresses[kMemories][kMaxRanks];  // as mapped here; 0: not there
  int64_t bytes[kMemories];
  Address own[kMemories];                             // this rank's addresses
  Address tables[kMemories], host_tables[kMemories];  // of the addresses, see AllGatherArgs

  bool holds(int number, Address begin, int64_t size) const {
    return own[number] != 0 && own[number] <= begin && begin + size <= own[number] + bytes[number];
  }
  // Returns the number of the block that has this memory, or -1.
  int find(Address begin, int64_t size) const {
    for (int block = 0; block < kMaxPeerBlocks; ++block)
      if (holds(block, begin, size)) return block;
    return -1;
  }
};

// An engine of collectives, inside its node.
class CollectiveNode : public Engine {
 public:
  using Engine::Engine;

  // Runs or enqueues an operation, in a turn or in BaseEngine.run. Returns false with Python's error set.
  bool exchange(const Shards& shards, uint64_t stream, bool is_captured);
  // Whether it can do so without more memory.
  bool has_memory_for(const Shards& shards) const {
    const int home = home_of(shards);
    return home < 0 || memories.own[home] != 0;
  }

  Object comm_object;
  const Comm* comm = nullptr;  // of that object
  Memories memories{};

  // On GPUs.
  Address kernels = 0;  // CollectiveKernels; 0: the kernels of CPUs
  Ways ways{};
  std::shared_ptr<StreamOrder> order;      // null: tests have no streams
  std::vector<Address> calls;              // each rank's ring of calls
  bool compares_calls = true;              // false: tests leave that to kernels
  Address stream_words = 0, progress = 0;  // see AllGatherArgs

 private:
  bool run_on_cpu(const Shards& shards) const;
  bool gather(const Shards& shards, int home, uint64_t stream, bool is_captured);
  bool watch(AllGatherArgs& args);
  template <class Args>
  bool launch(void (*CollectiveKernels::*kernel)(const Args&), Args& args, int sms, uint64_t stream) const;

  int block_of(const Shards& shards) const;
  int home_of(const Shards& shards) const;
  int64_t place_of(const Shards& shards, int home) const;
  bool make(int number) const;
  bool compare(const Shards& shards);

  uint64_t num_compared_ = 0, num_watched_ = 0;
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
