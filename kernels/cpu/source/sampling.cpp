// Sampling of tokens; see kernels/sampling.py, whose reference gives the same tokens.
//
// A row takes the token with the largest sum of score and Gumbel noise. For top-k and top-p, tokens
// fall into buckets by their distance from the largest score. Counts or weights are summed per
// bucket, and only the bucket in which a limit is reached is sorted. The noise of a token needs two
// logarithms; a bound without them excludes almost all tokens. Weights are float32; sums, scores
// and noise are float64.
//
// Shapes: S rows of scores - V tokens - N random rows - C truncated rows.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace conure {

struct SampleArguments {
  const float* scores;         // [S, V]; -inf bans a token
  const int64_t* rows;         // [N]
  const double* temperatures;  // [N]
  const int64_t* keys;         // [N]
  const int64_t *truncated, *top_k;  // [C]
  const double *top_p, *min_p;       // [C]
  int64_t* tokens;             // [N], the results; -1 if a score is NaN or all are banned
  int64_t row_stride, vocabulary, num_rows, num_truncated;
};

struct Candidate {
  float score, weight;  // the weight is exp((score - largest) / temperature)
  int32_t token;
};

constexpr int kBuckets = 2048;
// Buckets per unit of a weight's logarithm; the last bucket holds all smaller weights.
constexpr float kBucketsPerUnit = 32;
constexpr int64_t kBlock = 256;

static int bucket(float log_weight) {
  const float at = -log_weight * kBucketsPerUnit;
  return at < kBuckets - 1 ? int(std::max(at, 0.0f)) : kBuckets - 1;
}

// The largest score; NaN if any score is NaN.
static float largest_or_nan(const float* scores, int64_t size) {
  Vec maxima = broadcast(-INFINITY);
  IntVec is_nan{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec score = load(scores + i);
    maxima = maximum(score, maxima);
    is_nan |= score != score;
  }
  float result = largest(maxima);
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; lane++) has_nan |= is_nan[lane] != 0;
  for (; i < size; i++) {
    result = std::max(result, scores[i]);
    has_nan |= std::isnan(scores[i]);
  }
  return has_nan ? NAN : result;
}

class RowSampler {
 public:
  RowSampler(const SampleArguments& a, int64_t row)
      : scores_(a.scores + a.rows[row] * a.row_stride),
        size_(a.vocabulary),
        temperature_(a.temperatures[row]),
        factor_(float(std::min(1 / temperature_, double(FLT_MAX)))),
        key_(uint64_t(a.keys[row])),
        largest_(largest_or_nan(scores_, size_)) {}

  // Whether no score is NaN, and at least one is not banned.
  bool can_sample() const { return largest_ > -INFINITY; }

  int64_t sample() {
    for (int64_t first = 0; first < size_; first += kBlock) {
      float weights[kBlock];
      const int64_t num = std::min(kBlock, size_ - first);
      weigh(first, num, weights);
      for (int64_t i = 0; i < num; i++) consider(first + i, scores_[first + i], weights[i]);
    }
    return token_;
  }

  int64_t sample_truncated(int64_t top_k, double top_p, double min_p) {
    std::vector<Candidate> kept;
    kept.reserve(size_);
    const double floor =
        min_p > 0 ? double(largest_) / temperature_ + std::log(min_p) : -INFINITY;
    for (int64_t first = 0; first < size_; first += kBlock) {
      float weights[kBlock];
      const int64_t num = std::min(kBlock, size_ - first);
      weigh(first, num, weights);
      for (int64_t i = 0; i < num; i++)
        if (scores_[first + i] > -INFINITY)
          kept.push_back({scores_[first + i], weights[i], int32_t(first + i)});
    }
    if (top_k < int64_t(kept.size()))
      keep_until(kept, [](const Candidate&) { return 1.0f; }, [&](double) { return top_k; });
    if (top_p < 1)
      keep_until(kept, [](const Candidate& c) { return c.weight; },
                 [&](double total) { return top_p * total; });
    for (const Candidate& c : kept)
      if (double(c.score) / temperature_ >= floor) consider(c.token, c.score, c.weight);
    return token_;
  }

