// The arguments of the operations that `decoder.cpp` composes; the operations say what they mean.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "simd.h"

namespace conure {

struct LinearArguments {
  const void* inputs;      // [T, K]
  const uint32_t* packed;  // [N / kPanel, words of K, kPanel]
  const void* bias;        // [N] or null
  void* out;               // [T, N]
  float* wide;  // for bfloat16: [T, K], overwritten with the inputs; null: multiply pairs
  int64_t num_rows, num_inputs, num_outputs;
  int64_t dtype;  // float32 or bfloat16
};

struct NormArguments {
  void* hidden;                // [T, width], overwritten
  const void *delta, *weight;  // [T, width], [width]
  void* out;                   // [T, width]
  int64_t num_tokens, width, dtype;
  float eps;
};

struct GateArguments {
  const void* mixed;  // [T, 2 * width]: gate, up
  void* out;          // [T, width]
  int64_t num_tokens, width, dtype;
};

struct Vectors {  // [tokens, heads, size], strides in elements
  void* data;
  int64_t token_stride, head_stride;
};

struct RotateArguments {
  const void* mixed;  // [T, H + 2 K, D]: queries, keys, values
  const int64_t *positions, *slots;
  const void *cos, *sin;  // [L, D]; the sines of the first half are negated
  const void* head_norm;  // [H + K, D] or null
  void* query;            // [T, H, D]
  Vectors keys, values;   // the caches; `token_stride` is that of a slot
  int64_t num_tokens, heads, kv_heads, dim, dtype;
  float eps;
};

struct Plan {  // the fields of Python's Plan and of its prefix tree
  const int64_t *num_new, *kv_len;
  const int32_t* tables;
  const int64_t* query_start;
  const int64_t *row_order, *first, *end, *begin_block, *end_block, *private_start_block;
  int64_t num_rows, num_ranges, table_stride, block_size;
};

struct AttentionArguments {
  const Plan* plan;
  Vectors query, keys, values, out;
  const float* sinks;  // [H] or null
  int64_t heads, kv_heads, key_dim, value_dim;
  int64_t window;  // 0: none
  int64_t dtype;
  int64_t is_invariant;
  int64_t prefers_pairs;  // pairs of bfloat16 are multiplied faster than floats
  float scale, softcap;   // softcap 0: none
};

}  // namespace conure

extern "C" {
void conure_linear(const conure::LinearArguments*, const conure::Threads*);
void conure_add_norm(const conure::NormArguments*, const conure::Threads*);
void conure_silu_mul(const conure::GateArguments*, const conure::Threads*);
void conure_rotate_store(const conure::RotateArguments*, const conure::Threads*);
void conure_attention(const conure::AttentionArguments*, const conure::Threads*, void* workspace);
}
