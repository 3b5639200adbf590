"""Runs functions on the ranks of several nodes.  Each node has a supervisor; the supervisor of node 0 leads.

A supervisor is the process that starts and watches the ranks of a node.  The leading supervisor posts numbered commands
on the control channel (:mod:`harness.cluster.control_channel`).  A command names a *work*, which is a function that all
supervisors know, and gives the function's argument as JSON.  The supervisor of every node that takes part starts the
node's ranks, runs the work on them, and posts an answer: the results as JSON, or a failure.

A supervisor outlives its ranks.  When a rank fails on any node, the ranks of all nodes are ended.  Every command starts
new ranks.
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
from harness.cluster.port import Port, host_identity, port_towards
from harness.cluster.rank import Rank, Report
from harness.cluster.rank_processes import Launch, LaunchError, StopReason, run_ranks
from harness.errors import LinkError, Refusal
from harness.shaping.nic_shaper import shaped_interface
from harness.suites.parse_quantity import CANONICAL

_CAUSE_SECONDS: Final = (
    12.0  # to wait for the answer of the node that failed first, once others have noticed the failure
)
_CLEAR_SECONDS: Final = 30.0  # to wait until other nodes have ended their ranks
_BYE_SECONDS: Final = 5.0  # to wait until other nodes have read that the run is over
_LOG_LETTERS: Final = 200_000  # last letters of a node's log that are sent to node 0
Answer = dict[str, Any]
"""A node's answer to a command.

After success, the answer has the keys ``results`` (of the node's ranks) and ``shaped`` (facts about the network
interface whose rate was limited; {} if no rate was limited).  After a failure, it has the key ``kind`` of the failure,
its ``message``, the node's ``log``, and ``effect``: whether the failure is only the effect of another node's failure.
"""
_SILENT: Final[Answer] = {"kind": "timeout", "message": "no answer from another node"}
Work = Callable[[Rank, Any], Any]  # a module-level function (rank, argument) -> result
Admit = Callable[[Any, Launch], Any]  # (argument, launch) -> argument; raises a Refusal


@dataclass(frozen=True, slots=True)
class Node:
    """Description of one node by the node's supervisor, the process that starts and watches the node's ranks."""

    port: Port
    identity: str  # equal for nodes on one host
    facts: dict[str, Any]  # about machine, code and software
    nonce: str = ""  # random, so that messages of an earlier session are not accepted


_NODE: Final = TypeAdapter(Node)
_LAUNCH: Final = TypeAdapter(Launch)


@dataclass(slots=True)
class Nodes:
    """The nodes of a run; through this object, the supervisor of node 0 runs functions on the ranks of all nodes.

    A supervisor is the process that starts and watches the ranks of a node.
    """

    channel: Channel
    nodes: list[Node]
    # For each node, facts about its network interface, from before the interface's rate was limited for the latest
    # work; {} if the rate was not limited.
    shaped: list[dict[str, Any]] = field(default_factory=list)
    status: int = 1  # exit status with which the other supervisors will end
    together: bool = True  # whether all nodes have met
    _commands: int = 0

    def on_one_host(self, count: int) -> tuple[int, int] | None:
        """Search the first ``count`` nodes for two nodes that share a host, and return the numbers of these two nodes.

        Returns None if no two of the first ``count`` nodes share a host.
        """
        first: dict[str, int] = {}
        for number, node in enumerate(self.nodes[:count]):
            if (other := first.setdefault(node.identity, number)) != number:
                return other, number
        return None

    def check_code(self) -> None:
        """Raise a Refusal if a node runs another version of this project's code than node 0."""
        codes = [node.facts.get("code", {}) for node in self.nodes]
        for number, code in enumerate(codes):
            for name in ("version", "source"):
                if code.get(name) != codes[0].get(name):
                    difference = f"{name} {code.get(name)}, not {codes[0].get(name)}"
                    raise Refusal(
                        f"node {number} runs other code of zeropp-bench than node 0 ({difference}): install the same "
                        "code on both nodes"
                    )

    def run(self, work: Work, argument: Any, launch: Launch, on_progress: Report) -> list[Any]:
        """Run ``work`` on the ranks of the first ``launch.topology.nodes`` nodes, and return the results of all ranks.

        Args:
            work: A function (rank, argument) -> result, which the supervisors of the other nodes know by its name.
            argument: The function's argument, the same on all ranks.
            launch: How ranks are started, and on how many nodes.
            on_progress: Called with the progress of rank 0.

        Returns:
            The results in rank order.

        Raises:
            LaunchError: If the work fails on any node.  The message describes the failure that most likely came first.
                Before the error is raised, the ranks of all nodes that still answer are ended.
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

        launch.log.unlink(missing_ok=True)  # the log of an earlier attempt
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
        """Tell the other supervisors to end with exit status ``status``, and wait up to 5 s until each has confirmed.

        If not all supervisors have joined the run yet, this method does not wait.
        """
        with contextlib.suppress(ChannelError):
            if not self.together:
                self.channel.post("session", {"status": self.status})
                return
            number = self._command(status=self.status)
            self.channel.post("over", self.status)
            self._answers(number, range(1, len(self.nodes)), _BYE_SECONDS)

    def _command(self, **command: Any) -> int:
        """Post a command to the other nodes, and return the command's number.

        The keyword arguments are the content of the command, such as the name of the function to run.
        """
        self._commands += 1
        self.channel.post(f"command/{self._commands}", command)
        return self._commands

    def _answers(
        self, number: int, nodes: Sequence[int], seconds: float, *, cause: bool = False
    ) -> dict[int, Answer]:
        """Collect the answers of ``nodes`` to command ``number``, for at most ``seconds``, and return them by node.

        If a node is lost (its supervisor no longer reacts), the result has a failure of kind ``lost`` for this node.
        Waiting ends early when all nodes have answered.  If ``cause`` is true, waiting also ends as soon as one node
        has answered with a failure that is not the effect of another failure.  Nodes that have not answered when
        waiting ends are missing from the result.
        """
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
        """Make the nodes ``others`` end the ranks that run command ``number``, and return the nodes' answers by node.

        A node answers after its ranks have ended.  A node that does not answer within 30 s is left out of the result.
        """
        self.channel.post(f"stop/{number}", True)
        return self._answers(number, others, _CLEAR_SECONDS)


def _types(work: Work) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Return two pydantic adapters: for the type of the argument of ``work``, and for the type of its result.

    The adapters convert arguments and results to JSON and back.
    """
    _, argument, result = get_type_hints(work).values()
    return TypeAdapter(argument), TypeAdapter(result)


