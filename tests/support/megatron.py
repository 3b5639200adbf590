"""A language model built as Megatron-LM's: with the three uses of parameters outside of their modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from impl.parameters.external import register_external_parameter


class ParallelLinear(nn.Module):
    """Multiplies, and hands its bias back instead of adding it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.weight), self.bias


class ParallelMLP(nn.Module):
    """Adds the first bias itself, twice over; hands the second one back."""

    def __init__(self, width: int, *, registered: bool) -> None:
        super().__init__()
        self.dense_h_to_4h = ParallelLinear(width, 4 * width)
        self.dense_4h_to_h = ParallelLinear(4 * width, width)
        if registered:
            register_external_parameter(self, self.dense_h_to_4h.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, bias = self.dense_h_to_4h(x)
        return self.dense_4h_to_h(F.gelu(hidden + bias) + bias)


class ParallelTransformerLayer(nn.Module):
    """Adds the two biases that its parts hand back."""

    def __init__(self, width: int, *, registered: bool) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dense = ParallelLinear(width, width)  # in the place of attention
        self.mlp = ParallelMLP(width, registered=registered)
        if registered:
            register_external_parameter(self, self.dense.bias)
            register_external_parameter(self, self.mlp.dense_4h_to_h.bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed, bias = self.dense(self.input_norm(x))
        x = x + mixed + bias
        out, mlp_bias = self.mlp(self.post_norm(x))
        return x + out + mlp_bias


class OwnLinear(torch.autograd.Function):
    """x W^T with a backward pass of its own, as Megatron's linear layers are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


# How logits are made of (batch, tokens, width) and the word embedding.
LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "function": OwnLinear.apply,
    "checkpoint": partial(checkpoint, F.linear, use_reentrant=False),
    "reentrant checkpoint": partial(checkpoint, F.linear, use_reentrant=True),
}


class GPT2Model(nn.Module):
    """Uses the word embedding a second time, for the logits."""

    def __init__(
        self,
        vocabulary: int = 24,
        width: int = 16,
        depth: int = 2,
        *,
        registered: bool = False,
        logits: str = "linear",
    ) -> None:
        super().__init__()
        self.logits = logits
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            ParallelTransformerLayer(width, registered=registered) for _ in range(depth)
        )
        if registered:
            register_external_parameter(self, self.word_embeddings.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) to the loss of predicting each from those before."""
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = LOGITS[self.logits](x, self.word_embeddings.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


UNITS = (nn.Embedding, ParallelLinear)  # the smallest units: every use is then of another unit
