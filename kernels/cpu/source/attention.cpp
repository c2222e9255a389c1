// Attention of one layer over the plan of a step; see ops.AttentionOperations.attention.
//
// An *item* is a range of positions with all queries that read it: a range of the prefix tree, or
// the rest of one row. An item is cut into *units* by KV head, by queries and, to occupy all
// threads, by positions. A unit reads its keys and values once, in tiles of kTile tokens: it packs
// a tile into the words that the products take (simd.h), and multiplies it with groups of rows that
// fit into the registers: scores, softmax, weighted values. Rows are queries times the heads of
// a group. Pairs of bfloat16 are packed faster than floats. Where floats are multiplied faster
// (linear.cpp), only few rows use pairs. Maxima and sums follow the tiles (online softmax, Milakov
// and Gimelshein 2018) in float32. A query in a single unit is finished there; otherwise its
// partials are merged.
//
// In batch-invariant mode only whole rows are items, so the sums of a query run over the same tiles
// of its own positions in any step. Keys that it does not see have weight 0, which changes no bit.
//
// Shapes: T queries - H query heads - K KV heads - D, E sizes of a key, a value.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "operations.h"

namespace conure {

constexpr int kTile = 64;
constexpr int kMaxRows = 128;
constexpr int64_t kMinChunk = 256;  // positions; shorter units cost more than they balance
constexpr int kUnitsPerThread = 4;
// With at most this many rows, packing pairs is faster than multiplying floats.
constexpr int kNarrowRows = 8;
constexpr int kDirectRows = 5;  // at most this many rows are multiplied without packing

struct Entry {  // a query of an item
  int64_t query, position;
  int64_t slot;  // of its first partial of the item; -1 if the item is everything that it sees
};

struct Item {
  const int32_t* table;
  int64_t first_entry, num_entries;
  int64_t begin, end;  // positions
};

struct Unit {
  const Item* item;
  int64_t kv_head;
  int64_t first_entry, num_entries;
  int64_t begin, end, chunk;
};

struct Partial {  // the state of one head of one query; its sums are in an array of their own
  float peak, total;
};

struct Workspace {  // memory that is kept from call to call
  std::vector<Entry> entries;
  std::vector<Item> items;
  std::vector<Unit> units;
  std::vector<int64_t> first_slot;
  std::vector<Partial> partials;
  char* memory = nullptr;
  size_t size = 0;

