// Combine add: adds the sums of a token's nodes to the bias, in the order of the nodes.
//
// It touches this rank's memory only, and waits for nothing. A sum is rounded once. After a fault, the outputs are
// filled with 0xFF bytes.
#include <cstring>
#include <vector>

#include "cpu/core/sums.h"
#include "cpu/core/sync.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

// Lists the rows to add for token t, in the order of the nodes. `width`: elements of a row.
template <class T>
bool list_rows(const CombineAddArgs& args, int64_t t, Address own, Address landed, int64_t width,
               std::vector<const T*>* rows) {
  const int32_t* places = at<const int32_t>(args.rail_rows) + t * args.num_nodes;
  rows->clear();
  for (int n = 0; n < args.num_nodes; ++n) {
    if (n == args.node) {
      rows->push_back(at<const T>(own) + t * width);
    } else if (places[n] < -1 || places[n] >= args.num_rows) {
      return fail(args.comm, kBadHandle, kCombineAdd, args.comm.rank, static_cast<int>(t), args.num_rows, places[n]);
    } else if (places[n] >= 0) {
      rows->push_back(at<const T>(landed) + places[n] * width);
    }
  }
  return true;
}

template <class T>
bool add_all(const CombineAddArgs& args) {
  using S = typename Sum<T>::type;
  std::vector<const T*> rows;
  std::vector<const S*> extra;
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    if (!list_rows(args, t, args.own, args.landed, args.hidden, &rows)) return false;
    const Start bias = start_of<T>(args.bias, args.wide_bias != 0, t, args.hidden);
    sum_rows(rows.data(), static_cast<int>(rows.size()), args.hidden, at<T>(args.out) + t * args.hidden, bias);
    if (args.own_extra == 0) continue;
    if (!list_rows(args, t, args.own_extra, args.landed_extra, args.topk, &extra)) return false;
    sum_rows(extra.data(), static_cast<int>(extra.size()), args.topk, at<S>(args.extra_out) + t * args.topk);
  }
  return true;
}

}  // namespace

void combine_add(const CombineAddArgs& args) {
  Run run{args.comm, kCombineAdd, 0};
  bool done = begin(args.comm, kCombineAdd, &run);
  with_element(args.element, [&](auto type) {
    using T = decltype(type);
    done = done && add_all<T>(args);
    if (done) return;
    std::memset(at<char>(args.out), 0xFF, args.num_tokens * args.hidden * sizeof(T));
    if (args.own_extra != 0)
      std::memset(at<char>(args.extra_out), 0xFF,
                  static_cast<int64_t>(args.num_tokens) * args.topk * sizeof(typename Sum<T>::type));
  });
}

}  // namespace ep::cpu
