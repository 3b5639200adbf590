"""What one rank cannot do, none does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.checkpoint.save_load import MESSAGE_BYTES, CheckpointError, together
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.plan.topology import Topology
from tests.support.ranks import on_threads

WORLD = Topology(1, 3)


def _attempted(mesh: Mesh, errors: dict[int, Exception]) -> list[Any] | str:
    wire = Wire(mesh)

    def attempt() -> tuple[None, int]:
        if mesh.rank in errors:
            raise errors[mesh.rank]
        return None, mesh.rank * 2

    try:
        return together(wire, attempt)[1]
    except CheckpointError as error:
        return str(error)
    finally:
        assert (
            together(wire, lambda: (None, None))[1] == [None] * mesh.topology.world
        )  # all are still in step


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ({1: CheckpointError("no\nroom")}, "rank 1: no room"),
        ({2: KeyError("x"), 1: ValueError("y")}, "rank 1: ValueError: y"),
        ({1: OSError(28, "No space left", "/disk/file")}, "rank 1: /disk/file: No space left"),
        (dict.fromkeys(range(3), CheckpointError("gone")), "gone"),
        ({0: RuntimeError()}, "rank 0: RuntimeError"),
        ({2: ZeroError("not a step")}, "rank 2: not a step"),
        ({}, [0, 2, 4]),
    ],
)
def test_an_error_of_one_is_an_error_of_all(errors: dict[int, Exception], words: object) -> None:
    """The first rank's, in one line, with its number unless all say the same, or what all found."""
    assert on_threads(WORLD, _attempted, errors) == [words] * 3


@given(st.text(min_size=1, max_size=3000))
def test_any_error_fits_the_message(words: str) -> None:
    """However long, and whatever its letters take in JSON, it is cut to what is sent."""
    (told,) = on_threads(Topology(1, 1), _attempted, {0: CheckpointError(words)})
    assert len(told) <= MESSAGE_BYTES
