"""Supervisors of a run's nodes: the first says what is run, every one starts and watches its node's ranks.

A supervisor outlives its ranks: whichever of them fails, on whichever host, the others are ended, and the
next piece of work begins with fresh ones.  Work is named, and its argument and results travel as JSON: the
first posts commands, numbered, and each node that is concerned an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from harness.cluster.control import POLL_SECONDS, Channel, ChannelError, Place, host_identity, port_towards
from harness.cluster.link import Port
from harness.cluster.nic_shaper import Request, shaped_interface
from harness.cluster.rank import Progress, Rank
from harness.cluster.rank_processes import Launch, LaunchError, run_ranks
from harness.errors import LinkError, Refusal
from harness.suites.quantities import CANONICAL

_CAUSE_SECONDS: Final = 12.0  # for the node to speak whose loss another one reports
_CLEAR_SECONDS: Final = 30.0  # for other nodes to end their ranks
_SHAPE_SECONDS: Final = 120.0  # for other nodes to shape their interface
_BYE_SECONDS: Final = 5.0  # for other nodes to read that it is over
_LOG_LETTERS: Final = 200_000  # of a node's log that travel
# What came of a command: "results", what a shaped interface was, or a failure's "kind" and "message".
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """What ranks can be told to do."""

    target: Callable[[Rank, Any], Any]  # module-level function of a rank and its argument
    # argument, result: types of both, which travel as JSON
    argument: TypeAdapter[Any]
    result: TypeAdapter[Any]


@dataclass(frozen=True, slots=True)
class Node:
    """One node as its supervisor describes it."""

    port: Port
    identity: str  # of its host
    facts: dict[str, Any]


_NODE: Final = TypeAdapter(Node)
_LAUNCH: Final = TypeAdapter(Launch)


@dataclass(slots=True)
class Nodes:
    """All nodes of a run, for the supervisor that leads."""

    channel: Channel
    works: Mapping[str, Work]  # what ranks can be told to do, by name
    nodes: list[Node]
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # this host's shaped interface
    _commands: int = 0
    _over: bool = False

    @property
    def ports(self) -> tuple[Port, ...]:
        """Each node's interface towards the others."""
        return tuple(node.port for node in self.nodes)

    def on_one_host(self, count: int) -> tuple[int, int] | None:
        """Two of the first ``count`` nodes that stand on one host; None if they are distinct."""
        first: dict[str, int] = {}
        for number, node in enumerate(self.nodes[:count]):
            if (other := first.setdefault(node.identity, number)) != number:
                return other, number
        return None

    def check_code(self) -> None:
        """Refuse nodes that run other code than the first one, by a Refusal."""
        codes = [node.facts.get("code", {}) for node in self.nodes]
        for number, code in enumerate(codes):
            for name in ("version", "source"):
                if code.get(name) != codes[0].get(name):
                    raise Refusal(
                        f"node {number} has another zeropp-bench than node 0: {name} {code.get(name)}, "
                        f"not {codes[0].get(name)}"
                    )

    def run(
        self, name: str, argument: Any, launch: Launch, on_progress: Callable[[Progress], None]
    ) -> list[Any]:
        """Run work ``name`` on the first nodes, as many as ``launch`` has; returns its results by rank.

        A LaunchError, or Ctrl-C, is raised after the ranks of all nodes have ended.
        """
        work, others = self.works[name], range(1, launch.topology.nodes)
        number = self._tell(
            work=name,
            nodes=launch.topology.nodes,
            argument=work.argument.dump_python(argument, mode="json"),
            launch=_LAUNCH.dump_python(launch, mode="json"),
        )

        def trouble() -> str | None:
            answers = self._answers(number, others, 0).items()
            return next((f"node {node}: {one['message']}" for node, one in answers if "kind" in one), None)

        own = replace(launch, node=0, meeting=self.channel.place.ranks_of(number))
        error = None
        try:
            found = run_ranks(work.target, argument, own, on_progress, trouble)
            answers = self._answers(number, others, launch.timeout_seconds)
            if all("results" in answers.get(node, {}) for node in others):
                results = itertools.chain(*(answers[node]["results"] for node in others))
                return [*found, *map(work.result.validate_python, results)]
        except LaunchError as caught:
            error = caught
            if error.effect or error.kind == "timeout":
                self._answers(number, others, _CAUSE_SECONDS, cause=error.effect)
        except BaseException:
            self._stop(number, others)
            raise
        raise _cause(error, self._stop(number, others), launch.log) from error

    def shape(self, rate_mbit: float | None, count: int) -> list[Answer]:
        """Hold what leaves the interfaces of the first ``count`` nodes to a rate, None: no longer; returns
        what each found (:func:`~harness.cluster.nic_shaper.shaped_interface`).

        A LinkError if one refuses, and then none is held; a Refusal if one may still be held, since no
        further link would be what it is called.
        """
        addresses = [port.address for port in self.ports[:count]]
        number = self._tell(shape=rate_mbit, nodes=count, addresses=addresses)
        answers = {0: _shaped(self._held, self.ports[0], rate_mbit, addresses)}
        answers |= self._answers(number, range(1, count), _SHAPE_SECONDS)
        silent = {"kind": "timeout", "message": f"no answer after {_SHAPE_SECONDS:g} s"}
        told = [answers.get(node, silent) for node in range(count)]
        failed = {node: one for node, one in enumerate(told) if "kind" in one}
        if rate_mbit is None:  # a supervisor that is lost has let go of its own
            failed = {node: one for node, one in failed.items() if one["kind"] != "lost"}
        for node, one in failed.items():
            why = f"node {node}: {one['message']}"
            if rate_mbit is None:
                raise Refusal(why)
            self.unshape(count)
            raise LinkError(why)
        return told

    def unshape(self, count: int) -> None:
        """Hold the interfaces no longer; a Refusal if one may still be held."""
        with contextlib.suppress(ChannelError):
            self.shape(None, count)

    def end(self, status: int) -> None:
        """Let the other supervisors end with ``status``, and wait until they know."""
        if self._over:
            return
        self._over = True
        with contextlib.suppress(ChannelError):
            number = self._tell(status=status)
            self.channel.post("over", status)
            self._answers(number, range(1, len(self.nodes)), _BYE_SECONDS)
        self._held.close()

    def _tell(self, **command: Any) -> int:
        """Post a command to the other nodes; returns its number."""
        self._commands += 1
        self.channel.post(f"command/{self._commands}", command)
        return self._commands

    def _answers(
        self, number: int, nodes: Sequence[int], seconds: float, *, cause: bool = False
    ) -> dict[int, Answer]:
        """What nodes answer, or that they are lost: once all do, or ``seconds`` have passed, or, with
        ``cause``, once one of them says what failed and is no effect.
        """
        deadline, found = time.monotonic() + seconds, dict[int, Answer]()
        while True:
            for node in set(nodes) - found.keys():
                if (answer := self.channel.read(f"answer/{number}/{node}")) is not None:
                    found[node] = answer
                elif self.channel.lost((node,)) is not None:
                    message = f"node {node} is lost: its supervisor does not answer"
                    found[node] = {"kind": "lost", "message": message}
            seen = cause and any("kind" in one and not one.get("effect") for one in found.values())
            if seen or len(found) == len(nodes) or time.monotonic() >= deadline:
                return found
            time.sleep(POLL_SECONDS)

    def _stop(self, number: int, others: Sequence[int]) -> dict[int, Answer]:
        """End the work on the other nodes; returns what they answer once their ranks have ended."""
        self.channel.post(f"stop/{number}", True)
        return self._answers(number, others, _CLEAR_SECONDS)


