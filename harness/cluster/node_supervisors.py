"""Supervisors of a run's nodes: the first says what is run, every one starts and watches its node's ranks.

A supervisor outlives its ranks: whichever of them fails, on whichever host, the others are ended, and the
next piece of work begins with fresh ones.  Work is a function that all know by its name, and its argument and
results travel as JSON: the first posts commands, numbered, and each node that is concerned an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter

from harness.cluster import remote
from harness.cluster.control_channel import POLL_SECONDS, Channel, ChannelError, Place
from harness.cluster.nic_shaper import shaped_interface
from harness.cluster.port import Port, host_identity, port_towards
from harness.cluster.rank import Progress, Rank
from harness.cluster.rank_processes import Launch, LaunchError, run_ranks
from harness.errors import LinkError, Refusal
from harness.suites.parse_quantity import CANONICAL

_CAUSE_SECONDS: Final = 12.0  # for the node to speak whose loss another one reports
_CLEAR_SECONDS: Final = 30.0  # for other nodes to end their ranks
_BYE_SECONDS: Final = 5.0  # for other nodes to read that it is over
_LOG_LETTERS: Final = 200_000  # of a node's log that travel
# What came of work: "results", and what a "shaped" interface was; or a failure's "kind" and "message".
Answer = dict[str, Any]
Work = Callable[[Rank, Any], Any]  # module-level function of a rank and its argument


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
    nodes: list[Node]
    shaped: list[dict[str, Any]] = field(default_factory=list)  # what interfaces were before they were shaped
    status: int = 1  # with which the other supervisors end
    _commands: int = 0

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
        self, work: Work, argument: Any, launch: Launch, on_progress: Callable[[Progress], None]
    ) -> list[Any]:
        """Run work on the first nodes, as many as ``launch`` has; returns its results by rank.  A LaunchError
        or Ctrl-C is raised after the ranks of all nodes have ended.
        """
        others, (argument_type, result_type) = range(1, launch.topology.nodes), _types(work)
        number = self._tell(
            work=work.__name__,
            nodes=launch.topology.nodes,
            argument=argument_type.dump_python(argument, mode="json"),
            launch=_LAUNCH.dump_python(launch, mode="json"),
        )

        def trouble() -> str | None:
            answers = self._answers(number, others, 0).items()
            return next((f"node {node}: {one['message']}" for node, one in answers if "kind" in one), None)

        own = replace(launch, node=0, meeting=self.channel.place.ranks_of(number))
        error = None
        try:
            with _shaped(own, 0) as before:
                found = run_ranks(work, argument, own, on_progress, trouble)
            answers = self._answers(number, others, launch.timeout_seconds)
            if all("results" in answers.get(node, {}) for node in others):
                self.shaped = [before, *(answers[node]["shaped"] for node in others)]
                results = itertools.chain(*(answers[node]["results"] for node in others))
                return [*found, *map(result_type.validate_python, results)]
        except LaunchError as caught:
            error = caught
            if error.effect or error.kind == "timeout":
                self._answers(number, others, _CAUSE_SECONDS, cause=error.effect)
        except BaseException:
            self._stop(number, others)
            raise
        raise _cause(error, self._stop(number, others), launch.log) from error

    def end(self) -> None:
        """Let the other supervisors end, and wait until they know."""
        with contextlib.suppress(ChannelError):
            number = self._tell(status=self.status)
            self.channel.post("over", self.status)
            self._answers(number, range(1, len(self.nodes)), _BYE_SECONDS)

    def _tell(self, **command: Any) -> int:
        """Post a command to the other nodes; returns its number."""
        self._commands += 1
        self.channel.post(f"command/{self._commands}", command)
        return self._commands

    def _answers(
        self, number: int, nodes: Sequence[int], seconds: float, *, cause: bool = False
    ) -> dict[int, Answer]:
        """What nodes answer, or that they are lost, within ``seconds``, or once one is the ``cause``."""
        deadline, found = time.monotonic() + seconds, dict[int, Answer]()
        while True:
            for node in set(nodes) - found.keys():
                if (answer := self.channel.read(f"answer/{number}/{node}")) is not None:
                    found[node] = answer
                elif self.channel.lost(node):
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


def _types(work: Work) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Those of its argument and of its result."""
    _, argument, result = get_type_hints(work).values()
    return TypeAdapter(argument), TypeAdapter(result)


