"""Decoding with sharded weights: workload ``generate``, and a phase of ``rlhf``.

Workload ``generate`` takes the likeliest token each time, so that the output depends on weights and prompt
alone.  Each rank caches keys and values of its sequences; every token after the first is one forward pass
over one position, which still needs all weights.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from harness.records.record import Token
from harness.workloads.models import KeysAndValues

Number = TypeVar("Number", int, float)


def likeliest(logits: Tensor) -> Tensor:
    """(B,) int64 of (B, vocab)."""
    return logits.argmax(-1)


def decode(
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    layers: int,
    choose: Callable[[Tensor], Tensor] = likeliest,
) -> Iterator[Tensor]:
    """Decode ``tokens`` times after a prompt (B, T) int64, (B,) int64 each; the caller has set evaluation
    mode.

    The model's ``forward(tokens, None, past)`` gives (B, vocab) logits, as
    ``harness.workloads.models.GPT``'s, of which ``choose`` makes tokens; each of its ``layers`` has a cache
    of keys and values.
    """
    past = [KeysAndValues(prompt.shape[1] + tokens) for _ in range(layers)]
    given = prompt
    for _ in range(tokens):
        with torch.no_grad():
            chosen = choose(model(given, None, past))
        yield chosen
        given = chosen[:, None]


@dataclass(slots=True)
class Counted:
    """Seconds that a rank has waited, and bytes it has sent, so far; None if not known."""

    exposed: float | None
    inter: int | None
    intra: int | None


class Generator:
    """Runs generations, each from the same prompt, and times them token by token.

    ``count`` returns what this rank has waited and sent so far.
    """

    def __init__(
        self, prompt: Tensor, tokens: int, layers: int, count: Callable[[], Counted], device: torch.device
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
            self.measured.append(
                Token(
                    step=index,
                    warmup=warmup,
                    index=place,
                    seconds=seconds,
                    exposed=_less(after.exposed, before.exposed),
                    inter_bytes=_less(after.inter, before.inter),
                    intra_bytes=_less(after.intra, before.intra),
                )
            )
            decoded.append(chosen)
            before, start = after, self._now()
        text = torch.stack(decoded, 1).cpu().numpy()  # (B, tokens)
        self.sha256.append(hashlib.sha256(text.tobytes()).hexdigest())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _less(after: Number | None, before: Number | None) -> Number | None:
    return None if after is None or before is None else after - before
