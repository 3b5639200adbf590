"""Parts of a suite without effect are refused in one line with the key, the conflict and the way out."""

from __future__ import annotations

import pytest

from tests.harness.suites.test_suite_file import HEAD, Read, Refused, read, refusal

__all__ = ["read", "refusal"]  # fixtures

OVERRIDE = "[[override]]\nmatch = {{ seed = 0 }}\nset = {{ steps = {} }}\n"
TWO = '[matrix]\nstrategy = ["zero3", "zeropp"]\n'
# By what is without effect: keys at the top, the body, and words of the refusal.
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a loss of no validation": ('answer = "loss"', TWO, ('answer = "loss"', "set validate_every", "remove")),
    "owners of no matrix": (
        "",
        '[defaults]\npolicy.owned = "int8:256"\n',
        ('policy.owned = "int8:256": has no effect with optimizer.name =', "only Muon's matrices"),
    ),
    "a schedule of a peer": (
        "",
        '[defaults]\nstrategy = "ddp"\npolicy.schedule = [{ until = 5, gradients = "bf16" }, {}]\n',
        ("policy.schedule = ", "has no effect with strategy = 'ddp', a peer without a policy"),
    ),
    "a loss of few steps": (
        'answer = "loss"',
        f"[defaults]\nvalidate_every = 0\n{TWO}",
        ("after 10 steps", "100 steps or more", "raise steps"),
    ),
    "a loss of some trials": (
        'answer = "loss"',
        '[[zip]]\nstrategy = ["zero3", "hpz"]\nvalidate_every = [0, 5]\n',
        ("after 10 steps",),
    ),
    "errors unmeasured": ('answer = "error"', TWO, ('answer = "error"', "measure_quantisation = true")),
    "errors of peers": (
        'answer = "error"',
        '[defaults]\nstrategy = "ddp"\nmeasure_quantisation = true\n',
        ("measure_quantisation",),
    ),
    "bytes in one node": (
        'answer = "bytes"',
        f"[defaults]\ncluster.nodes = 1\n{TWO}",
        ("cluster.nodes = 1",),
    ),
    "memory of one": ('answer = "memory"', "", ('answer = "memory"', "add one")),
    "steps of generation": (
        'answer = "step"',
        f'[defaults]\nworkload = "generate"\ngenerate.prompt = 4\n{TWO}',
        ("is reported in tokens per second",),
    ),
    "steps of threads": (
        'answer = "step"',
        f'[defaults]\ncluster.ranks = "threads"\n{TWO}',
        ("answer = \"step\": cluster.ranks = 'threads' measures no seconds", "'processes'"),
    ),
    "steps of threads, unasked": (
        "",
        f'[defaults]\ncluster.ranks = "threads"\n{TWO}',
        ("the suite's answer would be 'step'", 'set answer to one of "loss"'),
    ),
    "repeats by the seconds of threads": (
        'answer = "bytes"\nrepeats = "until 2 %"',
        f'[defaults]\ncluster.ranks = "threads"\n{TWO}',
        ("repeats = 'until ...' needs seconds, but cluster.ranks = 'threads' measures no seconds",),
    ),
    "a margin of no loss": ("margin = 3", TWO, ("margin = 3", "no validation", "remove margin")),
    "a margin of one late loss": (
        "margin = 3",
        f"[defaults]\nsteps = 200\nvalidate_every = 0\n{TWO}",
        ("two validations in the last quarter",),
    ),
    "seconds without a curve": (
        'seconds = "other"',
        f"[defaults]\nsteps = 100\nvalidate_every = 0\n{TWO}",
        ('seconds = "other"', "set validate_every", "remove seconds"),
    ),
    "seconds of the suite itself": (
        'seconds = "q"',
        f"[defaults]\nsteps = 100\nvalidate_every = 50\n{TWO}",
        ('seconds = "q"', "names this suite itself", "remove seconds"),
    ),
    "seconds of a short curve": (
        'seconds = "other"',
        f"[defaults]\nvalidate_every = 5\n{TWO}",
        ("100 steps or more",),
    ),
    "validations after the end": (
        "",
        "[defaults]\nvalidate_every = 50\n",
        ("validate_every = 50", "10 steps in all"),
    ),
    "batches of no validation": (
        "",
        "[defaults]\nvalidation_batches = 9\n",
        ("validation_batches = 9", "validate_every"),
    ),
    "an empty baseline": ("baseline = {}", TWO, ("baseline = {}", "names no field")),
    "an empty contrast": ('baseline = { strategy = "zero3" }\ncontrast = {}', TWO, ("contrast = {}",)),
    "an empty zip": ("", "[[zip]]\n", ("[[zip]] #1", "names no field")),
    "an empty exclude": ("", "[[exclude]]\n", ("[[exclude]] #1", "names no field")),
    "an override of nothing": (
        "",
        "[[override]]\nmatch = {}\nset = {}\n",
        ("[[override]] #1 set", "names no field"),
    ),
    "a value twice": ("", "[matrix]\nseed = [0, 1, 0]\n", ("[matrix] seed = 0", "is listed twice")),
    "a value twice, in other units": (
        "",
        '[matrix]\ncluster.rate = ["1 Gbit/s", "1000 Mbit/s"]\n',
        ('cluster.rate = "1000 Mbit/s"', "twice"),
    ),
    "gradients of generation": (
        "",
        '[defaults]\nworkload = "generate"\n[matrix]\npolicy.gradients = ["int4:64", "int8:64"]\n',
        ("[matrix] policy.gradients", "trains nothing"),
    ),
    "chunks in one node": (
        "",
        "[defaults]\ncluster.nodes = 1\npolicy.chunks = 2\n",
        ("policy.chunks", "cluster.nodes = 1"),
    ),
    "buckets of a library without them": (
        "",
        '[matrix]\nstrategy = ["fsdp2", "zero3"]\npeer.bucket_mb = [5, 25]\n',
        ("[matrix] peer.bucket_mb = 5", "only peers of ddp read it"),
    ),
    "groups of a library without them": (
        "",
        '[matrix]\nstrategy = ["ddp", "deepspeed"]\npeer.group = ["node", "all"]\n',
        ('[matrix] peer.group = "node"', "only peers of fsdp2 read it"),
    ),
    "a row twice": (
        "",
        "[[zip]]\nseed = [1, 1]\nsteps = [2, 2]\n",
        ("[[zip]] #1 seed = 1, steps = 2", "twice"),
    ),
    "a member of a match": (
        "",
        f'{TWO}[[exclude]]\nstrategy = ["zero3", "hpz"]\n',
        ("[[exclude]] #1 strategy", '"hpz"', "leave that value"),
    ),
    "a member of a contrast": (
        'baseline = { strategy = "zero3" }\ncontrast = { strategy = ["zeropp", "loco"] }',
        TWO,
        ("contrast", '"loco"'),
    ),
    "a misspelt member": (
        "",
        f'{TWO}[[exclude]]\nstrategy = ["zero3", "zeropq"]\n',
        ("did you mean 'zeropp'",),
    ),
    "an override undone": (
        "",
        OVERRIDE.format(3) + OVERRIDE.format(4),
        ("[[override]] #1 set steps = 3", "later [[override]]"),
    ),
    "an axis flattened": (
        "",
        "[matrix]\nsteps = [3, 4]\n[[override]]\nmatch = {}\nset = { steps = 5 }\n",
        ("[matrix] steps", "[[override]] #1 set", "all its 2 values"),
    ),
    "a zip flattened": (
        "",
        "[[zip]]\nsteps = [3, 4]\nseed = [1, 2]\n[[override]]\nmatch = {}\nset = { steps = 5, seed = 0 }\n",
        ("[[zip]] #1 steps, seed",),
    ),
    "codecs of no strategy": (
        "",
        '[defaults]\npolicy.weights = "int8:64"\n[matrix]\nstrategy = ["zero3", "qgz"]\n',
        ("[defaults] policy.weights", "no effect", "'zero3'", "remove policy.weights"),
    ),
    "an axis of no strategy": (
        "",
        '[matrix]\npolicy.secondary = [2, 4]\nstrategy = ["zero3", "qgz"]\n',
        ("[matrix] policy.secondary",),
    ),
    "a policy of peers": (
        "",
        '[defaults]\nstrategy = "ddp"\npolicy.chunks = 2\n',
        ("policy.chunks", "'ddp'"),
    ),
    "a peer's type of policies": (
        "",
        f'[defaults]\npeer.compute = "bf16"\n{TWO}',
        ("peer.compute", "policy.compute"),
    ),
    "prefetching below stage 3": (
        "",
        '[defaults]\npolicy.prefetch = 9\n[matrix]\nstrategy = ["zero1", "zero2"]\n',
        ("policy.prefetch", "stage 1"),
    ),
    "a rate of one node": (
        "",
        '[defaults]\ncluster.nodes = 1\ncluster.rate = "1 Gbit/s"\n',
        ("cluster.rate", "cluster.nodes = 1"),
    ),
    "hosts of no launcher": (
        "",
        '[defaults]\ncluster.hosts = ["a", "b"]\n',
        ("cluster.hosts", "only 'hosts' reads it"),
    ),
    "an allocation of no launcher": (
        "",
        "[defaults]\ncluster.slurm.time = 9\n",
        ("cluster.slurm.time", "only 'slurm' reads it"),
    ),
    "a floor of no decay": (
        "",
        "[defaults]\noptimizer.schedule.floor = 0.1\n",
        ("schedule.floor", "decay = 'none'"),
    ),
    "a start of no warm-up": (
        "",
        "[defaults]\noptimizer.schedule.start = 0.1\n",
        ("schedule.start", "warmup = 0"),
    ),
    "an optimizer of generation": (
        "",
        '[defaults]\nworkload = "generate"\noptimizer.name = "SGD"\n',
        ("optimizer.name", "trains nothing"),
    ),
}


