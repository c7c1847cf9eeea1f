"""The front ends of the package, as audits with planted faults see them. A new one joins with its line at the end."""

import dataclasses
import sys
from contextlib import contextmanager

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.audit.faults import Fault, FrontEnd, Moved, patched
from anyorder.audit.faults.trial import banded, banded_inverse, independent, tree
from anyorder.clipping import Adaptive
from anyorder.clipping.norms import Cut
from anyorder.federated import Layout, Server
from anyorder.federated.server import Round
from anyorder.noise.lazy import Jumps
from anyorder.online import Learner, LeastSquares, sums
from anyorder.online import learner as ftrl
from anyorder.online.losses import Hinge
from anyorder.release.release import SharedNoise, TableNoise
from anyorder.sparse import Uniform
from anyorder.training.engine import Training

# -- faults of the package's own clipping, which all of them go through ----------------------------------------------


@contextmanager
def factors_of_another(reached):
    """Each unit is cut by the factor of the next one: a list that is off by one."""
    real = Cut.apply

    def apply(self, squares, clip_norm):
        reached()
        factors, counts = real(self, squares, clip_norm)
        return {name: values.roll(1) for name, values in factors.items()}, counts

    with patched(Cut, "apply", apply):
        yield


@contextmanager
def norm_for_its_square(reached):
    """The norm is taken for its square."""
    real = Cut.apply

    def apply(self, squares, clip_norm):
        reached()
        return real(self, {name: square.sqrt() for name, square in squares.items()}, clip_norm)

    with patched(Cut, "apply", apply):
        yield


CLIPPING = (
    Fault("factors of another unit", factors_of_another),
    Fault("norm taken for its square", norm_for_its_square),
)

# -- the release core, with sums by bounded_sum ------------------------------------------------------------------------

HERE = sys.modules[__name__]
bounded_sum = ao.bounded_sum


def run_core(trial):
    release = ao.Release(trial.plan, trial.size, key=trial.key)
    for units, vectors in trial.steps:
        yield release.step(units, bounded_sum(vectors, units, release.clip_norm))


def core_sampled(trial):
    release = ao.Release(trial.plan, trial.size, key=trial.key)
    for _ in range(trial.plan.n):
        units = release.sample(len(trial.vectors))
        yield release.step(units, bounded_sum(trial.vectors[units], units, release.clip_norm))


def core_summing(make):
    return patched(HERE, "bounded_sum", make)


core = FrontEnd("release core", run_core, core_summing, core_sampled, CLIPPING, bins=core_sampled)

# -- the same in exact integers ----------------------------------------------------------------------------------------

GRID = 2.0**-20


def run_exact(trial):
    release = ao.Release(dataclasses.replace(trial.plan, grid=GRID), trial.size, key=trial.key)
    for units, vectors in trial.steps:
        yield release.step(units, exact_sum(vectors, units, release.clip_norm))


def exact_sum(vectors, units, clip_norm):
    return ao.bounded_sum(vectors, units, clip_norm, grid=GRID)


def exact_summing(make):
    def total(vectors, units, clip_norm):
        return (make(vectors, units, clip_norm) / GRID).astype(np.int64)

    return patched(HERE, "exact_sum", total)


exact = FrontEnd(
    "release core, exact integers",
    run_exact,
    exact_summing,
    faults=CLIPPING,
    strategies=(banded_inverse, tree, independent),
    excuses={
        "row of Z used again": "its rows come from no program of a step; that of a whole step stands for it",
        "stale kernel": "exact noise is made without a compiled step",
        "clip norm of the next step": "the clip norm of a plan with exact integers never moves",
        "larger sampling probability": "the coins are those of the release core",
    },
)

# -- the engine: a linear functional, whose gradient at an example is the example --------------------------------------


