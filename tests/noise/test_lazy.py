"""Noise that is added late has the joint law of the dense run: covariances by linear maps, nothing sampled."""

import itertools

import mpmath
import numpy as np
import pytest
from scipy.stats import chi2

from anyorder.errors import ArgumentError, CheckpointError, PlanError
from anyorder.noise import NoiseSource, lazy
from anyorder.noise import lazy as lazy_maps
from anyorder.noise.lazy import Jumps, Maps
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, SquareRoot, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.registry import KINDS, Structure
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT
from anyorder.workload import Workload

N = 29
CAN = {
    name: make
    for kind in KINDS
    for name, make in kind.examples.items()
    if kind.structure not in (Structure.DENSE, Structure.TREE, Structure.RESCALED)
    and kind.cls.recurrences is not Strategy.recurrences
} | {
    "rescaled blt": lambda n: Rescaled(BLT([0.9, 0.4], [0.2, 0.1], n), np.linspace(1, 3, n)),
    "slow blt": lambda n: BLT([1 - 1e-7, 1.0, 0.9], [1e-4, 1e-3, 0.3], n),
    "seven bands": lambda n: ToeplitzBanded(0.8 ** np.arange(7), n),
}
OPTIMIZERS = {"sgd": {}, "momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.7, "nesterov": True}}
_STEP = np.arange(N)
RATES = {
    "constant": (np.full(N, 0.1), np.full(N, 0.5)),
    "decay": (0.1 / (1 + _STEP), np.full(N, 0.5)),
    "drops": (0.1 ** (1.0 + _STEP // 11), 0.5 + (_STEP > 17)),
    "warm": (0.1 * np.minimum(_STEP / 5, 1), np.full(N, 0.5)),
}


def recorded(jumps, lr, scale):
    for t in range(len(lr)):
        jumps.record(t, lr[t], scale[t])
    return jumps


def patterns(n, count=4):
    """Steps at which a row is touched: never, always, adjacent ones, the ends, by chance."""
    rng = np.random.default_rng(5)
    chance = [np.flatnonzero(rng.random(n) < p).tolist() for p in np.linspace(0.05, 0.6, count)]
    return [[], list(range(n)), [3, 4, 5, 20, 21], [0, n - 1], [n - 1], *chance]


def carried(jumps, touched, n, over=None):
    """Maps of theta from the normals and from the gradients, when it is read: before touched steps, after, at the end.

    Returns: stops, (stops, normals), (stops, n).
    """
    over = over or jumps.over
    D = jumps.size
    noise, gradient, last = np.zeros((D, 0)), np.zeros((D, n)), 0
    stops, made, moved, ids = [], [], [], []

    def jump(stop):
        nonlocal noise, gradient, last
        Phi, R, rows, which = over([last], stop)
        noise = np.concatenate([Phi[which[0]] @ noise, R[which[0]]], axis=1)
        gradient = Phi[which[0]] @ gradient
        ids.extend(rows[which[0]].tolist())
        last = stop

    for t in touched:
        jump(t)
        stops.append(t)
        made.append(noise[-1])
        moved.append(gradient[-1])
        jump(t + 1)
        gradient = gradient.copy()
        gradient[:, t] += jumps.input(t)
        stops.append(t + 1)
        made.append(noise[-1])
        moved.append(gradient[-1])
    jump(n)
    stops.append(n)
    made.append(noise[-1])
    moved.append(gradient[-1])
    assert len(set(ids)) == len(ids)
    width = noise.shape[1]
    return np.array(stops), np.array([np.pad(row, (0, width - len(row))) for row in made]), np.array(moved)


def dense(strategy, lr, scale, optimizer):
    """(n + 1, rows of Z) and (n + 1, n): iterates 0 .. n of the dense run, from Z and from the private means' own."""
    n = strategy.n
    A = Workload(n, learning_rates=lr, **optimizer).apply(np.eye(n)) if lr.any() else np.zeros((n, n))
    K = scale[:, None] * strategy.noising_matrix()
    return [-np.concatenate([np.zeros((1, m.shape[1])), m]) for m in (A @ K, A)]


def difference(strategy, touched, lr, scale, optimizer, jumps=None, over=None):
    """The largest difference of covariances, in units of the deviations, and of what gradients do."""
    jumps = jumps or recorded(Jumps(strategy, **optimizer), lr, scale)
    return _difference(jumps, touched, *dense(strategy, lr, scale, optimizer), over)


def differences(strategy, lr, scale, optimizer):
    """The largest of all patterns, from one `Jumps`: what it gives depends on nothing that was asked before."""
    jumps, (Z, G) = recorded(Jumps(strategy, **optimizer), lr, scale), dense(strategy, lr, scale, optimizer)
    return np.max([_difference(jumps, touched, Z, G) for touched in patterns(strategy.n)], axis=0)


def _difference(jumps, touched, Z, G, over=None):
    n = G.shape[1]
    stops, made, moved = carried(jumps, touched, n, over)
    expected = (Z @ Z.T)[np.ix_(stops, stops)]
    deviation = np.sqrt(np.diag(expected))
    unit = np.maximum(np.outer(deviation, deviation), 1e-300)
    own = np.zeros_like(moved)
    own[:, touched] = G[stops][:, touched]
    own *= np.arange(n) < stops[:, None]
    return (np.abs(made @ made.T - expected) / unit).max(), np.abs(moved - own).max()


@pytest.mark.parametrize("name", CAN)
def test_covariances_are_those_of_the_dense_run(name):
    strategy = CAN[name](N)
    for optimizer, rates in itertools.product(OPTIMIZERS, RATES):
        noise, gradient = differences(strategy, *RATES[rates], OPTIMIZERS[optimizer])
        assert noise < 1e-12, (optimizer, rates)
        assert gradient < 1e-13, (optimizer, rates)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_short_runs(n):
    for name, make in CAN.items():
        if name == "seven bands":
            continue  # more bands than steps are none
        for touched in ([], [0], [n - 1], list(range(n))):
            strategy, (lr, scale) = make(n), (np.full(n, 0.1), np.full(n, 2.0))
            assert max(difference(strategy, touched, lr, scale, {"momentum": 0.5})) < 1e-12


def test_planted_faults_are_seen():
    """A hundredth of a percent in one number of Phi, R or the input."""
    strategy, (lr, scale) = CAN["blt"](N), RATES["decay"]
    optimizer, touched = {"momentum": 0.9}, [3, 9, 20]

    def worst(phi=1.0, r=1.0, b=1.0):
        jumps = recorded(Jumps(strategy, **optimizer), lr, scale)
        own, into = jumps.over, jumps.input

        def over(starts, stop):
            Phi, R, rows, which = own(starts, stop)
            Phi, R = Phi.copy(), R.copy()
            Phi[:, -1, 0] *= phi
            R[:, -1] *= r
            return Phi, R, rows, which

        jumps.input = lambda t: into(t) * b
        return max(difference(strategy, touched, lr, scale, optimizer, jumps, over))

    assert worst() < 1e-12
    assert min(worst(phi=1.0001), worst(r=1.0001), worst(b=1.0001)) > 1e-6


@pytest.mark.parametrize("rates", RATES)
def test_jumps_from_many_starts_are_those_from_each(rates):
    """Bit for bit, whatever was asked for before, also after a resume."""
    strategy, n = CAN["blt"](N), N
    lr, scale = RATES[rates]
    one = recorded(Jumps(strategy, momentum=0.5), lr, scale)
    rng = np.random.default_rng(1)
    live = Jumps(strategy, momentum=0.5)
    for stop in range(n + 1):
        starts = rng.integers(0, stop + 1, 7)
        many = live.over(starts, stop)
        resumed = Jumps(strategy, momentum=0.5)
        resumed.load_state_dict(live.state_dict())
        for k, start in enumerate(starts):
            for other in (one, resumed):
                single = other.over([start], stop)
                w = min(single.R.shape[2], many.R.shape[2])
                at = many.which[k]
                assert many.Phi[at].tobytes() == single.Phi[0].tobytes()
                assert many.R[at][:, :w].tobytes() == single.R[0][:, :w].tobytes()
                assert not many.R[at][:, w:].any()
                assert not single.R[0][:, w:].any()
                assert many.rows[at][:w].tolist() == single.rows[0][:w].tolist()
        if stop < n:
            live.record(stop, lr[stop], scale[stop])
    backwards = [one.over([2, 3], stop).R[:, :, :1].tobytes() for stop in (20, 7, 20)]
    assert (
        backwards[0]
        == backwards[2]
        == recorded(Jumps(strategy, momentum=0.5), lr, scale).over([2, 3], 20).R[:, :, :1].tobytes()
    )


def test_a_full_cache_begins_anew(monkeypatch):
    """Lengths that were known, and are asked for with new ones, among them."""
    rates = RATES["constant"]
    roomy = recorded(Jumps(CAN["blt"](N)), *rates)
    roomy.over([0], N)  # makes its cache
    monkeypatch.setattr(lazy_maps, "_CACHE", 16 * 9 * 12)  # twelve maps of 3 x 3, four of them of the first lengths
    tight = recorded(Jumps(CAN["blt"](N)), *rates)
    rng = np.random.default_rng(2)
    for _ in range(60):
        starts = rng.integers(0, N, rng.integers(1, 14))
        one, other = roomy.over(starts, N), tight.over(starts, N)
        assert one.Phi.tobytes() == other.Phi.tobytes()
        assert one.R.tobytes() == other.R.tobytes()


@pytest.mark.parametrize("name", ["blt", "banded"])
def test_a_loaded_state_forgets_the_steps_of_other_rates(name):
    drops = recorded(Jumps(CAN[name](N)), *RATES["drops"])
    loaded = recorded(Jumps(CAN[name](N)), *RATES["decay"])
    loaded.over([0, 4, N - 1], N)
    loaded.over([4], 5)
    loaded.load_state_dict(drops.state_dict())
    for starts, stop in (([4], 5), ([0, 4, N - 1], N)):
        for made, right in zip(loaded.over(starts, stop), drops.over(starts, stop), strict=True):
            assert made.tobytes() == right.tobytes()


@pytest.mark.parametrize("high", [40, 10_000])
def test_distinct_starts_are_found_by_either_way(high):
    """Dense ones without sorting: what `np.unique` gives."""
    rng = np.random.default_rng(0)
    for kind in (np.int32, np.int64, np.uint8):
        given = rng.integers(3, min(high, 256), 20).astype(kind)
        expected = np.unique(given.astype(np.int64), return_inverse=True)
        for made, right in zip(lazy._distinct(given, int(given.min()), high), expected, strict=True):
            assert made.dtype == np.int64
            assert (made == right).all()


def test_row_ids_tell_intervals_apart():
    n = 9
    jumps = recorded(Jumps(BLT([0.9, 0.5], [0.1, 0.1], n), momentum=0.5), np.ones(n), np.ones(n))
    seen = {}
    for stop in range(1, n + 1):
        jump = jumps.over(np.arange(stop), stop)
        for start in range(stop):
            for row in jump.rows[jump.which[start]].tolist():
                assert seen.setdefault(row, (start, stop)) == (start, stop)
                assert all((row >= jumps.first_row(t)) == (stop > t) for t in range(n))
    assert max(seen) < jumps.first_row(n)


def test_jumps_of_one_step_take_one_normal_and_none_take_none():
    jumps = recorded(Jumps(CAN["blt"](N)), *RATES["constant"])
    assert jumps.over([5, 5], 6).R.shape == (1, 3, 1)
    assert jumps.over([4, 5], 6).R.shape == (2, 3, 2)
    assert jumps.over([0, 5], 6).R.shape == (2, 3, 3)
    same = jumps.over([6, 6], 6)
    assert same.R.shape == (1, 3, 0)
    assert same.rows.shape == (1, 0)
    assert (same.Phi == np.eye(3)).all()
    assert jumps.over([], 6).which.shape == (0,)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Dense(np.eye(4)), "dense cannot be added late"),
        (SquareRoot(4), "square root cannot"),
        (Rescaled(SquareRoot(4), np.ones(4)), "square root cannot"),
        (Rescaled(Tree(4), np.ones(4)), "tree, rescaled cannot"),
        (Tree(4, "online"), "online estimator cannot"),
        (Banded(np.tril(np.ones((80, 80)))), "79 further tables"),
        (Independent(2**62), "2\\^63"),
    ],
)
def test_strategies_that_cannot_jump_are_refused(strategy, message):
    with pytest.raises(PlanError, match=message):
        Jumps(strategy)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda j: Jumps(Independent(4), nesterov=True), "nesterov needs a momentum"),
        (lambda j: Jumps(Independent(4), momentum=1.0), "momentum"),
        (lambda j: j.record(0, 0.1, 1.0), "t must be 2, got 0"),
        (lambda j: j.record(2, -0.1, 1.0), "lr must be"),
        (lambda j: j.record(2, 0.1, np.nan), "scale must be"),
        (lambda j: j.over([0], 3), "stop must be"),
        (lambda j: j.over([2], 1), "starts must be"),
        (lambda j: j.over([-1], 1), "starts must be"),
        (lambda j: j.over([0.5], 1), "starts must be"),
        (lambda j: j.input(2), "t must be"),
    ],
)
def test_arguments_out_of_their_rules(call, message):
    jumps = recorded(Jumps(Independent(4)), np.ones(2), np.ones(2))
    with pytest.raises(ArgumentError, match=message):
        call(jumps)
    assert jumps.recorded == 2


