// The gate of an MLP: silu(gate) * up; see elementwise.silu_mul.

#include <algorithm>

#include "operations.h"

namespace conure {

constexpr int64_t kTokensPerTask = 8;

template <class T>
static void silu_mul(const GateArguments& a, const Threads& threads) {
  const int64_t num_tasks = (a.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(threads, num_tasks, [&](int64_t task, int64_t) {
    const int64_t end = std::min((task + 1) * kTokensPerTask, a.num_tokens);
    for (int64_t t = task * kTokensPerTask; t < end; t++) {
      const T* gate = static_cast<const T*>(a.mixed) + t * 2 * a.width;
      T* out = static_cast<T*>(a.out) + t * a.width;
      for_vectors(a.width, [&](int64_t i, auto load, auto store) {
        Vec g = load(gate + i);
        store(out + i, g / (1.0f + exp(minimum(-g, broadcast(88.0f)))) * load(gate + a.width + i));
      });
    }
  });
}

}  // namespace conure

extern "C" void conure_silu_mul(const conure::GateArguments* a, const conure::Threads* threads) {
  using namespace conure;
  if (a->dtype == kFloat32) silu_mul<float>(*a, *threads);
  if (a->dtype == kBFloat16) silu_mul<BFloat16>(*a, *threads);
  if (a->dtype == kFloat16) silu_mul<Float16>(*a, *threads);
}
