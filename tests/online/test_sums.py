"""Clipped sums: against gradients made one by one, the bound in exact arithmetic, and units that know of no other."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy import sparse

import anyorder as ao
from anyorder.errors import ArgumentError
from anyorder.online import sums
from anyorder.online.losses import CustomLoss, Hinge, Logistic, PoissonLoss, Softmax, Squared
from anyorder.online.sums import clipped_sum

D = 6
LOSSES = [Logistic(), Softmax(3), Hinge(), Squared(), PoissonLoss()]
FORMATS = {
    "dense": np.asarray,
    "csr": sparse.csr_array,
    "csc": sparse.csc_array,
    "coo matrix": sparse.coo_matrix,
}


def batch(generator, loss, m=40, units=40):
    X = generator.normal(size=(m, D)) * (generator.uniform(size=(m, D)) < 0.5)
    y = generator.integers(0, 2, m)
    return X, y, generator.permutation(np.arange(m) % units), generator.normal(size=(D, loss.outputs))


def by_examples(loss, theta, X, y, units, clip_norm):
    """The equation: gradients one by one, added by unit, cut, added."""
    gradients = np.stack(
        [np.outer(x, loss.slope((x @ theta)[None], [label])[0]) for x, label in zip(X, y, strict=True)]
    )
    return ao.bounded_sum(gradients, units, clip_norm)


def test_it_is_the_sum_of_gradients_made_one_by_one():
    for loss, units, kind in product(LOSSES, [40, 13], FORMATS):
        X, y, names, theta = batch(np.random.default_rng(3), loss, units=units)
        for clip_norm in (0.05, 1.0, 1e6):
            made = clipped_sum(loss, theta, FORMATS[kind](X), y, names, clip_norm)
            assert np.array_equal(made.names, np.arange(units))
            assert np.allclose(made.total, by_examples(loss, theta, X, y, names, clip_norm), rtol=1e-11, atol=1e-11)


def test_units_of_many_rows_are_made_in_blocks(monkeypatch):
    generator = np.random.default_rng(5)
    for block in (1, 40, 2**16):
        monkeypatch.setattr(sums, "_BLOCK", block)
        for m in (1, 7, 40, 90):
            X, y, _, theta = batch(generator, Softmax(3), m)
            units = generator.integers(0, m // 3 + 1, m)
            made = clipped_sum(Softmax(3), theta, X, y, units, 0.5).total
            assert np.allclose(made, by_examples(Softmax(3), theta, X, y, units, 0.5), rtol=1e-11, atol=1e-11)


def test_names_may_be_words_and_rows_few():
    X, y, names, theta = batch(np.random.default_rng(4), Logistic(), 9, 4)
    as_words = clipped_sum(Logistic(), theta, X, y, [f"u{i}" for i in names], 0.1)
    assert as_words.names == ["u0", "u1", "u2", "u3"]
    assert np.array_equal(as_words.total, clipped_sum(Logistic(), theta, X, y, names, 0.1).total)
    for empty in (np.zeros((0, D)), sparse.csr_array((0, D))):
        nobody = clipped_sum(Logistic(), theta, empty, np.zeros(0), [], 0.1)
        assert len(nobody.names) == 0
        assert np.array_equal(nobody.total, np.zeros((D, 1)))


def exact_norm_squared(values):
    return sum(Fraction(float(value)) ** 2 for value in np.asarray(values).reshape(-1))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("clip_norm", [2.0**-60, 0.3, 1.0, 7.0, 2.0**60])
def test_no_unit_is_longer_than_the_norm_in_exact_arithmetic(clip_norm, rows):
    """Of a batch of one unit the total is that unit's vector."""
    generator = np.random.default_rng(6)
    longest = Fraction(0)
    for _ in range(60):
        for scale in (1.0, 1e-170, 1e40):
            X = generator.normal(size=(rows, 5)) * scale
            theta = np.zeros((5, 3))
            y = generator.integers(0, 3, rows)
            total = clipped_sum(Softmax(3), theta, X, y, np.zeros(rows, int), clip_norm).total
            longest = max(longest, exact_norm_squared(total))
    assert longest <= Fraction(clip_norm) ** 2
    assert longest >= Fraction(clip_norm) ** 2 * (1 - Fraction(2) ** -45)


@pytest.mark.parametrize("units", [[0, 0], [0, 1]])
@pytest.mark.parametrize("clip_norm", [2.0**-60, 2.0**60])
def test_gradients_near_the_least_and_the_largest_norm_are_cut_to_it(clip_norm, units):
    """Or kept as they are, where they are just shorter."""
    for times in (0.5, 0.99, 1.01, 2.0, 1e3, 1e9):
        X = np.array([[0.6, -0.8], [0.0, 0.0]]) * times * clip_norm
        total = clipped_sum(Squared(), np.zeros((2, 1)), X, [-1.0, -1.0], units, clip_norm).total
        assert np.linalg.norm(total) <= clip_norm
        assert np.linalg.norm(total) == pytest.approx(min(1.0, times) * clip_norm, rel=1e-9, abs=0)


