"""Suite files are expanded into trials, and mistakes are refused in one line."""

from __future__ import annotations

import json
import math
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.suites.expand_suite import MOST_TRIALS, field_paths
from harness.suites.suite import FailureResponse, Suite, SuiteError
from harness.suites.suite_file import load
from harness.suites.trial import RECIPE, STRATEGIES, Trial
from impl.codecs.codec import parse
from impl.policy.presets import PRESETS

HEAD = 'name = "q"\nquestion = "?"\n'
SUITES = Path(__file__).parents[3] / "suites"
AXES = ("seed", "steps", "warmup", "validation_batches")
NAMED = [name for name in STRATEGIES if name != RECIPE]  # that need nothing else


Read = Callable[..., Suite]
Refused = Callable[..., str]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads the suite with a given body and, maybe, another head than the usual one."""

    def read_suite(body: str, head: str = HEAD) -> Suite:
        file = tmp_path / "q.toml"
        file.write_text(head + body, encoding="utf-8")
        return load(file)

    return read_suite


@pytest.fixture
def refusal(tmp_path: Path, read: Read) -> Refused:
    """Return a function that returns the one line with which a body is refused, without the file's path."""

    def refused(*texts: str) -> str:
        with pytest.raises(SuiteError) as caught:
            read(*texts)
        text = str(caught.value)
        assert "\n" not in text
        assert text.startswith(str(tmp_path / "q.toml"))
        return text

    return refused


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policies=st.lists(st.sampled_from(NAMED), min_size=1, max_size=5, unique=True),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    zipped=st.integers(1, 4),
    repeats=st.integers(1, 4),
)
def test_product(read: Read, policies: list[str], steps: list[int], zipped: int, repeats: int) -> None:
    """Matrix and zips multiply, repeats are outermost, and ids are unique."""
    suite = read(
        f"repeats = {repeats}\n[matrix]\nstrategy = {policies}\nsteps = {steps}\n"
        f"[[zip]]\nsequence = {[64 * (i + 1) for i in range(zipped)]}\n"
        f"tokens_per_rank = {[128 * (i + 1) for i in range(zipped)]}\n"
    )
    cells = len(policies) * len(steps) * zipped
    assert len(suite.trials) == cells * repeats
    assert len({trial.id for trial in suite.trials}) == len(suite.trials)
    assert [trial.repeat for trial in suite.trials] == [r for r in range(repeats) for _ in range(cells)]
    assert all(trial.tokens_per_rank == 2 * trial.sequence for trial in suite.trials)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(NAMED), min_size=2, max_size=6, unique=True), st.integers(2, 4))
def test_interleaving(read: Read, policies: list[str], repeats: int) -> None:
    """Compared trials are adjacent in every repeat, and none of them always runs first."""
    suite = read(f"repeats = {repeats}\n[matrix]\ncluster.nodes = [2, 3, 4]\nstrategy = {policies}\n")
    blocks = [suite.trials[i : i + len(policies)] for i in range(0, len(suite.trials), len(policies))]
    for block in blocks:
        assert len({(trial.repeat, trial.cluster.nodes) for trial in block}) == 1
        assert Counter(trial.strategy for trial in block) == Counter(policies)
    assert len({block[0].strategy for block in blocks}) > 1


def test_one_geometry(read: Read) -> None:
    """All policies of a suite are aligned to the least common multiple of all their grains."""
    suite = read('[matrix]\nstrategy = ["zero3", "zeropp"]\npolicy.weights = ["int8:96", "bf16"]\n')
    grains = {policy.grain for trial in suite.trials if (policy := trial.resolved_policy())}
    assert grains == {math.lcm(96, 256)}


def test_peers_run_once(read: Read) -> None:
    """Combinations of a peer that differ only in the policy are one run, and the suite lists them."""
    suite = read('[matrix]\nstrategy = ["zero3", "ddp"]\npolicy.weights = ["int8:64", "bf16"]\n')
    assert Counter(trial.strategy for trial in suite.trials) == {"zero3": 2, "ddp": 1}
    assert suite.merged == ('strategy = "ddp", policy.weights = "bf16"',)
    (line,) = suite.left_out
    assert line.startswith(
        'policy.weights ("int8:64", "bf16" of [matrix]) is left out of ddp: there is no policy'
    )


