"""A search for settings: one claim for all of it, what is counted of each run, and that nothing tells of the others."""

import json
import math
import os
import re
import stat
import time
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.accounting.curves import compose
from anyorder.accounting.selection import Counts
from anyorder.budget import Fixed, Geometric, Poisson, search_epsilon
from anyorder.budget.claim import SearchCertificate, read_space, uniforms
from anyorder.budget.search import PrivateScore, Trial, prepare, tune
from anyorder.errors import ArgumentError, CheckpointError, PlanError, TrainingError
from anyorder.noise import NoiseSource
from budget.searches import LARGE, PLAN, SPACE, TARGET, InThisProcess, counted, function, run
from plans import flat_plan

KEY = bytes(range(32))
FEW = {"batch_size": [4], "epochs": [1], "rate": [0.1, 1.0, 10.0]}


def search(made=function, space=SPACE, **options):
    return tune(made, space, **{**TARGET, "plan": PLAN, "runs": 4, "key": KEY, "score": "public", **options})


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr("anyorder.budget.search.Trials", InThisProcess)


def quick(settings, plan, folder):
    """A run of nothing: with the certificate that a run would have."""
    fingerprint = os.urandom(16).hex()
    return Trial(0.0, ao.Certificate(plan.public(), plan.n, fingerprint, "0" * 64, "0" * 64))


# -- the claim -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [Geometric(50), Poisson(20), Fixed(18)])
@pytest.mark.parametrize("score", [None, (0.01, 0.1), (3.0, 0.5)])
def test_the_noise_of_every_plan_keeps_the_target_of_the_whole_search(law, score):
    prepared = prepare(read_space(SPACE), PLAN, law, 8.0, 1e-6, score)
    claim = prepared.claim
    assert 8 * (1 - 1e-4) <= claim.epsilon <= 8
    assert claim.epsilon == search_epsilon(law, claim.curve, 1e-6)
    assert len(prepared.plans) == 6
    for plan in prepared.plans.values():
        parts = [plan.curve] if score is None else [plan.curve, Gaussian(claim.score.mu)]
        assert compose(*parts).mu <= claim.curve.mu
        assert plan.mu == pytest.approx(claim.curve.mu * math.sqrt(1 - (score[1] if score else 0)), rel=1e-9)
        assert plan.delta == 1e-6
    if score is not None:
        assert claim.score.sensitivity == score[0]
        assert claim.score.mu**2 == pytest.approx(score[1] * claim.curve.mu**2, rel=1e-9)


def test_replace_one_neighbours_have_their_factor():
    zero, one = (
        prepare(read_space(FEW), {**PLAN, "neighbours": which}, Geometric(5), 8.0, 1e-6, None)
        for which in ("zero-out", "replace-one")
    )
    assert one.claim.curve.mu == pytest.approx(zero.claim.curve.mu)
    [quiet], [loud] = one.plans.values(), zero.plans.values()
    assert quiet.noise_std == pytest.approx(2 * loud.noise_std)
    assert one.claim.neighbours == "replace-one"


def test_a_selection_of_rows_counts_in_each_run():
    given = {**PLAN, "epochs": 1, "selection": Counts(threshold=2.0, count_norm=1.0, share=0.2)}
    prepared = prepare(read_space({"batch_size": [3, 4]}), given, Geometric(5), 8.0, 1e-6, (1.0, 0.1))
    assert 8 * (1 - 1e-3) <= prepared.claim.epsilon <= 8
    for plan in prepared.plans.values():
        assert compose(plan.curve, Gaussian(prepared.claim.score.mu)).mu <= prepared.claim.curve.mu
        assert 1 / plan.sigma < 0.95 * plan.mu  # the release alone