  char* reserve(size_t needed) {
    if (needed > size) {
      std::free(memory);
      size = (needed + needed / 4 + 4095) / 4096 * 4096;
      memory = static_cast<char*>(std::aligned_alloc(4096, size));
      if (!memory) std::abort();
    }
    return memory;
  }
};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
static float exp1(float x) { return exp(broadcast(x))[0]; }

static void add_item(const Plan& p, Workspace& w, const int64_t* rows, int64_t num_rows,
                     int64_t begin, int64_t end) {
  const int64_t first = int64_t(w.entries.size());
  for (int64_t i = 0; i < num_rows; i++) {
    const int64_t row = rows[i], num = p.num_new[row];
    for (int64_t k = 0; k < num; k++)
      w.entries.push_back({p.query_start[row] + k, p.kv_len[row] - num + k, -1});
  }
  w.items.push_back({p.tables + rows[0] * p.table_stride, first,
                     int64_t(w.entries.size()) - first, begin, end});
}

static void find_items(const AttentionArguments& a, Workspace& w) {
  const Plan& p = *a.plan;
  w.entries.clear();
  w.items.clear();
  for (int64_t i = 0; i < p.num_ranges && !a.window; i++)
    add_item(p, w, p.row_order + p.first[i], p.end[i] - p.first[i],
             p.begin_block[i] * p.block_size, p.end_block[i] * p.block_size);
  for (int64_t row = 0; row < p.num_rows; row++) {
    int64_t begin = p.private_start_block[row] * p.block_size;
    // The visible range moves with each query: nothing is shared, and tiles keep their places.
    if (a.window)
      begin = std::max<int64_t>(0, p.kv_len[row] - p.num_new[row] - a.window + 1) / kTile * kTile;
    add_item(p, w, &row, 1, begin, p.kv_len[row]);
  }
}

// Cuts the items into units, and gives each query a slot per partial if it has several.
static int64_t find_units(const AttentionArguments& a, Workspace& w, int64_t num_threads) {
  const Plan& p = *a.plan;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t num_queries = p.query_start[p.num_rows];
  const int64_t tile_entries = std::max<int64_t>(1, kMaxRows / group);
  constexpr int64_t kReadRows = 8;  // reading a token costs as much as this many rows
  const auto cost = [&](int64_t entries) { return entries * group + kReadRows; };
  int64_t total = 0;
  for (const Item& i : w.items) total += cost(i.num_entries) * (i.end - i.begin);
  const int64_t target = total * a.kv_heads / (num_threads * kUnitsPerThread) + 1;
  w.units.clear();
  w.first_slot.assign(num_queries + 1, 0);
  for (const Item& item : w.items) {
    const int64_t length = item.end - item.begin;
    const int64_t entries = std::min(tile_entries, item.num_entries);
    int64_t chunks = 1;
    if (num_threads > 1 && !a.is_invariant)
      chunks = std::clamp<int64_t>(cost(entries) * length / target, 1, ceil_div(length, kMinChunk));
    const int64_t chunk_size = round_up(ceil_div(length, chunks), kTile);
    chunks = ceil_div(length, chunk_size);
    for (int64_t e = 0; e < item.num_entries; e++) {
      Entry& entry = w.entries[item.first_entry + e];
      entry.slot = w.first_slot[entry.query];  // relative to the query's first slot
      w.first_slot[entry.query] += chunks;
    }
    // The last queries of a prompt see most: they come first.
    for (int64_t e = (item.num_entries - 1) / entries * entries; e >= 0; e -= entries) {
      const int64_t num = std::min(entries, item.num_entries - e);
      const Entry* tile = &w.entries[item.first_entry + e];
      int64_t end = 0, begin = item.begin;
      for (int64_t i = 0; i < num; i++) end = std::max(end, tile[i].position + 1);
      if (a.window)
        begin = std::max(begin, std::max<int64_t>(0, tile->position - a.window + 1) / kTile * kTile);
      for (int64_t head = 0; head < a.kv_heads; head++)
        for (int64_t c = 0; c < chunks; c++) {
          const int64_t from = item.begin + c * chunk_size;
          w.units.push_back({&item, head, item.first_entry + e, num, std::max(begin, from),
                             std::min({end, item.end, from + chunk_size}), c});
        }
    }
  }
  int64_t num_slots = 0;
  for (int64_t query = 0; query <= num_queries; query++) {
    const int64_t num = w.first_slot[query];
    w.first_slot[query] = num_slots;
    num_slots += num > 1 ? num : 0;
  }
  for (Entry& entry : w.entries) {
    const int64_t first = w.first_slot[entry.query];
    entry.slot = first == w.first_slot[entry.query + 1] ? -1 : first + entry.slot;
  }
  return num_slots;
}

// Few rows take more columns, because an addition waits for the one before it in the same sum.
template <int R>
constexpr int kColumnsOf = std::max(kRegisterColumns, 8 / R);

// Calls body(constant C, column) for blocks of at most kColumns vectors.
template <int kColumns, class Body>
static void for_columns(int64_t num_vectors, Body body, int64_t at = 0) {
  for (; at + kColumns <= num_vectors; at += kColumns)
    body(std::integral_constant<int, kColumns>{}, at * kLanes);
  if constexpr (kColumns > 1) for_columns<kColumns - 1>(num_vectors, body, at);
}

template <class W, int R, int C>
static inline void multiply(const uint32_t* rows, int64_t row_stride, const uint32_t* columns,
                            int64_t column_stride, int64_t depth, Vec (&total)[R][C]) {
  for (int64_t k = 0; k < depth; k++) {
    WordVec column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
      column[c] = load_vector<WordVec>(columns + k * column_stride + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++)
        total[r][c] = W::dot(total[r][c], column[c], rows[r * row_stride + k]);
  }
}

// Computes units. T: numbers in memory; W: words of products.
template <class T, class W>
class UnitRunner {
  using Element = typename W::Element;

