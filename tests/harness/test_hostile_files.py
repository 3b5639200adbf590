"""Whatever somebody put where a file is expected: one line names the file, and nothing blocks or fills the memory."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import os
import socket
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import Refusal
from harness.lab.formats import units_of
from harness.records import archive, chained_journal
from harness.records.chained_journal import JOURNAL
from harness.records.trial_record import Failure, RecordError
from harness.runs.sweep import locked
from harness.suites.trial import Trial
from impl.checkpoint.commit import MANIFEST
from impl.checkpoint.manifest import Manifest, digest
from tests.harness.conftest import Zeropp
from tests.impl.checkpoint.checkpointed import EMPTY
from tests.report.records import record_of

pytestmark = pytest.mark.timeout(60)
SMALL = '[defaults]\nmodel.name = "gpt-tiny"\nsequence = 32\ntokens_per_rank = 64\n'
SUITE = f'name = "q"\nquestion = "?"\n{SMALL}'
ROOT = Path(__file__).parents[2]
ID = "0123456789ab"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)  # the working folder, since a socket's path has at most 108 characters


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


MAKERS = [fifo, bound_socket, endless]


def put(path: Path, maker: Callable[[Path], None]) -> None:
    """Replace ``path`` by a special file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        maker(path)
    finally:
        os.chdir(here)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a suite, and the records of two of its trials."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.toml").write_text(SUITE, encoding="utf-8")
    for seed in range(2):
        record = record_of(Trial(steps=2, warmup=0, seed=seed), suite="q")
        chained_journal.append(tmp_path / "results" / "q", record)
    return tmp_path


def refused(zeropp: Zeropp, path: Path, *command: object) -> None:
    """Run a command that has to name ``path`` in one line, with status 2."""
    stderr = zeropp(*command, status=2).stderr
    assert stderr.count("\n") == 1, stderr
    assert str(path.name) in stderr
    assert "a FIFO, a device or a socket; expected a regular file" in stderr


@pytest.mark.parametrize("maker", MAKERS)
def test_a_special_file_among_results_is_named(
    folder: Path, zeropp: Zeropp, maker: Callable[[Path], None]
) -> None:
    """As a record, a journal, a trace, or a lock, of every command that reads it."""
    results = Path("results/q")
    record = results / f"{ID}.json"
    put(folder / record, maker)
    for command in (
        ("report", "q"),
        ("show", "q"),
        ("show", ID),
        ("archive", "q", "packed"),
        ("compare", results, results),
    ):
        refused(zeropp, record, *command)
    refused(zeropp, record, "run", "q.toml")
    record.unlink()
    trace = results / "traces" / f"trace-{ID}.json"
    put(folder / trace, maker)
    refused(zeropp, trace, "report", "q")
    trace.unlink()
    put(folder / results / JOURNAL, maker)
    refused(zeropp, Path(JOURNAL), "report", "q")
    put(folder / results / ".lock", maker)
    with pytest.raises(RecordError, match="cannot write there: a FIFO"), locked(results):
        pass


@pytest.mark.parametrize("maker", MAKERS)
def test_a_special_file_in_place_of_an_input_is_named(
    folder: Path, zeropp: Zeropp, maker: Callable[[Path], None]
) -> None:
    """As a suite, a machine, a DeepSpeed configuration, an archive, a manifest or a file of a checkpoint."""
    put(folder / "other.toml", maker)
    refused(zeropp, Path("other.toml"), "plan", "other.toml")
    refused(zeropp, Path("other.toml"), "plan", "q.toml", "--machine", "other.toml")
    put(folder / "ds.json", maker)
    recipe = 'strategy = "recipe"\ndeepspeed_config = "ds.json"\n'
    (folder / "recipe.toml").write_text(
        SUITE.replace("[defaults]\n", f"[defaults]\n{recipe}"), encoding="utf-8"
    )
    refused(zeropp, Path("ds.json"), "plan", "recipe.toml")
    put(folder / "packed" / "q.tar.xz", maker)
    with pytest.raises(RecordError, match=r"q.tar.xz: cannot be unpacked: a FIFO"):
        archive.unpack(folder / "packed" / "q.tar.xz")
    put(folder / "checkpoint-000001" / MANIFEST, maker)
    refused(zeropp, Path(MANIFEST), "checkpoints", "checkpoint-000001")
    put(folder / "some.safetensors", maker)
    with pytest.raises(Refusal, match=r"some.safetensors: cannot be read as safetensors: a FIFO"):
        units_of(folder / "some.safetensors")


@pytest.mark.parametrize("maker", MAKERS)
def test_a_special_file_in_a_checkpoint_is_named(
    folder: Path, zeropp: Zeropp, maker: Callable[[Path], None]
) -> None:
    """Also if the manifest states a size of 0 for it."""
    path = folder / "checkpoint-000001"
    put(path / "rank-00000.safetensors", maker)
    fields = {name: getattr(EMPTY, name) for name in Manifest.__slots__}
    (path / MANIFEST).write_text(Manifest(**{**fields, "files": [[0, "0" * 64]]}).text(), encoding="utf-8")
    refused(zeropp, Path("rank-00000.safetensors"), "checkpoints", path, "--verify")


