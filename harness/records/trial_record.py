"""Defines the record of a trial: its raw measurements as one JSON file, written atomically.

Every step's times, every loss and every byte counter is stored as it was measured; statistics are left to ``report``.
A trial that failed has a record too.  ``results/README.md`` explains every key; comments here explain only keys whose
names are not enough.  Times are in seconds.  No torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from harness.suites.answering_quantity import ChosenQuantity
from harness.whole_file import written_whole
from impl import regular_file
from impl.deepspeed.config_to_policy import Finding
from impl.policy.shard_layout import padding_share

SCHEMA_VERSION: Final = 1
# Share of the processors' time that other programs and the hypervisor may take in an undisturbed trial.
OTHERS_WITHIN: Final = 0.05
_REMEDY: Final = "; delete the file and run again"

Model = TypeVar("Model", bound=BaseModel)
Phase = Literal["forward", "backward", "evaluate", "step", "probe"]
Link = Literal["inter", "intra"]  # between nodes, inside a node
Communicated = Literal["gradients", "weights", "secondary"]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Squares = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]


class RecordError(Exception):
    """Raised when a results file cannot be read or written; the message names the file and the reason."""


class _Part(BaseModel, extra="ignore", frozen=True):
    """Base class of a record's parts; ignores keys that only older records have."""


class LedgerRow(_Part):
    """Bytes and messages that one rank sent in all timed steps together, for one phase, purpose, unit, hop and link.

    The phase is the part of training in which they were sent, such as ``backward``.  The purpose is what they carried,
    such as ``gradients``.  A unit is a set of parameters that are sent together, and a hop is an exchange along one
    axis of the mesh.  The link is ``inter`` between nodes, and ``intra`` inside a node.

    The bytes are payload without packet headers.  A message has one destination, so that an exchange with three other
    ranks counts as three messages.
    """

    phase: Phase
    purpose: str  # such as weights or gradients
    unit: str
    hop: str  # axis of the mesh along which it was sent
    link: Link
    bytes: int
    messages: int


class StepsSent(_Part):
    """Consecutive optimizer steps that have equal byte counts on one rank; warm-up steps are included."""

    first: int  # number of the first of these steps
    steps: int
    inter: int  # bytes of each step to other nodes, without evaluations
    intra: int  # bytes of each step inside the node


class Step(_Part):
    """Seconds of one optimizer step and of its parts on one rank.

    ``exposed_forward`` are the seconds of the part ``forward`` in which the rank waited for messages; the other fields
    ``exposed_*`` are alike.  All seconds are 0 or None if the ranks were threads, whose seconds are not measured.
    """

    index: int
    warmup: bool
    total: float
    forward: float
    backward: float
    optimizer: float
    exposed_forward: float | None
    exposed_backward: float | None
    loss: float
    gradient_norm: float | None = None
    cpu_seconds: _Seconds | None = None
    generate: _Seconds | None = None
    score: _Seconds | None = None
    exposed_generate: _Seconds | None = None
    exposed_score: _Seconds | None = None

    @property
    def exposed(self) -> float | None:
        """Seconds of the step, without the optimizer, in which the rank waited for messages; None if unknown."""
        if self.exposed_forward is None or self.exposed_backward is None:
            return None
        before = (self.exposed_generate or 0.0) + (self.exposed_score or 0.0)
        return before + self.exposed_forward + self.exposed_backward


class Token(_Part):
    """Time of decoding one token on one rank, and the bytes that the rank sent meanwhile."""

    step: int  # number of the generation
    warmup: bool
    index: int  # of the token in its generation; 0 includes reading the prompt
    seconds: float
    exposed: float | None
    inter_bytes: int | None
    intra_bytes: int | None


class Validation(_Part):
    """One validation after ``step`` steps: the mean loss of all ranks, and what training had cost until then.

    ``train_seconds`` are the seconds, and ``inter_bytes`` the bytes between nodes, of training up to this validation.
    """

    step: int
    loss: float
    train_seconds: float
    inter_bytes: int | None