 public:
  UnitRunner(const AttentionArguments& a, Workspace& w, float* partial_sums, char* memory)
      : a_(a), w_(w), partial_sums_(partial_sums), group_(a.heads / a.kv_heads) {
    const auto take = [&](int64_t count) {
      char* taken = memory;
      memory += round_up(count * 4, 64);
      return taken;
    };
    query_ = reinterpret_cast<uint32_t*>(take(max_rows(a) * depth(a)));
    keys_ = reinterpret_cast<uint32_t*>(take(round_up(depth(a), kLanes) * kTile));
    values_ = reinterpret_cast<uint32_t*>(take(kTile / W::kStep * value_width(a)));
    sums_ = reinterpret_cast<float*>(take(max_rows(a) * value_width(a)));
    state_ = reinterpret_cast<Partial*>(take(max_rows(a) * 2));
  }

  static int64_t value_width(const AttentionArguments& a) { return round_up(a.value_dim, kLanes); }

  static size_t memory_bytes(const AttentionArguments& a) {
    const int64_t words = max_rows(a) * (depth(a) + value_width(a) + 2) +
                          round_up(depth(a), kLanes) * kTile + kTile * value_width(a);
    return round_up(words * 4 + 5 * 64, 4096);
  }

  void run(const Unit& unit) {
    const int64_t num_rows = unit.num_entries * group_;
    // In another step, the query may be in a unit of another size, which would add in another order.
    // Transposing the sums of rows must also take less than transposing keys.
    is_direct_ = W::kStep == 1 && num_rows <= kDirectRows && !a_.is_invariant &&
                 3 * num_rows * kLanes <= 2 * a_.key_dim && a_.key_dim % kLanes == 0 &&
                 a_.value_dim % kLanes == 0;
    read_queries(unit);
    std::fill_n(state_, num_rows, Partial{-INFINITY, 0.0f});
    std::fill_n(sums_, num_rows * value_width(a_), 0.0f);
    locate(unit, unit.begin);
    prefetch(a_.keys, unit.kv_head, a_.key_dim, 0, kTile);
    prefetch(a_.values, unit.kv_head, a_.value_dim, 0, kTile);
    for (int64_t at = unit.begin; at < unit.end; at += kTile) {
      const int num = num_next_;
      std::copy_n(next_slots_, num, slots_);
      locate(unit, at + kTile);
      if (!is_direct_) {
        pack_keys(unit.kv_head, num);
        pack_values(unit.kv_head, num);
      }
      for (int64_t row = 0; row < num_rows; row += kRegisterRows)
        add_rows<kRegisterRows>(unit, row, std::min<int64_t>(kRegisterRows, num_rows - row), at,
                                num);
    }
    write(unit);
  }

 private:
  static int64_t max_rows(const AttentionArguments& a) {
    return std::max<int64_t>(kMaxRows, a.heads / a.kv_heads);
  }
  static int64_t depth(const AttentionArguments& a) { return ceil_div(a.key_dim, W::kStep); }

  const Entry& entry(const Unit& unit, int64_t row) const {
    return w_.entries[unit.first_entry + row / group_];
  }
  int64_t head(const Unit& unit, int64_t row) const { return unit.kv_head * group_ + row % group_; }

  void read_queries(const Unit& unit) {
    for (int64_t row = 0; row < unit.num_entries * group_; row++) {
      const T* source = static_cast<const T*>(a_.query.data) +
                        entry(unit, row).query * a_.query.token_stride +
                        head(unit, row) * a_.query.head_stride;
      uint32_t* target = query_ + row * depth(a_);
      target[depth(a_) - 1] = 0;  // a pair may be half
      auto* elements = reinterpret_cast<Element*>(target);
      for_vectors(a_.key_dim, [&](int64_t i, auto load, auto store) {
        store(elements + i, load(source + i));
      });
    }
  }

  // Finds the tile at a position, which is prefetched while another one is packed.
  void locate(const Unit& unit, int64_t at) {
    num_next_ = int(std::clamp<int64_t>(unit.end - at, 0, kTile));
    const int64_t size = a_.plan->block_size;
    int64_t block = at / size, offset = at % size;
    for (int i = 0; i < num_next_; i++) {
      next_slots_[i] = unit.item->table[block] * size + offset;
      if (++offset == size) offset = 0, block++;
    }
  }

