// Wrong kernels. The emulation must notice each of them.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/core/ptx.cuh"

namespace ep::cuda {
extern __shared__ __align__(128) char dynamic_shared[];
}

namespace simt {

namespace ptx = ep::ptx;

namespace {

constexpr unsigned kThreads = 64;
constexpr uint32_t kBytes = 128;

char* stage() { return ep::cuda::dynamic_shared; }

void lanes_apart(char*) {
  if (threadIdx.x % 32 == 0)
    __syncwarp();
  else
    __ballot_sync(0xFFFFFFFFu, 1);
}
void threads_apart(char*) {
  if (threadIdx.x % 32 == 0) __syncthreads();
  __syncwarp();
}
void asks_the_dead(char* memory) {
  if (threadIdx.x % 32 == 31) return;
  memory[0] = static_cast<char>(__shfl_sync(0xFFFFFFFFu, 1, 31));
}
void loads_unaligned(char* memory) {
  if (threadIdx.x == 0) ptx::bulk_load(stage(), memory + 8, kBytes, reinterpret_cast<uint64_t*>(stage()));
}
// A stage is read before it is full.
void reads_early(char* memory) {
  if (threadIdx.x != 0) return;
  uint64_t* barrier = reinterpret_cast<uint64_t*>(stage() + kBytes);
  ptx::mbarrier_init(barrier, 1);
  ptx::mbarrier_arrive_expect_tx(barrier, kBytes);
  ptx::bulk_load(stage(), memory, kBytes, barrier);
  memory[kBytes] = stage()[0];
  while (!ptx::mbarrier_try_wait(barrier, 0)) {
  }
}
// A stage is filled again before it is stored.
void fills_early(char* memory) {
  if (threadIdx.x != 0) return;
  for (uint32_t i = 0; i < kBytes; ++i) stage()[i] = 1;
  ptx::bulk_store(memory + kBytes, stage(), kBytes);
  ptx::bulk_commit();
  for (uint32_t i = 0; i < kBytes; ++i) stage()[i] = 2;
  ptx::bulk_wait<0>();
}
// A row is signalled before it is written.
void signals_early(char* memory) {
  if (threadIdx.x != 0) return;
  for (uint32_t i = 0; i < kBytes; ++i) stage()[i] = 1;
  ptx::bulk_store(memory + kBytes, stage(), kBytes);
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
  memory[0] = memory[kBytes];
  ptx::bulk_wait<0>();
}
void leaves_early(char* memory) {
  if (threadIdx.x != 0) return;
  ptx::bulk_store(memory + kBytes, stage(), kBytes);
  ptx::bulk_commit();
}

}  // namespace

void run_wrong(const std::string& name, uint64_t memory) {
  void (*kernel)(char*) = name == "asks the dead"     ? asks_the_dead
                          : name == "lanes apart"     ? lanes_apart
                          : name == "threads apart"   ? threads_apart
                          : name == "loads unaligned" ? loads_unaligned
                          : name == "reads early"     ? reads_early
                          : name == "fills early"     ? fills_early
                          : name == "signals early"   ? signals_early
                          : name == "leaves early"    ? leaves_early
                                                      : nullptr;
  if (kernel == nullptr) throw std::invalid_argument("name: expected a wrong kernel, got " + name);
  char* at = reinterpret_cast<char*>(static_cast<uintptr_t>(memory));
  enqueue({1, kThreads, 2 * kBytes, 0, false, false}, [=] { kernel(at); });
}

}  // namespace simt