def test_amplified_plans_must_have_one_curve():
    given = {"dataset_size": 12, "order": "poisson", "epochs": 1}
    same = prepare(read_space({"batch_size": [6], "clip_norm": [0.5, 2.0]}), given, Fixed(2), 8.0, 1e-6, None)
    assert same.claim.epsilon <= 8
    assert same.claim.neighbours == "add-or-remove"
    for plan in same.plans.values():
        assert same.claim.curve == plan.curve
    with pytest.raises(PlanError, match="or all have the same curve"):
        prepare(read_space({"batch_size": [3, 4]}), given, Fixed(2), 8.0, 1e-6, None)
    with pytest.raises(PlanError, match="one relation of neighbours"):
        space = read_space({"order": ["shuffled", "poisson"]})
        prepare(space, {"dataset_size": 12, "batch_size": 4, "epochs": 1}, Fixed(2), 8.0, 1e-6, None)


def test_private_scores_get_the_noise_that_the_claim_counts():
    found = search(quick, LARGE, runs=400, law="fixed", score=PrivateScore(2.0, share=0.3))
    noise = found.certificate.claim.score
    scores = np.array([trial.score for trial in found.trials])
    assert noise.std == pytest.approx(2.0 / (math.sqrt(0.3) * found.certificate.claim.curve.mu))
    assert abs(scores.mean()) < 5 * noise.std / 20
    assert abs(scores.std() / noise.std - 1) < 0.2  # 5.6 standard deviations; half the noise is 14 away
    assert len(set(scores)) > 300
    grid = 2.0 ** math.floor(math.log2(noise.std / 1024))
    assert all(score % grid == 0 for score in scores)  # the last digits of an exact score do not come through


def test_public_scores_are_shown_as_they_are():
    found = search(runs=18, law="fixed")
    assert sorted({round(trial.score, 6) for trial in found.trials}) == [-2.302585, -0.0]


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_a_fixed_law_makes_all_settings_once_and_shows_all():
    found = search(law="fixed", runs=None)
    assert len(found.trials) == 18
    told = [tuple(trial.settings.values()) for trial in found.trials]
    assert told == [(b, e, r) for b in SPACE["batch_size"] for e in SPACE["epochs"] for r in SPACE["rate"]]
    assert found.best in found.trials
    assert found.best.score == 0
    assert found.certificate.fingerprints == tuple(trial.certificate.key_fingerprint for trial in found.trials)
    some = search(law="fixed", runs=7)
    assert len({tuple(trial.settings.values()) for trial in some.trials}) == 7  # none twice


def test_the_best_of_a_secret_number_is_all_that_is_shown(tmp_path, capfd):
    log = tmp_path / "log"
    found = search(counted(function, log), folder=tmp_path / "search", runs=20)
    made = log.read_text().count("ended")
    assert found.trials is None
    assert found.best.settings["rate"] == 1.0
    assert made > 5
    assert capfd.readouterr() == ("", "")
    assert sorted(os.listdir(tmp_path / "search")) == [
        ".gitignore",
        ".lock",
        ".search.json",
        "best",
        "search.privacy.json",
    ]
    assert os.listdir(found.best.folder) == ["model.txt"]
    kept = json.loads((tmp_path / "search/.search.json").read_text())
    assert set(kept) == {"format", "sha256", "spec", "shown", "key_fingerprint"}  # no key, from which K would follow
    assert len(kept["shown"]["runs"]) == 1
    assert found.certificate == SearchCertificate.load(tmp_path / "search/search.privacy.json")
    again = search(counted(function, log), folder=tmp_path / "search", runs=20)
    assert again == found
    assert log.read_text().count("ended") == made


def test_what_is_left_tells_nothing_of_how_many_there_were(tmp_path):
    """The same run is chosen after one run and after many: what is left has the same names, fields and sizes."""
    left = []
    counts = set()
    for i in range(12):
        key, log = bytes([i]) * 32, tmp_path / f"log{i}"
        folder = tmp_path / f"{i}" / "search"
        search(counted(quick, log), [{"batch_size": 4, "epochs": 1}], folder=folder, key=key)
        counts.add(log.read_text().count("ended"))
        files = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        left.append(
            [(str(path), len((folder / path).read_text()) if (folder / path).is_file() else 0) for path in files]
        )
    assert len(counts) > 2
    assert all(one == left[0] for one in left)