def resolved(suite: Suite) -> list[tuple[str, str, str, object]]:
    """Return strategy, weights, gradients and secondary of every trial."""
    rows = []
    for trial in suite.trials:
        policy = trial.resolved_policy()
        assert policy is not None
        rows.append((trial.strategy, str(policy.weights), str(policy.gradients[0]), policy.secondary))
    return sorted(rows, key=str)


def test_a_strategy_stays_what_it_is(read: Read) -> None:
    """Fields for all strategies quantise no strategy that does not quantise, and give no copy to one without hpZ."""
    suite = read(
        'defaults.policy.secondary = 2\n[matrix]\nstrategy = ["exact", "zero3", "qgz", "zeropp"]\n'
        'policy.weights = ["int8:64", "int6:64"]\n'
    )
    assert resolved(suite) == [
        ("exact", "fp32", "fp32", 0),
        ("qgz", "bf16", "int4:256:clip", 0),
        ("zero3", "bf16", "bf16", 0),
        ("zeropp", "int6:64", "int4:256:clip", 2),
        ("zeropp", "int8:64", "int4:256:clip", 2),
    ]
    assert len(suite.merged) == 3
    assert 'strategy = "zero3", policy.weights = "int6:64"' in suite.merged
    assert len(suite.left_out) == 2, "one line for each key"
    assert any(
        'policy.weights ("int8:64", "int6:64" of [matrix]) is left out of exact, zero3, qgz' in line
        for line in suite.left_out
    )
    assert not any("zeropp" in line for line in suite.left_out)
    suite = read('[matrix]\nstrategy = ["zero0", "zero2"]\npolicy.reduce_every = ["micro_batch", "step"]\n')
    assert Counter(trial.strategy for trial in suite.trials) == {"zero0": 1, "zero2": 2}
    assert any("is left out of zero0: it would make another strategy of" in line for line in suite.left_out)


def test_what_is_said_of_a_strategy_holds(read: Read) -> None:
    """A zip or an override that names the strategy changes it, and so does a suite with one policy only."""
    zipped = read('[[zip]]\nstrategy = ["zero3", "qgz"]\npolicy.weights = ["int8:64", "bf16"]\n')
    assert [row[:2] for row in resolved(zipped)] == [("qgz", "bf16"), ("zero3", "int8:64")]
    override = '[[override]]\nmatch = { strategy = "zero3" }\nset = { policy.gradients = "int8:64" }\n'
    overridden = read('[matrix]\nstrategy = ["zero3", "hpz"]\n' + override)
    assert [row[2] for row in resolved(overridden)] == ["bf16", "int8:64"]
    alone = read('[defaults]\nstrategy = "zero3"\n[matrix]\npolicy.weights = ["int8:64", "bf16"]\n')
    assert [row[1] for row in resolved(alone)] == ["bf16", "int8:64"]
    assert not zipped.left_out + overridden.left_out + alone.left_out


def test_one_policy_of_two_names_runs_once(read: Read) -> None:
    """Two strategies that resolve to one policy are one run, under the name with fewer changes."""
    suite = read(
        '[[zip]]\nstrategy = ["zero3", "qgz", "hpz", "hpz"]\n'
        'policy.gradients = [["int4:256", "int4:256"], "int4:256", "bf16", "bf16"]\n'
        'policy.secondary = [0, 0, "node", 2]\n'
    )
    assert len(suite.trials) == 2
    assert len(suite.merged) == 2
    groups = read('[matrix]\nstrategy = ["zero3"]\npolicy.group = ["node", 2, 0, 4]\n')
    assert len(groups.trials) == 2  # on two nodes of two ranks
    qgz = read(
        '[matrix]\nstrategy = ["zero3", "qgz"]\n'
        '[[override]]\nmatch = { strategy = "zero3" }\nset = { policy.gradients = "int4:256:clip" }\n'
    )
    assert [trial.strategy for trial in qgz.trials] == ["qgz"]


def test_the_papers_baseline_keeps_its_flat_rings(read: Read) -> None:
    """Hops and chunks for all strategies do not turn it into hierarchical ZeRO-3, and the suite lists that they were
    left out.
    """
    suite = read(
        '[defaults]\npolicy.chunks = 2\npolicy.reduce = "two_hop"\npolicy.gather = "hierarchical"\n'
        '[matrix]\nstrategy = ["zero3-flat", "zero3"]\n'
    )
    flat, best = sorted(suite.trials, key=lambda trial: trial.strategy, reverse=True)
    assert flat.resolved_policy() == replace(PRESETS["zero3-flat"], align=flat.policy.align)
    assert best.resolved_policy().chunks == 2  # type: ignore[union-attr]
    assert sum("is left out of zero3-flat: " in line for line in suite.left_out) == 3