@contextlib.contextmanager
def leading(
    place: Place,
    works: Mapping[str, Work],
    facts: dict[str, Any],
    start: Callable[[Place], contextlib.AbstractContextManager[Callable[[], None]]] | None = None,
) -> Iterator[Nodes]:
    """Lead the supervisors of all nodes in the body; after it they are told to end, with the status that
    :meth:`Nodes.end` was given, else with 1. A Refusal if they do not come together.

    ``start`` starts the others, if no launcher did; what it yields raises a Refusal once one has ended early.
    """
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(Channel(place))
        check = (lambda: None) if start is None else stack.enter_context(start(channel.place))
        nodes = Nodes(channel, works, [])
        try:
            for node in range(1, place.nodes):
                told = channel.wait(f"node/{node}", of=node, meanwhile=check)
                nodes.nodes.append(_NODE.validate_python(told))
            nodes.nodes.insert(0, _me(channel, facts))
            yield nodes
        except ChannelError as error:
            raise Refusal(f"the nodes' supervisors lost each other: {error}") from error
        finally:
            nodes.end(1)


def follow(place: Place, works: Mapping[str, Work], facts: dict[str, Any]) -> int:
    """Be the supervisor of another node until the leading one ends; returns the status that it says.

    A Refusal if that one cannot be reached any more, a LinkError if this host may still be shaped.
    """
    try:
        with Channel(place) as channel, contextlib.ExitStack() as held:
            if place.waits:
                return int(channel.wait("over"))  # a process of the launcher that is no supervisor
            me = _me(channel, facts)
            channel.post(f"node/{place.node}", _NODE.dump_python(me, mode="json"))
            number = 1
            while "status" not in (command := channel.wait(f"command/{number}")):
                if place.node < command["nodes"]:
                    answer = (
                        _shaped(held, me.port, command["shape"], command["addresses"])
                        if "shape" in command
                        else _done(channel, works, number, command)
                    )
                    channel.post(f"answer/{number}/{place.node}", answer)
                number += 1
            channel.post(f"answer/{number}/{place.node}", {})
            return int(command["status"])
    except ChannelError as error:
        raise Refusal(
            f"node {place.node}: the supervisor of node 0 has ended, or is lost ({error})"
        ) from error


