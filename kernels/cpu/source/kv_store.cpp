// Keys and values of new tokens: rotary embedding and storage; see elementwise.rotate_store and
// ops.AttentionOperations.store_kv.

#include <algorithm>
#include <cmath>

#include "operations.h"

namespace conure {

constexpr int64_t kTokensPerTask = 16;

struct StoreArguments {  // raw copies of [T, heads, size]
  const char* source;
  int64_t token_stride, head_stride;  // bytes
  char* cache;
  int64_t cache_slot_stride, cache_head_stride;  // bytes
  const int64_t* slots;
  int64_t num_tokens, heads, vector_bytes;
};

template <class T>
static void rotate_head(const RotateArguments& a, const T* source, const T* norm, const T* cos,
                        const T* sin, T* target) {
  const int64_t half = a.dim / 2;
  float scale = 1.0f;
  if (norm) {
    Vec squares{};
    for_vectors(a.dim, [&](int64_t i, auto load, auto) {
      Vec v = load(source + i);
      squares += v * v;
    });
    scale = 1.0f / std::sqrt(sum(squares) / float(a.dim) + a.eps);
  }
  for_vectors(half, [&](int64_t i, auto load, auto store) {
    Vec low = load(source + i), high = load(source + half + i);
    if (norm) {
      low = low * scale * load(norm + i);
      high = high * scale * load(norm + half + i);
    }
    store(target + i, low * load(cos + i) + high * load(sin + i));
    store(target + half + i, high * load(cos + half + i) + low * load(sin + half + i));
  });
}

template <class T>
static void rotate_store(const RotateArguments& a, const Threads& threads) {
  const int64_t num_rotated = a.heads + a.kv_heads, width = (num_rotated + a.kv_heads) * a.dim;
  const int64_t num_tasks = (a.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(threads, num_tasks, [&](int64_t task, int64_t) {
    const int64_t end = std::min((task + 1) * kTokensPerTask, a.num_tokens);
    for (int64_t t = task * kTokensPerTask; t < end; t++) {
      const T* mixed = static_cast<const T*>(a.mixed) + t * width;
      const T* cos = static_cast<const T*>(a.cos) + a.positions[t] * a.dim;
      const T* sin = static_cast<const T*>(a.sin) + a.positions[t] * a.dim;
      T* query = static_cast<T*>(a.query) + t * a.heads * a.dim;
      T* key = static_cast<T*>(a.keys.data) + a.slots[t] * a.keys.token_stride;
      T* value = static_cast<T*>(a.values.data) + a.slots[t] * a.values.token_stride;
      for (int64_t h = 0; h < num_rotated; h++) {
        const T* norm = a.head_norm ? static_cast<const T*>(a.head_norm) + h * a.dim : nullptr;
        T* target = h < a.heads ? query + h * a.dim : key + (h - a.heads) * a.keys.head_stride;
        rotate_head(a, mixed + h * a.dim, norm, cos, sin, target);
      }
      for (int64_t h = 0; h < a.kv_heads; h++)
        std::memcpy(value + h * a.values.head_stride, mixed + (num_rotated + h) * a.dim,
                    a.dim * sizeof(T));
    }
  });
}

}  // namespace conure

extern "C" {

void conure_store(const conure::StoreArguments* arguments, const conure::Threads* threads) {
  const conure::StoreArguments& a = *arguments;
  const int64_t num_tasks = (a.num_tokens + 4 * conure::kTokensPerTask - 1) /
                            (4 * conure::kTokensPerTask);
  conure::parallel_for(*threads, num_tasks, [&](int64_t task, int64_t) {
    const int64_t begin = task * 4 * conure::kTokensPerTask;
    const int64_t end = std::min(begin + 4 * conure::kTokensPerTask, a.num_tokens);
    for (int64_t t = begin; t < end; t++)
      for (int64_t h = 0; h < a.heads; h++)
        std::memcpy(a.cache + a.slots[t] * a.cache_slot_stride + h * a.cache_head_stride,
                    a.source + t * a.token_stride + h * a.head_stride, a.vector_bytes);
  });
}

void conure_rotate_store(const conure::RotateArguments* a, const conure::Threads* threads) {
  using namespace conure;
  if (a->dtype == kFloat32) rotate_store<float>(*a, *threads);
  if (a->dtype == kBFloat16) rotate_store<BFloat16>(*a, *threads);
  if (a->dtype == kFloat16) rotate_store<Float16>(*a, *threads);
}
}