 private:
  // The largest score may be infinite: its distance from itself is 0.
  float log_weight(float score) const {
    return score == largest_ ? 0.0f : (score - largest_) * factor_;
  }

  void weigh(int64_t first, int64_t num, float* weights) const {
    for_vectors(num, [&](int64_t i, auto load, auto store) {
      const Vec score = load(scores_ + first + i);
      store(weights + i, exp(score == largest_ ? Vec{} : (score - largest_) * factor_));
    });
  }

  // Keeps a token if the measures of all tokens with larger scores sum to less than a limit.
  template <class Measure, class Limit>
  void keep_until(std::vector<Candidate>& kept, Measure measure, Limit limit) const {
    std::vector<double> sums(kBuckets);
    double total = 0;
    for (const Candidate& c : kept) sums[bucket(log_weight(c.score))] += measure(c);
    for (double sum : sums) total += sum;
    const double most = limit(total);
    int last = 0;
    double before = 0;
    while (last < kBuckets - 1 && before + sums[last] < most) before += sums[last++];
    const auto begin = kept.begin();
    const auto edge = std::partition(begin, kept.end(), [&](const Candidate& c) {
      return bucket(log_weight(c.score)) < last;
    });
    auto end = std::partition(edge, kept.end(), [&](const Candidate& c) {
      return bucket(log_weight(c.score)) == last;
    });
    std::sort(edge, end, [](const Candidate& a, const Candidate& b) {
      return a.score != b.score ? a.score > b.score : a.token < b.token;
    });
    auto at = edge;
    // The token of the largest score always remains.
    for (; at != end && (before < most || at == begin); ++at) before += measure(*at);
    kept.erase(at, kept.end());
  }

  // Takes a token if its score plus its noise is the largest so far, or as large and earlier.
  void consider(int64_t token, float score, float weight) {
    uint64_t word = uint64_t(token + 1) * 0x9E3779B97F4A7C15u + key_;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    word ^= word >> 31;
    const double uniform = (double(word >> 12) + 0.5) * 0x1p-52;
    // The noise -log(-log(u)) exceeds b only if 1 - u <= -log(u) < exp(-b).
    if (!(1 - uniform <= double(weight) * bound_)) return;
    const double sum = double(score) / temperature_ - std::log(-std::log(uniform));
    if (token_ >= 0 && (sum < sum_ || (sum == sum_ && token > token_))) return;
    token_ = token;
    sum_ = sum;
    constexpr double kMargin = 1.001;  // more than the error of a weight
    bound_ = kMargin * std::exp(double(largest_) / temperature_ - sum);
  }

  const float* scores_;
  const int64_t size_;
  const double temperature_;
  const float factor_;
  const uint64_t key_;
  const float largest_;
  int64_t token_ = -1;
  double sum_ = 0, bound_ = INFINITY;
};

}  // namespace conure

extern "C" void conure_sample(const conure::SampleArguments* arguments,
                              const conure::Threads* threads) {
  const conure::SampleArguments& a = *arguments;
  std::vector<int64_t> cut(a.num_rows, -1);
  for (int64_t i = 0; i < a.num_truncated; i++) cut[a.truncated[i]] = i;
  conure::parallel_for(*threads, a.num_rows, [&](int64_t row, int64_t) {
    conure::RowSampler sampler(a, row);
    const int64_t c = cut[row];
    if (!sampler.can_sample())
      a.tokens[row] = -1;
    else if (c < 0)
      a.tokens[row] = sampler.sample();
    else
      a.tokens[row] = sampler.sample_truncated(a.top_k[c], a.top_p[c], a.min_p[c]);
  });
}
