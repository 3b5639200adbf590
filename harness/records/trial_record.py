"""Record of a trial: its raw measurements as one JSON file, written atomically.

Every step's times, every loss and every byte counter is stored as measured; statistics belong to ``report``.
A failure is a record too.  ``results/README.md`` explains every key; here are those whose name does not.
Times are in seconds.  No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from harness.suites.answering_quantity import ChosenQuantity
from impl.deepspeed.config_to_policy import Finding
from impl.plan.shard_layout import padding_share

SCHEMA_VERSION: Final = 1
_REMEDY: Final = "; delete the file and run again"

Model = TypeVar("Model", bound=BaseModel)
Phase = Literal["forward", "backward", "evaluate", "step", "probe"]
Link = Literal["inter", "intra"]  # between nodes, inside a node
Communicated = Literal["gradients", "weights", "secondary"]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Squares = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]


class RecordError(Exception):
    """A results file cannot be read or written; the message names the file and what to do."""


class _Part(BaseModel, extra="ignore", frozen=True):  # older records hold more, which is not read
    pass


class LedgerRow(_Part):
    """Payload that one rank sent over the timed steps; a message is one per destination."""

    phase: Phase
    purpose: str
    unit: str
    hop: str
    link: Link
    bytes: int
    messages: int


class Step(_Part):
    """Times of one optimizer step on one rank; ``exposed_*`` is how long a part waited for messages."""

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
        """Seconds that the rank waited for communication; None if not known."""
        if self.exposed_forward is None or self.exposed_backward is None:
            return None
        before = (self.exposed_generate or 0.0) + (self.exposed_score or 0.0)
        return before + self.exposed_forward + self.exposed_backward


class Token(_Part):
    """Time and bytes of decoding one token; ``step`` numbers generations, ``index`` 0 reads the prompt."""

    step: int
    warmup: bool
    index: int
    seconds: float
    exposed: float | None
    inter_bytes: int | None
    intra_bytes: int | None


class Validation(_Part):
    """Mean loss over ranks after ``step`` steps, with seconds and bytes of training so far."""

    step: int
    loss: float
    train_seconds: float
    inter_bytes: int | None


class Memory(_Part):
    """Bytes of one rank by part, counted and predicted; ``copied`` between host and device."""

    engine: dict[str, int]
    formula: dict[str, int]
    peak_rss: int
    peak_device: int | None = None
    copied: dict[str, int] = {}
    copied_formula: dict[str, int] = {}


class Alone(_Part):
    """Computation by itself on one rank (:mod:`harness.measure.compute_alone`)."""

    when: Literal["before", "after"]
    forward: _Seconds
    backward: _Seconds
    optimizer: _Seconds
    cpu_seconds: _Seconds
    optimizer_cpu_seconds: _Seconds


class RankRecord(_Part):
    """Measurements of one rank; ``ledger`` is None for strategies outside our wire."""

    rank: int
    node: int
    local: int
    steps: list[Step]
    ledger: list[LedgerRow] | None
    memory: Memory
    tokens: list[Token] = []
    alone: list[Alone] = []


class GradientCheck(_Part):
    """A unit's reduced gradient before a step: ``share`` is the largest ``|found - expected| / allowed``."""

    unit: str
    elements: int
    share: float
    step: int = 0


class QuantisationError(_Part):
    """Error of one codec that was tried on weights or reduced gradients of one unit, sending nothing."""

    purpose: str
    unit: str
    codec: str
    vnmse: float  # sum((decoded - x)^2) / sum(x^2)
    largest: float  # max |decoded - x| / max |x|


class CommunicationError(_Part):
    """Error of one unit's messages in one step, summed over all ranks.

    Of one hop: decoded frames against the values encoded there, error feedback included.  End to end: the
    reduced against the exact mean, or gathered weights against masters.  None where values overflowed.
    """

    step: int
    purpose: Communicated
    unit: str
    hop: int | None = None
    axis: str = ""
    codec: str = ""
    repeated: int = 1
    squared_error: _Squares
    squared_value: _Squares
    cosine: float | None = None