class Memory(_Part):
    """Memory of one rank: the bytes that it held, and those that it copied between host and device in timed steps."""

    engine: dict[str, int]  # bytes that the engine held, by part, as counted
    formula: dict[str, int]  # the same bytes as predicted; empty for peers
    peak_rss: int  # peak resident bytes of the process
    peak_device: int | None = None  # peak bytes that torch has allocated on the GPU; None for the CPU
    # Bytes of the GPU in use after the steps, by all processes and libraries, such as NCCL; None for the CPU and in
    # older records.
    device_in_use: int | None = None
    copied: dict[str, int] = {}  # bytes copied, by direction and purpose, as counted
    copied_formula: dict[str, int] = {}  # the same bytes as predicted


class Alone(_Part):
    """Seconds that the unsharded model computes on one rank, without messages (``measure.compute_alone``)."""

    when: Literal["before", "after"]  # whether measured before or after the trial's steps
    forward: _Seconds
    backward: _Seconds
    optimizer: _Seconds
    cpu_seconds: _Seconds
    optimizer_cpu_seconds: _Seconds


class RankRecord(_Part):
    """Measurements of one rank.

    ``ledger`` lists the bytes and messages that the rank sent.  It is None if another engine trains (DDP, FSDP2 or
    DeepSpeed), since the messages of that engine are not counted.
    """

    rank: int
    node: int
    local: int
    steps: list[Step]
    ledger: list[LedgerRow] | None
    memory: Memory
    tokens: list[Token] = []
    alone: list[Alone] = []
    sent_by_step: list[StepsSent] = []  # for trials with policy.schedule


class GradientCheck(_Part):
    """Comparison of a unit's reduced gradient with the gradient that a single process computes for the same batches.

    A unit is a set of parameters that are reduced together.
    """

    unit: str
    elements: int  # number of elements compared
    share: float  # largest difference of an element, |found - expected|, divided by the allowed difference
    step: int = 0  # number of the step whose batches were used; 0 for the comparison before training


class QuantisationError(_Part):
    """Error of one codec on the weights or reduced gradients of one unit, a set of parameters that are sent together.

    The weights or gradients were encoded and decoded only to measure this error; the encoded values were not sent.
    """

    purpose: str
    unit: str
    codec: str
    vnmse: float  # sum((decoded - x)^2) / sum(x^2)
    largest: float  # max |decoded - x| / max |x|


class LosslessSize(_Part):
    """Bytes that the weights or reduced gradients of one unit take when a codec compresses them without loss.

    A unit is a set of parameters that are sent together.  The values were compressed only to measure this size; the
    compressed values were not sent.  A codec whose name ends in ``:bf16`` casts the elements to bf16 first, and
    compresses the result without loss.
    """

    purpose: str
    unit: str
    codec: str
    elements: int  # of all ranks, with padding
    bytes: int
    vnmse: float  # of the cast to bf16; 0 without


class CommunicationError(_Part):
    """Error of one unit's messages in one step, summed over all ranks.

    A unit is a set of parameters that are sent together.  A hop is one exchange of a reduction.  If ``hop`` is a
    number, the error is that of this hop alone: decoded values are compared with the values that the hop encoded.  With
    error feedback, the encoded values include the errors that earlier encodings left.

    If ``hop`` is None, the error is that of all hops together: the reduced gradient is compared with the exact mean, or
    the gathered weights are compared with the masters (the fp32 weights that the optimizer steps).
    """

    step: int
    purpose: Communicated
    unit: str
    hop: int | None = None  # number of the hop; None for all hops together
    axis: str = ""
    codec: str = ""
    repeated: int = 1  # number of repeated reductions whose mean was compared
    squared_error: _Squares  # sum of the errors' squares; None if values overflowed
    squared_value: _Squares  # sum of the exact values' squares; None if values overflowed
    # Mean cosine over all pairs of ranks' gradients; None for hops, for weights, and if no gradient is usable.
    cosine: float | None = None


class ChosenCodec(_Part):
    """A codec that a bit budget chose for the weights or gradients of one unit, after ``step`` optimizer steps.

    A unit is a set of parameters that are sent together.  A bit budget is a limit of the policy on the mean bits of an
    element.
    """

    step: int
    what: Literal["weights", "gradients"]
    unit: str
    hop: str  # axis of the hop; empty for weights
    codec: str
    # The codec's error over all ranks: the sum of squared errors over the sum of squared values.  The values are, for
    # weights, the masters after these steps and, for gradients, what the hop encoded in the last of these steps.
    vnmse: float


