"""Matrix products on the CPU by the faster of torch's two libraries."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear", "product"]

# Not a documented function of torch: where a release is without it, its own choice is taken.
_linear_by_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The (m, n) matrix x weight^T + bias of x (m, k), weight (n, k), bias (n,). Not differentiable.

    In float32 on the CPU by oneDNN: `torch.mm` takes MKL, which is slower on processors that are not Intel's, the more
    so for a small m with several threads.
    """
    if _linear_by_onednn is not None and _suits_onednn(x) and _suits_onednn(weight):
        result: Tensor = _linear_by_onednn(x, weight, bias, "none", [], "")
        return result
    return F.linear(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The (m, n) matrix a b of a (m, k) and b (k, n), each stored by rows or by columns; see `linear`."""
    return linear(a, b.t())


def _suits_onednn(matrix: Tensor) -> bool:
    return (
        matrix.dtype == torch.float32
        and matrix.device.type == "cpu"
        and matrix.numel() > 0
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )
