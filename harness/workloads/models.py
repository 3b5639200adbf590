"""Builds the model of a trial: a preset of GPT, BERT or ViT by name, or a user's own ``module:function``.

``forward(inputs, targets)`` of a model returns the mean cross-entropy in nats.  For text, inputs and targets are
(B, T) int64 tokens.  The repeated blocks of a model are in a ``ModuleList``; strategies shard each block as a unit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.errors import Refusal
from harness.suites.model_sizes import IMAGE_CLASSES, IMAGE_SIDE, BERTShape, GPTShape, Shape, ViTShape
from harness.suites.trial import Model, Trial
from harness.workloads.masked_text import NO_TARGET
from harness.workloads.preset_parameters import patch_of, shape_of
from impl.named_object import NamedObjectError, import_object
from impl.zero import find_blocks

_INIT_STD: Final = 0.02
_FILLS: Final = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


@dataclass(slots=True)
class KeysAndValues:
    """Key-value cache of one attention layer."""

    # (2, B, heads, cached tokens, width / heads): keys, then values; None if empty.
    held: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return 0 if self.held is None else self.held.shape[3]

    def append(self, latest: Tensor) -> Tensor:
        """Append the keys and values of the next tokens, and return the keys and values of all tokens in the cache.

        ``latest`` and the result are (2, B, heads, tokens, width / heads): keys at index 0, and values at index 1.
        """
        self.held = latest if self.held is None else torch.cat([self.held, latest], 3)
        return self.held


class Attention(nn.Module):
    """Multi-head self-attention.  With ``causal``, a token attends only to itself and to earlier tokens."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, past: KeysAndValues | None = None) -> Tensor:
        """Map (B, T, width) to (B, T, width).

        With a cache ``past``, ``x`` holds only the tokens that follow the cached tokens.  If the cache is empty, ``x``
        may hold several tokens; otherwise it must hold one token.
        """
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, *both = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, width / heads) each
        key, value = both if past is None else past.append(torch.stack(both))
        causal = self.causal and length > 1  # a single token is the latest, and attends to all
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, past: KeysAndValues | None = None) -> Tensor:
        """Map (B, T, width) to (B, T, width); ``past`` is the attention's cache (:meth:`Attention.forward`)."""
        x = x + self.attention(self.attention_norm(x), past)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    """The parts that GPT, BERT and ViT share: an embedding with learned positions, blocks, a norm and a head."""

    def __init__(
        self, shape: Shape, embedding: nn.Embedding | nn.Linear, places: int, outputs: int, *, causal: bool
    ) -> None:
        super().__init__()
        self.embedding, self.positions = embedding, nn.Embedding(places, shape.width)
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.heads, causal=causal) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, outputs, bias=False)
        for name, parameter in self.named_parameters():  # GPT-2's initialisation
            if parameter.dim() == 2:
                onto_residual = name.endswith(("out.weight", "down.weight"))
                std = _INIT_STD / math.sqrt(2 * shape.layers) if onto_residual else _INIT_STD
                nn.init.normal_(parameter, std=std)

    def through_blocks(self, x: Tensor, past: Sequence[KeysAndValues] | None = None) -> Tensor:
        """Add positions to embeddings ``x``, pass them through all blocks, and return the result.

        ``x`` and the result are (B, T, width).  If ``past`` is given, with a cache for each block, the positions of the
        tokens continue after the cached tokens.
        """
        start = past[0].length if past is not None else 0
        x = x + self.positions(torch.arange(start, start + x.shape[1], device=x.device))
        for index, block in enumerate(self.blocks):
            x = block(x, None if past is None else past[index])
        return x


