"""Loads the records of a results folder (one JSON file per trial) into tidy tables of raw values."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd
from pydantic import BaseModel, ValidationError

from harness.measure.machine import MUST_AGREE
from harness.records import chained_journal, record_checks
from harness.records import trial_record as schema
from harness.records.trace_record import Trace, read_traces
from harness.records.trial_record import Record, RecordError, joules, read_all, wrong_field
from harness.suites import labels
from harness.suites.answering_quantity import ChosenQuantity
from harness.suites.labels import differing, flatten
from harness.suites.repeat_order import CONFIGURATION, compared_also, nearest_baselines
from harness.suites.trial import Trial
from impl.policy.shard_layout import FROZEN, UnitGeometry
from report.data.configuration import NAMES, labels_of, shared_changes
from report.data.text import plain, with_arguments

# Trials of one setting may differ in these fields: in the configuration, in seed and repeat, and in what is checked.
_NOT_OF_A_SETTING: Final = (
    *CONFIGURATION, "seed", "repeat", "timeout_seconds", "measure_quantisation", "validate_every",
)  # fmt: skip
_FLOATS: Final = ("rate_mbit", "achieved_mbit", "reference_loss", "processors", "taken_share")
_GEOMETRY: Final = "model.arguments."
_ALWAYS_NAMED: Final = ("cluster.nodes", "cluster.ranks_per_node", "cluster.rate", "tokens_per_rank")

# A sweep that begins more than this time after the end of the sweep before it ran at another occasion.
OCCASION_APART: Final = timedelta(hours=1)

_FORESEEN: Final = ("seconds", "compute", "wire", "calibrated")
_STEP_SECONDS: Final = ("total", "forward", "backward", "optimizer")
_SENT: Final = ("id", "source", "rank", "node", *schema.LedgerRow.model_fields, "padding", "headers")
_SPANS: Final = ("id", "rank", "lane", "name", "begin", "end", "seconds", "before")
_INTERFACES: Final = ("id", "header_bytes", *schema.InterfaceCounters.model_fields)


class ReportError(RecordError):
    """Raised if a report cannot be made or written.

    For example, a folder holds no records, its records cannot be compared with each other, no ratio can be computed
    from a record, or the disk is full.
    """


class Frames:
    """Holds the records of one results folder, and the traces of their steps, as tables.

    The columns of a table are fields of the records; their names contain units.  The table ``finished`` also has these
    columns:

    * ``processors``: number of the CPUs that all ranks share; NaN on GPUs and on several machines;
    * ``taken_share``: the share of these CPUs' time that other programs (``others_share``) and the hypervisor
      (``steal_share``) took;
    * ``disturbed``: whether ``taken_share`` is more than :data:`~harness.records.trial_record.OTHERS_WITHIN`;
    * ``beside``: the name of the baseline with which the configuration is compared, if its setting (cluster, model,
      batch and so on) has several baselines; else empty;
    * ``occasion``: the number of the occasion at which the trial ran.  Sweeps that ran close together on one machine
      belong to the same occasion (:func:`occasions`);
    * ``place`` and ``first``: two numbers by which tables order configurations.  ``place`` orders strategies, and
      ``first`` the configurations of one strategy.

    Args:
        records: The records, at least one.
        traces: Traces of single steps of the trials.
        across_pools: Whether records of several pools are allowed.  A pool consists of the records with equal machine
            and code.
        verified: Sentences on differences between the records and the folder's journal, which lists every record that a
            sweep wrote.

    Raises a ReportError if the records cannot be reported together (:func:`load`).
    """

    def __init__(
        self,
        records: list[Record],
        traces: Sequence[Trace] = (),
        *,
        across_pools: bool = False,
        verified: Sequence[str] = (),
    ) -> None:
        total = len(records)
        self.run = max(records, key=lambda record: record.started).run  # names the file of the latest run
        # A pool has equal machine and code.  Pools without any measured trial are left out; if no pool has
        # one, the pool of the latest record is kept.
        if not across_pools:
            latest = max(records, key=lambda record: record.started)
            pools = {record.pool for record in records if record.measured} or {latest.pool}
            records = [record for record in records if record.pool in pools]
            _check_pools(records)
        self.trial_of = {record.id: _trial(record) for record in records}
        # The changes that all policies have in common, which the names of configurations leave out.
        self.shared = shared_changes(list(self.trial_of.values()))
        also = _compared_also(records, self.trial_of)
        names = labels_of(self.trial_of, self.shared, also)
        rows = {
            record.id: _trial_row(record, self.trial_of[record.id], names[record.id]) for record in records
        }
        for identity, setting in _settings(rows, self.trial_of, also).items():
            rows[identity] |= setting
        ended = [record for record in records if record.failure is None]
        of_sweep = occasions(ended)
        for record in records:
            rows[record.id]["occasion"] = of_sweep.get(record.sweep, 0)
        beside = _beside(records, rows, self.trial_of)
        for row in rows.values():
            row["beside"] = beside.get((row["setting"], row["configuration"]), "")
        for record in ended:
            _check_measured(record, self.trial_of[record.id])
        trained = [record for record in ended if self.trial_of[record.id].workload != "generate"]
        failed = [rows[record.id] | record.failure.model_dump() for record in records if record.failure]
        failures = [row for row in failed if row["kind"] != "interrupted"]
        traceable = {(record.id, record.pool) for record in trained}
        shown = [trace for trace in traces if (trace.otherData.trial, trace.otherData.pool) in traceable]
        answers = {record.answer for record in records}
        columns = list(rows[records[0].id])
        self.suite = ", ".join(sorted({record.suite for record in records}))
        self.questions = tuple(sorted({record.question for record in records if record.question}))
        self.answer: ChosenQuantity = (
            answers.pop() if len(answers) == 1 else ""
        )  # "" unless all records agree
        self.margin = min(record.margin for record in records)  # of losses, in steps; 0 if none is named
        self.pools = tuple(sorted({record.pool for record in records}))  # hashes of machine and code
        self.left_out = total - len(records)  # number of failed trials of pools in which nothing was measured
        # trials that Ctrl-C ended and that were not run again; they do not count as failures
        self.interrupted = len(failed) - len(failures)
        self.stale_traces = len(traces) - len(shown)  # traces of trials, machines or code that no record has
        self.journal = verified  # differences from the folder's journal, a sentence each
        self.units = {record.id: record.units for record in ended}
        # finished: one row per trial with a result, in the order of tables.  failures: one row per failed trial.
        self.finished = _listed(pd.DataFrame([rows[record.id] for record in ended], columns=columns))
        self.failures = pd.DataFrame(failures, columns=[*columns, *schema.Failure.model_fields])
        # steps: one row per rank and optimizer step of training.  tokens: one row per rank and decoded token.
        # alone: computation by itself, one row per rank and sample; forward and backward are in seconds a micro-batch,
        # the optimizer in seconds a step.
        self.untimed = {name for name, trial in self.trial_of.items() if not trial.measures_time}
        self.steps = self._without_seconds(_parts(trained, schema.Step, "steps", "rank"), *_STEP_SECONDS)
        self.tokens = _parts(ended, schema.Token, "tokens", "rank")
        self.alone = _parts(trained, schema.Alone, "alone", "rank")
        # bytes: the bytes that ranks sent in the timed steps, by the ledger or as predicted (``source``).  ``padding``
        # is how many of these bytes are padding; ``headers`` are the bytes of headers that packets of a real network
        # would add.  interfaces: the bytes and packets that the nodes' interfaces counted.
        self.bytes = pd.DataFrame(_sent_rows(trained), columns=_SENT)
        self.interfaces = pd.DataFrame(_interface_rows(trained), columns=_INTERFACES)
        # memory: bytes that a rank holds (``source`` is engine, formula or process), and bytes that it copies in a step
        # (``source`` is copied or copied_formula).
        self.memory = pd.DataFrame(_memory_rows(trained), columns=["id", "rank", "source", "part", "bytes"])
        validations = _parts(trained, schema.Validation, "validations")
        self.validations = self._without_seconds(validations, "train_seconds")
        # Errors of the codecs that were tried.
        self.quantisation = _parts(trained, schema.QuantisationError, "quantisation")
        self.lossless = _parts(trained, schema.LosslessSize, "lossless")
        self.communication_errors = _parts(trained, schema.CommunicationError, "communication_errors")
        self.chosen_codecs = _parts(trained, schema.ChosenCodec, "chosen_codecs")  # those that a budget chose
        # ``seconds`` and ``before`` are the durations of the traced step and of the step before it.
        self.traces = pd.DataFrame(_span_rows(shown), columns=_SPANS)
        self.links = _links_frame(ended)  # a row per measurement
        self.facts = _facts_frame(records)  # a row per pool and distinct value

    def _without_seconds(self, table: pd.DataFrame, *columns: str) -> pd.DataFrame:
        """Return ``table`` with NaN in ``columns`` for trials whose ranks are threads.

        Such threads take turns, so that their seconds mean nothing.
        """
        untimed = table["id"].isin(self.untimed)
        return (
            table.assign(**{name: table[name].where(~untimed) for name in columns})
            if untimed.any()
            else table
        )

    def geometries(self, identity: str) -> list[UnitGeometry]:
        """Return the name, padded size and sharding of each unit (parameters that are sent together) of a trial.

        ``identity`` is the trial's id.  A :class:`UnitGeometry` also has a list of the unit's parameters; here this
        list is empty.
        """
        topology, policy = self.trial_of[identity].topology(), self.trial_of[identity].resolved_policy()
        group = policy.group_ranks(topology) if policy else 0
        return [
            UnitGeometry(name, (), padded, topology.world, not name.endswith(FROZEN), group)
            for name, _, padded in self.units[identity]
        ]


frames_of = Frames


def occasions(records: Sequence[Record]) -> dict[int, int]:
    """Return the number of the occasion at which each sweep ran, by sweep; occasions are numbered from 0.

    A sweep runs all trials of a suite once.  Two successive sweeps on a machine belong to one occasion if both of these
    conditions hold:

    * The machine was not rebooted between them (``machine.boot`` is equal).
    * The second sweep began at most :data:`OCCASION_APART` after the end of the first.

    Sweeps of one occasion share the state of the machine.  If the machine is virtual, they also share the load of its
    host.  So these sweeps are not independent samples.
    Older records lack ``machine.boot``.  For them, machines with equal hardware and kernel count as one machine that
    was never rebooted.
    """
    of_sweep = defaultdict[int, list[Record]](list)
    for record in records:
        of_sweep[record.sweep].append(record)
    order = sorted(of_sweep, key=lambda sweep: (min(record.started for record in of_sweep[sweep]), sweep))
    # For each start of a machine: when its last sweep ended, and the occasion of that sweep.
    numbers, last = (dict[int, int](), dict[str, tuple[datetime, int]]())
    for sweep in order:
        ran, starts = of_sweep[sweep], {_start(record) for record in of_sweep[sweep]}
        begun = min(_moment(record, "started") for record in ran)
        ended = max(_moment(record, "finished") for record in ran)
        before = [last[start] for start in starts if start in last]
        near = [number for end, number in before if begun - end <= OCCASION_APART]
        numbers[sweep] = min(near, default=len(set(numbers.values())))
        last |= dict.fromkeys(starts, (ended, numbers[sweep]))
    return numbers


def _moment(record: Record, field: Literal["started", "finished"]) -> datetime:
    """Return the time at which a trial started or finished, as ``field`` says; a time without a zone counts as UTC.

    Raises a ReportError if the record holds no valid time.
    """
    text = record.started if field == "started" else record.finished
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ReportError(
            f"record {record.id}: {field} = {text!r}: expected a time such as 2026-01-31T12:00:00+00:00; "
            "delete the record's file, and run the suite again"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _start(record: Record) -> str:
    """Return text that identifies the machine on which a trial ran, and the machine's last boot before the trial.

    The text is equal for all records between two reboots.  For records without ``machine.boot`` it identifies only the
    machine.
    """
    boot = record.machine.get("boot")
    return str(boot or [record.machine.get(name) for name in MUST_AGREE])


def load(results: Path, *, across_pools: bool = False) -> Frames:
    """Return the records ``<id>.json`` of a results folder, with its traces, as tables.

    With ``across_pools``, the records may come from several machines, versions of the code, or kernels; a report must
    not compare such records with each other.

    Raises a ReportError in these cases:

    * There is no such folder, or it holds no records.
    * Without ``across_pools``: the records differ in the code.
    * Without ``across_pools``: the records of one kind of device differ in the kernels.
    * Without ``across_pools``: the records of one sweep differ in the machine.
    * The trial of a record, or the time at which it started or finished, cannot be parsed.
    * No ratio can be computed from a record.

    Raises a RecordError if a JSON file of the folder is not a record of this schema, or if a trace is invalid.
    """
    if not results.is_dir():
        raise ReportError(f"{results}: there is no such folder; `zeropp run SUITE` makes one")
    records = read_all(results)
    if not records:
        raise ReportError(f"{results}: there are no records; `zeropp run SUITE` writes them")
    verified = chained_journal.verify(results, records)
    return Frames(records, read_traces(results), across_pools=across_pools, verified=verified)


def _listed(table: pd.DataFrame) -> pd.DataFrame:
    """Return the trials in the order in which tables list them: by size, rate and setting, then by configuration.

    The new column ``first`` is the smallest ``order`` of any trial of the row's configuration, where ``order`` is the
    number of a trial in its suite.  Configurations of one strategy are listed in the order of ``first``.
    """
    table = table.astype(dict.fromkeys(_FLOATS, float))
    table["first"] = table.groupby("configuration")["order"].transform("min")
    table["_where"] = table["where"].str.replace(r"\d+", lambda number: number[0].zfill(9), regex=True)
    setting = ["nodes", "ranks_per_node", "tokens_per_rank", "rate_mbit", "parameters", "_where"]
    table = table.sort_values([*setting, "place", "first", "seed", "repeat"], ignore_index=True)
    return table.drop(columns="_where")


def _parts(records: list[Record], model: type[BaseModel], name: str, *rank_fields: str) -> pd.DataFrame:
    """Return a table of the entries of one list that every record holds, or that every rank of a record holds.

    For example, the steps of each rank.  Each entry has a row.

    Args:
        records: The records.
        model: The type of an entry; its fields are columns.
        name: The name of the attribute that holds the list.  Without ``rank_fields``, it is an attribute of a record.
            With ``rank_fields``, it is an attribute of each rank of a record.
        rank_fields: Fields of a rank that become columns, such as ``rank``.
    """
    values = operator.attrgetter(*model.model_fields)
    rows = []
    for record in records:
        for owner in record.ranks if rank_fields else [record]:
            known = (record.id, *(getattr(owner, field) for field in rank_fields))
            rows += [known + values(entry) for entry in getattr(owner, name)]
    return pd.DataFrame(rows, columns=["id", *rank_fields, *model.model_fields])


def _trial(record: Record) -> Trial:
    """Return the trial of a record, parsed.

    Raises a ReportError that names the field, if this version cannot parse a field of the trial.
    """
    try:
        return Trial.from_canonical(record.trial)
    except ValidationError as error:
        field = f"trial.{wrong_field(error)}"
        raise ReportError(
            f"record {record.id}: this version cannot read {field}; use the version that wrote the record"
        ) from error


def _compared_also(records: Sequence[Record], trials: Mapping[str, Trial]) -> tuple[str, ...]:
    """Return the fields of training, such as clipping, in which compared configurations differ from the baseline.

    A record's role is ``baseline``, ``contrast`` (compared with the baseline) or empty, and ``trials`` has the trial of
    each record, by id.  A field is returned if a trial with the role ``contrast`` has a value of this field that no
    trial with the role ``baseline`` has.  Without trials in the role ``baseline``, no field is returned.
    """
    by_role = {
        role: [trials[record.id] for record in records if record.role == role]
        for role in ("baseline", "contrast")
    }
    return compared_also(by_role["baseline"], by_role["contrast"])


def _beside(
    records: Sequence[Record], rows: Mapping[str, Mapping[str, Any]], trials: Mapping[str, Trial]
) -> dict[tuple[str, str], str]:
    """Return the name of the baseline with which each configuration is compared, by (setting, configuration).

    Only settings (cluster, model, batch and so on) with several baselines have keys.  A configuration is compared with
    the baseline from which it differs in the fewest fields, and a baseline with itself.  ``rows`` has the setting and
    the configuration of each record, and ``trials`` its trial, by the record's id.
    """
    bases = defaultdict[str, dict[str, Trial]](dict)
    for record in records:
        row = rows[record.id]
        if record.role == "baseline":
            bases[row["setting"]].setdefault(row["configuration"], trials[record.id])
    beside = dict[tuple[str, str], str]()
    for record in records:
        row = rows[record.id]
        key, here = (row["setting"], row["configuration"]), bases[row["setting"]]
        if len(here) > 1 and key not in beside:
            nearest = nearest_baselines(trials[record.id], [*here.values()])
            beside[key] = next(name for name, trial in here.items() if trial is nearest[0])
    return beside


def _settings(
    rows: Mapping[str, dict[str, Any]], trials: Mapping[str, Trial], also: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return, by id of each trial, a dict that identifies the trial's setting: cluster, model, batch and so on.

    A setting consists of the fields of a trial that are neither in :data:`_NOT_OF_A_SETTING` nor in ``also``.  The
    fields ``also`` belong to the configuration, because compared configurations differ in them.  ``rows`` has facts on
    each trial by id, such as the size of its model.  The dict's keys are:

    * ``setting``: a hash of the setting's fields, 12 hexadecimal digits;
    * ``where``: a description of the setting;
    * ``elsewhere``: the same description without the rate of the link;
    * ``shape``: the name of the model, followed by the name of the optimizer if trials have several optimizers.
    """
    apart = (*_NOT_OF_A_SETTING, *also)
    fields = {
        name: {k: v for k, v in flatten(trial.canonical()) if k.split(".")[0] not in apart}
        for name, trial in trials.items()
    }
    varying = {*differing(list(fields.values()))} - {*_ALWAYS_NAMED}
    # The name of a model or an optimizer comes before its arguments.
    in_order = sorted(varying, key=lambda key: (not key.endswith(".name"), key))
    sizes = _model_sizes(rows, fields, in_order)
    if sizes:
        in_order = [key for key in in_order if not key.startswith(_GEOMETRY)]
    models = [trial.model for trial in trials.values()]
    optimizers = {trial.optimizer.name for trial in trials.values()}
    shapes = {(model.name, with_arguments(model.name, model.arguments)) for model in models}
    settings = {}
    for identity, trial in trials.items():
        parts = [
            f"{trial.topology()} ranks",
            f"{'modelled ' if rows[identity]['modelled'] else ''}{rate_text(trial.cluster.rate)}",
            f"{trial.tokens_per_rank} tokens/rank",
            *(["ranks share GPUs (staged)"] if trial.cluster.transport == "staged" else []),
            *([f"{sizes[identity]:,} parameters"] if sizes else []),
            *filter(None, (_named(k, fields[identity], in_order) for k in in_order)),
        ]
        text, model = json.dumps(fields[identity], sort_keys=True, separators=(",", ":")), trial.model
        several = sum(name == model.name for name, _ in shapes) > 1
        shape = with_arguments(model.name, model.arguments) if several else model.name
        settings[identity] = {
            "setting": hashlib.sha256(text.encode()).hexdigest()[:12],
            "where": ", ".join(parts),
            "elsewhere": ", ".join([parts[0], *parts[2:]]),
            # Optimizers differ in the size of their states, and Muon, which steps whole matrices, also in what is sent.
            "shape": f"{shape}, {trial.optimizer.name}" if len(optimizers) > 1 else shape,
        }
    return settings


def _model_sizes(
    rows: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Mapping[str, Any]], varying: Sequence[str]
) -> dict[str, int]:
    """Return the number of parameters of each trial's model, by id, if this number is enough to tell the models apart.

    Descriptions of settings then say ``45,216 parameters`` instead of listing the model's arguments.  The numbers are
    returned if both of these conditions hold; otherwise, the dict is empty:

    * The models differ in two or more arguments and in nothing else.
    * The numbers of parameters of all models are known and different.

    Args:
        rows: Facts on each trial, among them ``parameters``, by id.
        fields: The fields of each trial's setting (cluster, model, batch and so on), by id.
        varying: The paths of the fields in which settings differ.
    """
    of_model = [key for key in varying if key.startswith("model.")]
    if len(of_model) < 2 or not all(key.startswith(_GEOMETRY) for key in of_model):
        return {}
    geometries = {name: json.dumps([given.get(key) for key in of_model]) for name, given in fields.items()}
    known = {(geometries[name], row["parameters"]) for name, row in rows.items() if row["parameters"]}
    sizes = dict(known)
    if (
        len(sizes) != len(known)
        or len({*sizes.values()}) != len(sizes)
        or sizes.keys() != {*geometries.values()}
    ):
        return {}
    return {name: sizes[geometry] for name, geometry in geometries.items()}


