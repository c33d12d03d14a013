#include "host.h"

#include "launch.cuh"

namespace ep {

namespace {

// Makes a device current for a while. Does nothing where it is already: setting a device creates its context.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device), before_(cuda::current_device()) {
    if (device_ != before_) cuda::throw_on_error(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDevice() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_;
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

}  // namespace ep
