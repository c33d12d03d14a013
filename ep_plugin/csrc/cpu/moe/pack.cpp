// Pack: copies rows, weights, scales and ids of this rank's tokens into the buffers that a rail sends.
//
// It touches this rank's memory only, and waits for nothing. Each token is read once, and written once for each node
// that it goes to.
#include <cstring>

#include "cpu/core/sync.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

void pack(const PackArgs& args) {
  Run run{args.comm, kPack, 0};
  if (!begin(args.comm, kPack, &run)) return;
  const int64_t N = args.num_nodes, id_bytes = 4 * static_cast<int64_t>(args.topk);
  const auto copy = [](Address from, int64_t stride, int64_t token, Address to, int64_t bytes, int64_t row) {
    if (from != 0) std::memcpy(at<char>(to, row * bytes), at<char>(from, token * stride), bytes);
  };
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    const int32_t* rows = at<const int32_t>(args.rail_rows) + t * N;
    for (int64_t n = 0; n < N; ++n) {
      if (rows[n] < -1 || rows[n] >= args.num_rows)
        fail(args.comm, kBadHandle, kPack, args.comm.rank, static_cast<int>(t), args.num_rows, rows[n]);
      else if (rows[n] >= 0) {
        copy(args.x, args.x_stride, t, args.rows, args.row_bytes, rows[n]);
        copy(args.weights, args.weight_bytes, t, args.packed_weights, args.weight_bytes, rows[n]);
        copy(args.scales, args.scale_stride, t, args.packed_scales, args.scale_bytes, rows[n]);
        copy(args.ids, id_bytes, t, args.packed_ids, id_bytes, rows[n]);
      }
    }
  }
}

}  // namespace ep::cpu
