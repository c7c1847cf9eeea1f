"""The workload against a simulation of torch SGD, its transposed, Toeplitz and saved forms, and the schedules."""

import json
from itertools import product

import numpy as np
import pytest
import torch

from anyorder import workload as W
from anyorder.errors import ArgumentError
from anyorder.workload import GivenWorkload
from references import reference

N = 12
SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.7, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.8, "weight_decay": 0.05},
    {"momentum": 0.8, "weight_decay": 0.05, "nesterov": True},
]
SCHEDULES = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "warmup": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=N + 1),
}


def trajectory(options: dict, schedule: str | None, gradients: np.ndarray, rate: float = 0.5) -> np.ndarray:
    """theta_1, .., theta_n of torch's SGD, from theta_0 = 0."""
    theta = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    optimizer = torch.optim.SGD([theta], lr=rate, **options)
    scheduler = SCHEDULES[schedule](optimizer) if schedule else None
    rows = []
    for gradient in gradients:
        theta.grad = torch.tensor(gradient)
        optimizer.step()
        if scheduler:
            scheduler.step()
        rows.append(theta.detach().numpy().copy())
    return np.array(rows)


def read(options: dict, schedule: str | None, n: int = N, rate: float = 0.5) -> W.Workload:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=rate, **options)
    return W.from_optimizer(optimizer, SCHEDULES[schedule](optimizer) if schedule else None, n)


def test_workload_of_an_optimizer_is_what_it_does() -> None:
    for options, schedule in product(SETTINGS, [None, *SCHEDULES]):
        gradients = np.random.default_rng(0).standard_normal((N, 2))
        if schedule == "one cycle" and not options.get("momentum"):
            continue  # torch cycles the momentum, and refuses one of 0
        A = read(options, schedule)
        expected = -trajectory(options, schedule, gradients)
        got = A.apply(gradients)
        if not options.get("weight_decay"):  # rates are relative there
            got *= expected[-1, 0] / got[-1, 0]
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_dampening_becomes_a_matrix() -> None:
    gradients = np.random.default_rng(0).standard_normal((N, 2))
    options = {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}
    A = read(options, "step")
    assert isinstance(A, GivenWorkload)
    np.testing.assert_allclose(A.apply(gradients), -trajectory(options, "step", gradients), rtol=1e-9)


def test_decoupled_decay_is_its_recurrence() -> None:
    rng = np.random.default_rng(1)
    rates, gradients = rng.random(N), rng.standard_normal(N)
    A = W.Workload(N, momentum=0.9, learning_rates=rates, weight_decay=0.3, coupled=False)
    theta, m, expected = 0.0, 0.0, []
    for rate, g in zip(rates, gradients, strict=True):
        m = 0.9 * m + g
        theta = (1 - rate * 0.3) * theta - rate * m
        expected.append(-theta)
    np.testing.assert_allclose(A.apply(gradients), expected, rtol=1e-12)


def test_from_optimizer_touches_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = json.dumps([optimizer.state_dict(), scheduler.state_dict()])
    W.from_optimizer(optimizer, scheduler, 20)
    assert json.dumps([optimizer.state_dict(), scheduler.state_dict()]) == before
    assert (parameter == 1).all()
    assert scheduler.optimizer is optimizer


def test_from_optimizer_reads_groups_that_differ_by_a_factor() -> None:
    def sgd(first: dict, **options: float) -> torch.optim.SGD:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **more} for more in (first, {"lr": 1.0})]
        return torch.optim.SGD(groups, **options)

    assert W.from_optimizer(sgd({"lr": 0.1}, momentum=0.5), None, 5) == W.momentum(5, 0.5)
    for optimizer in (sgd({"lr": 0.1}, weight_decay=0.1), sgd({"lr": 1.0, "momentum": 0.9})):
        with pytest.raises(ArgumentError, match="parameter groups"):
            W.from_optimizer(optimizer, None, 5)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("schedule", [None, "cosine"])
def test_the_workload_of_adam_is_what_it_does_where_second_moments_do_not_count(kind, schedule) -> None:
    """With an eps far above the gradients every step is divided by eps: Adam itself, on one gradient at a time."""
    made = []
    for t in range(N):
        parameter = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = kind([parameter], lr=1e9, betas=(0.8, 0.9), eps=1e9, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N) if schedule else None
        if t == 0:
            work = W.from_optimizer(optimizer, scheduler, N)
        column = []
        for step in range(N):
            parameter.grad = torch.tensor(float(step == t), dtype=torch.float64)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            column.append(-parameter.item())
        made.append(column)
    A = np.array(made).T
    np.testing.assert_allclose(work.matrix() / work.matrix()[0, 0], A / A[0, 0], rtol=1e-6, atol=1e-9)


