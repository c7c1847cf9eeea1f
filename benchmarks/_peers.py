"""Other packages, each in an environment of its own, made on first use."""

import os
import subprocess
import sys
import venv
from pathlib import Path

__all__ = ["FLOWER", "OPACUS", "OPAKE", "PFL", "interpreter"]

FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "anyorder" / "peers"
OPACUS = ("opacus==1.6.*", "torch==2.13.0")
FLOWER = ("flwr[simulation]==1.41.*", "ray==2.55.1", "torch==2.13.0")
PFL = ("pfl==0.6.0", "torch==2.13.0")
OPAKE = ("opake-dpftrl==0.16.1", "torch==2.13.0")


def interpreter(*packages: str, module: str) -> str:
    """The interpreter of an environment that has the packages; the first one names its folder."""
    folder = FOLDER / packages[0].replace("==", "-").removesuffix(".*")
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", f"import {module}"], check=False).returncode:
        print(f"installing {' '.join(packages)} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, stdout=sys.stderr)
    return str(python)