class ChosenCodec(_Part):
    """A codec that a budget chose for what one unit sends, after ``step`` optimizer steps."""

    step: int
    what: Literal["weights", "gradients"]
    unit: str
    hop: str  # name of the axis; empty of weights
    codec: str
    vnmse: float  # of the codec in the step before, over all ranks; for gradients, of the hop's input


class LinkRecord(_Part):
    """The link between nodes, in Mbit/s per node and direction; None is unshaped."""

    kind: str
    why: str
    requested_mbit: float | None
    calibrated_mbit: list[float]
    probed_mbit: list[float]
    message_bytes: int
    details: dict[str, Any] = {}


class InterfaceCounters(_Part):
    """One node's network interface over the timed steps: bytes and packets it sent."""

    node: int
    tx_bytes: int
    tx_packets: int


class GpuUse(_Part):
    """One GPU of a node during the timed steps, by NVML."""

    index: int
    name: str
    samples: int  # readings; means and shares are over them
    joules: float | None  # by its own counter; None where it has none
    sampled_joules: float  # the integral of its power, by the trapezoidal rule
    watts: float  # mean power
    utilisation: float  # mean share of time in which a kernel ran
    clock_mhz: float  # mean clock of its multiprocessors
    throttled: dict[str, float] = {}  # share of samples in which its clock was held down, by reason
    others: int = 0  # most processes of others that computed on it at once


class NodeUse(_Part):
    """The GPUs of a node; ``seconds`` span the timed steps and the time between them."""

    node: int
    seconds: float
    gpus: list[GpuUse] = []


class ProcessorUse(_Part):
    """CPU seconds of the machine in ``seconds`` of timed steps, evaluations between them included."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    processors: Annotated[int, Field(ge=1)]
    ranks: _Seconds
    user: _Seconds
    system: _Seconds
    interrupts: _Seconds
    steal: _Seconds


class Foreseen(_Part):
    """The prediction of a step; ``compute`` and ``wire`` overlap, ``spread`` is the calibration's."""

    machine: str
    calibrated: bool
    seconds: _Seconds
    compute: _Seconds
    wire: _Seconds
    spread: _Seconds


class Predicted(_Part):
    """Bytes that ``impl.plan.traffic`` predicts per rank, and whether the ledger equals them exactly."""

    ledgers: list[list[LedgerRow]]  # one list a rank
    equal: bool


PASSING: Final = ("interrupted", "refused", "link", "killed", "disk", "lost")  # may not happen again


class Failure(_Part):
    """Why a trial has no result; ``by`` is the peer's library that cannot run it.

    ``losses`` are those of a trial that ran and was refused: the mean over ranks of each step, warm-ups
    included, before the first one that is not finite.
    """

    kind: str
    message: str
    log: str | None
    by: str | None = None
    tail: list[str] = []
    losses: list[float] = []


class Failed(_Part):
    """An earlier attempt at a trial in the same run (``on_failure`` of its suite)."""

    kind: str
    message: str


class Record(_Part):
    """Record of one trial; its ``id`` is the hash of ``trial``.  Older ones may lack what has a default."""

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
    validations: list[Validation] = []
    quantisation: list[QuantisationError] = []
    communication_errors: list[CommunicationError] = []
    chosen_codecs: list[ChosenCodec] = []
    predicted: Predicted | None = None
    foreseen: Foreseen | None = None
    reference_loss: float | None = None
    first_gradients: list[GradientCheck] = []
    decoded_sha256: list[str] = []
    machine_use: list[NodeUse] = []
    processor_use: ProcessorUse | None = None
    earlier: list[Failed] = []
    run: str | None = Field(None, pattern=r"^[0-9a-f]{16}$")
    entry: int | None = None
    digest: str | None = None

    @property
    def padding(self) -> float:
        """Padding of its units, as a share of the model's elements; 0 without units."""
        return padding_share((numel, padded) for _, numel, padded in self.units)

    @property
    def settled(self) -> bool:
        """Whether its trial need not run again; False if it failed for a reason that may pass."""
        return self.failure is None or self.failure.kind not in PASSING

    @property
    def measured(self) -> bool:
        """True if it holds any measurement; most failures do not."""
        return self.failure is None or bool(self.ranks)

    @property
    def answers(self) -> bool:
        """Whether it answers the suite's question: by a result, or by a limit or library that allows none."""
        if self.failure is None or self.failure.by is not None:
            return True
        foreseen = self.failure.kind == "memory" and not self.ranks and self.failure.log is None
        return foreseen and self.trial.get("memory_limit") is not None