  // Prefetches some tokens of the next tile. All at once would exceed what a core waits for.
  void prefetch(const Vectors& cache, int64_t kv_head, int64_t size, int first, int end) const {
    const T* base = static_cast<const T*>(cache.data) + kv_head * cache.head_stride;
    for (int i = first; i < std::min(end, num_next_); i++)
      for (int64_t e = 0; e < size; e += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(base + next_slots_[i] * cache.token_stride + e, 0, 2);
  }

  static WordVec load_words(const T* source, int64_t num) {
    if constexpr (W::kStep == 1)
      return bit_cast<WordVec>(num >= kLanes ? load(source) : load_first(source, int(num)));
    if (num >= 2 * kLanes) return load_vector<WordVec>(source);
    WordVec words{};
    std::memcpy(&words, source, num * sizeof(T));
    return words;
  }

  // Packs keys as words [depth, kTile]: a column is a key.
  void pack_keys(int64_t kv_head, int num) {
    const T* base = static_cast<const T*>(a_.keys.data) + kv_head * a_.keys.head_stride;
    for (int first = 0; first < num; first += kLanes) {
      const T* key[kLanes];
      prefetch(a_.keys, kv_head, a_.key_dim, first, first + kLanes);
      for (int i = 0; i < kLanes; i++)  // columns after the last key repeat it
        key[i] = base + slots_[std::min(first + i, num - 1)] * a_.keys.token_stride;
      for (int64_t word = 0; word < depth(a_); word += kLanes) {
        WordVec rows[kLanes];
        const int64_t element = word * W::kStep;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++)
          rows[i] = load_words(key[i] + element, a_.key_dim - element);
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++)
          store_vector(keys_ + (word + i) * kTile + first, rows[i]);
      }
    }
  }

  // Packs values as words [tokens / kStep, value_width].
  void pack_values(int64_t kv_head, int num) {
    const T* base = static_cast<const T*>(a_.values.data) + kv_head * a_.values.head_stride;
    const int64_t width = value_width(a_), dim = a_.value_dim;
    for (int i = 0; i < num; i += W::kStep) {
      uint32_t* target = values_ + i / W::kStep * width;
      const T* value = base + slots_[i] * a_.values.token_stride;
      prefetch(a_.values, kv_head, dim, i, i + W::kStep);
      if constexpr (W::kStep == 1) {
        for_vectors(dim, [&](int64_t e, auto load, auto) {
          store_vector(target + e, load(value + e));
        });
      } else {
        const T* next = i + 1 < num ? base + slots_[i + 1] * a_.values.token_stride : nullptr;
        for (int64_t e = 0; e < dim; e += 2 * kLanes) {
          const PairVec first = bit_cast<PairVec>(load_words(value + e, dim - e));
          const PairVec second =
              next ? bit_cast<PairVec>(load_words(next + e, dim - e)) : PairVec{};
          store_vector(target + e, interleave<0>(first, second));
          if (e + kLanes < dim) store_vector(target + e + kLanes, interleave<1>(first, second));
        }
      }
    }
  }

