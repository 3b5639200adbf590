"""Keeps a sharded model's persistent buffers equal on all ranks.

[Note: writing buffers]
Before a forward pass the engine may have to write buffers of which the graph of an earlier pass keeps views:
two passes come before one backward pass, as in preference training, or with a GAN's discriminator.  Values
that are equal on all ranks, as tables of rotary embeddings, are not written at all.  Others are written in
place, so that users' references and views, and captured graphs of a GPU, go on seeing the buffer.  Before
that, graphs are given copies of what they keep of it (:meth:`~impl.engine.outside_uses.SavedTensors.spare`),
since they need the values that their pass used.  Writing past torch's version counters instead would leave
them the new values, and so wrong gradients without an error.  What is saved outside of passes the engine does
not see: there torch's own check raises in backward.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from impl.comm.wire import Wire
from impl.engine.outside_uses import SavedTensors, memory_of
from impl.errors import ZeroError
from impl.plan.topology import ranks_in_words

_AVERAGED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CHANGED: Final = 1  # last byte of a rank's message whose buffers have not the kinds that were agreed on
_WAY_OUT: Final = "or register it with persistent=False, so that each rank has its own"


class ModuleBuffers:
    """The persistent buffers (running means, counters) of one model, which each rank's passes change.

    All ranks take the mean of floating-point buffers of 16 to 64 bits, and rank 0's values of others (DDP: of
    all).  Shapes and types were compared by ``shard()``, and are compared again when they change on a rank.
    """

    def __init__(self, model: nn.Module, wire: Wire, saved: SavedTensors) -> None:
        self._model, self._wire, self._saved = model, wire, saved
        self._agree_on(persistent(model))
        self.differ = True  # whether a training pass may have changed them; at first unknown
        # Whether there are some, or names of some without values yet, or modules that came after shard().
        self.possible = any(
            part._buffers.keys() - part._non_persistent_buffers_set  # noqa: SLF001
            for part in model.modules()
        )

    def _agree_on(self, buffers: Mapping[str, Tensor]) -> None:
        """From here on messages have place for such ``buffers``."""
        self._kinds = _kinds(buffers)
        # Of a rank's message, whose last byte may be _CHANGED; 0 without buffers: then there is no message.
        self.nbytes = sum(buffer.nbytes for buffer in buffers.values()) + 1 if buffers else 0

    @staticmethod
    def changed_by(module: nn.Module) -> bool:
        """Whether a pass of ``module`` may change some, as running means, without recording gradients."""
        return any(part.training and part._buffers for part in module.modules())  # noqa: SLF001

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context that restores all buffers, also those that are not persistent."""
        differ, kept = self.differ, [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        held = [(part, dict(part._buffers)) for part in self._model.modules()]  # noqa: SLF001
        try:
            yield
        finally:
            self.differ = differ
            for part, buffers in held:
                part._buffers.update(buffers)  # noqa: SLF001  # where others were assigned
            for buffer, values in kept:
                write(buffer, values)

    @torch.no_grad()
    def make_equal(self) -> None:
        """Make them equal if a pass may have changed them; all ranks must call it.

        Raises ZeroError: on all ranks, for a buffer whose shape or type differs between ranks.
        """
        if not self.differ:
            return
        buffers = persistent(self._model)
        if not buffers and not self.nbytes:
            return
        if (rows := self._gathered(buffers)) is None:
            self._compare(buffers)
            self._agree_on(buffers)
            if (rows := self._gathered(buffers)) is None:  # there are none any more
                return
        self.differ = False
        sizes = [buffer.nbytes for buffer in buffers.values()]
        parts = dict(zip(buffers, torch.split(rows[:, :-1], sizes, dim=1), strict=True))  # (ranks, bytes)
        # One transfer for all buffers, since the host waits for it.
        differ = torch.stack([(part != part[:1]).any() for part in parts.values()]).tolist()
        names = [name for name, differs in zip(parts, differ, strict=True) if differs]
        if not names:
            return
        self._saved.spare({memory_of(buffers[name]) for name in names})  # see [Note: writing buffers]
        for name in names:
            buffer = buffers[name]
            values = parts[name].clone(memory_format=torch.contiguous_format).view(buffer.dtype)
            if buffer.dtype in _AVERAGED:
                values = values.double().mean(0, keepdim=True)
            values = values[0].view(buffer.shape)
            if buffer.grad_fn is not None or buffer.is_inference():
                self._replace(buffer, values)
            else:
                write(buffer, values)

    def _gathered(self, buffers: Mapping[str, Tensor]) -> Tensor | None:
        """(ranks, bytes) of ``buffers`` on all ranks; None if on any of them these are not as agreed on."""
        if not self.nbytes:  # the first ones came after shard(), to all ranks
            return None
        device = self._wire.mesh.device
        if _kinds(buffers) == self._kinds:
            flat = [buffer.resolve_conj().resolve_neg().contiguous().view(-1) for buffer in buffers.values()]
            end = torch.zeros(1, dtype=torch.uint8, device=device)
            local = torch.cat([*(values.view(torch.uint8).to(device) for values in flat), end])
        else:
            local = torch.full((self.nbytes,), _CHANGED, dtype=torch.uint8, device=device)
        rows = self._wire.all_gather_small(local, "buffers")
        return None if (rows[:, -1] == _CHANGED).any() else rows

    def _compare(self, buffers: Mapping[str, Tensor]) -> None:
        """Refuse, on all ranks, buffers whose kinds differ between ranks, or are none to make equal."""
        device = self._wire.mesh.device
        text = json.dumps(in_words(buffers)).encode()
        lengths = self._wire.all_gather_small(torch.tensor([len(text)], device=device), "buffers")
        text = text.ljust(int(lengths.max()))
        row = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        texts = self._wire.all_gather_small(row, "buffers").cpu()
        if error := difference([json.loads(bytes(text.tolist())) for text in texts]):
            raise ZeroError(error)
        check(buffers)

    def _replace(self, buffer: Tensor, values: Tensor) -> None:
        """Hold ``values`` in place of a pass's result, which cannot be written."""
        with torch.inference_mode(mode=False), torch.no_grad():
            new = torch.empty_like(buffer, requires_grad=False).copy_(values)
        for part in self._model.modules():
            for name, held in part._buffers.items():  # noqa: SLF001
                if held is buffer:
                    part._buffers[name] = new  # noqa: SLF001


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers with elements, each once, in the model's order."""
    buffers: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001  # as state_dict() does
            if buffer is None or name in module._non_persistent_buffers_set or not buffer.numel():  # noqa: SLF001
                continue
            buffers.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
    return dict(buffers.values())


Kind = tuple[torch.Size, torch.dtype, torch.layout, type[Tensor], bool]  # last: whether on the meta device


def _kinds(buffers: Mapping[str, Tensor]) -> dict[str, Kind]:
    return {name: (b.shape, b.dtype, b.layout, type(b), b.is_meta) for name, b in buffers.items()}


def in_words(buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """The kind of each buffer, for messages."""
    return {name: _words(*kind) for name, kind in _kinds(buffers).items()}


def _words(shape: torch.Size, dtype: torch.dtype, layout: torch.layout, kind: type, meta: bool) -> str:
    words = [str(tuple(shape)), str(dtype).removeprefix("torch.")]
    if layout is not torch.strided:
        words.append(str(layout).removeprefix("torch."))
    if not issubclass(kind, (nn.Parameter, nn.Buffer)) and kind is not Tensor:
        words.append(kind.__name__)
    return " ".join([*words, "on meta"] if meta else words)


def check(buffers: Mapping[str, Tensor]) -> None:
    """Refuse, with a ZeroError, buffers without plain memory of their values: sparse ones, wrappers, meta."""
    for name, words in in_words(buffers).items():
        if not memory_of(buffers[name]) or buffers[name].is_quantized:
            raise ZeroError(
                f"buffer {name!r} is {words}, of which ranks cannot take the mean: make it a plain tensor, "
                f"{_WAY_OUT}"
            )


def difference(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """The error of kinds of buffers that differ, in order of ``ranks``; None if they are equal."""
    for name in {name: None for kinds in ranks for name in kinds}:
        alike: dict[str, list[int]] = {}  # ranks by kind
        for rank, kinds in enumerate(ranks):
            alike.setdefault(kinds.get(name, "none"), []).append(rank)
        if len(alike) > 1:
            sides = (f"{kind} on {ranks_in_words(sharers)}" for kind, sharers in alike.items())
            return (
                f"buffer {name!r} is {', '.join(sides)}: give it one shape and type on all ranks, {_WAY_OUT}"
            )
    return None


def write(buffer: Tensor, values: Tensor) -> None:
    """Write ``values`` in place; a buffer made by ``expand()`` has each once in memory."""
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if buffer.layout is torch.strided:
            for dim, stride in enumerate(buffer.stride()):
                if not stride:
                    buffer, values = buffer.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        buffer.copy_(values)
