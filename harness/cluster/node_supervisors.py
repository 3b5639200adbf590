"""Supervisors of a run's nodes: the first one leads, and each starts and watches its node's ranks.

A supervisor outlives its ranks: when a rank fails on any host, the others are ended, and the next piece of
work begins with fresh ones.  Work is a function that all know by its name, and its argument and results
travel as JSON: the first supervisor posts numbered commands, and each node of the work posts an answer.
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
from harness.cluster.rank import Rank, Report
from harness.cluster.rank_processes import Launch, LaunchError, StopReason, run_ranks
from harness.errors import LinkError, Refusal
from harness.suites.parse_quantity import CANONICAL

_CAUSE_SECONDS: Final = 12.0  # for the answer of a node that another one reports lost
_CLEAR_SECONDS: Final = 30.0  # for other nodes to end their ranks
_BYE_SECONDS: Final = 5.0  # for other nodes to read that it is over
_LOG_LETTERS: Final = 200_000  # of a node's log that travel
# A node's outcome of work: "results" and the "shaped" interface; or a failure's "kind" and "message".
Answer = dict[str, Any]
_SILENT: Final[Answer] = {"kind": "timeout", "message": "no answer from another node"}
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
    shaped: list[dict[str, Any]] = field(default_factory=list)  # interfaces, as before they were shaped
    status: int = 1  # with which the other supervisors end
    _commands: int = 0

    def on_one_host(self, count: int) -> tuple[int, int] | None:
        """Two of the first ``count`` nodes that share a host; None if their hosts are distinct."""
        first: dict[str, int] = {}
        for number, node in enumerate(self.nodes[:count]):
            if (other := first.setdefault(node.identity, number)) != number:
                return other, number
        return None

    def check_code(self) -> None:
        """Raise a Refusal if a node runs other code than the first one."""
        codes = [node.facts.get("code", {}) for node in self.nodes]
        for number, code in enumerate(codes):
            for name in ("version", "source"):
                if code.get(name) != codes[0].get(name):
                    difference = f"{name} {code.get(name)}, not {codes[0].get(name)}"
                    raise Refusal(f"node {number} has another zeropp-bench than node 0: {difference}")

    def run(self, work: Work, argument: Any, launch: Launch, on_progress: Report) -> list[Any]:
        """Run work on the first nodes, as many as ``launch`` has; returns its results by rank.  A LaunchError
        or Ctrl-C is raised after the ranks of all nodes have ended.
        """
        others, (argument_type, result_type) = range(1, launch.topology.nodes), _types(work)
        number = self._command(
            work=work.__name__,
            nodes=launch.topology.nodes,
            argument=argument_type.dump_python(argument, mode="json"),
            launch=_LAUNCH.dump_python(launch, mode="json"),
        )

        def failure() -> str | None:
            answers = self._answers(number, others, 0).items()
            messages = [f"node {node}: {other['message']}" for node, other in answers if "kind" in other]
            return messages[0] if messages else None

        launch.log.unlink(missing_ok=True)  # an earlier attempt's
        try:
            local = replace(launch, node=0, meeting=self.channel.place.for_ranks(number))
            answer, seconds = _run(work, argument, local, on_progress, failure), launch.timeout_seconds
            if "kind" in answer:
                seconds = _CAUSE_SECONDS if answer.get("effect") or answer["kind"] == "timeout" else 0.0
            answers = {0: answer} | self._answers(number, others, seconds, cause=bool(answer.get("effect")))
        except BaseException:
            self._stop(number, others)
            raise
        if all("results" in answers.get(node, {}) for node in (0, *others)):
            self.shaped = [answers[node]["shaped"] for node in (0, *others)]
            results = itertools.chain(*(answers[node]["results"] for node in (0, *others)))
            return [*map(result_type.validate_python, results)]
        raise _cause({0: answer} | self._stop(number, others), launch.log)

    def end(self) -> None:
        """Let the other supervisors end, and wait until they know."""
        with contextlib.suppress(ChannelError):
            number = self._command(status=self.status)
            self.channel.post("over", self.status)
            self._answers(number, range(1, len(self.nodes)), _BYE_SECONDS)

    def _command(self, **command: Any) -> int:
        """Post a command to the other nodes; returns its number."""
        self._commands += 1
        self.channel.post(f"command/{self._commands}", command)
        return self._commands

    def _answers(
        self, number: int, nodes: Sequence[int], seconds: float, *, cause: bool = False
    ) -> dict[int, Answer]:
        """Answers of nodes, or their loss, within ``seconds``; with ``cause`` until one failed by itself."""
        deadline, answers = time.monotonic() + seconds, dict[int, Answer]()
        while True:
            for node in set(nodes) - answers.keys():
                if (answer := self.channel.read(f"answer/{number}/{node}")) is not None:
                    answers[node] = answer
                elif self.channel.lost(node):
                    message = f"node {node} is lost: its supervisor does not answer"
                    answers[node] = {"kind": "lost", "message": message}
            seen = cause and any("kind" in answer and not answer.get("effect") for answer in answers.values())
            if seen or len(answers) == len(nodes) or time.monotonic() >= deadline:
                return answers
            time.sleep(POLL_SECONDS)

    def _stop(self, number: int, others: Sequence[int]) -> dict[int, Answer]:
        """End the work on the other nodes; returns their answers, posted once their ranks have ended."""
        self.channel.post(f"stop/{number}", True)
        return self._answers(number, others, _CLEAR_SECONDS)


def _types(work: Work) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """The types of its argument and of its result."""
    _, argument, result = get_type_hints(work).values()
    return TypeAdapter(argument), TypeAdapter(result)


@contextlib.contextmanager
def lead(place: Place, facts: dict[str, Any], hosts: Sequence[str] = ()) -> Iterator[Nodes]:
    """Lead the supervisors of all nodes in the body, after which they end with its ``status``; a Refusal if
    they do not come together.  Starts the supervisors of ``hosts``, where no launcher has.
    """
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(Channel(place))
        check = stack.enter_context(remote.supervisors(hosts, channel.place))
        nodes = Nodes(channel, [])
        try:
            for node in range(1, place.nodes):
                description = channel.wait(f"node/{node}", node=node, meanwhile=check)
                nodes.nodes.append(_NODE.validate_python(description))
            towards = nodes.nodes[0].port.address if nodes.nodes else "127.0.0.1"
            nodes.nodes.insert(0, _local_node(towards, facts))
            yield nodes
        except ChannelError as error:
            raise Refusal(f"the nodes' supervisors lost each other: {error}") from error
        finally:
            nodes.end()


def follow(place: Place, works: Mapping[str, Work], facts: dict[str, Any]) -> int:
    """Be the supervisor of another node until the leading one ends; returns the status that it posts."""
    try:
        with Channel(place) as channel:
            if place.waits:
                return int(channel.wait("over"))  # a process of the launcher that is no supervisor
            node = _local_node(place.host, facts)
            channel.post(f"node/{place.node}", _NODE.dump_python(node, mode="json"))
            number = 1
            while "status" not in (command := channel.wait(f"command/{number}")):
                if place.node < command["nodes"]:
                    answer = _obey(channel, works[command["work"]], number, command)
                    channel.post(f"answer/{number}/{place.node}", answer)
                number += 1
            channel.post(f"answer/{number}/{place.node}", {})
            return int(command["status"])
    except ChannelError as error:
        message = f"node {place.node}: the supervisor of node 0 has ended, or is lost ({error})"
        raise Refusal(message) from error


def _obey(channel: Channel, work: Work, number: int, command: dict[str, Any]) -> Answer:
    """Run a command's work on this node; returns the answer, with the log of a failure."""
    place, (argument_type, result_type) = channel.place, _types(work)

    def stop_reason() -> str | None:
        if channel.read(f"stop/{number}") is not None:
            return "stopped, because another node's ranks failed"
        return "node 0 is lost" if channel.lost(0) else None

    with tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as scratch:
        log, launch = Path(scratch, "log"), _LAUNCH.validate_python(command["launch"])
        launch = replace(launch, log=log, node=place.node, meeting=place.for_ranks(number))
        argument = argument_type.validate_python(command["argument"], context=CANONICAL)
        answer = _run(work, argument, launch, lambda _: None, stop_reason)
        if "results" in answer:
            results = [result_type.dump_python(result, mode="json") for result in answer["results"]]
            return answer | {"results": results}
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return answer | {"log": text[-_LOG_LETTERS:]}


