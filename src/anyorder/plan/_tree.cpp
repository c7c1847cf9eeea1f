// The loops of receipt.py: leaves, the nodes of a level, and its pads, which are streams of SHAKE128.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "receipt.py makes the tree");

namespace {

constexpr uint32_t START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};
constexpr uint32_t CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
constexpr uint64_t ROUNDS[24] = {
    0x1, 0x8082, 0x800000000000808a, 0x8000000080008000, 0x808b, 0x80000001, 0x8000000080008081, 0x8000000000008009,
    0x8a, 0x88, 0x80008009, 0x8000000a, 0x8000808b, 0x800000000000008b, 0x8000000000008089, 0x8000000000008003,
    0x8000000000008002, 0x8000000000000080, 0x800a, 0x800000008000000a, 0x8000000080008081, 0x8000000000008080,
    0x80000001, 0x8000000080008008,
};
constexpr int TO[24] = {10, 7, 11, 17, 18, 3, 5, 16, 8, 21, 24, 4, 15, 23, 19, 13, 12, 2, 20, 14, 22, 9, 6, 1};

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#define LANES 4
#include "_tree.h"
#undef LANES
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
#define LANES 8
#include "_tree.h"
#undef LANES
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace portable {
#define LANES 2
#include "_tree.h"
#undef LANES
}  // namespace portable

enum { PORTABLE, AVX2, AVX512 };
int path = PORTABLE;  // see `anyorder_use`
constexpr int MOST = 8;  // streams side by side; twice as many texts

int streams() { return 2 << path; }

void permute(uint64_t* state) {
#if defined(__x86_64__)
  if (path == AVX512) return avx512::permute(state);
  if (path == AVX2) return avx2::permute(state);
#endif
  portable::permute(state);
}

// Of as many texts as a vector has lanes.
void digest(const uint8_t* const* texts, uint64_t blocks, uint8_t* const* digests) {
#if defined(__x86_64__)
  if (path == AVX512) return avx512::digest(texts, blocks, digests);
  if (path == AVX2) return avx2::digest(texts, blocks, digests);
#endif
  portable::digest(texts, blocks, digests);
}

// Texts until there are enough of one length to be hashed together.
class Texts {
 public:
  // Where to write a text of this size; its digest goes to `digest` later, by `flush` at the latest.
  uint8_t* add(uint64_t size, uint8_t* digest) {
    const uint64_t blocks = (size + 72) / 64;
    if (blocks != blocks_ || count_ == 2 * streams() || (count_ && blocks > 64)) flush();
    if (blocks != blocks_) std::memset(padded_, 0xff, sizeof padded_);
    blocks_ = blocks;
    if (texts_.size() < 64 * blocks * (count_ + 1)) texts_.resize(64 * blocks * (count_ + 1));
    uint8_t* const text = &texts_[64 * blocks * count_];
    if (size != padded_[count_]) {  // else as that of the text before it here
      const uint64_t bits = __builtin_bswap64(8 * size);
      std::memset(text + size, 0, 64 * blocks - size);
      text[size] = 0x80;
      std::memcpy(text + 64 * blocks - 8, &bits, 8);
      padded_[count_] = size;
    }
    digests_[count_++] = digest;
    return text;
  }

  void flush() {
    uint8_t nowhere[32];
    const uint8_t* texts[2 * MOST];
    for (int i = 0; i < 2 * MOST; ++i) texts[i] = &texts_[i < count_ ? 64 * blocks_ * i : 0];
    for (int i = count_; i < 2 * MOST; ++i) digests_[i] = nowhere;
    if (count_) digest(texts, blocks_, digests_);
    count_ = 0;
  }

 private:
  uint64_t blocks_ = 0;
  int count_ = 0;
  uint64_t padded_[2 * MOST];
  uint8_t* digests_[2 * MOST];
  std::vector<uint8_t> texts_ = std::vector<uint8_t>(64);
};

