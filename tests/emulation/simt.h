// Runs CUDA kernels on CPUs. The CTAs of a kernel are threads of the system. The threads of a CTA are fibers that take
// turns: a fiber runs until it waits for its warp, for its CTA, or for a value that others write.
//
// Checked: the lanes of a warp must wait in the same instruction, and the threads of a CTA at the same barrier. If all
// of them wait for each other, the process ends with an error. Bulk copies move their bytes at any moment that the
// rules allow, chosen at random, so a stage that is read or filled too early holds wrong bytes. Fibers take turns in a
// changing order, so a lane finds what another has written only after they have synchronised.
// Not checked: memory order. CPUs order more than GPUs do, so a missing fence goes unnoticed. Unless limit_sms() is
// called, all kernels can run at the same time, so a receive that starts too early goes unnoticed, too. Static shared
// memory mostly starts as zeros. Two barriers of one kind count as the same. Fibers are not preempted, so a fiber that
// loops without waiting never ends.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace simt {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Cta;
struct Warp;

// A thread of a CTA.
struct Fiber {
  Index thread;
  const Index* block;
  const Index* block_size;
  const Index* grid_size;
  Cta* cta;
  Warp* warp;
  unsigned lane;
};
extern __thread Fiber* here;

struct Launch {
  unsigned ctas, threads;
  size_t shared_bytes;
  uint64_t stream;  // 0: the call returns when the kernel has ended
  bool together;    // all CTAs run at the same time; otherwise a few at a time
  bool early;       // starts when the kernel ahead in the stream launches its dependents, not when it has ended
};
// Runs `kernel` in all threads of all CTAs, after the kernels that are already on its stream.
void enqueue(const Launch& launch, std::function<void()> kernel);
// Waits until all kernels of a stream have ended.
void synchronize(uint64_t stream);
// From now on the device has `count` SMs, each for one CTA at a time. All CTAs of a cooperative launch start at once.
void limit_sms(unsigned count);
// Kernels that are enqueued on `later` from now on start after those that are on `earlier` now.
void order(uint64_t later, uint64_t earlier);
// Kernels that are enqueued on `stream` from now on wait for open().
void shut(uint64_t stream);
void open(uint64_t stream);
// With few SMs: how many CTAs of the stream's kernels have one.
unsigned resident(uint64_t stream);
// How many kernels have been enqueued on a stream, and how many of them have ended.
uint64_t enqueued(uint64_t stream);
uint64_t ended(uint64_t stream);

// The PTX griddepcontrol instructions of the kernel that the calling fiber runs: wait for the end of the kernel ahead
// in the stream; allow the kernel behind to start, as far as this CTA is concerned.
void wait_on_dependency();
void launch_dependents();

// The calling fiber has polled a value that others write, and found nothing. Other fibers run next.
void poll_again();

// The lanes that wait in one instruction, and the value of each.
struct Exchange {
  uint32_t lanes;
  uint64_t values[32];
};
// All lanes of the warp that have not ended wait for each other in the instruction of this name, each with a value. The
// result stays valid until the next instruction but one.
const Exchange& sync_warp(const char* instruction, uint64_t value);
uint64_t value_of(const Exchange& exchange, unsigned lane);

struct Votes {
  bool all, any;
};
Votes sync_cta(const char* instruction, bool vote);
// Barrier number `barrier`, at which `threads` threads of the CTA wait for each other.
Votes sync_some(unsigned barrier, unsigned threads, bool vote);

// --- Bulk copies and their barriers
void barrier_init(uint64_t* barrier, uint32_t arrivals);
void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes);
bool barrier_passed(uint64_t* barrier, uint32_t parity);
void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void bulk_store(void* to, const void* from, uint32_t bytes);
void bulk_commit();
void bulk_wait(unsigned pending, bool written);  // otherwise: read

}  // namespace simt
