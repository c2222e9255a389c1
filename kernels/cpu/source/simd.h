// Vectors of float32 for the instruction set that this file is compiled for.
//
// A `Vec` is as wide as a register. GCC and clang translate the arithmetic of such vectors to the
// instructions of the target, so only conversions and dot products name instructions here.
//
// Products take *words* of 32 bits. A word is a float, or a pair of bfloat16 numbers where the
// processor multiplies such pairs and adds both products to a float (`Pairs`).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace conure {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisterColumns = 4;  // of 32 registers: 6 * 4 sums, 4 columns, 1 row
#else
constexpr int kRegisterColumns = 2;  // of 16 registers: 6 * 2 sums, 2 columns, 1 row
#endif
constexpr int kRegisterRows = 6;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kLanes)));
typedef uint16_t PairVec __attribute__((vector_size(4 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

enum Dtype : int64_t { kFloat32, kBFloat16, kFloat16 };

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Vec broadcast(float value) { return Vec{} + value; }
// If either number is NaN, the result is b.
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

template <class V>
inline V load_vector(const void* source) {
  V v;
  std::memcpy(&v, source, sizeof(v));
  return v;
}
template <class V>
inline void store_vector(void* target, V v) {
  std::memcpy(target, &v, sizeof(v));
}

// Bits of floats from and to the bits of 16-bit floats, rounded to nearest even.

inline WordVec zero_extend(ShortVec bits) {
#if defined(__AVX512F__)
  return (WordVec)_mm512_cvtepu16_epi32((__m256i)bits);  // GCC 12 makes two halves otherwise
#elif defined(__AVX2__)
  return (WordVec)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, WordVec);
#endif
}
inline Vec widen(ShortVec bits, BFloat16) { return bit_cast<Vec>(zero_extend(bits) << 16); }
inline ShortVec narrow(Vec v, BFloat16) {
#if defined(__AVX512BF16__)
  return bit_cast<ShortVec>(_mm512_cvtneps_pbh((__m512)v));
#else
  WordVec u = bit_cast<WordVec>(v);
  WordVec nearest = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  return __builtin_convertvector(v == v ? nearest : (u >> 16 | 0x40), ShortVec);
#endif
}
inline Vec widen(ShortVec bits, Float16) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)bits);
#else
  WordVec wide = zero_extend(bits);
  Vec v = bit_cast<Vec>((wide & 0x7FFF) << 13) * 0x1p112f;  // moves the bias of the exponent
  WordVec u = bit_cast<WordVec>(v);
  u = v >= 0x1p16f ? (u | 0x7F800000) : u;  // infinity and NaN
  return bit_cast<Vec>(u | (wide & 0x8000) << 16);
#endif
}
inline ShortVec narrow(Vec v, Float16) {
#if defined(__AVX512F__)
  return (ShortVec)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  WordVec u = bit_cast<WordVec>(v), sign = u & 0x80000000;
  Vec size = bit_cast<Vec>(u ^ sign);
  // Below 2^-14 an addition of 1/2 leaves the right number of bits; above, rounding is done on bits.
  WordVec small = bit_cast<WordVec>(size + 0.5f) - 0x3F000000u;
  WordVec bits = u ^ sign;
  WordVec large = (bits + 0xC8000FFFu + (bits >> 13 & 1)) >> 13;
  WordVec rounded = size < 0x1p-14f ? small : large;
  rounded = size >= 65520.0f ? (WordVec{} + 0x7C00u) : rounded;
  rounded = v == v ? rounded : (WordVec{} + 0x7E00u);
  return __builtin_convertvector(rounded | sign >> 16, ShortVec);
#endif
}

template <class T>
inline Vec load(const T* source) {
  if constexpr (std::is_same_v<T, float>)
    return load_vector<Vec>(source);
  else
    return widen(load_vector<ShortVec>(source), T{});
}
template <class T>
inline void store(T* target, Vec v) {
  if constexpr (std::is_same_v<T, float>)
    store_vector(target, v);
  else
    store_vector(target, narrow(v, T{}));
}

// The first `num` elements of a vector, for the end of an array; the others are 0.
template <class T>
inline Vec load_first(const T* source, int num) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, source, num * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_first(T* target, Vec v, int num) {
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(target, buffer, num * sizeof(T));
}

