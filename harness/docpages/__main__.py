"""Regenerate all tables of the documentation, and print which pages changed."""

from __future__ import annotations

import sys

from harness.docpages import DOCS, PAGES, refreshed

for name, render in PAGES.items():
    path = DOCS / name
    page = path.read_text(encoding="utf-8")
    if (fresh := refreshed(page, render())) != page:
        path.write_text(fresh, encoding="utf-8")
        sys.stdout.write(f"{path}\n")
