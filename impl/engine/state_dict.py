"""Full state dicts of a sharded model, and its persistent buffers, which are kept equal on all ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.unit.master_shard import sliced
from impl.unit.unit import Unit, WholeValues

_AVERAGED = (torch.float32, torch.float16, torch.bfloat16)  # sums of these are exact enough in fp64
EXTRA: Final = "_extra_state"  # ends the name of what a module's get_extra_state() returned


def parameter_names(model: nn.Module, units: Sequence[Unit]) -> dict[str, str]:
    """For each name of a sharded parameter in the state dict, the parameter's own; tied ones have several."""
    own = {
        id(visible): slot.spec.name
        for unit in units
        for visible, slot in zip(unit.visible, unit.geometry.slots, strict=True)
    }
    held = model.state_dict(keep_vars=True)
    return {name: own[id(value)] for name, value in held.items() if id(value) in own}


def is_extra(name: str) -> bool:
    """Whether an entry of a state dict is what a module's ``get_extra_state()`` returned."""
    return name.rpartition(".")[2] == EXTRA


def load_entry(model: nn.Module, name: str, held: object, value: Any) -> None:
    """Give a buffer ``held``, or a module's extra state, its value."""
    if is_extra(name):
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    elif isinstance(held, Tensor):
        with torch.no_grad():
            held.copy_(value)


def full_state_dict(model: nn.Module, units: Sequence[Unit]) -> dict[str, Tensor]:
    """The unsharded model's state: fp32 parameters and buffers by their original names.

    All ranks must call it, and all get it.
    """
    whole: dict[int, Any] = {}
    for unit in units:
        whole |= zip(map(id, unit.visible), WholeValues(unit).masters(), strict=True)
    state = {name: whole.get(id(one), one) for name, one in model.state_dict(keep_vars=True).items()}
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def load_full_state_dict(model: nn.Module, units: Sequence[Unit], state: Mapping[str, Tensor]) -> None:
    """Overwrite weights and buffers with those of the unsharded model; of tied ones one name is enough.

    Raises:
        ZeroError: for missing, unexpected or misshapen entries, naming the first.
    """
    own = dict(model.state_dict(keep_vars=True))
    given = {id(own[name]): value for name, value in state.items() if name in own}
    state = {name: given[id(value)] for name, value in own.items() if id(value) in given} | dict(state)
    if own.keys() != state.keys():
        odd = sorted(own.keys() ^ state.keys())
        raise ZeroError(f"state does not match the model: {len(odd)} names differ, first {odd[0]!r}")
    for name, value in own.items():
        if isinstance(value, Tensor) and not is_extra(name) and value.shape != state[name].shape:
            raise ZeroError(f"state {name!r} is {tuple(state[name].shape)}, expected {tuple(value.shape)}")
    names = {id(value): name for name, value in own.items()}
    for unit in units:
        values = [state[names[id(parameter)]] for parameter in unit.visible]
        device = unit.master_shard.held.device
        WholeValues(unit).load_shard(sliced(unit.geometry, unit.wire.mesh.rank, values, device))
    sharded = {id(parameter) for unit in units for parameter in unit.visible}
    for name, value in own.items():
        if id(value) not in sharded:
            load_entry(model, name, value, state[name])


class ModuleBuffers:
    """The persistent buffers (running means, counters) of one model on one rank.

    Each rank's forward passes change its own.  Before the first pass after such a one, all ranks take the
    mean of floating-point buffers over ranks, and rank 0's values of all others (torch's DDP takes rank 0's
    of all).  Buffers that are not persistent are derived from something else and left alone.

    Attributes:
        nbytes: of all of them: the size of a rank's message.
        differ: whether a training pass may have changed them; until the first exchange nobody has said that
            they are equal.
    """

    def __init__(self, model: nn.Module, wire: Wire) -> None:
        self._model, self._wire = model, wire
        self.nbytes = sum(buffer.nbytes for buffer in self._persistent())
        self.differ = True

    def _persistent(self) -> list[Tensor]:
        """Those with elements, each once, in the model's order."""
        found = {
            id(buffer): buffer
            for module in self._model.modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001  # as state_dict() does
            if buffer is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001
        }
        return [buffer for buffer in found.values() if buffer.numel()]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """After the body all buffers, those that are not persistent too, are as they were before it."""
        differ, kept = self.differ, [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            yield
        finally:
            self.differ = differ
            with torch.no_grad():
                for buffer, values in kept:
                    buffer.copy_(values)

    @torch.no_grad()
    def make_equal(self) -> None:
        """Make them equal if a pass may have changed them; all ranks must call it."""
        if not self.differ or not self.nbytes:
            return
        self.differ = False
        buffers = self._persistent()
        mine = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers])
        rows = self._wire.all_gather_small(mine, "buffers")  # (ranks, bytes)
        start = 0
        for buffer in buffers:
            part = rows[:, start : start + buffer.nbytes].clone().view(buffer.dtype)  # (ranks, elements)
            if buffer.dtype in _AVERAGED:
                part = part.double().mean(0, keepdim=True)
            buffer.copy_(part[0].view(buffer.shape))
            start += buffer.nbytes
