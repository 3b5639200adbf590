"""Decoding with sharded weights: workload ``generate``, and a phase of ``rlhf``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from harness.records.record import Token
from harness.workloads.models import KeysAndValues


def decode(
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    layers: int,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Decode ``tokens`` times after a prompt (B, T) int64, (B,) int64 each, in evaluation mode.

    ``forward(tokens, None, past)`` gives (B, vocab) logits, of which ``choose`` makes tokens, else the
    likeliest; each of the ``layers`` has a cache.
    """
    past = [KeysAndValues() for _ in range(layers)]
    given = prompt
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(given, None, past)  # (B, vocab)
            chosen = logits.argmax(-1) if choose is None else choose(logits)
        yield chosen
        given = chosen[:, None]


Counts = tuple[float | None, int | None, int | None]  # seconds waited, bytes sent between and inside nodes


class Generator:
    """Times generations from one prompt token by token; ``count`` returns what was waited and sent so far."""

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
            exposed, inter, intra = (
                None if now is None or then is None else now - then
                for now, then in zip(after, before, strict=True)
            )
            self.measured.append(
                Token(
                    step=index,
                    warmup=warmup,
                    index=place,
                    seconds=seconds,
                    exposed=exposed,
                    inter_bytes=None if inter is None else int(inter),
                    intra_bytes=None if intra is None else int(intra),
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
