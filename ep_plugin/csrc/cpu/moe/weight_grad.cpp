// Backward of combine's weights: the dot product of each row's gradient and the row that was combined. Then the
// gradient is multiplied by the row's weight, in place. Both rows are read once; the gradient is written once.
#include "common/views.h"
#include "cpu/core/elements.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

constexpr int kSums = 16;  // independent sums, which fill vector registers; added at the end in their order

template <class T>
typename Sum<T>::type dot_and_scale(const T* y, T* row, typename Sum<T>::type factor, int64_t hidden) {
  using S = typename Sum<T>::type;
  S sums[kSums] = {};
  int64_t h = 0;
  for (; h + kSums <= hidden; h += kSums) {
    for (int i = 0; i < kSums; ++i) {
      const S gradient = widen(row[h + i]);
      sums[i] += widen(y[h + i]) * gradient;
      narrow(gradient * factor, &row[h + i]);
    }
  }
  for (int i = 0; h < hidden; ++h, ++i) {
    const S gradient = widen(row[h]);
    sums[i] += widen(y[h]) * gradient;
    narrow(gradient * factor, &row[h]);
  }
  S sum = 0;
  for (const S part : sums) sum += part;
  return sum;
}

}  // namespace

void weight_grad(const WeightGradArgs& args) {
  with_element(args.element, [&](auto element) {
    using T = decltype(element);
    using S = typename Sum<T>::type;
    for (int64_t i = 0; i < args.num_rows; ++i)
      at<S>(args.dots)[i] = dot_and_scale(at<const T>(args.y) + i * args.hidden, at<T>(args.rows) + i * args.hidden,
                                          at<const S>(args.factors)[i], args.hidden);
  });
}

}  // namespace ep::cpu
