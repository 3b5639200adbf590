"""Draws random test cases for users' own reductions and gathers, and runs the ranks of a case as threads.

A case has a number of ranks, a unit and the values of its gradients or weights.  A unit is a set of parameters that are
gathered or reduced together.  The properties that are tested on the cases are in :mod:`harness.laws.method_laws` and
:mod:`harness.laws.gather_laws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from impl.codecs.codec import Dtype
from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.plan.traffic import LedgerKey, Sent
from impl.policy.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.policy.topology import Topology
from impl.simulate import simulate

SECONDS: Final = 30.0  # longest time that a rank may compute without waiting for a message

Gradients = Literal["normal", "equal", "sparse", "one_rank", "small", "large", "zero"]
Shared = Literal["all", "node", "none"]


@dataclass(frozen=True, slots=True)
class Case:
    """A test case for a user's reduction or gather: the ranks, one unit, and the unit's gradients or weights."""

    topology: Topology
    shapes: tuple[tuple[int, ...], ...]  # shape of each of the unit's parameters
    # The ranks that share one copy of the unit: all ranks, or the ranks of a node.  With "none", each rank has a copy.
    shared: Shared
    grain: int  # parameters and shards start on multiples of so many elements
    gradients: Gradients  # kind of numbers that gradients or weights are made of
    seed: int  # decides the numbers
    advances: int  # calls of advance() in a reduction or gather
    compute: Dtype = "fp32"  # type of gathered weights

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        copies = {"all": "one copy", "node": "a copy in each node", "none": "a copy on each rank"}[
            self.shared
        ]
        computed = "" if self.compute == "fp32" else f", computed in {self.compute}"
        return (
            f"{self.topology} ranks with {copies}, parameters {shapes} on multiples of {self.grain}, {self.gradients} "
            f"values of seed {self.seed}, {self.advances} calls of advance(){computed}"
        )

    def geometry(self, name: str = "unit") -> UnitGeometry:
        """Return the layout of the unit under the name ``name``."""
        specs = [ParameterSpec(f"{name}.{i}", shape) for i, shape in enumerate(self.shapes)]
        group = {"all": 0, "node": self.topology.ranks_per_node, "none": 1}[self.shared]
        world = self.topology.world
        return lay_out(name, specs, grain=self.grain, world=world, max_padding=math.inf, group=group)

    def gradient(self, geometry: UnitGeometry, step: int, rank: int) -> Tensor:
        """Return the gradient (P,) fp32 of one rank in one step; elements that are padding are 0."""
        whole = torch.zeros(geometry.padded)
        source = 0 if self.gradients == "equal" else rank
        draw = torch.Generator().manual_seed(hash((self.seed, step, source, len(geometry.name))) % 2**31)
        for slot in geometry.slots:
            values = torch.randn(slot.spec.numel, generator=draw)
            if self.gradients == "sparse":
                values *= torch.rand(slot.spec.numel, generator=draw) < 0.1
            whole[slot.offset : slot.end] = values
        factor = {"small": 1e-8, "large": 1e6, "zero": 0.0}.get(self.gradients, 1.0)
        return whole * (factor if self.gradients != "one_rank" or rank == 0 else 0.0)

    def mean(self, geometry: UnitGeometry, step: int) -> Tensor:
        """Return the exact mean (P,) fp64 of all ranks' gradients."""
        world = range(self.topology.world)
        return torch.stack([self.gradient(geometry, step, rank) for rank in world]).double().mean(0)

    def weights(self, geometry: UnitGeometry, step: int) -> Tensor:
        """Return the weights (P,) fp32 of the unit in one step; elements that are padding are 0."""
        return self.gradient(geometry, step, 0)


_topologies = st.builds(Topology, st.integers(1, 3), st.integers(1, 3))
_shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def cases(computes: Sequence[Dtype] = ("fp32",)) -> st.SearchStrategy[Case]:
    """Return a Hypothesis strategy that draws a :class:`Case`, with a type of gathered weights from ``computes``."""
    return st.builds(
        Case,
        topology=_topologies,
        shapes=st.lists(_shapes, min_size=1, max_size=3).map(tuple),
        shared=st.sampled_from(get_args(Shared)),
        grain=st.sampled_from([1, 4, 16]),
        gradients=st.sampled_from(get_args(Gradients)),
        seed=st.integers(0, 999),
        advances=st.integers(0, 3),
        compute=st.sampled_from(computes),
    )


class Violation(Exception):  # noqa: N818  # a finding about a method, not an error of this program
    """Raised when a user's reduction or gather lacks a tested property; the message says where and by how much."""


def on_ranks(case: Case, body: Callable[[Mesh, Wire], Any]) -> list[Any]:
    """Run ``body(mesh, wire)`` on each rank, as threads, and return the results in rank order.

    ``mesh`` has the rank's process groups, and ``wire`` sends the rank's messages and counts them.
    """

    def rank_main(mesh: Mesh) -> Any:
        wire = Wire(mesh)
        try:
            return body(mesh, wire)
        finally:
            wire.close()

    topology = case.topology
    return simulate(topology.nodes, topology.ranks_per_node, timeout=SECONDS)(rank_main)


def check_same(
    found: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[Tensor]],
    what: str,
    instead: str,
    noun: str = "the mean of step",
) -> None:
    """Raise a Violation if ``found`` and ``expected`` differ; the message names the first element that differs.

    A message begins, for example: ``on rank 1, element 4 of the mean of step 0 is 0.5 after later reductions, but 0.25
    before them``.  In it, ``the mean of step`` is ``noun``, ``after later reductions`` is ``what``, and ``before them``
    is ``instead``.

    Args:
        found: For each rank, one tensor for each step or gather.
        expected: For each rank, the tensors that ``found`` must equal.
        what: How ``found`` was computed.
        instead: How ``expected`` was computed.
        noun: What a tensor is; the index of its step or gather is appended.
    """
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for step, (result, other) in enumerate(zip(mine, theirs, strict=True)):
            if not torch.equal(result, other):
                at = int((result != other).nonzero()[0])
                raise Violation(
                    f"on rank {rank}, element {at} of {noun} {step} is {result[at]:.9g} {what}, but "
                    f"{other[at]:.9g} {instead}: make both values equal"
                )


Row = tuple[Mapping[LedgerKey, Sent], Mapping[LedgerKey, Sent]]
"""What one rank sent, by kind of message: as its ledger counted it, and as the method's ``bytes()`` declares it."""


def check_booked(ranks: Sequence[Row], purpose: str, what: str) -> None:
    """Raise a Violation if a rank did not send the bytes and messages that the method's ``bytes()`` declares.

    Args:
        ranks: For each rank, the pair (bytes and messages that the rank counted, bytes and messages as declared).
        purpose: Which messages to compare: ``weights`` or ``gradients``.
        what: The calls that sent the messages, such as ``2 reductions``; used in the error's text.
    """
    for rank, (sent, declared) in enumerate(ranks):
        for key in sent.keys() | declared.keys():
            found, expected = sent.get(key, Sent(0, 0)), declared.get(key, Sent(0, 0))
            if key.purpose == purpose and found != expected:
                raise Violation(
                    f"in {what}, rank {rank} sent {found.bytes} bytes in {found.messages} messages along "
                    f"{key.hop!r}, but bytes() declares {expected.bytes} bytes in {expected.messages} messages"
                )
