// Products with packed weights: out = inputs * weight^T + bias.
//
// A weight is packed in panels of kPanel outputs. A panel consists of words of 32 bits (simd.h), each
// with a float32 weight, or with the bfloat16 weights of one output and two consecutive inputs. Such
// a pair is multiplied by one instruction, or a shift and a mask turn it into two floats. AMD
// processors multiply pairs twice as fast as floats, Intel's without a matrix unit multiply floats
// twice as fast as pairs; see library.prefers_pairs.
// Each result is one sum over the inputs in order, whatever the number of rows.
//
// Shapes: T rows - K inputs, even in bfloat16 - N outputs.

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "operations.h"

namespace conure {

constexpr int kPanel = kRegisterColumns * kLanes;
constexpr int kCacheLine = 16;  // words
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

template <class T>
constexpr int64_t kNumbersPerWord = sizeof(uint32_t) / sizeof(T);

// Whether words of weights T are multiplied as they are, not widened to floats.
template <class T, class W>
constexpr bool kIsDirect = std::is_same_v<T, typename W::Element>;

// Panels that are multiplied at once with some rows. Few rows wait for memory and for the previous
// addition: several panels are several streams of weights and more sums that do not depend on each
// other.
constexpr int panels_at_once(int64_t num_rows) { return num_rows == 1 ? 4 : num_rows <= 3 ? 2 : 1; }

// Multiplies R rows with P panels. Half a panel from `next` on, if not null, is prefetched meanwhile.
template <class T, class W, int R, int P>
static inline void multiply_rows(const LinearArguments& a, int64_t row, int64_t panel,
                                 const uint32_t* next) {
  constexpr int C = kRegisterColumns;
  Vec total[R][P][C] = {};
  const auto* inputs = reinterpret_cast<const uint32_t*>(
      kIsDirect<T, W> ? static_cast<const void*>(static_cast<const T*>(a.inputs) + row * a.num_inputs)
                      : static_cast<const void*>(a.wide + row * a.num_inputs));
  const int64_t stride = a.num_inputs / W::kStep;  // words of a row
  const int64_t num_words = a.num_inputs / kNumbersPerWord<T>;
  const uint32_t* first = a.packed + panel * num_words * kPanel;
  for (int64_t k = 0; k < num_words; k++) {
    if (next)
      for (int word = 0; word < kPanel / 2; word += kCacheLine)
        __builtin_prefetch(next + k * (kPanel / 2) + word, 0, 2);
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      WordVec weight[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++)
        weight[c] = load_vector<WordVec>(first + (p * num_words + k) * kPanel + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
          Vec& sum = total[r][p][c];
          if constexpr (kIsDirect<T, W>) {
            sum = W::dot(sum, weight[c], inputs[r * stride + k]);
          } else {
            sum = W::dot(sum, weight[c] << 16, inputs[r * stride + 2 * k]);
            sum = W::dot(sum, weight[c] & 0xFFFF0000u, inputs[r * stride + 2 * k + 1]);
          }
        }
    }
  }
  for (int p = 0; p < P; p++) {
    const int64_t column = (panel + p) * kPanel;
    for (int r = 0; r < R; r++)
      store_columns(static_cast<T*>(a.out) + (row + r) * a.num_outputs + column, total[r][p],
                    a.bias ? static_cast<const T*>(a.bias) + column : nullptr,
                    std::min<int64_t>(a.num_outputs - column, kPanel));
  }
}

// Rows that are multiplied at once. The floats of a pair take twice the registers of the pair, so one
// row less fits beside them, except where an instruction multiplies by a number in memory.
template <class T, class W>
constexpr int kRows = !kIsDirect<T, W> && kLanes < 16 ? kRegisterRows - 1 : kRegisterRows;

// Multiplies `num_rows` <= R rows with the panels from `panel` to `end`.
template <class T, class W, int R = kRows<T, W>>
static void multiply_group(const LinearArguments& a, int64_t row, int64_t num_rows, int64_t panel,
                           int64_t end, const uint32_t* next) {
  if constexpr (R > 1)
    if (num_rows < R) return multiply_group<T, W, R - 1>(a, row, num_rows, panel, end, next);
  constexpr int P = panels_at_once(R);
  for (; panel + P <= end; panel += P) multiply_rows<T, W, R, P>(a, row, panel, next);
  for (; panel < end; panel++) multiply_rows<T, W, R, 1>(a, row, panel, next);
}

