// A Llama-like decoder of float32 or bfloat16 in one call, from the token ids to the last norm;
// see kernels/cpu/decoder.py.
// Called one by one from Python, the nine operations of a layer cost the host as much as a tenth of
// a decode step.
//
// Shapes: T tokens - V tokens of the vocabulary - W width of the hidden state - H query heads -
// K KV heads - D head dim - I width inside the MLP.

#include <algorithm>

#include "operations.h"

namespace conure {

struct Product {
  const uint32_t* packed;  // see linear.cpp
  const void* bias;
  int64_t num_outputs;
};

struct Layer {
  Product qkv, out, gate_up, down;
  const void* head_norm;  // [H + K, D] or null
  const void *norm_after_attention, *norm_after_mlp;  // [W]; the last one is the final norm
  void *keys, *values;
  int64_t window;  // tokens that a query sees; 2^62: all
};

struct DecoderArguments {
  const Layer* layers;
  const void *cos, *sin;
  const void *embedding, *first_norm;  // [V, W], [W]
  int64_t num_layers, width, inner, heads, kv_heads, dim;
  int64_t slot_stride, head_stride;  // of all caches
  int64_t dtype;  // of all numbers but the ids, positions and slots
  int64_t is_invariant, prefers_pairs;  // see AttentionArguments
  float eps, scale;
};

struct StepArguments {
  const Plan* plan;
  const int64_t *ids, *positions, *slots;  // [T]
  void *hidden, *normed;         // [T, W]
  void *mixed, *narrow, *delta;  // [T, max((H + 2 K) D, 2 I)], [T, max(2 H D, I)], [T, W]
  float* wide;                   // [T, max(W, H D, I)] or null; see LinearArguments
  int64_t num_tokens, max_length;
};

static void add_norm(const DecoderArguments& d, const StepArguments& s, const void* weight,
                     const Threads* threads) {
  const NormArguments a{s.hidden, s.delta, weight, s.normed, s.num_tokens, d.width, d.dtype, d.eps};
  conure_add_norm(&a, threads);
}

template <class T>
static void embed(const DecoderArguments& d, const StepArguments& s, const Threads* threads) {
  const T* embedding = static_cast<const T*>(d.embedding);
  for (int64_t t = 0; t < s.num_tokens; t++)
    std::copy_n(embedding + s.ids[t] * d.width, d.width, static_cast<T*>(s.hidden) + t * d.width);
  std::fill_n(static_cast<T*>(s.delta), s.num_tokens * d.width, T{});
  add_norm(d, s, d.first_norm, threads);
}

template <class T>
static void run_layer(const DecoderArguments& d, const StepArguments& s, const Layer& layer,
                      const Threads* threads, void* workspace) {
  const int64_t num = s.num_tokens, query_width = d.heads * d.dim;
  const auto multiply = [&](const Product& p, const void* inputs, int64_t width, void* out) {
    const LinearArguments a{inputs, p.packed, p.bias,        out,    s.wide,
                            num,    width,    p.num_outputs, d.dtype};
    conure_linear(&a, threads);
  };
  const Vectors query{s.narrow, query_width, d.dim};
  const Vectors attended{static_cast<T*>(s.narrow) + num * query_width, query_width, d.dim};
  const Vectors keys{layer.keys, d.slot_stride, d.head_stride};
  const Vectors values{layer.values, d.slot_stride, d.head_stride};

  multiply(layer.qkv, s.normed, d.width, s.mixed);
  const RotateArguments rotate{s.mixed, s.positions, s.slots, d.cos,  d.sin,  layer.head_norm,
                               query.data, keys,     values,  num,    d.heads, d.kv_heads,
                               d.dim,   d.dtype,     d.eps};
  conure_rotate_store(&rotate, threads);
  const int64_t window = layer.window < s.max_length ? layer.window : 0;
  const AttentionArguments attention{
      s.plan, query, keys,    values,         attended,        nullptr, d.heads, d.kv_heads, d.dim,
      d.dim,  window, d.dtype, d.is_invariant, d.prefers_pairs, d.scale, 0.0f};
  conure_attention(&attention, threads, workspace);
  multiply(layer.out, attended.data, query_width, s.delta);
  add_norm(d, s, layer.norm_after_attention, threads);

  multiply(layer.gate_up, s.normed, d.width, s.mixed);
  const GateArguments gate{s.mixed, s.narrow, num, d.inner, d.dtype};
  conure_silu_mul(&gate, threads);
  multiply(layer.down, s.narrow, d.inner, s.delta);
  add_norm(d, s, layer.norm_after_mlp, threads);
}

template <class T>
static void run(const DecoderArguments& d, const StepArguments& s, const Threads* threads,
                void* workspace) {
  embed<T>(d, s, threads);
  for (int64_t layer = 0; layer < d.num_layers; layer++)
    run_layer<T>(d, s, d.layers[layer], threads, workspace);
}

}  // namespace conure

extern "C" void conure_decoder(const conure::DecoderArguments* decoder,
                               const conure::StepArguments* step, const conure::Threads* threads,
                               void* workspace) {
  using namespace conure;
  if (decoder->dtype == kFloat32) run<float>(*decoder, *step, threads, workspace);
  if (decoder->dtype == kBFloat16) run<BFloat16>(*decoder, *step, threads, workspace);
}