CELLS = {
    "ablation": 10, "algorithms": 14, "bandwidth": 57, "bits": 90, "block_size": 8, "convergence": 42,
    "reordering": 18, "signs": 30, "feedback": 66, "formats": 84, "generation": 9, "hpz_group": 10,
    "models": 6, "nodes": 14, "offload": 8, "slow_node": 4, "inner_rate": 20, "engine": 62,
    "convergence_long": 48, "equal_memory": 7, "kept_weights": 23,
    "scale_rate": 96, "scale_hpz": 6, "scale_trillion": 6, "scale_nodes": 14,
    "gpu_node": 24, "tutorial_zeropp": 10, "paper_scale": 24, "peers": 25, "quickstart": 7, "smoke": 3,
    "stages": 32, "frontier": 120, "successors": 30, "budget": 30, "rlhf": 5, "largest": 3, "deviations": 42,
    "peers_search": 51, "peers_hook": 15, "ranks": 54, "methods": 60, "lossless": 12, "muon": 48, "schedules": 88,
    "local_steps": 96,
    "ladder": 92, "quickstart_loss": 24,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_suites_ask_what_they_say(path: Path) -> None:
    """Each has the name of its file, states its time, merges no combinations, and leaves no field out."""
    suite = load(path)
    assert suite.name == path.stem
    assert path.read_text(encoding="utf-8").startswith("# Time: ")
    assert suite.time != "not stated"
    assert len({trial.model_copy(update={"repeat": 0}).id for trial in suite.trials}) == CELLS[path.stem]
    assert suite.merged == ()
    assert suite.left_out == ()


@pytest.mark.parametrize("path", sorted(SUITES.parent.glob("results/*/*.tar.xz")), ids=lambda path: path.stem)
def test_suites_of_archives_still_load(path: Path, tmp_path: Path) -> None:
    """The suite text in a run record expands to trials with the ids of its records."""
    with tarfile.open(path) as archive:
        names = archive.getnames()
        runs = [json.load(archive.extractfile(name)) for name in names if "/runs/" in name]  # type: ignore[arg-type]
    ids = {Path(name).stem for name in names if re.fullmatch(r"[^/]+/[0-9a-f]{12}\.json", name)}
    for module in SUITES.glob("*.py"):
        shutil.copy(module, tmp_path)
    loaded = set()
    for run in runs:
        (tmp_path / run["suite"]["name"]).write_text(run["suite"]["text"], encoding="utf-8")
        loaded |= load(tmp_path / run["suite"]["name"]).all_repeats(6).keys()
    assert ids
    assert ids <= loaded


def test_data_follow_from_a_model_of_images(read: Read) -> None:
    """A vision model gets images and as many patches as fit, unless the suite sets them."""
    suite = read('[matrix]\nmodel.name = ["gpt-tiny", "vit-tiny"]\n')
    assert [(t.corpus, t.sequence) for t in suite.trials] == [("stdlib", 128), ("glyphs", 64)]
    suite = read('[defaults]\nmodel.name = "vit-tiny"\nsequence = 16\n')
    assert [(t.corpus, t.sequence) for t in suite.trials] == [("glyphs", 16)]


def test_a_match_on_what_only_generation_has_hits_no_training(read: Read) -> None:
    """An override that matches generations by their tokens leaves trials that train alone."""
    suite = read(
        '[[zip]]\nworkload = ["train", "generate"]\ngenerate.tokens = [32, 8]\n'
        "[[override]]\nmatch = { generate.tokens = 8 }\nset = { steps = 3 }\n"
    )
    assert [(t.workload, t.steps) for t in suite.trials] == [("train", 8), ("generate", 3)]


def test_exclude_and_override(read: Read) -> None:
    """Excludes and overrides match by value, and a list in a match stands for any of its members."""
    suite = read(
        '[matrix]\nstrategy = ["zero3", "hpz", "qgz"]\ncluster.rate = ["1 Gbit/s", "50 Mbit/s"]\n'
        '[[exclude]]\nstrategy = ["hpz", "qgz"]\ncluster.rate = "1000 Mbit/s"\n'
        '[[override]]\nmatch = { strategy = "zero3" }\nset = { steps = 3, cluster.link = "paced" }\n'
    )
    assert {(t.strategy, t.cluster.rate) for t in suite.trials} == {
        ("zero3", 1000.0), ("zero3", 50.0), ("hpz", 50.0), ("qgz", 50.0),
    }  # fmt: skip
    assert all((t.steps == 3) == (t.strategy == "zero3") for t in suite.trials)
    assert all((t.cluster.link == "paced") == (t.strategy == "zero3") for t in suite.trials)


def test_quoted_and_nested_axes(read: Read) -> None:
    """An axis may be a quoted path, a dotted key or a list of tables; free keys reach the model."""
    suite = read('[matrix]\n"model.arguments.layers" = [1, 2]\ncluster = [{ nodes = 1 }, { nodes = 4 }]\n')
    assert {(t.model.arguments["layers"], t.cluster.nodes) for t in suite.trials} == {
        (1, 1), (1, 4), (2, 1), (2, 4),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("skip", FailureResponse()),
        ("stop", FailureResponse(stop=True)),
        ("retry 3", FailureResponse(retries=3)),
        ("retry 10", FailureResponse(retries=10)),
        ("retry 1, then stop", FailureResponse(retries=1, stop=True)),
    ],
)
def test_a_suite_says_what_follows_a_failure(read: Read, text: str, answer: FailureResponse) -> None:
    """It does so for each kind of failure, which changes no trial."""
    suite = read(f'[on_failure]\nkilled = "{text}"\n')
    assert suite.on_failure == {"killed": answer}
    assert suite.trials == read("").trials


