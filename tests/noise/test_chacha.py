"""The cipher against published keystreams, and the layout of its state."""

import numpy as np
import pytest

from anyorder.noise import normals
from noise import oracle

# draft-strombergson-chacha-test-vectors-01: 256-bit keys, blocks 0 and 1 of the keystream.
ONE_BIT, ZERO = "01" + 31 * "00", 32 * "00"
RANDOM = "c46ec1b18ce8a878725a37e780dfb7351f68ed2e194c79fbc6aebee1a667975d"
KEYSTREAMS = [
    # TC1: key and nonce zero
    (ZERO, "00" * 8, 8, "3e00ef2f895f40d67f5bb8e81f09a5a12c840ec3ce9a7f3b181be188ef711a1e"
     "984ce172b9216f419f445367456d5619314a42a3da86b001387bfdb80e0cfe42"
     "d2aefa0deaa5c151bf0adb6c01f2a5adc0fd581259f9a2aadcf20f8fd566a26b"
     "5032ec38bbc5da98ee0c6f568b872a65a08abf251deb21bb4b56e5d8821e68aa"),
    (ZERO, "00" * 8, 12, "9bf49a6a0755f953811fce125f2683d50429c3bb49e074147e0089a52eae155f"
     "0564f879d27ae3c02ce82834acfa8c793a629f2ca0de6919610be82f411326be"
     "0bd58841203e74fe86fc71338ce0173dc628ebb719bdcbcc151585214cc089b4"
     "42258dcda14cf111c602b8971b8cc843e91e46ca905151c02744a6b017e69316"),
    (ZERO, "00" * 8, 20, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
     "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
     "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
     "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    # TC2: one bit of the key
    (ONE_BIT, "00" * 8, 8, "cf5ee9a0494aa9613e05d5ed725b804b12f4a465ee635acc3a311de8740489ea"
     "289d04f43c7518db56eb4433e498a1238cd8464d3763ddbb9222ee3bd8fae3c8"
     "b4355a7d93dd8867089ee643558b95754efa2bd1a8a1e2d75bcdb32015542638"
     "291941feb49965587c4fdfe219cf0ec132a6cd4dc067392e67982fe53278c0b4"),
    # TC3: one bit of the nonce
    (ZERO, "01" + "00" * 7, 8, "2b8f4bb3798306ca5130d47c4f8d4ed13aa0edccc1be6942090faeeca0d7599b"
     "7ff0fe616bb25aa0153ad6fdc88b954903c22426d478b97b22b8f9b1db00cf06"
     "470bdffbc488a8b7c701ebf4061d75c5969186497c95367809afa80bd843b040"
     "a79abc6e73a91757f1db73c8eacfa543b38f289d065ab2f3032d377b8c37fe46"),
    # TC8: a random key and nonce
    (RANDOM, "1ada31d5cf688221", 8, "838751b42d8ddd8a3d77f48825a2ba752cf4047cb308a5978ef274973be374c9"
     "6ad848065871417b08f034e681fe46a93f7d5c61d1306614d4aaf257a7cff08b"
     "16f2fda170cc18a4b58a2667ed962774af792a6e7f3c77992540711a7a136d7e"
     "8a2f8d3f93816709d45a3fa5f8ce72fde15be7b841acba3a2abd557228d9fe4f"),
    (RANDOM, "1ada31d5cf688221", 12, "1482072784bc6d06b4e73bdc118bc0103c7976786ca918e06986aa251f7e9cc1"
     "b2749a0a16ee83b4242d2e99b08d7c20092b80bc466c87283b61b1b39d0ffbab"
     "d94b116bc1ebdb329b9e4f620db695544a8e3d9b68473d0c975a46ad966ed631"
     "e42aff530ad5eac7d8047adfa1e5113c91f3e3b883f1d189ac1c8fe07ba5a42b"),
    (RANDOM, "1ada31d5cf688221", 20, "f63a89b75c2271f9368816542ba52f06ed49241792302b00b5e8f80ae9a473af"
     "c25b218f519af0fdd406362e8d69de7f54c604a6e00f353f110f771bdca8ab92"
     "e5fbc34e60a1d9a9db17345b0a402736853bf910b060bdf1f897b6290f01d138"
     "ae2c4c90225ba9ea14d518f55929dea098ca7a6ccfe61227053c84e49a4a3332"),
]  # fmt: skip


def _bytes(key: bytes, counters: list[int], nonce: int, rounds: int) -> bytes:
    words = np.frombuffer(key, "<u4").astype(np.uint32)
    blocks = normals.blocks(words, np.array(counters, dtype=np.uint64), nonce, rounds)
    return blocks.T.astype("<u4").tobytes()


@pytest.mark.parametrize(("key", "nonce", "rounds", "keystream"), KEYSTREAMS)
def test_published_keystreams(key, nonce, rounds, keystream):
    made = _bytes(bytes.fromhex(key), [0, 1], int.from_bytes(bytes.fromhex(nonce), "little"), rounds)
    assert made.hex() == keystream


def test_block_of_rfc_8439_section_2_3_2():
    """Its 32-bit counter 1 and 96-bit nonce are our counter and nonce, cut at another word."""
    nonce = bytes.fromhex("000000090000004a00000000")
    counter = 1 | int.from_bytes(nonce[:4], "little") << 32
    made = _bytes(bytes(range(32)), [counter], int.from_bytes(nonce[4:], "little"), 20)
    assert made.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_every_word_of_the_state_in_any_order_of_counters():
    key, nonce = bytes(range(100, 132)), 0x0123456789ABCDEF
    counters = [2**63 | 5, 0, 2**32 - 1, 2**32, 2**62 + 2**40, 7]
    made = np.frombuffer(_bytes(key, counters, nonce, 8), "<u4").reshape(-1, 16)
    for counter, words in zip(counters, made, strict=True):
        assert words.tolist() == oracle.block(key, counter, nonce, 8)