def linear(trial, loader, **options):
    engine = ao.PrivacyEngine(trial.plan, key=trial.key)
    model = nn.Linear(trial.size, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return engine, *engine.make_private(model, optimizer, loader, loss_reduction="sum", **options)


def gradients(trial, rule=None):
    """For every step the engine's clip norm before it, and the private gradient after it."""
    batches = [{"x": torch.from_numpy(vectors), "unit": torch.from_numpy(units)} for units, vectors in trial.steps]
    engine, model, optimizer, loader = linear(trial, batches, unit="unit", rule=rule)
    for batch in loader:
        optimizer.zero_grad()
        clip_norm = engine.clip_norm
        model(batch["x"]).sum().backward()
        optimizer.step()
        yield clip_norm, model.module.weight.grad.reshape(-1).clone()


def run_engine(trial):
    return (row for _, row in gradients(trial))


def engine_sampled(trial):
    loader = DataLoader(TensorDataset(torch.from_numpy(trial.vectors)), batch_size=8)
    _, model, optimizer, loader = linear(trial, loader)
    for _ in range(trial.plan.n // len(loader)):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            yield model.module.weight.grad.reshape(-1).clone()


@contextmanager
def engine_summing(make):
    """Replaces the clipped sums that a backward pass gives."""
    forward, receive = Training._forward, Training._receive
    inputs = []

    def remember(self, args, kwargs):
        inputs[:] = [args[0]]
        return forward(self, args, kwargs)

    def replaced(self, batch, step, units, sums):
        total = make(inputs[0].numpy(), np.asarray(batch.units), self.release.clip_norm)
        weight = torch.from_numpy(total).to(sums["weight"].dtype).view_as(sums["weight"])
        receive(self, batch, step, units, {**sums, "weight": weight})

    with patched(Training, "_forward", remember), patched(Training, "_receive", replaced):
        yield


engine = FrontEnd("torch engine", run_engine, engine_summing, engine_sampled, CLIPPING, bins=engine_sampled)

ADAPTIVE = Adaptive(quantile=0.5, learning_rate=0.3, share=0.1)


def moved(trial, steps):
    """Rows whose clip norm follows the units' norms."""
    for clip_norm, row in steps:
        yield Moved(row, clip_norm, clip_norm / (trial.plan.clip_norm * ADAPTIVE.gradient_share))


def run_adaptive(trial):
    return moved(trial, gradients(trial, ADAPTIVE))


adaptive = FrontEnd(
    "torch engine, adaptive norm",
    run_adaptive,
    engine_summing,
    faults=CLIPPING,
    strategies=(independent,),
    excuses={
        "stale kernel": "independent noise has no coefficients",
        "separation off by one": "steps of independent noise have nothing in common that nearer ones could add to",
        "larger sampling probability": "secret sampling needs no moving norm to be tested: the engine has it",
    },
)

# -- the engine with a table: half of a vector is a linear layer's gradient, the other half that of a table's rows -----

WIDTH = 10


class Wide(nn.Module):
    """A functional whose gradient at an example is the example: its first half in a table, whose rows it reads."""

    def __init__(self, size):
        super().__init__()
        self.half = size // 2
        self.table = nn.Embedding(
            self.half // WIDTH, WIDTH, sparse=True, _weight=torch.zeros(self.half // WIDTH, WIDTH)
        )
        self.linear = nn.Linear(size - self.half, 1, bias=False)

    def forward(self, ids, x):
        return (self.table(ids).flatten(1) * x[:, : self.half]).sum(1) + self.linear(x[:, self.half :])[:, 0]


def with_table(trial, selection):
    """For every step the private model after it; the rate is 1."""
    plan = dataclasses.replace(trial.plan, selection=selection)
    batches = [{"x": torch.from_numpy(vectors), "unit": torch.from_numpy(units)} for units, vectors in trial.steps]
    engine, model = ao.PrivacyEngine(plan, key=trial.key), Wide(trial.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = engine.make_private(model, optimizer, batches, unit="unit", loss_reduction="sum")
    rows = torch.arange(model.table.num_embeddings)
    for batch in loader:
        optimizer.zero_grad()
        model(rows.expand(len(batch["x"]), -1), batch["x"]).sum().backward()
        optimizer.step()
        yield engine, model.module


def run_lazy(trial):
    """What the table moves by, from one flush to the next."""
    before = torch.zeros(trial.size // 2)
    for engine, model in with_table(trial, None):
        engine.flush()
        now = model.table.weight.detach().reshape(-1).clone()
        yield torch.cat([before - now, model.linear.weight.grad[0]])
        before = now


def run_selected(trial):
    """Every row is chosen, so that each step shows all of its noise."""
    for _, model in with_table(trial, Uniform(trial.size // 2 // WIDTH)):
        yield torch.cat([model.table.weight.grad.to_dense().reshape(-1), model.linear.weight.grad[0]])


@contextmanager
def table_summing(make):
    """Replaces the clipped sums of both halves."""
    forward, receive = Training._forward, Training._receive
    inputs = []

    def remember(self, args, kwargs):
        inputs[:] = [args[1]]
        return forward(self, args, kwargs)

    def replaced(self, batch, step, units, sums):
        total = torch.from_numpy(make(inputs[0].numpy(), np.asarray(batch.units), self.release.clip_norm))
        first, second = total.to(sums["linear.weight"].dtype).tensor_split(2)
        rows = torch.arange(len(first) // WIDTH)[None]
        table = torch.sparse_coo_tensor(
            rows, first.view(-1, WIDTH), sums["table.weight"].shape, is_coalesced=True, check_invariants=False
        )
        receive(self, batch, step, units, {**sums, "table.weight": table, "linear.weight": second[None]})

    with patched(Training, "_forward", remember), patched(Training, "_receive", replaced):
        yield


@contextmanager
def half_on_chosen_rows(reached):
    """The noise of the chosen rows has half the standard deviation; that of the linear layer is right."""
    real = TableNoise.add_to_rows

    def add_to_rows(self, step, offset, rows, values, divisor):
        reached()
        return (real(self, step, offset, rows, values, divisor) + values / divisor) / 2

    with patched(TableNoise, "add_to_rows", add_to_rows):
        yield


@contextmanager
def first_rows_noise(reached):
    """The chosen rows are given the noise of the table's first rows, as if they were numbered anew in each step."""
    real = TableNoise.add_to_rows

    def add_to_rows(self, step, offset, rows, values, divisor):
        reached()
        return real(self, step, offset, rows // 2, values, divisor)

    with patched(TableNoise, "add_to_rows", add_to_rows):
        yield


@contextmanager
def half_in_jumps(reached):
    """The noise that rows are given late has half the standard deviation."""
    real = Jumps.over

    def over(self, *arguments):
        reached()
        jump = real(self, *arguments)
        return jump._replace(R=jump.R / 2)

    with patched(Jumps, "over", over):
        yield


@contextmanager
def one_noise_for_all_jumps(reached):
    """Jumps over other steps have the same normals: their address has the row of the table alone."""
    real = Jumps.over

    def over(self, *arguments):
        reached()
        jump = real(self, *arguments)
        return jump._replace(rows=jump.rows % jump.rows.shape[1])

    with patched(Jumps, "over", over):
        yield


NO_SAMPLES = {"larger sampling probability": "the coins are those of the engine"}

lazy = FrontEnd(
    "torch engine, lazy table",
    run_lazy,
    table_summing,
    faults=(
        *CLIPPING,
        Fault("half the noise in jumps", half_in_jumps),
        Fault("one noise for all jumps", one_noise_for_all_jumps),
    ),
    excuses=NO_SAMPLES,
)

selected = FrontEnd(
    "torch engine, selected rows",
    run_selected,
    table_summing,
    faults=(
        *CLIPPING,
        Fault("half the noise on chosen rows", half_on_chosen_rows),
        Fault("chosen rows numbered anew", first_rows_noise),
    ),
    strategies=(banded_inverse, independent),
    excuses=NO_SAMPLES,
)

# -- the server: a linear model that starts at zero in each round, so that it is the private mean after it -------------


def changes(users, vectors):
    """(m,) users, and their (m, size) changes: the sums of their rows."""
    named, numbers = np.unique(users, return_inverse=True)
    rows = np.zeros((len(named), vectors.shape[1]), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(rows, numbers, vectors)
    return named, rows


def by_message(server, users, rows):
    server.round({int(user): {"weight": row[None]} for user, row in zip(users, rows, strict=True)})


def by_rows(server, users, rows):
    half = len(users) // 2
    with server.open() as opened:
        opened.add_rows(users[half:], torch.from_numpy(rows[half:]))
        opened.add_rows(users[:half], rows[:half])


def means(trial, way, rule=None):
    """For every round the clip norm in force, and the model after it."""
    model = nn.Linear(trial.size, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    server = Server(trial.plan, model, optimizer, key=trial.key, rule=rule)
    for users, vectors in trial.steps:
        nn.init.zeros_(model.weight)
        clip_norm, COLLECTED[:] = server.clip_norm, [users, vectors]
        way(server, *changes(users, vectors))
        yield clip_norm, model.weight.detach().reshape(-1).clone()


COLLECTED = []


def server_summing(make):
    """Replaces the sum of a round by one of the users' examples, a row each."""
    finish = Server._finish

    def replaced(self, users, total, *cut):
        named, vectors = COLLECTED
        wrong = torch.from_numpy(make(vectors, named, self.clip_norm)).to(total.dtype)
        finish(self, users, torch.cat([wrong, total[self.layout.size :]]), *cut)

    return patched(Server, "_finish", replaced)


@contextmanager
def twice(reached):
    """A second message of a user is added: the ledger, which hears of a user once, cannot see it."""
    real = Round._known

    def known(self, users, count=None):
        given = {users[0]} if len(users) == 1 else set()
        if not given or given.isdisjoint(self._users) or self._step % 3:
            return real(self, users, count)
        reached()
        return given

    def every_third_twice(self, messages):
        with self.open() as opened:
            for user, message in messages.items():
                opened.add(user, message)
                if self.step % 3 == 0:
                    opened.add(user, message)

    with patched(Round, "_known", known), patched(Server, "round", every_third_twice):
        yield


@contextmanager
def late(reached):
    """A message that comes after its round is over is added to the next one, which does not name its sender."""
    real, kept = Round.close, []

    def close(self):
        if kept:
            self._add(kept.pop())
        finite = COLLECTED[1][np.isfinite(COLLECTED[1]).all(1)]
        if len(finite):
            reached()
            kept.append(torch.from_numpy(finite[:8]))
        real(self)

    with patched(Round, "close", close):
        yield


@contextmanager
def nan_passes(reached):
    """A client that cuts by min(1, C / norm) alone: for a norm of NaN the factor is 1 in many a language."""
    real = Layout.flat

    def flat(self, message):
        vector = torch.as_tensor(message["weight"]).reshape(-1)
        if vector.isfinite().all():
            return real(self, message)
        reached()
        return torch.nan_to_num(vector, nan=0.0, posinf=1e3, neginf=-1e3) + 1e3

    def apply(self, squares, clip_norm):
        factors, counts = cut(self, squares, clip_norm)
        long = {name: square.sqrt() > 1e3 for name, square in squares.items()}
        return {name: factor.where(~long[name], 1.0) for name, factor in factors.items()}, counts

    cut = Cut.apply
    with patched(Layout, "flat", flat), patched(Cut, "apply", apply):
        yield


NO_COINS = {"larger sampling probability": "a server takes no plan of secret sampling: who is drawn may not answer"}

federated = FrontEnd(
    "server, round",
    lambda trial: (row for _, row in means(trial, by_message)),
    server_summing,
    faults=(
        CLIPPING[1],  # messages that come one by one have no other's factors beside them
        Fault("second message of a user added", twice),
        Fault("late message added to the next round", late),
        Fault("NaN passes min(1, C / norm)", nan_passes),
    ),
    excuses=NO_COINS,
)

federated_rows = FrontEnd(
    "server, add_rows",
    lambda trial: (row for _, row in means(trial, by_rows)),
    server_summing,
    faults=CLIPPING,
    strategies=(banded, tree),
    excuses=NO_COINS,
)


def run_federated_adaptive(trial):
    return moved(trial, means(trial, by_rows, rule=ADAPTIVE))


federated_adaptive = FrontEnd(
    "server, adaptive norm",
    run_federated_adaptive,
    server_summing,
    faults=CLIPPING,
    strategies=(independent,),
    excuses=adaptive.excuses | NO_COINS,
)

# -- the online learner: a hinge of slope 1, whose gradient at an example is the example -------------------------------


def online_learner(trial):
    """A learner held at its start by its regularisation, and what it released so far."""
    learner = Learner(trial.plan, (trial.size, 1), loss=Hinge(), regularization=1e15, key=trial.key)
    released = []
    learner.release.on_release(lambda step, private: released.append(private.copy()))
    return learner, released


def run_online(trial):
    """Every other batch is sparse."""
    learner, released = online_learner(trial)
    for t, (units, vectors) in enumerate(trial.steps):
        learner.step(units, csr_array(vectors) if t % 2 else vectors, np.zeros(len(units)))
        yield released.pop()


def online_sampled(trial):
    learner, released = online_learner(trial)
    for _ in range(trial.plan.n):
        units = learner.release.sample(len(trial.vectors))
        learner.step(units, trial.vectors[units], np.zeros(len(units)))
        yield released.pop()


def online_summing(make):
    def replaced(loss, theta, batch, clip_norm, names):
        rows = batch.given.toarray() if issparse(batch.given) else batch.given
        return make(rows, batch.units, clip_norm)[:, None]

    return patched(ftrl, "sum_of", replaced)


@contextmanager
def longer_by_half(reached):
    """Units of several rows are cut at half as much again."""
    real = sums._add_together

    def add_together(total, rows, slopes, sizes, bound):
        reached()
        real(total, rows, slopes, sizes, 1.5 * bound)

    with patched(sums, "_add_together", add_together):
        yield


@contextmanager
def first_row_again(reached):
    """Of a unit with several rows one is added by itself as well."""
    real = sums._add_together

    def add_together(total, rows, slopes, sizes, bound):
        reached()
        real(total, rows, slopes, sizes, bound)
        if len(sizes):
            real(total, rows[:1], slopes[:1], np.ones(1, int), bound)

    with patched(sums, "_add_together", add_together):
        yield


@contextmanager
def norms_of_another_row(reached):
    """Each row is cut by the norm of the next one: a list that is off by one."""
    real = sums.squares

    def squares(rows):
        reached()
        return np.roll(real(rows), 1)

    with patched(sums, "squares", squares):
        yield


online = FrontEnd(
    "online learner",
    run_online,
    online_summing,
    online_sampled,
    faults=(
        Fault("units of several rows cut at half as much again", longer_by_half),
        Fault("a row of a unit added twice", first_row_again),
        Fault("norms of another row", norms_of_another_row),
    ),
    bins=online_sampled,
)

# -- least squares: the joint vector is given as a whole; what is read are the two sums that the model is made of ----


def joint_total(vectors, units, clip_norm):
    return ao.bounded_sum(vectors, units, clip_norm)


def run_squares(trial):
    d = next(d for d in range(trial.size) if d + d * (d + 1) // 2 >= trial.size)
    learner = LeastSquares(trial.plan, d, bounds=1.0, target_bounds=(-1.0, 1.0), key=trial.key)
    width, before = d + d * (d + 1) // 2, 0.0
    off = np.where(np.equal(*np.triu_indices(d)), 1.0, np.sqrt(2.0))
    for units, vectors in trial.steps:
        padded = np.pad(vectors, ((0, 0), (width - trial.size, 0)))

        def given(self, batch, padded=padded, units=units):
            return sums.LinearSum(np.unique(units), joint_total(padded, units, self.release.clip_norm))

        with patched(LeastSquares, "_joint_sum", given):
            learner.step(units, np.zeros((len(units), d)), np.zeros(len(units)))
        s, W = learner.sums
        assert np.array_equal(W, W.T)
        now = np.concatenate([learner.target_weight * s, learner.square_weight * off * W[np.triu_indices(d)]])
        yield (now - before)[-trial.size :] / trial.plan.batch_size
        before = now


def squares_summing(make):
    return patched(HERE, "joint_total", make)


@contextmanager
def half_in_the_matrix(reached):
    """The noise of the second sum is halved, as if symmetry had made two of it."""
    real = SharedNoise.add_to

    def add_to(self, own, divisor):
        reached()
        totals = [piece.clone() for piece in own]
        made = real(self, own, divisor)
        for piece, total in zip(made, totals, strict=True):
            piece[62:] -= (piece[62:] - total[62:] / divisor) / 2
        return made

    with patched(SharedNoise, "add_to", add_to):
        yield


least_squares = FrontEnd(
    "online least squares",
    run_squares,
    squares_summing,
    faults=(*CLIPPING, Fault("half the noise in the matrix", half_in_the_matrix)),
    strategies=(banded, tree),
    excuses={"larger sampling probability": "the coins are those of the release core"},
)

FRONT_ENDS = {
    "release": [core, exact],
    "training": [engine, adaptive],
    "sparse": [lazy, selected],
    "federated": [federated, federated_rows, federated_adaptive],
    "online": [online, least_squares],
}
"""Room of the package -> its front ends."""
