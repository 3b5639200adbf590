"""Mutated records, manifests, archives and suites: each ends in one line and status 2, or is harmless."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import multiprocessing
import os
import random
import resource
import sys
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from harness import cli
from harness.records import archive, chained_journal
from harness.records.trial_record import RecordError, digest_of
from harness.suites.trial import Trial
from impl.checkpoint.commit import MANIFEST
from impl.checkpoint.manifest import digest
from tests.harness.test_hostile_files import SUITE
from tests.impl.checkpoint.checkpointed import EMPTY
from tests.report.records import record_of

SECONDS: Final = 10
MEMORY: Final = 500 << 20  # bytes that a command may take beside what the process has already
VALUES: Final = (
    None, True, -1, 0, 1, 1e308, -1e308, 2**62, 2**70, float("nan"), float("inf"), "", "x", "\x1b[2J", "x" * 10_000,
    "9" * 5000, "\ud800", [], {}, [[]], [None], {"": {}}, [0] * 1000, "[/b]", "../../etc/passwd",
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return all (container, key) below a value of JSON."""
    found = list[tuple[Any, Any]]()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found += [(value, key), *places(part)]
    return found


def mutate_tree(data: Any, draw: random.Random) -> Any:
    """Return a copy of a value of JSON with one to three changes of structure, type or size."""
    data = copy.deepcopy(data)
    for _ in range(draw.randint(1, 3)):
        if not (found := places(data)):
            break
        container, key = draw.choice(found)
        change = draw.randrange(5)
        if change == 0:
            del container[key]
        elif change == 1 and isinstance(container, list):
            container.extend([container[key]] * draw.choice((1, 100)))
        elif change == 2:
            other, name = draw.choice(found)
            with contextlib.suppress(LookupError):
                container[key] = copy.deepcopy(other[name])
        else:
            container[key] = copy.deepcopy(draw.choice(VALUES))
    return data


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return bytes with some flipped, cut, repeated or inserted."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 5, 50))):
        place = draw.randrange(len(changed)) if changed else 0
        change = draw.randrange(4)
        if change == 0 and changed:
            changed[place] ^= 1 << draw.randrange(8)
        elif change == 1:
            del changed[place : place + draw.choice((1, 10, len(changed)))]
        elif change == 2:
            changed[place:place] = changed[place : place + 100]
        else:
            changed[place:place] = draw.choice(
                (b"\0", b"\xff\xfe", b"{", b"[" * 100, b"\x1b[2J", b"9" * 5000)
            )
    return bytes(changed)


def text_of(data: Any, sealed: Callable[[Any], str], key: str) -> str:
    """Return JSON with a right digest, if the data can have one."""
    if isinstance(data, dict):
        with contextlib.suppress(ValueError, TypeError):
            data[key] = sealed({name: value for name, value in data.items() if name != key})
    return json.dumps(data)


def mutated_record(folder: Path, draw: random.Random) -> list[tuple[str, ...]]:
    for seed in range(2):
        chained_journal.append(
            folder / "results" / "q", record_of(Trial(steps=2, warmup=0, seed=seed), suite="q")
        )
    path = draw.choice(sorted((folder / "results" / "q").glob("*.json*")))
    content = path.read_bytes()
    if path.suffix == ".json" and draw.random() < 0.8:
        data = mutate_tree(json.loads(content), draw)
        path.write_text(text_of(data, digest_of, "digest"), encoding="utf-8")
    else:
        path.write_bytes(mutate_bytes(content, draw))
    return [("show", "q"), ("show", path.stem), ("show", "q", "--csv"), ("report", "q")]


def mutated_manifest(folder: Path, draw: random.Random) -> list[tuple[str, ...]]:
    path = folder / "checkpoint-000001"
    path.mkdir()
    state = {
        "w": {"parameter": "w", "shape": [2, 3]},
        "b": {"buffer": "float32", "shape": []},
        "e": {"extra": 1},
    }
    optimizers = [{"kind": "AdamW", "parameters": {"w": {"options": {}, "numbers": None}}}]
    full = dataclasses.replace(EMPTY, state=state, optimizers=optimizers, files=[(100, "0" * 64)])
    if draw.random() < 0.8:
        data = mutate_tree(
            {key: value for key, value in json.loads(full.text()).items() if key != "sha256"}, draw
        )
        (path / MANIFEST).write_text(text_of(data, digest, "sha256"), encoding="utf-8")
    else:
        (path / MANIFEST).write_bytes(mutate_bytes(full.text().encode(), draw))
    return [("checkpoints", str(path), "--verify"), ("export", str(path), "out.safetensors")]


