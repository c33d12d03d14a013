// CUDA's way of running, on CPUs: the CTAs of a kernel are threads of the system, and the threads of a CTA are fibers
// that take turns. A fiber runs until it waits: for its warp, for its CTA, or for something that others write.
//
// What is checked. Lanes of a warp must meet in the same instruction, and threads of a CTA at the same barrier; all of
// them waiting is a deadlock. Bulk copies move their bytes at any moment that the rules allow, chosen at random: a
// stage that is read too early, or filled again too early, holds the wrong bytes. Fibers take turns in an order that
// changes: what a lane writes for others is not there before they have met.
// What is not. Memory is that of the CPU, which orders more than a GPU's: missing fences go unnoticed. There is room
// for all kernels at once, so a missing admit does, too; and static shared memory mostly begins as zeros. Two barriers
// of one kind are taken for the same. Fibers are not preempted: who neither meets others nor sleeps goes on for good.
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
  bool together;    // all CTAs run at the same time; otherwise some, and the others follow
  bool early;       // begins when the kernel ahead in the stream lets it, and not when that has ended
};
// Runs `kernel` in all threads of all CTAs, after the kernels that were enqueued on its stream before.
void enqueue(const Launch& launch, std::function<void()> kernel);
// Waits until all kernels of a stream have ended.
void synchronize(uint64_t stream);

// Of the kernel that the calling fiber runs: waits for the end of the one ahead; lets the one behind begin, as far as
// this CTA is concerned.
void wait_on_dependency();
void launch_dependents();

// The calling fiber has looked in vain for something that others write; they go on.
void look_again_later();

// Who has met, and what each of them has brought.
struct Met {
  uint32_t lanes;
  uint64_t values[32];
};
// All lanes of the warp that have not ended meet in the instruction of this name, each with a value. What is returned
// stays until the next instruction but one.
const Met& meet_warp(const char* instruction, uint64_t value);
uint64_t value_of(const Met& met, unsigned lane);

struct Votes {
  bool all, any;
};
Votes meet_cta(const char* instruction, bool vote);

// --- Bulk copies and their barriers
void barrier_init(uint64_t* barrier, uint32_t arrivals);
void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes);
bool barrier_passed(uint64_t* barrier, uint32_t parity);
void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void bulk_store(void* to, const void* from, uint32_t bytes);
void bulk_commit();
void bulk_wait(unsigned pending, bool written);  // otherwise: read

}  // namespace simt
