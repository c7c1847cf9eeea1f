"""Addressable Gaussian noise: Z[row, element] is a pure function of a key, a row and an element.

The layout is final: every implementation gives the same bits as the reference here (`normals`).

**Keystream.** ChaCha with 8, 12 or 20 rounds, 256-bit key, 64-bit block counter, 64-bit nonce: the 16 words of the
state are the four constants, the key (little-endian), counter low, counter high, nonce low, nonce high. The nonce is
the row, 0 <= row < 2^63. Elements run over 0 <= element < 2^62, sixteen to a block:

    counter = element div 16            normals
              element div 16 + 2^62     raw words: word (element mod 16) of the block is the result
              element div 16 + 2^63     extension of the block of normals, rarely needed (below)

The counters differ, so the three never share a block under one key, and words drawn for sampling or shuffling say
nothing of the noise. Keys that must not be related come from `NoiseSource.derive`.

**Transform.** Words w[0..15] of a block give normals z[0..15]: for j = 0..7

    z[j] = r[j] * cos_[j],   z[8 + j] = r[j] * sin_[j];   r from w[j], the angle from w[8 + j].

Everything below is IEEE float32, round to nearest, each product and sum rounded by itself: no fused multiply-add, no
division. int32 and uint32 wrap. float(.) rounds an integer once; bits(.) reinterprets. No value is subnormal, so
flushing to zero changes nothing. A polynomial [c0, .., cm] at x is ((cm * x + c(m-1)) * x + ..) * x + c0; the
coefficients stand in `normals`.

Radius, r = sqrt(-2 ln u), u in (0, 1):

    v = float(uint32 w)                                       u = v / 2^32
    if w < 2^16:  x = words of the extension block
        v = max(float(w) + (float(x[2j]) + float(x[2j+1]) * 2^-32) * 2^-32, 2^-64)
    k = bits(v) - 0x4F3504F3                                  int32; 0x4F3504F3 is sqrt(1/2) * 2^32
    e = k >> 23  (arithmetic),  f = float_of_bits((k & 0x7FFFFF) + 0x3F3504F3) - 1
    if k >= 0:  f = float(int32 w) * 2^-32                    u - 1, without the rounding of v
    p = LOG polynomial at f,  q = f * f,  E = float(e)
    y = ((((p * f) * q + E * TWO_LN2_LOW) + q) + f * -2) + E * TWO_LN2_HIGH
    r = sqrt(y)

So u has 32 bits, and 96 where it is below 2^-16; |z| reaches 11.53, where 24 bits would end at 5.77 and 32 at 6.66.

Angle, (pi / 2) (h + l / 2^30) for the word a: h its two top bits, l the other 30 as a signed number, so that every
multiple of a turn / 2^32 has one word:

    y = float(int32 (a << 2)) * 2^-31                         in [-1, 1)
    s = (SIN polynomial at y * y) * y,  c = COS polynomial at y * y
    if a & 2^30: swap s and c                                 then c is the cosine part, s the sine part
    cos_ = c with its sign bit flipped by bit 31 of a ^ (a << 1);  sin_ = s with its sign bit flipped by bit 31 of a
"""

from anyorder.noise.stream import NoiseSource, NoiseStream

__all__ = ["NoiseSource", "NoiseStream"]