def joules(nodes: list[NodeUse]) -> float | None:
    """Energy of all GPUs of a trial, by their counters, else sampled; None without GPUs."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    return sum(gpu.sampled_joules if gpu.joules is None else gpu.joules for gpu in gpus) if gpus else None


def slowest_seconds(record: Record) -> list[float]:
    """Seconds of each timed step on its slowest rank."""
    of_ranks = [[step.total for step in rank.steps if not step.warmup] for rank in record.ranks]
    return [max(totals) for totals in zip(*of_ranks, strict=True)]


def path_of(results: Path, record_id: str) -> Path:
    """Path of the record of trial ``record_id``."""
    return results / f"{record_id}.json"


def write(results: Path, record: Record) -> Path:
    """Write ``record`` atomically, or raise a RecordError; returns its path."""
    target = path_of(results, record.id)
    write_whole(target, with_digest(record).model_dump_json(indent=1))
    return target


def digest_of(data: dict[str, Any]) -> str:
    """SHA-256 over a record's JSON-ready content, its digest left out: keys sorted, without spaces."""
    content = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_digest(record: Model) -> Model:
    """``record`` with the digest of its content, which shows edits and damage, but no forgery."""
    return record.model_copy(update={"digest": digest_of(json.loads(record.model_dump_json()))})


def write_whole(target: Path, content: str | bytes) -> None:
    """Write a file atomically (temporary file, fsync, rename), or raise a RecordError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
            with (Path(folder) / target.name).open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            (Path(folder) / target.name).replace(target)
    except OSError as error:
        raise RecordError(f"{target}: cannot write the record: {error.strerror or error}") from error


def read(path: Path) -> Record:
    """Read one record; raises as :func:`read_as`."""
    return read_as(Record, path)


def read_as(model: type[Model], path: Path) -> Model:
    """Read a file of ``model`` in its schema version; a RecordError names the file and what is wrong."""
    version = model.model_fields["schema_version"].default
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot read: {error}") from error
    except (ValueError, RecursionError) as error:  # no JSON, or numbers or nesting beyond Python's limits
        raise RecordError(f"{path}: not a record: {error}{_REMEDY}") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise RecordError(f"{path}: not a record: no schema_version{_REMEDY}")
    if data["schema_version"] != version:
        versions = f"schema version {data['schema_version']}, this program reads and writes {version}"
        raise RecordError(f"{path}: {versions}; move the folder aside or use the version that wrote it")
    if data.get("digest") is not None and data["digest"] != (digest := digest_of(data)):
        digests = f"its digest is {str(data['digest'])[:12]}, that of its content {digest[:12]}"
        raise RecordError(f"{path}: edited or damaged since it was written: {digests}{_REMEDY}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise RecordError(f"{path}: not a record: {wrong_field(error)}{_REMEDY}") from error


def wrong_field(error: ValidationError) -> str:
    """The first field that pydantic refuses, and why."""
    first = error.errors()[0]
    path, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def read_all(results: Path) -> list[Record]:
    """Read all records of a folder, in the order in which they ran; raises as :func:`read_as`."""
    records, errors = read_valid(results)
    if errors:
        raise errors[0]
    return records


def read_valid(results: Path) -> tuple[list[Record], list[RecordError]]:
    """The records of a folder, in the order in which they ran, and the errors of its other files."""
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
        else:  # it would count twice
            errors.append(RecordError(f"{path}: is a copy of the record {record.id}{_REMEDY}"))
    return sorted(records, key=lambda record: (record.started, record.id)), errors