@contextlib.contextmanager
def lead(place: Place, facts: dict[str, Any], hosts: Sequence[str] = ()) -> Iterator[Nodes]:
    """Wait until the supervisors of all nodes have joined the run, and yield the nodes for the body of ``with``.

    A supervisor is the process that starts and watches the ranks of a node.  This process is the supervisor of node 0,
    and runs functions on the other nodes with :meth:`Nodes.run`.  At the end of the ``with`` block, the other
    supervisors end with the exit status ``Nodes.status``.

    Args:
        place: The number of this process's node, which is 0, and the address at which the supervisors meet.
        facts: Facts about this node's machine, code and software.
        hosts: Hosts on which to start supervisors through ssh; empty if a launcher has started them.

    Raises:
        Refusal: If a supervisor does not join the run, or if the supervisors lose their connection.
    """
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(Channel(place))
        check = stack.enter_context(remote.supervisors(hosts, channel.place, channel.token))
        nodes = Nodes(channel, [], together=False)
        try:
            for node in range(1, place.nodes):
                description = channel.wait(f"node/{node}", node=node, meanwhile=check)
                nodes.nodes.append(_NODE.validate_python(description))
            towards = nodes.nodes[0].port.address if nodes.nodes else "127.0.0.1"
            nodes.nodes.insert(0, _local_node(towards, facts, channel.nonce))
            nonces = [node.nonce for node in nodes.nodes]
            channel.post("session", {"nonces": nonces})
            channel.begin(nonces)
            nodes.together = True
            yield nodes
        except ChannelError as error:
            raise Refusal(
                f"the nodes' supervisors lost each other: {error}; start the run again on all nodes"
            ) from error
        finally:
            nodes.end()