CASES = {
    "unknown key at the top": ("matrx = 1\n", "unknown key 'matrx'", "did you mean 'matrix'?"),
    "unknown field": ("[defaults]\nclustr.rate = 1\n", "[defaults] clustr.rate", "mean 'cluster.rate'?"),
    "misspelt strategy": ('[matrix]\nstrategy = ["zero3", "zerop"]\n', '"zerop"', "'zeropp'?"),
    "bits 9": ('[matrix]\npolicy.gradients = ["int9:256"]\n', '"int9:256"', "2 to 8 bits"),
    "one hop of two": ('[defaults]\npolicy.gradients = ["bf16"]\n', '["bf16"]', "or expected a list of two"),
    "hpZ group": ("[matrix]\npolicy.secondary = [2, 3]\n", "policy.secondary = 3", "2 nodes x 2 ranks"),
    "part of a sequence": (
        "[defaults]\ntokens_per_rank = 128\n[matrix]\nsequence = [64, 1000]\n",
        "with sequence = 1000: [defaults] tokens_per_rank = 128: ",
        "expected a multiple of sequence = 1000",
    ),
    "rate without unit": ("[matrix]\ncluster.rate = [50]\n", "[matrix] cluster.rate = 50", "kbit/s, Mbit/s"),
    "unequal zip": (
        "[[zip]]\nseed = [1, 2]\nsteps = [1]\n",
        "seed has 2, steps has 1",
        "equally many values",
    ),
    "axis twice": ("[matrix]\nseed = [1, 2]\n[[zip]]\nseed = [1, 2]\n", "seed", "list each field once"),
    "empty axis": ("[matrix]\nseed = []\n", "seed = []", "a list of at least one value"),
    "text for a number": ('[defaults]\nsteps = "8"\n', '"8"', "expected a valid integer"),
    "no steps": ("[defaults]\nsteps = 0\n", "steps = 0", "greater than or equal to 1"),
    "value for a table": ("[defaults]\ncluster = 5\n", "cluster = 5", "expected an object"),
    "absurd learning rate": ("[defaults]\noptimizer.arguments.lr = 1e9\n", "1e+09", "less than 1000"),
    "repeat as a field": ("[matrix]\nrepeat = [0, 1]\n", "repeat", "`repeats`"),
    "too many": (f"repeats = 3\n[matrix]\nseed = {[*range(MOST_TRIALS)]}\n", "6000 trials", "at most 2000"),
    "no answer": ('[on_failure]\nkilled = "retry"\n', "on_failure.killed", '"skip", "stop", "retry 2"'),
    "too many tries": ('[on_failure]\nkilled = "retry 11"\n', "on_failure.killed", "at most 10"),
    "no repeats": ("repeats = 0\n", "repeats = 0", "expected a whole number above 0"),
    "too few until": ('repeats = "until 2 %, at most 8"\n', "at most 8", "with 9 or more as the last number"),
    "match of nothing": ('[[exclude]]\nstrategy = "ddp"\n', "ddp", "matches no trial"),
    "override without set": ("[[override]]\nmatch = {}\n", "override.0.set", "missing"),
    "nothing left": ("[[exclude]]\nseed = 0\n", "[[exclude]]", "no trial"),
    "syntax error": ("[defaults\n", "not TOML", "line 3"),
}


