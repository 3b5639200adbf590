"""Starts a trial's rank processes, fresh ones for each trial, and watches them until they end.

A fork server, which has imported torch, forks four ranks in a tenth of a second.  Every rank enters its node's network
namespace while it is still single-threaded, joins the process group, and runs its work.  The rank's output goes to a
log that is kept only after a failure.

If a trial's ranks are to be threads, one fresh process holds the threads of all ranks (:mod:`impl.simulate`).

If a rank fails, all other ranks are killed.  If ranks have not ended when their time is over, each of them writes the
stacks of all its threads to its log, and is then killed.  If the process that started the ranks dies, the ranks and the
fork server end too.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from unittest import mock

from harness.cluster.control_channel import Place
from harness.cluster.nccl_environment import flight_recorder, nccl_variables
from harness.cluster.port import Port
from harness.cluster.rank import Progress, Rank, Report
from harness.errors import CorpusError, LinkError, Refusal
from harness.shaping import netns_shaper, socket_folder
from harness.shaping.pacer import Pacer
from impl.codecs.codec import CodecError
from impl.policy.policy import PolicyError
from impl.policy.shard_layout import GeometryError
from impl.policy.topology import Topology

if TYPE_CHECKING:
    from impl.comm.mesh import Mesh

Kind = Literal[
    "refused", "link", "crashed", "killed", "timeout", "memory", "disk", "lost", "interrupted", "wrong"
]
Argument = TypeVar("Argument")
Result = TypeVar("Result")
StopReason = Callable[[], str | None]  # returns why this host's ranks must end; None while they may run on

# Modules that the fork server imports, so that no rank has to.  Two of them are imported because ranks need them and
# they take long: torch._dynamo (1.6 s), for engines' hooks, and harness.cli (0.2 s), for the main module of a run.
PRELOAD: Final = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.nn.parallel", "torch._dynamo",
    "harness.cluster.rank_processes", "harness.runs.rank_trial", "harness.runs.sweep", "harness.cli",
)  # fmt: skip
# Environment variables of the memory allocator in ranks.  Freed memory stays with the process, so that later steps have
# no page faults.  torch's huge pages are switched off: with them, each allocation has page faults again
# (docs/design/decisions.md).
ALLOCATOR: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "THP_MEM_ALLOC_ENABLE": "0",
}
# torch's backends by `cluster.transport`.  With NCCL, gloo carries control messages, which are CPU tensors.
BACKENDS: Final = {"shm": "gloo", "gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "staged": "gloo"}
REFUSALS: Final = (LinkError, Refusal, CorpusError, PolicyError, GeometryError, CodecError)
_POLL_SECONDS: Final = 0.2  # between two checks whether ranks on other hosts have failed
# Process groups time out this many seconds after the parent process, so that the parent reports the timeout.
_LATER_SECONDS: Final = 30.0
_GRACE_SECONDS: Final = 0.5  # to wait after a failure for other ranks to report theirs
_CAUSE_SECONDS: Final = (
    10.0  # to wait instead, if so far ranks have only lost their connection to another rank
)
_STACKS_SECONDS: Final = 0.2  # to wait until ranks have written the stacks of their threads
# Signals that a rank does not send to itself.  With submitit, Slurm announces the end of a job by SIGUSR2.
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_LOG_BYTES: Final = 1_000_000  # bytes that are kept from the end of each rank's log
_THREADS: Final = "the thread ranks"  # the name of the process of thread ranks in errors
# Texts in errors of a rank that lost its connection to another one, whose failure is the cause.
_LOST_PEER: Final = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket Timeout")


class LaunchError(Exception):
    """Raised when a rank failed, when ranks did not end in time, or when the caller had the ranks stopped.

    Attributes:
        kind: Kind of the failure, such as ``timeout``.
        log: File with the ranks' output; None if there is none.
        effect: Whether the error is only the effect of another rank's failure, such as a lost connection.
    """

    def __init__(self, kind: Kind, message: str, log: Path | None = None, *, effect: bool = False) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.log, self.effect = log, effect


@dataclass(frozen=True, slots=True)
class Launch:
    """Options for starting the ranks of a trial."""

    topology: Topology
    ports: tuple[Port, ...]
    paced_mbit: float | None  # rate of the pacer in Mbit/s; None without a pacer
    threads: int  # number of torch's threads in each rank
    timeout_seconds: float  # for the whole run of the ranks
    log: Path  # file for the ranks' output after a failure
    backend: str = "gloo"  # torch's backend, or a user's module that registers one
    paced_latency_ms: float = 0.0  # latency of the pacer in one direction
    node: int | None = None  # the node whose ranks this process starts; None for all nodes
    meeting: Place | None = None  # where ranks of all hosts meet; None if this process starts all ranks
    threads_on: str | None = None  # device of ranks that are threads of one process; None for rank processes

    @property
    def ranks(self) -> range:
        """Numbers of the processes that this process starts for the ranks.

        - If ranks are threads, there is one process for all ranks, with number 0.
        - If ``node`` is set, there is one process for each rank of this node.  Its number is the rank's number.
        - Otherwise there is one process for each rank of all nodes, also with the rank's number.
        """
        if self.threads_on is not None:
            return range(1)
        if self.node is None:
            return range(self.topology.world)
        first = self.node * self.topology.ranks_per_node
        return range(first, first + self.topology.ranks_per_node)


@dataclass(slots=True)
class _Watched:
    """A rank process, and what its parent has received from it.

    The last message of a rank process is (None, result), or (kind of failure, error message).
    """

    rank: int
    name: str  # in errors
    process: Any
    pipe: Connection
    ended: bool = False
    reported: bool = False  # whether it sent its last message
    result: Any = None
    error: LaunchError | None = None

    def fileno(self) -> int:
        """Return the file descriptor of the pipe, for :func:`multiprocessing.connection.wait`."""
        return self.pipe.fileno()

    def receive(self, on_progress: Report) -> None:
        """Receive one message of the rank: its progress, its result or its error.

        ``on_progress`` is called with progress; a result or an error is stored in this object.  If the process has
        ended without a result or error, the field ``error`` is set to a LaunchError that says how the process ended.
        """
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.ended = True
            self.process.join(timeout=_GRACE_SECONDS)  # the exit status follows
            code = self.process.exitcode
            end = f"ended with status {code} and without a result"
            if code is not None and code < 0:
                end = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            from_outside = code is not None and -code in _FROM_OUTSIDE
            self.error = LaunchError("killed" if from_outside else "crashed", f"{self.name} {end}")
            return
        if isinstance(message, Progress):
            on_progress(message)
            return
        self.ended = self.reported = True
        kind, self.result = message
        if kind is not None:
            effect = any(text in self.result for text in _LOST_PEER)
            self.error = LaunchError(kind, f"{self.name}: {self.result}", effect=effect)


def run_ranks(
    target: Callable[[Rank, Argument], Result],
    argument: Argument,
    launch: Launch,
    on_progress: Report = lambda _: None,
    stop_reason: StopReason | None = None,
) -> list[Result]:
    """Run ``target(rank, argument)`` in one fresh process for each rank, and return the results in rank order.

    If ``launch.threads_on`` is set, all ranks are threads of one fresh process.  If ``launch.node`` is set, only the
    ranks of this node are run.

    Args:
        target: A module-level function.  When it is called, torch's default process group is initialised.  If ranks are
            threads, there is no process group, and ``rank.mesh`` is set instead.
        argument: The function's argument, the same on all ranks.
        launch: How ranks are started.
        on_progress: Called in this process with the progress of rank 0.
        stop_reason: Called several times a second.  It returns None while the ranks may run on.  Once it returns a
            text, the ranks are ended, and the text becomes the error's message.

    Raises:
        LaunchError: If a rank cannot be started or fails, if ``launch.timeout_seconds`` have passed, or if
            ``stop_reason`` returns a text.  The message describes the failure that most likely came first.  Before the
            error is raised, all ranks are ended.  Their output is kept in ``launch.log`` if all of them had been
            started, and if this file can be written.
    """
    with tempfile.TemporaryDirectory(prefix="zeropp-", ignore_cleanup_errors=True) as name:
        scratch = Path(name).absolute()
        if launch.paced_mbit is not None:
            Pacer.create(scratch / "pacer", launch.topology.nodes)
        killed_before = _out_of_memory_kills()
        ranks: list[_Watched] = []
        try:
            _start(ranks, target, argument, launch, scratch)
            failure = _watch(ranks, launch.timeout_seconds, on_progress, stop_reason)
        finally:
            for watched in ranks:
                watched.process.kill()
            for watched in ranks:
                watched.process.join()
                watched.pipe.close()
        if failure is not None:
            if failure.kind == "killed" and _out_of_memory_kills() > killed_before:
                failure = LaunchError("killed", f"{failure}; the kernel was out of memory")
            failure.log = _keep_logs(scratch, launch)
            raise failure
        return [watched.result for watched in ranks] if launch.threads_on is None else ranks[0].result


def run_in_place(
    target: Callable[[Rank, Argument], object],
    argument: Argument,
    launch: Launch,
    on_progress: Report,
) -> None:
    """Run ``target(rank, argument)`` in this process, which torchrun has started as one of the ranks of ``launch``.

    Every rank calls this function; ``argument`` may differ between ranks.  Only rank 0 reports progress to
    ``on_progress``.  The process group of all ranks exists while ``target`` runs.
    """
    import torch
    import torch.distributed as dist

    from impl.comm.mesh import default_group

    if launch.backend == BACKENDS["nccl"]:
        os.environ.update(flight_recorder(_traces(launch)))
    with default_group(launch.backend, timeout=timedelta(seconds=launch.timeout_seconds)):
        _limit_nccl(launch)
        number = dist.get_rank()
        torch.set_num_threads(launch.threads)
        port = launch.ports[launch.topology.node_of(number)]
        report = on_progress if number == 0 else lambda _: None
        target(Rank(number, launch.topology, port, None, report, launch.threads), argument)


def end_if_in_group(status: int) -> None:
    """End this process at once with ``status`` if torch's default process group still exists in it.

    When a command is over, the group exists only if the command has failed.  If the interpreter then ended in the
    normal way, it could abort, or wait for ranks that never answer.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start_server() -> None:
    """Start the fork server, from which rank processes are forked; do nothing if it is running."""
    socket_folder.give_to_multiprocessing()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    # SIGINT is blocked while the server is started, and the server inherits the blocked signal.  Otherwise a Ctrl-C,
    # which is meant for the sweep, would make the server print a traceback while it imports torch.  multiprocessing's
    # resource tracker has to be started before SIGINT is blocked, because starting the tracker unblocks SIGINT.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with mock.patch.dict(os.environ, ALLOCATOR):  # glibc reads it when the server starts
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _start(ranks: list[_Watched], target: Any, argument: Any, launch: Launch, scratch: Path) -> None:
    """Start the rank processes of this launch, and append each to ``ranks`` as soon as it has started.

    If a rank cannot be started, the caller finds the ranks that are already running in ``ranks``, and can end them.
    The ranks write their logs into the folder ``scratch``.

    Raises:
        LaunchError: If the fork server, which starts ranks, has ended.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    for rank in launch.ranks:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(rank, launch, scratch, target, argument, sending),
            daemon=True,
            name=f"rank {rank}",
        )
        try:
            process.start()
        except (EOFError, OSError) as error:
            receiving.close()
            why = f"the fork server that starts ranks ended: {type(error).__name__} {error}".rstrip()
            raise LaunchError("killed", why) from error
        finally:
            sending.close()
        name = f"rank {rank}" if launch.threads_on is None else _THREADS
        ranks.append(_Watched(rank, name, process, receiving))


def _watch(
    ranks: list[_Watched], timeout_seconds: float, on_progress: Report, stop_reason: StopReason | None
) -> LaunchError | None:
    """Receive the messages of all ranks until all ranks have ended, or until the first failure.

    A failure is an error of a rank, a text that ``stop_reason`` returns, or the end of ``timeout_seconds``.

    Returns:
        None if all ranks have sent a result.  Otherwise the failure that most likely came first.  To find it after a
        rank's error, the function waits a short time for the errors of other ranks, and then chooses among all errors.
    """
    deadline = time.monotonic() + timeout_seconds
    while all(watched.error is None for watched in ranks):
        if not (running := [watched for watched in ranks if not watched.ended]):
            return None
        if stop_reason is not None and (why := stop_reason()) is not None:
            return LaunchError("crashed", why, effect=True)
        if (left := deadline - time.monotonic()) <= 0:
            for watched in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(watched.process.pid, signal.SIGUSR1)
            time.sleep(_STACKS_SECONDS)
            late = "rank " + ", ".join(str(watched.rank) for watched in running)
            late = _THREADS if running[0].name == _THREADS else late
            message = f"there is no result from {late} after {timeout_seconds:g} s; stacks are in the log"
            return LaunchError("timeout", message)
        seconds = left if stop_reason is None else min(left, _POLL_SECONDS)
        for ready in connection.wait(running, timeout=seconds):  # type: ignore[arg-type]  # by its fileno
            ready.receive(on_progress)  # type: ignore[union-attr]
    begun = time.monotonic()
    while True:
        # Ranks that only lost a connection are the least likely cause, then ranks that report a crash.  A rank that
        # died without a message, or that was refused or ran out of memory, is the most likely one.
        errors = [(watched.error, watched.reported) for watched in ranks if watched.error is not None]
        cause, _ = min(errors, key=lambda pair: (pair[0].effect, pair[1] and pair[0].kind == "crashed"))
        left = begun + (_CAUSE_SECONDS if cause.effect else _GRACE_SECONDS) - time.monotonic()
        running = [watched for watched in ranks if not watched.ended]
        if not running or left <= 0:
            return cause
        for ready in connection.wait(running, timeout=left):  # type: ignore[arg-type]
            ready.receive(on_progress)  # type: ignore[union-attr]


def _keep_logs(scratch: Path, launch: Launch) -> Path | None:
    """Write the last part of each rank's log to the file ``launch.log``; equal parts are written only once.

    The ranks have written their logs into the folder ``scratch``, which is removed later.

    Returns:
        The path of the file; None if it cannot be written.
    """
    try:
        tails: dict[bytes, list[str]] = {}
        for rank in launch.ranks:
            log = scratch / f"rank{rank}.log"
            tail = log.read_bytes()[-_LOG_BYTES:] if log.exists() else b""
            tails.setdefault(tail, []).append(str(rank))
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("wb") as file:
            for tail, ranks in tails.items():
                file.write(f"== rank {', '.join(ranks)} ==\n".encode() + tail)
    except OSError:
        return None
    return launch.log


def _out_of_memory_kills() -> int:
    """Return a count that grows with each out-of-memory kill on this machine or in this process's cgroup."""
    count = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError):
            counts = re.findall(r"^oom_kill (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
            count += sum(map(int, counts))
    return count


def _rank_main(  # noqa: PLR0917  # a new process needs all of them
    number: int, launch: Launch, scratch: Path, target: Any, argument: Any, pipe: Connection
) -> None:
    """Run a rank process: redirect its output to a log, join the process group, run ``target``, and send the result.

    If ranks are threads, the process runs the threads of all ranks instead, without a process group.  The log lies in
    the folder ``scratch``.  The result, or the error, is sent through ``pipe`` to the process that started this one.
    """
    gc.freeze()  # else the first collection would copy the pages of all imports, which takes 0.25 s
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the sweep, which then ends its ranks
    log = os.open(scratch / f"rank{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable(file=log, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)

    def fail(error: BaseException) -> None:
        with contextlib.suppress(OSError):  # also if the disk is full
            traceback.print_exception(error)
            sys.stderr.flush()
        message = str(error) if isinstance(error, REFUSALS) else f"{type(error).__name__}: {error}"
        message += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        pipe.send((kind_of(error), message))
        os._exit(1)  # without waiting for other ranks, which may no longer answer

    def hang(error: BaseException) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file=log, all_threads=True)
            _write_nccl_trace(launch, number)
        fail(error)

    try:
        if launch.threads_on is not None:
            pipe.send((None, _run_threads(launch, launch.threads_on, pipe, target, argument)))
        else:
            rank = replace(_join(number, launch, scratch, pipe), fail=hang)
            pipe.send((None, target(rank, argument)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the interpreter's normal end takes 0.5 s with four ranks on two cores
    except BaseException as error:  # any error of a rank is reported and recorded
        fail(error)


def _traces(launch: Launch) -> str:
    """Return the prefix of the paths of the ranks' NCCL trace files, and create the folder of these files.

    A trace file holds the latest NCCL calls of a rank.  Its path is the prefix followed by the rank's number: with the
    prefix ``trial.log.nccl``, rank 3 has the file ``trial.log.nccl3``.
    """
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    return f"{launch.log}.nccl"


def _write_nccl_trace(launch: Launch, number: int) -> None:
    """Write the latest NCCL calls of rank ``number`` into the rank's trace file.

    torch writes the same file when NCCL times out, but our own time-out comes before that.  Without NCCL, this function
    does nothing.
    """
    from torch._C import _distributed_c10d as c10d

    if launch.backend == BACKENDS["nccl"] and (dump := getattr(c10d, "_dump_nccl_trace", None)) is not None:
        Path(f"{_traces(launch)}{number}").write_bytes(dump())


def _limit_nccl(launch: Launch) -> None:
    """Give the default process group the same NCCL time-out as the process groups through which our engine will send.

    With other backends than NCCL, this function does nothing.
    """
    if launch.backend != BACKENDS["nccl"]:
        return
    from impl.comm.mesh import limit_nccl
    from impl.comm.wire import NCCL_TIMES, TIMEOUT_SECONDS

    limit_nccl(timedelta(seconds=NCCL_TIMES * min(TIMEOUT_SECONDS, launch.timeout_seconds / 4)))


def _end_with_sweep() -> None:
    """Make this rank process end as soon as the fork server ends, or the process that started the ranks."""
    netns_shaper.die_with_parent(os.getppid())
    if (sweep := multiprocessing.parent_process()) is not None:
        ends = sweep.sentinel
        threading.Thread(target=lambda: (connection.wait([ends]), os._exit(1)), daemon=True).start()


def _run_threads(launch: Launch, device: str, pipe: Connection, target: Any, argument: Any) -> list[Any]:
    """Run ``target`` on all ranks, which are threads of this process, and return the results in rank order.

    The ranks compute on ``device``.  Rank 0 sends its progress through ``pipe``.
    """
    from impl.simulate import simulate

    _end_with_sweep()

    def run(mesh: Mesh) -> Any:
        report = pipe.send if mesh.rank == 0 else lambda _: None
        port = launch.ports[launch.topology.node_of(mesh.rank)]
        return target(
            Rank(mesh.rank, launch.topology, port, None, report, launch.threads, mesh=mesh), argument
        )

    nodes, ranks_per_node = launch.topology.nodes, launch.topology.ranks_per_node
    # simulate() ends a rank that computes for this long without waiting.  The parent process ends all ranks at the same
    # time at the latest, and keeps the stacks of all threads.
    options: Any = {"device": device, "threads": launch.threads, "timeout": launch.timeout_seconds}
    return simulate(nodes, ranks_per_node, **options)(run)


def _join(number: int, launch: Launch, scratch: Path, pipe: Connection) -> Rank:
    """Enter the network namespace of a rank's node, join the process group of all ranks, and return the rank.

    ``scratch`` is a folder that all ranks of this host share: through files in it, ranks find each other.  The ranks of
    several hosts meet at ``launch.meeting`` instead.  Rank 0 sends its progress through ``pipe``.
    """
    import torch
    import torch.distributed as dist

    node = launch.topology.node_of(number)
    port = launch.ports[node]
    if port.holder is not None:
        netns_shaper.enter(port.holder)
    _end_with_sweep()
    if port.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = port.interface  # the only way to tell gloo
    os.environ.update(nccl_variables(port))
    if launch.backend == BACKENDS["nccl"]:
        os.environ.update(flight_recorder(_traces(launch)))
    torch.set_num_threads(launch.threads)
    pacer = None
    if launch.paced_mbit is not None:
        pacer = Pacer(scratch / "pacer", node, launch.paced_mbit, launch.paced_latency_ms)
    store: Any
    if launch.meeting is None:  # a file works across namespaces, without a port or traffic on the link
        store = dist.FileStore(str(scratch / "store"), launch.topology.world)  # type: ignore[attr-defined]
    else:
        place, seconds = launch.meeting, timedelta(seconds=launch.timeout_seconds)
        store = dist.TCPStore(place.host, place.port, is_master=False, timeout=seconds)  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"zeropp/{place.job}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        _registered(launch.backend),
        store=store,
        rank=number,
        world_size=launch.topology.world,
        # Later than the launch's own timeout, which reports the stacks of all ranks.
        timeout=timedelta(seconds=launch.timeout_seconds + _LATER_SECONDS),
    )
    _limit_nccl(launch)
    report = pipe.send if number == 0 else lambda _: None
    return Rank(number, launch.topology, port, pacer, report, launch.threads)


def _registered(backend: str) -> str:
    """Return the name by which torch knows a backend.

    If ``backend`` is a user's module, the module's ``register()`` is called first.
    """
    if "." not in backend:
        return backend
    module = importlib.import_module(backend)
    module.register()
    return str(module.NAME)


def kind_of(error: BaseException) -> Kind:
    """Return the kind of failure that a rank's error belongs to, such as ``memory`` for torch's OutOfMemoryError."""
    if isinstance(error, LaunchError):
        return error.kind
    if isinstance(error, LinkError):
        return "link"
    if isinstance(error, REFUSALS):
        return "refused"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk"
    allocator = isinstance(error, RuntimeError) and "allocate memory" in str(error)  # torch's, on the CPU
    if allocator or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    return "crashed"
