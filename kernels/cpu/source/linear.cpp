// Products with bfloat16 weights: out = inputs * weight^T + bias.
//
// A weight is packed in panels of kPanel outputs: words of 32 bits (simd.h), each with the weights
// of one output and two consecutive inputs. Such a pair is multiplied by one instruction, or a shift
// and a mask turn it into two floats. AMD processors multiply pairs twice as fast as floats, Intel's
// without a matrix unit multiply floats twice as fast as pairs; see library.prefers_pairs.
// Each result is one sum over the inputs in order, whatever the number of rows.
//
// Shapes: T rows - K inputs, even - N outputs.

#include <algorithm>
#include <cstdlib>

#include "operations.h"

namespace conure {

constexpr int kPanel = kRegisterColumns * kLanes;
constexpr int64_t kTasksPerThread = 4;

// Stores the first `num` results of a row. A copy of variable size costs as much as ten products.
template <class T>
static inline void store_columns(T* out, const Vec* total, const T* bias, int64_t num) {
#pragma GCC unroll 8
  for (int c = 0; c < kRegisterColumns; c++, out += kLanes, num -= kLanes) {
    const int64_t first = c * kLanes;
    if (num >= kLanes)
      store(out, bias ? total[c] + load(bias + first) : total[c]);
    else if (num > 0)
      store_first(out, bias ? total[c] + load_first(bias + first, int(num)) : total[c], int(num));
  }
}

template <class W, int R>
static inline void multiply_rows(const LinearArguments& a, int64_t row, const uint32_t* panel,
                                 int64_t column) {
  constexpr int C = kRegisterColumns;
  Vec total[R][C] = {};
  const auto* inputs = reinterpret_cast<const uint32_t*>(
      W::kStep == 1 ? static_cast<const void*>(a.wide + row * a.num_inputs)
                    : static_cast<const void*>(a.inputs + row * a.num_inputs));
  const int64_t stride = a.num_inputs / W::kStep;  // words of a row
  for (int64_t k = 0; k < a.num_inputs / 2; k++) {
    WordVec weight[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) weight[c] = load_vector<WordVec>(panel + k * kPanel + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        if constexpr (W::kStep == 2) {
          total[r][c] = W::dot(total[r][c], weight[c], inputs[r * stride + k]);
        } else {
          total[r][c] = W::dot(total[r][c], weight[c] << 16, inputs[r * stride + 2 * k]);
          total[r][c] =
              W::dot(total[r][c], weight[c] & 0xFFFF0000u, inputs[r * stride + 2 * k + 1]);
        }
      }
  }
  const int64_t num_columns = std::min<int64_t>(a.num_outputs - column, kPanel);
  for (int r = 0; r < R; r++)
    store_columns(a.out + (row + r) * a.num_outputs + column, total[r],
                  a.bias ? a.bias + column : nullptr, num_columns);
}

// Rows that are multiplied at once. The floats of a pair take twice the registers of the pair, so one
// row less fits beside them, except where an instruction multiplies by a number in memory.
template <class W>
constexpr int kRows = W::kStep == 1 && kLanes < 16 ? kRegisterRows - 1 : kRegisterRows;

// Multiplies `num_rows` <= R rows.
template <class W, int R = kRows<W>>
static void multiply_group(const LinearArguments& a, int64_t row, int64_t num_rows,
                           const uint32_t* panel, int64_t column) {
  if constexpr (R > 1)
    if (num_rows < R) return multiply_group<W, R - 1>(a, row, num_rows, panel, column);
  multiply_rows<W, R>(a, row, panel, column);
}

// Multiplies rows in groups of about the same size.
template <class W>
static void multiply_panel(const LinearArguments& a, int64_t row, int64_t end,
                           const uint32_t* panel, int64_t column) {
  const int64_t num = end - row, num_groups = (num + kRows<W> - 1) / kRows<W>;
  for (int64_t group = 0; group < num_groups; group++) {
    const int64_t first = group * num / num_groups, next = (group + 1) * num / num_groups;
    multiply_group<W>(a, row + first, next - first, panel, column);
  }
}

static void widen_inputs(const LinearArguments& a, const Threads& threads) {
  constexpr int64_t kRowsPerTask = 64;
  parallel_for(threads, (a.num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int64_t) {
    const int64_t first = task * kRowsPerTask * a.num_inputs;
    const int64_t end = std::min((task + 1) * kRowsPerTask, a.num_rows) * a.num_inputs;
    for_vectors(end - first, [&](int64_t i, auto load, auto store) {
      store(a.wide + first + i, load(a.inputs + first + i));
    });
  });
}

template <class W>
static void multiply_all(const LinearArguments& a, const Threads& threads) {
  const int64_t num_panels = (a.num_outputs + kPanel - 1) / kPanel;
  // Few outputs on many threads: the rows are divided too.
  const int64_t groups = (a.num_rows + kRows<W> - 1) / kRows<W>;
  const int64_t wanted = (threads.count * kTasksPerThread + num_panels - 1) / num_panels;
  const int64_t size = (groups + wanted - 1) / wanted * kRows<W>;
  const int64_t num_blocks = (a.num_rows + size - 1) / size;
  parallel_for(threads, num_panels * num_blocks, [&](int64_t task, int64_t) {
    const int64_t panel = task / num_blocks, row = task % num_blocks * size;
    multiply_panel<W>(a, row, std::min(row + size, a.num_rows),
                      a.packed + panel * a.num_inputs / 2 * kPanel, panel * kPanel);
  });
}

}  // namespace conure

extern "C" {

int64_t conure_packed_words(int64_t num_inputs, int64_t num_outputs) {
  using namespace conure;
  return (num_outputs + kPanel - 1) / kPanel * num_inputs / 2 * kPanel;
}

// weight: [N, K]; packed: as many words as conure_packed_words.
void conure_pack(const uint16_t* weight, uint32_t* packed, int64_t num_inputs,
                 int64_t num_outputs) {
  using namespace conure;
  for (int64_t first = 0; first < num_outputs; first += kPanel)
    for (int64_t k = 0; k < num_inputs; k += 2)
      for (int64_t column = first; column < first + kPanel; column++)
        *packed++ = column < num_outputs ? weight[column * num_inputs + k] |
                                               uint32_t(weight[column * num_inputs + k + 1]) << 16
                                         : 0;
}

// The inverse of conure_pack.
void conure_unpack(const uint32_t* packed, uint16_t* weight, int64_t num_inputs,
                   int64_t num_outputs) {
  using namespace conure;
  for (int64_t first = 0; first < num_outputs; first += kPanel)
    for (int64_t k = 0; k < num_inputs; k += 2)
      for (int64_t column = first; column < first + kPanel; column++, packed++) {
        if (column >= num_outputs) continue;
        weight[column * num_inputs + k] = uint16_t(*packed);
        weight[column * num_inputs + k + 1] = uint16_t(*packed >> 16);
      }
}

void conure_linear(const conure::LinearArguments* a, const conure::Threads* threads) {
  using namespace conure;
  if (!a->num_rows) return;
  if (!a->wide) return multiply_all<Words<BFloat16>>(*a, *threads);
  widen_inputs(*a, *threads);
  multiply_all<Floats>(*a, *threads);
}
}