def test_a_law_that_gives_no_run_shows_that(tmp_path):
    for i in range(100):
        found = search(quick, law=Poisson(0.5), runs=None, key=bytes([i]) * 32, folder=tmp_path / f"{i}")
        if found.best is None:
            break
    assert found.certificate.best is None
    assert found.certificate.settings is None
    assert "none: the law gave no run" in str(found)
    assert SearchCertificate.load(tmp_path / f"{i}" / "search.privacy.json") == found.certificate
    assert search(quick, law=Poisson(0.5), runs=None, key=bytes([i]) * 32, folder=tmp_path / f"{i}") == found


def test_secret_files_are_for_their_owner_alone(tmp_path):
    seen = []

    def look(settings, plan, folder):
        root = folder.parent.parent
        seen.extend(stat.S_IMODE(os.stat(path).st_mode) for path in (root / ".search.json", folder.parent, folder))
        seen.extend(stat.S_IMODE(os.stat(path).st_mode) for path in folder.parent.glob("*.json"))
        kept = (root / ".gitignore").read_text().splitlines()[2:]
        assert kept == ["*", "!.gitignore", "!search.privacy.json", "!report.html"]
        return quick(settings, plan, folder)

    search(look, folder=tmp_path / "search")
    assert {mode & 0o077 for mode in seen} == {0}


def test_what_a_run_does_to_its_settings_no_other_run_sees(tmp_path):
    """A function that appends its last layer would count the runs, in settings that are shown."""
    for space in ({"layers": [[64]]}, [{"layers": [64]}]):
        for i, law in enumerate(("geometric", "fixed")):
            seen = []

            def made(settings, plan, folder, seen=seen):
                seen.append(list(settings["layers"]))
                settings["layers"].append(10)
                return quick(settings, plan, folder)

            given = {**PLAN, "batch_size": 4, "epochs": 1}
            for folder in (None, tmp_path / f"{type(space).__name__} {i}"):
                found = search(made, space, law=law, runs=30 if law == "geometric" else 1, plan=given, folder=folder)
                assert found.best.settings == found.certificate.settings == {"layers": [64]}
            assert len(seen) > 5 or law == "fixed"
            assert all(layers == [64] for layers in seen)


def test_times_of_what_is_left_do_not_tell_how_long_it_took(tmp_path):
    inodes = []

    def slow(settings, plan, folder):
        (folder / "model.txt").write_text("a model")
        inodes.append((folder / "model.txt").stat().st_ino)
        time.sleep(0.02)
        return quick(settings, plan, folder)

    search(slow, folder=tmp_path / "search", runs=20)
    search(slow, folder=tmp_path / "search", runs=20)  # what has ended
    left = [tmp_path / "search", *(tmp_path / "search").rglob("*")]
    assert len(left) == 7
    assert len({path.stat().st_mtime_ns for path in left}) == 1
    assert inodes
    assert (tmp_path / "search" / "best" / "model.txt").stat().st_ino not in inodes  # made at the end


def test_names_of_folders_are_those_of_no_order(tmp_path):
    names = []

    def look(settings, plan, folder):
        names.append(folder.name)
        return quick(settings, plan, folder)

    search(look, folder=tmp_path / "search", runs=30)
    assert len(set(names)) == len(names) > 5
    assert all(len(name) == 32 and int(name, 16) >= 0 for name in names)


