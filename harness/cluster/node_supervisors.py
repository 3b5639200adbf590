"""Supervisors of a run's nodes: the first says what is run, every one starts and watches its node's ranks.

A supervisor outlives its ranks: whichever of them fails, on whichever host, the others are ended, and the
next piece of work begins with fresh ones.  Work is named, and its argument and results travel as JSON.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from harness.cluster.control import POLL_SECONDS, Channel, ChannelError, Place, host_identity, port_towards
from harness.cluster.link import LinkError, Port
from harness.cluster.nic_shaper import Request, ShapedInterface
from harness.cluster.rank import Progress, Rank
from harness.cluster.rank_processes import Launch, LaunchError, run_ranks
from harness.errors import Refusal
from harness.suites.quantities import CANONICAL
from impl.plan.topology import Topology

_CAUSE_SECONDS: Final = 12.0  # for the node to speak whose loss another one reports
_CLEAR_SECONDS: Final = 30.0  # for other nodes to end their ranks
_SHAPE_SECONDS: Final = 120.0  # for other nodes to shape their interface
_BYE_SECONDS: Final = 5.0  # for other nodes to read that it is over
_LOG_LETTERS: Final = 200_000  # of a node's log that travel


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


@dataclass(slots=True)
class Nodes:
    """All nodes of a run, for the supervisor that leads."""

    channel: Channel
    works: Mapping[str, Work]  # what ranks can be told to do, by name
    nodes: list[Node]
    stuck: str | None = None  # why no further link between these nodes would be what it is called
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _number: int = 0
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
        number, work, count = self._number, self.works[name], launch.topology.nodes
        self._number += 1
        command = {
            "work": name,
            "argument": work.argument.dump_python(argument, mode="json"),
            "topology": [launch.topology.nodes, launch.topology.ranks_per_node],
            "ports": [astuple(port) for port in launch.ports],
            "threads": launch.threads,
            "timeout_seconds": launch.timeout_seconds,
            "backend": launch.backend,
            "paced": [launch.paced_mbit, launch.paced_latency_ms],
        }
        self.channel.post(f"command/{number}", command)
        others = range(1, count)
        try:
            found = run_ranks(
                work.target,
                argument,
                replace(launch, node=0, meeting=self.channel.place.ranks_of(number)),
                on_progress,
                lambda: self._trouble(number, others),
            )
            answers = {node: self._answer(number, node, launch.timeout_seconds) for node in others}
            failed = {node: answer for node, answer in answers.items() if "kind" in answer}
            if not failed:
                results = [
                    work.result.validate_python(one) for node in others for one in answers[node]["results"]
                ]
                return [*found, *results]
            error = None
        except LaunchError as caught:
            error, failed = caught, self._failures(number, others, caught)
        except BaseException:
            self._stop(number, others)
            raise
        self._stop(number, others)
        raise _cause(error, failed, launch.log) from error

    def shape(self, rate_mbit: float | None, count: int) -> list[dict[str, Any]]:
        """Hold what leaves the interfaces of the first ``count`` nodes to a rate, None: no longer; returns
        what each found (:attr:`~harness.cluster.nic_shaper.ShapedInterface.found`).

        If one refuses, none is held; after one that could not let go everything is refused.
        """
        if self.stuck is not None:
            raise LinkError(self.stuck)
        number = self._number
        self._number += 1
        addresses = [port.address for port in self.ports[:count]]
        command = {"shape": rate_mbit, "topology": [count, 1], "addresses": addresses}
        self.channel.post(f"command/{number}", command)
        own = _shaped(self._held, self.ports[0], 0, command)
        answers = [own, *(self._answer(number, node, _SHAPE_SECONDS) for node in range(1, count))]
        refused = [
            f"node {node}: {one['message']}"
            for node, one in enumerate(answers)
            if "kind" in one and not (rate_mbit is None and one["kind"] == "lost")
        ]
        if refused and rate_mbit is None:
            self.stuck = refused[0]
        elif refused:
            with contextlib.suppress(LinkError):  # which every later link meets
                self.unshape(count)
        if refused:
            raise LinkError(refused[0])
        return answers

    def unshape(self, count: int) -> None:
        """Hold the interfaces no longer; a supervisor that is lost has let go of its own.

        Raises:
            LinkError: if one may still be held.
        """
        with contextlib.suppress(ChannelError):
            self.shape(None, count)

    def end(self, status: int) -> None:
        """Let the other supervisors end with ``status``, and wait until they know."""
        if self._over:
            return
        self._over = True
        _let_go(self._held)
        with contextlib.suppress(ChannelError):
            self.channel.post(f"command/{self._number}", {"status": status})
            self.channel.post("over", status)
            self._until(
                lambda node: self.channel.read(f"bye/{node}"), range(1, len(self.nodes)), _BYE_SECONDS
            )

    def _trouble(self, number: int, others: Sequence[int]) -> str | None:
        """What has failed on another node, in words."""
        if (lost := self.channel.lost(others)) is not None:
            return f"node {lost} is lost"
        for node in others:
            answer = self.channel.read(f"answer/{number}/{node}")
            if answer is not None and "kind" in answer:
                return f"node {node}: {answer['message']}"
        return None

    def _answer(self, number: int, node: int, seconds: float) -> dict[str, Any]:
        """A node's answer, of its loss too."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (answer := self.channel.read(f"answer/{number}/{node}")) is not None:
                return dict(answer)
            if self.channel.lost((node,)) is not None:
                return _lost(node)
            time.sleep(POLL_SECONDS)
        return {"kind": "timeout", "message": f"no answer from node {node} after {seconds:g} s"}

    def _failures(self, number: int, others: Sequence[int], error: LaunchError) -> dict[int, dict[str, Any]]:
        """What other nodes say has failed, soon after something did here.

        Of an effect until its cause is there; of a time that is over from all of them.
        """
        late = error.kind == "timeout"
        deadline = time.monotonic() + (_CAUSE_SECONDS if late or error.effect else 10 * POLL_SECONDS)
        found: dict[int, dict[str, Any]] = {}
        while True:
            for node in others:
                answer = self.channel.read(f"answer/{number}/{node}")
                if answer is not None and "kind" in answer:
                    found[node] = answer
            if (lost := self.channel.lost(others)) is not None:
                found[lost] = _lost(lost)
            causes = sum(not answer.get("effect") for answer in found.values())
            if time.monotonic() >= deadline or causes >= (len(others) if late else 1):
                return found
            time.sleep(POLL_SECONDS)

    def _stop(self, number: int, others: Sequence[int]) -> None:
        """End the work on the other nodes, and wait until their ranks have ended."""
        self.channel.post(f"stop/{number}", True)
        self._until(lambda node: self.channel.read(f"answer/{number}/{node}"), others, _CLEAR_SECONDS)

    def _until(self, done: Callable[[int], Any], nodes: Sequence[int], seconds: float) -> None:
        deadline, left = time.monotonic() + seconds, set(nodes)
        while left and time.monotonic() < deadline:
            left = {node for node in left if done(node) is None and self.channel.lost((node,)) is None}
            time.sleep(POLL_SECONDS if left else 0)


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
            while len(nodes.nodes) < place.nodes - 1:
                number = len(nodes.nodes) + 1
                told = channel.wait(f"node/{number}", of=number, meanwhile=check)
                nodes.nodes.append(Node(Port(*told["port"]), told["identity"], told["facts"]))
            nodes.nodes.insert(0, _me(channel, facts))
            yield nodes
        except ChannelError as error:
            raise Refusal(f"the nodes' supervisors lost each other: {error}") from error
        finally:
            nodes.end(1)


