"""Banded fits and time rescaling: gradients, published optima, gains."""

import numpy as np
import pytest

from anyorder import workload as W
from anyorder.errors import PlanError
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import BLT, Banded, Independent, registry
from anyorder.strategy.banded import _BandedLoss, fit_banded
from anyorder.strategy.blt import fit_blt
from anyorder.strategy.dense import fit_dense
from anyorder.strategy.fitting import disjoint
from anyorder.strategy.registry import sensitivity
from anyorder.strategy.rescaled import _RescaledLoss as RescaleLoss
from anyorder.strategy.rescaled import rescale
from anyorder.strategy.toeplitz import Problem, fit_toeplitz
from optimize.test_toeplitz import slope
from references import reference


@pytest.mark.parametrize("participation", [SingleEpoch(12), FixedOrder(12, 3, 4), FixedOrder(11, 3, 4)], ids=repr)
def test_banded_loss_and_gradient(participation: Participation) -> None:
    n = participation.n
    A = W.momentum(n, 0.5, W.cosine(n))
    loss = _BandedLoss(A.matrix(), 4, disjoint(participation))
    x = loss.pack(np.random.default_rng(0).random((4, n)) + 2 * np.eye(4)[:, :1])
    value, gradient = loss(x)
    np.testing.assert_allclose(gradient, slope(loss, x), rtol=1e-5, atol=1e-7 * np.abs(gradient).max())
    strategy = Banded(loss.unpack(x)[0])
    assert sensitivity(strategy, participation).value == pytest.approx(1)
    assert value == pytest.approx(n * registry.rmse(strategy, A, participation) ** 2)


@pytest.mark.parametrize(("n", "bands"), [(64, 4), (256, 8)])
def test_column_normalised_bands_are_no_worse_than_published(n: int, bands: int) -> None:
    found = fit_banded(W.prefix_sum(n), SingleEpoch(n), bands)
    published = reference(f"colnorm_banded_opt_n{n}_b{bands}")["rmse"]
    assert registry.rmse(found, W.prefix_sum(n), SingleEpoch(n)) <= published * (1 + 1e-5)


def test_bands_of_separated_participations() -> None:
    A, participation = W.prefix_sum(128), MinSeparation(128, 16)
    values = reference("dense_banded_equalnorm_n128_b16")
    found = fit_banded(A, participation, 16)
    bound = sensitivity(found, participation)
    assert bound.exact
    assert bound.value == pytest.approx(8**0.5)
    assert registry.rmse(found, A, participation) <= values["sensitivity"] * values["mean_error"] ** 0.5 * (1 + 1e-5)
    toeplitz = fit_toeplitz(Problem(A, participation), 16)
    assert registry.rmse(found, A, participation) < registry.rmse(toeplitz, A, participation)


def test_known_order_gains_by_unequal_columns() -> None:
    A = W.prefix_sum(96)
    fixed, separated = FixedOrder(96, 4, 24), MinSeparation(96, 24, 4)
    unequal = registry.rmse(fit_banded(A, fixed, 24), A, fixed)
    equal = registry.rmse(fit_banded(A, separated, 24), A, separated)
    assert fit_dense(A, fixed).lower < unequal < 0.99 * equal


def test_bands_are_cut_at_the_smallest_distance() -> None:
    assert fit_banded(W.prefix_sum(12), FixedOrder(12, 3, 4), 12).num_bands == 4
    with pytest.raises(PlanError, match="2048"):
        fit_banded(W.prefix_sum(3000), SingleEpoch(3000), 2)


def test_shuffled_epochs_keep_their_bands_apart() -> None:
    A, participation = W.prefix_sum(48), EpochShuffle(3, 16)
    found = fit_banded(A, participation, 6)
    X = found.matrix().T @ found.matrix()
    assert np.abs(X[:16, 16:]).max() == 0
    bound = sensitivity(found, participation)
    assert bound.value == pytest.approx(1)
    assert found.num_bands == 6
    assert registry.rmse(found, A, participation) < 0.7 * registry.rmse(Independent(48), A, participation)


@pytest.mark.parametrize(
    "participation", [SingleEpoch(24), FixedOrder(24, 4, 6), KnownOrder([[t % 5] for t in range(24)])], ids=repr
)
def test_rescaling_gradient_and_gain(participation: Participation) -> None:
    n = 24
    A = W.momentum(n, 0.5)
    base = BLT([0.9, 0.3], [0.2, 0.2], n)
    groups = disjoint(participation)
    X = base.matrix().T @ base.matrix()
    loss = RescaleLoss(
        (A.matrix().T @ A.matrix()) * (base.noising_matrix() @ base.noising_matrix().T),
        [X[g[:, :, None], g[:, None, :]] for g in groups],
        groups,
    )
    x = 0.3 * np.random.default_rng(0).standard_normal(n)
    np.testing.assert_allclose(loss(x)[1], slope(loss, x), rtol=1e-5, atol=1e-6 * loss(x)[0])
    scaled = rescale(base, A, participation)
    assert sensitivity(scaled, participation).value == pytest.approx(1)
    assert registry.rmse(scaled, A, participation) < registry.rmse(base, A, participation)
    assert registry.rmse(scaled, A, participation) >= fit_dense(A, participation).lower


def test_rescaling_gains_what_was_published() -> None:
    A, participation = W.prefix_sum(1000), FixedOrder(1000, 10, 100)
    base = fit_blt(A, participation, 2)
    assert registry.rmse(rescale(base, A, participation), A, participation) <= 11.8902 * (1 + 1e-4)


def test_rescaling_needs_to_know_the_steps() -> None:
    with pytest.raises(PlanError, match="which steps one unit takes"):
        rescale(Independent(12), W.prefix_sum(12), MinSeparation(12, 3, 3))
