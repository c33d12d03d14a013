// The classes behind simt.h: CTAs, their warps and fibers, and the bulk copies in flight. cta.cpp runs CTAs,
// bulk_copies.cpp moves copies, streams.cpp orders kernels.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "simt.h"

namespace ep::cuda {
// The dynamic shared memory of the running CTA, under each name that kernels give it.
constexpr size_t kMaxSharedBytes = 232448;
extern thread_local char dynamic_shared[kMaxSharedBytes];
extern thread_local int32_t counts[kMaxSharedBytes / 4];
}  // namespace ep::cuda

namespace simt {

constexpr unsigned kWarpSize = 32;

// Ends the process: a kernel has broken a rule of the GPU.
[[noreturn]] void give_up(const std::string& why);
void expect(bool holds, const char* what);

// The stacks of a CTA's fibers. Later CTAs use them again.
class Stacks {
 public:
  explicit Stacks(size_t fibers);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* of(size_t fiber) const;

 private:
  size_t bytes_;
  char* address_ = nullptr;
};

// A point at which threads wait for each other in one instruction. The first thread names the instruction, and the last
// one releases all.
struct SyncPoint {
  uint32_t generation = 0;
  const char* instruction = nullptr;

  void join(const char* name, bool first) {
    if (first) instruction = name;
    if (instruction != name && std::strcmp(instruction, name) != 0)
      give_up(std::string("joins ") + name + " while others are in " + instruction);
  }
};

struct Load {
  uint64_t* barrier;
  char* to;
  const char* from;
  uint32_t bytes;
};

struct Store {
  Fiber* by;
  uint32_t group;
  char* to;
  const char* from;
  uint32_t bytes;
  std::vector<char> held;  // the bytes that were read, until they are written
  bool read = false, waited_for = false;
};

struct Thread : Fiber {
  bool begun = false, ended = false;
  bool polled = false;  // it stopped after a poll that found nothing
  const uint32_t* waits_for = nullptr;
  uint32_t generation = 0;  // of the sync point for which it waits
  uint32_t groups = 0;      // of bulk stores that it has committed
  // Last: many bytes that the loop over threads does not read.
  jmp_buf context;
  ucontext_t begin;
};

// One launch of a kernel.
struct Job {
  Launch launch;
  std::function<void()> kernel;
  std::shared_ptr<Job> ahead;               // the kernel ahead in the stream, until this one has ended
  std::vector<std::shared_ptr<Job>> after;  // kernels of other streams that come first
  std::atomic<unsigned> resident{0};        // with few SMs: CTAs that have one
  std::atomic<unsigned>* resident_on_stream = nullptr;
  std::atomic<unsigned> dependents_launched{0};  // CTAs that have launched dependents or ended
  std::atomic<bool> ended{false};
};

// A barrier of some threads of a CTA.
struct PartBarrier {
  uint32_t generation = 0;
  unsigned here = 0;
  unsigned threads = 0;  // that the first one has named
  Votes votes[2] = {};   // of the previous and the current use
};
constexpr unsigned kBarriers = 16;

struct Warp {
  SyncPoint point;
  uint32_t lanes = 0;          // bits of the lanes that have not ended
  uint32_t here = 0;           // bits of the lanes that wait at the point
  Exchange exchanges[2] = {};  // of the previous and the current instruction

  void release_if_all() {
    if (here == 0 || here != lanes) return;
    exchanges[point.generation % 2].lanes = here;
    here = 0;
    ++point.generation;
  }
};

struct Cta {
  Cta(Job& job, unsigned index)
      : job(job),
        block{index},
        block_size{job.launch.threads, 1, 1},
        grid_size{job.launch.ctas, 1, 1},
        shared_bytes(job.launch.shared_bytes),
        stacks(job.launch.threads),
        threads(job.launch.threads),
        warps((job.launch.threads + kWarpSize - 1) / kWarpSize),
        live(job.launch.threads),
        random(std::random_device{}()) {
    for (unsigned i = 0; i < job.launch.threads; ++i) {
      Thread& thread = threads[i];
      thread.thread = Index{i};
      thread.block = &block;
      thread.block_size = &block_size;
      thread.grid_size = &grid_size;
      thread.cta = this;
      thread.warp = &warps[i / kWarpSize];
      thread.lane = i % kWarpSize;
      thread.warp->lanes |= 1u << thread.lane;
    }
  }

  void run();
  void launch_dependents();

  // Resumes, once, every thread that can go on. True if any of them did more than poll.
  bool turn();

  void resume(Thread& thread);
  static void enter();
  [[noreturn]] void end(Thread& thread);
  void stop(Thread& thread);
  void stop_until(Thread& thread, const uint32_t& generation, uint32_t old);

  void release_cta_if_all();

  bool anyone_polls() const;
  std::string waiting() const;

  // --- Bulk copies. move_some() does one step of a copy in flight, chosen at random; false if there is none.
  bool move_some();
  void land(size_t i);
  void read(size_t i);
  void write(size_t i);

  Job& job;
  Index block, block_size, grid_size;
  size_t shared_bytes;
  Stacks stacks;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned live;
  unsigned idle = 0;
  bool has_launched_dependents = false;
  SyncPoint barrier;
  unsigned at_barrier = 0;
  Votes votes[2] = {};
  PartBarrier some[kBarriers];
  std::set<const uint64_t*> barriers;
  std::vector<Load> loads;
  std::vector<Store> stores;
  std::mt19937 random;
  jmp_buf context;
};

}  // namespace simt