def follow(place: Place, works: Mapping[str, Work], facts: dict[str, Any]) -> int:
    """Be the supervisor of another node until the leading one ends; returns the status that it says.

    Raises:
        Refusal: if that one cannot be reached any more.
    """
    try:
        with Channel(place) as channel, contextlib.ExitStack() as last:
            last.callback(_let_go, held := contextlib.ExitStack())
            if place.waits:
                return int(channel.wait("over"))  # a process of the launcher that is no supervisor
            me = _me(channel, facts)
            channel.post(
                f"node/{place.node}",
                {"port": [me.port.interface, me.port.address], "identity": me.identity, "facts": me.facts},
            )
            number = 0
            while "status" not in (command := channel.wait(f"command/{number}")):
                if place.node < command["topology"][0]:
                    answer = (
                        _shaped(held, me.port, place.node, command)
                        if "shape" in command
                        else _done(channel, works, number, command)
                    )
                    channel.post(f"answer/{number}/{place.node}", answer)
                number += 1
            channel.post(f"bye/{place.node}", True)
            return int(command["status"])
    except ChannelError as error:
        raise Refusal(
            f"node {place.node}: the supervisor of node 0 has ended, or is lost ({error})"
        ) from error


def _lost(node: int) -> dict[str, Any]:
    return {"kind": "lost", "message": f"node {node} is lost: its supervisor does not answer"}