def test_without_a_folder_nothing_is_left_and_results_may_be_anything(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def made(settings, plan, folder):
        trial = quick(settings, plan, folder)
        return Trial(trial.score, trial.certificate, np.arange(3))

    found = search(made)
    assert found.best.result.tolist() == [0, 1, 2]
    assert found.best.folder is None
    assert os.listdir(tmp_path) == []
    with pytest.raises(TrainingError):
        search(made, folder=tmp_path / "search")
    assert "write all else into the run's own folder" in (tmp_path / "search/.failure.txt").read_text()


# -- draws -----------------------------------------------------------------------------------------------------------


def test_draws_are_by_the_key_and_fresh_without_one():
    def settings_of(**options):
        drawn = []
        search(lambda s, p, f: (drawn.append(tuple(s.items())), quick(s, p, f))[1], LARGE, runs=10, **options)
        return drawn

    assert settings_of() == settings_of()
    assert settings_of(key=None) != settings_of(key=None)
    assert settings_of()[:1] != settings_of(epsilon=7.0)[:1]  # another search, although the key is the same


def test_every_value_is_as_likely_as_another():
    space = read_space({"rate": (1.0, 3.0), "log": (0.01, 100.0, "log"), "kind": ["a", "b", "c"]})
    source = NoiseSource(KEY)
    drawn = [space.draw(uniforms(source.words(i, 0, 6))) for i in range(3000)]
    kinds = Counter(one["kind"] for one in drawn)
    assert all(abs(count - 1000) < 5 * 26 for count in kinds.values())
    for values, low, high in (
        ([one["rate"] for one in drawn], 1.0, 3.0),
        ([math.log(one["log"]) for one in drawn], math.log(0.01), math.log(100)),
    ):
        assert low <= min(values) < low + 0.01 * (high - low)
        assert high >= max(values) > high - 0.01 * (high - low)
        assert abs(np.mean(values) - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * 3000)
    listed = read_space([{"a": 1}, {"a": 2}, {"b": 3}])
    assert Counter(str(listed.draw(uniforms(source.words(i, 0, 2)))) for i in range(300)).keys() == {
        "{'a': 1}", "{'a': 2}", "{'b': 3}",
    }  # fmt: skip


def test_ties_are_broken_by_coins():
    places = Counter()
    for i in range(60):
        found = search(
            quick, {"rate": [1, 2, 3], "batch_size": [4], "epochs": [1]}, law="fixed", runs=None, key=bytes([i]) * 32
        )
        places[found.trials.index(found.best)] += 1
    assert min(places[0], places[1], places[2]) > 8


def test_a_score_that_is_not_finite_is_the_worst():
    for bad in (math.nan, math.inf, -math.inf):

        def made(settings, plan, folder, bad=bad):
            trial = quick(settings, plan, folder)
            return Trial(bad if settings["rate"] != 1.0 else -1e9, trial.certificate)

        for score in ("public", PrivateScore(1e-3)):
            found = search(made, FEW, law="fixed", runs=None, score=score)
            assert found.best.settings["rate"] == 1.0
            assert sorted(trial.score for trial in found.trials)[:2] == [-math.inf] * 2


def test_what_no_float_holds_fails_no_search():
    """A run that fails stops the search, which is seen: no number that a score may be does that."""
    huge = [1e308, -1e308, -1e305, 1e300, 10**400, -(10**400), Fraction(10**400), Decimal("1e400"), Decimal("nan")]
    for bad in [*huge, np.longdouble("inf"), torch.tensor(math.nan)]:

        def made(settings, plan, folder, bad=bad):
            trial = quick(settings, plan, folder)
            return Trial(bad if settings["rate"] != 1.0 else 0, trial.certificate)

        for score in ("public", PrivateScore(1e-3), PrivateScore(1e300)):
            found = search(made, FEW, law="fixed", runs=None, score=score)
            others = [trial.score for trial in found.trials if trial.settings["rate"] != 1.0]
            if isinstance(bad, float):
                noise = 0 if score == "public" else found.certificate.claim.score.std
                assert others == pytest.approx([bad] * 2, abs=6 * noise)
            else:
                assert others == [-math.inf] * 2


@pytest.mark.parametrize("kind", [int, Fraction, Decimal, np.int64, torch.tensor])
def test_noise_is_added_to_the_very_score_and_not_to_the_float_beside_it(kind):
    """2^60 + 128 and the number after it are 256 apart as floats; what they show is one apart, as was promised."""

    def shown(number):
        found = search(
            lambda s, p, f: Trial(kind(number), quick(s, p, f).certificate), FEW, law="fixed", runs=1,
            score=PrivateScore(1.0), epsilon=1000.0,
        )  # fmt: skip
        return found.best.score

    at, after = 2**60 + 128, 2**60 + 129
    assert float(after) - float(at) == 256
    noisy = []
    for number in (at, after):
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "anyorder.budget.search.round", lambda x, seen=seen: seen.append(x) or round(x), raising=False
            )
            shown(number)
        noisy.append(seen[0])
    std = search(quick, FEW, law="fixed", runs=1, score=PrivateScore(1.0), epsilon=1000.0).certificate.claim.score.std
    grid = Fraction(2.0 ** math.floor(math.log2(std / 1024)))
    assert (noisy[1] - noisy[0]) * grid == 1