class LinkRecord(_Part):
    """The link between nodes; rates are in Mbit/s per node and direction."""

    kind: str
    why: str  # the reason for that kind
    requested_mbit: float | None  # None for no limit
    calibrated_mbit: list[float]  # measured when the link was opened
    probed_mbit: list[float]  # measured after the trial
    message_bytes: int  # size of one message of a calibration or probe
    details: dict[str, Any] = {}


class InterfaceCounters(_Part):
    """Bytes and packets that one node's network interface sent in the timed steps."""

    node: int
    tx_bytes: int
    tx_packets: int


class AdapterCounters(_Part):
    """Bytes that one node's InfiniBand or RoCE adapters sent in the timed steps, with their packets' headers."""

    node: int
    tx_bytes: int  # sum of port_xmit_data of all ports that NCCL may use; other jobs may use these ports too
    ports: list[str]  # names of these ports, such as ``mlx5_0/1``
    # Bytes to other nodes in the ledgers of the node's ranks; None without a ledger.
    booked_bytes: int | None = None


class GpuUse(_Part):
    """One GPU of a node during the timed steps, as NVML reports it."""

    index: int
    name: str
    samples: int  # number of readings, over which means and shares are taken
    joules: float | None  # from the GPU's own energy counter; None if it has none
    sampled_joules: float  # from its power readings, integrated by the trapezoidal rule
    watts: float  # mean power
    utilisation: float  # mean share of time in which a kernel ran
    clock_mhz: float  # mean clock of its multiprocessors
    throttled: dict[str, float] = {}  # share of readings in which its clock was throttled, by reason
    others: int = 0  # largest number of other processes that computed on it at once
    # Bytes sent through all its NVLinks; "unseen" if the GPU does not count them, None in older records.
    nvlink_bytes: int | Literal["unseen"] | None = None


class NodeUse(_Part):
    """The GPUs of a node during the timed steps."""

    node: int
    seconds: float  # of the timed steps and the time between them
    gpus: list[GpuUse] = []


class ProcessorUse(_Part):
    """CPU seconds during the timed steps and the evaluations between them, on the CPUs that the trial may use."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # wall-clock time
    processors: Annotated[int, Field(ge=1)]
    ranks: _Seconds  # of the trial's ranks; all fields below are of all programs on these CPUs
    user: _Seconds
    system: _Seconds
    interrupts: _Seconds
    steal: _Seconds

    @property
    def others_share(self) -> float:
        """Share of the CPUs' time that programs other than the trial's ranks took."""
        # The difference may be negative, since the system counts the processors' time in samples.
        return max(self.user + self.system - self.ranks, 0.0) / (self.processors * self.seconds)

    @property
    def steal_share(self) -> float:
        """Share of the CPUs' time that the hypervisor took."""
        return self.steal / (self.processors * self.seconds)

    @property
    def taken_share(self) -> float:
        """Share of the CPUs' time that the hypervisor and programs other than the trial's ranks took together."""
        return self.others_share + self.steal_share


class Foreseen(_Part):
    """The predicted duration of a step (:mod:`impl.plan.step_time`)."""

    machine: str  # name of the machine file
    calibrated: bool  # whether the step is like those that the machine was calibrated on
    seconds: _Seconds
    compute: _Seconds  # of the model's passes and the optimizer
    wire: _Seconds  # of the messages between nodes, which overlap with computing
    spread: _Seconds  # relative standard deviation of measured steps around the prediction


class Predicted(_Part):
    """The bytes and messages that :mod:`impl.plan.traffic` predicts, and whether the ranks sent exactly these."""

    ledgers: list[list[LedgerRow]]  # by rank
    # Whether all ranks' ledgers equal the predicted ones exactly; None if messages were measured and not predicted.
    equal: bool | None
    # Purposes of messages that were measured and not predicted, because a method of the user's own declares no bytes.
    # All other rows equal their predictions.
    unpredicted: list[str] = []
    sent_by_step: list[list[StepsSent]] = []  # by rank; for trials with policy.schedule


PASSING: Final = ("interrupted", "refused", "link", "killed", "disk", "lost")
"""Kinds of failure whose cause may have passed by the next run, so that the next run repeats the trial."""


class Failure(_Part):
    """The reason why a trial has no result: a kind, such as ``memory`` or ``wrong``, and a sentence."""

    kind: str
    message: str
    log: str | None  # path of the ranks' log, relative to the results folder
    by: str | None = None  # the library (DeepSpeed) that cannot run the trial; None for other failures
    tail: list[str] = []  # last lines of the log
    # If the trial ran and a check refused it: each step's mean loss over ranks, warm-up steps included, up to the
    # first that is not finite.
    losses: list[float] = []


