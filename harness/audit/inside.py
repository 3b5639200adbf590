"""``audit()``: audits the steps of a loop in this process, for notebooks and scripts.

Example::

    with audit(ranks_per_node=4) as found:
        for batch in batches:
            train_step(batch)
    found.show()
    found.check("all_gather int8 <= 0.5 M")
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness.audit import expectations, tables
from harness.audit.calls import Calls, Rank, combine
from harness.audit.command import show_report
from harness.audit.schemes import Model, Scheme, model_of
from harness.audit.tables import Report
from harness.audit.witness import Witness
from harness.errors import Refusal
from harness.terminal_table import console


class Found:
    """The calls that this process made in the ``with`` block of ``audit()``; readable after the block has ended."""

    def __init__(self, model: torch.nn.Module | None, ranks_per_node: int | None) -> None:
        self._elements = None if model is None else sum(_numel(p) for p in model.parameters())
        self._ranks_per_node = ranks_per_node
        self._calls: Calls | None = None

    def take(self, events: list[dict[str, Any]]) -> None:
        """Fill this object from all ``events`` that the witness (the recorder of calls) has recorded in the block."""
        rank = Rank()
        for event in events:
            rank.take(event)
        rank.ended = rank.ended or "audit()"
        if not rank.whole:  # no optimizer has stepped: the block is one step
            rank.whole, rank.rows = 1, {1: rank.rows.get(1, {})}
        self._calls = combine([rank], [], processes=1, ranks_per_node=self._ranks_per_node)
        if self._ranks_per_node is None and (local := os.environ.get("LOCAL_WORLD_SIZE", "")).isdigit():
            self._ranks_per_node = int(local)
        per_node = self._ranks_per_node or max(1, rank.world)
        nodes = {number: number // per_node for number in range(max(1, rank.world))}
        self._calls.topology = type(self._calls.topology)(nodes)

    @property
    def calls(self) -> Calls:
        """The calls of this process by step.

        Raises:
            Refusal: If the block has not ended yet.
        """
        if self._calls is None:
            raise Refusal("audit(): the block has not ended yet; read calls and tables after the block")
        return self._calls

    @property
    def report(self) -> Report:
        """The report of all steps of the block; its tables and sentences are what :meth:`show` prints."""
        calls = self.calls
        return tables.report_on(calls, calls.steps(1, None), self._model(), by="optimizer steps")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table of calls that :meth:`show` prints, each a dictionary with a key for each column.

        The table shows the calls of one step: the first step of the largest group of steps with equal calls.
        """
        return tables.call_rows(self.report)

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of data parallelism that fits the calls; None if the number of parameters is not known."""
        return self.report.scheme

    def show(self) -> None:
        """Print the report's tables and sentences."""
        show_report(self.report, console())

    def check(self, *texts: str) -> list[str]:
        """Return a line for each of the expectations ``texts`` that is broken on this rank or cannot be checked."""
        parsed = [expectations.parse(text) for text in texts]
        calls = self.calls
        return expectations.broken(parsed, calls, calls.steps(1, None), self._model())

    def _model(self) -> Model | None:
        return model_of(self.calls, self._elements, "model.parameters()")


def _numel(parameter: torch.Tensor) -> int:
    return int(getattr(parameter, "ds_numel", 0) or parameter.numel())


@contextlib.contextmanager
def audit(model: torch.nn.Module | None = None, *, ranks_per_node: int | None = None) -> Iterator[Found]:
    """Record the torch.distributed calls that this process makes in the ``with`` block, by step.

    A step ends when the optimizer's ``step()`` returns.  If no optimizer steps, the block is one step.  Each rank
    records only the calls that it makes, and the audit sends no messages.

    Calls are read from torch's flight recorder, a ring buffer.  Its number of entries is the value that
    TORCH_FR_BUFFER_SIZE had when the process started, 2000 by default.

    Args:
        model: The model whose parameters are counted.  Reports and expectations give sizes as multiples of the number
            of parameters.  By default, the parameters of all optimizers that step are counted.
        ranks_per_node: Number of ranks of each node; by default the environment variable LOCAL_WORLD_SIZE.  Without
            this variable, all ranks count as one node.

    Raises:
        Refusal: If this torch was built without torch.distributed.
    """
    if not dist.is_available():
        raise Refusal("audit(): this torch was built without torch.distributed; install a torch that has it")
    witness, found = Witness(None), Found(model, ranks_per_node)
    witness.write(event="process", pid=os.getpid(), environment={}, host="")
    witness.arm(torch)
    try:
        yield found
    finally:
        witness.read(final=True)
        witness.stop()
        found.take(witness.events)
