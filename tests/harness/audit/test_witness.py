"""Tests of the witness, in this process and without a program."""

from __future__ import annotations

import ast
import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.audit import on_path, witness
from harness.audit.witness import Witness, describe, dtype_of, item_bytes, operation_of

TORCH = "/venv/lib/python3.11/site-packages/torch"
MODULE = (f"{TORCH}/nn/modules/module.py", "_call_impl", 5)
API = (f"{TORCH}/distributed/distributed_c10d.py", "all_gather_into_tensor", 4)
LOGGER = (f"{TORCH}/distributed/c10d_logger.py", "wrapper", 3)
GATHER = (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather", 9)
ENGINE = (f"{TORCH}/autograd/graph.py", "_engine_run_backward", 6)
ADAM = (f"{TORCH}/optim/adamw.py", "step", 8)
USER = ("/home/me/train.py", "main", 31)


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([API, LOGGER, GATHER, MODULE, USER], "forward"),
        ([API, LOGGER, GATHER, ENGINE, USER], "backward"),
        ([API, GATHER, MODULE, ENGINE, USER], "backward"),
        ([API, ADAM, USER], "optimizer"),
        (
            [API, ("/venv/lib/python3.11/site-packages/deepspeed/runtime/engine.py", "step", 2), USER],
            "optimizer",
        ),
        ([API, (f"{TORCH}/nn/utils/clip_grad.py", "clip_grad_norm_", 2), USER], "optimizer"),
        ([API, ("/home/me/train.py", "step", 30), USER], "other"),
        ([], "other"),
    ],
)
def test_the_phase_of_a_call_is_in_its_stack(frames: list[tuple[str, str, int]], phase: str) -> None:
    """Recomputation in backward is backward; a user's own function named step is no optimizer."""
    assert describe(frames)[1] == phase


def test_a_call_on_a_thread_of_autograd_is_backward() -> None:
    """On GPUs, DDP's reducer calls from such a thread, without any Python frame."""
    assert describe([], "pt_autograd_0") == ("", "backward", "", "")


def test_site_and_caller_of_a_call() -> None:
    """The site is the user's line, the caller the function of the library that called torch.distributed."""
    operation, _, site, caller = describe([API, LOGGER, GATHER, MODULE, USER])
    assert (operation, site) == ("all_gather", "/home/me/train.py:31 (main)")
    assert caller == "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:9 (foreach_all_gather)"


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("gloo:all_reduce", "all_reduce"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_single", "reduce_scatter"),
        ("alltoall_base", "all_to_all"),
        ("nccl:send 0->1", "send"),
        ("recv_anysource", "recv"),
        ("reduce", "reduce"),
        ("something", "something"),
    ],
)
def test_names_of_operations(name: str, operation: str) -> None:
    """Methods, functions and profiling entries are named alike."""
    assert operation_of(name) == operation


def test_types_of_elements() -> None:
    """C++ and torch name types differently."""
    assert [dtype_of(name) for name in ("Float", "BFloat16", "Char", "Byte", "Float8_e4m3fn")] == [
        "float32", "bfloat16", "int8", "uint8", "float8_e4m3fn",
    ]  # fmt: skip
    assert [item_bytes(name) for name in ("float32", "bfloat16", "float8_e4m3fn", "int64")] == [4, 2, 1, 8]


def call(time: int, phase: str = "forward", elements: int = 1) -> tuple[int, tuple[Any, ...]]:
    return time, (
        phase,
        "all_reduce",
        "all_reduce",
        "float32",
        "0",
        -1,
        "",
        "",
        "recorder",
        elements,
        4 * elements,
    )


def written(calls: list[tuple[int, tuple[Any, ...]]], marks: list[tuple[int, int, int]]) -> dict[int, int]:
    """Elements by step; the number after the last is of calls that are kept for later."""
    found = Witness(None)
    found.marks, found.steps = list(marks), marks[-1][0]
    tail = found._write_steps(sorted(calls, key=lambda call: call[0]))
    by_step: dict[int, int] = {}
    for event in found.events:
        for step in range(event["first"], event["last"] + 1):
            by_step[step] = by_step.get(step, 0) + sum(row[-2] for row in event["rows"])
    return by_step | {marks[-1][0] + 1: sum(call[1][-2] for call in tail)}


def test_calls_belong_to_the_step_that_ends_after_them() -> None:
    """A step without calls is written too."""
    marks = [(1, 8, 10), (2, 18, 20), (3, 28, 30)]
    assert written([call(5), call(9), call(15), call(35)], marks) == {1: 2, 2: 1, 3: 0, 4: 1}


