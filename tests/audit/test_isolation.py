"""The isolation harness finds every channel that is planted, names it, and finds none where there is none."""

import json
import logging
import math
import os
import random
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import anyorder as ao
import processes
from anyorder.accounting.gaussian import gdp_epsilon
from anyorder.audit.isolation import Neighbour, check, neighbours
from anyorder.audit.neighbours import same
from anyorder.errors import ArgumentError, IsolationError
from audit.isolated import Rejects

pytestmark = pytest.mark.filterwarnings("ignore")

N, B, EPOCHS, WIDTH, CLASSES, UNIT = 16, 8, 2, 5, 3, 3
PLAN = ao.plan(dataset_size=N, batch_size=B, epochs=EPOCHS, epsilon=1, delta=1e-3, mechanism="tree")
RNG = torch.Generator().manual_seed(0)
ROWS = [(torch.randn(WIDTH, generator=RNG), torch.tensor(i % CLASSES)) for i in range(N)]
REALS = [(x, x[:1] * 2 - 1) for x, _ in ROWS]
TEXTS = [(torch.randint(1, 9, (3 + i % 4,), generator=RNG), torch.tensor(i % CLASSES)) for i in range(N)]


def bounded(x):
    """What is not finite would be in the gradients of others, as 0 times infinity: it is zero."""
    return x.nan_to_num(0.0, 0.0, 0.0).clamp(-1e6, 1e6) if x.is_floating_point() else x


class Loop:
    """A small front end, written by hand around a Release; a hole is one of its parts overridden.

    Nothing in it is of the engine, whose own refusals must not decide what the harness sees.
    """

    rows, kinds = ROWS, None

    def model(self, rows):
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))

    def data(self, rows):
        return rows

    def collate(self, batch):
        return tuple(torch.stack(part) for part in zip(*batch, strict=True))

    def order(self, rows):
        return torch.randperm(N)

    def losses(self, x, y):
        """One number for each example."""
        return F.cross_entropy(self.net(x), y, reduction="none")

    def after(self, losses, step):
        """What a loop does once its step is taken; whether to stop."""

    def __call__(self, rows, folder):
        self.net, self.folder, self.lr = self.model(rows), folder, 0.5
        self.begin()
        parameters = list(self.net.parameters())
        release, data = ao.Release(PLAN, sum(p.numel() for p in parameters)), self.data(rows)
        for _ in range(EPOCHS):
            for units in self.order(rows).split(B):
                x, y = self.collate([data[int(i)] for i in units])
                self.is_finite = bool(x.isfinite().all())
                losses = self.losses(bounded(x), bounded(y))
                each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
                vectors = torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in each])
                private = release.step(units.tolist(), ao.bounded_sum(vectors, units.tolist(), release.clip_norm))
                with torch.no_grad():
                    for p, g in zip(parameters, private.split([p.numel() for p in parameters]), strict=True):
                        p -= self.lr * g.view_as(p)
                if self.after(losses.detach(), release.steps_taken):
                    return self.net
        release.certificate().save(folder / "run.privacy.json")
        return self.net

    def begin(self):
        pass


def padded(self, batch):
    texts, labels = zip(*batch, strict=True)
    return pad_sequence(texts, batch_first=True), torch.stack(labels)