// Calls body(index, load, store) for each vector of `size` elements; the last one may be partial.
template <class Body>
inline void for_vectors(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    body(i, [](auto* p) { return load(p); }, [](auto* p, Vec v) { store(p, v); });
  const int rest = int(size - i);
  if (rest)
    body(i, [=](auto* p) { return load_first(p, rest); },
         [=](auto* p, Vec v) { store_first(p, v, rest); });
}

template <int kDistance, class V, int... kIndex>
inline V exchange(V v, std::integer_sequence<int, kIndex...>) {
  return __builtin_shufflevector(v, v, (kIndex ^ kDistance)...);
}
template <int kDistance = kLanes / 2, class Combine>
inline float reduce(Vec v, Combine combine) {
  if constexpr (kDistance == 0) {
    return v[0];
  } else {
    Vec other = exchange<kDistance>(v, std::make_integer_sequence<int, kLanes>{});
    return reduce<kDistance / 2>(combine(v, other), combine);
  }
}
inline float sum(Vec v) {
  return reduce(v, [](Vec a, Vec b) { return a + b; });
}
inline float largest(Vec v) { return reduce(v, maximum); }

// exp(x) for x <= 88, relative error below 2e-7; 0 below -87; NaN of NaN (Cephes, expf).
inline Vec exp(Vec x) {
  constexpr float kRound = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const Vec bounded = maximum(broadcast(-88.0f), x);
  Vec n = (bounded * 1.44269504088896341f + kRound) - kRound;
  Vec r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return x < -87.0f ? Vec{} : p * bit_cast<Vec>(exponent);
}

// tanh(x), relative error below 3e-7; NaN of NaN (Cephes, tanhf).
inline Vec tanh(Vec x) {
  Vec size = x < 0.0f ? -x : x;
  Vec e = exp(minimum(broadcast(20.0f), size) * 2.0f);
  Vec far = 1.0f - 2.0f / (e + 1.0f);
  Vec square = x * x;
  Vec p = broadcast(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return size < 0.625f ? p * square * x + x : (x < 0.0f ? -far : far);
}

// Words of products: how they are multiplied.

struct Floats {
  using Element = float;
  static constexpr int kStep = 1;
  static Vec dot(Vec total, WordVec columns, uint32_t row) {
    return total + bit_cast<Vec>(columns) * bit_cast<float>(row);
  }
};

struct Pairs {
  using Element = BFloat16;
  static constexpr int kStep = 2;
#if defined(__AVX512BF16__)
  static Vec dot(Vec total, WordVec columns, uint32_t row) {
    return (Vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)columns,
                                 (__m512bh)_mm512_set1_epi32(int(row)));
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static Vec dot(Vec total, WordVec columns, uint32_t row) {
    return (Vec)vbfdotq_f32((float32x4_t)total, bit_cast<bfloat16x8_t>(columns),
                            vreinterpretq_bf16_u32(vdupq_n_u32(row)));
  }
#endif
};

// The words that numbers of type T need no conversion for, if the processor multiplies them.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <class T>
using Words = std::conditional_t<std::is_same_v<T, BFloat16>, Pairs, Floats>;
#else
template <class T>
using Words = Floats;
#endif

// Pairs of the numbers of two vectors: the first half of them, or the second.
template <int kHalf, int... kIndex>
inline PairVec interleave(PairVec a, PairVec b, std::integer_sequence<int, kIndex...>) {
  return __builtin_shufflevector(
      a, b, (kHalf * kLanes + kIndex / 2 + (kIndex % 2 ? 2 * kLanes : 0))...);
}
template <int kHalf>
inline PairVec interleave(PairVec a, PairVec b) {
  return interleave<kHalf>(a, b, std::make_integer_sequence<int, 2 * kLanes>{});
}

// Transposes kLanes x kLanes words: exchanges ever larger blocks beside the diagonal.
template <int kSize, int... kIndex>
inline void transpose_step(WordVec* rows, std::integer_sequence<int, kIndex...>) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    if (i & kSize) continue;
    WordVec a = rows[i], b = rows[i + kSize];
    rows[i] = __builtin_shufflevector(
        a, b, (kIndex & kSize ? kLanes + (kIndex ^ kSize) : kIndex)...);
    rows[i + kSize] = __builtin_shufflevector(
        a, b, (kIndex & kSize ? kLanes + kIndex : (kIndex ^ kSize))...);
  }
}
template <int kSize = 1>
inline void transpose(WordVec* rows) {
  if constexpr (kSize < kLanes) {
    transpose_step<kSize>(rows, std::make_integer_sequence<int, kLanes>{});
    transpose<kSize * 2>(rows);
  }
}

}  // namespace conure
