"""Reads the calls that an audited program's processes recorded, and combines them into the calls of all ranks.

A *witness* is the recorder that the audit loads into each process of the program (:mod:`harness.audit.witness`).  Each
witness writes one file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from harness.audit.witness import FIELDS
from harness.errors import Refusal

PHASES: Final = ("forward", "backward", "optimizer", "other")
CSV: Final = "calls.csv"  # the file with the calls of all steps, in the audit's folder
PAGE: Final = "audit.html"  # the page beside it
_FIRST: Final = len(FIELDS) - 3  # index of the first count of a row


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its global ranks in the order of the group, and its backend."""

    name: str
    ranks: tuple[int, ...]
    backend: str = ""
    seen: bool = True  # whether torch's flight recorder sees the group's collectives

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Key(NamedTuple):
    """What the calls that are counted in one row of the report have in common."""

    phase: str
    operation: str  # what the program called
    done_as: str  # what the backend did: gloo does a reduce_scatter as an all_reduce
    dtype: str
    group: str  # name of the process group
    peer: int  # global rank at the other end of a send or recv; -1 if it is not known
    site: str  # innermost line outside of installed packages: file, number and function
    caller: str  # innermost function that is not torch.distributed's own interface
    # What saw the calls: "recorder", which is torch's flight recorder, or "wrapper", a wrapped Python method.
    source: str


class Count(NamedTuple):
    """The sums over the calls in one row of the report: number of calls, elements and bytes.

    A collective counts with its whole message, although a rank sends only a part of this message.  The whole message of
    an all-gather is the gathered tensor.  The whole message of a reduce-scatter is the tensor that a rank passes in.
    """

    calls: int
    elements: int
    bytes: int

    def plus(self, other: Count) -> Count:
        """Return the sum of two counts, field by field."""
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING: Final = Count(0, 0, 0)
Rows = Mapping[Key, Count]


@dataclass
class Rank:
    """What is known of one rank, a process of the audited program: its calls, and facts about the process."""

    number: int = -1  # global rank
    world: int = 0  # number of ranks of the program
    process: dict[str, Any] = field(default_factory=dict)
    torch: str = ""
    recorders: tuple[str, ...] = ()
    groups: dict[str, Group] = field(default_factory=dict)
    rows: dict[int, dict[Key, Count]] = field(default_factory=dict)  # by step
    whole: int = 0  # number of steps whose calls were read
    steps: int = 0  # number of steps that ended
    model: dict[str, Any] | None = None
    # By step and interface, the bytes that the interface had sent by the end of the step.
    counters: dict[int, dict[str, int]] = field(default_factory=dict)
    # By step, the rows of the calls that were made after the interface counters of this step were read.
    late: dict[int, dict[Key, Count]] = field(default_factory=dict)
    ended: str = ""  # how the process ended; empty if it was killed
    reading: float = 0.0  # share of the process's processor time that reading the recorder took
    notes: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)  # notes that say why calls may be missing from the rows

    def take(self, event: Mapping[str, Any]) -> None:
        """Add the content of one event to this object.

        An event is one line of the file that the witness wrote.  The witness is the recorder of calls in the rank's
        process (:mod:`harness.audit.witness`).
        """
        match event["event"]:
            case "process":
                self.process = dict(event)
                self.number = int(event["environment"].get("RANK", self.number))
            case "torch":
                self.torch, self.recorders = event["version"], tuple(event["recorders"])
            case "rank":
                self.number, self.world = event["rank"], event["world"]
            case "group":
                group = Group(event["name"], tuple(event["ranks"]), event["backend"], event["seen"])
                self.groups[group.name] = group
            case "model":
                self.model = dict(event)
            case "rows":
                counts, last = _counts(event["rows"]), event["last"]
                for step in range(event["first"], (event["first"] if last is None else last) + 1):
                    rows = self.rows.setdefault(step, {})
                    for key, count in counts.items():
                        rows[key] = rows.get(key, NOTHING).plus(count)
                self.whole = max(self.whole, last or 0)
            case "counters":
                self.counters[event["step"]] = event["sent"]
                # The counters were read again after the step, as when a process group is destroyed.  They now count
                # the step's late calls too.
                self.late.pop(event["step"], None)
            case "late":
                self.late[event["step"]] = _counts(event["rows"])
            case "lost":
                self.missed.append(
                    f"the flight recorder overflowed: {event['entries']} calls of steps {event['first']} to "
                    f"{event['last']} are lost; set TORCH_FR_BUFFER_SIZE to a larger number"
                )
            case "unmarked":
                self.missed.append(
                    f"--step-marker {event['module']}:{event['name']}: module {event['module']} has no "
                    f"{event['name']}, so that no step ended; give the name of a function of that module"
                )
            case "fault":
                self.missed.append(f"the audit failed inside the program: {' | '.join(event['text'])}")
            case "end":
                self.ended, self.steps = event["how"], event["steps"]
                self.reading = event["reading"] / event["lasted"] if event.get("lasted") else 0.0


