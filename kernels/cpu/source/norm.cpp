// Residual addition and the RMS norm after it; see elementwise.add_norm.

#include <algorithm>
#include <cmath>

#include "operations.h"

namespace conure {

constexpr int64_t kTokensPerTask = 16;

template <class T>
static void add_norm(const NormArguments& a, const Threads& threads) {
  const int64_t num_tasks = (a.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const T* weight = static_cast<const T*>(a.weight);
  parallel_for(threads, num_tasks, [&](int64_t task, int64_t) {
    const int64_t end = std::min((task + 1) * kTokensPerTask, a.num_tokens);
    for (int64_t t = task * kTokensPerTask; t < end; t++) {
      T* hidden = static_cast<T*>(a.hidden) + t * a.width;
      const T* delta = static_cast<const T*>(a.delta) + t * a.width;
      T* out = static_cast<T*>(a.out) + t * a.width;
      Vec squares{};
      for_vectors(a.width, [&](int64_t i, auto load, auto store) {
        store(hidden + i, load(hidden + i) + load(delta + i));
        Vec rounded = load(hidden + i);
        squares += rounded * rounded;
      });
      const float scale = 1.0f / std::sqrt(sum(squares) / float(a.width) + a.eps);
      for_vectors(a.width, [&](int64_t i, auto load, auto store) {
        store(out + i, load(hidden + i) * scale * load(weight + i));
      });
    }
  });
}

}  // namespace conure

extern "C" void conure_add_norm(const conure::NormArguments* a, const conure::Threads* threads) {
  using namespace conure;
  if (a->dtype == kFloat32) add_norm<float>(*a, *threads);
  if (a->dtype == kBFloat16) add_norm<BFloat16>(*a, *threads);
  if (a->dtype == kFloat16) add_norm<Float16>(*a, *threads);
}
