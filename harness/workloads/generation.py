"""Decoding with sharded weights: workload ``generate``, and a phase of ``rlhf``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.records.trial_record import Token
from harness.workloads.models import KeysAndValues


def decode(
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    layers: int,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Decode ``tokens`` times after a prompt (B, T) int64, (B,) int64 each, in evaluation mode.

    ``choose`` makes tokens from the (B, vocab) logits of ``forward(tokens, None, past)``; by default the
    likeliest.  Each of the ``layers`` has a cache.
    """
    past = [KeysAndValues() for _ in range(layers)]
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(prompt, None, past)  # (B, vocab)
            chosen = logits.argmax(-1) if choose is None else choose(logits)
        yield chosen
        prompt = chosen[:, None]


Counts = tuple[float | None, int | None, int | None]  # seconds waited, bytes sent between and inside nodes
_SPENT: Final = ("exposed", "inter_bytes", "intra_bytes")  # the fields of a token with these counts


class Generator:
    """Times generations from one prompt token by token; ``count`` returns waits and bytes so far."""

    def __init__(
        self, prompt: Tensor, tokens: int, layers: int, count: Callable[[], Counts], device: torch.device
    ) -> None:
        self._prompt, self._tokens, self._layers = prompt, tokens, layers
        self._count, self._device = count, device
        self.measured: list[Token] = []
        self.sha256: list[str] = []  # of the tokens of each generation

    def run(self, model: nn.Module, *, index: int, warmup: bool) -> None:
        """Generate once; ``index`` counts from the first warm-up."""
        decoded: list[Tensor] = []
        before, start = self._count(), self._now()
        for place, chosen in enumerate(decode(model, self._prompt, self._tokens, self._layers)):
            seconds, after = self._now() - start, self._count()
            spent: dict[str, Any] = {
                name: None if now is None or then is None else now - then
                for name, now, then in zip(_SPENT, after, before, strict=True)
            }
            self.measured.append(Token(step=index, warmup=warmup, index=place, seconds=seconds, **spent))
            decoded.append(chosen)
            before, start = after, self._now()
        text = torch.stack(decoded, 1).cpu().numpy()  # (B, tokens)
        self.sha256.append(hashlib.sha256(text.tobytes()).hexdigest())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