def _let_go(held: contextlib.ExitStack) -> None:
    """Hold an interface no longer, or say on standard error what removes its queue: nobody asks any more."""
    try:
        held.close()
    except LinkError as error:
        print(error, file=sys.stderr, flush=True)


def _shaped(held: contextlib.ExitStack, port: Port, node: int, command: dict[str, Any]) -> dict[str, Any]:
    """Hold this node's interface to another rate, or none; returns the answer."""
    others = [address for number, address in enumerate(command["addresses"]) if number != node]
    try:
        held.close()
        if command["shape"] is None:
            return {}
        shaped = held.enter_context(ShapedInterface(Request(str(port.interface), command["shape"], others)))
    except LinkError as error:
        return {"kind": "link", "message": str(error)}
    return shaped.found


def _done(
    channel: Channel, works: Mapping[str, Work], number: int, command: dict[str, Any]
) -> dict[str, Any]:
    """Do one piece of work on this node; returns the answer."""
    work, place = works[command["work"]], channel.place

    def stopped() -> str | None:
        if channel.read(f"stop/{number}") is not None:
            return "stopped, because another node's ranks failed"
        return None if channel.lost((0,)) is None else "node 0 is lost"

    with tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as scratch:
        launch = Launch(
            topology=Topology(*command["topology"]),
            ports=tuple(Port(*port) for port in command["ports"]),
            paced_mbit=command["paced"][0],
            paced_latency_ms=command["paced"][1],
            threads=command["threads"],
            timeout_seconds=command["timeout_seconds"],
            log=Path(scratch) / "log",
            backend=command["backend"],
            scratch=Path(scratch),
            node=place.node,
            meeting=place.ranks_of(number),
        )
        argument = work.argument.validate_python(command["argument"], context=CANONICAL)
        try:
            found = run_ranks(work.target, argument, launch, stopped=stopped)
        except LaunchError as error:
            log = "" if error.log is None else error.log.read_text(encoding="utf-8", errors="replace")
            return {
                "kind": error.kind,
                "message": str(error),
                "effect": error.effect,
                "log": log[-_LOG_LETTERS:],
            }
        return {"results": [work.result.dump_python(one, mode="json") for one in found]}


def _cause(error: LaunchError | None, failed: dict[int, dict[str, Any]], log: Path) -> LaunchError:
    """The most likely cause of a failure; the logs of other nodes are put behind this one's."""
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a" if error is not None and error.log is not None else "w", encoding="utf-8") as whole:
            whole.writelines(f"== node {node} ==\n{answer.get('log', '')}" for node, answer in failed.items())
    there = log if log.exists() else None
    late = [one["message"] for one in failed.values() if one["kind"] == "timeout"]
    if error is not None and error.kind == "timeout":
        return LaunchError("timeout", "; ".join([str(error), *late]), there)
    cause = next((one for one in failed.values() if not one.get("effect")), None)
    if cause is not None and (error is None or error.effect):
        return LaunchError(cause["kind"], cause["message"], there)
    if error is not None:
        return LaunchError(error.kind, str(error), there, effect=error.effect)
    first = next(iter(failed.values()))
    return LaunchError(first["kind"], first["message"], there)


def _me(channel: Channel, facts: dict[str, Any]) -> Node:
    return Node(port_towards(channel), host_identity(), facts)
