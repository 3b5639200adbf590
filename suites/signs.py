"""A codec that keeps only signs, as 1-bit Adam does with gradients: one bit per element, and one magnitude per block.

A decoded block is sign(x) * mean(|x|), the closest of its kind by least squares (1-bit Adam, arXiv 2102.02888,
section 4).  The codec promises neither an error bound nor exact zeros; error feedback has to make up for the loss.
It is also an example of a codec of your own (docs/reference/codecs.md).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

BLOCK = 256
_BITS = 2 ** torch.arange(8, dtype=torch.uint8)  # (8,): the bit of each of a byte's eight elements


class Signs:
    """The codec; a frame of S elements has 32 bytes of signs for each of ceil(S / 256) blocks, then fp32 magnitudes."""

    laws: ClassVar[list[str]] = []
    block = BLOCK

    def frame_bytes(self, numel: int) -> int:
        """Return the bytes of a frame of ``numel`` elements."""
        return -(-numel // BLOCK) * (BLOCK // 8 + 4)

    def encode(self, x: Tensor, frame: Tensor) -> None:
        """Encode x, (S,) fp32, into frame, (F,) uint8."""
        blocks = _blocks(x)  # (blocks, 256)
        sizes = torch.full((len(blocks),), BLOCK)
        sizes[-1] = x.numel() - BLOCK * (len(blocks) - 1)
        signs, magnitudes = frame[: -4 * len(blocks)], frame[-4 * len(blocks) :]
        bits = (blocks >= 0).view(-1, 8)  # (blocks * 32, 8)
        signs.copy_((bits * _BITS).sum(1, dtype=torch.uint8))
        magnitudes.copy_((blocks.abs().sum(1) / sizes).view(torch.uint8))

    def decode(self, frame: Tensor, out: Tensor) -> None:
        """Decode a frame, (F,) uint8, into out, (S,) fp32."""
        count = -(-out.numel() // BLOCK)
        signs, magnitudes = frame[: -4 * count], frame[-4 * count :].clone().view(torch.float32)
        bits = signs[:, None].bitwise_and(_BITS).ne(0)  # (count * 32, 8)
        values = torch.where(bits, 1.0, -1.0).view(count, BLOCK) * magnitudes[:, None]
        out.copy_(values.view(-1)[: out.numel()])


def _blocks(x: Tensor) -> Tensor:
    """Cut x, (S,), into blocks, (blocks, 256), with zeros at the end."""
    count = -(-x.numel() // BLOCK)
    padded = x.new_zeros(count * BLOCK)
    padded[: x.numel()] = x
    return padded.view(count, BLOCK)
