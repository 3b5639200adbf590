"""Collectives under way are carried on in order, and never after they failed."""

from __future__ import annotations

import pytest

from impl.comm.transfer import Steps, Transfer
from impl.errors import ZeroError


def _fails_after_its_last_hop() -> Steps[None]:
    yield True
    raise KeyboardInterrupt


def test_one_that_failed_while_its_last_hop_was_deferred_is_not_passed_over() -> None:
    """Each call after the failure raises: who goes on would take what never came."""
    transfer = Transfer(_fails_after_its_last_hop(), "reduction")
    with pytest.raises(KeyboardInterrupt):
        transfer.wait()
    for call in (transfer.proceed, transfer.advance, transfer.wait):
        with pytest.raises(ZeroError, match="reduction that was interrupted"):
            call()
