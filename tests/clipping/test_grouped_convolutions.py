"""Per-example gradients of a convolution by one convolution with the examples as groups, against one at a time."""

import pytest
import torch

from anyorder.clipping.norms import ConvolutionUse, Geometry, UnitMap, Weights, settle

CASES = {
    "padded": (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), 32, 48, (16, 16)),
    "two groups, stride, dilation": (Geometry((3, 3), (2, 1), (1, 0), (1, 2), 2), 64, 32, (33, 16)),
    "one dimension": (Geometry((5,), (1,), (0,), (1,), 1), 16, 16, (200,)),
    "three dimensions": (Geometry((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1), 16, 16, (6, 6, 6)),
}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("contiguous", [True, False])
def test_norms_and_sum_are_those_of_each_example_alone(case: str, contiguous: bool) -> None:
    geometry, channels, out, size = CASES[case]
    batch, zeros = 19, [0] * len(size)
    torch.manual_seed(0)
    x = torch.randn(batch, *size, channels).movedim(-1, 1)
    x = x.contiguous() if contiguous else x
    w = torch.randn(out, channels // geometry.groups, *geometry.kernel)
    settings = geometry.stride, geometry.padding, geometry.dilation, False, zeros, geometry.groups
    g = torch.randn_like(torch.convolution(x, w, None, *settings))

    def alone(i: int) -> torch.Tensor:
        one = torch.func.vjp(lambda w: torch.convolution(x[i : i + 1].double(), w, None, *settings), w.double())[1]
        return one(g[i : i + 1].double())[0]

    gradients = torch.stack([alone(i) for i in range(batch)])
    use = ConvolutionUse(x, g, geometry, batch, torch.float32)
    assert use.grouped
    use.compiled = False
    found = settle([use], UnitMap.of(torch.arange(batch), x.device))
    norms = gradients.flatten(1).norm(dim=1)
    assert found.squares.sqrt().numpy() == pytest.approx(norms.numpy(), rel=1e-5)
    weights = torch.rand(batch)
    expected = (weights.double().view(-1, *(1 for _ in w.shape)) * gradients).sum(0)
    assert (found.total(Weights(weights, weights)) - expected).norm() <= 1e-5 * expected.norm()
    rows = torch.tensor([4, 0, 7])
    assert (use.gradients(rows) - gradients[rows]).norm() <= 1e-5 * gradients[rows].norm()
