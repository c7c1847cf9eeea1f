// Keccak-f[1600] and SHA-256 (FIPS 202, 180-4) of several texts side by side. Included once for each instruction set,
// in a namespace of its own, with LANES (numbers of 64 bits in a vector) defined.

typedef uint64_t L __attribute__((vector_size(8 * LANES)));
typedef uint32_t W __attribute__((vector_size(8 * LANES)));

template <class V>
static inline V turned(const V& v, int n) {
  return v << n | v >> (8 * (int)sizeof(v[0]) - n);
}

// The next states of LANES streams, word by word.
static void permute(uint64_t* state) {
  L s[25], b[5];
  std::memcpy(s, state, sizeof s);
  for (int round = 0; round < 24; ++round) {
#pragma GCC unroll 5
    for (int x = 0; x < 5; ++x) b[x] = s[x] ^ s[x + 5] ^ s[x + 10] ^ s[x + 15] ^ s[x + 20];
#pragma GCC unroll 5
    for (int x = 0; x < 5; ++x) {
      const L d = b[(x + 4) % 5] ^ turned(b[(x + 1) % 5], 1);
#pragma GCC unroll 5
      for (int y = 0; y < 25; y += 5) s[x + y] ^= d;
    }
    L moved = s[1];
#pragma GCC unroll 24
    for (int t = 0; t < 24; ++t) {
      const L next = s[TO[t]];
      s[TO[t]] = turned(moved, (t + 1) * (t + 2) / 2 % 64);
      moved = next;
    }
#pragma GCC unroll 5
    for (int y = 0; y < 25; y += 5) {
#pragma GCC unroll 5
      for (int x = 0; x < 5; ++x) b[x] = s[x + y];
#pragma GCC unroll 5
      for (int x = 0; x < 5; ++x) s[x + y] = b[x] ^ (~b[(x + 1) % 5] & b[(x + 2) % 5]);
    }
    s[0] ^= ROUNDS[round];
  }
  std::memcpy(state, s, sizeof s);
}

// Of 2 LANES padded texts, all of so many blocks.
static void digest(const uint8_t* const* texts, uint64_t blocks, uint8_t* const* digests) {
  W h[8], w[16], v[8];
  for (int i = 0; i < 8; ++i) h[i] = W{} + START[i];
  for (uint64_t at = 0; at < 64 * blocks; at += 64) {
    for (int t = 0; t < 16; ++t)
      for (int lane = 0; lane < 2 * LANES; ++lane) {
        uint32_t word;
        std::memcpy(&word, texts[lane] + at + 4 * t, 4);
        w[t][lane] = __builtin_bswap32(word);
      }
    std::memcpy(v, h, sizeof h);
    for (int first = 0; first < 64; first += 16)
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        if (first) {
          const W x = w[(r + 1) % 16], y = w[(r + 14) % 16];
          w[r] += (turned(x, 25) ^ turned(x, 14) ^ x >> 3) + (turned(y, 15) ^ turned(y, 13) ^ y >> 10);
          w[r] += w[(r + 9) % 16];
        }
        const W a = v[(16 - r) % 8], b = v[(17 - r) % 8], c = v[(18 - r) % 8];
        const W e = v[(20 - r) % 8], f = v[(21 - r) % 8], g = v[(22 - r) % 8];
        const W sum = v[(23 - r) % 8] + (turned(e, 26) ^ turned(e, 21) ^ turned(e, 7)) + (g ^ (e & (f ^ g))) +
                      CONSTANTS[first + r] + w[r];
        v[(19 - r) % 8] += sum;
        v[(23 - r) % 8] = sum + (turned(a, 30) ^ turned(a, 19) ^ turned(a, 10)) + ((a & b) | (c & (a | b)));
      }
    for (int i = 0; i < 8; ++i) h[i] += v[i];
  }
  for (int lane = 0; lane < 2 * LANES; ++lane)
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = __builtin_bswap32(h[i][lane]);
      std::memcpy(digests[lane] + 4 * i, &word, 4);
    }
}