class LastState(nn.Module):
    """A recurrent model that reads its answer off the last position, padding or not."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out(self.layer(self.embed(x))[0][:, -1])


class MeanOfLength(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        h = self.dropout(self.embed(x)) * (x > 0)[..., None]
        return self.out(h.mean(1) * 10)


class SumOfWords(MeanOfLength):
    """Of the words alone: padding adds nothing."""

    def forward(self, x):
        return self.out((self.dropout(self.embed(x)) * (x > 0)[..., None]).sum(1))


class Texts(Loop):
    rows, collate = TEXTS, padded


PLANTED = {}


def planted(kind, name):
    """A loop in which the harness must find a channel of a kind."""

    def enter(loop):
        PLANTED[name] = kind, loop
        return loop

    return enter


# -- padding and shapes ------------------------------------------------------------------------------------------------


@planted("own step", "the last state of an LSTM, which sees padding")
class _(Texts):
    def model(self, rows):
        return LastState()

    def losses(self, x, y):
        return F.cross_entropy(self.net(x) * 300, y, reduction="none")


@planted("own step", "a mean over the padded length")
class _(Texts):
    def model(self, rows):
        return MeanOfLength()

    def losses(self, x, y):
        return F.cross_entropy(self.net(x) * 30, y, reduction="none")


class KeepsLongest(SumOfWords):
    longest = 0

    def forward(self, x):
        self.longest = max(self.longest, x.shape[1])
        return super().forward(x) / self.longest


@planted("sum of others", "a model that keeps the longest length so far")
class _(Texts):
    def model(self, rows):
        return KeepsLongest()


# -- random draws ------------------------------------------------------------------------------------------------------


@planted("generators", "dropout over a padded length")
class _(Texts):
    def model(self, rows):
        return SumOfWords(dropout=0.5)


@planted("generators", "a crop that is drawn again until it fits")
class _(Loop):
    data = staticmethod(Rejects)


class PythonCrops(Rejects):
    def __getitem__(self, i):
        x, y = self.rows[i]
        while random.random() < 0.9 and x.sum() > 0:
            x = x * 0.99
        return x, y


@planted("generators", "an augmentation that draws from Python's generator as often as a value says")
class _(Loop):
    data = staticmethod(PythonCrops)


class NumpyCrops(Rejects):
    def __getitem__(self, i):
        x, y = self.rows[i]
        return x + float(np.random.randn(1 + int(x[0].item() > 0))[0]), y  # noqa: NPY002


@planted("generators", "an augmentation that draws from NumPy's generator as often as a value says")
class _(Loop):
    data = staticmethod(NumpyCrops)


# -- what is kept of one step for the next -----------------------------------------------------------------------------


@planted("sum of others", "a counter of labels in a closure")
class _(Loop):
    def begin(self):
        self.seen = 0.0

    def losses(self, x, y):
        self.seen += float(y.float().mean())
        return super().losses(x, y) * (1 + self.seen) * 0.01


@planted("sum of others", "a temperature that follows the losses")
class _(Loop):
    scale = 0.01

    def after(self, losses, step):
        self.scale = 0.9 * self.scale + 0.001 * float(losses.mean())

    def losses(self, x, y):
        return super().losses(x, y) * self.scale


@planted("sum of others", "a buffer with the norm of the inputs before")
class _(Loop):
    def model(self, rows):
        model = super().model(rows)
        model.register_buffer("norm", torch.ones(()))
        return model

    def losses(self, x, y):
        outputs = self.net(x) / self.net.norm
        self.net.norm = x.norm()
        return F.cross_entropy(outputs, y, reduction="none")


@planted("sum of others", "a hook that keeps the largest activation")
class _(Loop):
    def begin(self):
        self.largest = 1.0
        self.net[1].register_forward_hook(self.keep)

    def keep(self, module, given, output):
        before, self.largest = self.largest, max(self.largest, float(given[0].detach().abs().max()))
        return output / before


@planted("sum of others", "batch normalisation whose running mean is used")
class _(Loop):
    def model(self, rows):
        return nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=0.5), *super().model(rows))

    def losses(self, x, y):
        with torch.no_grad():
            self.net.train()(x)
        return F.cross_entropy(self.net.eval()(x), y, reduction="none")


@planted("sum of others", "the clip norm follows the norms before")
class _(Loop):
    factor = 1.0

    def losses(self, x, y):
        found = super().losses(x, y) * self.factor * 0.1
        self.factor = float(found.detach().median()) + 0.1
        return found


# -- losses ------------------------------------------------------------------------------------------------------------


class Flat(Loop):
    def model(self, rows):
        return nn.Linear(WIDTH, CLASSES)


class Reals(Flat):
    rows = REALS

    def losses(self, x, y):
        return (self.net(x)[:, :1] - y).square()[:, 0]


@planted("own step", "weights by the batch's hardest example")
class _(Reals):
    def losses(self, x, y):
        found = super().losses(x, y)
        return found * (found.detach() / found.detach().max()) * 100


@planted("own step", "a normaliser by the batch's tokens")
class _(Texts):
    def model(self, rows):
        return SumOfWords()

    def losses(self, x, y):
        return super().losses(x, y) * (2e7 / float((x > 0).sum()) ** 4)


@planted("own step", "a normaliser by the batch's largest value")
class _(Flat):
    def losses(self, x, y):
        return super().losses(x, y) * 10 / x.abs().max()


@planted("own step", "targets less the batch's mean")
class _(Flat):
    rows = REALS

    def losses(self, x, y):
        return (self.net(x)[:, :1] - (y - y.mean()) * 100).square()[:, 0]


# -- collations and data sets ------------------------------------------------------------------------------------------


@planted("own step", "a collation that centres the batch")
class _(Loop):
    def collate(self, batch):
        x, y = super().collate(batch)
        return (x - bounded(x).mean(0)) * 50, y


class Mixed(Rejects):
    """Each example is mixed with another one's."""

    def __getitem__(self, i):
        (x, y), (z, _) = self.rows[i], self.rows[(i + 5) % len(self.rows)]
        return x + z, y


