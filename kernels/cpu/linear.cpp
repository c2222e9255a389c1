// Products with bfloat16 weights in float32: out = inputs * weight^T + bias.
//
// Processors without a matrix unit add two float32 products per cycle and lane, and one pair of
// bfloat16 products every second cycle (Golden Cove: 175 and 87 GFLOP/s per core), so weights are
// stored in 16 bits and multiplied in 32. A weight is packed in panels of kPanel columns: for each
// input, words of two columns that are kLanes apart, which a shift and a mask turn into floats.
// Each result is one sum over the inputs in order, whatever the number of rows.
//
// Shapes: T rows - K inputs - N outputs.

#include <algorithm>
#include <cstdlib>

#include "parallel.h"
#include "simd.h"

namespace conure {

constexpr int kPanel = kRegisterColumns * kLanes;
constexpr int64_t kTasksPerThread = 4;

struct LinearArguments {
  const BFloat16* inputs;  // [T, K]
  const uint32_t* packed;  // [N / kPanel, K, kPanel / 2]
  const BFloat16* bias;    // [N] or null
  BFloat16* out;           // [T, N]
  float* wide;             // [T, K], overwritten with the inputs
  int64_t num_rows, num_inputs, num_outputs;
};

template <int R>
static inline void multiply_rows(const LinearArguments& a, int64_t row, const uint32_t* panel,
                                 int64_t column) {
  constexpr int C = kRegisterColumns;
  Vec total[R][C] = {};
  const float* inputs = a.wide + row * a.num_inputs;
  for (int64_t k = 0; k < a.num_inputs; k++) {
    Vec weight[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c += 2) {
      WordVec words = load_vector<WordVec>(panel + (k * C + c) * kLanes / 2);
      weight[c] = bit_cast<Vec>(words << 16);
      weight[c + 1] = bit_cast<Vec>(words & 0xFFFF0000u);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) total[r][c] += weight[c] * inputs[r * a.num_inputs + k];
  }
  for (int c = 0; c < C; c++) {
    const int64_t first = column + c * kLanes;
    const int num = int(std::clamp<int64_t>(a.num_outputs - first, 0, kLanes));
    if (!num) return;
    const Vec bias = a.bias ? load_first(a.bias + first, num) : Vec{};
    for (int r = 0; r < R; r++)
      store_first(a.out + (row + r) * a.num_outputs + first, total[r][c] + bias, num);
  }
}

template <int R = kRegisterRows>
static void multiply_panel(const LinearArguments& a, int64_t row, int64_t end,
                           const uint32_t* panel, int64_t column) {
  for (; row + R <= end; row += R) multiply_rows<R>(a, row, panel, column);
  if constexpr (R > 1) multiply_panel<R - 1>(a, row, end, panel, column);
}

}  // namespace conure

extern "C" {

int64_t conure_packed_words(int64_t num_inputs, int64_t num_outputs) {
  using namespace conure;
  return (num_outputs + kPanel - 1) / kPanel * num_inputs * kPanel / 2;
}

// weight: [N, K]; packed: as many words as conure_packed_words.
void conure_pack(const uint16_t* weight, uint32_t* packed, int64_t num_inputs,
                 int64_t num_outputs) {
  using namespace conure;
  for (int64_t panel = 0; panel * kPanel < num_outputs; panel++)
    for (int64_t k = 0; k < num_inputs; k++)
      for (int c = 0; c < kRegisterColumns; c += 2)
        for (int lane = 0; lane < kLanes; lane++) {
          const int64_t low = panel * kPanel + c * kLanes + lane, high = low + kLanes;
          const auto bits = [&](int64_t column) -> uint32_t {
            return column < num_outputs ? weight[column * num_inputs + k] : 0;
          };
          *packed++ = bits(low) | bits(high) << 16;
        }
}

// The inverse of conure_pack.
void conure_unpack(const uint32_t* packed, uint16_t* weight, int64_t num_inputs,
                   int64_t num_outputs) {
  using namespace conure;
  for (int64_t panel = 0; panel * kPanel < num_outputs; panel++)
    for (int64_t k = 0; k < num_inputs; k++)
      for (int c = 0; c < kRegisterColumns; c += 2)
        for (int lane = 0; lane < kLanes; lane++, packed++) {
          const int64_t low = panel * kPanel + c * kLanes + lane, high = low + kLanes;
          if (low < num_outputs) weight[low * num_inputs + k] = uint16_t(*packed);
          if (high < num_outputs) weight[high * num_inputs + k] = uint16_t(*packed >> 16);
        }
}

void conure_linear(const conure::LinearArguments* arguments, const conure::Threads* threads) {
  using namespace conure;
  const LinearArguments& a = *arguments;
  if (!a.num_rows) return;
  constexpr int64_t kRowsPerTask = 64;
  parallel_for(*threads, (a.num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int64_t) {
    const int64_t first = task * kRowsPerTask * a.num_inputs;
    const int64_t end = std::min((task + 1) * kRowsPerTask, a.num_rows) * a.num_inputs;
    for_vectors(end - first, [&](int64_t i, auto load, auto store) {
      store(a.wide + first + i, load(a.inputs + first + i));
    });
  });
  const int64_t num_panels = (a.num_outputs + kPanel - 1) / kPanel;
  // Few outputs on many threads: the rows are divided too.
  const int64_t groups = (a.num_rows + kRegisterRows - 1) / kRegisterRows;
  const int64_t wanted = (threads->count * kTasksPerThread + num_panels - 1) / num_panels;
  const int64_t size = (groups + wanted - 1) / wanted * kRegisterRows;
  const int64_t num_blocks = (a.num_rows + size - 1) / size;
  parallel_for(*threads, num_panels * num_blocks, [&](int64_t task, int64_t) {
    const int64_t panel = task / num_blocks, row = task % num_blocks * size;
    multiply_panel(a, row, std::min(row + size, a.num_rows),
                   a.packed + panel * a.num_inputs * kPanel / 2, panel * kPanel);
  });
}
}
