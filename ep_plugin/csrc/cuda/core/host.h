// CUDA runtime calls that Python needs besides kernels. Functions raise std::runtime_error with the runtime's message.
#pragma once
#include <cstdint>

namespace ep {

// Makes host pages (the board) reachable from every device of this process; returns their address on `device`. The
// caller owns the pages, and keeps them mapped until unregister_host. The current device stays as it was.
uint64_t register_host(uint64_t address, int64_t bytes, int device);
void unregister_host(uint64_t address);

// The stream `later` goes on after what is on `earlier` now; both are of `device`. Under capture too, where `earlier`
// is recorded. The current device stays as it was.
void order_streams(uint64_t later, uint64_t earlier, int device);

// The number of the capture of a CUDA graph that a stream of `device` is in; 0: none.
uint64_t stream_capture(uint64_t stream, int device);

}  // namespace ep
