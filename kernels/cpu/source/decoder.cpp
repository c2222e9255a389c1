// A bfloat16 Llama-like decoder in one call, from the token ids to the last norm; see decoder.py.
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
  const BFloat16* bias;
  int64_t num_outputs;
};

struct Layer {
  Product qkv, out, gate_up, down;
  const BFloat16 *head_norm, *norm_after_attention, *norm_after_mlp;
  void *keys, *values;
  int64_t window;
};

struct DecoderArguments {
  const Layer* layers;
  const void *cos, *sin;
  const BFloat16 *embedding, *first_norm;  // [V, W], [W]
  int64_t num_layers, width, inner, heads, kv_heads, dim;
  int64_t slot_stride, head_stride;  // of all caches
  int64_t is_invariant, prefers_pairs;
  float eps, scale;
};

struct StepArguments {
  const Plan* plan;
  const int64_t *ids, *positions, *slots;  // [T]
  BFloat16 *hidden, *normed;         // [T, W]
  BFloat16 *mixed, *narrow, *delta;  // [T, max((H + 2 K) D, 2 I)], [T, max(2 H D, I)], [T, W]
  float* wide;                       // [T, max(W, H D, I)], or null to multiply pairs
  int64_t num_tokens, max_length;
};

static void add_norm(const DecoderArguments& d, const StepArguments& s, const BFloat16* weight,
                     const Threads* threads) {
  const NormArguments a{s.hidden, s.delta, weight, s.normed, s.num_tokens, d.width, kBFloat16, d.eps};
  conure_add_norm(&a, threads);
}

static void embed(const DecoderArguments& d, const StepArguments& s, const Threads* threads) {
  for (int64_t t = 0; t < s.num_tokens; t++)
    std::copy_n(d.embedding + s.ids[t] * d.width, d.width, s.hidden + t * d.width);
  std::fill_n(s.delta, s.num_tokens * d.width, BFloat16{});
  add_norm(d, s, d.first_norm, threads);
}

static void run_layer(const DecoderArguments& d, const StepArguments& s, const Layer& layer,
                      const Threads* threads, void* workspace) {
  const int64_t num = s.num_tokens, query_width = d.heads * d.dim;
  const auto multiply = [&](const Product& p, const BFloat16* inputs, int64_t width,
                            BFloat16* out) {
    const LinearArguments a{inputs, p.packed, p.bias, out, s.wide, num, width, p.num_outputs};
    conure_linear(&a, threads);
  };
  const Vectors query{s.narrow, query_width, d.dim};
  const Vectors attended{s.narrow + num * query_width, query_width, d.dim};
  const Vectors keys{layer.keys, d.slot_stride, d.head_stride};
  const Vectors values{layer.values, d.slot_stride, d.head_stride};

  multiply(layer.qkv, s.normed, d.width, s.mixed);
  const RotateArguments rotate{s.mixed, s.positions, s.slots, d.cos,  d.sin,  layer.head_norm,
                               query.data, keys,     values,  num,    d.heads, d.kv_heads,
                               d.dim,   kBFloat16,   d.eps};
  conure_rotate_store(&rotate, threads);
  const int64_t window = layer.window < s.max_length ? layer.window : 0;
  const AttentionArguments attention{
      s.plan, query, keys,      values,         attended,        nullptr, d.heads, d.kv_heads, d.dim,
      d.dim,  window, kBFloat16, d.is_invariant, d.prefers_pairs, d.scale, 0.0f};
  conure_attention(&attention, threads, workspace);
  multiply(layer.out, static_cast<BFloat16*>(attended.data), query_width, s.delta);
  add_norm(d, s, layer.norm_after_attention, threads);

  multiply(layer.gate_up, s.normed, d.width, s.mixed);
  const GateArguments gate{s.mixed, s.narrow, num, d.inner, kBFloat16};
  conure_silu_mul(&gate, threads);
  multiply(layer.down, s.narrow, d.inner, s.delta);
  add_norm(d, s, layer.norm_after_mlp, threads);
}

}  // namespace conure

extern "C" void conure_decoder(const conure::DecoderArguments* decoder,
                               const conure::StepArguments* step, const conure::Threads* threads,
                               void* workspace) {
  conure::embed(*decoder, *step, threads);
  for (int64_t layer = 0; layer < decoder->num_layers; layer++)
    conure::run_layer(*decoder, *step, decoder->layers[layer], threads, workspace);
}
