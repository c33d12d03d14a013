#include "simt.h"

#include <sched.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace ep::cuda {
// One CTA's dynamic shared memory, under each of the names that kernels give it.
constexpr size_t kMostSharedBytes = 232448;
thread_local __attribute__((aligned(128))) char dynamic_shared[kMostSharedBytes];
thread_local __attribute__((aligned(16))) int32_t counts[kMostSharedBytes / 4];
}  // namespace ep::cuda

namespace simt {

__thread Fiber* here = nullptr;

namespace {

constexpr unsigned kWarpSize = 32;
constexpr size_t kStackBytes = 64 * 1024;
constexpr unsigned kAtOnce = 4;  // CTAs of a kernel that is not launched cooperatively
constexpr unsigned kRoundsBetweenYields = 16;

[[noreturn]] void give_up(const std::string& why) {
  std::string where = "between threads";
  if (here != nullptr) where = "thread " + std::to_string(here->thread.x) + " of CTA " + std::to_string(here->block->x);
  std::fprintf(stderr, "simt: %s: %s\n", where.c_str(), why.c_str());
  std::abort();
}
void expect(bool holds, const char* what) {
  if (!holds) give_up(what);
}

// Stacks of a CTA's fibers, used again by later ones.
class Stacks {
 public:
  explicit Stacks(size_t fibers) : bytes_(fibers * kStackBytes) {
    const std::lock_guard<std::mutex> lock(mutex());
    std::vector<char*>& kept = unused()[bytes_];
    if (!kept.empty()) {
      address_ = kept.back();
      kept.pop_back();
      return;
    }
    void* made = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    expect(made != MAP_FAILED, "no memory for stacks");
    address_ = static_cast<char*>(made);
  }
  ~Stacks() {
    const std::lock_guard<std::mutex> lock(mutex());
    unused()[bytes_].push_back(address_);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* of(size_t fiber) const { return address_ + fiber * kStackBytes; }

 private:
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }
  static std::map<size_t, std::vector<char*>>& unused() {
    static auto* made = new std::map<size_t, std::vector<char*>>;  // kernels may run until the process ends
    return *made;
  }
  size_t bytes_;
  char* address_ = nullptr;
};

// Whoever has come first names the instruction; whoever comes last lets all go on.
struct Meeting {
  uint32_t generation = 0;
  const char* instruction = nullptr;

  void join(const char* name, bool first) {
    if (first) instruction = name;
    if (std::strcmp(instruction, name) != 0)
      give_up(std::string("meets others in ") + name + " who are in " + instruction);
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
  std::vector<char> held;  // what was read, until it is written
  bool read = false, waited_for = false;
};

struct Thread : Fiber {
  ucontext_t begin;
  jmp_buf context;
  bool begun = false, ended = false;
  bool looked = false;  // it stopped as it had looked in vain
  const uint32_t* meeting = nullptr;
  uint32_t generation = 0;  // of the meeting that it waits for
  uint32_t groups = 0;      // of bulk stores, that it has closed
};

}  // namespace

// A kernel that was enqueued.
struct Job {
  Launch launch;
  std::function<void()> kernel;
  std::shared_ptr<Job> ahead;       // in its stream, until this one has ended
  std::atomic<unsigned> let_in{0};  // CTAs that have let the next one in, or ended
  std::atomic<bool> ended{false};
};

struct Warp {
  Meeting meeting;
  uint32_t lanes = 0;  // that have not ended
  uint32_t here = 0;
  Met met[2] = {};  // in the instruction before, and in this one