def _named(key: str, fields: Mapping[str, Any], among: Sequence[str]) -> str:
    """Return text for one field of a setting: ``lr 0.02``, or ``adamw lr 0.001`` if two fields are called ``lr``.

    A setting is what a trial runs in: cluster, model, batch and so on.  If the setting does not have the field, the
    text is empty, with two exceptions: without ``cluster.inner_rate`` it is ``no limit inside nodes``, and without
    ``cluster.slow`` it is ``equal nodes``.

    Args:
        key: The path of the field.
        fields: All fields of the setting, by path.
        among: The paths of all fields in which settings differ.
    """
    value = fields.get(key)
    if key == "cluster.inner_rate":
        return "no limit inside nodes" if value is None else f"{rate_text(value)} inside nodes"
    if key == "cluster.slow":
        return "equal nodes" if value is None else f"one node at {value:g} of the rate"
    table, _, name = key.removesuffix(".name").rpartition(".")
    parted = [other.removesuffix(".name").rpartition(".") for other in among]
    alike = [other_table for other_table, _, other_name in parted if other_name == name]
    if len(alike) > 1:
        first, _, last = table.rpartition(".")
        # If both a model and an optimizer have an argument of this name, the text begins with which of the two it is.
        if last == "arguments":
            last = first if sum(other.endswith(".arguments") for other in alike) > 1 else ""
        name = f"{last} {name}".lstrip()
    if key not in fields:
        return ""
    return f"no {name}" if value is None else f"{name} {plain(value)}"


