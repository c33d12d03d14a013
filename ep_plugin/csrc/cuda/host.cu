#include "host.h"

#include "launch.cuh"

namespace ep {

namespace {

// Makes a device current for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(cuda::current_device()) {
    cuda::throw_on_error(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

void* pointer(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

}  // namespace

uint64_t register_host(uint64_t address, int64_t bytes, int device) {
  const OnDevice on(device);
  cuda::throw_on_error(
      cudaHostRegister(pointer(address), static_cast<size_t>(bytes), cudaHostRegisterMapped | cudaHostRegisterPortable),
      "cudaHostRegister");
  void* mapped = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&mapped, pointer(address), 0);
  if (error != cudaSuccess) cudaHostUnregister(pointer(address));
  cuda::throw_on_error(error, "cudaHostGetDevicePointer");
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(mapped));
}

void unregister_host(uint64_t address) {
  cuda::throw_on_error(cudaHostUnregister(pointer(address)), "cudaHostUnregister");
}

int device_sm_count(int device) {
  int count = 0;
  cuda::throw_on_error(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
                       "cudaDeviceGetAttribute");
  return count;
}

void fill_device(uint64_t address, int value, int64_t bytes, uint64_t stream) {
  if (bytes == 0) return;
  cuda::throw_on_error(cudaMemsetAsync(pointer(address), value, static_cast<size_t>(bytes),
                                       reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream))),
                       "cudaMemsetAsync");
}

}  // namespace ep