def test_from_optimizer_refuses_what_is_not_linear() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ArgumentError, match=r"got RMSprop; for any other, leave optimizer= out when you plan"):
        W.from_optimizer(torch.optim.RMSprop([parameter]), None, 5)
    adam = torch.optim.Adam([{"params": [parameter]}, {"params": [torch.zeros(1)], "betas": (0.5, 0.9)}])
    with pytest.raises(ArgumentError, match="the same first beta"):
        W.from_optimizer(adam, None, 5)
    sgd = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(ArgumentError, match="depend on the loss"):
        W.from_optimizer(sgd, torch.optim.lr_scheduler.ReduceLROnPlateau(sgd), 5)
    with pytest.raises(ArgumentError, match="belong to the optimizer"):
        W.from_optimizer(sgd, torch.optim.lr_scheduler.StepLR(torch.optim.SGD([parameter], lr=1.0), 1), 5)


@pytest.mark.parametrize("options", [*SETTINGS, {"momentum": 0.8, "weight_decay": 0.05, "coupled": False}], ids=str)
def test_transposed_and_toeplitz_forms(options: dict) -> None:
    rng = np.random.default_rng(2)
    A = W.Workload(N, learning_rates=rng.random(N), weights=rng.random(N), **options)
    rows = rng.standard_normal((N, 3))
    np.testing.assert_allclose(A.apply_transposed(rows), A.matrix().T @ rows, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(A.apply(rows[:, 0]), A.matrix() @ rows[:, 0], rtol=1e-12, atol=1e-13)
    assert not A.is_toeplitz
    constant = W.Workload(N, learning_rates=np.full(N, 0.5), **options)
    column = constant.matrix()[:, 0]
    assert constant.is_toeplitz
    np.testing.assert_allclose(constant.toeplitz_coefficients(), column, rtol=1e-11)
    np.testing.assert_allclose(constant.matrix()[3:, 3], column[:-3], rtol=1e-11)


def test_momentum_coefficients_are_partial_sums_of_powers() -> None:
    np.testing.assert_allclose(W.momentum(6, 0.5).toeplitz_coefficients(), 2 - 0.5 ** np.arange(6), rtol=1e-15)
    with pytest.raises(ArgumentError, match="constant learning rates"):
        W.momentum(6, 0.5, W.cosine(6)).toeplitz_coefficients()


def test_published_matrices() -> None:
    A = W.momentum(6, 0.9, [1.0, 0.8, 0.6, 0.4, 0.2, 0.1])
    np.testing.assert_allclose(A.matrix(), reference("momentum_matrix_n6"), rtol=1e-12)
    B = W.momentum(8, 0.95, W.linear_cooldown(8))
    np.testing.assert_allclose(B.matrix(), reference("momentum095_cooldown_n8"), rtol=1e-12)


def test_weights_multiply_the_rows() -> None:
    A, weights = W.momentum(5, 0.5), np.arange(5.0)
    np.testing.assert_array_equal(W.weighted(A, weights).matrix(), weights[:, None] * A.matrix())
    np.testing.assert_array_equal(W.weighted(W.weighted(A, weights), weights).weights, weights**2)
    assert (A.weights == 1).all()
    custom = W.weighted(W.custom(np.tri(5)), weights)
    np.testing.assert_array_equal(custom.matrix(), weights[:, None] * np.tri(5))
    assert not W.weighted(W.prefix_sum(5), weights + 1).is_prefix_sum


def test_saved_and_loaded_alike() -> None:
    long = W.momentum(5000, 0.9, W.cosine(5000))
    assert len(json.dumps(long.to_dict())) < 12 * 5000
    for A in [
        W.prefix_sum(4),
        long,
        W.weighted(W.momentum(7, 0.9, W.cosine(7)), np.eye(7)[-1]),
        W.Workload(5, momentum=0.9, weight_decay=0.1, coupled=False, nesterov=True),
        W.custom(np.tril(np.random.default_rng(0).random((6, 6)))),
        W.weighted(W.custom(np.tri(3)), [1, 2, 3]),
    ]:
        again = W.from_dict(json.loads(json.dumps(A.to_dict())))
        assert again == A
        np.testing.assert_array_equal(again.apply(np.ones(A.n)), A.apply(np.ones(A.n)))
    assert W.from_dict({"kind": "momentum", "n": 4, "momentum": 0.0, "learning_rates": None}) == W.prefix_sum(4)
    assert W.momentum(7, 0.9) != W.momentum(7, 0.8)
    assert W.custom(np.tri(4)).is_prefix_sum
    assert W.custom(np.tri(4)).is_toeplitz


def test_schedules() -> None:
    np.testing.assert_allclose(W.step_decay(7, 3, 0.5), [1, 1, 1, 0.5, 0.5, 0.5, 0.25])
    np.testing.assert_allclose(W.cosine(4, 0.2)[[0, 2]], [1, 0.6])
    np.testing.assert_allclose(W.linear_cooldown(8), [1, 1, 1, 1, 1, 1, 1, 0.05])
    np.testing.assert_allclose(W.warmup_stable_decay(10, 0.2, 0.4), [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    for rates in (W.step_decay(9, 2, 0.3), W.cosine(9), W.linear_cooldown(9), W.warmup_stable_decay(9)):
        assert rates.shape == (9,)
        assert rates.max() == 1
    read_back = read({}, "cosine").learning_rates
    np.testing.assert_allclose(read_back, W.cosine(N), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: W.Workload(3, momentum=1.0), "momentum must be below 1"),
        (lambda: W.Workload(3, learning_rates=[1, 2]), "learning_rates must be n=3"),
        (lambda: W.Workload(3, learning_rates=[1, -2, 1]), "none negative"),
        (lambda: W.Workload(3, weight_decay=2.0), "at most 1"),
        (lambda: W.Workload(3, weights=[0, 0, 0]), "weights"),
        (lambda: W.custom(np.ones((3, 3))), "lower triangular"),
        (lambda: W.custom(np.zeros((3, 3))), "not 0"),
        (lambda: W.warmup_stable_decay(10, 0.6, 0.6), "warmup \\+ decay"),
        (lambda: W.from_dict({"kind": "nonsense"}), "workload kind"),
    ],
)
def test_bad_arguments_are_named(make, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_stages_are_what_torch_does_with_their_settings() -> None:
    course = W.stages([
        W.Stage(steps=4, rate=3.0, only_last=True),
        W.Stage(steps=5, momentum=0.9, rate=0.5, schedule=(1, 0.8, 0.6, 0.4, 0.2), own_parameters=True),
        W.Stage(steps=3, rate=0.5),
        W.Stage(steps=4, momentum=0.5, rate=0.2),
    ])  # fmt: skip
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((course.n, 2))
    expected = []
    for start, end in course.blocks:
        theta = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = torch.optim.SGD([theta], lr=1.0)
        largest = max(course.settings(t)["lr"] for t in range(start, end))
        for t in range(start, end):
            optimizer.param_groups[0].update(course.settings(t))
            theta.grad = torch.tensor(gradients[t])
            optimizer.step()
            expected.append(-theta.detach().numpy() / largest)
    np.testing.assert_allclose(course.apply(gradients), course.weights[:, None] * np.array(expected), atol=1e-12)
    A = course.matrix()
    np.testing.assert_allclose(course.apply_transposed(gradients), A.T @ gradients, atol=1e-12)
    M, N = course.recurrence()
    state, rows = np.zeros((2, course.n)), []
    for t in range(course.n):
        state = M[t] @ state + np.outer(N[t], np.eye(course.n)[t])
        rows.append(course.weights[t] * state[1])
    np.testing.assert_allclose(rows, A, atol=1e-12)
    for start, end in course.blocks:  # no block pays for another
        k = end - start
        assert np.square(A[start:end]).sum() / k**2 == pytest.approx(np.square(A[4:]).sum() / 12**2)
    for one in (course, W.weighted(course, np.arange(16.0))):
        assert W.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    with pytest.raises(ArgumentError, match="number of steps of all stages"):
        W.from_dict({**course.to_dict(), "n": 15})
    for bad in ([], [3]):
        with pytest.raises(ArgumentError, match="stages must be"):
            W.stages(bad)