// Multiplies rows in groups of about the same size. The first group reads the weights from memory. The
// next two read them from the cache, and prefetch half a panel each of those from `next_panel` on.
template <class T, class W>
static void multiply_panels(const LinearArguments& a, int64_t row, int64_t row_end, int64_t panel,
                            int64_t end, int64_t next_panel) {
  const int64_t num = row_end - row, num_groups = (num + kRows<T, W> - 1) / kRows<T, W>;
  const int64_t num_words = a.num_inputs / kNumbersPerWord<T>;
  const uint32_t* next = a.packed + next_panel * num_words * kPanel;
  const bool has_next = next_panel * kPanel < a.num_outputs;
  for (int64_t group = 0; group < num_groups; group++) {
    const int64_t first = group * num / num_groups, last = (group + 1) * num / num_groups;
    const bool prefetches = has_next && (group == 1 || group == 2);
    multiply_group<T, W>(a, row + first, last - first, panel, end,
                         prefetches ? next + (group - 1) * (num_words / 2) * kPanel : nullptr);
  }
}

static void widen_inputs(const LinearArguments& a, const Threads& threads) {
  constexpr int64_t kRowsPerTask = 64;
  const auto* inputs = static_cast<const BFloat16*>(a.inputs);
  parallel_for(threads, (a.num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int64_t) {
    const int64_t first = task * kRowsPerTask * a.num_inputs;
    const int64_t end = std::min((task + 1) * kRowsPerTask, a.num_rows) * a.num_inputs;
    for_vectors(end - first, [&](int64_t i, auto load, auto store) {
      store(a.wide + first + i, load(inputs + first + i));
    });
  });
}

template <class T, class W>
static void multiply_all(const LinearArguments& a, const Threads& threads) {
  const int64_t num_panels = (a.num_outputs + kPanel - 1) / kPanel;
  // A task has as many panels as few rows need, unless the threads need more tasks.
  const int64_t most = panels_at_once(a.num_rows);
  const int64_t num_tasks = threads.count * kTasksPerThread;
  const int64_t width = std::max<int64_t>(1, std::min(most, num_panels / num_tasks));
  const int64_t num_parts = (num_panels + width - 1) / width;
  // Few outputs on many threads: the rows are divided too.
  const int64_t groups = (a.num_rows + kRows<T, W> - 1) / kRows<T, W>;
  const int64_t wanted = (num_tasks + num_parts - 1) / num_parts;
  const int64_t size = (groups + wanted - 1) / wanted * kRows<T, W>;
  const int64_t num_blocks = (a.num_rows + size - 1) / size;
  parallel_for(threads, num_parts * num_blocks, [&](int64_t task, int64_t) {
    const int64_t panel = task / num_blocks * width, row = task % num_blocks * size;
    const int64_t end = std::min(panel + width, num_panels);
    // Threads take tasks in turn: the panels that follow are multiplied beside another cache.
    const int64_t next_panel = (task + threads.count) / num_blocks * width;
    multiply_panels<T, W>(a, row, std::min(row + size, a.num_rows), panel, end, next_panel);
  });
}

}  // namespace conure

extern "C" {

// The size of a packed weight whose rows are `row_words` words.
int64_t conure_packed_words(int64_t row_words, int64_t num_outputs) {
  using namespace conure;
  return (num_outputs + kPanel - 1) / kPanel * row_words * kPanel;
}

// weight: [N, row_words]; packed: as many words as conure_packed_words.
void conure_pack(const uint32_t* weight, uint32_t* packed, int64_t row_words,
                 int64_t num_outputs) {
  using namespace conure;
  for (int64_t first = 0; first < num_outputs; first += kPanel)
    for (int64_t k = 0; k < row_words; k++)
      for (int64_t column = first; column < first + kPanel; column++)
        *packed++ = column < num_outputs ? weight[column * row_words + k] : 0;
}

// The inverse of conure_pack.
void conure_unpack(const uint32_t* packed, uint32_t* weight, int64_t row_words,
                   int64_t num_outputs) {
  using namespace conure;
  for (int64_t first = 0; first < num_outputs; first += kPanel)
    for (int64_t k = 0; k < row_words; k++)
      for (int64_t column = first; column < first + kPanel; column++, packed++)
        if (column < num_outputs) weight[column * row_words + k] = *packed;
}

void conure_linear(const conure::LinearArguments* a, const conure::Threads* threads) {
  using namespace conure;
  if (!a->num_rows) return;
  if (a->dtype == kFloat32) return multiply_all<float, Floats>(*a, *threads);
  if (!a->wide) return multiply_all<BFloat16, Words<BFloat16>>(*a, *threads);
  widen_inputs(*a, *threads);
  multiply_all<BFloat16, Floats>(*a, *threads);
}
}