def test_a_gather_of_the_optimizer_after_a_step_belongs_to_that_step() -> None:
    """A call inside of an optimizer's step() belongs to this step, even if nothing came before it."""
    marks = [(1, 8, 10), (2, 18, 20)]
    late = [call(5), call(11, "optimizer"), call(15), call(21, "optimizer")]
    assert written(late, marks) == {1: 2, 2: 2, 3: 0}
    inside = [call(9, "optimizer"), call(19, "optimizer")]
    assert written(inside, marks) == {1: 1, 2: 1, 3: 0}


def test_calls_after_a_reading_of_the_counters_are_written_by_themselves() -> None:
    """Of the step whose end was read before, the calls of the optimizer that followed are rows of an event ``late``."""
    found = Witness(None)
    for step in (1, 2, 3):
        found.marks, found.steps = [(step, 10 * step - 2, 10 * step)], step
        found.tail = found._write_steps([call(10 * step - 9, "optimizer", 7), call(10 * step - 5)])
        found.read_steps = step
    late = [event for event in found.events if event["event"] == "late"]
    assert [(event["step"], [row[-2] for row in event["rows"]]) for event in late] == [(1, [7]), (2, [7])]


def test_steps_with_equal_calls_are_written_once() -> None:
    """One event holds the rows of all steps that are alike."""
    found = Witness(None)
    found.marks, found.steps = [(step, 10 * step - 1, 10 * step) for step in range(1, 6)], 5
    found.read_steps = 0
    found._write_steps([call(10 * step - 5, elements=2 if step == 4 else 1) for step in range(1, 6)])
    assert [(event["first"], event["last"]) for event in found.events] == [(1, 3), (4, 4), (5, 5)]


