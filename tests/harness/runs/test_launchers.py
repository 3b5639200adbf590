"""Suites across hosts, which are network namespaces here: no shared file system, no variables to set."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.cluster.control import Place, place_under_torchrun
from harness.errors import Refusal
from harness.records.record import read_all
from tests.support.hosts import hosts, torchrun

SUITE = """
name = "walk"
question = "Does a sweep across hosts always finish?"
time = "a minute"

[defaults]
model.name = "faulty:model"
sequence = 32
tokens_per_rank = 64
steps = 2
warmup = 1
validate_every = 0
validation_batches = 1
measure_quantisation = false
timeout_seconds = 15
policy.max_padding = 0.5

[defaults.cluster]
nodes = 2
ranks_per_node = 2
launcher = "torchrun"

[matrix]
strategy = ["zero3", "qgz"]
seed = [0, 1, 2, 3]

[[override]]
match = { strategy = "qgz", seed = 0 }
set = { model.arguments = { fault = "crash" } }
[[override]]
match = { strategy = "qgz", seed = 1 }
set = { model.arguments = { fault = "hang" } }
[[override]]
match = { strategy = "qgz", seed = 2 }
set = { model.arguments = { fault = "memory" } }
"""


def test_a_suite_with_failing_ranks_finishes_across_hosts(tmp_path: Path) -> None:
    """Two hosts, torchrun on each: of eight trials one crashes, one hangs and one runs out of memory on one
    rank of the other host; five are results, records and report are on the first host, and a second run
    does nothing more.
    """
    files = {"walk.toml": SUITE, "faulty.py": (Path(__file__).parent / "faulty.py").read_text()}
    with hosts(2, tmp_path, files) as both:
        assert torchrun(both, ["run", "walk.toml"]) == [1, 1], both[0].output
        first, second = both
        assert not list(second.folder.rglob("*.json"))
        own, _, _ = second.output.partition("failed (exitcode")  # what follows is torchrun's
        assert "Traceback" not in own
        records = {record.id: record for record in read_all(first.folder / "results" / "walk")}
        kinds = sorted(record.failure.kind for record in records.values() if record.failure is not None)
        assert kinds == ["crashed", "memory", "timeout"]
        assert len(records) == 8
        for record in records.values():
            assert record.link is not None
            assert (record.link.kind, record.link.why) == ("real", "distinct hosts")
            if record.failure is None:
                assert [rank.node for rank in record.ranks] == [0, 0, 1, 1]
                assert record.predicted is not None
                assert record.predicted.equal
            else:
                assert re.search(r"rank (2, )?3", record.failure.message)
                assert record.failure.tail
                assert record.failure.log is not None
                assert (first.folder / "results" / "walk" / record.failure.log).is_file()
        assert (first.folder / "results" / "walk" / "report.html").is_file()
        before = {path: path.read_bytes() for path in first.folder.rglob("*.json")}
        assert torchrun(both, ["run", "walk.toml"]) == [1, 1]
        assert {path: path.read_bytes() for path in first.folder.rglob("*.json")} == before
        assert "3 of 8 trials failed before; --retry-failed runs them again" in first.output


def test_the_place_follows_from_torchruns_variables() -> None:
    """The first process of a node is its supervisor, the others wait; without torchrun there is no place."""
    told = {
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1",
        "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    assert place_under_torchrun({}) is None
    assert place_under_torchrun(told) == Place(1, 2, "10.0.0.1", 29500, serves=False, prefix="zeropp/0")
    idle = place_under_torchrun(told | {"LOCAL_RANK": "1", "GROUP_RANK": "0"})
    assert idle is not None
    assert idle.waits
    assert idle.follows
    with pytest.raises(Refusal, match="GROUP_RANK = '' in the environment"):
        place_under_torchrun({name: value for name, value in told.items() if name != "GROUP_RANK"})
    with pytest.raises(Refusal, match=json.dumps("MASTER_PORT")[1:-1]):
        place_under_torchrun(told | {"MASTER_PORT": "x"})