@pytest.mark.parametrize("units", [[0, 0], [0, 1]])
@pytest.mark.parametrize("d", [1, 1000])
def test_the_room_that_the_proof_takes_for_rounding_is_left(d, units):
    """It grows with the size of theta: few sums round so badly, and the bound is for those that do."""
    X = np.zeros((2, d))
    X[0, 0] = 3.0
    total = clipped_sum(Squared(), np.zeros((d, 1)), X, [-1.0, -1.0], units, 1.0).total
    assert 1 - 4 * (d + 16) * 2.0**-52 < np.linalg.norm(total) <= 1 - (d + 12) * 2.0**-52


def test_short_rows_of_steep_slopes_are_cut_too():
    """Where a square underflows or overflows, the product of the two norms must be right all the same."""
    for height, length in product(
        [1e-320, 1e-200, 1e-160, 1e-30, 1.0, 1e30, 1e59], [1e-320, 1e-200, 1e-160, 1e-30, 1.0, 1e30, 1e59]
    ):
        x = np.array([[0.6 * length, -0.8 * length]])
        total = clipped_sum(Squared(), np.zeros((2, 1)), x, [-height], [1], 1.0).total
        norm = np.linalg.norm(total)
        assert norm <= 1
        if length > 1e-150:
            assert norm == pytest.approx(min(1.0, length * height), rel=1e-9)


BAD = {
    "NaN": (np.nan, 1),
    "inf": (np.inf, 1),
    "minus inf": (-np.inf, 1),
    "overflow": (1e200, 1),
    "beyond 2^200": (2e60, 1),
    "label": (1.0, 7),
    "label NaN": (1.0, np.nan),
}


def test_what_cannot_be_used_is_the_zero_vector_of_its_unit():
    for loss, name, mate, kind in product(
        [*LOSSES, CustomLoss(lambda theta, X, y: X * 1.0)], BAD, [False, True], ["dense", "csr"]
    ):
        if (isinstance(loss, (Squared, PoissonLoss, CustomLoss)) and BAD[name][1] == 7) or (
            isinstance(loss, CustomLoss) and (kind == "csr" or BAD[name][1] != 1)
        ):
            continue  # 7 is a label of these; a custom gradient has its own say about labels, and is given X as it came
        X, _, names, theta = batch(np.random.default_rng(8), loss, 12, 12)
        y = np.ones(12)
        X[5, 2], y[5] = BAD[name]
        if mate:
            names[4] = names[5]
        left = names != names[5]
        with_it = clipped_sum(loss, theta, FORMATS[kind](X), y, names, 0.5)
        without = clipped_sum(loss, theta, FORMATS[kind](X[left]), y[left], names[left], 0.5)
        assert names[5] in with_it.names
        assert np.isfinite(with_it.total).all()
        assert np.allclose(with_it.total, without.total, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", ["dense", "csr"])
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_units_vector_has_the_same_bits_whoever_else_is_there(loss, kind):
    """Others add zero, or stand in other rows: what is left of the total is this unit's alone."""
    generator = np.random.default_rng(9)
    for d in (3, 17, 100, 257):
        theta = generator.normal(size=(d, loss.outputs))
        for rows in (1, 2, 5):
            x, y = generator.normal(size=(rows, d)), generator.integers(0, 2, rows)
            alone = clipped_sum(loss, theta, FORMATS[kind](x), y, [1] * rows, 0.7).total
            for others in (1, 3, 8, 50, 255):
                place = int(generator.integers(0, others + 1))
                X = np.insert(generator.normal(size=(others, d)), [place] * rows, x, axis=0)
                labels = np.insert(np.full(others, np.nan), [place] * rows, y)
                names = np.insert(np.arange(2, others + 2), [place] * rows, 1)
                assert np.array_equal(clipped_sum(loss, theta, FORMATS[kind](X), labels, names, 0.7).total, alone)


def test_scores_do_not_depend_on_where_a_row_stands():
    """A kernel for many rows rounds some of them otherwise; at the kink of the hinge that is a whole vector."""
    generator = np.random.default_rng(10)
    for d in (5, 33, 100):
        for outputs in (1, 4):
            X, theta = generator.normal(size=(64, d)), generator.normal(size=(d, outputs))
            whole = sums._scores(X, theta)
            for m in (1, 2, 7, 31, 63):
                assert np.array_equal(sums._scores(X[-m:], theta), whole[-m:])
            assert np.array_equal(sums._scores(X[::-1].copy(), theta), whole[::-1])


def test_an_element_in_two_parts_is_one():
    parts = sparse.csr_array(([3.0, 3.0, 1.0], [1, 1, 0], [0, 2, 3]), shape=(2, 2))
    assert not parts.has_canonical_format
    parts.has_canonical_format = True  # as one may be told that was made so
    whole = np.array([[0.0, 6.0], [1.0, 0.0]])
    theta, y = np.zeros((2, 1)), [-1.0, -1.0]
    made = clipped_sum(Squared(), theta, parts, y, [0, 1], 1.0).total
    assert np.array_equal(made, clipped_sum(Squared(), theta, whole, y, [0, 1], 1.0).total)
    assert parts.nnz == 3


def test_sparse_rows_are_never_made_dense():
    """10^6 columns: the 10 000 rows would take 80 GB."""
    d, m = 10**6, 10_000
    generator = np.random.default_rng(12)
    columns = generator.integers(0, d, (m, 5))
    X = sparse.csr_array((np.ones(5 * m), columns.reshape(-1), np.arange(0, 5 * m + 1, 5)), shape=(m, d))
    made = clipped_sum(Logistic(), np.zeros((d, 1)), X, np.ones(m), np.arange(m) // 2, 1.0)
    assert np.count_nonzero(made.total) == len(np.unique(columns))


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, np.uint16, np.float16])
def test_all_kinds_of_numbers_are_taken(dtype):
    X = np.array([[1, 0], [1, 1]], dtype)
    theta, y = np.zeros((2, 1)), np.array([0, 1], np.uint8)
    want = clipped_sum(Logistic(), theta, X.astype(float), y, [0, 1], 0.5).total
    assert np.array_equal(clipped_sum(Logistic(), theta, X, y, [0, 1], 0.5).total, want)
    if dtype is not np.float16:
        assert np.array_equal(clipped_sum(Logistic(), theta, sparse.csr_array(X), y, [0, 1], 0.5).total, want)