@pytest.mark.parametrize(("keys", "body", "words"), CASES.values(), ids=CASES)
def test_what_has_no_effect_is_refused(
    refusal: Refused, keys: str, body: str, words: tuple[str, ...]
) -> None:
    """The message has the key, the conflict and the way out."""
    text = refusal(body, f"{HEAD}{keys}\n")
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("keys", "body"),
    [
        ('answer = "loss"', f"[defaults]\nsteps = 100\nvalidate_every = 0\n{TWO}"),
        ('answer = "loss"', f"[defaults]\nvalidate_every = 5\n{TWO}"),
        ("margin = 3", f"[defaults]\nsteps = 100\nvalidate_every = 20\n{TWO}"),
        ('seconds = "other"', f"[defaults]\nsteps = 100\nvalidate_every = 50\n{TWO}"),
        ("", "[defaults]\nvalidate_every = 10\n"),  # as often as there are steps
        ("", '[defaults]\npolicy.weights = "int8:64"\n[matrix]\nstrategy = ["zero3", "qwz"]\n'),
        ("", '[defaults]\npeer.compute = "bf16"\n[matrix]\nstrategy = ["zero3", "ddp"]\n'),
        ("", '[defaults]\ncluster.rate = "1 Gbit/s"\n[matrix]\ncluster.nodes = [1, 2]\n'),
        ("", '[matrix]\nstrategy = ["zeropp"]\nsequence = [32]\n'),  # axes with one value
        ("", f"{TWO}steps = [3, 4]\n[[override]]\nmatch.strategy = 'zero3'\nset.steps = 3\n"),
        ("", "[defaults]\nsteps = 5\n[matrix]\nsteps = [3, 4]\n"),
        ("", "[defaults]\nvalidation_batches = 4\noptimizer.schedule.floor = 0.0\n"),  # what they are anyway
    ],
)
def test_what_has_an_effect_somewhere_is_not(read: Read, keys: str, body: str) -> None:
    """A setting that has an effect in one trial is accepted, and so is an answer without a verdict."""
    assert read(body, f"{HEAD}{keys}\n").trials