@planted("sum of others", "a data set that mixes examples")
class _(Loop):
    data = staticmethod(Mixed)


@planted("sum of others", "values scaled by those of the whole data set")
class _(Loop):
    def data(self, rows):
        scale = bounded(torch.stack([x for x, _ in rows])).abs().max()
        return [(x / scale, y) for x, y in rows]


@planted("units", "batches sorted by length")
class _(Texts):
    def model(self, rows):
        return SumOfWords()

    def order(self, rows):
        return torch.tensor(sorted(range(N), key=lambda i: len(rows[i][0])))


@planted("size", "as many classes as the labels have")
class _(Loop):
    kinds = ("label beyond the others",)

    def model(self, rows):
        return nn.Linear(WIDTH, int(max(y for _, y in rows)) + 1)


# -- what optimizers and schedulers are given --------------------------------------------------------------------------


@planted("result", "a Polyak step, whose length is the loss")
class _(Loop):
    def losses(self, x, y):
        found = super().losses(x, y)
        self.lr = float(found.mean())
        return found


@planted("sum of others", "a scheduler that follows the loss")
class _(Reals):
    before = math.inf

    def after(self, losses, step):
        loss = float(losses.mean())
        self.lr, self.before = self.lr * (0.1 if loss > 3 * self.before else 1.0), loss


@planted("steps", "a stop by the loss")
class _(Reals):
    def after(self, losses, step):
        return not float(losses.mean()) < 5


@planted("result", "the model after the batch with the largest loss is kept")
class _(Reals):
    def begin(self):
        self.largest, self.kept = -math.inf, None

    def after(self, losses, step):
        if float(losses.mean()) > self.largest:
            self.largest, self.kept = float(losses.mean()), {k: v.clone() for k, v in self.net.state_dict().items()}

    def __call__(self, rows, folder):
        super().__call__(rows, folder)
        return self.kept


@planted("sum of others", "a batch with NaN makes the next ones count half")
class _(Loop):
    failed = 0

    def after(self, losses, step):
        self.failed += not self.is_finite

    def losses(self, x, y):
        return super().losses(x, y) * 0.5**self.failed * 0.1


# -- what is shown -----------------------------------------------------------------------------------------------------


@planted("output", "a loss that is printed")
class _(Loop):
    def after(self, losses, step):
        print(f"{float(losses.mean()):.2f}")


