"""Laws of the number of runs: their chances, means, generating functions, draws, and what is refused."""

import math
from decimal import Decimal

import numpy as np
import pytest

from anyorder.budget import Fixed, Geometric, Logarithmic, NegativeBinomial, Poisson
from anyorder.budget.search_privacy import _negative_binomial_chances, from_dict, weight
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource

SECRET = [
    Geometric(7.0), Logarithmic(4.0), NegativeBinomial(-0.5, 3.0), NegativeBinomial(0.5, 6.0),
    NegativeBinomial(4.0, 9.0), NegativeBinomial(1e-9, 4.0), Poisson(5.0), Poisson(0.3),
]  # fmt: skip


def chances(law, most):
    """P(K = k), k = 0 .. most, by logarithms of gamma functions."""
    k = np.arange(most + 1)
    lgamma = np.vectorize(math.lgamma)
    if isinstance(law, Poisson):
        return np.exp(k * math.log(law.mean) - law.mean - lgamma(k + 1.0))
    eta, gamma, result = law.eta, law.gamma, np.zeros(most + 1)
    k = k[1:]
    if eta == 0:
        result[1:] = (1 - gamma) ** k / k / -math.log(gamma)
        return result
    ratio = eta / math.expm1(-eta * math.log(gamma))  # prod (l + eta) / (l + 1) has a factor eta
    rest = lgamma(k + eta) - lgamma(k + 1.0) - math.lgamma(1 + eta)
    result[1:] = ratio * np.exp(k * math.log1p(-gamma) + rest)
    return result


@pytest.mark.parametrize("law", SECRET, ids=str)
def test_chances_mean_and_generating_function_belong_together(law):
    p = chances(law, 20_000)
    k = np.arange(len(p))
    assert math.isclose(p.sum(), 1.0, rel_tol=1e-9)
    assert math.isclose(p @ k, law.mean, rel_tol=1e-6)
    for x in (0.0, 0.3, 0.9, 1.0):
        assert math.isclose(law.pgf(x), float(p @ np.power(x, k)), rel_tol=1e-8, abs_tol=1e-12)
        value, slope = weight(law, 1 - x)
        assert math.isclose(float(value), float(p[1:] @ (k[1:] * np.power(x, k[1:] - 1))), rel_tol=1e-6)
        assert math.isclose(float(slope), -float(p[2:] @ (k[2:] * (k[2:] - 1) * np.power(x, k[2:] - 2))), rel_tol=1e-5)


@pytest.mark.parametrize("law", SECRET, ids=str)
def test_draws_have_the_chances_of_the_law(law):
    source, n = NoiseSource(bytes(32)).derive(str(law).encode()), 4000
    drawn = np.array([law.draw(source, row) for row in range(n)])
    assert drawn.min() >= (0 if isinstance(law, Poisson) else 1)
    p = chances(law, 200)
    cells = [np.arange(i, i + 1) for i in range(6)] + [np.arange(6, 12), np.arange(12, 201)]
    expected = np.array([n * p[cell].sum() for cell in cells])
    expected[-1] += n * max(0.0, 1 - p.sum())
    counted = np.array([np.isin(drawn, cell).sum() for cell in cells])
    counted[-1] += (drawn > 200).sum()
    held = expected > 5
    spread = ((counted - expected)[held] ** 2 / expected[held]).sum()
    assert spread < 30  # chi-squared of at most 7 degrees of freedom: once in ten thousand


@pytest.mark.parametrize("eta", [1e-100, -1e-100, 1e-40, -1e-20])
def test_chances_keep_their_digits_where_eta_is_nearly_nothing(eta):
    law = NegativeBinomial(eta, 10.0)
    source = NoiseSource(bytes(range(32)))
    assert [law.draw(source, row) for row in range(50)] == [Logarithmic(10.0).draw(source, row) for row in range(50)]
    for digits in (60, 90):
        ours, limit = (next(_negative_binomial_chances(one, law.gamma, digits))[1] for one in (eta, 0.0))
        assert abs(ours / limit - 1) < 10 * abs(Decimal(eta)) + Decimal(10) ** (5 - digits)


def test_a_draw_is_a_function_of_key_and_row():
    source = NoiseSource(bytes(range(32)))
    first = [Geometric(30.0).draw(source, row) for row in range(20)]
    assert first == [Geometric(30.0).draw(source, row) for row in range(20)]
    assert len(set(first)) > 5


def test_a_number_that_128_bits_do_not_decide_is_read_further():
    """Words just at a boundary of two k: more of them are read, and the draw does not guess."""

    class Words:
        def __init__(self, tail):
            self.tail = tail
            self.read = 0

        def words(self, row, start, stop):
            self.read = stop
            bits = [1 << 31] + [0] * (stop - 2) + [self.tail if stop > 4 else 0]  # u = 1/2 = P(K = 1), and a little
            return np.array(bits, np.uint32)

    above, exact = Words(7), Words(0)
    assert Geometric(2.0).draw(above) == 2
    assert above.read > 4
    assert exact.words(0, 0, 4).tolist() == [1 << 31, 0, 0, 0]


def test_the_stated_mean_is_kept():
    for eta in (-0.7, -0.5, 0.0, 1e-6, 0.5, 1.0, 3.0, 50.0):
        for mean in (1.01, 2.0, 50.0):
            law = NegativeBinomial(eta, mean)
            assert 0 < law.gamma < 1
            assert math.isclose(float(weight(law, 0.0)[0]), mean, rel_tol=1e-9)
    assert math.isclose(NegativeBinomial(1.0, 50.0).gamma, Geometric(50.0).gamma, rel_tol=1e-12)


def test_laws_are_kept_in_files():
    for law in [*SECRET, Fixed(50)]:
        assert from_dict(law.to_dict()) == law
        assert "runs" in law.describe()
    wrong = ({"kind": "zipf"}, {"kind": "geometric"}, {"kind": "geometric", "mean": 2, "eta": 1}, {"kind": []})
    for bad in (None, {}, [1], *wrong):
        with pytest.raises(ArgumentError, match="law"):
            from_dict(bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0), lambda: Fixed(2.5), lambda: Geometric(1.0), lambda: Geometric(math.inf), lambda: Poisson(0.0),
        lambda: Poisson("5"), lambda: Logarithmic(0.5), lambda: NegativeBinomial(-1.0, 5.0),
        lambda: NegativeBinomial(-2.0, 5.0), lambda: NegativeBinomial(-0.95, 50.0),
        lambda: NegativeBinomial(101.0, 5.0), lambda: NegativeBinomial(1e-300, 10.0),
        lambda: Geometric(2e6), lambda: Geometric(True),
    ],
)  # fmt: skip
def test_what_is_no_law_is_refused(make):
    with pytest.raises(ArgumentError):
        make()


@pytest.mark.parametrize("kind", [Fixed, Geometric, NegativeBinomial, Logarithmic, Poisson])
def test_laws_are_closed(kind):
    with pytest.raises(TypeError, match="must not be subclassed"):
        type("Mine", (kind,), {})