  void go_on_if_all() {
    if (here == 0 || here != lanes) return;
    met[meeting.generation % 2].lanes = here;
    here = 0;
    ++meeting.generation;
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

  void run() {
    expect(shared_bytes <= ep::cuda::kMostSharedBytes, "more shared memory than an SM has");
    std::memset(ep::cuda::dynamic_shared, 0xA5, shared_bytes);
    std::memset(ep::cuda::counts, 0xA5, shared_bytes);
    for (unsigned round = 1; live > 0; ++round) {
      if (!turn() && !move_some()) {
        if (!anyone_looks()) give_up("all threads wait for each other: " + waiting());
        if (idle++ < 4)
          sched_yield();
        else
          usleep(20);
      } else {
        idle = 0;
      }
      if (round % kRoundsBetweenYields == 0) sched_yield();
    }
    while (!stores.empty()) write(0);
    expect(loads.empty(), "a CTA ends with bulk loads under way");
    let_next_in();
  }
  void let_next_in() {
    if (!has_let_in) ++job.let_in;
    has_let_in = true;
  }

  // Everyone who can go on does, once. Whether anyone did more than look.
  bool turn() {
    const unsigned size = static_cast<unsigned>(threads.size()), first = static_cast<unsigned>(random()) % size;
    const bool upwards = random() % 2 != 0;
    bool moved = false;
    for (unsigned i = 0; i < size; ++i) {
      Thread& thread = threads[(first + (upwards ? i : size - i)) % size];
      if (thread.ended || (thread.meeting != nullptr && *thread.meeting == thread.generation)) continue;
      thread.meeting = nullptr;
      thread.looked = false;
      resume(thread);
      moved |= !thread.looked;
      if (random() % 8 == 0) move_some();  // copies go on beside every instruction
    }
    return moved;
  }

  void resume(Thread& thread) {
    here = &thread;
    if (_setjmp(context) == 0) {
      if (thread.begun) _longjmp(thread.context, 1);
      thread.begun = true;
      getcontext(&thread.begin);
      thread.begin.uc_stack.ss_sp = stacks.of(thread.thread.x);
      thread.begin.uc_stack.ss_size = kStackBytes;
      thread.begin.uc_link = nullptr;
      makecontext(&thread.begin, &Cta::enter, 0);
      setcontext(&thread.begin);
    }
    here = nullptr;
  }
  static void enter() {
    Thread& thread = static_cast<Thread&>(*here);
    thread.cta->job.kernel();
    thread.cta->end(thread);
  }
  [[noreturn]] void end(Thread& thread) {
    for (const Store& store : stores)
      expect(store.by != &thread || store.waited_for, "ends without having waited for its bulk stores");
    thread.ended = true;
    --live;
    thread.warp->lanes &= ~(1u << thread.lane);
    thread.warp->go_on_if_all();
    let_through_if_all();
    _longjmp(context, 1);
  }
  void stop(Thread& thread) {
    if (_setjmp(thread.context) == 0) _longjmp(context, 1);
  }
  void stop_until(Thread& thread, const uint32_t& generation, uint32_t old) {
    if (generation != old) return;
    thread.meeting = &generation;
    thread.generation = old;
    stop(thread);
  }

  void let_through_if_all() {
    if (at_barrier == 0 || at_barrier != live) return;
    at_barrier = 0;
    ++barrier.generation;
  }

  bool anyone_looks() const {
    for (const Thread& thread : threads)
      if (!thread.ended && thread.meeting == nullptr) return true;
    return false;
  }
  std::string waiting() const {
    std::string said = std::to_string(at_barrier) + " of " + std::to_string(live) + " at " +
                       (at_barrier ? barrier.instruction : "no barrier");
    for (size_t w = 0; w < warps.size(); ++w)
      if (warps[w].here != 0)
        said += "; lanes " + std::to_string(warps[w].here) + " of " + std::to_string(warps[w].lanes) + " of warp " +
                std::to_string(w) + " in " + warps[w].meeting.instruction;
    return said;
  }

  // --- Bulk copies. A step of one of them, any of those under way.
  bool move_some() {
    const size_t all = loads.size() + stores.size();
    if (all == 0) return false;
    const size_t chosen = random() % all;
    if (chosen < loads.size())
      land(chosen);
    else if (const size_t store = chosen - loads.size(); stores[store].read)
      write(store);
    else
      read(store);
    return true;
  }
  void land(size_t i);
  void read(size_t i) {
    Store& store = stores[i];
    store.held.assign(store.from, store.from + store.bytes);
    store.read = true;
  }
  void write(size_t i) {
    std::memcpy(stores[i].to, stores[i].held.data(), stores[i].bytes);
    stores.erase(stores.begin() + static_cast<std::ptrdiff_t>(i));
  }

  Job& job;
  Index block, block_size, grid_size;
  size_t shared_bytes;
  Stacks stacks;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned live;
  unsigned idle = 0;
  bool has_let_in = false;
  Meeting barrier;
  unsigned at_barrier = 0;
  Votes votes[2] = {};
  std::set<const uint64_t*> barriers;
  std::vector<Load> loads;
  std::vector<Store> stores;
  std::mt19937 random;
  jmp_buf context;
};

namespace {

// The last kernel of each stream.
std::mutex streams_mutex;
std::map<uint64_t, std::shared_ptr<Job>>& streams() {
  static auto* made = new std::map<uint64_t, std::shared_ptr<Job>>;
  return *made;
}

template <class Ready>
void wait_until(Ready ready) {
  while (!ready()) usleep(20);
}

void run(Job& job) {
  if (const Job* ahead = job.ahead.get()) {
    const bool early = job.launch.early;
    wait_until([&] { return ahead->ended || (early && ahead->let_in == ahead->launch.ctas); });
  }
  std::atomic<unsigned> next{0};
  const unsigned ctas = job.launch.ctas, workers = job.launch.together || ctas < kAtOnce ? ctas : kAtOnce;
  std::vector<std::thread> running;
  for (unsigned worker = 0; worker < workers; ++worker)
    running.emplace_back([&] {
      for (unsigned index = next++; index < ctas; index = next++) Cta(job, index).run();
    });
  for (std::thread& worker : running) worker.join();
  if (job.ahead != nullptr) {
    expect(job.ahead->ended, "a kernel ends before the one ahead of it, which the one behind would not wait for");
    job.ahead = nullptr;
  }
  job.ended = true;
}

}  // namespace

void enqueue(const Launch& launch, std::function<void()> kernel) {
  if (launch.ctas == 0) give_up("a launch of no CTAs");
  auto job = std::make_shared<Job>();
  job->launch = launch;
  job->kernel = std::move(kernel);
  if (launch.stream == 0) return run(*job);
  const std::lock_guard<std::mutex> lock(streams_mutex);
  std::shared_ptr<Job>& last = streams()[launch.stream];
  job->ahead = last;
  last = job;
  std::thread([job] { run(*job); }).detach();
}

void synchronize(uint64_t stream) {
  std::shared_ptr<Job> last;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    last = streams()[stream];
  }
  if (last != nullptr) wait_until([&] { return last->ended.load(); });
}

void wait_on_dependency() {
  const Job* ahead = here->cta->job.ahead.get();
  while (ahead != nullptr && !ahead->ended) look_again_later();
}
void launch_dependents() { here->cta->let_next_in(); }

void look_again_later() {
  Thread& thread = static_cast<Thread&>(*here);
  thread.looked = true;
  thread.cta->stop(thread);
}

const Met& meet_warp(const char* instruction, uint64_t value) {
  Thread& thread = static_cast<Thread&>(*here);
  Warp& warp = *thread.warp;
  const uint32_t generation = warp.meeting.generation;
  warp.meeting.join(instruction, warp.here == 0);
  Met& met = warp.met[generation % 2];
  met.values[thread.lane] = value;
  warp.here |= 1u << thread.lane;
  warp.go_on_if_all();
  thread.cta->stop_until(thread, warp.meeting.generation, generation);
  return met;
}
uint64_t value_of(const Met& met, unsigned lane) {
  expect(met.lanes >> lane & 1, "asks for the value of a lane that has ended");
  return met.values[lane];
}

Votes meet_cta(const char* instruction, bool vote) {
  Thread& thread = static_cast<Thread&>(*here);
  Cta& cta = *thread.cta;
  const uint32_t generation = cta.barrier.generation;
  cta.barrier.join(instruction, cta.at_barrier == 0);
  Votes& votes = cta.votes[generation % 2];
  if (cta.at_barrier == 0) votes = {true, false};
  votes.all &= vote;
  votes.any |= vote;
  ++cta.at_barrier;
  cta.let_through_if_all();
  cta.stop_until(thread, cta.barrier.generation, generation);
  return votes;
}

// --- Barriers: a phase, arrivals of a phase, those still missing, and bytes still to come.
namespace {

struct Barrier {
  uint32_t phase : 1;
  uint32_t arrivals : 15;
  uint32_t missing : 15;
  int32_t bytes;