def packed(path: Path, entries: list[tuple[tarfile.TarInfo, int]]) -> None:
    """Write an archive whose entries have so many zeros each."""
    with tarfile.open(path, "w:xz", preset=0, format=tarfile.GNU_FORMAT) as file:
        for entry, size in entries:
            entry.size = size
            file.addfile(entry, io.BytesIO(bytes(size)))


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_an_archive_that_unpacks_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of the entries' sizes and their number are limited; nothing is left behind."""
    monkeypatch.setattr(archive, "_MOST_IN_ALL", 1 << 30 >> 8)
    monkeypatch.setattr(archive, "_MOST_ENTRIES", 100)
    many = [(tarfile.TarInfo(f"q/{number:012x}.json"), 0) for number in range(101)]
    large = [(tarfile.TarInfo(f"q/{number:012x}.json"), 1 << 20) for number in range(5)]
    for entries in (many, large):
        packed(tmp_path / "q.tar.xz", entries)
        with pytest.raises(
            RecordError, match="holds more than 100 files or 0 GiB in all; nothing was unpacked"
        ):
            archive.unpack(tmp_path / "q.tar.xz")
        assert left(tmp_path) == {"q.tar.xz"}
    packed(tmp_path / "q.tar.xz", large[:4])
    assert len(list(archive.unpack(tmp_path / "q.tar.xz").iterdir())) == 4


@pytest.mark.parametrize(
    "kind",
    [tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.LNKTYPE, tarfile.DIRTYPE],
)
def test_an_entry_that_is_no_plain_file_is_refused(tmp_path: Path, kind: bytes) -> None:
    """Its content is not read: a sparse file, an extended header, a long name, a link or a folder."""
    entry = tarfile.TarInfo(f"q/{ID}.json")
    entry.type = kind
    header = entry.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "q.tar.xz").write_bytes(lzma.compress(header + bytes(10240)))
    with pytest.raises(RecordError, match=f"holds 'q/{ID}.json.*', which is no file of suite q"):
        archive.unpack(tmp_path / "q.tar.xz")
    assert left(tmp_path) == {"q.tar.xz"}