@pytest.mark.parametrize("rates", [None, np.ones((5, 2)), np.ones((2, 3)), -np.ones((1, 2)), [[1.0, 1.0]]])
def test_a_malformed_state_is_refused(rates):
    jumps = recorded(Jumps(Independent(4)), np.ones(2), np.ones(2))
    with pytest.raises(CheckpointError, match="rates"):
        jumps.load_state_dict({"rates": rates})
    assert jumps.recorded == 2


def test_a_restarted_blt_and_a_banded_inverse_keep_what_they_say():
    assert Jumps(RestartedBLT([[0.9, 0.5]], [[0.1, 0.1]], [0.5], [1.0], 8, 8), momentum=0.9).kept == 4
    assert Jumps(BandedInverse([1.0, -0.5, -0.2], 8)).kept == 2
    assert Jumps(Independent(8)).kept == 0
    assert Jumps(Independent(8)).width == 1


def sampled(jumps, touched, lr, scale, coordinates):
    """(stops, coordinates) of theta, from the normals that the jumps name."""
    source = NoiseSource(bytes(range(32)))
    s, last, stops, made = np.zeros((jumps.size, coordinates)), 0, [], []
    for stop in sorted({*touched, *(t + 1 for t in touched), jumps.n} - {0}):
        jump = jumps.over([last], stop)
        z = source.normal_at(jump.rows[0], np.zeros(jump.rows.shape[1], np.int64), coordinates)
        s = jump.Phi[0] @ s + jump.R[0] @ z
        last = stop
        stops.append(stop)
        made.append(s[-1])
    return stops, np.array(made)


