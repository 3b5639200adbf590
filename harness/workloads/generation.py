"""Decodes tokens from a model, whose weights may be sharded, and times each token.

Workload ``generate`` measures the decoding.  Workload ``rlhf`` decodes in each step before it trains.
"""

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
    """Decode tokens for B prompts at once, and yield the B new tokens of each position: (B,) int64.

    Args:
        model: A model in evaluation mode.  It is called as ``model(tokens, None, past)`` and returns (B, vocab) logits.
        prompt: The prompts, (B, T) int64.
        tokens: Number of tokens to decode for each prompt.
        layers: Number of layers of the model; each layer gets a key-value cache.
        choose: Picks (B,) tokens from (B, vocab) logits.  None picks the token with the largest logit.
    """
    past = [KeysAndValues() for _ in range(layers)]
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(prompt, None, past)  # (B, vocab)
            chosen = logits.argmax(-1) if choose is None else choose(logits)
        yield chosen
        prompt = chosen[:, None]


# Seconds waited for messages so far, bytes sent between nodes, and bytes sent inside nodes.
Counts = tuple[float | None, int | None, int | None]
# The fields of Token for these counts, in the same order.  A field says how much the count grew during one token.
_SPENT: Final = ("exposed", "inter_bytes", "intra_bytes")


class Generator:
    """Continues one batch of prompts in each :meth:`run`, and records the seconds, waits and bytes of each token.

    Args:
        prompt: The prompts, (B, T) int64.
        tokens: Number of tokens to decode for each prompt.
        layers: Number of layers of the model.
        count: Returns the seconds that this rank has waited for messages, and the bytes that it has sent, so far
            (:data:`Counts`).  It is called before the first token and after each token.
        device: The device of the model.
    """

    def __init__(
        self, prompt: Tensor, tokens: int, layers: int, count: Callable[[], Counts], device: torch.device
    ) -> None:
        self._prompt, self._tokens, self._layers = prompt, tokens, layers
        self._count, self._device = count, device
        self.measured: list[Token] = []
        self.sha256: list[str] = []  # digest of each generation's tokens

    def run(self, model: nn.Module, *, index: int, warmup: bool) -> None:
        """Continue the prompts once, and append a record of each token to ``measured``.

        Args:
            model: The model, in evaluation mode.
            index: Number of this generation, from 0; warm-ups are counted too.
            warmup: Whether this generation is a warm-up.
        """
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