@contextlib.contextmanager
def leading(place: Place, facts: dict[str, Any], hosts: Sequence[str] = ()) -> Iterator[Nodes]:
    """Lead the supervisors of all nodes in the body, after which they end with its ``status``; a Refusal if
    they do not come together.  Those of ``hosts`` are started here, if no launcher did.
    """
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(Channel(place))
        check = stack.enter_context(remote.supervisors(hosts, channel.place))
        nodes = Nodes(channel, [])
        try:
            for node in range(1, place.nodes):
                told = channel.wait(f"node/{node}", of=node, meanwhile=check)
                nodes.nodes.append(_NODE.validate_python(told))
            nodes.nodes.insert(0, _me(channel, facts))
            yield nodes
        except ChannelError as error:
            raise Refusal(f"the nodes' supervisors lost each other: {error}") from error
        finally:
            nodes.end()


def follow(place: Place, works: Mapping[str, Work], facts: dict[str, Any]) -> int:
    """Be the supervisor of another node until the leading one ends; returns the status that it says."""
    try:
        with Channel(place) as channel:
            if place.waits:
                return int(channel.wait("over"))  # a process of the launcher that is no supervisor
            me = _me(channel, facts)
            channel.post(f"node/{place.node}", _NODE.dump_python(me, mode="json"))
            number = 1
            while "status" not in (command := channel.wait(f"command/{number}")):
                if place.node < command["nodes"]:
                    channel.post(f"answer/{number}/{place.node}", _done(channel, works, number, command))
                number += 1
            channel.post(f"answer/{number}/{place.node}", {})
            return int(command["status"])
    except ChannelError as error:
        raise Refusal(
            f"node {place.node}: the supervisor of node 0 has ended, or is lost ({error})"
        ) from error


@contextlib.contextmanager
def _shaped(launch: Launch, node: int) -> Iterator[dict[str, Any]]:
    """Hold this node's interface in the body to its rate, if it has one; yields what it was."""
    own = launch.ports[node]
    if own.shaped_mbit is None:
        yield {}
        return
    others = [port.address for number, port in enumerate(launch.ports) if number != node]
    with shaped_interface(str(own.interface), own.shaped_mbit, others) as found:
        yield found


def _done(channel: Channel, works: Mapping[str, Work], number: int, command: dict[str, Any]) -> Answer:
    """Do one piece of work on this node; returns the answer."""
    work, place = works[command["work"]], channel.place
    argument_type, result_type = _types(work)

    def stopped() -> str | None:
        if channel.read(f"stop/{number}") is not None:
            return "stopped, because another node's ranks failed"
        return "node 0 is lost" if channel.lost(0) else None

    with tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as scratch:
        launch = replace(
            _LAUNCH.validate_python(command["launch"]),
            log=Path(scratch, "log"),
            node=place.node,
            meeting=place.ranks_of(number),
        )
        argument = argument_type.validate_python(command["argument"], context=CANONICAL)
        try:
            with _shaped(launch, place.node) as before:
                found = run_ranks(work, argument, launch, stopped=stopped)
        except LinkError as error:
            return {"kind": "link", "message": str(error)}
        except LaunchError as error:
            log = "" if error.log is None else error.log.read_text(encoding="utf-8", errors="replace")
            failed = {"kind": error.kind, "message": str(error), "effect": error.effect}
            return failed | {"log": log[-_LOG_LETTERS:]}
        return {"results": [result_type.dump_python(one, mode="json") for one in found], "shaped": before}


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