class _Recorder:
    """A recorder whose entries a test sets; ``stacks`` says of each dump whether it had stacks."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.stacks: list[bool] = []

    def __call__(self, _: bool, stacks: bool, __: bool) -> bytes:  # as torch's _dump_fr_trace
        import pickle

        self.stacks.append(stacks)
        hidden = () if stacks else ("frames",)
        entries = [
            {name: value for name, value in each.items() if name not in hidden} for each in self.entries
        ]
        return pickle.dumps({"entries": entries})


def entry(number: int, name: str = "gloo:all_gather", **changes: Any) -> dict[str, Any]:
    return {
        "record_id": number, "time_created_ns": 2**62 + number, "profiling_name": name, "process_group": ("0", ""),
        "input_sizes": [[2, 3]], "output_sizes": [[4, 3]], "input_dtypes": ["Char"], "output_dtypes": ["Char"],
        "frames": [], "thread_name": "",
    } | changes  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[Witness, _Recorder]:
    found, recorder = Witness(None), _Recorder()
    monkeypatch.setattr(found, "recorders", lambda: {"generic": recorder})
    return found, recorder


def test_every_entry_is_read_once(recorded: tuple[Witness, _Recorder]) -> None:
    """A recorder is copied whole, so that entries that were read before are left out."""
    found, recorder = recorded
    recorder.entries = [entry(0), entry(1)]
    assert len(list(found.recorded())) == 2
    recorder.entries.append(entry(2))
    assert len(list(found.recorded())) == 1
    assert found.events == []


def test_the_recorder_is_not_copied_again_after_the_last_group(recorded: tuple[Witness, _Recorder]) -> None:
    """It was read before the default group was destroyed; calls after that are read."""
    found, recorder = recorded
    recorder.entries = [entry(0)]
    found.closed = True
    assert found.recorded() == []
    assert recorder.stacks == []
    found.since = 1
    assert len(found.recorded()) == 1


@pytest.mark.parametrize(("waited", "reads"), [(0.0, True), (1e6, False)])
def test_reading_is_limited_by_processor_time(
    monkeypatch: pytest.MonkeyPatch, waited: float, *, reads: bool
) -> None:
    """One percent of the processor seconds of 100 s pays for a reading of 0.5 s; seconds of waiting do not."""
    found, read = Witness(None), list[bool]()
    monkeypatch.setattr(found, "_read", lambda *, final: read.append(final))
    monkeypatch.setattr(witness.time, "process_time", lambda: 1.0 if waited else 101.0)
    monkeypatch.setattr(witness.time, "monotonic", lambda: 101.0 + waited)
    found.steps, found.first_step, found.cost = witness.FIRST_STEPS, 1.0, 0.5
    found.mark()
    assert bool(read) == reads


def test_overwritten_entries_are_reported(recorded: tuple[Witness, _Recorder]) -> None:
    """A gap in the numbers means that the ring overflowed."""
    found, recorder = recorded
    recorder.entries = [entry(0)]
    list(found.recorded())
    recorder.entries = [entry(5), entry(6)]
    assert len(list(found.recorded())) == 2
    assert [event["entries"] for event in found.events] == [4]


def test_a_recorder_that_the_program_reset_is_read_from_its_beginning(
    recorded: tuple[Witness, _Recorder],
) -> None:
    """Its numbers begin at 0 again."""
    found, recorder = recorded
    recorder.entries = [entry(7)]
    list(found.recorded())
    recorder.entries = [entry(0), entry(1)]
    assert len(list(found.recorded())) == 2


def stack(*frames: tuple[str, str, int]) -> dict[str, Any]:
    return {"frames": [{"filename": path, "name": name, "line": line} for path, name, line in frames]}


FORWARD, BACKWARD = stack(API, MODULE, USER), stack(API, ENGINE, USER)
STEP_CALLS = [FORWARD, BACKWARD, BACKWARD | {"name": "gloo:all_reduce"}]


class _Steps:
    """Steps of a program, after each of which the witness reads; counts the entries that it described."""

    def __init__(self, recorded: tuple[Witness, _Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
        self.found, self.recorder = recorded
        self.described, row_of = 0, self.found.row_of

        def counted(entry: dict[str, Any]) -> Any:
            self.described += 1
            return row_of(entry)

        monkeypatch.setattr(self.found, "row_of", counted)

    def step(self, calls: list[dict[str, Any]], *, marked: bool = True) -> list[str]:
        """The phases of the calls that are read after this step."""
        recorder, found = self.recorder, self.found
        recorder.entries += [entry(len(recorder.entries) + i, **each) for i, each in enumerate(calls)]
        if marked:
            found.steps += 1
            end = 2**62 + len(recorder.entries) - 1
            found.marks.append((found.steps, end, end))
        phases = [row[0] for _, row in found.recorded()]
        found.marks = []
        return phases


@pytest.fixture
def steps(recorded: tuple[Witness, _Recorder], monkeypatch: pytest.MonkeyPatch) -> _Steps:
    return _Steps(recorded, monkeypatch)


def test_stacks_are_read_until_a_step_has_come_twice(steps: _Steps) -> None:
    """Later steps with the same calls get the same rows, and none of their entries is described."""
    found = [steps.step(STEP_CALLS) for _ in range(6)]
    assert found == [["forward", "backward", "backward"]] * 6
    assert steps.recorder.stacks == [True, True, False, False, False, False]
    assert steps.described == 2 * len(STEP_CALLS)


@pytest.mark.parametrize(
    "calls",
    [
        STEP_CALLS[:2],
        [*STEP_CALLS, FORWARD],
        [FORWARD, BACKWARD, BACKWARD],
        [FORWARD, BACKWARD | {"output_sizes": [[8, 3]]}, STEP_CALLS[2]],
        [FORWARD, BACKWARD | {"input_dtypes": ["Float"]}, STEP_CALLS[2]],
        [FORWARD, BACKWARD | {"process_group": ("1", "")}, STEP_CALLS[2]],
        [FORWARD, BACKWARD | {"thread_name": "pt_autograd_0"}, STEP_CALLS[2]],
    ],
)
def test_a_step_with_other_calls_is_read_with_stacks(steps: _Steps, calls: list[dict[str, Any]]) -> None:
    """Fewer or more calls, another operation, size, type, group or thread; once it has come twice it is known too."""
    for _ in range(3):
        steps.step(STEP_CALLS)
    before = steps.described
    assert len(steps.step(calls)) == len(calls)
    assert steps.recorder.stacks[-2:] == [False, True]
    assert steps.described == before + len(calls)
    for each in (calls, STEP_CALLS, calls):
        steps.step(each)
    assert steps.recorder.stacks[-4:] == [False, True, False, False]


def test_calls_after_the_last_step_are_read_with_stacks(steps: _Steps) -> None:
    """A step that has not ended may become any."""
    for _ in range(3):
        steps.step(STEP_CALLS)
    assert steps.step(STEP_CALLS[:1], marked=False) == ["forward"]
    assert steps.recorder.stacks[-1]


def test_equal_calls_with_other_stacks_are_always_read_with_stacks(steps: _Steps) -> None:
    """Without stacks, a gather for forward cannot be told from one for backward."""
    changed = [BACKWARD, *STEP_CALLS[1:]]
    steps.step(STEP_CALLS)
    phases = [steps.step(changed)[0], steps.step(STEP_CALLS)[0], steps.step(changed)[0]]
    assert phases == ["backward", "forward", "backward"]
    assert steps.described == 4 * len(STEP_CALLS)


def test_lost_entries_are_reported_once_though_the_recorder_is_read_twice(steps: _Steps) -> None:
    """The reading without stacks reports them, and that with stacks does not again."""
    for _ in range(2):
        steps.step(STEP_CALLS)
    steps.recorder.entries = [entry(9), entry(10)]
    steps.found.marks = [(3, 2**62 + 10, 2**62 + 10)]
    assert len(list(steps.found.recorded())) == 2
    assert steps.recorder.stacks[-2:] == [False, True]
    assert [event["entries"] for event in steps.found.events] == [3]


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_off_while_the_recorder_is_read(
    monkeypatch: pytest.MonkeyPatch, *, collects: bool
) -> None:
    """Afterwards it is as the program had it."""
    found, during = Witness(None), list[bool]()
    found.torch = __import__("torch")
    monkeypatch.setattr(found, "recorders", lambda: during.append(gc.isenabled()) or {})
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        found.read(final=True)
        assert (during, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if was else gc.disable)()
    assert found.events == []


def test_calls_that_the_wrapper_did_not_count_fill_the_ring_too(steps: _Steps) -> None:
    """DDP's reducer calls from C++: the largest step decides when the ring must be read."""
    steps.step(STEP_CALLS)
    assert steps.found.most == len(STEP_CALLS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("all_gather", "all_gather", "int8", -1, 12, 12)),
        ({"name": "gloo:gather"}, ("gather", "gather", "int8", -1, 6, 6)),
        ({"name": "nccl:send 0->1", "output_sizes": []}, ("send", "send", "int8", 6, 6, 6)),
        (
            {
                "name": "gloo:all_reduce",
                "frames": [{"filename": API[0], "name": "reduce_scatter_tensor", "line": 1}],
            },
            ("reduce_scatter", "all_reduce", "int8", -1, 12, 12),
        ),
        (
            {"name": "gloo:barrier", "input_sizes": [], "output_sizes": []},
            ("barrier", "barrier", "", -1, 0, 0),
        ),
        (
            {"input_sizes": [[2], [3]], "output_sizes": [], "input_dtypes": ["Float", "BFloat16"]},
            ("all_gather", "all_gather", "bfloat16", -1, 5, 14),
        ),
    ],
)
def test_an_entry_as_a_row(changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """The size is that of the whole message, and a send's peer is a global rank."""
    found = Witness(None)
    found.ranks["0"] = [5, 6]
    row = found.row_of(entry(0, **changes))
    assert row is not None
    assert (row[1], row[2], row[3], row[5], row[-2], row[-1]) == expected


def test_an_entry_without_tensors_is_no_call() -> None:
    """NCCL also records the end of a coalesced group."""
    found = Witness(None).row_of(entry(0, name="nccl:coalesced", input_sizes=[], output_sizes=[]))
    assert found is None


def test_counters_of_infiniband_and_nvlinks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports count units of 4 bytes and NVML counts KiB; a port without a number is left out, as is a missing driver.

    The files and the library are stand-ins: no such adapter was at hand.
    """
    for port, text in (("mlx5_0/ports/1", "250\n"), ("mlx5_1/ports/2", "N/A\n")):
        (folder := tmp_path / port / "counters").mkdir(parents=True)
        (folder / "port_xmit_data").write_text(text)
    monkeypatch.setattr(witness, "INFINIBAND", str(tmp_path))
    value = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=3))
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetFieldValues=lambda handle, fields: (
            [value] if (handle, len(fields)) == ("GPU-7", 1) else []
        ),
    )
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(uuid="7"),
    )
    found = Witness(None)
    found.torch = SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counted = found.counters()
    assert (counted["mlx5_0/1"], counted["nvlink 7"]) == (1000, 3 * 1024)
    assert "mlx5_1/2" not in counted
    assert "lo" in counted
    value.nvmlReturn = 3  # NVML_ERROR_NOT_SUPPORTED
    assert "nvlink 7" not in found.counters()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "mlx5_0/1" in found.counters()


def test_an_exception_of_the_witness_never_reaches_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written, once, and everything goes on."""
    found = Witness(None)
    found.torch = __import__("torch")

    def fail(self: Witness) -> None:
        raise ValueError("mine")

    monkeypatch.setattr(Witness, "recorders", fail)
    for _ in range(2):
        found.read(final=True)
    (fault,) = (event for event in found.events if event["event"] == "fault")
    assert fault["text"][-1] == "ValueError: mine"


@pytest.mark.parametrize("module", [witness, on_path])
def test_what_runs_in_other_programs_needs_python_3_8_and_its_library(module: Any) -> None:
    """Both files parse as Python 3.8 and import nothing else at the top."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
    }
    assert imported <= {*sys.stdlib_module_names, "__future__"}