def _counts(rows: Iterable[Sequence[Any]]) -> dict[Key, Count]:
    return {Key(*row[:_FIRST]): Count(*row[_FIRST:]) for row in rows}


@dataclass(frozen=True)
class Topology:
    """The node of each rank."""

    nodes: Mapping[int, int]  # node by global rank

    def place(self, ranks: Iterable[int]) -> str:
        """Return ``inside`` if all ranks share a node, ``between`` if each has a node of its own, else ``across``."""
        nodes = [self.nodes.get(rank, 0) for rank in ranks]
        if len(set(nodes)) <= 1:
            return "inside"
        return "between" if len(set(nodes)) == len(nodes) else "across"

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(set(self.nodes.values()))


@dataclass
class Calls:
    """The calls of all ranks, and what the audit could not see."""

    ranks: list[Rank]
    topology: Topology
    processes: int  # Python processes in which the witness was loaded
    notes: list[str]

    @property
    def world(self) -> int:
        """Number of ranks of the program."""
        return max((rank.world for rank in self.ranks), default=0) or len(self.ranks)

    @property
    def whole(self) -> int:
        """Number of steps, from the first on, whose calls were read on every rank."""
        return min((rank.whole for rank in self.ranks), default=0)

    def group(self, rank: Rank, name: str) -> Group:
        """Return the process group called ``name`` on a rank.

        If the rank knows no group of this name, the returned group has all ranks of the program.
        """
        return rank.groups.get(name) or Group(name, tuple(range(self.world)))

    def steps(self, first: int, last: int | None) -> list[int]:
        """Return the numbers of the steps from ``first`` to ``last`` whose calls were read on every rank.

        Steps are counted from 1.  If ``last`` is None, all later steps are included.  If none of these steps was read
        on every rank, all steps of the program that were read on every rank are returned instead.
        """
        end = self.whole if last is None else min(last, self.whole)
        return list(range(first, end + 1)) or list(range(1, self.whole + 1))


def read(folder: Path, ranks_per_node: int | None = None) -> Calls:
    """Return the calls of all ranks, from the files that the witnesses wrote into ``folder``.

    Args:
        folder: The folder with the witnesses' files.
        ranks_per_node: Number of consecutive ranks on each node.  By default, the node of a rank is taken from the
            environment variables of torchrun or Slurm.  Without these variables, each host is a node.

    Raises:
        Refusal: If a file cannot be read.
    """
    ranks, notes, paths = list[Rank](), list[str](), sorted(folder.glob("*.jsonl"))
    for path in paths:
        rank = Rank()
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                rank.take(json.loads(line))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, json.JSONDecodeError):
                raise Refusal(f"{path}: cannot be read ({error}); run zeropp audit again") from error
            rank.notes.append(
                "the last line of its file is incomplete, as on a full disk: calls may be missing"
            )
        progress = path.with_name(path.name + ".steps")
        if not rank.ended and progress.exists() and (text := progress.read_text(encoding="ascii")):
            rank.steps = int(text)
        if rank.rows or rank.groups or rank.world:
            ranks.append(rank)
    return combine(ranks, notes, processes=len(paths), ranks_per_node=ranks_per_node)


def combine(
    ranks: Sequence[Rank], notes: list[str], *, processes: int, ranks_per_node: int | None = None
) -> Calls:
    """Combine the calls of the program's processes into the calls of all ranks.

    Args:
        ranks: The calls of each process.  If a rank was restarted, only its last process counts.
        notes: Sentences on what the audit could not see.  Further sentences, on the ranks, are appended to this list.
        processes: Number of Python processes in which the witness, the recorder of calls, was loaded.
        ranks_per_node: Number of consecutive ranks on each node.  By default, the nodes follow from the launcher's
            environment variables or, without these, from the hosts of the processes.
    """
    last: dict[int, Rank] = {}
    for rank in sorted(ranks, key=lambda rank: rank.process.get("started", 0)):
        if rank.number in last and rank.number >= 0:
            notes.append(f"rank {rank.number} was started again: only its last process is reported")
        last[rank.number if rank.number >= 0 else -1 - len(last)] = rank
    kept = [last[number] for number in sorted(last)]
    for place, rank in enumerate(kept):
        if rank.number < 0:
            rank.number = place
        notes += [f"rank {rank.number}: {note}" for note in (*rank.missed, *rank.notes)]
        if not rank.ended:
            lost = rank.steps - rank.whole
            after = f"; the calls of its last {lost} steps were not read" if lost > 0 else ""
            notes.append(f"rank {rank.number} was killed in step {rank.steps + 1}{after}")
        unseen = {group.backend for group in rank.groups.values() if not group.seen}
        notes += [
            f"backend {backend} of torch {rank.torch} has no flight recorder: calls from C++, such as DDP's, are not "
            "seen"
            for backend in sorted(unseen)
        ]
    return Calls(kept, _topology(kept, ranks_per_node), processes, list(dict.fromkeys(notes)))