class Failed(_Part):
    """The failure of an earlier attempt at a trial that was repeated because the suite's ``on_failure`` asks for it."""

    kind: str
    message: str


class Record(_Part):
    """Record of one trial, whose ``id`` is a hash of ``trial``.  Older records may lack fields that have a default."""

    schema_version: int = SCHEMA_VERSION
    id: str
    suite: str
    question: str = ""
    trial: dict[str, Any]
    started: str
    finished: str
    order: int
    sweep: int = 0
    role: Literal["", "baseline", "contrast"] = ""
    answer: ChosenQuantity = ""
    margin: int = 0
    machine: dict[str, Any]
    code: dict[str, Any]
    inputs: dict[str, str] = {}
    pool: str
    failure: Failure | None
    ran: dict[str, Any] = {}
    findings: list[Finding] = []
    units: list[tuple[str, int, int]] = []
    parameters: int = 0
    link: LinkRecord | None = None
    ranks: list[RankRecord] = []
    interfaces: list[InterfaceCounters] | None = None
    adapters: list[AdapterCounters] = []
    validations: list[Validation] = []
    quantisation: list[QuantisationError] = []
    lossless: list[LosslessSize] = []
    communication_errors: list[CommunicationError] = []
    chosen_codecs: list[ChosenCodec] = []
    predicted: Predicted | None = None
    foreseen: Foreseen | None = None
    reference_loss: float | None = None
    first_gradients: list[GradientCheck] = []
    # Untimed seconds of checks in steps and of comparisons before later steps, on the rank where they took longest.
    check_seconds: _Seconds | None = None
    # CPU seconds by check, also of the comparison before training, on the rank where they add up to most.
    check_cpu_seconds: dict[str, _Seconds] = {}
    decoded_sha256: list[str] = []
    machine_use: list[NodeUse] = []
    processor_use: ProcessorUse | None = None
    earlier: list[Failed] = []
    run: str | None = Field(None, pattern=r"^[0-9a-f]{16}$")
    entry: int | None = None
    digest: str | None = None

    @property
    def padding(self) -> float:
        """Elements of padding in all units together, divided by the model's elements; 0 if there are no units."""
        return padding_share((numel, padded) for _, numel, padded in self.units)

    @property
    def settled(self) -> bool:
        """Whether another run should skip the trial: it has a result, or a failure that would happen again.

        Another run repeats a trial whose failure has a kind in :data:`PASSING`, because its cause may be gone by then.
        """
        return self.failure is None or self.failure.kind not in PASSING

    @property
    def measured(self) -> bool:
        """Whether the record holds any measurement; most failures hold none."""
        return self.failure is None or bool(self.ranks)

    @property
    def timed(self) -> bool:
        """Whether the trial's seconds were measured.

        False if its ranks are threads.  These take turns, so that their seconds mean nothing.
        """
        return bool(self.trial.get("cluster", {}).get("ranks", "processes") == "processes")

    @property
    def disturbed(self) -> bool:
        """Whether other programs and the hypervisor together took more than :data:`OTHERS_WITHIN` of the CPUs' time.

        False if the record does not say how much they took.
        """
        return self.processor_use is not None and self.processor_use.taken_share > OTHERS_WITHIN

    @property
    def answers(self) -> bool:
        """Whether the record helps to answer the suite's question.

        True for a trial with a result.  Also true for a trial without a result in two cases: DeepSpeed cannot run the
        trial, or the trial was not run because it needs more memory than the suite's memory limit.  Both are answers.
        """
        if self.failure is None or self.failure.by is not None:
            return True
        foreseen = self.failure.kind == "memory" and not self.ranks and self.failure.log is None
        return foreseen and self.trial.get("memory_limit") is not None


def joules(nodes: list[NodeUse]) -> float | None:
    """Return the energy in joules that all GPUs of a trial used; None without GPUs.

    For a GPU without an energy counter, the integral of its sampled power is used.
    """
    gpus = [gpu for node in nodes for gpu in node.gpus]
    return sum(gpu.sampled_joules if gpu.joules is None else gpu.joules for gpu in gpus) if gpus else None


