// Load statistics: adds counts to sums, word by word.
//
// Roles. The threads of the grid share the words. Only one thread touches a word.
// Memory order. The kernel touches this rank's memory only, and waits for nothing. Its stream orders additions to the
// same sums.
#include "cuda/core/launch.cuh"
#include "cuda/core/sync.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kThreads = 256;  // threads of a CTA
constexpr int64_t kMaxCtas = 256;

__global__ void __launch_bounds__(kThreads) ep_add_counts(const __grid_constant__ AddCountsArgs args) {
  const int64_t words = args.num_rows * args.num_columns;
  for (int64_t word = blockIdx.x * int64_t{kThreads} + threadIdx.x; word < words;
       word += gridDim.x * int64_t{kThreads}) {
    const int64_t row = word / args.num_columns, column = word % args.num_columns;
    at<int64_t>(args.sums)[word] += at<const int32_t>(args.counts)[row * args.row_stride + column];
  }
}

}  // namespace

void add_counts(const AddCountsArgs& args) {
  require(args.num_rows >= 0, "num_rows", "0 or more", args.num_rows);
  require(args.num_columns >= 0, "num_columns", "0 or more", args.num_columns);
  const int64_t ctas = ceil_div(args.num_rows * args.num_columns, int64_t{kThreads});
  if (ctas == 0) return;
  launch<ep_add_counts>("add_counts", ctas < kMaxCtas ? ctas : kMaxCtas, kThreads, 0, args.stream, args);
}

}  // namespace ep::cuda