# -- what is checked -------------------------------------------------------------------------------------------------


def other_plan(settings, plan, folder):
    return quick(settings, flat_plan(**PLAN, batch_size=4, epochs=1, epsilon=8, delta=1e-6), folder)


def more_steps(settings, plan, folder):
    return Trial(0.0, ao.Certificate(plan, plan.n + 1, os.urandom(16).hex(), "0" * 64, "0" * 64))


@pytest.mark.parametrize(
    ("made", "phrase"),
    [
        (other_plan, "of another plan"),
        (more_steps, "steps, got"),
        (lambda s, p, f: Trial(0.0, run(p, key=KEY)[1]), "two runs have the same noise key"),
        (lambda s, p, f: Trial(0.0, None), "must be the run's Certificate"),
        (lambda s, p, f: quick(s, p, f).certificate, r"must return a Trial\(score, certificate\), got Certificate"),
        (lambda s, p, f: Trial(None, quick(s, p, f).certificate), "TypeError"),
        (lambda s, p, f: 1 / 0, "ZeroDivisionError"),
        (lambda s, p, f: exit(3), "SystemExit"),
    ],
)
def test_a_run_that_fails_stops_the_search_and_only_its_owner_learns_why(made, phrase, tmp_path, capfd):
    with pytest.raises(TrainingError) as caught:
        search(made, folder=tmp_path / "search", runs=30)
    path = tmp_path / "search/.failure.txt"
    assert str(caught.value) == (
        "a run of the search failed, so nothing of the search is shown: which, when and why is as secret as the data. "
        f"Its owner finds it in {path}. Mend the function, and resume the search by the same call"
    )
    assert caught.value.__context__ is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert re.search(phrase, text)
    assert "settings: {" in text
    assert capfd.readouterr() == ("", "")
    found = search(function, folder=tmp_path / "search", runs=30)  # mended
    assert found.best is not None
    assert not path.exists()


def test_a_run_that_stopped_early_counts_as_planned():
    found = search(lambda s, p, f: Trial(0.0, run(p, steps=1)[1]), FEW)
    assert found.best.certificate.steps == 1
    assert found.certificate.best.realised is None
    assert 7.99 < found.certificate.epsilon <= 8


