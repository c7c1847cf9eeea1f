"""Audits of any program's arrays: scores by hand, files, what does not fit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.app import AuditSummary
from anyorder.app.cli import app
from anyorder.audit import arrays
from anyorder.audit.canaries import sampled_scores
from anyorder.audit.result import Audited, Stated
from anyorder.errors import ArgumentError
from anyorder.strategy import BLT, Tree

RNG = np.random.default_rng(0)
ROWS = np.array([[3.0, 0.0, 1.0], [1.0, 2.0, 0.0], [0.0, -1.0, 5.0]])
CLAIM = (1.0, 1e-5)


def rows(released=ROWS, **options) -> Audited:
    given = {"canaries": [0, 2], "included": [1, 0], "claim": CLAIM, "noise_std": 2.0, "steps": "all"} | options
    return ao.audit.from_rows(released, **given)


def test_scores_by_hand() -> None:
    audited = rows(steps=[[0, 1], [2]])
    np.testing.assert_allclose(audited.scores, [4 / 2**0.5, 5.0])
    np.testing.assert_allclose(audited.mus, [2**0.5 / 2, 0.5])
    assert audited.included.tolist() == [True, False]
    assert (audited.epsilon, audited.delta, audited.curve) == (1.0, 1e-5, Stated(1.0, 1e-5))
    np.testing.assert_allclose(rows(neighbours="replace-one", clip_norm=3.0).mus, 3 * 3**0.5)


def test_neighbours_are_those_of_the_claim(tmp_path: Path) -> None:
    """A coin that turns a gradient around is twice what a claim of zero-out is about: it would refute a true one."""
    assert rows(neighbours="replace-one").curve.neighbours == "replace-one"
    with pytest.raises(ArgumentError, match="neighbours"):
        rows(claim=Gaussian(1.0), delta=1e-5, neighbours="replace-one")
    with pytest.raises(ArgumentError, match="neighbours"):
        rows(claim=Gaussian(1.0, neighbours="replace-one"), delta=1e-5)
    rows(claim=Gaussian(1.0, neighbours="add-or-remove"), delta=1e-5)
    fields = {name: value for name, value in FIELDS.items() if name != "epsilon"}
    found = ao.audit.from_file(written(tmp_path, **fields, mu=1.0, neighbours="replace-one"))
    assert found.curve == Gaussian(1.0, neighbours="replace-one")


def test_correlated_by_hand() -> None:
    """C = [[1, 0, 0], [.5, 1, 0], [0, .5, 1]]: of step 1, C pi = (0, 1, .5), and C of column 0 is (3, 2.5, .5)."""
    by_hand = (2.5 + 0.25) / 1.25**0.5
    C = np.eye(3) + 0.5 * np.eye(3, k=-1)
    for strategy in ([1.0, 0.5], C, C.tolist()):
        audited = rows(canaries=[0], included=[1], steps=[1], strategy=strategy)
        assert audited.scores[0] == pytest.approx(by_hand)
        assert audited.mus[0] == pytest.approx(1.25**0.5 / 2)


def test_all_ways_to_name_canaries_agree() -> None:
    canaries = ao.audit.Canaries(size=3, count=2, dimension=3, seed=4)
    by_vectors = rows(canaries=canaries.vectors(), steps=[0, 2])
    np.testing.assert_allclose(rows(canaries=canaries, steps=[0, 2]).scores, by_vectors.scores)
    np.testing.assert_allclose(rows(canaries=np.eye(3)[[0, 2]]).scores, rows().scores)


def test_all_ways_to_hand_over_rows_agree(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS.astype(np.float32))
    expected = rows().scores
    for released in (ROWS.tolist(), iter(ROWS), np.load(tmp_path / "rows.npy", mmap_mode="r"), ROWS.reshape(3, 3, 1)):
        np.testing.assert_allclose(rows(released).scores, expected)


@pytest.mark.parametrize("strategy", [BLT([0.9, 0.5], [0.1, 0.2], 8), Tree(8), Tree(8, "online")], ids=repr)
def test_strategies_as_elsewhere(strategy) -> None:
    """The same numbers as `ao.audit.scores`, which streams."""
    canaries = ao.audit.Canaries(size=5, count=3, dimension=5, seed=1)
    released, steps = RNG.standard_normal((8, 5)), [[0, 4], [1, 5], [3, 7]]
    audited = rows(released, canaries=canaries, included=[1, 0, 1], steps=steps, strategy=strategy)
    streamed = ao.audit.scores(released, ao.audit.canaries.as_released(strategy), steps, canaries)
    np.testing.assert_allclose(audited.scores, streamed, atol=1e-10)


def test_secret_steps_as_elsewhere() -> None:
    canaries = ao.audit.Canaries(size=5, count=3, dimension=5, seed=1)
    released = RNG.standard_normal((8, 5))
    options = {"sampling_probability": 0.25, "clip_norm": 0.5, "noise_std": 0.75}
    audited = rows(released, canaries=canaries, included=[1, 0, 1], **options)
    np.testing.assert_allclose(audited.scores, sampled_scores(released, canaries, **options))
    assert audited.mus is None
    assert audited.noise_std is None


def test_secret_steps_of_cyclic_sampling() -> None:
    """Two bands, group 0 of two, q = 0.5: a product over the two steps of the group, of two halves each."""
    c, y = np.array([1.0, 0.5]), RNG.standard_normal(4)
    C = np.eye(4) + 0.5 * np.eye(4, k=-1)
    z = C @ y
    densities = [np.exp(-np.square(z - C @ np.array(pi)).sum() / 2) for pi in
                 ([0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 1, 0])]  # fmt: skip
    expected = np.log(np.mean(densities) / densities[0])
    audited = rows(
        y[:, None], canaries=[0], included=[1], noise_std=1.0, strategy=c, steps=[0, 2], sampling_probability=0.5
    )
    assert audited.scores[0] == pytest.approx(expected)


@pytest.mark.parametrize("claimed", [True, False], ids=["true", "half the noise"])
def test_verdict(claimed: bool) -> None:
    """1000 canaries, mu = sqrt(3): a true claim is not refuted, a claim of half of it is."""
    canaries, included = np.arange(1000), np.arange(1000) % 2 == 0
    released = RNG.standard_normal((3, 1000)) + included
    claim = Gaussian(3**0.5 if claimed else 3**0.5 / 2)
    audited = rows(
        released, canaries=canaries, included=included, noise_std=1.0, claim=claim, delta=1e-5, independent=True
    )
    assert audited.refuted() is not claimed
    low, high = audited.mu_estimate()
    assert low < 3**0.5 + 0.3
    assert high > 3**0.5 - 0.3


def test_a_pair_is_no_curve() -> None:
    """A mechanism that gives a coin away with probability 1e-2 keeps (0, 1e-2): no verdict may read a mu into that."""
    included = RNG.random(2000) < 0.5
    scores = np.where(RNG.random(2000) < 0.01, 2.0 * included - 1, 0.0)
    for independent in (False, True):
        audited = ao.audit.from_scores(scores, included=included, claim=(0.0, 0.01), independent=independent)
        assert audited.method == ("clopper_pearson" if independent else "f_dp")
        assert not audited.refuted()
        assert audited.lower_bound() == 0
        assert audited.to_dict()["mu"] is None
    broken = ao.audit.from_scores(2.0 * included, included=included, claim=(1.0, 0.01), independent=True)
    assert broken.refuted()
    assert broken.lower_bound() > 3


def test_a_stated_pair_takes_the_better_of_two_tests() -> None:
    rng = np.random.default_rng(0)
    included = rng.random(2000) < 0.5
    released = included * np.ones((3, 1)) + rng.standard_normal((3, 2000))
    audited = rows(
        released, canaries=np.arange(2000), included=included, noise_std=1.0, claim=(2.87, 1e-5), independent=True
    )
    both = [audited.p_value(method) for method in ("clopper_pearson", "f_dp")]
    assert audited.p_value() == min(1.0, 2 * min(both))
    assert AuditSummary.of(audited).p_value == audited.p_value()
    assert not audited.refuted()
    assert AuditSummary.of(audited).above == ("one_run", "f_dp", "gaussian")
    words = (
        "not refuted at 1e-06, but 3 of the bounds lie above the claim, as they do in up to one true claim of twenty"
    )
    assert words in str(AuditSummary.of(audited))
    true = AuditSummary.of(replace(audited, epsilon=8.39, curve=Stated(8.39, 1e-5)))
    assert true.above == ()
    assert "does not speak against the claim" in str(true)
    assert str(audited).splitlines()[0] == "claimed_epsilon: 2.87 at delta 1e-05"
    assert "not refuted at 1e-06" in str(audited)
    assert "claimed_epsilon=2.87" in repr(audited)
    told = audited.to_dict()
    assert (told["lower_bound_method"], told["method"]) == ("one_run", "clopper_pearson, f_dp")
    assert "one_run" in str(audited)
    informed = replace(audited, informed=True)
    for shown in (str(informed), str(AuditSummary.of(informed))):
        assert "as secret as the data" in shown
        assert "not refuted" not in shown
    assert "not refuted" in str(replace(informed, run_discarded=True))


def test_secret_sampling_has_no_mu() -> None:
    from anyorder.accounting.curves import Sampled

    curve = Sampled(2.0, 0.1, 3)
    audited = replace(rows(), curve=curve)
    with pytest.raises(ArgumentError, match="under secret sampling they are log likelihood ratios"):
        audited.mu_estimate()


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_tensors_of_any_kind_are_taken(kind: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(ROWS, dtype=getattr(torch, kind), requires_grad=True)
    np.testing.assert_array_equal(rows(tensor).scores, rows().scores)  # small integers, exact in all
    np.testing.assert_array_equal(rows(list(tensor)).scores, rows().scores)
    scores = tensor[0]
    audited = ao.audit.from_scores(scores, included=torch.tensor([True, False, True]), claim=CLAIM)
    assert audited.scores.tolist() == [3.0, 0.0, 1.0]
    assert ao.audit.epsilon_lower_bound(scores, [1, 0, 1], 1e-5) == 0


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (np.zeros((3, 3)), "must have an inverse"),
        (np.zeros(3), "must have an inverse"),
        (np.zeros((4, 3)), "rank below 3"),
        (np.triu(np.ones((3, 3))), "must be lower triangular"),
    ],
)
def test_strategies_that_are_none(strategy: np.ndarray, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        rows(strategy=strategy)


def written(folder: Path, **fields) -> Path:
    np.savez(folder / "audit.npz", **fields)
    return folder / "audit.npz"


FIELDS = {
    "released": ROWS, "canaries": [0, 2], "included": [1, 0], "noise_std": 2.0, "epsilon": 1.0, "delta": 1e-5,
    "steps": "all",
}  # fmt: skip


def test_files(tmp_path: Path) -> None:
    fields = FIELDS | {
        "steps": [[0, 1], [2, -1]],
        "strategy": [1.0, 0.5],
        "clip_norm": 0.5,
        "neighbours": "replace-one",
    }
    found = ao.audit.from_file(written(tmp_path, **fields))
    expected = rows(steps=[[0, 1], [2]], strategy=[1.0, 0.5], clip_norm=0.5, neighbours="replace-one")
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(found.mus, expected.mus)
    rest = {name: value for name, value in fields.items() if name != "released"}
    np.save(tmp_path / "rows.npy", ROWS)
    apart = ao.audit.from_file(written(tmp_path, **rest), released=tmp_path / "rows.npy")
    np.testing.assert_array_equal(apart.scores, expected.scores)
    scored = ao.audit.from_file(written(tmp_path, scores=[1.0, 2.0], included=[True, False], mu=0.5, delta=1e-5))
    assert scored.curve == Gaussian(0.5)
    assert scored.scores.tolist() == [1.0, 2.0]
    sampled = written(tmp_path, **FIELDS, sampling_probability=0.5, independent=True)
    assert ao.audit.from_file(sampled).method == "clopper_pearson"


def test_independent_scores_that_are_not_normal_are_not_judged_as_if_they_were():
    rows = {"canaries": [0, 1], "included": [1, 0], "claim": Gaussian(2.0), "delta": 1e-5, "noise_std": 1.0}
    rows["steps"] = "all"
    given = ao.audit.from_rows([[5.0, 0.1]], **rows, sampling_probability=0.5, independent=True)
    assert given.methods == ("clopper_pearson", "f_dp")  # log likelihood ratios
    losses = ao.audit.from_scores([1.0, 2.0], included=[1, 0], claim=Gaussian(2.0), delta=1e-5, independent=True)
    assert losses.methods == ("clopper_pearson", "f_dp")
    assert ao.audit.from_rows([[5.0, 0.1]], **rows, independent=True).methods == ("gaussian",)


def test_forgotten_steps_are_refused_and_do_not_hide_a_fault(tmp_path: Path) -> None:
    """Each canary in one step of 200, half the noise of the claim. A score over all steps sees none of it."""
    rng, count = np.random.default_rng(0), 400
    coins, own = rng.random(count) < 0.5, rng.integers(200, size=count)
    released = 0.25 * rng.standard_normal((200, count))
    released[own, np.arange(count)] += coins
    fields = {"canaries": np.arange(count), "included": coins, "noise_std": 0.5, "mu": 2.0, "delta": 1e-5}
    fields |= {"released": released, "independent": True}
    assert ao.audit.from_file(written(tmp_path, **fields, steps=own[:, None])).refuted()
    assert not ao.audit.from_file(written(tmp_path, **fields, steps="all")).refuted()
    with pytest.raises(ArgumentError, match="must have the fields steps"):
        ao.audit.from_file(written(tmp_path, **fields))
    with pytest.raises(ArgumentError, match="steps must be the steps of each canary"):
        rows(steps=None)


def command(file: Path, *options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["audit", "arrays", str(file), *options])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("epsilon", [4.91, 1.07], ids=["true", "too small"])
def test_command(tmp_path: Path, epsilon: float) -> None:
    included = RNG.random(4000) < 0.5
    fields = {
        "released": RNG.standard_normal((3, 4000)) + included, "canaries": np.arange(4000), "included": included,
        "noise_std": 1.0, "epsilon": epsilon, "delta": 0.01, "independent": True, "steps": "all",
    }  # fmt: skip
    code, shown, _ = command(written(tmp_path, **fields))
    assert code == (epsilon < 4)
    assert f"epsilon <= {epsilon}" in shown
    assert ("REFUTED" in shown) == (epsilon < 4)
    code, shown, _ = command(written(tmp_path, **fields), "--json")
    found = json.loads(shown)
    assert code == found["refuted"] == (epsilon < 4)
    assert set(found["epsilon_at_least"]) == {"one_run", "f_dp", "gaussian", "clopper_pearson"}
    scores = {"scores": [1.0, 2.0, 3.0, 0.0], "included": [1, 1, 0, 0], "epsilon": 1.0, "delta": 1e-5}
    code, shown, _ = command(written(tmp_path, **scores), "--json")
    assert code == 0
    assert set(json.loads(shown)["epsilon_at_least"]) == {"one_run", "clopper_pearson"}
    code, shown, problem = command(tmp_path / "none.npz")
    assert code == 2
    assert shown == ""
    assert "none.npz" in problem


def test_a_program_that_forgot_its_noise_is_refuted_and_no_error(tmp_path: Path) -> None:
    included = np.arange(40) % 3 == 1
    fields = {
        "released": np.ones((3, 1)) * included, "canaries": np.arange(40), "included": included, "noise_std": 1.0,
        "mu": 2.0, "delta": 1e-5, "independent": True, "steps": "all",
    }  # fmt: skip
    code, shown, problem = command(written(tmp_path, **fields), "--json")
    assert (code, problem) == (1, "")
    found = json.loads(shown)
    assert found["refuted"] is True
    assert found["mu_seen"] is None
    nothing = {"scores": np.zeros(40), "included": included, "epsilon": 1.0, "delta": 1e-5}
    code, shown, problem = command(written(tmp_path, **nothing), "--json")
    assert (code, problem) == (0, "")
    assert json.loads(shown)["p_value"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stepz": [0]}, "stepz"),
        ({"included": None}, "included"),
        ({"delta": None}, "delta"),
        ({"epsilon": None}, "epsilon or mu"),
        ({"mu": 1.0}, "not both"),
        ({"noise_std": [1.0, 2.0]}, "noise_std must be one value"),
        ({"included": 1}, "included must be arrays"),
        ({"noise_std": 0.0}, "noise_std must be above 0"),
        ({"included": [1, 0, 1]}, "one for each of 3 draws"),
        ({"included": [1, 2]}, "0 and 1"),
        ({"canaries": [0, 3]}, "one beyond"),
        ({"canaries": [0, 0]}, "distinct"),
        ({"canaries": [[2.0, 0, 0], [0, 1, 0]]}, "norm 1"),
        ({"canaries": [[0.9, 0, 0], [0, 1, 0]]}, "norm 1"),
        ({"canaries": [[1.0, 0], [0, 1]]}, "2 coordinates"),
        ({"steps": [[0, 3], [1, 2]]}, "steps"),
        ({"strategy": [1.0, 1, 1, 1]}, "at most n=3"),
        ({"strategy": np.eye(4)}, "column for each of 3"),
        ({"sampling_probability": 0.0}, "sampling_probability"),
        ({"sampling_probability": 0.5, "neighbours": "replace-one"}, "neighbours"),
        ({"neighbours": "friends"}, "neighbours"),
        ({"released": np.array([[1.0, np.nan, 0]])}, "finite"),
        ({"released": np.zeros((0, 3))}, "at least one row"),
        ({"epsilon": "one"}, "epsilon"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, change: dict[str, object], words: str) -> None:
    fields = {name: value for name, value in (FIELDS | change).items() if value is not None}
    with pytest.raises(ArgumentError, match=words):
        ao.audit.from_file(written(tmp_path, **fields))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not an archive")
    np.save(tmp_path / "one.npy", ROWS)
    np.savez(tmp_path / "objects.npz", scores=np.array([print, 1], dtype=object))
    for name in ("none.npz", "text.npz", "one.npy", "objects.npz"):
        with pytest.raises(ArgumentError, match=name.split(".")[0]):
            ao.audit.from_file(tmp_path / name)
    with pytest.raises(ArgumentError, match="not both"):
        ao.audit.from_file(written(tmp_path, **FIELDS), released=tmp_path / "one.npy")
    rest = written(tmp_path, **{name: value for name, value in FIELDS.items() if name != "released"})
    with pytest.raises(ArgumentError, match="released must be an .npy"):
        ao.audit.from_file(rest, released=tmp_path / "none.npy")


def test_a_small_file_that_unpacks_to_a_large_one_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 MB unpacked to 3 GB."""
    large, noise = np.zeros((1 << 10, 1 << 10)), np.random.default_rng(0).standard_normal((1 << 7, 1 << 10))
    monkeypatch.setattr(arrays, "_UNPACKED", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", released=large)
    np.savez_compressed(tmp_path / "noise.npz", released=noise)  # a MB, and as much unpacked
    np.savez(tmp_path / "plain.npz", released=large)
    with monkeypatch.context() as unread:
        unread.setattr(np, "load", lambda *_, **__: pytest.fail("it was read"))
        with pytest.raises(ArgumentError, match=r"bomb\.npz unpacks to 8388\d* bytes"):
            ao.audit.from_file(tmp_path / "bomb.npz")
    for name in ("noise.npz", "plain.npz"):
        with pytest.raises(ArgumentError, match="must have the fields"):
            ao.audit.from_file(tmp_path / name)


@pytest.mark.parametrize(
    ("claim", "delta", "words"),
    [
        ((1.0,), None, "pair"), ((1.0, 0.0), None, "delta"), ((-1.0, 0.1), None, "epsilon"), ((1.0, 0.1), 0.2, "delta"),
        (Gaussian(1.0), None, "delta"), ("1.0", 0.1, "claim"),
    ],
)  # fmt: skip
def test_claims_that_are_none(claim: object, delta: float | None, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ao.audit.from_scores([1.0, 2.0], included=[1, 0], claim=claim, delta=delta)


def test_a_claim_is_refuted_below_one_in_a_million():
    coins = np.arange(40) < 20
    noise = np.random.default_rng(0).normal(size=40)
    found = [
        ao.audit.from_scores(
            noise + gap * coins, included=coins, claim=Gaussian(0.1), delta=1e-5, noise_std=1.0, independent=True
        )
        for gap in np.linspace(0, 3, 20)
    ]
    assert [one.refuted() for one in found] == [one.p_value() < 1e-6 for one in found]
    assert any(1e-6 < one.p_value() < 1e-3 for one in found)
    assert found[-1].refuted()
