// CUDA runtime calls that Python needs besides kernels. Functions raise std::runtime_error with the runtime's message.
#pragma once
#include <cstdint>
#include <vector>

namespace ep {

// The compute capabilities that the kernels were compiled for, such as 80 and 90, and the CUDA version of the
// compiler, such as 13000.
std::vector<int> built_archs();
int built_cuda();

// Makes host pages reachable from every device of this process, and returns their address on `device`. The caller owns
// the pages and keeps them mapped until unregister_host(). The current device does not change.
uint64_t register_host(uint64_t address, int64_t bytes, int device);
void unregister_host(uint64_t address);

// Work that is enqueued on `later` from now on starts after all work that is on `earlier` now. Both are streams of
// `device`. It also works while a CUDA graph captures `earlier`. The current device does not change.
void order_streams(uint64_t later, uint64_t earlier, int device);

// Enqueues a copy within the memory of the current device.
void copy_on_stream(uint64_t to, uint64_t from, int64_t bytes, uint64_t stream);

// A stream of `device` that no other part of the process uses. It has the highest priority. The caller gives it to
// drop_stream(), which does not wait for the stream's work.
uint64_t make_stream(int device);
void drop_stream(uint64_t stream);

// Marks the work that a stream of `device` has now. The caller gives the mark to drop_mark(), which does not throw.
uint64_t mark_stream(uint64_t stream, int device);
void drop_mark(uint64_t mark);
// Whether the marked work is over. Not for marks of a capture.
bool is_over(uint64_t mark);
// Orders a stream after the marked work, or blocks the host until it is over.
void order_after(uint64_t stream, uint64_t mark);
void wait_on_host(uint64_t mark);

// Fills device memory, in the stream's order.
void fill(uint64_t address, int byte, int64_t count, uint64_t stream);

// Stores a word in memory that the device reaches, also the host's, in the stream's order.
void write_word(uint64_t address, uint64_t value, uint64_t stream);

// The number of the CUDA graph capture in which a stream of `device` is; 0 if there is none.
uint64_t stream_capture(uint64_t stream, int device);

}  // namespace ep