constexpr uint64_t RATE = 168, ROWS = 1 << 13;  // bytes of a state that are told; nodes of one stream
constexpr uint64_t BLOCKS = 32, MARKS = (ROWS * 7 * 32 + RATE * BLOCKS - 1) / (RATE * BLOCKS);

struct Level {
  const int64_t* places;  // of its nodes, rising
  const uint8_t* nodes;
  const int64_t* firsts;  // the number of the first child of each node above, then that of all

  uint64_t pads(uint64_t from, uint64_t to) const { return 8 * (to - from) - (uint64_t)(firsts[to] - firsts[from]); }

  // The 8 children of a node above; without branches, for nobody can foretell where a node is.
  void family(uint64_t row, const uint8_t* pads, uint8_t* children) const {
    int64_t child = firsts[row];
    const int64_t last = firsts[row + 1] - 1;
    for (int slot = 0; slot < 8; ++slot, children += 32) {
      const bool full = (child <= last) & ((places[std::min(child, last)] & 7) == slot);
      std::memcpy(children, full ? nodes + 32 * child : pads, 32);
      child += full;
      pads += full ? 0 : 32;
    }
  }
};

// Streams side by side, and the bytes that come next of each.
struct Streams {
  const int count = streams();
  alignas(64) uint64_t state[25 * MOST] = {};
  uint8_t bytes[MOST][RATE * (BLOCKS + 2)];

  void start(int i, const uint8_t* key, int level, uint64_t row) {
    char text[200] = {};
    uint64_t block[25];
    std::memcpy(text, key, 32);
    text[32 + std::snprintf(text + 32, 100, "pads %d %llu", level, (unsigned long long)row)] = 0x1f;
    text[RATE - 1] = (char)0x80;
    std::memcpy(block, text, sizeof block);
    load(i, block);
  }

  void load(int i, const uint64_t* mark) {
    for (int w = 0; w < 25; ++w) state[w * count + i] = mark[w];
  }

  void store(int i, uint64_t* mark) const {
    for (int w = 0; w < 25; ++w) mark[w] = state[w * count + i];
  }

  // Behind the bytes that each has `left`.
  void squeeze(uint64_t blocks, const uint64_t* left) {
    for (uint64_t at = 0; at < RATE * blocks; at += RATE) {
      permute(state);
      for (int i = 0; i < count; ++i)
        for (uint64_t w = 0; w < RATE / 8; ++w) std::memcpy(bytes[i] + left[i] + at + 8 * w, &state[w * count + i], 8);
    }
  }
};

uint64_t threads() {
  const char* const given = std::getenv("OMP_NUM_THREADS");
  const int wanted = given ? std::atoi(given) : 0;
  return wanted > 0 ? wanted : std::thread::hardware_concurrency();
}

}  // namespace

extern "C" uint64_t anyorder_sources() { return ANYORDER_SOURCES; }

// Of instruction sets the best that the processor has, at most this one.
extern "C" void anyorder_use(int most) {
#if defined(__x86_64__)
  path = __builtin_cpu_supports("avx512f") ? AVX512 : __builtin_cpu_supports("avx2") ? AVX2 : PORTABLE;
#endif
  path = std::min(path, most);
}

extern "C" void anyorder_sha256(const uint8_t* text, uint64_t size, uint8_t* digest) {
  Texts texts;
  std::memcpy(texts.add(size, digest), text, size);
  texts.flush();
}

// The leaf of unit i goes to number ranks[i]. Ids are of 8 bytes, or texts of these sizes.
extern "C" void anyorder_leaves(const uint8_t* salts, const uint8_t* id, const uint64_t* sizes, const uint8_t* steps,
                                const int64_t* bounds, const int64_t* ranks, uint64_t count, uint8_t* leaves) {
  Texts texts;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t head = sizes ? 42 : 34, size = sizes ? sizes[i] : 8;
    const uint64_t rest = 8 * (uint64_t)(bounds[i + 1] - bounds[i]);
    uint8_t* const text = texts.add(head + size + rest, leaves + 32 * ranks[i]);
    text[0] = 0;
    std::memcpy(text + 1, salts + 32 * i, 32);
    text[33] = sizes ? 's' : 'i';
    if (sizes) std::memcpy(text + 34, &size, 8);
    std::memcpy(text + head, id, size);
    std::memcpy(text + head + size, steps + 8 * bounds[i], rest);
    id += size;
  }
  texts.flush();
}