def _run(work: Work, argument: Any, launch: Launch, on_progress: Report, stop_reason: StopReason) -> Answer:
    """Run work on this node, and hold its interface to its rate meanwhile, if it has one."""
    port = launch.ports[launch.node or 0]
    others = [other.address for other in launch.ports if other is not port]
    shaped: contextlib.AbstractContextManager[dict[str, Any]] = contextlib.nullcontext({})
    if port.shaped_mbit is not None:
        shaped = shaped_interface(str(port.interface), port.shaped_mbit, others)
    try:
        with shaped as before:
            return {"results": run_ranks(work, argument, launch, on_progress, stop_reason), "shaped": before}
    except LinkError as error:
        return {"kind": "link", "message": str(error)}
    except LaunchError as error:
        return {"kind": error.kind, "message": str(error), "effect": error.effect}


def _cause(answers: Mapping[int, Answer], log: Path) -> LaunchError:
    """The most likely cause of a failure; appends the logs of other nodes to this one's."""
    failures = {node: answer for node, answer in answers.items() if "kind" in answer}
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            logs = {node: failure.get("log", "") for node, failure in failures.items() if node}
            file.writelines(f"== node {node} ==\n{text}" for node, text in logs.items())
    cause = min(failures.values(), key=lambda failure: bool(failure.get("effect")), default=_SILENT)
    if answers[0].get("kind") == "timeout":
        late = (failure["message"] for failure in failures.values() if failure["kind"] == "timeout")
        cause = answers[0] | {"message": "; ".join(late)}
    kept = log if log.exists() else None
    return LaunchError(cause["kind"], cause["message"], kept, effect=bool(cause.get("effect")))


def _local_node(towards: str, facts: dict[str, Any]) -> Node:
    return Node(port_towards(towards), host_identity(), facts)
