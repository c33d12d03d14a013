// Load statistics: adds counts to sums, word by word.
#include "common/views.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

void add_counts(const AddCountsArgs& args) {
  for (int64_t row = 0; row < args.num_rows; ++row) {
    int64_t* sums = at<int64_t>(args.sums) + row * args.num_columns;
    const int32_t* counts = at<const int32_t>(args.counts) + row * args.row_stride;
    for (int64_t i = 0; i < args.num_columns; ++i) sums[i] += counts[i];
  }
}

}  // namespace ep::cpu
