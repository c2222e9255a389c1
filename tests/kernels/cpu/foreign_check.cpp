// Compares the kernels with float64, on a machine that runs no Python: linked with the kernels'
// sources, a program that prints each operation's largest error and fails above its bound.
// `test_foreign.py` compiles it for Arm and runs it in an emulator.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "operations.h"

extern "C" {
int64_t conure_packed_words(int64_t, int64_t);
void conure_pack(const uint32_t*, uint32_t*, int64_t, int64_t);
void* conure_new_workspace();
}

using namespace conure;

static std::mt19937 generator(1);
static const Threads kThreads{nullptr, 1};
static bool has_failed = false;

static double value(float x) { return x; }
static double value(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
static double value(Float16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return x.bits >> 15 ? -size : size;
}

template <class T>
static std::vector<T> normal(size_t count) {
  std::normal_distribution<float> distribution;
  std::vector<T> numbers(count);
  for (T& number : numbers) {
    const float x = distribution(generator);
    if constexpr (std::is_same_v<T, float>) number = x;
    if constexpr (std::is_same_v<T, BFloat16>) number = {uint16_t(bit_cast<uint32_t>(x) >> 16)};
    if constexpr (std::is_same_v<T, Float16>) {  // a random sign, exponent and fraction
      const uint32_t bits = generator();
      number = {uint16_t((bits & 0x83FF) | (10 + bits % 6) << 10)};
    }
  }
  return numbers;
}

template <class T>
constexpr Dtype kDtype = std::is_same_v<T, float>      ? kFloat32
                         : std::is_same_v<T, BFloat16> ? kBFloat16
                                                       : kFloat16;
template <class T>
constexpr double kBound = std::is_same_v<T, float>      ? 1e-5
                          : std::is_same_v<T, BFloat16> ? 1e-2
                                                        : 2e-3;

// Compares results with expected ones, relative to their root mean square or to 1.
template <class T>
static void check(const std::string& name, const std::vector<T>& results,
                  const std::vector<double>& expected) {
  double worst = 0, squares = 0;
  for (double e : expected) squares += e * e;
  const double scale = std::max(1e-3, std::sqrt(squares / double(expected.size())));
  for (size_t i = 0; i < expected.size(); i++) {
    const double error = std::abs(value(results[i]) - expected[i]);
    const double relative = error / std::max(scale, std::abs(expected[i]));
    worst = std::isnan(relative) ? INFINITY : std::max(worst, relative);
  }
  const bool is_wrong = worst > kBound<T>;
  has_failed |= is_wrong;
  std::printf("%-40s dtype %d  error %.1e%s\n", name.c_str(), int(kDtype<T>), worst,
              is_wrong ? "  WRONG" : "");
}

template <class T>
static void check_linear(int64_t rows, int64_t inputs, int64_t outputs, bool is_paired) {
  const auto x = normal<T>(rows * inputs), w = normal<T>(outputs * inputs), bias = normal<T>(outputs);
  const int64_t row_words = inputs * sizeof(T) / sizeof(uint32_t);
  std::vector<uint32_t> words(outputs * row_words), packed(conure_packed_words(row_words, outputs));
  std::memcpy(words.data(), w.data(), words.size() * sizeof(uint32_t));
  conure_pack(words.data(), packed.data(), row_words, outputs);
  std::vector<float> wide(rows * inputs);
  std::vector<T> out(rows * outputs);
  const LinearArguments a{x.data(),   packed.data(), bias.data(), out.data(),
                          is_paired ? nullptr : wide.data(), rows, inputs, outputs, kDtype<T>};
  conure_linear(&a, &kThreads);
  std::vector<double> expected;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t n = 0; n < outputs; n++) {
      double sum = value(bias[n]);
      for (int64_t k = 0; k < inputs; k++) sum += value(x[r * inputs + k]) * value(w[n * inputs + k]);
      expected.push_back(sum);
    }
  check("linear " + std::to_string(rows) + (is_paired ? " pairs" : " floats"), out, expected);
}