def _topology(ranks: Sequence[Rank], ranks_per_node: int | None) -> Topology:
    """Return the node of each rank of the program.

    - With ``ranks_per_node``, the node is computed from the rank's number.
    - Without it, the node is taken from the file that the rank has written: the node's number by torchrun or Slurm, or
      else the host's name.
    - A rank on another host may have left no file here.  Under torchrun, its node is computed from its number.  Without
      torchrun, all ranks without a file count as one more node.
    """
    world = max((rank.world for rank in ranks), default=0)
    numbers = sorted({*range(world), *(rank.number for rank in ranks)})
    if ranks_per_node is not None:
        return Topology({number: number // ranks_per_node for number in numbers})
    places: dict[int, str] = {}
    for rank in ranks:
        known = rank.process.get("environment", {})
        local = known.get("LOCAL_WORLD_SIZE", "")
        if local and "GROUP_RANK" in known:  # torchrun; ranks without a file are placed by their numbers
            for number in numbers:
                places.setdefault(number, str(number // int(local)))
        number = known.get("GROUP_RANK") or known.get("SLURM_NODEID")
        places[rank.number] = number if number is not None else str(rank.process.get("host", ""))
    names = list(dict.fromkeys(places.get(number, "elsewhere") for number in numbers))
    return Topology({number: names.index(places.get(number, "elsewhere")) for number in numbers})


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the report: equal calls in a step, and the ranks that made them."""

    key: Key
    count: Count  # of each rank, in one step
    ranks: tuple[int, ...]
    groups: tuple[Group, ...]  # disjoint groups of one size


def lines(calls: Calls, step: int) -> list[Line]:
    """Return the report's rows for a step, one for all equal calls of all ranks.

    Calls of two ranks are equal if all of this holds:

    - They have the same :class:`Key`, except for the group's name and the peer of a send or recv.
    - They have the same :class:`Count`.
    - Their groups have the same size, and lie in the same way on the nodes (:meth:`Topology.place`).

    Rows are sorted by phase and, within a phase, by bytes, most bytes first.
    """
    found: dict[tuple[Any, ...], list[tuple[int, Key, Group]]] = defaultdict(list)
    for rank in calls.ranks:
        for key, count in rank.rows.get(step, {}).items():
            group = calls.group(rank, key.group)
            alike = (key._replace(group="", peer=-1), group.size, calls.topology.place(group.ranks), count)
            found[alike].append((rank.number, key, group))
    made = [
        Line(
            members[0][1],
            alike[3],
            tuple(sorted({number for number, _, _ in members})),
            tuple(dict.fromkeys(group for _, _, group in members)),
        )
        for alike, members in found.items()
    ]
    order = {phase: place for place, phase in enumerate(PHASES)}
    return sorted(made, key=lambda line: (order.get(line.key.phase, 9), -line.count.bytes, line.key))


def alike(calls: Calls, steps: Sequence[int]) -> list[list[int]]:
    """Divide steps into classes of equal steps: each rank made the same calls in all steps of a class.

    Returns a list of step numbers for each class.  The largest class comes first.  Among classes of equal size, the
    class with the latest step comes first.
    """
    classes: dict[Any, list[int]] = defaultdict(list)
    for step in steps:
        signature = tuple(frozenset(rank.rows.get(step, {}).items()) for rank in calls.ranks)
        classes[signature].append(step)
    return sorted(classes.values(), key=lambda members: (-len(members), -members[-1]))


def spans(numbers: Iterable[int]) -> str:
    """Return whole numbers as text, sorted, with runs of consecutive numbers shortened.

    For 6, 0, 1, 2 and 3 this is ``0-3, 6``.
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