  // Multiplies keys with rows where they are. Each lane of `sums` adds a part of a product.
  template <int R>
  void score_directly(const Unit& unit, int64_t row, int num, float (&scores)[R][kTile]) const {
    const T* base = static_cast<const T*>(a_.keys.data) + unit.kv_head * a_.keys.head_stride;
    const float* query = reinterpret_cast<const float*>(query_) + row * a_.key_dim;
    for (int first = 0; first < num; first += kLanes) {
      WordVec sums[R][kLanes];
      prefetch(a_.keys, unit.kv_head, a_.key_dim, first, first + kLanes);
      prefetch(a_.values, unit.kv_head, a_.value_dim, first, first + kLanes);
      for (int i = 0; i < kLanes; i++) {
        const T* key = base + slots_[std::min(first + i, num - 1)] * a_.keys.token_stride;
        Vec sum[R] = {};
        for (int64_t d = 0; d < a_.key_dim; d += kLanes) {
          const Vec numbers = load(key + d);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) sum[r] += numbers * load(query + r * a_.key_dim + d);
        }
        for (int r = 0; r < R; r++) sums[r][i] = bit_cast<WordVec>(sum[r]);
      }
      for (int r = 0; r < R; r++) {
        transpose(sums[r]);
        Vec total{};
        for (int i = 0; i < kLanes; i++) total += bit_cast<Vec>(sums[r][i]);
        store(&scores[r][first], total);
      }
    }
  }

  // Adds weighted values, which are read where they are.
  template <int R, int C>
  void add_directly(const Unit& unit, const float (&weights)[R][kTile], int num, int64_t column,
                    Vec (&total)[R][C]) const {
    const T* base =
        static_cast<const T*>(a_.values.data) + unit.kv_head * a_.values.head_stride + column;
    for (int i = 0; i < num; i++) {
      const T* value = base + slots_[i] * a_.values.token_stride;
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        const Vec numbers = load(value + c * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r][c] += numbers * weights[r][i];
      }
    }
  }

  // Adds a tile to `num_rows` <= R rows.
  template <int R>
  void add_rows(const Unit& unit, int64_t row, int64_t num_rows, int64_t at, int num) {
    if constexpr (R > 1) {
      if (num_rows < R) return add_rows<R - 1>(unit, row, num_rows, at, num);
    }
    alignas(64) float scores[R][kTile];
    alignas(64) Element weights[R][kTile];
    float shrink[R];
    const int64_t num_vectors = ceil_div(num, kLanes);
    if constexpr (W::kStep == 1)
      if (is_direct_) score_directly<R>(unit, row, num, scores);
    for_columns<kColumnsOf<R>>(is_direct_ ? 0 : num_vectors, [&](auto columns, int64_t column) {
      Vec total[R][columns.value] = {};
      multiply<W>(query_ + row * depth(a_), depth(a_), keys_ + column, kTile, depth(a_), total);
      for (int r = 0; r < R; r++)
        for (int c = 0; c < columns.value; c++)
          store_vector(&scores[r][column + c * kLanes], total[r][c]);
    });
    for (int r = 0; r < R; r++) {
      const int64_t position = entry(unit, row + r).position;
      const int64_t begin = a_.window ? position - a_.window + 1 - at : 0;
      const int64_t end = std::min<int64_t>(num, position + 1 - at);
      shrink[r] = weigh(scores[r], weights[r], state_[row + r], begin, end, num_vectors);
    }
    const int64_t width = value_width(a_);
    for_columns<kColumnsOf<R>>(width / kLanes, [&](auto columns, int64_t column) {
      Vec total[R][columns.value];
      float* sums = sums_ + row * width + column;
      for (int r = 0; r < R; r++)
        for (int c = 0; c < columns.value; c++)
          total[r][c] = load(sums + r * width + c * kLanes) * shrink[r];
      if (is_direct_) {
        if constexpr (W::kStep == 1) add_directly(unit, weights, num, column, total);
      } else {
        multiply<W>(reinterpret_cast<const uint32_t*>(weights), kTile / W::kStep,
                    values_ + column, width, ceil_div(num, W::kStep), total);
      }
      for (int r = 0; r < R; r++)
        for (int c = 0; c < columns.value; c++)
          store_vector(sums + r * width + c * kLanes, total[r][c]);
    });
  }

  // Turns scores into weights; returns the factor of what was summed before.
  float weigh(float* scores, Element* weights, Partial& state, int64_t begin, int64_t end,
              int64_t num_vectors) const {
    const bool has_hidden = begin > 0 || end < num_vectors * kLanes;
    Vec peaks = broadcast(-INFINITY);
    for (int64_t i = 0; i < num_vectors; i++) {
      Vec s = load(scores + i * kLanes) * a_.scale;
      if (a_.softcap) s = tanh(s / a_.softcap) * a_.softcap;
      if (has_hidden) {
        IntVec lane;
        for (int k = 0; k < kLanes; k++) lane[k] = int(i) * kLanes + k;
        const int from = int(std::max<int64_t>(begin, 0)), to = int(std::max<int64_t>(end, 0));
        s = lane >= from && lane < to ? s : broadcast(-INFINITY);
      }
      store(scores + i * kLanes, s);
      peaks = maximum(peaks, s);
    }
    const float peak = std::max(state.peak, largest(peaks));
    const float base = peak == -INFINITY ? 0.0f : peak;  // no key was visible yet
    const float shrink = peak == state.peak ? 1.0f : exp1(state.peak - base);
    Vec total{};
    for (int64_t i = 0; i < num_vectors; i++) {
      Vec weight = exp(load(scores + i * kLanes) - base);
      total += weight;
      store(weights + i * kLanes, weight);
    }
    state = {peak, state.total * shrink + sum(total)};
    return shrink;
  }

  void write(const Unit& unit) {
    const int64_t width = value_width(a_);
    for (int64_t row = 0; row < unit.num_entries * group_; row++) {
      const Entry& e = entry(unit, row);
      const int64_t h = head(unit, row);
      const float* sums = sums_ + row * width;
      if (e.slot >= 0) {
        const int64_t slot = (e.slot + unit.chunk) * a_.heads + h;
        w_.partials[slot] = state_[row];
        std::copy_n(sums, width, partial_sums_ + slot * width);
        continue;
      }
      write_merged(a_, e.query, h, &state_[row], sums, 1, 0, 0);
    }
  }

 public:
  // Writes the result of one head of one query from its partials.
  static void write_merged(const AttentionArguments& a, int64_t query, int64_t head,
                           const Partial* partials, const float* sums, int64_t num,
                           int64_t partial_stride, int64_t sum_stride) {
    T* out = static_cast<T*>(a.out.data) + query * a.out.token_stride + head * a.out.head_stride;
    float peak = a.sinks ? a.sinks[head] : -INFINITY;
    for (int64_t i = 0; i < num; i++) peak = std::max(peak, partials[i * partial_stride].peak);
    float total = a.sinks ? exp1(a.sinks[head] - peak) : 0.0f;
    for (int64_t i = 0; i < num; i++)
      total += partials[i * partial_stride].total * exp1(partials[i * partial_stride].peak - peak);
    for_vectors(a.value_dim, [&](int64_t e, auto, auto store) {
      Vec merged{};
      for (int64_t i = 0; i < num; i++)
        merged += load(sums + i * sum_stride + e) *
                  (exp1(partials[i * partial_stride].peak - peak) / total);
      store(out + e, merged);
    });
  }

 private:
  const AttentionArguments& a_;
  Workspace& w_;
  float* partial_sums_;
  const int64_t group_;
  uint32_t *query_, *keys_, *values_;
  float* sums_;
  Partial* state_;
  int64_t slots_[kTile], next_slots_[kTile];
  int num_next_;
  bool is_direct_;
};