def test_a_custom_gradient_is_cut_row_by_row_and_sees_what_was_given():
    seen = []

    def gradient(theta, X, y):
        seen.append((theta, X, y))
        return X * (X @ theta - y[:, None])

    X, y, names, theta = batch(np.random.default_rng(13), Squared(), units=17)
    made = clipped_sum(CustomLoss(gradient), theta, X, y, names, 0.4)
    assert np.allclose(made.total, clipped_sum(Squared(), theta, X, y, names, 0.4).total)
    assert seen[0][1] is X
    with pytest.raises(ValueError, match="read-only"):
        seen[0][0][0] = 1.0


def test_a_custom_gradient_of_several_outputs():
    loss = Softmax(3)
    own = CustomLoss(lambda theta, X, y: X[:, :, None] * loss.slope(X @ theta, y)[:, None, :], outputs=3)
    X, y, names, theta = batch(np.random.default_rng(14), loss, units=17)
    assert np.allclose(
        clipped_sum(own, theta, X, y, names, 0.4).total, clipped_sum(loss, theta, X, y, names, 0.4).total
    )


CALL = {"loss": Logistic(), "theta": np.zeros((2, 1)), "X": np.eye(2), "y": [0, 1], "units": [0, 1], "clip_norm": 1.0}


def test_shapes_and_types_are_refused():
    for wrong in [
        {"theta": np.zeros(2)},
        {"theta": np.zeros((2, 3))},
        {"theta": np.zeros((3, 1))},
        {"theta": np.zeros((2, 1), complex)},
        {"X": np.zeros(2)},
        {"X": np.zeros((3, 2))},
        {"X": np.zeros((2, 2), complex)},
        {"X": [["a", "b"], ["c", "d"]]},
        {"X": np.ma.masked_array(np.eye(2))},
        {"X": sparse.csr_array(np.eye(3)[:2])},
        {"X": sparse.csr_array(np.eye(2) * 1j)},
        {"y": [0]},
        {"y": [[0], [1]]},
        {"y": ["no", "yes"]},
        {"y": np.array([0, "word"], object)},
        {"units": [0]},
        {"units": None},
        {"units": [0.5, 1.5]},
        {"clip_norm": 0.0},
        {"clip_norm": 2.0**-61},
        {"clip_norm": 2.0**61},
        {"clip_norm": np.inf},
        {"loss": CustomLoss(lambda theta, X, y: np.zeros(2))},
        {"loss": CustomLoss(lambda theta, X, y: np.zeros((2, 3)))},
        {"loss": CustomLoss(lambda theta, X, y: np.zeros((2, 2), complex))},
        {"theta": np.zeros((2, 3)), "loss": CustomLoss(lambda theta, X, y: np.zeros((2, 6)), outputs=3)},
    ]:
        with pytest.raises(ArgumentError):
            clipped_sum(**CALL | wrong)


def test_a_sparse_array_that_points_outside_is_refused():
    X = sparse.csr_array(np.eye(2))
    X.indices[1] = 9
    with pytest.raises(ArgumentError, match="no whole sparse array"):
        clipped_sum(**CALL | {"X": X})