@planted("output", "a loss that a program prints")
class _(Loop):
    def after(self, losses, step):
        os.write(1, f"{float(losses.mean()):.2f}\n".encode())


@planted("log", "a loss that is logged")
class _(Loop):
    def after(self, losses, step):
        logging.getLogger("user").warning("loss %.3f", float(losses.mean()))


@planted("log", "a warning of values that are not finite")
class _(Loop):
    def after(self, losses, step):
        if not self.is_finite:
            warnings.warn("the loss is not finite", stacklevel=1)


@planted("file", "a file of losses")
class _(Loop):
    def after(self, losses, step):
        with (self.folder / "metrics.json").open("a") as file:
            file.write(json.dumps({"loss": float(losses.mean())}))


@planted("file", "a file whose size is that of the data")
class _(Texts):
    def model(self, rows):
        return SumOfWords()

    def data(self, rows):
        (self.folder / "tokens").write_bytes(bytes(sum(len(x) for x, _ in rows)))
        return rows


@planted("file", "a file whose name tells of NaN")
class _(Loop):
    def after(self, losses, step):
        if not self.is_finite:
            (self.folder / "failed").touch()


@planted("file", "a file with the time in it")
class _(Loop):
    def after(self, losses, step):
        (self.folder / "time").write_text(str(time.perf_counter()))


@planted("error", "an error whose text has a label in it")
class _(Loop):
    kinds = ("label beyond the others",)


@planted("error", "an exit code of a run with NaN")
class _(Loop):
    def after(self, losses, step):
        if not self.is_finite:
            raise SystemExit(3)


@planted("error", "an error of a unit that is not finite")
class _(Loop):
    def after(self, losses, step):
        if not self.is_finite:
            raise ValueError("a gradient is not finite")


@planted("result", "the accuracy on training data is returned")
class _(Loop):
    def __call__(self, rows, folder):
        model = super().__call__(rows, folder)
        with torch.no_grad():
            x, y = self.collate(rows)
            return float((model(x).argmax(1) == y).float().mean())


def run(loop):
    return check(loop, loop.rows, rows=(UNIT,), kinds=loop.kinds)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_channel_is_found_and_named(name):
    kind, loop = PLANTED[name]
    report = run(loop())
    assert kind in report.kinds, report
    with pytest.raises(IsolationError, match=kind):
        report.raise_if_found()


def test_at_least_twenty_channels_are_planted_of_every_kind():
    assert len(PLANTED) >= 20
    assert {kind for kind, _ in PLANTED.values()} == {
        "sum of others", "own step", "steps", "units", "size", "generators", "output", "log", "error", "file", "result"
    }  # fmt: skip


# -- where nothing is to be found --------------------------------------------------------------------------------------

CLEAN = {"a plain loop": Loop, "a linear model": Flat, "real targets": Reals}


def clean(name):
    def enter(loop):
        CLEAN[name] = loop
        return loop

    return enter


@clean("texts, of which padding adds nothing")
class _(Texts):
    def model(self, rows):
        return SumOfWords()


@clean("dropout, a mask for each example")
class _(Loop):
    def model(self, rows):
        return nn.Sequential(nn.Dropout(0.3), *super().model(rows))


@clean("an augmentation that draws equally often")
class _(Loop):
    def data(self, rows):
        return [(x * (torch.rand(WIDTH) > 0.3), y) for x, y in rows]


@clean("a learning rate that decays with the step")
class _(Loop):
    def after(self, losses, step):
        self.lr *= 0.9


@clean("what was released is printed, logged and written")
class _(Loop):
    def after(self, losses, step):
        weight = float(self.net[0].weight.norm())
        print(weight, losses.shape)
        logging.getLogger("user").warning("%f", weight)
        (self.folder / f"{step}.json").write_text(json.dumps(weight))


@clean("a clip norm that follows what was released")
class _(Loop):
    def losses(self, x, y):
        return super().losses(x, y) * float(self.net[0].weight.detach().norm())


