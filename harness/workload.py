"""The models that are trained: byte-level GPTs by name, or any ``module:function`` of the user's.

A model is a module whose ``forward(tokens, targets)`` returns the mean cross-entropy in nats, for
``tokens`` and ``targets`` of (sequences, T) int64.  Its repeated blocks stand in a
``ModuleList``, which is how strategies find what to shard together.  Presets have no biases, so
that next to nothing of a unit is padding.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.flops import PRESETS, GPTShape
from harness.inputs import see_working_folder
from harness.rank import Refusal
from harness.suite import Model, suggestion

_INIT_STD: Final = 0.02


class WorkloadError(Refusal):
    """A model cannot be built as asked; the message names it and what is allowed."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, width / heads) each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder with learned positions.

    Args:
        shape: its sizes.
        sequence: the longest sequence, T.
    """

    def __init__(self, shape: GPTShape, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                onto_residual = name.endswith(("out.weight", "down.weight"))
                std = _INIT_STD / math.sqrt(2 * shape.layers) if onto_residual else _INIT_STD
                nn.init.normal_(parameter, std=std)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of (B, T) tokens against (B, T) targets."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, vocab)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(model: Model, sequence: int) -> nn.Module:
    """Build a model on the current default device; its weights follow from torch's seed.

    Args:
        model: a preset with changed sizes, or ``module:function``, which is called with
            ``sequence`` and the arguments.
        sequence: tokens of a sequence.

    Raises:
        WorkloadError: unknown name, unknown argument, sizes that do not fit, or a function that
            returns something else than a module.
    """
    if ":" in model.name:
        built = _user_function(model.name)(sequence=sequence, **model.arguments)
        if not isinstance(built, nn.Module):
            raise WorkloadError(f"model {model.name!r} returned {type(built).__name__}, not an nn.Module")
        return built
    return GPT(shape_of(model), sequence)


def shape_of(model: Model) -> GPTShape:
    """Sizes of a preset with the model's changes.

    Raises:
        WorkloadError: see :func:`build`.
    """
    if model.name not in PRESETS:
        raise WorkloadError(
            f"model {model.name!r}: expected one of {', '.join(PRESETS)} or 'module:function'"
            f"{suggestion(model.name, PRESETS)}"
        )
    known = {field.name: field.type for field in fields(GPTShape)}
    for name, value in model.arguments.items():
        if name not in known:
            raise WorkloadError(
                f"model {model.name!r}: unknown argument {name!r}, expected one of {', '.join(known)}"
                f"{suggestion(name, known)}"
            )
        if type(value).__name__ != known[name] or (type(value) is int and value < 1):
            wanted = "true or false" if known[name] == "bool" else "a whole number of at least 1"
            raise WorkloadError(f"model {model.name!r}: {name} = {value!r}, expected {wanted}")
    changed: dict[str, Any] = asdict(PRESETS[model.name]) | dict(model.arguments)
    shape = GPTShape(**changed)
    if shape.width % shape.heads:
        raise WorkloadError(
            f"model {model.name!r}: {shape.heads} heads do not divide a width of {shape.width}"
        )
    return shape


def _user_function(name: str) -> Callable[..., object]:
    """The function behind ``module:function``; modules of the working folder count."""
    module_name, _, function_name = name.partition(":")
    see_working_folder()
    try:
        function: Callable[..., object] | None = getattr(
            importlib.import_module(module_name), function_name, None
        )
    except ImportError as error:
        raise WorkloadError(f"model {name!r}: cannot import {module_name!r}: {error}") from error
    if function is None or not callable(function):
        raise WorkloadError(f"model {name!r}: {module_name} has no function {function_name!r}")
    if "sequence" not in inspect.signature(function).parameters:
        raise WorkloadError(f"model {name!r}: the function has no parameter 'sequence'")
    return function