template <class T>
static void check_norm(int64_t tokens, int64_t width) {
  auto hidden = normal<T>(tokens * width);
  const auto delta = normal<T>(tokens * width), weight = normal<T>(width);
  const auto before = hidden;
  std::vector<T> out(tokens * width);
  const NormArguments a{hidden.data(), delta.data(), weight.data(), out.data(),
                        tokens,        width,        kDtype<T>,     1e-5f};
  conure_add_norm(&a, &kThreads);
  std::vector<double> sums, normed;
  for (int64_t t = 0; t < tokens; t++) {
    double squares = 0;
    for (int64_t i = t * width; i < (t + 1) * width; i++) {
      sums.push_back(value(before[i]) + value(delta[i]));
      squares += value(hidden[i]) * value(hidden[i]);
    }
    for (int64_t i = 0; i < width; i++)
      normed.push_back(value(hidden[t * width + i]) / std::sqrt(squares / double(width) + 1e-5) *
                       value(weight[i]));
  }
  check("residual", hidden, sums);
  check("norm", out, normed);
}

template <class T>
static void check_gate(int64_t tokens, int64_t width) {
  const auto mixed = normal<T>(tokens * 2 * width);
  std::vector<T> out(tokens * width);
  const GateArguments a{mixed.data(), out.data(), tokens, width, kDtype<T>};
  conure_silu_mul(&a, &kThreads);
  std::vector<double> expected;
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t i = 0; i < width; i++) {
      const double gate = value(mixed[t * 2 * width + i]), up = value(mixed[(t * 2 + 1) * width + i]);
      expected.push_back(gate / (1 + std::exp(-gate)) * up);
    }
  check("gate", out, expected);
}

template <class T>
static void check_rotation(int64_t tokens, int64_t dim) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kLength = 50;
  const int64_t width = (kHeads + 2 * kKvHeads) * dim;
  const auto mixed = normal<T>(tokens * width), cos = normal<T>(kLength * dim),
             sin = normal<T>(kLength * dim);
  std::vector<T> query(tokens * kHeads * dim), keys(kLength * kKvHeads * dim), values = keys;
  std::vector<int64_t> positions, slots;
  for (int64_t t = 0; t < tokens; t++) positions.push_back(t * 7 % kLength), slots.push_back(t * 3);
  const Vectors key_cache{keys.data(), kKvHeads * dim, dim}, value_cache{values.data(), kKvHeads * dim, dim};
  const RotateArguments a{mixed.data(), positions.data(), slots.data(), cos.data(), sin.data(),
                          nullptr,      query.data(),     key_cache,    value_cache, tokens,
                          kHeads,       kKvHeads,         dim,          kDtype<T>,   1e-5f};
  conure_rotate_store(&a, &kThreads);
  std::vector<double> expected;
  std::vector<T> results;
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < kHeads + 2 * kKvHeads; h++)
      for (int64_t i = 0; i < dim; i++) {
        const T* head = &mixed[t * width + h * dim];
        const int64_t angle = positions[t] * dim + i, kv = (slots[t] * kKvHeads) * dim + i;
        const bool is_value = h >= kHeads + kKvHeads;
        expected.push_back(is_value ? value(head[i])
                                    : value(head[i]) * value(cos[angle]) +
                                          value(head[(i + dim / 2) % dim]) * value(sin[angle]));
        results.push_back(h < kHeads  ? query[(t * kHeads + h) * dim + i]
                          : is_value ? values[kv + (h - kHeads - kKvHeads) * dim]
                                     : keys[kv + (h - kHeads) * dim]);
      }
  check("rotation", results, expected);
}

