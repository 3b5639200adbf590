"""Codecs as users write them: what docs/reference/codecs.md asks for, and no more."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from impl.codecs.codec import parse
from impl.codecs.reference import REFERENCE


class Claims:
    """Does what a codec of ours does, by the reference, and says so."""

    codec = "int8:64"
    kinds: ClassVar = ["fp32", "bf16", "fp16"]

    def encode(self, x: Tensor, frame: Tensor) -> None:
        REFERENCE.encode(parse(self.codec), x, frame)

    def decode(self, frame: Tensor, out: Tensor) -> None:
        REFERENCE.decode(parse(self.codec), frame, out)


class Claims4(Claims):
    """The same, of gradients."""

    codec = "int4:32"

    def decode_sum(self, frames: Tensor, out: Tensor) -> None:
        REFERENCE.decode_sum(parse(self.codec), frames, out)


class Sixteenths:
    """Elements in fp32 rounded to a sixteenth, in int8, saturated at +-7.9375; frames of any length."""

    laws: ClassVar = ["zero", "sign", "idempotent"]
    block = 1

    def frame_bytes(self, numel: int) -> int:
        return numel

    def encode(self, x: Tensor, frame: Tensor) -> None:
        frame.view(torch.int8).copy_((x * 16).round().clamp(-127, 127))

    def decode(self, frame: Tensor, out: Tensor) -> None:
        out.copy_(frame.view(torch.int8) / 16)


class OnGpu(Sixteenths):
    device = "cuda"
