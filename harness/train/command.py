"""``zeropp train``: trains a GPT as a DeepSpeed configuration and the flags of DeepSpeed's tutorials describe.

Before ranks start, the command prints how each key of the configuration is handled and the memory that each stage of
ZeRO needs.  If torchrun has started the command, each process is a rank.  Otherwise the command starts the ranks as
processes of this machine.  torch is imported only when the command runs.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import ValidationError
from typer import Option

from harness.cluster import interrupts
from harness.cluster.rank_processes import BACKENDS, REFUSALS, Launch, LaunchError, run_in_place, run_ranks
from harness.errors import Refusal, visible
from harness.measure import machine
from harness.records.trial_record import wrong_field
from harness.runs.feasibility import check_writable, this_host
from harness.suites.trial import Cluster, Model, Optimizer, PolicyChanges, Trial
from harness.workloads.trial_dataset import check as check_data
from impl.checkpoint.commit import resolve
from impl.checkpoint.manifest import Manifest, read_manifest
from impl.deepspeed.config_to_policy import laid_out, recipe
from impl.deepspeed.keys import ZERO, DeepSpeedError, load
from impl.policy.shard_layout import PERSISTENT
from impl.policy.topology import Topology

if TYPE_CHECKING:
    from harness.train.loop import Job

MOST_LAYERS: Final = 10_000  # planning takes time for each layer
MOST: Final = 1_000_000_000  # largest number of steps, of sequences of a rank, of tokens of a sequence
LR: Final = 3e-4  # learning rate if flags and configuration give none, or the configuration says "auto"
MOST_WIDTH: Final = 1_000_000
_LENGTHS: Final = {"1.5b": 1024, "10b": 1024, "18b": 512}  # tokens of a sequence, by preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The flags of ``zeropp train``.  If a flag is None, the DeepSpeed configuration or a default decides."""

    preset: Annotated[
        Literal["1.5b", "10b", "18b"] | None,
        Option(help="Size of the model, as in DeepSpeed's tutorials. Default: a small GPT."),
    ] = None
    num_layers: Annotated[int | None, Option(min=1, max=MOST_LAYERS, help="Number of blocks.")] = None
    hidden_size: Annotated[int | None, Option(min=1, max=MOST_WIDTH, help="Width of the model.")] = None
    num_attention_heads: Annotated[
        int | None, Option(min=1, help="Attention heads; the width must be divisible by them.")
    ] = None
    vocab_size: Annotated[
        int | None,
        Option(min=256, max=MOST, help="Rows of the embedding; the data are bytes, which need 256."),
    ] = None
    seq_length: Annotated[int | None, Option(min=1, max=MOST, help="Tokens of a sequence.")] = None
    batch_size: Annotated[
        int | None, Option(min=1, max=MOST, help="Sequences that each rank reads in a micro-batch.")
    ] = None
    checkpoint_activations: Annotated[
        bool,
        Option(
            "--checkpoint-activations",
            "--deepspeed-activation-checkpointing",
            help="Run blocks again in the backward pass instead of keeping their activations.",
        ),
    ] = False
    fp16: Annotated[bool, Option("--fp16", help="Compute in fp16, with a loss scale.")] = False
    bf16: Annotated[bool, Option("--bf16", help="Compute in bf16.")] = False
    zero_stage: Annotated[int | None, Option(min=0, max=3, help="Stage of ZeRO.")] = None
    deepspeed_config: Annotated[
        Path | None,
        Option(
            "--deepspeed_config",
            "--deepspeed-config",
            help="DeepSpeed configuration, a JSON file; see docs/guide/deepspeed.md.",
        ),
    ] = None
    model_parallel_size: Annotated[int, Option(help="Only 1 is supported.")] = 1
    tensor_model_parallel_size: Annotated[int, Option(help="Only 1 is supported.")] = 1
    pipeline_model_parallel_size: Annotated[int, Option(help="Only 1 is supported.")] = 1
    nodes: Annotated[
        int | None, Option(min=1, help="Number of emulated nodes. Default: 1, or torchrun's number of nodes.")
    ] = None
    ranks_per_node: Annotated[
        int | None,
        Option(min=1, max=64, help="Ranks on each node. Default: 2, or as many as torchrun starts."),
    ] = None
    device: Annotated[Literal["cpu", "cuda"], Option(help="Device that the ranks compute on.")] = "cpu"
    steps: Annotated[int, Option(min=1, max=MOST, help="Optimizer steps.")] = 10
    lr: Annotated[
        float | None,
        Option(min=0, help="Learning rate. Default: as in the configuration, or 3e-4 without one."),
    ] = None
    corpus: Annotated[
        str, Option(help="Text to train on: stdlib (the sources of Python's library), a file or a folder.")
    ] = "stdlib"
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Seed of weights and batches.")] = 0
    max_padding: Annotated[
        float | None,
        Option(min=0, help="Largest padding of a unit, as a share of its elements. Default: 0.2."),
    ] = None
    save: Annotated[Path | None, Option(help="Folder for checkpoints; one is saved after the last step.")] = (
        None
    )
    save_every: Annotated[
        int | None,
        Option("--save-every", "--save-interval", min=1, help="Also save a checkpoint every so many steps."),
    ] = None
    keep: Annotated[int | None, Option(min=1, help="Keep only this many checkpoints, the newest ones.")] = (
        None
    )
    resume: Annotated[
        Path | None,
        Option("--load", help="Continue from this checkpoint, or from the newest in this folder."),
    ] = None
    plan: Annotated[
        bool, Option("--plan", help="Only print the memory that each stage needs; do not train.")
    ] = False

    def check(self) -> None:
        """Check the flags before anything is planned.

        Raises:
            Refusal: If a flag has an unsupported value or needs another flag, if the checkpoint of ``--load`` cannot be
                read, or if nothing can be written into the folder of ``--save``.
        """
        for name in ("model_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if (size := getattr(self, name)) != 1:
                flag = f"--{name.replace('_', '-')}"
                raise Refusal(
                    f"{flag} {size}: there is no tensor, model or pipeline parallelism: set 1, or leave {flag} out"
                )
        if self.save is None and (self.save_every or self.keep):
            flag = "--save-every" if self.save_every else "--keep"
            raise Refusal(f"{flag} needs a folder for checkpoints: add --save FOLDER")
        if self.save is not None:
            check_writable(self.save, f"--save {self.save}:")
        if self.resume is not None:
            read_manifest(resolve(self.resume))


def train(**flags: Any) -> None:
    """Train a GPT as a DeepSpeed configuration describes; print a line for each step.

    Most flags have the names that DeepSpeed's ZeRO tutorials use.
    """
    try:
        _train(Settings(**flags))
    except LaunchError as error:
        raise Refusal(f"{error} (log: {error.log})") from None
    except (DeepSpeedError, *REFUSALS) as error:
        raise Refusal(str(error)) from None


train.__signature__ = inspect.signature(Settings, eval_str=True)  # type: ignore[attr-defined]  # for typer


def _train(settings: Settings) -> None:
    """Check the flags, print the plan, and train.

    With ``--plan`` nothing is trained.  Raises a Refusal if the trial does not fit this machine's memory.
    """
    from harness.train.loop import Job

    topology, torchrun = _topology(settings.nodes, settings.ranks_per_node)
    settings.check()
    config = {} if settings.deepspeed_config is None else load(settings.deepspeed_config)
    try:
        trial = _trial(settings, config, topology, torchrun=torchrun)
    except (Refusal, ValueError) as error:
        reason = wrong_field(error) if isinstance(error, ValidationError) else error
        raise Refusal(f"{settings.deepspeed_config or 'flags'}: {reason}") from None
    trial = _with_room(trial)
    excess = _plan(trial, speaks=not torchrun or os.environ.get("RANK", "0") == "0")
    if settings.plan:
        return
    if excess:
        raise Refusal(
            f"too big for memory: {excess}; choose another --zero-stage from the table, or a smaller model"
        )
    check_data(trial)
    _run(Job(trial, settings.resume, settings.save, every=settings.save_every, keep=settings.keep))


def _trial(settings: Settings, config: Mapping[str, Any], topology: Topology, *, torchrun: bool) -> Trial:
    """Make the trial that the flags and the DeepSpeed configuration describe.

    Args:
        settings: The flags.
        config: The DeepSpeed configuration; empty if the user gave none.
        topology: Nodes and ranks per node.
        torchrun: Whether torchrun started the ranks.
    """
    table = _configured(settings, config)
    configured = recipe(table, topology=topology, steps=settings.steps)
    adam = {"type": "AdamW", "lr": LR if settings.lr is None else settings.lr}
    if configured.optimizer is not None:
        adam = asdict(configured.optimizer) | {"betas": list(configured.optimizer.betas)}
    elif configured.peak is not None:
        adam["lr"] = configured.peak
    sequence = settings.seq_length or _LENGTHS.get(settings.preset or "", 128)
    sizes = {
        "layers": settings.num_layers,
        "width": settings.hidden_size,
        "heads": settings.num_attention_heads,
        "vocab": settings.vocab_size,
    }
    arguments: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return Trial(
        strategy="recipe",
        deepspeed_config=json.dumps(table),
        policy=PolicyChanges(max_padding=settings.max_padding),
        cluster=Cluster(
            nodes=topology.nodes,
            ranks_per_node=topology.ranks_per_node,
            link="real" if torchrun else "none",
            device=settings.device,
            transport="nccl" if settings.device == "cuda" else "shm",
            launcher="torchrun" if torchrun else "local",
        ),
        model=Model(name=f"gpt-{settings.preset or 'small'}", arguments=arguments),
        corpus=settings.corpus,
        sequence=sequence,
        tokens_per_rank=(configured.micro_batch or 1) * sequence,
        accumulation=configured.accumulation,
        optimizer=Optimizer(name=adam.pop("type"), arguments=adam),
        clip=configured.clip,
        activation_checkpointing=settings.checkpoint_activations,
        steps=settings.steps,
        warmup=0,
        seed=settings.seed,
        threads=max(1, machine.cores() // topology.world),
    )


def _with_room(trial: Trial) -> Trial:
    """Return the trial with a higher limit on the size of units, if its model needs a higher limit.

    A unit is a set of parameters that are gathered together.  The limit on the number of its parameters is DeepSpeed's
    ``stage3_max_live_parameters``.  If a module has more parameters than the limit, DeepSpeed gathers the module
    nevertheless, and our engine divides it into smaller units.  A unit that cannot be divided further may still have
    more parameters than the limit.  In this case, the function raises the limit to the size of the largest unit.
    Otherwise it returns the trial unchanged.
    """
    from harness.workloads import models
    from impl.engine.unit_planning import drafts_of, find_blocks

    policy = trial.resolved_policy()
    assert policy is not None  # noqa: S101  # strategy "recipe" always has a policy
    if not (most := policy.memory.largest_unit):
        return trial
    with models.unfilled():
        model = models.build(trial.model, trial.sequence)
    blocks, unlimited = find_blocks(model, most=most), replace(policy.memory, largest_unit=0)
    drafts = drafts_of(model, blocks, None, replace(policy, memory=unlimited))
    sizes = [sum(spec.numel for spec in draft.specs) for draft in drafts if draft.name != PERSISTENT]
    if max(sizes, default=0) <= most:
        return trial
    changes = trial.policy.model_copy(update={"largest_unit": max(sizes)})
    return trial.model_copy(update={"policy": changes})


def steps_text(manifest: Manifest) -> str:
    """Return, as text, how many steps were done when a checkpoint was saved: ``step 12``.

    ``manifest`` is the checkpoint's description.  The number includes steps that were skipped because gradients
    overflowed.  If there were any, the text says so: ``step 12, 2 of them skipped for an overflow``.
    """
    scale, extra = manifest.loss_scale, manifest.extra
    done = manifest.step + (0 if scale is None else scale["skipped"])
    if isinstance(extra, dict) and extra.keys() == {"seed", "corpus", "sequence", "steps"}:
        # Saved by `zeropp train`.  The count of skipped steps restarts when the loss scale is changed.
        done = int(extra["steps"])
    skipped = done - manifest.step
    return f"step {done}" + (f", {skipped} of them skipped for an overflow" if skipped else "")


def _configured(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the DeepSpeed configuration with the values of the command's flags added.

    For example, ``--zero-stage 2`` sets the key ``zero_optimization.stage``.

    Raises:
        Refusal: If the configuration has another value for the flag's key, or has something other than a table where
            the key's table belongs.
    """
    table, lr = copy.deepcopy(dict(config)), settings.lr
    flags: list[tuple[str, tuple[str, ...], Any]] = [
        ("--zero-stage", (ZERO, "stage"), settings.zero_stage),
        ("--fp16", ("fp16", "enabled"), settings.fp16 or None),
        ("--bf16", ("bf16", "enabled"), settings.bf16 or None),
        ("--batch-size", ("train_micro_batch_size_per_gpu",), settings.batch_size),
    ]
    if isinstance(adam := table.get("optimizer"), dict):
        params = adam.get("params")
        auto = isinstance(params, dict) and params.get("lr") == "auto"
        flags.append(("--lr", ("optimizer", "params", "lr"), LR if auto and lr is None else lr))
    for flag, (*sections, key), value in flags:
        if value is None:
            continue
        place = table
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            place = place[section]
            if not isinstance(place, dict):
                raise Refusal(
                    f"{flag} needs a table {section!r}, but the configuration has {section} = {json.dumps(place)}: "
                    f"make {section} a table, or leave {flag} out"
                )
        other = place.get(key)
        if other not in (None, "auto", value):
            raise Refusal(
                f"{flag} {json.dumps(value)} contradicts the configuration's {key} = {json.dumps(other)}: leave "
                f'{flag} out, or set "auto" in the configuration'
            )
        place[key] = value
    return table


def _topology(nodes: int | None, ranks_per_node: int | None) -> tuple[Topology, bool]:
    """Return the topology, and whether torchrun has started the ranks.

    Without torchrun, the defaults are 1 node and 2 ranks per node.  Under torchrun, a missing flag is computed from the
    other flag and the number of ranks that torchrun started.  For example, with 8 ranks and ``--nodes 2``, a node has 4
    ranks.  If both flags are missing, torchrun's own nodes and ranks per node are used.

    Args:
        nodes: Value of the flag ``--nodes``; None if it is missing.
        ranks_per_node: Value of the flag ``--ranks-per-node``; None if it is missing.

    Raises:
        Refusal: If torchrun has started another number of ranks than the flags give.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # what torch.distributed.is_torchelastic_launched() checks
        return Topology(nodes or 1, ranks_per_node or 2), False
    world = int(os.environ["WORLD_SIZE"])
    local = ranks_per_node or (max(1, world // nodes) if nodes else int(os.environ["LOCAL_WORLD_SIZE"]))
    topology = Topology(nodes or max(1, world // local), local)
    if topology.world != world:
        raise Refusal(
            f"torchrun set WORLD_SIZE to {world}, but --nodes x --ranks-per-node is {topology}: leave these flags "
            f"out, or give numbers whose product is {world}"
        )
    return topology, True


def _plan(trial: Trial, *, speaks: bool) -> str | None:
    """Print how each key of the configuration is handled, and the memory that each stage of ZeRO needs.

    Args:
        trial: The trial that is to run.
        speaks: Whether this process prints.  Under torchrun only rank 0 prints.

    Returns:
        The reason why the trial does not fit this machine's memory.  None if the trial fits.
    """
    from harness.train.memory_table import in_words, needs, table, too_large
    from harness.workloads import models
    from impl.engine.unit_planning import plan_units
    from impl.errors import ZeroError
    from impl.policy.shard_layout import PaddingError

    configured, policy = trial.recipe(), trial.resolved_policy()
    assert policy is not None  # noqa: S101  # strategy "recipe" always has a policy
    topology, cuda = trial.topology(), trial.cluster.device == "cuda"
    with models.unfilled():
        model = models.build(trial.model, trial.sequence)
    try:
        configured = laid_out(configured, plan_units(model, topology, policy))
        needed = needs(model, policy, trial)
    except (ValueError, ZeroError) as error:
        option = f", with --max-padding {error.needed:.2f}" if isinstance(error, PaddingError) else ""
        raise Refusal(f"{error}{option}") from None
    finally:
        for finding in configured.findings if speaks else ():
            print(visible(str(finding)))
    if speaks:
        numel = sum(parameter.numel() for parameter in model.parameters())
        size = f"{numel / 1e9:.4g} B" if numel >= 1e9 else f"{numel / 1e6:.4g} M"
        print(
            f"{size} parameters on {topology.world} ranks ({topology}): Adam's states are "
            f"{in_words(needed[0].adam)}, and {in_words(needed[1].adam)} on each rank from stage 1 on"
        )
        print(table(needed, policy.stage, cuda=cuda), flush=True)
    ranks = topology.world if trial.cluster.launcher == "local" else int(os.environ["LOCAL_WORLD_SIZE"])
    return too_large(needed[policy.stage], topology, this_host(), cuda=cuda, ranks=ranks)


def _run(job: Job) -> None:
    """Train, and print the lines that rank 0 reports.

    If torchrun has started this process, it becomes one rank.  Otherwise this function starts all ranks.
    """
    from harness.cluster.link import open_link
    from harness.train.loop import train as train_rank

    interrupts.take_over()
    trial, cluster = job.trial, job.trial.cluster
    torchrun = cluster.launcher == "torchrun"
    with open_link(cluster, f"{os.getpid():x}"[-6:]) as link:
        launch = Launch(
            topology=trial.topology(),
            ports=link.ports,
            paced_mbit=None,
            threads=trial.threads or 1,
            timeout_seconds=7 * 86400.0,
            log=Path(tempfile.gettempdir()) / f"zeropp-train-{os.getpid()}.log",
            backend=BACKENDS["nccl"] if cluster.device == "cuda" else "gloo",
        )
        start: Any = run_in_place if torchrun else run_ranks
        start(train_rank, job, launch, lambda progress: print(progress.text, flush=True))
