"""The README's loop under a strict type checker."""

import re
import subprocess
import sys
from pathlib import Path

import anyorder

ROOT = Path(__file__).parents[2]


def test_the_loop_of_the_readme_passes_mypy_strict(tmp_path):
    """`make_private` gives back the types that it was given, so that names may be bound again."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert "make_private" in block
    uses = "reveal_type(engine.model)\nreveal_type(engine.loader)\nengine.epsilon(1e-6) + engine.epsilon()\n"
    (tmp_path / "loop.py").write_text(block + uses)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "loop.py"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"MYPYPATH": str(Path(anyorder.__file__).parents[1]), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PrivateModule" in done.stdout
    assert "PrivateLoader" in done.stdout
