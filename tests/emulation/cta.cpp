// CTAs run in threads of the system. Their threads are fibers that take turns.
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "cta.h"

namespace ep::cuda {
thread_local __attribute__((aligned(128))) char dynamic_shared[kMaxSharedBytes];
thread_local __attribute__((aligned(16))) int32_t counts[kMaxSharedBytes / 4];
}  // namespace ep::cuda

namespace simt {

__thread Fiber* here = nullptr;

namespace {

constexpr size_t kStackBytes = 64 * 1024;
// Stacks begin an odd number of cache lines apart, so in different sets of the cache.
constexpr size_t kStackStep = 3 * 64, kStackSteps = 64;
constexpr unsigned kRoundsBetweenYields = 16;
constexpr unsigned kLongestSleepUs = 2000;

std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}
std::map<size_t, std::vector<char*>>& unused() {
  static auto* made =
      new std::map<size_t, std::vector<char*>>;  // never destroyed, because kernels may run until the process ends
  return *made;
}

}  // namespace

[[noreturn]] void give_up(const std::string& why) {
  std::string where = "between threads";
  if (here != nullptr) where = "thread " + std::to_string(here->thread.x) + " of CTA " + std::to_string(here->block->x);
  std::fprintf(stderr, "simt: %s: %s\n", where.c_str(), why.c_str());
  std::abort();
}
void expect(bool holds, const char* what) {
  if (!holds) give_up(what);
}