def mutated_archive(folder: Path, draw: random.Random) -> list[tuple[str, ...]]:
    """Unpacks by itself: pages of archives are built in further processes."""
    chained_journal.append(folder / "q", record_of(Trial(steps=2, warmup=0), suite="q"))
    path = archive.pack(folder / "q", folder / "packed")
    if draw.random() < 0.4:
        path.write_bytes(mutate_bytes(path.read_bytes(), draw))
    else:
        with tarfile.open(path) as file:
            contents = [(entry, file.extractfile(entry)) for entry in file.getmembers()]
            plain = b"".join(entry.tobuf() + content.read() for entry, content in contents if content)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:xz") as file:
            for number in range(3):
                names = (f"q/{number:012x}.json", "q/../x.json", "/x.json", "q/" + "a" * 300)
                entry = tarfile.TarInfo(draw.choice(names))
                entry.type = draw.choice(
                    (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE)
                )
                entry.linkname, entry.size = "/etc/passwd", 0
                file.addfile(entry, io.BytesIO(mutate_bytes(plain, draw)))
        path.write_bytes(buffer.getvalue())
    before = {file for file in folder.rglob("*") if file.is_file()}
    error = ""
    try:
        archive.unpack(path)
    except RecordError as refused:
        error = str(refused)
    assert "\n" not in error
    if error:
        assert before == {file for file in folder.rglob("*") if file.is_file()}, "something is left behind"
    return []


def mutated_suite(folder: Path, draw: random.Random) -> list[tuple[str, ...]]:
    source = draw.choice(["quickstart", "ablation", "block_size", "peers", "generation"])
    text = (Path(__file__).parents[2] / "suites" / f"{source}.toml").read_text(encoding="utf-8")
    text = draw.choice([text, SUITE])
    lines = text.splitlines()
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(lines))
        key, equals, _ = lines[place].partition("=")
        values = ("-1", "0", "1e308", "nan", "9" * 30, '""', '"x"', "[]", "{}", "[[1]]", "true", "1979-05-27")
        value = draw.choice(values)
        lines[place] = draw.choice(
            (f"{key}{equals} {value}", "", f"{lines[place]}\n{lines[place]}", key, f"[{key}]")
        )
    content = "\n".join(lines).encode()
    (folder / "q.toml").write_bytes(mutate_bytes(content, draw) if draw.random() < 0.3 else content)
    return [("plan", "q.toml", "--json")]


KINDS = (mutated_record, mutated_manifest, mutated_archive, mutated_suite)


def try_one(folder: Path, number: int) -> None:
    """Make the mutation of this number, run the commands that read it, and end the process: 0 if all is well."""
    with (folder / "outcome").open("w", encoding="utf-8", buffering=1) as outcome:
        try:
            os.chdir(folder)
            commands = KINDS[number % len(KINDS)](folder, random.Random(number))
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            for command in commands:
                sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
                status, error = cli.main(command), sys.stderr.getvalue()
                assert status in (0, 1, 2), status
                assert status != 1 or command[0] == "plan", (
                    f"{command}: status 1"
                )  # trials that cannot run here
                assert status != 2 or error.count("\n") == 1, f"{command}: {error}"
                assert "\x1b" not in sys.stdout.getvalue() + error
        except BaseException:
            outcome.write(traceback.format_exc())
            os._exit(1)
        os._exit(0)


def check(folder: Path, number: int) -> None:
    """Try a mutation in a process of its own, with limits of time and memory."""
    process = multiprocessing.get_context("fork").Process(target=try_one, args=(folder, number))
    process.start()
    process.join(SECONDS * 6)  # for several commands, on a busy machine
    if process.is_alive():
        process.kill()
        raise AssertionError(f"mutation {number} does not end")
    assert process.exitcode == 0, f"mutation {number}: {(folder / 'outcome').read_text(encoding='utf-8')}"


@pytest.mark.parametrize("number", range(40))
def test_a_mutated_file_ends_in_one_line(tmp_path: Path, number: int) -> None:
    """No traceback, no file left behind, no control characters, and no more time or memory than is allowed."""
    check(tmp_path, number)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(40, 200))
def test_many_mutated_files_end_in_one_line(tmp_path: Path, number: int) -> None:
    """The same for further mutations."""
    check(tmp_path, number)