def _shaped(
    held: contextlib.ExitStack, port: Port, rate_mbit: float | None, addresses: Sequence[str]
) -> Answer:
    """Hold this node's interface to another rate, or none; returns the answer."""
    others = [address for address in addresses if address != port.address]
    try:
        held.close()
        if rate_mbit is None:
            return {}
        return held.enter_context(shaped_interface(Request(str(port.interface), rate_mbit, others)))
    except LinkError as error:
        return {"kind": "link", "message": str(error)}


def _done(channel: Channel, works: Mapping[str, Work], number: int, command: dict[str, Any]) -> Answer:
    """Do one piece of work on this node; returns the answer."""
    work, place = works[command["work"]], channel.place

    def stopped() -> str | None:
        if channel.read(f"stop/{number}") is not None:
            return "stopped, because another node's ranks failed"
        return None if channel.lost((0,)) is None else "node 0 is lost"

    with tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as scratch:
        launch = replace(
            _LAUNCH.validate_python(command["launch"]),
            log=Path(scratch, "log"),
            scratch=Path(scratch),
            node=place.node,
            meeting=place.ranks_of(number),
        )
        argument = work.argument.validate_python(command["argument"], context=CANONICAL)
        try:
            found = run_ranks(work.target, argument, launch, stopped=stopped)
        except LaunchError as error:
            log = "" if error.log is None else error.log.read_text(encoding="utf-8", errors="replace")
            failed = {"kind": error.kind, "message": str(error), "effect": error.effect}
            return failed | {"log": log[-_LOG_LETTERS:]}
        return {"results": [work.result.dump_python(one, mode="json") for one in found]}


def _cause(error: LaunchError | None, answers: Mapping[int, Answer], log: Path) -> LaunchError:
    """The most likely cause of a failure; the logs of other nodes are put behind this one's."""
    failed = {node: one for node, one in answers.items() if "kind" in one}
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a" if error is not None and error.log is not None else "w", encoding="utf-8") as whole:
            whole.writelines(f"== node {node} ==\n{one.get('log', '')}" for node, one in failed.items())
    told = [*failed.values()]
    if error is not None:
        told.insert(0, {"kind": error.kind, "message": str(error), "effect": error.effect})
    if error is not None and error.kind == "timeout":
        late = (one["message"] for one in told if one["kind"] == "timeout")
        told = [told[0] | {"message": "; ".join(late)}]
    told = told or [{"kind": "timeout", "message": "no answer from another node"}]
    first = min(told, key=lambda one: bool(one.get("effect")))
    there = log if log.exists() else None
    return LaunchError(first["kind"], first["message"], there, effect=bool(first.get("effect")))


def _me(channel: Channel, facts: dict[str, Any]) -> Node:
    return Node(port_towards(channel), host_identity(), facts)
