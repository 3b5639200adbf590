"""Records the collectives of one process of an audited program, step by step, into a file of the audit's folder.

A copy of this file is loaded into the program's processes by their ``sitecustomize`` (:mod:`harness.audit.on_path`).
The program may run in another Python than ours: this file needs Python 3.8 or later, and imports only the standard
library.  It uses torch only after the program has imported it.  No exception leaves this module; the first exception is
written into the file.

Calls come from two sources:

- the *recorder*: torch's flight recorder, which the backends NCCL and (from torch 2.13) gloo fill in C++.  The recorder
  also has the calls that C++ code makes, such as DDP's reducer.  It is a ring buffer, and can only be copied as a
  whole, which takes about 10 us for each entry.  The witness reads it after each of the first ten steps, and whenever
  it is about to overflow.  After other steps the witness reads it only if all its readings since the first step
  together stay below one percent of the process's processor time.
- the *wrapper*: replacements of ``ProcessGroup``'s methods, which note a call before they make it.  The wrapper sees
  only calls from Python.  It is used for send and recv over gloo, and for backends without a recorder.

Copying the recorder with Python stacks takes longer than without.  The witness therefore learns sequences.  A sequence
is the list of a step's calls, each with its operation, group, sizes and types.  Once a sequence has come twice with the
same stacks, later steps with this sequence are read without stacks.  Their calls get the phases and call sites that
were learnt.  If a step has an unknown sequence, the recorder is read once more, with stacks.

The file has one JSON object a line, whose ``event`` is one of

- ``process``: facts about this process; ``torch``: torch's version and recorders; ``rank``: this process's rank;
- ``group``: name, ranks and backend of a process group;
- ``model``: the number of parameters that optimizers hold, the units of FSDP2, and what this project's engine sends;
- ``rows``: calls of the steps ``first`` to ``last``, which all had the same calls; ``last`` is null for calls after
  the end of the last step.  A row is a list in the order of :data:`FIELDS`;
- ``counters``: bytes that each interface has sent until the end of a step, without the headers of packets;
- ``late``: rows of the calls of a step that were made after the step's counters were read;
- ``lost``: the number of entries of the recorder that were overwritten before they were read;
- ``unmarked``: the function that ``--step-marker`` names does not exist, so that no call of it ends a step;
- ``fault``: an exception that was raised in this module;
- ``end``: how the process ended; without this event, the process was killed.

Sources: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (``dump``, ``record``), torch/optim/optimizer.py (global
hooks), torch/distributed/distributed_c10d.py (``_world``), torch 2.13.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import functools
import gc
import glob
import json
import operator
import os
import pickle
import socket
import sys
import threading
import time
import traceback
import weakref
from typing import Any, Callable, Container, Iterable, Iterator, Tuple  # noqa: UP035  # Python 3.8

Call = Tuple[int, Tuple[Any, ...]]  # noqa: UP006  # when it was made, in ns, and its row without a count

FIELDS = (
    "phase", "operation", "done_as", "dtype", "group", "peer", "site", "caller", "source", "calls", "elements",
    "bytes",
)  # fmt: skip
"""The fields of a row, in order.  Calls that agree in all fields but the last three are counted in one row."""
# Number of entries that the flight recorder holds in an audited program.  With more entries, a copy of the recorder
# would take longer.  With fewer entries, the calls of a large step would not fit.
RING = 5_000
FIRST_STEPS = 10  # the recorder is read after each of so many first steps
BUDGET = 0.01  # share of the process's processor time that reading may take after the first steps
INFINIBAND = "/sys/class/infiniband"  # folder in which Linux lists InfiniBand adapters
_FULL = 0.9  # share of the recorder's entries that may be used before the recorder is read in any case
_SEQUENCES = 32  # most sequences that are remembered, one for each kind of step
_DEEPEST = 80  # most frames of a stack that the wrapper notes

_ITEM = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1, "int16": 2, "int32": 4,
    "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_SCALAR = {  # c10::toString(ScalarType), where it is not torch's name in another case
    "Float": "float32", "Double": "float64", "Half": "float16", "Char": "int8", "Byte": "uint8", "Short": "int16",
    "Int": "int32", "Long": "int64", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
# Parts of the names of methods, functions and profiling entries, in the order in which they are looked for.
_OPERATIONS = (
    ("reduce_scatter", "reduce_scatter"), ("allgather", "all_gather"), ("all_gather", "all_gather"),
    ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"), ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("reduce", "reduce"),
    ("gather", "gather"), ("scatter", "scatter"), ("send", "send"), ("recv", "recv"),
)  # fmt: skip
_METHODS = (
    "send", "recv", "recv_anysource", "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather",
    "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "barrier",
)  # fmt: skip
_POINT_TO_POINT = ("send", "recv")
# Fields of an entry that tell calls apart where stacks are not read.
_IDENTITY = operator.itemgetter(
    "profiling_name", "process_group", "thread_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes"
)  # fmt: skip
_CREATED = operator.itemgetter("time_created_ns")  # of an entry
_MOMENT = operator.itemgetter(0)  # of a call
_HEADER = 66  # bytes of a TCP packet: Ethernet 14, IPv4 20, TCP 32 with timestamps
_API_FILES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_PASSED_THROUGH = (*_API_FILES, "/torch/distributed/c10d_logger.py", "/torch/_ops.py", __file__)
_STEPS = ("step", "_take_model_step", "clip_grad_norm_", "get_total_norm", "_get_total_norm", "unscale_")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/impl/")
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  # the folder of the standard library


def operation_of(name: str) -> str:
    """Return the collective that the name of a method, function or profiling entry stands for.

    For ``_allgather_base`` this is ``all_gather``.  A name without a known collective is returned in lower case.
    """
    lower = name.lower()
    return next((operation for part, operation in _OPERATIONS if part in lower), lower)


def dtype_of(scalar: str) -> str:
    """Return torch's name of an element type, such as ``float32``, from its name in C++, such as ``Float``."""
    return _SCALAR.get(scalar, scalar.lower())


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a type that torch names ``dtype``; 4 for an unknown type."""
    return _ITEM.get(dtype, 1 if dtype.startswith("float8") else 4)


def describe(frames: Iterable[tuple[str, str, int]], thread: str = "") -> tuple[str, str, str, str]:
    """Return (operation, phase, call site, caller) of a call, from the call's Python stack.

    Args:
        frames: (file, function, line) of each frame, the innermost frame first.
        thread: Name of the thread that made the call; autograd's threads are recognised by their names.

    Returns:
        - operation: the collective, named as torch.distributed's function for it, such as ``all_gather``;
        - phase: ``forward``, ``backward``, ``optimizer`` or ``other``;
        - call site: the innermost line of the user's program, outside of installed packages and the standard library;
        - caller: the innermost function that does not belong to torch.distributed's Python interface.

        Operation, call site and caller are empty if the stack does not show them.
    """
    operation = site = caller = first_phase = ""
    backward = thread.startswith("pt_autograd")
    for path, name, line in frames:
        if path.endswith(_API_FILES) and not caller:
            found = operation_of(name)
            operation = found if found in dict(_OPERATIONS).values() else operation
        elif not caller and not path.endswith(_PASSED_THROUGH):
            caller = f"{_below_packages(path)}:{line} ({name})"
        library = any(part in path for part in _LIBRARIES) or path == __file__
        if not site and not library and "/torch/" not in path and not path.startswith((_STANDARD, "<")):
            site = f"{path}:{line} ({name})"
        if name in ("_engine_run_backward", "backward"):
            backward = True
        elif not first_phase:
            if "/torch/optim/" in path or (name in _STEPS and (library or "/torch/" in path)):
                first_phase = "optimizer"
            elif name in ("_call_impl", "_wrapped_call_impl") and path.endswith(
                "/torch/nn/modules/module.py"
            ):
                first_phase = "forward"
    return operation, "backward" if backward else first_phase or "other", site, caller


def _below_packages(path: str) -> str:
    for part in ("/site-packages/", "/dist-packages/"):
        if part in path:
            return path.rpartition(part)[2]
    return path


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of :class:`Witness` so that it never raises an exception into the audited program.

    If the method fails, the wrapper writes the event ``fault`` and returns None.  The wrapper does nothing and returns
    None in two cases: if it is called from within another wrapped method, in the same thread, or if the witness has
    stopped recording.
    """

    @functools.wraps(function)
    def guarded(self: Witness, *arguments: Any, **options: Any) -> Any:
        if self.over or getattr(self.inside, "busy", False):
            return None
        self.inside.busy = True
        try:
            with self.lock:
                return function(self, *arguments, **options)
        except Exception:
            self.fault()
            return None
        finally:
            self.inside.busy = False

    return guarded


