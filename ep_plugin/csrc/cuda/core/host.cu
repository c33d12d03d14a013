// Host memory and streams, see host.h.
#include "cuda/core/host.h"

#include <map>
#include <mutex>

#include "cuda/collectives/stream_words.h"
#include "cuda/core/launch.cuh"

namespace ep {

namespace {

// Makes a device current while the object lives. It does not set a device that is current already, because setting
// creates a context.
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

uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  cuda::throw_on_error(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusNone) return 0;
  return status == cudaStreamCaptureStatusActive ? capture : ~uint64_t{0};  // an invalid capture has no number
}

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  cuda::throw_on_error(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  return event;
}

cudaEvent_t event_of(uint64_t mark) { return static_cast<cudaEvent_t>(pointer(mark)); }

void order(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
  cuda::throw_on_error(cudaEventRecord(event, earlier), "cudaEventRecord");
  cuda::throw_on_error(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

// One event per device, which each use records again. A wait is for the event as it was recorded when the wait was
// enqueued, so the lock keeps other threads from recording it in between. The events are never destroyed: when the
// process ends, the driver may be gone.
std::mutex recording;
std::map<int, cudaEvent_t>& events() {
  static auto* made = new std::map<int, cudaEvent_t>;
  return *made;
}

// An event that is recorded in a capture belongs to the graph, so each use makes a new one.
void order_captured(cudaStream_t later, cudaStream_t earlier) {
  struct Event {
    cudaEvent_t made = make_event();
    ~Event() { cudaEventDestroy(made); }
  } event;
  order(later, earlier, event.made);
}

}  // namespace

std::vector<int> built_archs() {
  std::vector<int> archs;
  for (const int arch : {__CUDA_ARCH_LIST__}) archs.push_back(arch / 10);
  return archs;
}

int built_cuda() { return CUDART_VERSION; }

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

void order_streams(uint64_t later, uint64_t earlier, int device) {
  const OnDevice on(device);
  if (capture_of(cuda::stream_of(earlier)) != 0)
    return order_captured(cuda::stream_of(later), cuda::stream_of(earlier));
  const std::lock_guard<std::mutex> lock(recording);
  cudaEvent_t& event = events()[device];
  if (event == nullptr) event = make_event();
  order(cuda::stream_of(later), cuda::stream_of(earlier), event);
}

void copy_on_stream(uint64_t to, uint64_t from, int64_t bytes, uint64_t stream) {
  cuda::throw_on_error(cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes,
                                       cudaMemcpyDeviceToDevice, cuda::stream_of(stream)),
                       "cudaMemcpyAsync");
}

uint64_t make_stream(int device) {
  const OnDevice on(device);
  int least, greatest;
  cuda::throw_on_error(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream;
  cuda::throw_on_error(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                       "cudaStreamCreateWithPriority");
  return reinterpret_cast<uint64_t>(stream);
}

void drop_stream(uint64_t stream) {
  cuda::throw_on_error(cudaStreamDestroy(cuda::stream_of(stream)), "cudaStreamDestroy");
}

uint64_t mark_stream(uint64_t stream, int device) {
  const OnDevice on(device);
  const cudaEvent_t event = make_event();
  const cudaError_t error = cudaEventRecord(event, cuda::stream_of(stream));
  if (error != cudaSuccess) cudaEventDestroy(event);
  cuda::throw_on_error(error, "cudaEventRecord");
  return reinterpret_cast<uint64_t>(event);
}

void drop_mark(uint64_t mark) { cudaEventDestroy(event_of(mark)); }

bool is_over(uint64_t mark) {
  const cudaError_t error = cudaEventQuery(event_of(mark));
  if (error == cudaErrorNotReady) {
    cudaGetLastError();  // it is no error of later calls
    return false;
  }
  cuda::throw_on_error(error, "cudaEventQuery");
  return true;
}

void order_after(uint64_t stream, uint64_t mark) {
  cuda::throw_on_error(cudaStreamWaitEvent(cuda::stream_of(stream), event_of(mark), 0), "cudaStreamWaitEvent");
}

void wait_on_host(uint64_t mark) { cuda::throw_on_error(cudaEventSynchronize(event_of(mark)), "cudaEventSynchronize"); }

void fill(uint64_t address, int byte, int64_t count, uint64_t stream) {
  cuda::throw_on_error(cudaMemsetAsync(pointer(address), byte, static_cast<size_t>(count), cuda::stream_of(stream)),
                       "cudaMemsetAsync");
}

void write_word(uint64_t address, uint64_t value, uint64_t stream) {
  cuda::StreamOperations operations;
  operations.write(address, value);
  operations.enqueue(cuda::stream_of(stream));
}

uint64_t stream_capture(uint64_t stream, int device) {
  const OnDevice on(device);
  return capture_of(cuda::stream_of(stream));
}

}  // namespace ep