@pytest.mark.parametrize(("body", "key", "allowed"), CASES.values(), ids=CASES)
def test_refusals(refusal: Refused, body: str, key: str, allowed: str) -> None:
    """An invalid suite is refused in one line with the file, key and value, and what is allowed."""
    text = refusal(body)
    assert key in text
    assert allowed in text


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ('question = "?"\n', "'name' is missing"),
        ('name = "../q"\nquestion = "?"\n', "should match pattern"),
        (f'name = "{"q" * 101}"\nquestion = "?"\n', "at most 100 characters"),
        ('name = 3\nquestion = "?"\n', "expected a valid string"),
    ],
)
def test_refused_heads(refusal: Refused, head: str, message: str) -> None:
    """A suite needs a question, and a name that can be the name of a folder."""
    assert message in refusal("", head)


def test_large_and_endless_files_are_refused(tmp_path: Path) -> None:
    """A suite has at most one megabyte, and is a regular file."""
    (tmp_path / "q.toml").write_bytes(bytes(1 << 20) + b" ")
    with pytest.raises(SuiteError, match="more than 1 MiB"):
        load(tmp_path / "q.toml")
    with pytest.raises(SuiteError, match="/dev/zero: cannot read: a FIFO, a device or a socket"):
        load(Path("/dev/zero"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_traceback(tmp_path: Path, junk: bytes) -> None:
    """Any file is either a suite or refused in one line."""
    file = tmp_path / "q.toml"
    file.write_bytes(junk)
    with pytest.raises(SuiteError) as caught:
        load(file)
    assert "\n" not in str(caught.value)


# DeepSpeed's configurations

STAGE_3 = '{"zero_optimization": {"stage": 3, "zero_quantized_weights": true, "overlap_comm": true}}'


def test_a_deepspeed_configuration_is_a_strategy(tmp_path: Path, read: Read) -> None:
    """A file or an equal table gives the same trial, with the recipe's policy and the configuration's text."""
    (tmp_path / "ds.json").write_text(STAGE_3, encoding="utf-8")
    head = '[defaults]\nstrategy = "recipe"\n'
    of_file = read(head + 'deepspeed_config = "ds.json"\n')
    table = "{ stage = 3, zero_quantized_weights = true, overlap_comm = true }"
    of_table = read(head + f"deepspeed_config.zero_optimization = {table}\n")
    assert of_file.trials == of_table.trials
    assert list(of_file.configurations) == ["ds.json"]
    assert not of_table.configurations
    (trial,) = of_file.trials
    policy = trial.resolved_policy()
    assert policy is not None
    assert policy.weights == parse("int8:2048:clip")
    assert Trial.from_canonical(trial.canonical()) == trial
    (tmp_path / "other.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    files = '[matrix]\ndeepspeed_config = ["ds.json", "other.json"]\n'
    axis = read('[defaults]\nstrategy = "recipe"\n' + files).trials
    assert [policy.stage for trial in axis if (policy := trial.resolved_policy())] == [3, 2]


@pytest.mark.parametrize(
    ("strategy", "fields", "message"),
    [
        ("recipe", "", "strategy = 'recipe': needs deepspeed_config"),
        ("recipe", 'deepspeed_config = "none.json"', "none.json: cannot be read"),
        (
            "recipe",
            'deepspeed_config = "ds.json"\nclip = 0.5',
            "clip = 0.5, but deepspeed_config has gradient_clipping = null",
        ),
        ("recipe", 'deepspeed_config = "ds.json"\naccumulation = 2', "accumulation = 2, but"),
        ("recipe", "deepspeed_config = 3", "expected a valid string"),
        ("recipe", "deepspeed_config.zero_optimization.stge = 3", "mean 'zero_optimization.stage'"),
        ("recipe", 'deepspeed_config.optimizer.type = "AdamW"', "has 'optimizer'"),
        (
            "recipe",
            "deepspeed_config.train_micro_batch_size_per_gpu = 3",
            "4, but deepspeed_config has micro-batch = 3",
        ),
        ("zero3", 'deepspeed_config = "ds.json"', "set strategy = 'recipe'"),
        ("deepspeed", "clip = 0.5\ndeepspeed_config.gradient_clipping = 1.0", "has gradient_clipping = 1.0"),
        (
            "deepspeed",
            "deepspeed_config.gradient_accumulation_steps = 2",
            "accumulation = 1, but deepspeed_config has gradient_accumulation_",
        ),
        (
            "deepspeed",
            "deepspeed_config.train_batch_size = 3",
            "on all ranks = 16, but deepspeed_config has train_batch_size = 3",
        ),
        (
            "deepspeed",
            "deepspeed_config.fp16.enabled = true",
            'compute = "fp32", but deepspeed_config has fp16.enabled = true',
        ),
        ("deepspeed", 'deepspeed_config.scheduler.type = "WarmupLR"', "has 'scheduler'"),
        ("deepspeed", 'workload = "generate"', "strategy 'deepspeed' can only train"),
    ],
)
def test_what_a_trial_says_of_deepspeed_is_said_once(
    tmp_path: Path, refusal: Refused, strategy: str, fields: str, message: str
) -> None:
    """A configuration that contradicts a field of the trial is refused in one line with both values."""
    (tmp_path / "ds.json").write_text(STAGE_3, encoding="utf-8")
    assert message in refusal(f'[defaults]\nstrategy = "{strategy}"\n{fields}\n')


def test_deepspeed_itself_takes_the_configuration_that_a_recipe_reads(tmp_path: Path, read: Read) -> None:
    """Strategies ``recipe`` and ``deepspeed`` may share one file; without a file, DeepSpeed runs its ZeRO-3 as
    shipped.
    """
    (tmp_path / "ds.json").write_text(STAGE_3, encoding="utf-8")
    body = (
        '[matrix]\nstrategy = ["recipe", "deepspeed"]\n[[override]]\n'
        'match = { strategy = ["recipe", "deepspeed"] }\nset = { deepspeed_config = "ds.json" }\n'
    )
    recipe, peer = read(body).trials
    assert (recipe.strategy, peer.strategy) == ("recipe", "deepspeed")
    assert recipe.resolved_policy() is not None
    assert peer.resolved_policy() is None
    assert peer.peer_configuration() == json.loads(STAGE_3)
    (bare,) = read('[defaults]\nstrategy = "deepspeed"\n').trials
    assert bare.peer_configuration() == {"zero_optimization": {"stage": 3}}


def test_the_type_of_peers_leaves_policies_alone(read: Read) -> None:
    """``peer.compute`` changes only peers: a policy in the same suite is the same run, with the same id."""
    head = '[matrix]\nstrategy = ["zero3", "fsdp2-prefetch"]\n'
    plain, peer = read(head).trials
    same, other = read(f'[defaults]\npeer.compute = "bf16"\n{head}').trials
    assert same == plain
    assert other != peer
    assert other.peer.compute == "bf16"
    assert "peer" not in plain.canonical()
    suite = read(f'{head}peer.compute = ["fp32", "bf16"]\n')
    assert Counter(trial.strategy for trial in suite.trials) == {"zero3": 1, "fsdp2-prefetch": 2}


COUNTS = [*field_paths(Trial), "model.arguments.layers"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(path="policy.max_padding", value=2**63)
@given(
    path=st.sampled_from(COUNTS), value=st.integers(2**63, 10**400) | st.integers(-(10**400), -(2**63) - 1)
)
def test_numbers_that_nothing_counts_are_refused(refusal: Refused, path: str, value: int) -> None:
    """In every field, numbers beyond 64 bits or beyond a float are refused with the field's name and what is
    expected.
    """
    text = refusal(f"[defaults]\n{path} = {value}\n")
    assert f"defaults.{path} = " in text
    assert "expected" in text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*range(9), 11, *range(12, 32), *range(127, 160)]), st.booleans())
def test_no_name_and_no_value_holds_a_control_character(refusal: Refused, code: int, key: bool) -> None:
    """Control characters are refused in every text, since a terminal that shows the text would act on them."""
    escaped = f'"x\\u{code:04x}"'
    body = f"[defaults]\nmodel.arguments = {{ {escaped} = 1 }}\n" if key else f"time = {escaped}\n"
    assert "control character" in refusal(body)