class _Sequence:
    """The calls of one step, in their order, by which a later step with the same calls is recognised.

    Attributes:
        identities: For each call, its operation, group, sizes and types.  Steps are compared by these properties, which
            can be read without copying stacks.
        rows: For each call, its row, with the phase and call site that were learnt from its stack.  None if the same
            calls came with different stacks.
        times: Number of steps that had these calls.
    """

    def __init__(self, identities: list[Any], rows: list[Any]) -> None:
        self.identities, self.times = identities, 1
        self.rows: list[Any] | None = rows

    def learn(self, rows: list[Any]) -> None:
        """Count one more step with these calls; if its ``rows`` differ from the known rows, forget the known rows."""
        self.times += 1
        if self.rows != rows:
            self.rows = None


class Witness:
    """Records the torch.distributed calls of one process, as the events that the module's docstring lists.

    Args:
        folder: Folder in which the witness writes its file.  If None, events are appended to the list ``events``.
        last_step: The last step to record; None to record all steps.
        marker: The function whose return ends a step, as ``module:function``.  If empty, the optimizer's ``step()``
            ends a step.
    """

    def __init__(self, folder: str | None, last_step: int | None = None, marker: str = "") -> None:
        self.folder, self.last_step, self.marker = folder, last_step, marker
        self.events: list[dict[str, Any]] = []
        self.over = self.used = self.faulty = self.forked_here = self.nvml = False
        sizes = [
            os.environ.get(name, "") for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
        ]
        self.ring = next((int(size) for size in sizes if size.isdigit()), 2000)  # 2000 is torch's default
        self.limit = int(_FULL * self.ring)
        self.torch: Any = None
        self.undo: list[Callable[[], Any]] = []
        self.hooks: list[Any] = []
        self._fresh()

    def _fresh(self) -> None:
        """Set the attributes to what they are in a process that has recorded nothing yet."""
        self.lock, self.inside = threading.Lock(), threading.local()
        self.pid, self.file, self.progress = os.getpid(), -1, -1
        self.began = time.time_ns()
        self.steps = self.read_steps = self.begin = 0
        # Steps that have ended but are not in the file yet: (step, when its optimizer began, when it ended), in ns.
        self.marks: list[tuple[int, int, int]] = []
        self.tail: list[Call] = []  # calls after the last step's end that are not in the file yet
        self.noted: list[Call] = []  # calls that the wrapper saw and that are not in the file yet
        # Numbers of calls that the wrapper counted: since the recorder was last read, in the current step, and in the
        # step with the most calls.
        self.since = self.in_step = self.most = 0
        self.seen: dict[str, int] = {}  # for each recorder, the number of the last entry that was read
        self.known: dict[str, list[_Sequence]] = {}  # by recorder
        self.spent, self.cost, self.first_step = 0.0, 0.0, 0.0
        self.closed = False  # whether the default group was destroyed; the recorder was read right before
        self.groups: dict[str, str] = {}  # backend by name
        self.ranks: dict[str, list[int]] = {}
        self.unseen: set[str] = set()  # names of groups whose backend has no recorder
        self.recorded_groups: set[str] = set()  # names of groups whose backend has a recorder
        self.inherited: Any = None  # the default group of the process that forked this one
        self.stepper: Any = None
        self.optimizers: dict[int, str] = {}
        self.held: dict[int, tuple[int, str]] = {}  # elements and type of parameters
        self.described: dict[Any, tuple[str, str, str, str]] = {}
        self.rank = -1

    # Beginning and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write facts about this process, and arrange that the recording starts when the program imports torch.

        As soon as torch has been imported, :meth:`arm` runs.  Also arrange that :meth:`end` runs when the process ends,
        and :meth:`forked` in each forked process.
        """
        self.write(event="process", **_process())
        atexit.register(self.end, "exit")
        exits = os._exit

        def exit_now(status: int) -> Any:
            try:
                self.end("os._exit")
            finally:  # whatever happens, the program ends here
                exits(status)

        os._exit = exit_now
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forked)
        wanted: dict[str, Callable[[Any], None]] = {"torch": self.arm}
        if self.marker:
            wanted[self.marker.partition(":")[0]] = self.mark_calls
        for name in [name for name in wanted if name in sys.modules]:
            wanted.pop(name)(sys.modules[name])
        if wanted:
            sys.meta_path.insert(0, _AfterImport(wanted))

    def forked(self) -> None:
        """In a forked process, begin to record anew, into a file of its own.

        Calls that the parent process has not written yet are dropped here, since the parent process will write them.
        """
        seen, world = self.seen, _world()
        self._fresh()
        self.seen, self.used, self.forked_here, self.events = seen, False, True, []
        self.inherited = None if world is None else world.default_pg

    def end(self, how: str) -> None:
        """Write the calls that have not been written yet, and ``how`` the process ended, such as ``exit``."""
        if os.getpid() == self.pid and not self.over:
            self.read(final=True)
            with contextlib.suppress(OSError):  # a full disk is not the program's concern
                if self.used:
                    self.write(event="end", how=how, steps=self.steps, **self.seconds())

    def seconds(self) -> dict[str, float]:
        """Return processor seconds since the end of the first step: ``lasted`` and ``reading``.

        ``lasted`` is the processor time of the whole process.  ``reading`` is the part of it that reading torch's
        flight recorder took.
        """
        lasted = time.process_time() - self.first_step if self.first_step else 0.0
        return {"reading": round(self.spent, 4), "lasted": round(lasted, 4)}

    def stop(self, *, in_hook: bool = False) -> None:
        """Stop recording, and remove all wrappers and hooks.

        ``in_hook`` says that an optimizer's hook calls this method.  torch is iterating over its hooks at that moment,
        so they cannot be removed: they stay registered, and do nothing from now on.
        """
        self.over = True
        for undo in reversed(self.undo):
            undo()
        if not in_hook:  # torch iterates over the hooks while they run
            for hook in self.hooks:
                hook.remove()

    def fault(self) -> None:
        """Write the event ``fault`` for the exception that is being handled; only the first fault is written."""
        if not self.faulty:
            self.faulty = True
            with contextlib.suppress(Exception):  # for example a full disk: there is nothing left to do
                self.write(event="fault", text=traceback.format_exc(limit=4).strip().splitlines()[-3:])

    def write(self, **event: Any) -> None:
        """Append an event to the file as one line, in one system call.

        A process that is killed therefore leaves only whole lines.  A full disk may cut the last line.
        """
        if self.folder is None:
            self.events.append(event)
            return
        if self.file < 0:
            name = os.path.join(self.folder, f"{socket.gethostname()}-{self.pid}.jsonl")  # noqa: PTH118
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self.file = os.open(name, flags, 0o644)
            self.progress = os.open(name + ".steps", flags & ~os.O_APPEND, 0o644)
            if event["event"] != "process":  # a forked process has not written this event yet
                self.write(event="process", **_process())
        os.write(self.file, (json.dumps(event, separators=(",", ":")) + "\n").encode())

    # Hooks ------------------------------------------------------------------------------------------------------

    @_guarded
    def arm(self, torch: Any) -> None:
        """Start to record: register hooks on all optimizers, and wrap the methods of ``torch``'s ``ProcessGroup``.

        Called when the program has imported ``torch``.
        """
        self.torch = torch
        self.write(event="torch", version=str(torch.__version__), recorders=sorted(self.recorders()))
        if not (hasattr(torch, "distributed") and torch.distributed.is_available()):
            return
        optimizer = sys.modules["torch.optim.optimizer"]
        self.hooks = [
            optimizer.register_optimizer_step_pre_hook(self.before_step),
            optimizer.register_optimizer_step_post_hook(self.after_step),
        ]
        group = torch.distributed.ProcessGroup
        for method in _METHODS:
            if method in vars(group):
                self.replace(group, method, self.noting(getattr(group, method), operation_of(method)))
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        destroy = c10d.destroy_process_group

        @functools.wraps(destroy)
        def destroy_process_group(*arguments: Any, **options: Any) -> Any:
            self.read(final=True)
            result, world = destroy(*arguments, **options), _world()
            self.closed = world is not None and world.default_pg is None
            return result

        for module in (c10d, torch.distributed):
            self.replace(module, "destroy_process_group", destroy_process_group)

    def replace(self, holder: Any, name: str, value: Any) -> None:
        """Set the attribute ``name`` of ``holder`` to ``value``; :meth:`stop` restores the former value."""
        before = vars(holder)[name]  # not getattr(), which unwraps the methods of pybind's classes
        setattr(holder, name, value)
        self.undo.append(lambda: setattr(holder, name, before))

    def noting(self, method: Callable[..., Any], operation: str) -> Callable[..., Any]:
        """Return a replacement for ``method`` of ``ProcessGroup``, which counts each call and then calls ``method``.

        The count tells how full torch's flight recorder is.  ``operation`` is the collective that the method starts,
        such as ``all_gather``.  In two cases the replacement calls :meth:`note`, which counts the call: if the recorder
        may not see the call, or if the recorder may be nearly full.
        """
        maybe_unseen = operation in _POINT_TO_POINT

        @functools.wraps(method)
        def call(group: Any, *arguments: Any, **options: Any) -> Any:
            try:
                counts = not maybe_unseen and group.group_name in self.recorded_groups
            except Exception:  # a group without a name
                counts = False
            # The counters change without the lock.  If a count is lost, the recorder is only read a little later.
            if counts and self.since < self.limit:
                self.since += 1
                self.in_step += 1
            else:
                self.note(operation, group, arguments, options)
            return method(group, *arguments, **options)

        return call

    @_guarded
    def note(self, operation: str, group: Any, arguments: Any, options: Any) -> None:
        """Count a call of ``operation`` by Python code; keep its row if no recorder sees the call.

        A row has the :data:`FIELDS` of a call.

        - If torch's flight recorder is nearly full, and no step has ended since the last reading, this method reads the
          recorder.
        - If ``group`` is not known yet, this method writes an event for each new group.
        """
        self.since += 1
        self.in_step += 1
        if self.since > self.limit and not self.marks:  # a program whose steps are not recognised
            self._read(final=False)
        name = str(group.group_name)
        if name not in self.groups:
            self.find_groups()
        backend = self.groups.get(name, "")
        if name not in self.unseen and not (operation in _POINT_TO_POINT and "nccl" not in backend):
            return
        sizes, types = [0], []
        for argument in (*arguments, *options.values()):
            leaves = list(_tensors(argument))
            sizes.append(sum(leaf.numel() for leaf in leaves))
            types += [str(leaf.dtype).rpartition(".")[2] for leaf in leaves]
        dtype = types[0] if types else ""
        frames: list[tuple[str, str, int]] = []
        frame: Any = sys._getframe(3)  # noqa: SLF001  # the caller of the wrapper
        while frame is not None and len(frames) < _DEEPEST:
            frames.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        _, phase, site, caller = describe(frames, threading.current_thread().name)
        peer = -1
        if operation in _POINT_TO_POINT and len(arguments) > 1 and isinstance(arguments[1], int):
            members = self.ranks.get(name, [])
            peer = members[arguments[1]] if len(arguments) > 2 and arguments[1] < len(members) else -1
        elements = max(sizes)
        key = (phase, operation, operation, dtype, name, peer, site, caller, "wrapper")
        self.noted.append((time.time_ns(), (*key, elements, elements * item_bytes(dtype))))

    @_guarded
    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Note the time at which a step of ``optimizer`` begins, if ``optimizer`` marks the training steps.

        A program may have several optimizers, and one of them marks the training steps: each time this optimizer
        steps, a training step ends.  It is the optimizer whose ``step()`` is called first in the program.  If the
        ``step()`` of one optimizer calls the ``step()`` of others, the outer optimizer is therefore the marking one.
        After the marking optimizer has been deleted, the next optimizer that steps takes its place.
        """
        if self.stepper is None or self.stepper() is None:
            self.stepper = weakref.ref(optimizer)
        if self.stepper() is optimizer:
            self.begin = time.time_ns()

    @_guarded
    def after_step(self, optimizer: Any, *_: Any) -> None:
        """End the training step, if ``optimizer`` marks the training steps (:meth:`before_step`).

        If ``marker`` is set, the function that it names ends training steps instead.  If ``optimizer`` has stepped for
        the first time, also write the event ``model``, with the number of parameters.
        """
        if id(optimizer) not in self.optimizers and len(self.optimizers) < 1000:
            self.optimizers[id(optimizer)] = type(optimizer).__name__
            self.measure_model(optimizer)
        if not self.marker and self.stepper() is optimizer:
            self._mark()

    @_guarded
    def mark(self) -> None:
        """Count the current step as ended, and read torch's flight recorder if a reading is due.

        The recorder is always read after each of the first :data:`FIRST_STEPS` steps, after ``last_step``, and if it
        could overflow in the next step.  After any other step the recorder is read only if reading is cheap: all
        readings since the first step, including the next, take at most the share :data:`BUDGET` of the process's
        processor time.  After ``last_step``, the witness stops.
        """
        self._mark()

    def _mark(self) -> None:
        self.steps += 1
        now_ns = time.time_ns()
        self.marks.append((self.steps, self.begin or now_ns, now_ns))
        self.begin = 0
        self.most, self.in_step = max(self.most, self.in_step), 0
        if self.progress >= 0:
            os.pwrite(self.progress, b"%d" % self.steps, 0)
        now = time.process_time()  # processor time, since elapsed time includes waiting for other ranks
        self.first_step = self.first_step or now
        done = self.last_step is not None and self.steps >= self.last_step
        affordable = self.spent + self.cost <= BUDGET * (now - self.first_step)
        filling = (len(self.marks) + 1) * self.most > self.limit
        if self.steps <= FIRST_STEPS or affordable or filling or done:
            self._read(final=False)
        if done:
            self.write(event="end", how=f"step {self.steps}", steps=self.steps, **self.seconds())
            self.stop(in_hook=True)

    def mark_calls(self, module: Any) -> None:
        """Wrap the function of ``module`` that ``marker`` names, so that a step ends each time the function returns.

        If the module has no such function, write the event ``unmarked``.
        """
        *path, name = self.marker.partition(":")[2].split(".")
        try:
            holder = functools.reduce(getattr, path, module)
            function = getattr(holder, name)
        except AttributeError:
            self.write(event="unmarked", module=module.__name__, name=self.marker.partition(":")[2])
            return

        @functools.wraps(function)
        def marking(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.mark()
            return result

        self.replace(holder, name, marking)

    # What there is ----------------------------------------------------------------------------------------------

    def recorders(self) -> dict[str, Callable[..., bytes]]:
        """Return torch's functions that copy a flight recorder's entries, by name: ``generic`` or ``nccl``."""
        c10d = getattr(self.torch._C, "_distributed_c10d", None)  # noqa: SLF001
        names = {"generic": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
        return {name: getattr(c10d, dump) for name, dump in names.items() if hasattr(c10d, dump)}

    def sees(self, backend: str) -> bool:
        """Return whether torch's flight recorder sees the collectives of a backend, such as ``cpu:gloo,cuda:nccl``."""
        recorders = self.recorders()
        version = tuple(int(part) for part in self.torch.__version__.split("+")[0].split(".")[:2])
        known = {"nccl"} if "nccl" in recorders else set()
        if "generic" in recorders and version >= (2, 13):
            known.add("gloo")
        return {part.rpartition(":")[2] for part in backend.split(",")} <= known

    def find_groups(self) -> None:
        """Write an event for each new process group and, once the rank is known, an event for this process's rank."""
        world = _world()
        if world is None or (self.forked_here and world.default_pg in (None, self.inherited)):
            return
        for group, members in [*world.pg_group_ranks.items()]:
            if not hasattr(group, "group_name"):  # a number stands for groups without this rank
                continue
            name = str(group.group_name)
            if name not in self.groups and group is not self.inherited:
                ranks = sorted(members, key=members.__getitem__)
                backend = str(self.torch.distributed.get_backend_config(group))
                self.groups[name], self.ranks[name] = backend, ranks
                seen = self.sees(backend)
                (self.recorded_groups if seen else self.unseen).add(name)
                self.write(event="group", name=name, ranks=ranks, backend=backend, seen=seen)
        default = world.default_pg
        if default is not None and default is not self.inherited:
            self.used, self.closed = True, False
            if self.rank < 0:
                self.rank = default.rank()
                self.write(event="rank", rank=self.rank, world=default.size())

    def measure_model(self, optimizer: Any) -> None:
        """Write the event ``model``, which describes the model, after ``optimizer`` has stepped for the first time.

        The event has the number of elements of all parameters.  They are counted in the engine, if DeepSpeed or this
        project's engine trains the model, and else in the optimizers that have stepped so far.  The event also has
        FSDP2's units (the modules given to ``fully_shard()``), and what this project's engines send in a step.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.held[id(parameter)] = (_elements(parameter), str(parameter.dtype).rpartition(".")[2])
        by, counted = "optimizer " + ", ".join(dict.fromkeys(self.optimizers.values())), self.held
        if (models := _other_engines(self.optimizers, self.held)) is not None:
            by, counted = models
        types: dict[str, int] = {}
        for elements, dtype in counted.values():
            types[dtype] = types.get(dtype, 0) + elements
        self.write(
            event="model", elements=sum(types.values()), types=types, by=by, fsdp=_fsdp_units(self.held),
            own=[hop for engine in _own_engines(self.held) for hop in _own_hops(engine)],
        )  # fmt: skip

    # Reading ----------------------------------------------------------------------------------------------------

    @_guarded
    def read(self, *, final: bool) -> None:
        """Write the calls of all steps that have ended; if ``final``, also the calls after the last step's end."""
        self._read(final=final)

    def _read(self, *, final: bool) -> None:
        if self.torch is None or not hasattr(self.torch, "distributed"):
            return
        # A reading makes thousands of dictionaries.  They would make the garbage collector search the whole program
        # again and again, which takes ten times as long as the reading.  They form no cycles and need no collector.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._read_all(final=final)
        finally:
            if collects:
                gc.enable()

    def _read_all(self, *, final: bool) -> None:
        began = time.thread_time()
        self.find_groups()
        # A forked process that has made no group of its own must not touch the recorder, whose lock may be held.
        if self.forked_here and not self.used:
            return
        calls = [*self.tail, *self.noted, *self.recorded()]
        self.noted, self.since = [], 0
        self.used = self.used or bool(calls)
        calls.sort(key=_MOMENT)
        self.tail = self._write_steps(calls)
        if final and self.tail:
            rows = _rows(row for _, row in self.tail)
            self.write(event="rows", first=self.steps + 1, last=None, rows=rows)
            self.tail = []
        if self.used and (self.steps > self.read_steps or final):
            self.write(event="counters", step=self.steps, sent=self.counters(), time=time.time_ns())
        self.cost = time.thread_time() - began
        # The first reading also describes stacks and groups.
        self.spent += self.cost if self.read_steps else 0.0
        self.read_steps = self.steps

    def _write_steps(self, calls: list[Call]) -> list[Call]:
        """Write the calls of the steps that have ended; return all later calls, which the current step made.

        A call in the phase ``optimizer`` may directly follow the end of a step, such as DeepSpeed's gather of the new
        weights.  This call is counted in the step that has just ended.

        Args:
            calls: All calls that have not been written, sorted by time.
        """
        by_step: dict[int, list[Call]] = {step: [] for step, _, _ in self.marks}
        place, moments = 0, [moment for moment, _ in calls]
        for step, begin, end in [*self.marks, (self.steps + 1, sys.maxsize, sys.maxsize)]:
            after = bisect.bisect_right(moments, end)
            own = place  # the first call that does not belong to the step before
            while own < after and step > 1 and moments[own] < begin and calls[own][1][0] == "optimizer":
                own += 1
            if own > place:
                by_step.setdefault(step - 1, []).extend(calls[place:own])
                if step - 1 == self.read_steps:  # the counters of this step were read before these calls
                    late = _rows(row for _, row in calls[place:own])
                    self.write(event="late", step=step - 1, rows=late)
            by_step.setdefault(step, []).extend(calls[own:after])
            place = after
        tail = by_step.pop(self.steps + 1)
        self.marks = []
        # The first and the last of consecutive steps with equal rows, and these rows.
        run: tuple[int, int, Any] | None = None
        alike: list[Any] | None = None  # the calls of the step before
        rows: list[list[Any]] = []
        for step in sorted(by_step):
            made = [row for _, row in by_step[step]]
            if made != alike:  # rows that one sequence gave are the same objects, which compare fast
                alike, rows = made, _rows(made)
            if run is not None and run[2] == rows and run[1] == step - 1 and step > self.read_steps + 1:
                run = (run[0], step, rows)
                continue
            if run is not None:
                self.write(event="rows", first=run[0], last=run[1], rows=run[2])
            run = (step, step, rows)
        if run is not None:
            self.write(event="rows", first=run[0], last=run[1], rows=run[2])
        return tail

    def recorded(self) -> list[Call]:
        """Return the calls that torch's flight recorders have added since they were last read."""
        calls: list[Call] = []
        if self.closed and not self.since and not self.marks:
            return calls
        for name, dump in self.recorders().items():
            rows = None
            if any(sequence.times > 1 for sequence in self.known.get(name, ())):
                entries, last = self.unread(name, dump, stacks=False)
                rows = self.recalled(name, entries)
            if rows is None:
                entries, last = self.unread(name, dump, stacks=True)
                rows = [self.row_of(entry) for entry in entries]
                self.remember(name, entries, rows)
            self.seen[name] = last
            made = zip(map(_CREATED, entries), rows)  # noqa: B905  # Python 3.8
            calls += [(moment, row) for moment, row in made if row is not None]
        return calls

    def unread(
        self, name: str, dump: Callable[..., bytes], *, stacks: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the entries that a recorder has added since the last reading, and the number of the last entry.

        If entries were overwritten before they were read, write the event ``lost``.

        Args:
            name: Name of the recorder.
            dump: torch's function that copies the recorder's entries.
            stacks: Whether to copy the Python stacks of the calls too.
        """
        entries = pickle.loads(dump(True, stacks, False)).get("entries") or []  # noqa: S301  # torch wrote it
        last = self.seen.get(name, -1)
        if not entries:
            return [], last
        if int(entries[-1]["record_id"]) < last:  # the program has reset the recorder
            last = -1
        first = int(entries[0]["record_id"])
        if first > last + 1 and int(entries[0]["time_created_ns"]) >= self.began:
            self.write(event="lost", entries=first - last - 1, first=self.read_steps + 1, last=self.steps + 1)
            self.seen[name] = first - 1  # so that a second look does not report them again
        last, new = int(entries[-1]["record_id"]), entries[max(0, last + 1 - first) :]
        if self.unseen or int(entries[0]["time_created_ns"]) < self.began:
            new = [
                entry
                for entry in new
                if int(entry["time_created_ns"]) >= self.began
                and str(entry["process_group"][0]) not in self.unseen  # the wrapper has noted these
            ]
        return new, last

    def recalled(self, name: str, entries: list[dict[str, Any]]) -> list[Any] | None:
        """Return a row for each of ``entries``, with phases and call sites from an earlier step with the same calls.

        The entries were copied without stacks, so they do not show phases and call sites.  Returns None in these cases:

        - The calls of a step have not yet come twice, or they have come with different stacks.
        - Some entries were made after the last step that has ended.

        Args:
            name: Name of the recorder.
            entries: The recorder's new entries.
        """
        rows: list[Any] = []
        for step in self.by_mark(entries):
            identities = [_IDENTITY(entry) for entry in step]
            known = next((each for each in self.known[name] if each.identities == identities), None)
            if known is None or known.rows is None or known.times < 2:
                return None
            rows += known.rows
        return rows if len(rows) == len(entries) else None  # there were calls after the last step

    def remember(self, name: str, entries: list[dict[str, Any]], rows: list[Any]) -> None:
        """Remember the calls of each step in ``entries``, with the ``rows`` that were made from their stacks.

        A later step with the same calls can then be read without stacks (:meth:`recalled`).

        Args:
            name: Name of the recorder.
            entries: The recorder's new entries.
            rows: A row (:data:`FIELDS`) for each entry; None for entries that are not reported.
        """
        place, sequences = 0, self.known.setdefault(name, [])
        for step in self.by_mark(entries):
            identities, rows_of_step = [_IDENTITY(entry) for entry in step], rows[place : place + len(step)]
            place += len(step)
            known = next((each for each in sequences if each.identities == identities), None)
            if known is not None:
                known.learn(rows_of_step)
            elif len(sequences) < _SEQUENCES:
                sequences.append(_Sequence(identities, rows_of_step))

    def by_mark(self, entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Yield, for each step that has ended since the last reading, those of ``entries`` that the step made."""
        place, moments = 0, [*map(_CREATED, entries)]
        for _, _, end in self.marks:
            first = place
            place = bisect.bisect_right(moments, end)
            self.most = max(self.most, place - first)  # the wrapper did not count calls from C++
            yield entries[first:place]

    def row_of(self, entry: dict[str, Any]) -> tuple[Any, ...] | None:
        """Convert a recorder's entry into a row, which has all :data:`FIELDS` except the field named ``calls``.

        Returns None if the call sends no elements and is no barrier.
        """
        frames = tuple((f["filename"], f["name"], int(f["line"])) for f in entry.get("frames") or ())
        known = (frames, str(entry.get("thread_name") or ""))
        if known not in self.described:
            self.described[known] = describe(*known)
        operation, phase, site, caller = self.described[known]
        called = str(entry["profiling_name"]).rpartition(":")[2]
        done_as = operation_of(called)
        sides = []
        for side in ("input", "output"):
            numels = [_product(size) for size in entry[side + "_sizes"]]
            types = [dtype_of(str(dtype)) for dtype in entry[side + "_dtypes"]]
            sizes = sum(n * item_bytes(dtype) for n, dtype in zip(numels, types))  # noqa: B905  # Python 3.8
            sides.append((sum(numels), sizes, max(zip(numels, types))[1] if numels else ""))  # noqa: B905
        elements, size, dtype = max(sides)
        if done_as in ("gather", "scatter"):  # one rank's tensor, since only the root has all
            elements, size, dtype = min(side for side in sides if side[0]) if elements else sides[0]
        if not elements and done_as != "barrier":
            return None
        name, peer = str(entry["process_group"][0]), -1
        if done_as in _POINT_TO_POINT:
            ends = [
                int(part) for part in called.replace("->", " ").replace("<-", " ").split() if part.isdigit()
            ]
            members = self.ranks.get(name, [])
            peer = members[ends[1]] if len(ends) == 2 and ends[1] < len(members) else -1
        key = (phase, operation or done_as, done_as, dtype, name, peer, site, caller, "recorder")
        return (*key, elements, size)

    def counters(self) -> dict[str, int]:
        """Return the bytes sent so far by each network interface, InfiniBand port, and this process's GPU, by name.

        From an interface's bytes, 66 bytes are subtracted for each packet: the packet's headers.  The rest can be
        compared with the bytes of messages.  A GPU's bytes are those that the GPU has sent through NVLinks.
        """
        sent = {}
        with open("/proc/self/net/dev", encoding="ascii") as file:  # noqa: PTH123  # also right in a namespace
            for line in file.readlines()[2:]:
                name, _, numbers = line.partition(":")
                fields = numbers.split()
                sent[name.strip()] = int(fields[8]) - _HEADER * int(fields[9])
        ports = INFINIBAND + "/*/ports/*/counters/port_xmit_data"
        for path in glob.glob(ports) if os.path.isdir(INFINIBAND) else ():  # noqa: PTH112, PTH207
            try:
                with open(path, encoding="ascii") as file:  # noqa: PTH123
                    sent["/".join(path.split("/")[-5:-2:2])] = 4 * int(file.read())  # in units of 4 bytes
            except (OSError, ValueError):
                continue
        try:
            sent.update(self._nvlink())
        except Exception:  # the driver or the module pynvml is missing, so that NVLinks cannot be counted
            return sent
        return sent

    def _nvlink(self) -> dict[str, int]:
        """Return the bytes that this process's GPU has sent through NVLinks.

        The returned dictionary has one key, ``nvlink`` followed by the GPU's UUID.  It is empty if the process uses no
        GPU, or if NVML has no such counter.
        """
        cuda = self.torch.cuda
        if not cuda.is_initialized():
            return {}
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        if not self.nvml:
            pynvml.nvmlInit()
            self.nvml = True
        uuid = str(cuda.get_device_properties(cuda.current_device()).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else "GPU-" + uuid)
        # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX of all links (nvml.h)
        (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [(138, 0xFFFFFFFF)])
        return {} if value.nvmlReturn else {"nvlink " + uuid: int(value.value.ullVal) * 1024}


class _AfterImport:
    """A finder for ``sys.meta_path`` that calls a function after a certain module has been imported.

    ``wanted`` maps the name of each such module to the function.  The modules themselves are found by Python's other
    finders.  A function is called only when its module has been imported, and not when a program merely looks for the
    module, as ``importlib.util.find_spec()`` does.
    """

    def __init__(self, wanted: dict[str, Callable[[Any], None]]) -> None:
        self.wanted = wanted

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module in ``wanted``, changed so that the module's function is called after its import.

        Another finder makes the spec; its loader is wrapped in a :class:`_Loader`.  Returns None for all other modules,
        which Python's other finders then find.
        """
        if name not in self.wanted:
            return None
        for finder in [*sys.meta_path]:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, functools.partial(self.imported, name))
            return spec
        return None

    def imported(self, name: str, module: Any) -> None:
        """Call the function that ``wanted`` has for ``module``, which has just been imported under ``name``.

        After the last of the modules in ``wanted``, also remove this finder from ``sys.meta_path``.
        """
        after = self.wanted.pop(name, None)
        if not self.wanted and self in sys.meta_path:
            sys.meta_path.remove(self)
        if after is not None:
            after(module)


class _Loader:
    """Loads a module with the loader that another finder chose, and then calls ``after(module)``.

    Before the module's code runs, the module's ``__loader__`` is set to the chosen loader, so that the module does not
    see this class.
    """

    def __init__(self, loader: Any, after: Callable[[Any], None]) -> None:
        self.loader, self.after = loader, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: Any) -> Any:
        """Let the chosen loader create the module object."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Let the chosen loader execute the module's code, and then call ``after(module)``."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.after(module)


def _process() -> dict[str, Any]:
    """Return facts that identify this process.

    These are the host, the process id (``pid``), the time of start in ns, the command, Python's version, and the
    launcher's environment variables that say which rank this is.
    """
    environment = {
        name: os.environ[name]
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_NODEID")
        if os.environ.get(name, "").isdigit()
    }
    return {
        "pid": os.getpid(), "host": socket.gethostname(), "started": time.time_ns(), "command": sys.argv[:1],
        "python": sys.version.split()[0], "environment": environment,
    }  # fmt: skip


def _world() -> Any:
    """Return torch's table of process groups; None if this torch has none."""
    return getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in an argument of a collective, which may be a tensor, a list, or a list of lists."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "numel") and hasattr(value, "dtype"):
        yield value


def _rows(calls: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Combine equal calls into rows, and return the rows sorted.

    Calls are equal if they agree in every field but ``elements`` and ``bytes``.  A call has the :data:`FIELDS` except
    the field named ``calls``.  A row has all fields, in the same order: ``calls`` is the number of calls that it
    combines, and ``elements`` and ``bytes`` are the sums over these calls.
    """
    sums: dict[tuple[Any, ...], list[int]] = {}
    for call in calls:
        counts = sums.setdefault(call[:-2], [0, 0, 0])
        counts[0] += 1
        counts[1] += call[-2]
        counts[2] += call[-1]
    return [[*key, *counts] for key, counts in sorted(sums.items())]


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= int(size)
    return product


def _elements(parameter: Any) -> int:
    """Return the number of elements of a whole parameter, also if this process holds only a shard of it.

    DeepSpeed's parameters have ``ds_numel``, and FSDP1's have ``_unpadded_unsharded_size``.  A DTensor's ``numel()``
    already counts the whole parameter.
    """
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    if hasattr(parameter, "_unpadded_unsharded_size"):
        return _product(parameter._unpadded_unsharded_size)  # noqa: SLF001
    return int(parameter.numel())


def _other_engines(
    optimizers: Container[int], held: Iterable[int]
) -> tuple[str, dict[int, tuple[int, str]]] | None:
    """Return the sizes of the model's parameters if DeepSpeed or this project's engine trains it.

    The optimizers of these engines hold flat shards, from which the parameters cannot be counted.

    Args:
        optimizers: Ids of the optimizers that have stepped.
        held: Ids of the parameters that these optimizers hold.

    Returns:
        (name, sizes): the engine's name, and the (elements, type) of each parameter.  The keys of ``sizes`` are
        arbitrary numbers, one for each parameter.  None if neither engine trains the model.
    """
    if engines := _own_engines(held):
        slots = [slot for engine in engines for unit in engine.units for slot in unit.geometry.slots]
        return "this project's engine", {
            place: (slot.spec.numel, "float32") for place, slot in enumerate(slots)
        }
    if (deepspeed := sys.modules.get("deepspeed")) is not None and hasattr(deepspeed, "DeepSpeedEngine"):
        engines = [obj for obj in gc.get_objects() if type(obj).__name__.endswith("Engine")]
        engines = [engine for engine in engines if isinstance(engine, deepspeed.DeepSpeedEngine)]
        engines = [engine for engine in engines if id(engine.basic_optimizer) in optimizers]
        parameters = [parameter for engine in engines for parameter in engine.module.parameters()]
        sizes = {id(p): (_elements(p), str(p.dtype).rpartition(".")[2]) for p in parameters}
        return ("DeepSpeed", sizes) if sizes else None
    return None


def _own_engines(held: Iterable[int]) -> list[Any]:
    """Return the engines of this project that train with an optimizer of the audited program.

    Such an engine hands its masters, which are fp32 shards, to the optimizer in place of the model's parameters.
    ``held`` has the ids of all parameters that the program's optimizers hold; an engine is returned if some of its
    masters are among them.
    """
    watch = sys.modules.get("impl.engine.optimizer_watch")
    engines = [] if watch is None else watch.engines()
    return [engine for engine in engines if not set(held).isdisjoint(engine.masters.numbers)]


def _own_hops(engine: Any) -> list[dict[str, Any]]:
    """Return what this rank sends in a step of this project's engine, summed over the engine's units.

    A unit is a group of parameters that are sent together.  A hop is one exchange of messages in a group of ranks; a
    gather or a reduction consists of one or more hops.  Each returned dictionary sums up the hops that have the same
    turn, group of ranks, codec, kind and source:

    - ``turn``: ``forward`` (the first forward pass after an optimizer step), ``again`` (a further forward pass before
      the next optimizer step), ``backward`` or ``reduction``;
    - ``ranks``: the global ranks of the group;
    - ``codec``: the codec as text, such as ``int8:2048``;
    - ``kind``: the collective that the hop uses;
    - ``source``: what is sent, such as ``weights``, or ``copy`` for hpZ's copy of the weights;
    - ``between``: whether the messages go to other nodes;
    - ``unseen``: whether ranks exchange these messages in shared memory, which an audit does not see;
    - ``bytes``: how many bytes the rank sends to each of the other ranks of the group;
    - ``scales``: how many of these bytes are the codec's scales;
    - ``each``: in the turn ``reduction``, whether gradients are reduced in every micro-batch; true in all other turns.
    """
    plan, schedule = sys.modules["impl.plan.hops"], sys.modules["impl.plan.prefetch_schedule"]
    mesh = engine.wire.mesh
    sums: dict[Any, dict[str, Any]] = {}
    kept = schedule.kept_units(engine.policy, [unit.geometry for unit in engine.units])
    for number, unit in enumerate(engine.units):
        policy, geometry = unit.policy, unit.geometry
        changed = "weights" if policy.differences is None else "differences"
        again = "copy" if policy.secondary else changed
        gathers = {"forward": changed if geometry.trainable else again}
        if policy.stage == 3:  # in stages 1 and 2, weights stay gathered until they change
            gathers["again"] = again
            gathers.update({} if number in kept else {"backward": again})
        elif not geometry.trainable:
            gathers = {}
        hops = [
            (turn, hop)
            for turn, sends in gathers.items()
            for hop in plan.gather_hops(
                policy,
                mesh.topology,
                geometry.shard,
                plan.in_phase(policy, turn.replace("again", "forward"), sends),
            )
        ]
        if geometry.trainable:
            of_gradient = plan.reduction_hops(policy, mesh.topology, geometry.piece, policy.grain)
            hops += [("reduction", hop) for hop in of_gradient]
        for turn, hop in hops:
            key = (turn, hop.axis.group(mesh.rank), str(hop.codec), hop.kind, hop.source)
            entry = sums.setdefault(key, {
                "turn": turn, "ranks": list(key[1]), "codec": key[2], "kind": hop.kind, "source": hop.source,
                "between": hop.crosses, "unseen": engine.wire.shares_memory(hop.axis), "bytes": 0, "scales": 0,
                "each": turn != "reduction" or policy.reduces_each_micro_batch,
            })  # fmt: skip
            scales = sum(hop.codec.scale_bytes(end - start) for start, end in hop.chunks)
            entry["bytes"] += hop.nbytes
            entry["scales"] += hop.frames * len(hop.planes) * scales
    return [entry for entry in sums.values() if len(entry["ranks"]) > 1]


def _fsdp_units(held: Container[int]) -> list[dict[str, Any]]:
    """Return a dictionary for each of FSDP2's units, with the unit's sizes, types and groups.

    A unit is a module that was given to ``fully_shard()``.  Only units with a parameter that an optimizer holds are
    returned; ``held`` has the ids of these parameters.  Units of a frozen teacher model are therefore left out.
    Returns an empty list if the program has no unit of FSDP2, or if this version of torch keeps its units in attributes
    with other names.
    """
    units = []
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for reference in [*states.values()]:
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            if not any(id(parameter.sharded_param) in held for parameter in group.fsdp_params):
                continue
            mesh, after = group.mesh_info, group.post_forward_mesh_info
            shards = int(getattr(mesh, "shard_mesh_size", 1))
            padded = trained = elements = 0
            for parameter in group.fsdp_params:
                size = shards * _product(parameter.padded_sharded_param_size)
                elements += _product(parameter._orig_size)  # noqa: SLF001
                padded += size
                trained += size if parameter.sharded_param.requires_grad else 0
            first = group.fsdp_params[0]
            weights = first.param_dtype or first.orig_dtype
            gradients = first.reduce_dtype or weights
            units.append({
                "elements": elements, "padded": padded, "trained": trained, "shards": shards,
                "replicas": int(getattr(mesh, "replicate_mesh_size", 1)),
                "gathered_again_in": 0 if after is None else int(after.shard_mesh_size),
                "weights": str(weights).rpartition(".")[2], "gradients": str(gradients).rpartition(".")[2],
            })  # fmt: skip
    return units


def start_from(folder: str) -> None:
    """Start a :class:`Witness` in this process, with the options in the file ``options.json`` of ``folder``."""
    with open(os.path.join(folder, "options.json"), encoding="utf-8") as file:  # noqa: PTH118, PTH123
        Witness(**json.load(file)).start()
