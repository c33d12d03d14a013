// Launches kernels: checks arguments on the host, finds limits of shared memory, sets the attributes of a launch, and
// raises errors that name the kernel.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/views.h"

namespace ep::cuda {

inline void require(bool holds, const char* what, const char* expected, int64_t actual) {
  if (!holds)
    throw std::invalid_argument(std::string(what) + ": expected " + expected + ", got " + std::to_string(actual));
}

inline void throw_on_error(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears it: the next caller must not see this error
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void require_comm(const Comm& comm) {
  require(comm.num_ranks >= 1 && comm.num_ranks <= kMaxRanks, "num_ranks", "1 to 72", comm.num_ranks);
  require(comm.rank >= 0 && comm.rank < comm.num_ranks, "rank", "a rank of the group", comm.rank);
  require(comm.num_experts >= comm.num_ranks && comm.num_experts % comm.num_ranks == 0, "num_experts",
          "a multiple of num_ranks", comm.num_experts);
}

inline void require_routing(const Routing& routing) {
  require(routing.num_tokens >= 0, "num_tokens", "0 or more", routing.num_tokens);
  require(routing.topk >= 1 && routing.topk <= kMaxTopk, "topk", "1 to 128", routing.topk);
  require(routing.layout == kFlat || routing.layout == kTokenMajor, "layout", "0 or 1", routing.layout);
  require(routing.layout != kFlat || routing.alignment >= 1, "alignment", "1 or more", routing.alignment);
}

inline void require_header(const Header& header, const Routing& routing) {
  require(header.row_bytes > 0 && header.row_bytes % kRowAlign == 0, "row_bytes", "a multiple of 16", header.row_bytes);
  require(header.weight_bytes == 0 || header.weight_bytes == 4, "weight_bytes", "0 or 4 on CUDA", header.weight_bytes);
  require(header.scale_bytes >= 0, "scale_bytes", "0 or more", header.scale_bytes);
  require(header.row_bytes <= kMaxRowBytes, "row_bytes", "at most 2**29", header.row_bytes);
  require(header.scale_bytes <= kMaxRowBytes, "scale_bytes", "at most 2**29", header.scale_bytes);
  require(header.topk == routing.topk, "topk in the header", "the same as of the routing", header.topk);
}

inline void require_rows(const char* what, Address address, int64_t stride = 0) {
  require((address | static_cast<uint64_t>(stride)) % kRowAlign == 0, what,
          "an address (and stride) that is a multiple of 16",
          static_cast<int64_t>(address % kRowAlign != 0 ? address : stride));
}

inline void require_elements(const Header& header, int64_t hidden, int32_t element) {
  const int64_t bytes = element == kFloat32 ? 4 : element == kFloat64 ? 8 : 2;
  require(header.row_bytes == hidden * bytes, "row_bytes", "hidden elements", header.row_bytes);
}

inline void require_sms(int num_sms) { require(num_sms >= 1, "num_sms", "1 or more", num_sms); }

inline int current_device() {
  int device = 0;
  throw_on_error(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// The limits of `kKernel`, as this build compiled it, on the current device. They are looked up once per device.
struct KernelLimits {
  bool bulk;             // compiled for an architecture with bulk copies and early launches
  int64_t shared_bytes;  // dynamic shared memory of a CTA
};
template <auto kKernel>
KernelLimits limits_of() {
  constexpr int kDevices = 64;
  static std::atomic<int64_t> known[kDevices];  // shared_bytes, plus 1 if `bulk`; 0: not looked up
  const int device = current_device();
  std::atomic<int64_t>* entry = device < kDevices ? &known[device] : nullptr;
  int64_t packed = entry != nullptr ? entry->load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    cudaFuncAttributes attributes;
    throw_on_error(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
    int limit = 0;
    throw_on_error(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                   "cudaDeviceGetAttribute");
    limit = static_cast<int>((limit - static_cast<int64_t>(attributes.sharedSizeBytes)) / kSlotAlign * kSlotAlign);
    throw_on_error(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit),
                   "cudaFuncSetAttribute");
    packed = limit + (attributes.ptxVersion >= 90 ? 1 : 0);
    if (entry != nullptr) entry->store(packed, std::memory_order_relaxed);
  }
  return KernelLimits{packed % 2 == 1, packed / 2 * 2};
}

inline cudaStream_t stream_of(Address stream) { return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream)); }

// Each of the functions below enqueues a kernel on `stream`; they differ in the attributes of the launch.
template <auto kKernel, class... Args>
void launch_with(cudaLaunchAttribute* attributes, unsigned num_attributes, const char* name, int64_t ctas, int threads,
                 int64_t shared_bytes, Address stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream_of(stream);
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  throw_on_error(cudaLaunchKernelEx(&config, kKernel, args...), name);
}

template <auto kKernel, class... Args>
void launch(const char* name, int64_t ctas, int threads, int64_t shared_bytes, Address stream, const Args&... args) {
  launch_with<kKernel>(nullptr, 0, name, ctas, threads, shared_bytes, stream, args...);
}

// All CTAs run at the same time, or the launch fails.
template <auto kKernel, class... Args>
void launch_cooperatively(const char* name, int64_t ctas, int threads, int64_t shared_bytes, Address stream,
                          const Args&... args) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  launch_with<kKernel>(&cooperative, 1, name, ctas, threads, shared_bytes, stream, args...);
}

// CTAs start when the kernel ahead in the stream launches its dependents (ptx::launch_dependents), and wait themselves
// for that kernel's end (ptx::wait_on_dependency). This hides the launch latency. A kernel without such a wait must not
// be launched early.
template <auto kKernel, class... Args>
void launch_early(const char* name, int64_t ctas, int threads, int64_t shared_bytes, Address stream,
                  const Args&... args) {
  if (!limits_of<kKernel>().bulk) return launch<kKernel>(name, ctas, threads, shared_bytes, stream, args...);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch_with<kKernel>(&early, 1, name, ctas, threads, shared_bytes, stream, args...);
}

}  // namespace ep::cuda