  void pass() {
    if (missing != 0 || bytes != 0) return;
    phase ^= 1;
    missing = arrivals;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t), "a barrier is a word");

Barrier& barrier_at(uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }
Barrier& made_barrier_at(uint64_t* word) {
  expect(here->cta->barriers.count(word) != 0, "a barrier that was not made");
  return barrier_at(word);
}

bool is_shared(const void* begin, size_t bytes) {
  const char* at = static_cast<const char*>(begin);
  return at >= ep::cuda::dynamic_shared && at + bytes <= ep::cuda::dynamic_shared + here->cta->shared_bytes;
}
bool is_aligned(const void* address, uint32_t bytes) {
  return (reinterpret_cast<uintptr_t>(address) | bytes) % 16 == 0;
}

}  // namespace

void Cta::land(size_t i) {
  const Load load = loads[i];
  loads.erase(loads.begin() + static_cast<std::ptrdiff_t>(i));
  std::memcpy(load.to, load.from, load.bytes);
  Barrier& barrier = barrier_at(load.barrier);
  barrier.bytes -= static_cast<int32_t>(load.bytes);
  barrier.pass();
}

void barrier_init(uint64_t* word, uint32_t arrivals) {
  expect(is_shared(word, 8) && reinterpret_cast<uintptr_t>(word) % 8 == 0,
         "a barrier that is no word of shared memory");
  here->cta->barriers.insert(word);
  barrier_at(word) = Barrier{0, arrivals & 0x7FFFu, arrivals & 0x7FFFu, 0};
}
void barrier_arrive_expect(uint64_t* word, uint32_t bytes) {
  Barrier& barrier = made_barrier_at(word);
  expect(barrier.missing > 0, "arrives at a barrier whose phase has all its arrivals");
  barrier.bytes += static_cast<int32_t>(bytes);
  --barrier.missing;
  barrier.pass();
}
bool barrier_passed(uint64_t* word, uint32_t parity) {
  if (made_barrier_at(word).phase != parity) return true;
  look_again_later();
  return barrier_at(word).phase != parity;
}

void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  expect(is_aligned(to, bytes) && is_aligned(from, bytes), "a bulk load that is not aligned to 16 bytes");
  expect(bytes > 0 && is_shared(to, bytes), "a bulk load to outside of the CTA's shared memory");
  made_barrier_at(barrier);
  here->cta->loads.push_back({barrier, static_cast<char*>(to), static_cast<const char*>(from), bytes});
}
void bulk_store(void* to, const void* from, uint32_t bytes) {
  expect(is_aligned(to, bytes) && is_aligned(from, bytes), "a bulk store that is not aligned to 16 bytes");
  expect(bytes > 0 && is_shared(from, bytes), "a bulk store from outside of the CTA's shared memory");
  const uint32_t group = static_cast<Thread*>(here)->groups;
  here->cta->stores.push_back({here, group, static_cast<char*>(to), static_cast<const char*>(from), bytes, {}});
}
void bulk_commit() { ++static_cast<Thread*>(here)->groups; }
void bulk_wait(unsigned pending, bool written) {
  Cta& cta = *here->cta;
  const uint32_t groups = static_cast<Thread*>(here)->groups;
  const auto waits_for = [&](const Store& store) { return store.by == here && store.group + pending < groups; };
  for (size_t i = 0; i < cta.stores.size();) {
    const bool mine = waits_for(cta.stores[i]);
    cta.stores[i].waited_for |= mine;
    if (mine && !cta.stores[i].read) cta.read(i);
    if (mine && written)
      cta.write(i);
    else
      ++i;
  }
}

}  // namespace simt