def test_a_key_in_the_hand_stops_the_search_and_shows_no_place(tmp_path):
    def stopped(settings, plan, folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        search(stopped, folder=tmp_path / "search")
    assert caught.value.__context__ is None
    assert search(folder=tmp_path / "search").best is not None


# -- refused before any run ------------------------------------------------------------------------------------------


def never(settings, plan, folder):
    raise AssertionError("a run was made")


@pytest.mark.parametrize(
    ("space", "options", "phrase"),
    [
        ({"batch_size": [3, 13], "epochs": [1]}, {}, "the settings {'batch_size': 13, 'epochs': 1} make no plan"),
        ({"batch_size": (3, 6)}, {}, "must be a list of values"),
        ({"epsilon": [1, 2]}, {}, "are of the whole search"),
        ({"unit": ["a"]}, {}, "must be the same in all runs"),
        ({"rate": []}, {}, "must be a list of values, or a range"),
        ({"rate": (2, 1)}, {}, "low < high"),
        ({"rate": (0, 1, "log")}, {}, "low above 0"),
        ({"rate": (1, 2, 3)}, {}, "where it is a tuple"),
        ({"rate": {"low": 1}}, {}, "low, high and maybe log"),
        ({"rate": [math.nan]}, {}, "must be finite numbers"),
        ({"rate": [object()]}, {}, "must be finite numbers"),
        ({"a b": [1]}, {}, "name must be one of Python's"),
        ({}, {}, "must name 1 to 64"),
        ([], {}, "must be names with their values"),
        ("rate", {}, "must be names with their values"),
        ({"batch_size": list(range(1, 1000)), "epochs": list(range(1, 1000))}, {}, "more than 100000 plans"),
        (SPACE, {"plan": {**PLAN, "epsilon": 1}}, "must not have 'epsilon'"),
        (SPACE, {"plan": {**PLAN, "epochs": 1}}, "not in both"),
        (SPACE, {"plan": {**PLAN, "colour": 1}}, "which has no 'colour'"),
        (SPACE, {"plan": 3}, "keywords of ao.plan"),
        (SPACE, {"law": "cauchy"}, "law must be one of"),
        (SPACE, {"law": 3}, "law must be a Law"),
        (SPACE, {"law": Geometric(5)}, "together with a Law"),
        (SPACE, {"law": "fixed", "runs": 19}, "at most that of the settings, 18"),
        (SPACE, {"score": "private"}, r"states that scores .* PrivateScore\(sensitivity=..\)"),
        (SPACE, {"score": None}, "states that scores are made without private data"),
        (SPACE, {"epsilon": 0}, "epsilon must be above 0"),
        (SPACE, {"delta": 0}, "delta must lie"),
        (SPACE, {"key": b"short"}, "key must be 32 bytes"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_any_run(space, options, phrase):
    with pytest.raises((ArgumentError, PlanError), match=phrase):
        search(never, space, **options)


@pytest.mark.parametrize("bad", [{"sensitivity": 0}, {"sensitivity": 1, "share": 0}, {"sensitivity": 1, "share": 1}])
def test_private_scores_have_a_sensitivity_and_a_share(bad):
    with pytest.raises(ArgumentError):
        PrivateScore(**bad)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_search_is_refused(tmp_path):
    folder = tmp_path / "search"
    with pytest.raises(TrainingError):
        search(lambda s, p, f: 1 / 0, folder=folder)
    for options in ({"epsilon": 7}, {"runs": 5}, {"law": "logarithmic"}, {"score": PrivateScore(1)}, {"space": FEW}):
        with pytest.raises(CheckpointError, match="holds another search"):
            search(never, folder=folder, **options)
    with pytest.raises(CheckpointError, match="is not the key of the search"):
        search(never, folder=folder, key=bytes(32))
    assert search(quick, folder=folder, key=None).best is not None
    with pytest.raises(CheckpointError, match="holds another search"):
        search(never, folder=folder, epsilon=7)


def test_a_folder_with_other_files_or_in_use_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="holds files already"):
        search(never, folder=tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]

    def inner(settings, plan, folder):
        with pytest.raises(ArgumentError, match="a search is going on in folder"):
            search(never, folder=tmp_path / "search")
        return quick(settings, plan, folder)

    search(inner, folder=tmp_path / "search")


def test_a_damaged_state_is_refused(tmp_path):
    with pytest.raises(TrainingError):
        search(lambda s, p, f: 1 / 0, folder=tmp_path)
    state = tmp_path / ".search.json"
    state.write_text(state.read_text().replace('"key": "00', '"key": "01'))
    with pytest.raises(CheckpointError, match="can be resumed: .* was altered"):
        search(never, folder=tmp_path)