// States of one level's streams that are kept for each ROWS nodes: one after every BLOCKS blocks.
extern "C" uint64_t anyorder_marks() { return 25 * MARKS; }

// The nodes above a level, `count` of them, and marks, or null.
extern "C" void anyorder_nodes(const uint8_t* key, int number, const int64_t* places, const uint8_t* nodes,
                               const int64_t* firsts, uint64_t count, uint8_t* made, uint64_t* marks) {
  const Level level{places, nodes, firsts};
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    struct {
      uint64_t row = 0, end = 0, mark = 0;
    } parts[MOST];
    Streams streams;
    Texts texts;
    uint64_t left[MOST] = {};
    for (bool busy = true; busy;) {
      busy = false;
      for (int i = 0; i < streams.count; ++i) {
        auto& [row, end, mark] = parts[i];
        if (row == end && (row = next.fetch_add(ROWS)) < count) {
          end = std::min(row + ROWS, count), mark = 25 * MARKS * (row / ROWS), left[i] = 0;
          streams.start(i, key, number, row);
        }
        if (row >= count) row = end = count;
        else if (marks) streams.store(i, marks + mark);
        mark += 25;
        busy |= row < end;
      }
      if (!busy) break;
      streams.squeeze(BLOCKS, left);
      for (int i = 0; i < streams.count; ++i) {
        auto& [row, end, mark] = parts[i];
        uint8_t *at = streams.bytes[i], *const most = at + left[i] + RATE * BLOCKS;
        for (; row < end; ++row) {
          const uint64_t size = 32 * level.pads(row, row + 1);
          if (size > (uint64_t)(most - at)) break;
          uint8_t* const text = texts.add(257, made + 32 * row);
          text[0] = 1;
          level.family(row, at, text + 1);
          at += size;
        }
        left[i] = row < end ? most - at : 0;
        std::memmove(streams.bytes[i], at, left[i]);
      }
    }
    texts.flush();
  };
  std::vector<std::thread> others;
  try {
    for (uint64_t i = 1; i < std::min(threads(), count / (ROWS * streams()) + 1); ++i) others.emplace_back(work);
  } catch (...) {  // fewer threads
  }
  work();
  for (std::thread& other : others) other.join();
}

// All children of `wanted` nodes above a level, whose numbers rise; marks as `anyorder_nodes` made them.
extern "C" void anyorder_families(const int64_t* places, const uint8_t* nodes, const int64_t* firsts,
                                  const int64_t* rows, uint64_t wanted, const uint64_t* marks, uint8_t* children) {
  const Level level{places, nodes, firsts};
  const uint64_t none[MOST] = {};
  Streams streams;
  const auto before = [&](uint64_t row) { return 32 * level.pads(row / ROWS * ROWS, row); };
  const auto mark = [&](uint64_t row) { return MARKS * (row / ROWS) + before(row) / (RATE * BLOCKS); };
  for (uint64_t done = 0; done < wanted;) {
    uint64_t ends[MOST], begin = done;
    int used = 0;
    for (; used < streams.count && done < wanted; ++used) {
      const uint64_t at = mark(rows[done]);
      streams.load(used, marks + 25 * at);
      while (done < wanted && mark(rows[done]) == at) ++done;
      ends[used] = done;
    }
    streams.squeeze(BLOCKS + 2, none);
    for (int i = 0; i < used; ++i)
      for (; begin < ends[i]; ++begin)
        level.family(rows[begin], streams.bytes[i] + before(rows[begin]) % (RATE * BLOCKS), children + 256 * begin);
  }
}
