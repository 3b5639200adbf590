"""Sign compression, as of 1-bit Adam's gradients: a bit an element, and one magnitude a block.

The decoded block is sign(x) * mean(|x|), the nearest in the sense of least squares (1-bit Adam, 2102.02888,
section 4).  It promises neither a bound nor zeros: error feedback has to make up for what is lost.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

BLOCK = 256
_BITS = 2 ** torch.arange(8, dtype=torch.uint8)  # (8,) of the eight elements of a byte


class Signs:
    """Frame of S elements: S / 8 bytes of signs, then ceil(S / 256) fp32 magnitudes."""

    laws: ClassVar[list[str]] = []
    block = BLOCK

    def frame_bytes(self, numel: int) -> int:
        """Bytes of signs, and of magnitudes."""
        return -(-numel // BLOCK) * (BLOCK // 8 + 4)

    def encode(self, x: Tensor, frame: Tensor) -> None:
        """Write the frame (F,) uint8 of x (S,) fp32."""
        blocks = _blocks(x)  # (blocks, 256)
        sizes = torch.full((len(blocks),), BLOCK)
        sizes[-1] = x.numel() - BLOCK * (len(blocks) - 1)
        signs, magnitudes = frame[: -4 * len(blocks)], frame[-4 * len(blocks) :]
        bits = (blocks >= 0).view(-1, 8)  # (blocks * 32, 8)
        signs.copy_((bits * _BITS).sum(1, dtype=torch.uint8))
        magnitudes.copy_((blocks.abs().sum(1) / sizes).view(torch.uint8))

    def decode(self, frame: Tensor, out: Tensor) -> None:
        """Write the elements (S,) fp32 of a frame."""
        count = -(-out.numel() // BLOCK)
        signs, magnitudes = frame[: -4 * count], frame[-4 * count :].clone().view(torch.float32)
        bits = signs[:, None].bitwise_and(_BITS).ne(0)  # (count * 32, 8)
        values = torch.where(bits, 1.0, -1.0).view(count, BLOCK) * magnitudes[:, None]
        out.copy_(values.view(-1)[: out.numel()])


def _blocks(x: Tensor) -> Tensor:
    """(S,) as (blocks, 256), with zeros at the end."""
    count = -(-x.numel() // BLOCK)
    padded = x.new_zeros(count * BLOCK)
    padded[: x.numel()] = x
    return padded.view(count, BLOCK)