@pytest.mark.parametrize("name", ["blt", "banded inverse", "restarted", "independent"])
def test_iterates_that_are_drawn_are_white_after_the_dense_covariance(name):
    strategy, (lr, scale), count = CAN[name](N), RATES["drops"], 40_000
    jumps = recorded(Jumps(strategy, momentum=0.9), lr, scale)
    for touched in patterns(N)[:3]:
        stops, theta = sampled(jumps, touched, lr, scale, count)
        Z, _ = dense(strategy, lr, scale, {"momentum": 0.9})
        white = np.linalg.solve(np.linalg.cholesky((Z @ Z.T)[np.ix_(stops, stops)]), theta)
        found = white @ white.T / count
        assert np.abs(found - np.eye(len(stops))).max() < 5.5 * np.sqrt(2 / count)
        assert 1e-4 < chi2.cdf(np.square(white).sum(), white.size) < 1 - 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("steady", [True, False])
def test_slow_decays_and_many_steps_lose_no_digits(steady, momentum):
    """Against 50 digits: decays within 1e-7 of 1, 10^5 steps; by length, and step by step."""
    decays, scales, n = [1 - 1e-7, 0.9999, 0.99, 0.9, 0.5], [3e-3, 1e-2, 3e-2, 8e-2, 0.2], 10**5
    jumps = Jumps(BLT(decays, scales, n), momentum=momentum)
    rates = np.tile([0.1, 0.5], (n, 1))
    rates[-1, 0] = 0.1 if steady else np.nextafter(0.1, 1)  # which makes no difference that is seen here
    jumps.load_state_dict({"rates": rates})
    for length in (7, 1000, n):
        Phi, R, _, _ = jumps.over([n - length], n)
        moved, covariance = exactly(decays, scales, 0.1, 0.5, momentum, length)
        deviation = np.sqrt(np.diag(covariance))
        assert np.abs(R[0] @ R[0].T - covariance).max() > 0  # another way to the same numbers
        assert (np.abs(R[0] @ R[0].T - covariance) / np.outer(deviation, deviation)).max() < 1e-11
        assert (np.abs(Phi[0] - moved) / np.maximum(1, np.abs(moved).max(axis=1))[:, None]).max() < 1e-11