template <class T>
static void attend(const AttentionArguments& a, const Threads& threads, Workspace& w) {
  using Wide = UnitRunner<T, Floats>;
  using Narrow = UnitRunner<T, Words<T>>;
  find_items(a, w);
  const int64_t num_slots = find_units(a, w, threads.count);
  const int64_t width = Wide::value_width(a), group = a.heads / a.kv_heads;
  const size_t worker_bytes = Wide::memory_bytes(a);
  w.partials.resize(num_slots * a.heads);
  char* memory = w.reserve(worker_bytes * threads.count + num_slots * a.heads * width * 4);
  float* sums = reinterpret_cast<float*>(memory + worker_bytes * threads.count);
  parallel_for(threads, int64_t(w.units.size()), [&](int64_t task, int64_t worker) {
    const Unit& unit = w.units[task];
    char* scratch = memory + worker * worker_bytes;
    // In another step, the query may be in a unit of another size.
    const bool is_narrow = !a.is_invariant && unit.num_entries * group <= kNarrowRows;
    if (a.prefers_pairs || is_narrow)
      Narrow(a, w, sums, scratch).run(unit);
    else
      Wide(a, w, sums, scratch).run(unit);
  });
  if (!num_slots) return;
  parallel_for(threads, a.plan->query_start[a.plan->num_rows], [&](int64_t query, int64_t) {
    const int64_t first = w.first_slot[query], num = w.first_slot[query + 1] - first;
    for (int64_t head = 0; head < a.heads && num; head++) {
      const int64_t slot = first * a.heads + head;
      Wide::write_merged(a, query, head, &w.partials[slot], sums + slot * width, num, a.heads,
                           a.heads * width);
    }
  });
}

}  // namespace conure

extern "C" {

void* conure_new_workspace() { return new conure::Workspace; }

void conure_free_workspace(void* workspace) {
  auto* w = static_cast<conure::Workspace*>(workspace);
  std::free(w->memory);
  delete w;
}

void conure_attention(const conure::AttentionArguments* a, const conure::Threads* threads,
                      void* workspace) {
  using namespace conure;
  auto& w = *static_cast<Workspace*>(workspace);
  if (a->dtype == kFloat32) attend<float>(*a, *threads, w);
  if (a->dtype == kBFloat16) attend<BFloat16>(*a, *threads, w);
  if (a->dtype == kFloat16) attend<Float16>(*a, *threads, w);
}
}
