"""Regenerates all tables of the documentation, and prints the pages that changed."""

from __future__ import annotations

import sys

from docs.tables import COMPILED, DOCS, METRICS, PAGES, current_page
from tests.support.cubin import missing

for name in (*PAGES, METRICS, *COMPILED):
    path = DOCS / name
    page = path.read_text(encoding="utf-8")
    if name in COMPILED and (without := missing()):
        sys.stdout.write(f"{path}: is not regenerated ({without}); tox -e compile installs what is needed\n")
        continue
    if (changed := current_page(name, page)) != page:
        path.write_text(changed, encoding="utf-8")
        sys.stdout.write(f"{path}\n")