def exactly(decays, scales, lr, scale, momentum, length):
    """Phi and covariance over so many steps, by doubling in 50 digits."""
    with mpmath.workdps(50):
        number = np.vectorize(mpmath.mpf, otypes=[object])
        m = len(decays)
        y = np.concatenate([-number(scales), number([0.0, 0.0])])  # of x, v, theta: what a step's noise is, but for z
        F = np.zeros((m + 2, m + 2), object) + y
        F[range(m), range(m)] += number(decays)
        F[m] = number(scale) * y
        F[m, m] += mpmath.mpf(momentum)
        F[m + 1] = -number(lr) * F[m]
        F[m + 1, m + 1] += 1
        G = np.concatenate([number(np.ones(m)), number([scale]), -number([lr]) * number([scale])])
        if not momentum:
            keep = [*range(m), m + 1]
            F, G = F[np.ix_(keep, keep)], G[keep]
        Phi, P = np.eye(len(G), dtype=object), np.zeros((len(G), len(G)), object)
        for bit in f"{length:b}":
            P, Phi = Phi @ P @ Phi.T + P, Phi @ Phi
            if bit == "1":
                P, Phi = F @ P @ F.T + np.outer(G, G), F @ Phi
        return Phi.astype(np.float64), P.astype(np.float64)


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_maps_that_follow_others_are_the_same_bits_however_many_they_are(size: int) -> None:
    """A resumed run asks for other maps at once. Numbers of very different sizes, and systems without noise."""
    rng = np.random.default_rng(size)
    first = Maps(rng.normal(size=(20, size, size)), np.tril(rng.normal(size=(20, size, size))))
    first.R[:] *= 10.0 ** rng.integers(-8, 3, (20, size, 1))
    first.R[3] = 0
    later = Maps(rng.normal(size=(20, size, size)), 0 * first.R)
    later.R[5:] = np.tril(rng.normal(size=(15, size, size)))
    made = first.then(later)
    for i in range(20):
        one = first.at(slice(i, i + 1)).then(later.at(slice(i, i + 1)))
        assert one.Phi.tobytes() == made.Phi[i].tobytes()
        assert one.R.tobytes() == made.R[i].tobytes()
    both = np.concatenate([later.Phi @ first.R, later.R], axis=2)
    expected = both @ both.transpose(0, 2, 1)
    scale = np.sqrt(expected.diagonal(axis1=1, axis2=2))
    error = np.abs(made.R @ made.R.transpose(0, 2, 1) - expected)
    assert (error <= 1e-13 * scale[:, :, None] * scale[:, None]).all()
    np.testing.assert_allclose(made.Phi, later.Phi @ first.Phi, rtol=0, atol=1e-13)
    assert (np.triu(made.R, 1) == 0).all()
