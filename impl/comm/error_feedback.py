"""Keeps the quantisation errors that error feedback carries from one gradient to the next.

A gradient of a unit (parameters that are reduced together) is reduced in hops, which are exchanges between ranks.  When
a rank encodes a gradient for a hop, it keeps the error of each element.  It adds the error to the same element of the
unit's next gradient, before it encodes that gradient.  For the first hop a rank encodes the gradient of all elements.
For the hop between nodes it encodes only the sums that it has computed: with 4 ranks on a node, those of a quarter of
the elements.  All errors are set to 0 every ``reset`` optimizer steps.  They are also set to 0 after a step with an
overflow and after a failed pass, because the gradients of such a step or pass are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impl.codecs.reference import DTYPES, Carried
from impl.plan.hops import Hop
from impl.policy.policy import Feedback


class Errors:
    """Keeps one rank's quantisation errors, which error feedback adds to the next gradient of the same unit.

    The attribute ``nbytes`` is the number of bytes that all errors take.

    Args:
        feedback: the settings of error feedback.
        hops: the hops (exchanges) of the unit's reduction.  Errors are kept for each hop whose field ``keeps`` is
            ``errors``.
        device: the device of the errors.
    """

    def __init__(self, feedback: Feedback, hops: Sequence[Hop], device: torch.device) -> None:
        self.feedback, dtype = feedback, DTYPES[feedback.state]
        sums = [hop for hop in hops if hop.kind == "all_to_all"]
        # for each hop that keeps errors: (ranks along its axis, ranks along each later axis..., piece)
        self._errors = {
            number: torch.zeros(
                *(later.axis.size for later in sums[number:]), hop.numel, dtype=dtype, device=device
            )
            for number, hop in enumerate(sums)
            if hop.keeps == "errors"
        }
        self.nbytes = sum(error.nbytes for error in self._errors.values())
        self._since = 0  # the optimizer step of the last reset

    def carried(self, hop: int, start: int, end: int) -> Carried | None:
        """Return the errors that are added before the next gradient is encoded for hop number ``hop``, counted from 0.

        A hop is one exchange of a reduction.  The gradient consists of pieces: each rank sums one piece.  In the hop,
        this rank sends one or more pieces.  The result has the errors of the elements [start, end) of each of these
        pieces.  It is a view of the errors in this object, so an encoding that uses the result updates this object.

        Returns None if no errors are kept for this hop.
        """
        error = self._errors.get(hop)
        return None if error is None else Carried(error[..., start:end], self.feedback.decay)

    def clear(self) -> None:
        """Set all errors to 0."""
        for error in self._errors.values():
            error.zero_()

    def reset(self) -> None:
        """Return to the state of a new object: all errors are 0, and step 0 counts as the last reset."""
        self.clear()
        self._since = 0

    def begin(self, step: int) -> None:
        """Set all errors to 0 if a reset is due; to be called before the reductions of optimizer step ``step``.

        A reset is due when ``feedback.reset`` steps have passed since the last reset.  With ``feedback.reset = 0``
        there are no resets.
        """
        if self.feedback.reset and step - self._since >= self.feedback.reset:
            self.clear()
            self._since = step

    def state(self) -> dict[str, Tensor]:
        """Return the errors and the step of the last reset, which a resumed run passes to :meth:`load`.

        The keys ``hop0``, ``hop1`` and so on have copies of the errors of each hop (exchange).  ``since`` is the
        optimizer step of the last reset.
        """
        state = {f"hop{hop}": error.clone() for hop, error in self._errors.items()}
        return {**state, "since": torch.tensor(self._since)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace the errors and the step of the last reset by ``state``.

        ``state`` is what :meth:`state` returned on this rank in a run with the same topology and policy.
        """
        for hop, error in self._errors.items():
            error.copy_(state[f"hop{hop}"])
        self._since = int(state["since"])
