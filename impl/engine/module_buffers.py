"""Keeps a sharded model's persistent buffers equal on all ranks.

A persistent buffer, such as a running mean, is part of the model's state dict, and training passes change it
differently on each rank.  Before a forward pass, and before a state dict is taken, the ranks compare their buffers.
Buffers that differ are overwritten on all ranks with the mean over ranks, or with rank 0's value.

[Note: writing buffers]
A buffer may have to be written while autograd's graph of an earlier forward pass still holds views of it.  This
happens when two forward passes come before one backward pass, for example in preference training, or with a
GAN's discriminator.

* A buffer with equal values on all ranks, such as a table of rotary embeddings, is not written at all.
* Other buffers are written in place, so that users' references and views, and captured CUDA graphs, see the new
  values.
* Before the write, the views that autograd's graphs hold are replaced by copies of the old values
  (:meth:`~impl.engine.outside_uses.SavedTensors.spare`), because backward needs the values that its forward pass used.
  (It would be wrong to hide the write from torch's version counters instead: backward would compute with the new
  values, and its gradients would be wrong without an error.)
* The engine does not see tensors that autograd saves outside of passes of the model.  If the write changes such a
  tensor, torch's version check raises an error in backward.
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
from impl.policy.topology import ranks_in_words

_AVERAGED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The last byte of a rank's message if its buffers do not have the shapes and types that ranks have agreed on.
_CHANGED: Final = 1
_WAY_OUT: Final = "or register it with persistent=False, so that each rank has its own"


class ModuleBuffers:
    """Makes the persistent buffers (running means, counters) of one model equal on all ranks.

    For floating-point buffers of 16 to 64 bits, :meth:`make_equal` gives all ranks the mean over ranks.  For all other
    buffers, it gives all ranks the values of rank 0.  (DDP gives all ranks the values of rank 0 for all buffers.)
    ``shard()`` compares the shapes and types of buffers between ranks.  If a shape or type changes on any rank later,
    :meth:`make_equal` compares them again.
    """

    def __init__(self, model: nn.Module, wire: Wire, saved: SavedTensors) -> None:
        self._model, self._wire, self._saved = model, wire, saved
        self._agree_on(persistent(model))
        self.differ = True  # whether buffers may differ between ranks; at first this is unknown
        # Whether the model may have persistent buffers: a module has registered one, with or without a value, or
        # modules or buffers were added after shard().
        self.possible = any(
            part._buffers.keys() - part._non_persistent_buffers_set  # noqa: SLF001
            for part in model.modules()
        )

    def _agree_on(self, buffers: Mapping[str, Tensor]) -> None:
        """Set the layout of the message with which each rank sends its buffers, until this method is called again.

        The message has the bytes of all ``buffers``, in their order, and one more byte at the end.  By this byte, a
        rank tells the other ranks whether its buffers still fit the layout.  Without buffers there is no message.
        """
        self._kinds = _kinds(buffers)
        # Bytes of a rank's message, whose last byte may be _CHANGED.  Without buffers there is no message.
        self.nbytes = sum(buffer.nbytes for buffer in buffers.values()) + 1 if buffers else 0

    @staticmethod
    def changed_by(module: nn.Module) -> bool:
        """Return whether a forward pass of ``module`` may change buffers even under no_grad(), as batch norm does.

        It may if ``module``, or any module inside it, has buffers and is in training mode.
        """
        return any(part.training and part._buffers for part in module.modules())  # noqa: SLF001

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context that restores all buffers, persistent or not, to their old values when it is left."""
        differ, kept = self.differ, [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        held = [(part, dict(part._buffers)) for part in self._model.modules()]  # noqa: SLF001
        try:
            yield
        finally:
            self.differ = differ
            for part, buffers in held:
                part._buffers.update(buffers)  # noqa: SLF001  # other tensors may have been assigned
            for buffer, values in kept:
                write(buffer, values)

    @torch.no_grad()
    def make_equal(self) -> None:
        """Make buffers equal on all ranks; all ranks must call it.

        Nothing is sent if no pass can have changed buffers since the last call.

        Raises:
            ZeroError: on all ranks, if the shape or type of a buffer differs between ranks, or if a buffer has become
                sparse, quantised, a wrapper class, or a tensor on the meta device (:func:`check`).
        """
        if not self.differ:
            return
        buffers = persistent(self._model)
        if not buffers and not self.nbytes:
            return
        if (rows := self._gathered(buffers)) is None:
            self._compare(buffers)
            self._agree_on(buffers)
            if (rows := self._gathered(buffers)) is None:  # the model has no buffers any more
                return
        self.differ = False
        sizes = [buffer.nbytes for buffer in buffers.values()]
        parts = dict(zip(buffers, torch.split(rows[:, :-1], sizes, dim=1), strict=True))  # (ranks, bytes)
        # The results for all buffers are copied to the host at once, since the host waits for each copy.
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
        """Gather the bytes of ``buffers`` from all ranks.

        Returns (ranks, bytes + 1) uint8, one row for each rank.  A row has the bytes of the rank's buffers, and a last
        byte of 0.

        Returns None in two cases:

        - On some rank, shapes or types of buffers have changed since the last :meth:`_agree_on`.  The message of this
          rank has a last byte of 1.
        - There were no buffers at the last :meth:`_agree_on`.  The layout then has no message, so nothing is sent.
        """
        if not self.nbytes:  # all ranks got their first buffers after shard()
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
        """Raise a ZeroError, on all ranks, if a buffer's shape or type differs between ranks.

        Raises a ZeroError also if :func:`check` refuses a buffer.
        """
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
        """Put a new tensor with ``values`` in place of ``buffer`` in all modules that hold it.

        This is for a buffer that cannot be written in place, such as a buffer to which a pass has assigned its result.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            new = torch.empty_like(buffer, requires_grad=False).copy_(values)
        for part in self._model.modules():
            for name, held in part._buffers.items():  # noqa: SLF001
                if held is buffer:
                    part._buffers[name] = new  # noqa: SLF001


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of ``model`` by name, in the model's order; buffers without elements are left out.

    A buffer that several modules share is returned once, under its first name.
    """
    buffers: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001  # the same walk as state_dict()'s
            if buffer is None or name in module._non_persistent_buffers_set or not buffer.numel():  # noqa: SLF001
                continue
            buffers.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
    return dict(buffers.values())


# The kind of a buffer: shape, type of elements, layout, class, and whether it is on the meta device.
Kind = tuple[torch.Size, torch.dtype, torch.layout, type[Tensor], bool]


def _kinds(buffers: Mapping[str, Tensor]) -> dict[str, Kind]:
    return {name: (b.shape, b.dtype, b.layout, type(b), b.is_meta) for name, b in buffers.items()}


def in_words(buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the shape, type and layout of each buffer as text, by name, such as ``(3, 3) float32 sparse_coo``."""
    return {name: _words(*kind) for name, kind in _kinds(buffers).items()}


def _words(shape: torch.Size, dtype: torch.dtype, layout: torch.layout, kind: type, meta: bool) -> str:
    words = [str(tuple(shape)), str(dtype).removeprefix("torch.")]
    if layout is not torch.strided:
        words.append(str(layout).removeprefix("torch."))
    if not issubclass(kind, (nn.Parameter, nn.Buffer)) and kind is not Tensor:
        words.append(kind.__name__)
    return " ".join([*words, "on meta"] if meta else words)


def check(buffers: Mapping[str, Tensor]) -> None:
    """Raise a ZeroError for a buffer that is sparse, quantised, of a wrapper class or on the meta device.

    Such a buffer cannot be made equal on all ranks, because its values are not plain numbers in the tensor's memory.
    """
    for name, words in in_words(buffers).items():
        if not memory_of(buffers[name]) or buffers[name].is_quantized:
            raise ZeroError(
                f"buffer {name!r} is {words}, which cannot be made equal on all ranks: make it a plain tensor, "
                f"{_WAY_OUT}"
            )


def difference(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Return an error message for the first buffer whose shape, type or layout differs between ranks.

    Returns None if all are equal.  ``ranks`` has the result of :func:`in_words` on each rank, in rank order.
    """
    for name in {name: None for kinds in ranks for name in kinds}:
        alike: dict[str, list[int]] = {}  # kind -> ranks whose buffer is of this kind
        for rank, kinds in enumerate(ranks):
            alike.setdefault(kinds.get(name, "none"), []).append(rank)
        if len(alike) > 1:
            sides = (f"{kind} on {ranks_in_words(sharers)}" for kind, sharers in alike.items())
            return (
                f"buffer {name!r} is {', '.join(sides)}: give it one shape and type on all ranks, {_WAY_OUT}"
            )
    return None


def write(buffer: Tensor, values: Tensor) -> None:
    """Write ``values`` to ``buffer`` in place.

    Along a dimension that ``expand()`` has made, all elements of a buffer are one value in memory; this value is
    written once.
    """
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if buffer.layout is torch.strided:
            for dim, stride in enumerate(buffer.stride()):
                if not stride:
                    buffer, values = buffer.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        buffer.copy_(values)