@clean("the step is counted in a buffer")
class _(Loop):
    def model(self, rows):
        model = super().model(rows)
        model.register_buffer("steps", torch.ones(()))
        return model

    def losses(self, x, y):
        self.net.steps = self.net.steps + 1
        return super().losses(x, y) / float(self.net.steps)


@clean("labels that are none of the classes count for nothing")
class _(Loop):
    kinds = ("another label", "negative label", "label beyond the others", "ignored label", "other values")

    def losses(self, x, y):
        known = (y >= 0) & (y < CLASSES)
        return F.cross_entropy(self.net(x), y.clamp(0, CLASSES - 1), reduction="none") * known


@clean("a public order")
class _(Loop):
    def order(self, rows):
        return torch.arange(N)


@clean("the certificate and the weights are returned")
class _(Loop):
    def __call__(self, rows, folder):
        return {"weights": super().__call__(rows, folder).state_dict(), "plan": PLAN, "steps": [1, 2.0, None, "x"]}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_loop_raises_no_alarm(name):
    report = run(CLEAN[name]())
    report.raise_if_found()
    assert report.kinds == set()
    assert report.moved
    assert 0 < report.own <= 2.0001


def test_at_least_ten_loops_are_clean():
    assert len(CLEAN) >= 10


# -- the numbers -------------------------------------------------------------------------------------------------------


def given(totals, n=4, absent=False, **options):
    """A run that releases these totals, the first of which is the unit's."""
    plan = options.pop("plan", None) or ao.plan(
        dataset_size=n, batch_size=1, epochs=1, epsilon=2, delta=1e-4, **options
    )

    def train(values, folder):
        release = ao.Release(plan, 2)
        for t, value in enumerate(values):
            release.step(
                [] if value is None else [t], np.zeros(2) if value is None else np.array(value) * plan.clip_norm
            )

    rest = [(0.5, 0.5)] * (n - 1)
    return plan, check(train, [(1.0, 0.0), *rest], others=[Neighbour("x", totals, is_absent=absent)])


@pytest.mark.parametrize("mechanism", ["independent", "tree"])
def test_the_epsilon_is_that_of_the_distance(mechanism):
    """By hand: the unit's own sum moves by 3 in each of two coordinates, through the first column of C."""
    plan, report = given([(4.0, 3.0), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5)], mechanism=mechanism)
    [channel] = report.channels
    assert (channel.kind, channel.step, channel.allowed, channel.claimed) == ("own step", 0, 2.0, plan.epsilon)
    assert channel.distance == pytest.approx(18**0.5)
    column = np.linalg.norm(plan.strategy.matrix()[:, 0])
    expected = gdp_epsilon(column * 18**0.5 * plan.clip_norm / plan.noise_std, plan.delta)
    assert channel.epsilon == pytest.approx(expected, rel=1e-6)


def test_one_bit_of_a_sum_of_others_is_found():
    _, report = given([(0.0, 1.0), (0.5, 0.5), (0.5, np.nextafter(0.5, 1)), (0.5, 0.5)])
    [channel] = report.channels
    assert (channel.kind, channel.step) == ("sum of others", 2)


def test_an_own_step_may_move_by_twice_the_clip_norm_and_by_once_where_the_unit_is_left_out():
    rest = [(0.5, 0.5)] * 3
    given([(-1.0, 0.0), *rest])[1].raise_if_found()
    given([None, *rest], absent=True)[1].raise_if_found()
    for value, absent in (((-1.01, 0.0), False), ((-0.01, 0.0), True)):
        _, report = given([value, *rest], absent=absent)
        assert report.kinds == {"own step"}


def test_all_rows_of_a_unit_are_changed_and_no_others():
    changed = {one.name: one.dataset for one in neighbours(ROWS, rows=(1, 4))}
    for name in ("another unit's row", "zeros", "NaN", "another label"):
        assert [i for i in range(N) if not same(changed[name][i], ROWS[i])] == [1, 4]


