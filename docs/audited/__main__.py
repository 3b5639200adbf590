"""Audits every program of :mod:`docs.audited.programs`: ``python -m docs.audited`` writes docs/audited.md.

The programs run on two hosts, which are network namespaces of this machine, so that interfaces count what is sent.
It takes about five minutes on two cores.  Names of programs audit only these, and print their rows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from docs.audited import programs
from harness.audit import run, tables, wire
from harness.audit.calls import Calls, read
from harness.audit.schemes import NONE, model_of, recognise
from harness.strategies.deepspeed import why_missing
from impl.plan.traffic import passes, predict
from tests.support.hosts import Host, hosts

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "audited.md"
RANKS: Final = 4
STEPS: Final = 8
PORT: Final = 29511
HEAD: Final = """# What programs send, next to closed forms

This page shows that [`zeropp audit`](guide/your_program.md) counts right.  It audits programs whose bytes in a step
follow from a formula, the *closed form*, and compares both numbers with the counters of network interfaces.
Each row is a program of [programs.py](audited/programs.py), trained on 2x2 ranks over gloo (torch {version}).
The model has {parameters:,} parameters in fp32.  `python -m docs.audited` writes this page.

- *Scheme found*: what the audit recognises in the messages.
- *Measured* and *closed form*: bytes of whole messages of rank 0 in one step, whatever a collective's algorithm makes
  of them.  This project's engine and the pipeline call send and not collectives, so their bytes are what rank 0 sends.
  The closed form of this project's engine is made of the hops of its units.
- *Between nodes*: bytes that leave a node in a step, by the formulas of [wire.py](../harness/audit/wire.py).
- *Counted*: by how much the bytes between nodes differ from what a node's interface sent in several steps, without
  headers, on the node that differs more.  The nodes are network namespaces.  The ranks of a node end a step at
  different times, so the counted bytes are uncertain by the second number.

| program | scheme found | measured | closed form | difference | between nodes | counted |
| :--- | :--- | ---: | ---: | ---: | ---: | ---: |
"""


class Row(NamedTuple):
    """One row of the page; sizes in bytes."""

    program: str
    scheme: str
    measured: float
    expected: float
    between: float

    def markdown(self, counted: str = "") -> str:
        """Return the row of the page, with what interfaces counted."""
        difference = f"{self.measured / self.expected - 1:+.2%}"
        about = (programs.PROGRAMS[self.program].__doc__ or "").rstrip(".")
        return (
            f"| `{self.program}`: {about} | {self.scheme} | {self.measured:,.0f} | {self.expected:,.0f} | {difference} "
            f"| {self.between:,.0f} | {counted} |\n"
        )


def audit(name: str) -> Calls:
    """Audit one program on four ranks of this machine, which count as two nodes of two ranks."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        run.prepare(Path(folder), {"last_step": STEPS, "marker": ""})
        os.environ["PYTHONPATH"] = str(ROOT)
        status = run.run([*start, str(Path(programs.__file__)), name, str(STEPS)], Path(folder))
        if status:
            raise subprocess.CalledProcessError(status, name)
        return read(Path(folder) / run.RANKS, 2)


def audit_on_hosts(name: str) -> Calls:
    """Audit one program on two hosts of two ranks each, which are network namespaces of this machine."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder) / "audit"
        run.prepare(folder, {"last_step": None, "marker": ""})
        with hosts(2, Path(name_of_folder), {}) as both:
            started = [
                host.start(_torchrun(number, both[0], name), **_environment(host, folder))
                for number, host in enumerate(both)
            ]
            try:
                statuses = [process.wait(300) for process in started]
            finally:
                for process in started:
                    process.kill()
            if any(statuses):
                raise subprocess.CalledProcessError(max(statuses), name, both[0].output, both[1].output)
        return read(folder / run.RANKS)


def _torchrun(number: int, first: Host, name: str) -> list[str]:
    where = [
        "--nnodes=2", f"--node-rank={number}", f"--master-addr={first.address}", f"--master-port={PORT}",
        f"--nproc-per-node={RANKS // 2}",
    ]  # fmt: skip
    program = [str(programs.__file__), name, str(STEPS)]
    return [sys.executable, "-m", "torch.distributed.run", *where, *program]


def _environment(host: Host, folder: Path) -> dict[str, str]:
    paths = run.environment(folder)
    own = {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
    return {**paths, **own, "PYTHONPATH": f"{paths['PYTHONPATH']}:{ROOT}"}


def counters(calls: Calls) -> list[dict[str, Any]]:
    """Return what the interface of each host counted, next to the bytes of the calls (a row of ``counter_rows``)."""
    report = tables.report_on(calls, calls.steps(2, None), None, by="optimizer steps")
    return [row for row in tables.counter_rows(report) if row["interface"] != "lo"]


def counted_in_words(calls: Calls) -> str:
    """Return, for the node that differs more, by how much its counter differs from the calls: ``+0.50% ± 0.20%``.

    The second number is the error of the comparison, since the ranks of a node end a step at different times.
    """
    worst = max(counters(calls), key=lambda row: abs(float(row["difference"])))
    return f"{worst['difference']:+.2%} ± {worst['uncertain'] / worst['expected']:.2%}"


def row_of(name: str, calls: Calls) -> Row:
    """Return the row of a program."""
    rank, step = calls.ranks[0], STEPS - 1
    model = model_of(calls)
    assert model is not None  # noqa: S101  # every program has an optimizer
    scheme = recognise(calls, rank, step, model)
    between = wire.between_by_node(calls, step)[0]
    own = {"zero3": _ours, "zeropp": _ours, "pipeline": _pipeline}.get(name)
    if own is None:
        if scheme.name != NONE:
            return Row(name, scheme.name, scheme.measured, scheme.expected, between)
        whole = sum(count.bytes for count in rank.rows[step].values())
        return Row(name, scheme.name, whole, float(model.elements), between)  # a byte for each parameter
    sent = sum(
        wire.sent(0, key, count, calls.group(rank, key.group), calls.topology).all
        for key, count in rank.rows[step].items()
    )
    return Row(name, scheme.name, sent, own(name), between)


def _ours(name: str) -> float:
    """Return what rank 0 sends in a step after the first, by the plan of this project's engine."""
    from impl.policy.presets import preset
    from impl.policy.topology import Topology
    from impl.zero import plan_units

    policy, topology = preset(name), Topology(RANKS // 2, 2)
    net = programs.build()
    units = plan_units(net, topology, policy, blocks=list(net.blocks))
    step = passes(policy)
    total = [
        sum(s.bytes for s in predict(policy, topology, units, 0, step * n).sent.values()) for n in (1, 2)
    ]
    return float(total[1] - total[0])


def _pipeline(_: str) -> float:
    """Return the bytes of the activations that rank 0 sends."""
    return 4.0 * programs.BATCH * programs.WIDTH


def main(names: Sequence[str]) -> int:
    """Write the page, or print the rows of some programs; returns the exit status."""
    missing = why_missing()
    wanted = [name for name in names or programs.PROGRAMS if not (missing and name.startswith("deepspeed"))]
    rows = []
    for name in wanted:
        calls = audit_on_hosts(name)
        rows.append(row_of(name, calls).markdown(counted_in_words(calls)))
    if names:
        sys.stdout.write("".join(rows))
        return 0
    if missing:
        sys.stderr.write(f"{PAGE} was not written: {missing}\n")
        return 1
    parameters = sum(parameter.numel() for parameter in programs.build().parameters())
    PAGE.write_text(
        HEAD.format(version=torch.__version__, parameters=parameters) + "".join(rows), encoding="utf-8"
    )
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
