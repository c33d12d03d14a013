// What Python needs of the CUDA runtime beside kernels. Every function raises std::runtime_error with the runtime's own
// sentence when it fails, and leaves the current device as it was.
#pragma once
#include <cstdint>

namespace ep {

// Makes host pages (the board) reachable from every device of this process; returns their address on `device`. The
// caller owns the pages, and keeps them mapped until unregister_host.
uint64_t register_host(uint64_t address, int64_t bytes, int device);
void unregister_host(uint64_t address);

int device_sm_count(int device);

// Enqueues on `stream` of the current device: bytes [0, bytes) of device memory become `value`.
void fill_device(uint64_t address, int value, int64_t bytes, uint64_t stream);

}  // namespace ep
