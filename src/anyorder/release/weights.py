"""Which weights a certificate is of: a digest for each tensor that was released, looked for in the file of a model."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from anyorder import checks
from anyorder.errors import CertificateError
from anyorder.formatting import counted
from anyorder.plan.certificate import Certificate

_STORED = {".pt", ".pth", ".bin", ".ckpt"}


def digests(values: Any) -> tuple[str, ...]:
    """SHA-256 of each tensor or array in nested dicts and lists, sorted, each once: of its type, sizes and bytes.

    Names are not in it: whatever a stranger calls the tensors, or leaves beside them (frozen layers, an optimizer's
    state), what was released is released, and what is made of it alone costs nothing.

    Raises: CertificateError for tensors of which this process holds a part only.
    """
    leaves = pytree.tree_leaves(values)
    return tuple(sorted({_digest(leaf) for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray))}))


def digests_of_file(path: Path) -> set[str]:
    """What a file of a model can be known by: its own SHA-256, and the digests of the tensors that are in it.

    Args:
        path: of torch.save, safetensors, numpy.save or numpy.savez; of any other file there is its own SHA-256 alone.
    Raises: CertificateError if it cannot be read. Nothing in it is executed.
    """
    try:
        with open(path, "rb") as file:
            own = hashlib.file_digest(file, "sha256").hexdigest()
        return {own, *digests(_read(path))}
    except CertificateError:
        raise
    except Exception as problem:
        raise CertificateError(f"the model {path} cannot be read: {type(problem).__name__}") from problem


def check_model(certificate: Certificate | None, path: Path) -> None:
    """Raise CertificateError unless all weights that a certificate names are in the file of a model; see `digests`."""
    if certificate is None:
        raise CertificateError("the file is a plan, which has not run: a model belongs to a certificate")
    if not certificate.weights:
        raise CertificateError("the certificate names no model: it is of an earlier version, or nobody said which")
    if missing := set(certificate.weights) - digests_of_file(path):
        raise CertificateError(
            f"the certificate is of another model than {path}: {len(missing)} of its "
            f"{counted(len(certificate.weights), 'digest')} are of nothing in that file. It names the weights of the "
            "moment when it was taken: for those of the best epoch, load them into model.module, and then call "
            "certificate()"
        )


def _read(path: Path) -> Any:
    kind = path.suffix.lower()
    if kind in _STORED:
        return torch.load(path, map_location="cpu", weights_only=True)
    if kind == ".safetensors":
        purpose = "reading a model of this format"
        return checks.optional("safetensors.torch", extra="huggingface", purpose=purpose).load_file(path)
    if kind in (".npy", ".npz"):
        found = np.load(path, allow_pickle=False)
        return dict(found) if kind == ".npz" else found
    return None


def _digest(value: Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if hasattr(value, "to_local"):
        raise CertificateError("weights of which each process holds a part have no digest: gather them first")
    plain = value.detach().cpu().contiguous()
    if type(plain) is not Tensor:
        plain = plain.as_subclass(Tensor)
    found = hashlib.sha256(json.dumps([str(plain.dtype), list(plain.shape)]).encode())
    found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