def follow(place: Place, works: Mapping[str, Work], facts: dict[str, Any], admit: Admit) -> int:
    """Run, on the ranks of this node, the commands that the supervisor of node 0 posts, until the run ends.

    A supervisor is the process that starts and watches the ranks of a node.  This process is the supervisor of another
    node than node 0.  If ``place.waits`` is true, it is not: the node then has a supervisor already, and this process
    only waits for the end of the run.

    Args:
        place: The number of this process's node, and the address at which the supervisors meet.
        works: The functions that commands may name, by name.
        facts: Facts about this node's machine, code and software.
        admit: Function that is called with a command's argument and its :class:`Launch` (how ranks are started) before
            the command runs.  It returns the argument to use, or raises a Refusal if the command must not run.

    Returns:
        The exit status that the supervisor of node 0 posts at the end of the run.

    Raises:
        Refusal: If the supervisor of node 0 is lost.
    """
    try:
        with Channel(place) as channel:
            if not place.waits:
                node = _local_node(place.host, facts, channel.nonce)
                channel.post(f"node/{place.node}", _NODE.dump_python(node, mode="json"))
            if (status := _meet(channel)) is not None:
                return status
            if place.waits:
                return int(channel.wait("over"))  # the launcher started more processes than nodes
            number = 1
            while "status" not in (command := channel.wait(f"command/{number}")):
                if place.node < command["nodes"]:
                    answer = _obey(channel, works[command["work"]], number, command, admit)
                    channel.post(f"answer/{number}/{place.node}", answer)
                number += 1
            channel.post(f"answer/{number}/{place.node}", {})
            return int(command["status"])
    except ChannelError as error:
        message = f"node {place.node}: the supervisor of node 0 has ended, or is lost ({error})"
        raise Refusal(f"{message}; start the run again on all nodes") from error


def _meet(channel: Channel) -> int | None:
    """Wait until the supervisors of all nodes have joined, and begin the session.

    In the session, messages are encrypted with a new secret.  Returns None if all supervisors have joined.  Otherwise
    the supervisor of node 0 has given up, and the exit status with which this process has to end is returned.
    """
    session, place = channel.wait("session"), channel.place
    if "status" in session:
        return int(session["status"])
    if not place.waits and session["nonces"][place.node] != channel.nonce:
        raise ChannelError("the store holds messages of another run with the same token")
    channel.begin(session["nonces"])
    return None


def _obey(channel: Channel, work: Work, number: int, command: dict[str, Any], admit: Admit) -> Answer:
    """Run the function ``work``, as ``command`` asks, on this node's ranks, and return the answer (:data:`Answer`).

    ``number`` is the number of the command.  First ``admit`` is called (:func:`follow`).  If it raises a Refusal, no
    rank is started, and the answer is a failure of kind ``refused``.  The ranks are stopped if the supervisor of node 0
    stops this command, or if that supervisor is lost.
    """
    place, (argument_type, result_type) = channel.place, _types(work)

    def stop_reason() -> str | None:
        if channel.read(f"stop/{number}") is not None:
            return "stopped, because another node's ranks failed"
        return "node 0 is lost" if channel.lost(0) else None

    with tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as scratch:
        log, launch = Path(scratch, "log"), _LAUNCH.validate_python(command["launch"])
        launch = replace(launch, log=log, node=place.node, meeting=place.for_ranks(number))
        try:
            argument = argument_type.validate_python(command["argument"], context=CANONICAL)
            argument = admit(argument, launch)
        except Refusal as error:
            return {"kind": "refused", "message": str(error), "effect": False}
        answer = _run(work, argument, launch, lambda _: None, stop_reason)
        if "results" in answer:
            results = [result_type.dump_python(result, mode="json") for result in answer["results"]]
            return answer | {"results": results}
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return answer | {"log": text[-_LOG_LETTERS:]}


def _run(work: Work, argument: Any, launch: Launch, on_progress: Report, stop_reason: StopReason) -> Answer:
    """Run ``work`` on this node's ranks, and return the results, or the failure, as an :data:`Answer`.

    If the launch sets a rate for this node's network interface, the interface is limited to this rate while the ranks
    run.  ``on_progress`` and ``stop_reason`` are passed on to :func:`~harness.cluster.rank_processes.run_ranks`.
    """
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
    """Choose the failure that most likely caused all other failures, and return it as an error.

    ``answers`` has the answer of each node, by the node's number.  This function also appends the logs of the other
    nodes to the file ``log``, which is the log of node 0.
    """
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


def _local_node(towards: str, facts: dict[str, Any], nonce: str) -> Node:
    return Node(port_towards(towards), host_identity(), facts, nonce)