def slowest_seconds(record: Record) -> list[float]:
    """Return the seconds of each timed step, on the rank that was slowest in that step.

    Returns an empty list if ranks were threads, whose seconds are not measured.
    """
    if not record.timed:
        return []
    of_ranks = [[step.total for step in rank.steps if not step.warmup] for rank in record.ranks]
    return [max(totals) for totals in zip(*of_ranks, strict=True)]


def path_of(results: Path, record_id: str) -> Path:
    """Return the path of the record of trial ``record_id``."""
    return results / f"{record_id}.json"


def write(results: Path, record: Record) -> Path:
    """Write ``record`` atomically and return its path; raises a RecordError if that fails."""
    target = path_of(results, record.id)
    write_whole(target, with_digest(record).model_dump_json(indent=1))
    return target


def digest_of(data: dict[str, Any]) -> str:
    """Return the SHA-256 of a record's content: its JSON without the key ``digest``, without spaces, with sorted keys.

    Raises:
        ValueError: If a number is infinite or NaN.  JSON has no such numbers, and no record is written with them.
    """
    content = {key: value for key, value in data.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def with_digest(record: Model) -> Model:
    """Return ``record`` with the digest of its content, which reveals edits and damage, but not forgery."""
    return record.model_copy(update={"digest": digest_of(json.loads(record.model_dump_json()))})


def write_whole(target: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, and make its folder; raises a RecordError if that fails."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole([target]) as (unfinished,):
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RecordError(f"{target}: cannot be written: {error.strerror or error}") from error


def read(path: Path) -> Record:
    """Read the record of a trial; raises a RecordError if the file is unreadable, no valid record, or edited."""
    return read_as(Record, path)


def read_as(model: type[Model], path: Path) -> Model:
    """Read a record's JSON file and validate it as ``model``.

    Raises:
        RecordError: If the file cannot be read, does not have the fields of ``model``, has another schema version, or
            has content that differs from its digest.
    """
    version = model.model_fields["schema_version"].default
    try:
        data = json.loads(regular_file.read_text(path))
    except OSError as error:
        raise RecordError(f"{path}: cannot read: {error.strerror or error}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # not UTF-8, not JSON, or beyond Python's limits on numbers and depth
        raise RecordError(f"{path}: is not a record: {error}{_REMEDY}") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise RecordError(f"{path}: is not a record: it has no schema_version{_REMEDY}")
    if data["schema_version"] != version:
        versions = (
            f"schema version {data['schema_version']!r}, but this program reads and writes version {version}"
        )
        raise RecordError(
            f"{path}: has {versions}; move the folder aside, or use the version of zeropp that wrote the file"
        )
    try:
        digest = digest_of(data)
    except (ValueError, RecursionError):
        digest = None
    if digest is not None and data.get("digest") not in (None, digest):
        digests = f"it states the digest {str(data['digest'])[:12]}, but its content has {digest[:12]}"
        raise RecordError(f"{path}: was edited or damaged since it was written: {digests}{_REMEDY}")
    try:
        record = model.model_validate(data)
    except ValidationError as error:
        raise RecordError(f"{path}: is not a record: {wrong_field(error)}{_REMEDY}") from error
    if digest is None:
        raise RecordError(f"{path}: is not a record: it holds a number that is infinite or NaN{_REMEDY}")
    return record


def wrong_field(error: ValidationError) -> str:
    """Return a text on the first field that pydantic refuses: the field's name, a colon and the reason.

    If pydantic names no field, the text is the reason alone.
    """
    first = error.errors()[0]
    path, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def read_all(results: Path) -> list[Record]:
    """Return all records of a folder, sorted by the time at which their trials started.

    Raises:
        RecordError: If a JSON file of the folder is no valid record.  The error is about the first such file.
    """
    records, errors = read_valid(results)
    if errors:
        raise errors[0]
    return records


def read_valid(results: Path) -> tuple[list[Record], list[RecordError]]:
    """Return a folder's valid records, and the errors of its other JSON files.

    The records are sorted by the time at which their trials started.
    """
    records: list[Record] = []
    errors: list[RecordError] = []
    for path in sorted(results.glob("*.json")):
        try:
            record = read(path)
        except RecordError as error:
            errors.append(error)
            continue
        if record.id == path.stem:
            records.append(record)
        else:  # a copy would count twice
            errors.append(RecordError(f"{path}: is a copy of the record {record.id}; delete the copy"))
    return sorted(records, key=lambda record: (record.started, record.id)), errors
