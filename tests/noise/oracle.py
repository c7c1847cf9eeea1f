"""Noise by the plainest means: one block at a time, Python integers, the formula in float64."""

import math
import struct

MASK = 0xFFFFFFFF


def block(key: bytes, counter: int, nonce: int, rounds: int) -> list[int]:
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key)]
    start += [counter & MASK, counter >> 32, nonce & MASK, nonce >> 32]
    x = list(start)

    def quarter(a, b, c, d):
        for i, j, k, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = (x[i] + x[j]) & MASK
            mixed = x[k] ^ x[i]
            x[k] = (mixed << turn | mixed >> (32 - turn)) & MASK

    for _ in range(rounds // 2):
        quarter(0, 4, 8, 12), quarter(1, 5, 9, 13), quarter(2, 6, 10, 14), quarter(3, 7, 11, 15)
        quarter(0, 5, 10, 15), quarter(1, 6, 11, 12), quarter(2, 7, 8, 13), quarter(3, 4, 9, 14)
    return [(a + b) & MASK for a, b in zip(x, start, strict=True)]


def normal(key: bytes, rounds: int, row: int, element: int) -> float:
    counter, position = divmod(element, 16)
    words, j = block(key, counter, row, rounds), position % 8
    w = words[j] << 64
    if words[j] < 1 << 16:
        more = block(key, counter | 1 << 63, row, rounds)
        w = max(w + (more[2 * j] << 32) + more[2 * j + 1], 1)
    radius = math.sqrt(-2 * math.log1p((w - (1 << 96)) / 2**96) if w >> 95 else -2 * math.log(w / 2**96))
    high, low = divmod(words[8 + j], 2**30)
    angle = math.pi / 2 * (high + (low - 2**30 * (low >= 2**29)) / 2**30)
    return radius * (math.cos(angle) if position < 8 else math.sin(angle))
