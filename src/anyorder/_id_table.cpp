// The two loops of id_table.py: open addressing with linear probing.

#include <cstdint>
#include <cstring>

namespace {

struct Table {
  char* entries;   // each an id of some words of 8 bytes, and its number in 4; -1: free
  uint64_t size;   // below 2^32
  uint64_t words;  // of an id
  uint64_t salt;

  uint64_t entry_size() const { return 8 * words + 4; }

  char* place(const int64_t* id) const {
    uint64_t x = static_cast<uint64_t>(*id) ^ salt;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return entries + (((x >> 32) * size) >> 32) * entry_size();
  }

  // The entry of the id, or the free one where it would stand.
  char* find(const int64_t* id) const {
    char* const end = entries + size * entry_size();
    for (char* entry = place(id);;) {
      if (number(entry) < 0 || std::memcmp(entry, id, 8 * words) == 0) return entry;
      entry += entry_size();
      if (entry == end) entry = entries;
    }
  }

  int32_t number(const char* entry) const {
    int32_t number;
    std::memcpy(&number, entry + 8 * words, 4);
    return number;
  }
};

}  // namespace

extern "C" uint64_t anyorder_sources() { return ANYORDER_SOURCES; }

extern "C" void anyorder_find(char* entries, uint64_t size, uint64_t words, uint64_t salt, const int64_t* ids,
                              uint64_t count, int64_t* numbers) {
  const Table table{entries, size, words, salt};
  for (uint64_t i = 0; i < count; i++) {
    if (i + 8 < count) __builtin_prefetch(table.place(ids + (i + 8) * words));
    numbers[i] = table.number(table.find(ids + i * words));
  }
}

extern "C" void anyorder_enter(char* entries, uint64_t size, uint64_t words, uint64_t salt, const int64_t* ids,
                               uint64_t count, const int64_t* numbers) {
  const Table table{entries, size, words, salt};
  for (uint64_t i = 0; i < count; i++) {
    if (i + 8 < count) __builtin_prefetch(table.place(ids + (i + 8) * words), 1);
    char* const entry = table.find(ids + i * words);
    if (table.number(entry) >= 0) continue;
    const int32_t number = static_cast<int32_t>(numbers[i]);
    std::memcpy(entry, ids + i * words, 8 * words);
    std::memcpy(entry + 8 * words, &number, 4);
  }
}