class GPT(_Transformer):
    """A GPT: a decoder-only transformer with learned positions, for sequences of at most ``sequence`` tokens."""

    causal = True

    def __init__(self, shape: GPTShape | BERTShape, sequence: int) -> None:
        inputs = shape.vocab if self.causal else shape.vocab + 1  # BERT also reads the mask, the last token
        embedding = nn.Embedding(inputs, shape.width)
        super().__init__(shape, embedding, sequence, shape.vocab, causal=self.causal)
        if isinstance(shape, GPTShape) and shape.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None, past: Sequence[KeysAndValues] | None = None
    ) -> Tensor:
        """Return the mean cross-entropy in nats or, if there are no targets, logits.

        Args:
            tokens: (B, T) int64.  With ``past``, only the tokens that are not in the caches yet.  If the caches are not
                empty, T must be 1.
            targets: (B, T) int64; ``NO_TARGET`` is ignored.  With None, the method returns the (B, vocab) logits of the
                token that follows the last token.
            past: A cache for each block.
        """
        x = self.through_blocks(self.embedding(tokens), past)
        if targets is None:
            return self.head(self.norm(x[:, -1]))  # type: ignore[no-any-return]
        # (B, T, vocab) in fp32: a loss of bf16 would have steps of 1/32.
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)

    def log_probabilities(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the logarithm of the probability that the model gives to each target: (B, T) fp32.

        Args:
            tokens: (B, T) int64 tokens that the model reads.
            targets: (B, T) int64.  The result is 0 where a target is ``NO_TARGET``.
        """
        logits = self.head(self.norm(self.through_blocks(self.embedding(tokens)))).float()  # (B, T, vocab)
        nats = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="none"
        )
        return -nats.view_as(targets)


class BERT(GPT):
    """A BERT: like a GPT, but each token attends to all tokens.  It is trained to predict masked tokens."""

    causal = False


class ViT(_Transformer):
    """A vision transformer with learned positions and mean pooling.  Patches have ``patch`` x ``patch`` pixels."""

    def __init__(self, shape: ViTShape, patch: int) -> None:
        embedding = nn.Linear(patch * patch, shape.width, bias=False)
        super().__init__(shape, embedding, (IMAGE_SIDE // patch) ** 2, IMAGE_CLASSES, causal=False)
        self.patch = patch
        # Embeddings of pixels from 0 to 1 would otherwise be small compared with the positions.
        nn.init.normal_(self.embedding.weight, std=1 / patch)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats.

        Args:
            images: (B, 32, 32), grey levels from 0 to 1.
            labels: (B,) int64, the class of each image.
        """
        rows = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        patches = rows.flatten(3).flatten(1, 2)  # (B, patches, pixels of a patch)
        x = self.through_blocks(self.embedding(patches.to(self.embedding.weight.dtype)))
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels)  # of (B, classes)


def under_autocast(model: nn.Module, device: torch.device) -> None:
    """Make ``model`` compute in bf16 with autocast.  Its parameters and their gradients stay in fp32."""
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)


def build(model: Model, sequence: int) -> nn.Module:
    """Build a model on torch's default device, with weights drawn from torch's generator.

    Args:
        model: Name and arguments.
        sequence: Number of tokens of the longest sequence.  For images, the number of patches of an image.

    Raises:
        Refusal: if there is no such model, if the arguments of a preset are invalid, or if a user's function returns no
            module.
    """
    if ":" in model.name:
        try:
            function: Any = import_object(model.name)
        except NamedObjectError as error:
            raise Refusal(f"model {error}") from error
        built = function(sequence=sequence, **model.arguments)
        if not isinstance(built, nn.Module):
            raise Refusal(f"model {model.name!r} returned {type(built).__name__}; expected an nn.Module")
        return built
    shape = shape_of(model)
    if not isinstance(shape, ViTShape):
        return (GPT if isinstance(shape, GPTShape) else BERT)(shape, sequence)
    return ViT(shape, patch_of(model, sequence))


def of_trial(trial: Trial) -> nn.Module:
    """Build a trial's model with :func:`build`, with activation checkpointing if the trial asks for it."""
    model = build(trial.model, trial.sequence)
    if trial.activation_checkpointing:
        checkpoint_activations(model)
    return model


def with_values(trial: Trial, values: Mapping[str, Tensor]) -> nn.Module:
    """Build a trial's model, which must be a preset, with the tensors ``values`` as its parameters.

    The tensors are not copied, and no values are drawn at random.  ``values`` has one tensor for each parameter, by the
    parameter's name.  A tied parameter has several names; ``values`` needs only one of these names, and the parameter
    stays tied.
    """
    with unfilled():
        model = of_trial(trial)
    named = [*model.named_parameters(remove_duplicate=False)]
    made = {
        empty: nn.Parameter(values[name], requires_grad=empty.requires_grad)
        for name, empty in named
        if name in values
    }
    for name, empty in named:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, made[empty])
    return model


def checkpoint_activations(model: nn.Module) -> None:
    """Make each block of ``model`` keep only its inputs in the forward pass, and run again in the backward pass.

    Raises:
        Refusal: if the model has no blocks.
    """
    check_blocks(model)
    for block in find_blocks(model):
        block.__class__ = _checkpointed(type(block))  # type: ignore[arg-type]  # mypy: classes are hashable


def check_blocks(model: nn.Module) -> None:
    """Raise a Refusal if a model has no blocks whose activations could be checkpointed."""
    if not find_blocks(model):
        raise Refusal(
            "activation_checkpointing needs blocks in a ModuleList or Sequential, and the model has none: set "
            "activation_checkpointing = false, or put the model's blocks into a ModuleList"
        )


@cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a block's class, with the same name, whose forward pass is checkpointed."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which ``normal_`` and ``uniform_`` on meta tensors do nothing.

    Meta tensors have no values to initialise.  Without this mode, torch would import its compiler for these operations,
    which takes 4 s.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if this is True, torch wraps the method, and the wrapper imports the compiler too

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FILLS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """Let a ``with`` block create its tensors and modules on the meta device, without initialising them."""
    with torch.device("meta"), _Unfilled():  # type: ignore[no-untyped-call]
        yield
