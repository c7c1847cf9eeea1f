"""Noise that is added late has the joint law of the dense run: covariances by linear maps, nothing sampled."""

import numpy as np
import pytest

from anyorder.errors import ArgumentError, CheckpointError, PlanError
from anyorder.noise.lazy import Jumps
from anyorder.strategy import (
    BLT,
    Banded,
    BandedInverse,
    Dense,
    Independent,
    Rescaled,
    RestartedBLT,
    SquareRoot,
    ToeplitzBanded,
    Tree,
)
from anyorder.strategy.kinds import KINDS, Structure
from anyorder.workload import Workload

N = 29
CAN = {
    name: make
    for kind in KINDS
    for name, make in kind.examples.items()
    if kind.structure not in (Structure.DENSE, Structure.TREE, Structure.RESCALED) and kind.cls is not SquareRoot
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
    stops, made, moved = carried(jumps, touched, strategy.n, over)
    Z, G = dense(strategy, lr, scale, optimizer)
    expected = (Z @ Z.T)[np.ix_(stops, stops)]
    deviation = np.sqrt(np.diag(expected))
    unit = np.maximum(np.outer(deviation, deviation), 1e-300)
    own = np.zeros_like(moved)
    own[:, touched] = G[stops][:, touched]
    own *= np.arange(strategy.n) < stops[:, None]
    return (np.abs(made @ made.T - expected) / unit).max(), np.abs(moved - own).max()


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CAN)
def test_covariances_are_those_of_the_dense_run(name, optimizer, rates):
    lr, scale = RATES[rates]
    strategy = CAN[name](N)
    for touched in patterns(N):
        noise, gradient = difference(strategy, touched, lr, scale, OPTIMIZERS[optimizer])
        assert noise < 1e-12
        assert gradient < 1e-13


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
