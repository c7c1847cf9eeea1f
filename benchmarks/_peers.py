"""Other packages, each in an environment of its own, made on first use."""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

__all__ = [
    "DIFFPRIVLIB",
    "FLOWER",
    "JAX_PRIVACY",
    "NVFLARE",
    "OPACUS",
    "OPAKE",
    "OPAKE_TRAINERS",
    "PFL",
    "TENSORFLOW",
    "TENSORFLOW_PRIVACY",
    "interpreter",
    "sources",
]

FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "anyorder" / "peers"
OPACUS = ("opacus==1.6.*", "torch==2.13.0")
FLOWER = ("flwr[simulation]==1.41.*", "ray==2.55.1", "torch==2.13.0")
NVFLARE = ("nvflare==2.9.0", "torch==2.13.0", "scipy>=1.13,<2", "filelock>=3.30,<5")  # with what anyorder needs
JAX_PRIVACY = ("jax-privacy==2.0.0",)
PFL = ("pfl==0.6.0", "torch==2.13.0")
DIFFPRIVLIB = ("diffprivlib==0.6.6", "scikit-learn==1.6.1")
OPAKE = ("opake-dpftrl==0.16.1", "torch==2.13.0")
OPAKE_TRAINERS = ("opake-transformers==0.16.1", "trl==1.16.0", "torch==2.13.0")
TENSORFLOW = (
    "tensorflow==2.15.0", "tensorflow-probability==0.22.1", "dp-accounting==0.4.4", "dm-tree==0.1.8", "packaging==22.0",
    "scikit-learn", "absl-py==1.4.0",
)  # fmt: skip
TENSORFLOW_PRIVACY = ("https://github.com/tensorflow/privacy", "03035d5d4a271ac795dab80f5bc1cef82fc3d462")


def interpreter(*packages: str, module: str) -> str:
    """The interpreter of an environment that has the packages; the first one names its folder."""
    folder = FOLDER / packages[0].replace("==", "-").removesuffix(".*")
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", f"import {module}"], check=False).returncode:
        print(f"installing {' '.join(packages)} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, stdout=sys.stderr)
    return str(python)


def sources(address: str, commit: str) -> Path:
    """A folder with a repository's files at a commit, for what its package leaves out."""
    folder = FOLDER / f"{address.rpartition('/')[2]}-{commit[:12]}"
    if not folder.exists():
        print(f"copying {address} into {folder}", file=sys.stderr)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as made:
            for words in (["init"], ["fetch", "--depth", "1", address, commit], ["checkout", commit]):
                subprocess.run(["git", "-C", made, *words, "-q"], check=True, stdout=sys.stderr)
            shutil.copytree(made, folder)
    return folder