def test_an_archive_that_needs_much_memory_to_decompress_is_refused(tmp_path: Path) -> None:
    """A dictionary of 1 GiB is more than any of our archives has."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    content = bytearray(lzma.compress(bytes(1024), filters=filters))
    (tmp_path / "q.tar.xz").write_bytes(with_dictionary(content, 36))  # 1 GiB
    with pytest.raises(RecordError, match="cannot be unpacked: Memory usage limit exceeded"):
        archive.unpack(tmp_path / "q.tar.xz")
    assert left(tmp_path) == {"q.tar.xz"}


def with_dictionary(content: bytearray, code: int) -> bytes:
    """Return an xz file whose only block states another size of its dictionary."""
    header = content[12 : 12 + 4 * (content[12] + 1)]  # behind the stream's header of 12 bytes
    place = header.index(bytes([lzma.FILTER_LZMA2, 1])) + 2
    header[place] = code
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    return bytes(content[:12] + header + content[12 + len(header) :])


ESCAPES = "\x1b[2J\x1b]0;x\x07\x9b31m\u202e"


def harmless(text: str) -> bool:
    """Return whether a terminal only prints a text."""
    return all(character.isprintable() or character == "\n" for character in text)


def test_control_characters_of_records_do_not_reach_the_terminal(folder: Path, zeropp: Zeropp) -> None:
    """Of questions, names, failures, facts and unknown fields, in every command that prints records."""
    failure = Failure(kind=f"crashed{ESCAPES}", message=f"m{ESCAPES}", log=f"l{ESCAPES}", tail=[ESCAPES])
    for seed in range(2, 5):
        record = record_of(
            Trial(steps=2, warmup=0, seed=seed),
            suite=f"q{ESCAPES}",
            question=f"?{ESCAPES}",
            failure=failure if seed == 3 else None,
            **({} if seed == 3 else {"ran": {f"[/key]{ESCAPES}": ESCAPES}}),
        )
        chained_journal.append(folder / "results" / "q", record)
        zeropp("show", record.id[:8])
    processes = [zeropp("show", "q"), zeropp("show", record.id), zeropp("show", "q", "--json")]
    processes += [
        zeropp("show", "q", "--csv"),
        zeropp("report", "q"),
        zeropp("compare", "results/q", "results/q"),
    ]
    for process in processes:
        assert process.stdout
        assert harmless(process.stdout), process.args
        assert harmless(process.stderr), process.args


def test_control_characters_of_manifests_do_not_reach_the_terminal(folder: Path, zeropp: Zeropp) -> None:
    """The writer, the topology, the stage and the names of optimizers are the checkpoint's author's."""
    path = folder / "checkpoint-000001"
    path.mkdir()
    manifest = dataclasses.replace(
        EMPTY, writer=ESCAPES, topology=ESCAPES, of={"stage": ESCAPES}, optimizers=[{"kind": ESCAPES}]
    )
    (path / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    listed = zeropp("checkpoints", path).stdout
    assert listed.count("\n") == 1
    assert harmless(listed)


MUTATED = {
    "step": "1", "micro_batch": -1, "topology": None, "of": {"stage": 3}, "state": {"w": {"parameter": "w"}},
    "optimizers": [{}], "loss_scale": 1.0, "files": [[1]], "writer": 3,
    "state ": {"w": {"parameter": "w", "shape": [2**62, 2**62]}},
    "state  ": {"w": {"parameter": "w", "shape": [10**12]}},
    "state   ": {"w": {"parameter": "w", "shape": "ab"}},
    "unknown": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATED)
def test_a_manifest_with_a_right_digest_and_wrong_fields_is_refused(
    folder: Path, zeropp: Zeropp, name: str
) -> None:
    """In one line, which names the field; export says the same and writes nothing."""
    path = folder / "checkpoint-000001"
    path.mkdir()
    fields = {key: value for key, value in json.loads(EMPTY.text()).items() if key != "sha256"}
    fields[name.strip()] = MUTATED[name]
    text = json.dumps({**fields, "sha256": digest(fields)})
    (path / MANIFEST).write_text(text, encoding="utf-8")
    for command in (("checkpoints", path), ("export", path, "out.safetensors")):
        stderr = zeropp(*command, status=2).stderr
        assert stderr.count("\n") == 1
        assert f"{MANIFEST}: is not a manifest of a zeropp checkpoint: " in stderr
        assert name.strip() in stderr or "elements" in stderr
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize(
    ("total", "message"),
    [
        ("Infinity", "holds a number that is infinite or NaN; delete the file and run again"),
        ("1e999", "holds a number that is infinite or NaN; delete the file and run again"),
        ("NaN", "holds a number that is infinite or NaN; delete the file and run again"),
        ("0.0", "has a step of 0 s, so that no ratio can be computed"),
        ("-1.0", "has a step of less than 0 s, so that no ratio can be computed"),
    ],
)
def test_seconds_that_no_clock_shows_are_refused(
    folder: Path, zeropp: Zeropp, total: str, message: str
) -> None:
    """Also if the record has the digest of its content."""
    path = next((folder / "results" / "q").glob("*.json"))
    data = json.loads(path.read_text(encoding="utf-8"))
    for rank in data["ranks"]:
        for step in rank["steps"]:
            step["total"] = float(total)
    content = {key: value for key, value in data.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    data["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(data).replace("Infinity", total), encoding="utf-8")
    stderr = zeropp("report", "q", status=2).stderr
    assert stderr.count("\n") == 1
    assert message in stderr
    zeropp("show", "q", status=2 if "infinite" in message else 0)


TOO_LARGE = {
    "a billion layers": "[defaults]\nmodel.arguments.layers = 1000000000\n",
    "a million layers": "[defaults]\nmodel.arguments.layers = 1000000\n",
    "layers as a field": "[defaults]\nmodel.layers = 1000000000\n",
    "dotted keys": "[defaults]\n" + "".join(f"policy.k{number}.b = {number}\n" for number in range(5000)),
    "arguments": "[defaults]\n" + "".join(f"model.arguments.a{number} = 1\n" for number in range(5000)),
    "axes": "[matrix]\n" + "".join(f"model.arguments.a{number} = [1]\n" for number in range(5000)),
    "a deep key": f"[defaults]\n{'.'.join('a' * 5000)} = 1\n",
    "values of one axis": f"[matrix]\nseed = {[*range(3000)]}\n",
    "repeats": "[defaults]\nsteps = 2\n",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_suite_that_is_too_large_is_refused_within_seconds(folder: Path, name: str) -> None:
    """In one line, with 500 MB of memory beside what a process takes anyway."""
    head = 'name = "q"\nquestion = "?"\n' + ("repeats = 1000000000\n" if name == "repeats" else "")
    (folder / "q.toml").write_text(head + TOO_LARGE[name], encoding="utf-8")
    refused_in_a_process(folder, "plan" if "layers" not in name else "run", "q.toml")


def test_a_billion_sweeps_are_refused_within_seconds(folder: Path) -> None:
    """Before any trial is made."""
    assert "at most 2000" in refused_in_a_process(folder, "run", "q.toml", "--sweeps", "1000000000")


def refused_in_a_process(folder: Path, *command: str) -> str:
    """Run a command in a process with limited memory and time; it ends with one line and status 2."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES)); "
        "from harness.cli import main; sys.exit(main())"
    ).replace("BYTES", str(500 << 20))
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=folder, capture_output=True, text=True, check=False, timeout=30, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr
