"""Pure files stay pure."""

from __future__ import annotations

import subprocess
import sys

PURE = (
    "codecs.codec plan.topology plan.shard_layout plan.policy plan.traffic plan.memory "
    "plan.prefetch_schedule checkpoint.manifest checkpoint.commit"
)


def test_pure_files_import_no_torch() -> None:
    """Importing every pure file of the engine imports neither torch nor cupy."""
    names = ", ".join(f"impl.{name}" for name in PURE.split())
    code = f"import {names}, sys; sys.exit(bool({{'torch', 'cupy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
