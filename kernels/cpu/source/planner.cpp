// The plan of a step from the block tables of its rows; see planner.py. The results are those of
// planning/plan.py and planning/prefix_tree.py, which explain them.
//
// The tables of the last step are compared while those of this step are copied. While all rows
// decode, the tree is computed only in steps in which a row may share one more block.
//
// Shapes: R rows - T queries - N shared ranges.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace conure {

struct Table {
  const int32_t* blocks;
  int64_t num_blocks;
};

struct PlanRequest {
  const int64_t *num_new, *kv_len;  // [R]
  const Table* tables;              // [R]
  const int64_t *last_num_new, *last_kv_len;  // of the last step
  int64_t* last_tree;               // as `tree`
  int32_t* columns;                 // [>= R, stride], the tables of the last step, overwritten
  int64_t* step;                    // largest block, [R + 1] query_start, [T] positions, [T] slots
  // [R] blocks that a row has in common with its closest row, or -1; N; [R] row_order;
  // [R] private_start_block; [4, N] ranges
  int64_t* tree;
  int64_t num_rows, last_num_rows, stride, block_size;
  double min_saved, partial_tokens, ridge;
};

enum PlanStatus : int64_t { kInvalid, kNewTree, kSameTree };

struct Node {
  int64_t first, end, depth;
};

// Returns the first index from `at` on at which two tables differ, or `end`.
static int64_t mismatch(const int32_t* a, const int32_t* b, int64_t at, int64_t end) {
  constexpr int64_t kStep = 16;
  for (; at + kStep <= end; at += kStep) {
    int32_t different = 0;
    for (int64_t i = at; i < at + kStep; i++) different |= a[i] ^ b[i];
    if (different) break;
  }
  while (at < end && a[at] == b[at]) at++;
  return at;
}

struct Copied {
  int32_t different = 0, signs = 0, largest = -1;

  void copy(const int32_t* from, int32_t* to, int64_t at, int64_t end, int32_t mask) {
    int32_t d = 0, s = 0, l = -1;
    for (int64_t i = at; i < end; i++) {
      d |= from[i] ^ to[i];
      s |= from[i];
      l = std::max(l, from[i]);
      to[i] = from[i];
    }
    different |= d & mask, signs |= s, largest = std::max(largest, l);
  }
};

class StepPlan {
 public:
  explicit StepPlan(const PlanRequest& r) : r_(r), num_(r.num_rows), limits_(num_) {}

  PlanStatus make() {
    bool is_continued = num_ == r_.last_num_rows, may_share_more = false;
    Copied copied;
    for (int64_t row = 0; row < num_; row++) {
      const int64_t num_new = r_.num_new[row], length = r_.kv_len[row];
      const int64_t blocks = ceil_blocks(length);
      if (num_new < 1 || length < num_new || r_.tables[row].num_blocks < blocks) return kInvalid;
      limits_[row] = (length - num_new) / r_.block_size;
      const bool has_last = row < r_.last_num_rows;
      const int64_t last = has_last ? r_.last_kv_len[row] : 0;
      const int64_t compared = std::min(blocks, ceil_blocks(last));
      int32_t* columns = r_.columns + row * r_.stride;
      copied.copy(r_.tables[row].blocks, columns, 0, compared, -1);
      copied.copy(r_.tables[row].blocks, columns, compared, blocks, 0);
      is_continued = is_continued && num_new == 1 && r_.last_num_new[row] == 1 && length == last + 1;
      // The block that a row has just filled may be shared from now on.
      if (is_continued && limits_[row] > (last - 1) / r_.block_size)
        may_share_more |= r_.last_tree[row] >= limits_[row] - 1;
      least_ = row ? std::min(least_, limits_[row]) : limits_[0];
      root_ = row ? mismatch(r_.columns, columns, 0, std::min(root_, least_)) : limits_[0];
    }
    if (copied.signs < 0) return kInvalid;
    is_continued = is_continued && !copied.different;
    write_step(copied.largest);
    if (is_continued && !may_share_more) return kSameTree;
    sort_rows();
    compare_neighbours();
    find_ranges();
    const int64_t num_words = num_ + 1 + 2 * num_ + 4 * r_.tree[num_];
    if (!is_continued || !std::equal(r_.tree + num_, r_.tree + num_words, r_.last_tree + num_))
      return kNewTree;
    std::copy_n(r_.tree, num_, r_.last_tree);
    return kSameTree;
  }

 private:
  int64_t ceil_blocks(int64_t tokens) const { return (tokens + r_.block_size - 1) / r_.block_size; }
  const int32_t* table(int64_t row) const { return r_.columns + row * r_.stride; }

  void write_step(int64_t largest) {
    int64_t* start = r_.step + 1;
    r_.step[0] = largest;
    start[0] = 0;
    for (int64_t row = 0; row < num_; row++) start[row + 1] = start[row] + r_.num_new[row];
    int64_t *positions = start + num_ + 1, *slots = positions + start[num_];
    for (int64_t row = 0; row < num_; row++)
      for (int64_t p = r_.kv_len[row] - r_.num_new[row]; p < r_.kv_len[row]; p++) {
        *positions++ = p;
        *slots++ = table(row)[p / r_.block_size] * r_.block_size + p % r_.block_size;
      }
  }