Stacks::Stacks(size_t fibers) : bytes_(fibers * kStackBytes) {
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
Stacks::~Stacks() {
  const std::lock_guard<std::mutex> lock(mutex());
  unused()[bytes_].push_back(address_);
}
char* Stacks::of(size_t fiber) const { return address_ + fiber * kStackBytes; }

void Cta::run() {
  expect(shared_bytes <= ep::cuda::kMaxSharedBytes, "more shared memory than an SM has");
  std::memset(ep::cuda::dynamic_shared, 0xA5, shared_bytes);
  std::memset(ep::cuda::counts, 0xA5, shared_bytes);
  for (unsigned round = 1; live > 0; ++round) {
    if (!turn() && !move_some()) {
      if (!anyone_polls()) give_up("all threads wait for each other: " + waiting());
      if (idle++ < 4)
        sched_yield();
      else
        usleep(std::min(20 + idle, kLongestSleepUs));
    } else {
      idle = 0;
    }
    if (round % kRoundsBetweenYields == 0) sched_yield();
  }
  while (!stores.empty()) write(0);
  expect(loads.empty(), "a CTA ends with bulk loads under way");
  launch_dependents();
}
void Cta::launch_dependents() {
  if (!has_launched_dependents) ++job.dependents_launched;
  has_launched_dependents = true;
}
bool Cta::turn() {
  const unsigned size = static_cast<unsigned>(threads.size()), first = static_cast<unsigned>(random()) % size;
  const bool upwards = random() % 2 != 0;
  bool moved = false;
  for (unsigned i = 0; i < size; ++i) {
    Thread& thread = threads[(first + (upwards ? i : size - i)) % size];
    if (thread.ended || (thread.waits_for != nullptr && *thread.waits_for == thread.generation)) continue;
    thread.waits_for = nullptr;
    thread.polled = false;
    resume(thread);
    moved |= !thread.polled;
    if (random() % 8 == 0) move_some();  // copies move between any two instructions
  }
  return moved;
}
void Cta::resume(Thread& thread) {
  here = &thread;
  if (_setjmp(context) == 0) {
    if (thread.begun) _longjmp(thread.context, 1);
    thread.begun = true;
    getcontext(&thread.begin);
    thread.begin.uc_stack.ss_sp = stacks.of(thread.thread.x);
    thread.begin.uc_stack.ss_size = kStackBytes - thread.thread.x % kStackSteps * kStackStep;
    thread.begin.uc_link = nullptr;
    makecontext(&thread.begin, &Cta::enter, 0);
    setcontext(&thread.begin);
  }
  here = nullptr;
}
void Cta::enter() {
  Thread& thread = static_cast<Thread&>(*here);
  thread.cta->job.kernel();
  thread.cta->end(thread);
}
void Cta::end(Thread& thread) {
  for (const Store& store : stores)
    expect(store.by != &thread || store.waited_for, "ends without having waited for its bulk stores");
  thread.ended = true;
  --live;
  thread.warp->lanes &= ~(1u << thread.lane);
  thread.warp->release_if_all();
  release_cta_if_all();
  _longjmp(context, 1);
}
void Cta::stop(Thread& thread) {
  if (_setjmp(thread.context) == 0) _longjmp(context, 1);
}
void Cta::stop_until(Thread& thread, const uint32_t& generation, uint32_t old) {
  if (generation != old) return;
  thread.waits_for = &generation;
  thread.generation = old;
  stop(thread);
}
void Cta::release_cta_if_all() {
  if (at_barrier == 0 || at_barrier != live) return;
  at_barrier = 0;
  ++barrier.generation;
}
bool Cta::anyone_polls() const {
  for (const Thread& thread : threads)
    if (!thread.ended && thread.waits_for == nullptr) return true;
  return false;
}
std::string Cta::waiting() const {
  std::string said = std::to_string(at_barrier) + " of " + std::to_string(live) + " at " +
                     (at_barrier ? barrier.instruction : "no barrier");
  for (const PartBarrier& one : some)
    if (one.here != 0) said += "; " + std::to_string(one.here) + " of " + std::to_string(one.threads) + " at a barrier";
  for (size_t w = 0; w < warps.size(); ++w)
    if (warps[w].here != 0)
      said += "; lanes " + std::to_string(warps[w].here) + " of " + std::to_string(warps[w].lanes) + " of warp " +
              std::to_string(w) + " in " + warps[w].point.instruction;
  return said;
}

// --- Functions of simt.h about fibers

void poll_again() {
  Thread& thread = static_cast<Thread&>(*here);
  thread.polled = true;
  thread.cta->stop(thread);
}

const Exchange& sync_warp(const char* instruction, uint64_t value) {
  Thread& thread = static_cast<Thread&>(*here);
  Warp& warp = *thread.warp;
  const uint32_t generation = warp.point.generation;
  warp.point.join(instruction, warp.here == 0);
  Exchange& exchange = warp.exchanges[generation % 2];
  exchange.values[thread.lane] = value;
  warp.here |= 1u << thread.lane;
  warp.release_if_all();
  thread.cta->stop_until(thread, warp.point.generation, generation);
  return exchange;
}
uint64_t value_of(const Exchange& exchange, unsigned lane) {
  expect(exchange.lanes >> lane & 1, "asks for the value of a lane that has ended");
  return exchange.values[lane];
}

Votes sync_cta(const char* instruction, bool vote) {
  Thread& thread = static_cast<Thread&>(*here);
  Cta& cta = *thread.cta;
  const uint32_t generation = cta.barrier.generation;
  cta.barrier.join(instruction, cta.at_barrier == 0);
  Votes& votes = cta.votes[generation % 2];
  if (cta.at_barrier == 0) votes = {true, false};
  votes.all &= vote;
  votes.any |= vote;
  ++cta.at_barrier;
  cta.release_cta_if_all();
  cta.stop_until(thread, cta.barrier.generation, generation);
  return votes;
}

Votes sync_some(unsigned barrier, unsigned threads, bool vote) {
  Thread& thread = static_cast<Thread&>(*here);
  expect(barrier > 0 && barrier < kBarriers && threads % kWarpSize == 0, "no such barrier");
  PartBarrier& point = thread.cta->some[barrier];
  const uint32_t generation = point.generation;
  Votes& votes = point.votes[generation % 2];
  if (point.here == 0) votes = {true, false}, point.threads = threads;
  expect(point.threads == threads, "joins a barrier of another number of threads");
  votes.all &= vote;
  votes.any |= vote;
  if (++point.here == threads) point.here = 0, ++point.generation;
  thread.cta->stop_until(thread, point.generation, generation);
  return votes;
}

}  // namespace simt