def test_others_in_a_step_are_found():
    _, report = given([None, (0.5, 0.5), (0.5, 0.5), (0.5, 0.5)])
    assert "units" in report.kinds


def test_later_steps_are_compared_after_the_same_releases():
    """A loop whose sums follow the releases is not told from one that replays them."""
    plan = ao.plan(dataset_size=4, batch_size=1, epochs=1, epsilon=2, delta=1e-4)

    def train(values, folder):
        release, before = ao.Release(plan, 1), np.zeros(1)
        for t, value in enumerate(values):
            before = release.step([t], np.array([value]) * 0.5 + 0.5 * np.tanh(before))
        return before

    check(train, [1.0, 0.0, 0.0, 0.0], others=[Neighbour("x", [-1.0, 0.0, 0.0, 0.0])]).raise_if_found()


# -- what is refused ---------------------------------------------------------------------------------------------------


def nothing(rows, folder):
    pass


def fails(rows, folder):
    raise ValueError("no")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nothing, ROWS), "released nothing"),
        ((fails, ROWS), "ended with ValueError: no"),
        ((Loop(), ROWS, {"unit": 99}), "is in no step"),
        ((Loop(), ROWS, {"rows": (99,)}), "rows must be places"),
        ((Loop(), ROWS, {"kinds": ("no",)}), "kinds must be of"),
        ((Loop(), ROWS, {"kinds": ("NaN",), "others": []}), "not both"),
        ((Loop(), ROWS, {"others": []}), "must have a neighbour"),
        ((Loop(), ROWS, {"others": [Neighbour("the same", ROWS)]}), "nothing was tried"),
    ],
)
def test_a_check_that_would_try_nothing_is_refused(arguments, words):
    train, rows, *options = arguments
    with pytest.raises(ArgumentError, match=words):
        check(train, rows, **(options[0] if options else {}))


def test_the_global_generators_and_streams_are_as_they_were(capfd):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    run(Loop())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])  # noqa: NPY002
    print("to be seen")
    assert capfd.readouterr().out == "to be seen\n"


# -- the plugin --------------------------------------------------------------------------------------------------------

pytest_plugins = ["anyorder.audit.pytest_plugin", "pytester"]

OF_A_USER = """
import numpy as np
import pytest
import anyorder as ao
from anyorder.errors import IsolationError

pytest_plugins = ["anyorder.audit.pytest_plugin"]
PLAN = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=1, delta=1e-3)

def train(rows, folder, after=lambda batch: None):
    release = ao.Release(PLAN, 2)
    for t in (0, 2):
        batch, units = np.array(rows[t : t + 2]), [t, t + 1]
        release.step(units, ao.bounded_sum(batch, units, PLAN.clip_norm))
        after(batch)

def test_clean(isolation):
    assert isolation(train, [np.ones(2) * i for i in range(4)]).steps == 2

def test_leaks(isolation):
    isolation(lambda rows, folder: train(rows, folder, after=print), [np.ones(2) * i for i in range(4)])
"""


def test_the_fixture_fails_a_loop_that_leaks(pytester):
    pytester.makepyfile(OF_A_USER)
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*IsolationError: isolation: * 1 kind(s) of channel*", "*output [[]*"])


def test_the_page_s_test_file_fails_for_the_planted_channel_alone(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guarantee.md").read_text()
    [block] = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "# test_my_loop.py" in one]
    (tmp_path / "test_my_loop.py").write_text(block)
    told = processes.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path).stdout
    assert "1 failed, 1 passed" in told
    assert "FAILED test_my_loop.py::test_my_loop - anyorder.errors.IsolationError" in told
    assert re.search(r"own step \[huge values, step \d\]: moved by \d\.\d+ clip norms where 2 is allowed", told)
    assert re.search(r"units \[huge values, step \d\]: others are in this step", told)
