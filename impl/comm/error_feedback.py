"""Error feedback of a unit's gradient codecs: holds the errors of encodings.

The errors are sharded as the hop is: for the hop between nodes a rank encodes the sums of its local index
alone, and keeps ``padded / ranks_per_node`` errors; for a first hop it encodes, and keeps, all.
Errors are cleared after an overflow, whose gradients are not used, and every ``reset`` optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from impl.codecs.reference import DTYPES, Carried
from impl.plan.policy import Policy
from impl.plan.topology import Topology


class Errors:
    """The errors of one unit on one rank, ``nbytes`` in all; reductions end with ``piece`` elements."""

    def __init__(self, policy: Policy, topology: Topology, piece: int, device: torch.device) -> None:
        assert policy.feedback is not None  # noqa: S101  # else there are none
        self.feedback, dtype = policy.feedback, DTYPES[policy.feedback.state]
        sizes = [axis.size for axis, _ in policy.reduce_axes(topology)]
        self._errors = {  # by hop, (ranks along its axis and the later ones..., piece)
            hop: torch.zeros(*sizes[hop:], piece, dtype=dtype, device=device)
            for hop, kept in enumerate(policy.feedback_hops(topology))
            if kept
        }
        self.nbytes = sum(error.nbytes for error in self._errors.values())
        self._since = 0  # the step of the last reset

    def carried(self, hop: int, start: int, end: int) -> Carried | None:
        """Errors of elements [start, end) of each row of ``hop``; None if it keeps none."""
        error = self._errors.get(hop)
        return None if error is None else Carried(error[..., start:end], self.feedback.decay)

    def clear(self) -> None:
        """Forget all errors."""
        for error in self._errors.values():
            error.zero_()

    def begin(self, step: int) -> None:
        """Before the reductions of optimizer step ``step``: clear errors every ``reset`` steps."""
        if self.feedback.reset and step - self._since >= self.feedback.reset:
            self.clear()
            self._since = step

    def state(self) -> dict[str, Tensor]:
        """Copies of the errors by hop, and the step of the last reset, to be loaded again."""
        state = {f"hop{hop}": error.clone() for hop, error in self._errors.items()}
        return {**state, "since": torch.tensor(self._since)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the :meth:`state` of the same rank, topology and policy."""
        for hop, error in self._errors.items():
            error.copy_(state[f"hop{hop}"])
        self._since = int(state["since"])