def groups(data: pd.DataFrame, keys: list[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Return the groups of rows that have equal values in the columns ``keys``, as pairs (values, rows).

    Groups are in the order in which their first rows appear.
    """
    return list(data.groupby(keys, sort=False, dropna=False))


def rate_text(mbit: float | None) -> str:
    """Return the rate of a link as text: ``50 Mbit/s``, ``1.6 Gbit/s``, or ``unshaped`` for None."""
    return labels.at({"cluster.rate": mbit}, "cluster.rate")


def _trial_row(record: Record, trial: Trial, configuration: str) -> dict[str, Any]:
    topology, policy, link = trial.topology(), trial.resolved_policy(), record.link
    measured = (link.probed_mbit or link.calibrated_mbit) if link else None
    of_record = ("id", "suite", "order", "started", "pool", "sweep", "role", "parameters", "reference_loss")
    of_trial = ("strategy", "workload", "seed", "repeat", "tokens_per_rank", "sequence", "accumulation")
    shares_processors = trial.cluster.device == "cpu" and trial.cluster.launcher == "local"
    return {
        **{name: getattr(record, name) for name in of_record},
        **{name: getattr(trial, name) for name in of_trial},
        **{name: getattr(topology, name) for name in ("nodes", "ranks_per_node", "world")},
        "configuration": configuration,
        "place": [*NAMES, trial.strategy].index(trial.strategy),
        "processes": len(record.ranks),
        "model": trial.model.name,
        "rate_mbit": trial.cluster.rate,
        "achieved_mbit": statistics.median(measured) if measured else None,
        "secondary": max(phase.secondary_ranks(topology) for phase in policy.phases) if policy else 0,
        "units": len(record.units),
        "numel": sum(numel for _, numel, _ in record.units) or record.parameters,
        "padding_share": record.padding,
        "predicted_equal": _as_predicted(record),
        **_method(record),
        "miscounted": record_checks.interface_mismatch(record) or "",
        "off_rate": record_checks.rate_mismatch(record) or "",
        "crossed": record_checks.secondary_mismatch(record) or "",
        "flat": record_checks.flat_loss(record) or "",
        "gradient_share": max((check.share for check in record.first_gradients), default=math.nan),
        **{f"foreseen_{name}": getattr(record.foreseen, name, math.nan) for name in _FORESEEN},
        "signed": record.digest is not None,
        "link_kind": link.kind if link else "",
        "modelled": bool(link and link.kind == "paced"),
        "kernels": str(record.ran.get("kernels", "")),
        "kernels_warning": plain(record.ran.get("kernels_warning", ""), 300),
        "processors": record.machine.get("cores") if shares_processors else None,
        "corpus": plain(trial.corpus),
        "corpus_sha256": str(record.ran.get("corpus_sha256", "")),
        **_taken(record),
        "disturbed": record.disturbed,
        **_gpus(record, trial),
    }


def _as_predicted(record: Record) -> bool | None:
    """Return whether the bytes that a trial sent equal the predicted bytes; None if this is not known.

    The ranks count the bytes of their messages while sending (their ledgers).  For all messages that have a prediction,
    :func:`harness.records.record_checks.ledger_mismatch` compares these counts with the prediction.  It also checks the
    record's own statement on whether the two are equal.

    * False: the function finds a difference, or the record's statement is wrong.
    * True: the function finds nothing, and all messages have a prediction.
    * None: the function finds nothing, and some or all messages lack a prediction.
    """
    if record.predicted is None:
        return None
    if record_checks.ledger_mismatch(record) is not None:
        return False
    return None if record.predicted.unpredicted else True


def _method(record: Record) -> dict[str, Any]:
    """Return the columns that describe a user's own classes: one that reduces gradients, and one that gathers weights.

    * ``method`` and ``gather_method``: the name of the class that reduces, and of the class that gathers; empty if the
      trial has no such class.
    * ``bounded`` and ``gather_bounded``: whether the class that reduces, or the class that gathers, promises a bound of
      its error.
    * ``unbiased``: whether the class that reduces promises unbiased gradients.
    * ``measured_only``: whether the bytes of any messages were measured but not predicted.
    * ``weights_measured``: whether the bytes of weights were measured but not predicted.
    """

    def facts_of(key: str) -> tuple[str, set[str]]:
        facts = record.ran.get(key)
        facts = facts if isinstance(facts, dict) else {}
        laws = facts.get("laws")
        return plain(facts.get("class", ""), 100), set(map(str, laws if isinstance(laws, list) else ()))

    unpredicted = record.predicted.unpredicted if record.predicted else []
    (reduces, promised), (gathers, of_gather) = facts_of("method"), facts_of("gather_method")
    return {
        "method": reduces,
        "measured_only": bool(unpredicted),
        "bounded": not {"bound", "exact"}.isdisjoint(promised),
        "unbiased": "unbiased" in promised,
        "gather_method": gathers,
        "gather_bounded": not {"bound", "exact"}.isdisjoint(of_gather),
        "weights_measured": "weights" in unpredicted,
    }


def _gpus(record: Record, trial: Trial) -> dict[str, float]:
    """Return the columns that describe a trial's GPUs.

    * ``gpus``: the number of GPUs;
    * ``joules_per_token``: the energy of all GPUs together, per token;
    * ``watts``, ``utilisation`` and ``clock_mhz``: means over the GPUs;
    * ``throttled``: the share of time in which a GPU was throttled for one reason, the largest over GPUs and reasons;
    * ``gpu_others``: the number of other processes that computed on a GPU, the largest over GPUs.

    Without GPUs, ``gpus`` and ``gpu_others`` are 0, and the other columns are NaN.
    """
    gpus = [gpu for node in record.machine_use for gpu in node.gpus]
    tokens = trial.tokens_per_rank * trial.accumulation * trial.topology().world * trial.steps
    energy = joules(record.machine_use)
    return {
        "gpus": len(gpus),
        "joules_per_token": math.nan if energy is None else energy / tokens,
        **{
            name: math.fsum(getattr(gpu, name) for gpu in gpus) / len(gpus) if gpus else math.nan
            for name in ("watts", "utilisation", "clock_mhz")
        },
        "throttled": max((max(gpu.throttled.values(), default=0.0) for gpu in gpus), default=math.nan),
        "gpu_others": max((gpu.others for gpu in gpus), default=0),
    }


def _taken(record: Record) -> dict[str, float]:
    """Return the shares of the CPUs' time that other programs and the hypervisor took during the timed steps.

    ``others_share`` is the share of other programs, ``steal_share`` the share of the hypervisor, and ``taken_share``
    the sum of the two.  All three are NaN if the record does not hold them.
    """
    use = record.processor_use
    names = ("others_share", "steal_share", "taken_share")
    return {name: math.nan if use is None else getattr(use, name) for name in names}


def _interface_rows(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        headers = record.link.details.get("header_bytes") if record.link else None
        for counters in record.interfaces or []:
            yield {"id": record.id, "header_bytes": headers, **counters.model_dump()}


def _sent_rows(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``Frames.bytes``: the bytes that each rank sent, as the rank counted or as they were predicted.

    Column ``source`` is ``ledger`` (the rank's own count) or ``predicted``.  A row sums up the messages of one rank
    that have equal phase, purpose, unit (parameters that are sent together), hop (exchange of a collective) and link.
    For a record in which any message lacks a prediction, no predicted rows are yielded.
    A row's bytes of padding are its bytes times the share of padding in the row's unit.
    """
    for record in records:
        pads = {name: 1 - numel / padded for name, numel, padded in record.units if padded}
        whole = record.predicted is not None and not record.predicted.unpredicted
        predicted = record.predicted.ledgers if record.predicted is not None and whole else []
        ledgers = [("ledger", rank, rank.ledger or []) for rank in record.ranks]
        ledgers += [("predicted", *pair) for pair in zip(record.ranks, predicted, strict=False)]
        for source, rank, ledger in ledgers:
            sender = {"id": record.id, "source": source, "rank": rank.rank, "node": rank.node}
            for entry in ledger:
                row = dict(entry)  # several times as fast as model_dump(), and no field has parts of its own
                if entry.phase == "evaluate" and record.trial.get("workload") == "rlhf":
                    # In rlhf, generating and scoring are parts of a step.
                    row["phase"] = "score" if entry.unit.endswith(FROZEN) else "generate"
                padding, headers = entry.bytes * pads.get(entry.unit, 0.0), record_checks.header_bytes(entry)
                yield sender | row | {"padding": padding, "headers": headers}


def _memory_rows(records: Iterable[Record]) -> Iterator[tuple[str, int, str, str, int]]:
    for record in records:
        for rank in record.ranks:
            memory, timed = rank.memory, max(1, sum(not step.warmup for step in rank.steps))
            device = {} if memory.peak_device is None else {"peak_device": memory.peak_device}
            parts = {
                "engine": memory.engine,
                "formula": memory.formula,
                "process": {"peak_rss": memory.peak_rss, **device},
                "copied": {name: size // timed for name, size in memory.copied.items()},
                "copied_formula": {name: size // timed for name, size in memory.copied_formula.items()},
            }
            for source, sizes in parts.items():
                yield from ((record.id, rank.rank, source, part, size) for part, size in sizes.items())


def _span_rows(traces: Iterable[Trace]) -> Iterator[tuple[Any, ...]]:
    for trace in traces:
        step = trace.otherData
        for rank, span in trace.spans():
            yield step.trial, rank, span.lane, span.name, span.begin, span.end, step.seconds, step.before


def _links_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return the measured rates of links in Mbit/s, one row per measurement.

    Before a sweep (a run of all trials of a suite) the link is calibrated once.  The calibrated rates are then in the
    records of all trials that used the link.  The table lists each of these rates once, with the id of the first record
    that holds it.
    """
    rows = [
        (record.id, link.kind, link.requested_mbit, when, achieved)
        for record in records
        if (link := record.link) is not None
        for when, values in (("calibrated", link.calibrated_mbit), ("probed", link.probed_mbit))
        for achieved in values
    ]
    links = pd.DataFrame(rows, columns=["id", "kind", "requested_mbit", "when", "achieved_mbit"])
    links = links.astype({"requested_mbit": float, "achieved_mbit": float})
    return links[~(links["when"].eq("calibrated") & links.drop(columns="id").duplicated())]


def _facts_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return a table of facts about machine, code, run and link: one row per pool, fact and distinct value.

    A pool consists of the records with equal machine and code.  Column ``records`` is the number of the pool's records
    that have the value.
    """
    counts = Counter[tuple[str, str, str]]()
    for record in records:
        facts: dict[str, Any] = {"machine": record.machine, "code": record.code, "ran": record.ran}
        facts["record"] = {"digest": "none" if record.digest is None else "SHA-256, of this content"}
        if (link := record.link) is not None:
            facts["link"] = {"kind": link.kind, "why": link.why, **link.details}
        for fact, value in flatten(facts):
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
            counts[record.pool, fact, text] += 1
    rows = [(*fact, count) for fact, count in sorted(counts.items())]
    return pd.DataFrame(rows, columns=["pool", "fact", "value", "records"])


def _check_measured(record: Record, trial: Trial) -> None:
    """Raise a ReportError if no ratio can be computed from the record of a finished trial.

    Each of these is a reason: a link of 0 Mbit/s, no ranks, a rank without timed steps, units without elements, or a
    step of 0 s or less.
    """
    faults = {
        "no rank": not record.ranks,
        "units without elements": bool(record.units) and sum(numel for _, numel, _ in record.units) <= 0,
        "a link of 0 Mbit/s": record.link is not None
        and any(not rate > 0 for rate in (*record.link.calibrated_mbit, *record.link.probed_mbit)),
    }
    for rank in record.ranks:
        timed = [token.seconds for token in rank.tokens if not token.warmup]
        if trial.workload != "generate":
            timed = [step.total for step in rank.steps if not step.warmup]
        faults["no timed step"] = faults.get("no timed step", False) or not timed
        if not trial.measures_time:
            continue
        faults["a step of 0 s"] = faults.get("a step of 0 s", False) or 0 in timed
        faults["a step of less than 0 s"] = (
            faults.get("a step of less than 0 s", False) or min(timed, default=0) < 0
        )
    if found := [fault for fault, has in faults.items() if has]:
        raise ReportError(
            f"record {record.id} has {' and '.join(found)}, so that no ratio can be computed; "
            "delete the record's file, and run the suite again"
        )


def _check_pools(records: list[Record]) -> None:
    """Raise a ReportError if the finished trials of these records must not be compared; the message says what differs.

    All trials must have run with the same code and, if they ran on the same kind of device, with the same kernels.
    Trials of one sweep must also have run on the same machine.
    """
    measured = [record for record in records if record.measured]
    origins = {(record.code.get("source"), record.sweep, record.pool) for record in measured}
    mixed = len({sweep for _, sweep, _ in origins}) < len(origins)
    if mixed or len({source for source, _, _ in origins}) > 1:
        firsts = {record.pool: record for record in reversed(records)}
        facts = [{"code": record.code, "machine": record.machine} for _, record in sorted(firsts.items())]
        values = [dict(flatten(fact)) for fact in facts]
        lines = [f"{path}: {' / '.join(str(v.get(path)) for v in values)}" for path in differing(facts)]
        pools = _sizes((record.pool, record.id) for record in records)
        raise ReportError(
            f"records of {len(firsts)} machines or versions of the code{' in one sweep' * mixed} cannot be "
            f"compared: {pools}. They differ in {'; '.join(lines[:6]) or 'facts that are not recorded'}. "
            "Keep the records of one machine and version here, and move all others into other folders"
        )
    kernels = defaultdict[Any, list[tuple[str, str]]](list)  # device -> (kernels, id) of each record
    for record in measured:
        if "kernels" in record.ran:
            kernels[record.ran.get("device")].append((str(record.ran["kernels"]), record.id))
    for device, named in kernels.items():
        if len(dict(named)) > 1:
            raise ReportError(
                f"records of trials on {device} with different kernels cannot be compared: "
                f"{_sizes(named)}. Keep the records with one kind of kernels here, and move the others into another "
                "folder or run them again"
            )


def _sizes(pairs: Iterable[tuple[str, str]]) -> str:
    """Return text that counts the records of each name: ``a: 3 records, such as 0f1e; b: 1 record, such as 77aa``.

    ``pairs`` has a pair (name, id) for each record.
    """
    ids = pd.DataFrame(list(pairs), columns=["name", "id"]).groupby("name")["id"].agg(["size", "first"])
    return "; ".join(
        f"{name}: {labels.counted(size, 'record')}, such as {first}" for name, size, first in ids.itertuples()
    )
