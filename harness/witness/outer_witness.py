"""Records a few fp32 weights before and after each outer step of DiLoCo, so that the outer steps can be recomputed.

With local steps (DiLoCo, ``policy.local_steps``), groups of ranks train apart from one another.  In an outer step the
groups average how far their masters (fp32 weights) have moved.  On each rank, this module reads up to 64 masters of
each unit (a part of the model that is sharded as one), once just before an outer step and once just after it.  From
these notes, :func:`harness.records.training_faults.training_fault` recomputes the outer steps, and checks that all
groups have the same masters.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from harness.records.training_faults import OuterNote, OuterRules
from impl.codecs.codec import Codec
from impl.codecs.reference import REFERENCE
from impl.codecs.rounding_noise import Noise
from impl.plan.hops import outer_hops
from impl.plan.local_steps import fragments_of, meets
from impl.zero import Zero

_WATCHED: Final = 64  # watched elements of each unit's shard, spread evenly
_TRIED: Final = 1 << 12  # elements, at least, on which a codec's error is measured
# Allowed error of a mean, as a multiple of the error that the codecs make on normally distributed values.  It is larger
# than 1, since the values of a unit may be spread more widely.
_TIMES: Final = 4.0
# Factor of the allowed error with error feedback, which adds the errors of earlier encodings.
_FEEDBACK: Final = 2.0


class OuterWitness:
    """Records, on one rank, up to 64 masters of each unit before and after each outer step.

    A master is one fp32 weight of this rank's shard, and a unit is a part of the model that is sharded as one.  In an
    outer step of local steps (DiLoCo), groups of ranks average how far their masters have moved.  The caller calls
    :meth:`after` when the optimizer has taken a step.  :attr:`notes` has one note for each unit and outer step.
    """

    def __init__(self, zero: Zero, optimizer: torch.optim.Optimizer) -> None:
        policy, topology = zero.policy, zero.wire.mesh.topology
        self._policy, self._step = policy, 0
        units = zip(zero.units, fragments_of(policy, [unit.geometry for unit in zero.units]), strict=True)
        self._units = [(unit, fragment) for unit, fragment in units if fragment is not None]
        self._before: dict[str, list[float]] = {}
        self.notes: list[OuterNote] = []
        self.start = {unit.geometry.name: self._read(unit) for unit, _ in self._units}
        codecs = {
            hop.codec
            for unit, _ in self._units
            for hop in outer_hops(unit.policy, topology, unit.geometry.piece, unit.policy.grain)
        }
        error = math.sqrt(2) * max(map(_error_of, codecs), default=0.0)  # of a difference, then of the mean
        self.rules = OuterRules(
            group=policy.group_ranks(topology),
            rate=policy.outer_rate,
            momentum=policy.outer_momentum,
            error=_TIMES * error * (1.0 if policy.feedback is None else _FEEDBACK),
        )
        # torch calls an optimizer's own hooks before those of all optimizers, in which the engine takes outer steps.
        optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        """Read up to 64 fp32 weights of each unit that an outer step is about to change.

        This is a hook of the optimizer.  It runs after the optimizer's own step, and before the engine takes the outer
        step.  If no outer step follows the optimizer's step, the hook does nothing.
        """
        for unit, fragment in self._units:
            if meets(self._policy, self._step + 1, fragment):
                self._before[unit.geometry.name] = self._read(unit)

    def after(self, index: int, *, done: bool) -> None:
        """Append a note to :attr:`notes` for each unit that an outer step has just changed.

        A note has the unit's recorded fp32 weights before and after the outer step.  If no outer step followed the
        optimizer's step ``index``, nothing is appended.  ``done`` says whether the optimizer took the step; it skips a
        step after an overflow.
        """
        self._step += done
        for unit, _ in self._units:
            name = unit.geometry.name
            if (before := self._before.pop(name, None)) is not None:
                self.notes.append(OuterNote(index, name, before, self._read(unit)))

    def _read(self, unit: Any) -> list[float]:
        shard: Tensor = unit.master_shard.held.detach()
        places = torch.linspace(0, len(shard) - 1, min(_WATCHED, len(shard)), dtype=torch.float64).long()
        return [float(value) for value in shard[places.to(shard.device)].cpu()]


def _error_of(codec: Codec) -> float:
    """Return the relative error of a codec, norm(decoded - x) / norm(x), on normally distributed values x.

    The error that is allowed in an outer step is a multiple of this error.
    """
    numel = codec.grain * -(-_TRIED // codec.grain)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    frame, decoded = torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8), torch.empty(numel)
    REFERENCE.encode(codec, x, frame, noise=Noise((1, 2, 3, 4)) if codec.stochastic else None)
    REFERENCE.decode(codec, frame, decoded)
    return float((decoded - x).norm() / x.norm())