  // Orders rows by their blocks after the root; a prefix comes before its extensions.
  void sort_rows() {
    struct Key {
      uint64_t head;  // two blocks, each plus 1, or 0 after the limit
      int64_t row;
    };
    std::vector<Key> keys(num_);
    for (int64_t row = 0; row < num_; row++) {
      const auto word = [&](int64_t at) -> uint64_t {
        return at < limits_[row] ? uint64_t(table(row)[at]) + 1 : 0;
      };
      keys[row] = {word(root_) << 32 | word(root_ + 1), row};
    }
    std::sort(keys.begin(), keys.end(), [&](const Key& a, const Key& b) {
      if (a.head != b.head) return a.head < b.head;
      const int64_t end = std::min(limits_[a.row], limits_[b.row]);
      const int64_t at = mismatch(table(a.row), table(b.row), std::min(root_ + 2, end), end);
      if (at < end) return table(a.row)[at] < table(b.row)[at];
      if (limits_[a.row] != limits_[b.row]) return limits_[a.row] < limits_[b.row];
      return a.row < b.row;
    });
    for (int64_t i = 0; i < num_; i++) r_.tree[num_ + 1 + i] = keys[i].row;
  }

  void compare_neighbours() {
    const int64_t* order = r_.tree + num_ + 1;
    int64_t* longest = r_.tree;
    common_.resize(num_ - 1);
    std::fill_n(longest, num_, -1);
    for (int64_t i = 0; i + 1 < num_; i++) {
      const int64_t a = order[i], b = order[i + 1], end = std::min(limits_[a], limits_[b]);
      common_[i] = mismatch(table(a), table(b), root_, end);
      longest[a] = std::max(longest[a], common_[i]);
      longest[b] = common_[i];
    }
  }

  // The nodes of the tree, parents before their children; see prefix_tree._intervals.
  std::vector<Node> nodes() const {
    std::vector<Node> found, open{{0, 0, 0}};
    const auto close = [&](int64_t end, int64_t depth) {
      int64_t first = end - 1;
      for (; open.back().depth > depth; open.pop_back()) {
        first = open.back().first;
        found.push_back({first, end, open.back().depth});
      }
      if (open.back().depth < depth) open.push_back({first, 0, depth});
    };
    for (int64_t i = 0; i + 1 < num_; i++) close(i + 1, common_[i]);
    close(num_, 0);
    std::sort(found.begin(), found.end(), [](const Node& a, const Node& b) {
      return a.first != b.first ? a.first < b.first : a.depth < b.depth;
    });
    return found;
  }

  // Keeps the nodes that save more than they cost; see prefix_tree._worthwhile.
  void find_ranges() {
    const int64_t *order = r_.tree + num_ + 1, *start = r_.step + 1;
    int64_t* private_start = r_.tree + 2 * num_ + 1;
    std::vector<int64_t> queries(num_ + 1);
    std::vector<double> reads(num_ + 1);
    for (int64_t i = 0; i < num_; i++) {
      const int64_t num = start[order[i] + 1] - start[order[i]];
      queries[i + 1] = queries[i] + num;
      reads[i + 1] = reads[i] + std::max(1.0, double(num) / r_.ridge);
    }
    std::fill_n(private_start, num_, 0);
    std::vector<Node> kept, ancestors;  // of an ancestor: end, and first block not yet shared
    std::vector<int64_t> begins;
    for (const Node& node : nodes()) {
      while (!ancestors.empty() && ancestors.back().end <= node.first) ancestors.pop_back();
      int64_t begin = ancestors.empty() ? 0 : ancestors.back().depth;
      const double num = double(queries[node.end] - queries[node.first]);
      // Rounding gives a tiny negative number where nothing is saved.
      const double saved =
          std::max(0.0, reads[node.end] - reads[node.first] - std::max(1.0, num / r_.ridge));
      const double price = r_.min_saved ? r_.min_saved + r_.partial_tokens * num : 0;
      if (saved * double((node.depth - begin) * r_.block_size) >= price) {
        kept.push_back(node);
        begins.push_back(begin);
        for (int64_t i = node.first; i < node.end; i++) private_start[order[i]] = node.depth;
        begin = node.depth;
      }
      ancestors.push_back({0, node.end, begin});
    }
    const int64_t num_ranges = r_.tree[num_] = int64_t(kept.size());
    int64_t* ranges = private_start + num_;
    for (int64_t i = 0; i < num_ranges; i++) {
      ranges[i] = kept[i].first;
      ranges[num_ranges + i] = kept[i].end;
      ranges[2 * num_ranges + i] = begins[i];
      ranges[3 * num_ranges + i] = kept[i].depth;
    }
  }

  const PlanRequest& r_;
  const int64_t num_;
  std::vector<int64_t> limits_, common_;
  int64_t root_ = 0, least_ = 0;  // blocks that all rows have in common; that all may share
};

}  // namespace conure

extern "C" int64_t conure_plan(const conure::PlanRequest* request) {
  return conure::StepPlan(*request).make();
}
