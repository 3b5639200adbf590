"""The random bits of stochastic rounding in plain integers: the oracle of all versions."""

from __future__ import annotations

from impl.codecs.rounding_noise import BITS, MULTIPLIERS, OCTET, ROUNDS, WEYL, Noise, Words


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 as its authors give it."""
    mask = 0xFFFFFFFF
    (a, b, c, d), (left, right) = counter, key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second >> 32) ^ b ^ left, second & mask, (first >> 32) ^ d ^ right, first & mask
        left, right = (left + WEYL[0]) & mask, (right + WEYL[1]) & mask
    return a, b, c, d


def bits_of(noise: Noise, element: int) -> int:
    """The 16 random bits of one element, by its number in the unit."""
    octet, lane = divmod(element, OCTET)
    counter = (octet & 0xFFFFFFFF, octet >> 32, noise.philox[0], noise.philox[1])
    word = philox(counter, (noise.philox[2], noise.philox[3]))[lane // 2]
    return word >> BITS * (lane % 2) & 0xFFFF
