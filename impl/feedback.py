"""The errors that a unit's gradient codecs left over: who holds them, and how long they live.

Error feedback adds what an encoding lost to what the next one sends.  The state is sharded as the hop
is: of the hop between nodes a rank encodes the sums of its local index alone, so it keeps
``padded / ranks_per_node`` errors; of a first hop it encodes, and keeps, all of them.
(DeepSpeed's LoCo keeps both, unsharded, as int8: facts of peers, section 1.2.)

An error lives until it is cleared: after an overflow, whose gradients are not used, and every
``reset`` optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impl.policy import Feedback
from impl.reference import DTYPES, Carried


class Errors:
    """The errors of one unit on one rank, hop by hop.

    Args:
        feedback: the policy's.
        shapes: of what each hop encodes, (ranks along the hop's axis and those to come..., S); None
            for a hop whose error is not kept.
        device: where they lie.

    Attributes:
        nbytes: of all errors.
    """

    def __init__(
        self, feedback: Feedback, shapes: Sequence[Sequence[int] | None], device: torch.device
    ) -> None:
        self._feedback = feedback
        self._errors = [
            None if shape is None else torch.zeros(*shape, dtype=DTYPES[feedback.state], device=device)
            for shape in shapes
        ]
        self.nbytes = sum(error.nbytes for error in self._errors if error is not None)
        self._since = 0  # the step of the last reset

    def carried(self, hop: int, start: int, end: int) -> Carried | None:
        """What elements [start, end) of each row of ``hop`` carry over; None if nothing."""
        error = self._errors[hop]
        return None if error is None else Carried(error[..., start:end], self._feedback.decay)

    def clear(self) -> None:
        """Forget all errors."""
        for error in self._errors:
            if error is not None:
                error.zero_()

    def begin(self, step: int) -> None:
        """Before the reductions of optimizer step ``step``: forget what is older than allowed."""
        if self._feedback.reset and step - self._since >= self._feedback.reset:
            self.clear()
            self._since = step

    def state(self) -> dict[str, Tensor]:
        """Copies of the errors by hop, and the step of the last reset, to be loaded again."""
        state = {f"hop{hop}": error.clone() for hop, error in enumerate(self._errors) if error is not None}
        return {**state, "since": torch.tensor(self._since)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state` gave on the same rank of the same topology and policy.

        Raises:
            ValueError: for other hops, shapes or types, naming the first.
        """
        own = {f"hop{hop}": error for hop, error in enumerate(self._errors) if error is not None}
        if odd := sorted((own.keys() | {"since"}) ^ state.keys()):
            raise ValueError(f"feedback state: {odd[0]!r} is on one side only")
        for name, error in own.items():
            given = state[name]
            if given.shape != error.shape or given.dtype != error.dtype:
                raise ValueError(
                    f"feedback state {name!r}: {tuple(given.shape)} {given.dtype}, expected "
                    f"{tuple(error.shape)} {error.dtype} (same topology, policy and rank)"
                )
        for name, error in own.items():
            error.copy_(state[name])
        self._since = int(state["since"])
