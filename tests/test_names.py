"""Names say what they hold."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
VAGUE = {
    "asked", "each", "found", "given", "here", "mine", "of", "one", "ours", "own", "said", "theirs", "there",
    "told", "what", "who", "whose", "words",
}  # fmt: skip
FIELDS = {"impl/checkpoint/manifest.py: of", "harness/records/record.py: what"}  # keys of files


def test_names_say_what_they_hold() -> None:
    """No variable, parameter, function or class is called by a word that fits any other as well."""
    vague = []
    for folder in ("docs", "harness", "impl", "report", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    name = node.id
                elif isinstance(node, ast.arg):
                    name = node.arg
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    name = node.name
                else:
                    continue
                place = path.relative_to(ROOT)
                if name.strip("_") in VAGUE and f"{place}: {name}" not in FIELDS:
                    vague.append(f"{place}:{node.lineno}: {name}")
    assert vague == []