// Three rows; the first two share their first two blocks, which are a range of the plan.
template <class T>
static void check_attention(int64_t key_dim, int64_t value_dim, int64_t group, int64_t window,
                            float softcap, bool has_sinks, int64_t is_invariant, int64_t pairs) {
  constexpr int64_t kBlock = 48, kKvHeads = 2, kBlocks = 12;
  const int64_t heads = kKvHeads * group;
  const std::vector<int64_t> num_new{1, 5, 2}, kv_len{100, 130, 60}, query_start{0, 1, 6, 8},
      order{0, 1, 2}, first{0}, end{2}, begin_block{0},
      end_block{2};
  const std::vector<int32_t> tables{3, 7, 1, 3, 7, 9, 4, 11, 0};
  const bool is_shared = !is_invariant && !window;
  const std::vector<int64_t> start{is_shared ? 2 : 0, is_shared ? 2 : 0, 0};
  const Plan plan{num_new.data(),     kv_len.data(),    tables.data(), query_start.data(),
                  order.data(),       first.data(),     end.data(),    begin_block.data(),
                  end_block.data(),   start.data(),     3,             is_shared,
                  3,                  kBlock};
  const int64_t tokens = 8, slots = kBlocks * kBlock;
  const auto query = normal<T>(tokens * heads * key_dim), keys = normal<T>(slots * kKvHeads * key_dim),
             values = normal<T>(slots * kKvHeads * value_dim);
  const auto sinks = normal<float>(heads);
  std::vector<T> out(tokens * heads * value_dim);
  const auto vectors = [&](const std::vector<T>& v, int64_t num, int64_t size) {
    return Vectors{const_cast<T*>(v.data()), num * size, size};
  };
  const float scale = 0.5f / std::sqrt(float(key_dim));
  const AttentionArguments a{&plan, vectors(query, heads, key_dim), vectors(keys, kKvHeads, key_dim),
                             vectors(values, kKvHeads, value_dim), vectors(out, heads, value_dim),
                             has_sinks ? sinks.data() : nullptr, heads, kKvHeads, key_dim, value_dim,
                             window, kDtype<T>, is_invariant, pairs, scale, softcap};
  static void* workspace = conure_new_workspace();
  conure_attention(&a, &kThreads, workspace);
  std::vector<double> expected;
  for (int64_t row = 0; row < 3; row++)
    for (int64_t n = 0; n < num_new[row]; n++)
      for (int64_t h = 0; h < heads; h++) {
        const int64_t position = kv_len[row] - num_new[row] + n, q = query_start[row] + n;
        std::vector<double> sums(value_dim);
        double total = has_sinks ? std::exp(double(sinks[h])) : 0;
        for (int64_t p = window ? std::max<int64_t>(0, position - window + 1) : 0; p <= position; p++) {
          const int64_t slot = tables[row * 3 + p / kBlock] * kBlock + p % kBlock;
          const int64_t kv = slot * kKvHeads + h / group;
          double score = 0;
          for (int64_t i = 0; i < key_dim; i++)
            score += value(query[(q * heads + h) * key_dim + i]) * value(keys[kv * key_dim + i]);
          score *= scale;
          if (softcap) score = std::tanh(score / softcap) * softcap;
          total += std::exp(score);
          for (int64_t i = 0; i < value_dim; i++)
            sums[i] += std::exp(score) * value(values[kv * value_dim + i]);
        }
        for (double sum : sums) expected.push_back(sum / total);
      }
  check("attention " + std::to_string(key_dim) + "/" + std::to_string(value_dim) + " group " +
            std::to_string(group) + (window ? " window" : "") + (pairs ? " pairs" : ""),
        out, expected);
}

template <class T>
static void check_type() {
  check_norm<T>(3, 75);
  check_gate<T>(9, 33);
  check_rotation<T>(5, 24);
  for (int64_t pairs : {0, 1})
    for (int64_t group : {1, 3, 14}) {
      check_attention<T>(64, 64, group, 0, 0, false, 0, pairs);
      check_attention<T>(24, 12, group, 0, 5, true, 0, pairs);
      check_attention<T>(80, 80, group, 40, 0, true, 0, pairs);
      check_attention<T>(17, 7, group, 0, 0, false, 1, pairs);
    }
}

int main() {
  for (int64_t rows : {1, 5, 6, 17}) {
    check_linear<float>(rows, 71, 45, false);
    check_linear<float>(rows, 32, 64, false);
    for (bool is_paired : {false, true}) {
      if (is_paired && Words<BFloat16>::kStep == 1) continue;
      check_linear<BFloat16>(rows, 70, 45, is_paired);
      check_linear<BFloat16>(rows, 32, 64, is_paired);
    }
  }
  check_type<float>();
  check_type<BFloat16>();
  check_type<Float16>();
  return has_failed;
}
