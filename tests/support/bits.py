"""What the kernel ``sum_bits`` of ``impl/cuda/raw.cu`` computes, in plain Python."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from impl.codecs.rounding_noise import OCTET
from impl.cuda.kernels import SUMMED, THREADS

_FACTOR: Final = 0x9E3779B97F4A7C15
_WORDS: Final = 1 << 64


def summed(values: Tensor) -> Tensor:
    """Returns the sums of the bits of ``values`` (S,) fp32, one int64 for each thread."""
    bits = [bits % (1 << 32) for bits in values.cpu().view(torch.int32).tolist()]
    octets = [bits[start : start + OCTET] for start in range(0, len(bits), OCTET)]
    blocks = -(-len(octets) // (THREADS * SUMMED))
    sums = []
    for block in range(blocks):
        for thread in range(THREADS):
            warp, lane = thread // 32, thread % 32
            place = 32 * warp + lane // 2 + 16 * (lane % 2)  # of its octet among those of the thread block
            total = 0
            for turn in range(SUMMED):
                number = (block * SUMMED + turn) * THREADS + place
                for word in octets[number] if number < len(octets) else ():
                    total = (total * _FACTOR + word) % _WORDS
            sums.append(total - _WORDS if total >= _WORDS // 2 else total)
    return torch.tensor(sums, dtype=torch.int64)
