"""The certificate of a search: every number follows or is refused, and no file costs much."""

import hashlib
import json
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import BoundedRange, Gaussian, Sampled
from anyorder.accounting.curves import compose
from anyorder.budget import Fixed, Geometric, Logarithmic, NegativeBinomial, Poisson, search_epsilon
from anyorder.budget.claim import ScoreNoise, SearchCertificate, SearchClaim, curve_from_dict, curve_to_dict, read_space
from anyorder.budget.search import prepare
from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import canonical
from anyorder.plan.planner import plan_at_sigma
from budget.searches import PLAN


def found(law=None, score=(0.5, 0.2), **given):
    law = Geometric(10) if law is None else law
    settings = {"batch_size": 4, "rate": 0.1}
    prepared = prepare(read_space([settings]), {**PLAN, "epochs": 2, **given}, law, 6.0, 1e-6, score)
    plan = prepared.plan(settings)
    prints = tuple(f"{i:032x}" for i in range(law.runs)) if type(law) is Fixed else ()
    best = ao.Certificate(plan.public(), plan.n, f"{0:032x}", "a" * 64, "b" * 64)
    return SearchCertificate(prepared.claim, "f" * 32, best, settings, prints)


def rewritten(path, change):
    """Change the file's content and seal it again, as whoever forges a claim would."""
    data = json.loads(path.read_text())
    data.pop("sha256")
    change(data)
    data["sha256"] = hashlib.sha256(canonical(data).encode()).hexdigest()
    path.write_text(json.dumps(data))


def saved(tmp_path, certificate):
    path = tmp_path / "search.privacy.json"
    certificate.save(path)
    return path


@pytest.mark.parametrize(
    ("law", "score"),
    [
        (Geometric(10), None),
        (Logarithmic(7.5), (0.5, 0.2)),
        (NegativeBinomial(0.5, 4), None),
        (Poisson(3), (0.5, 0.2)),
        (Fixed(5), (0.5, 0.2)),
    ],
    ids=str,
)
def test_a_certificate_comes_back_from_its_file(law, score, tmp_path):
    certificate = found(law, score)
    back = SearchCertificate.load(saved(tmp_path, certificate))
    assert back == certificate
    assert back.epsilon == search_epsilon(law, certificate.claim.curve, 1e-6) <= 6
    assert back.best_epsilon == certificate.best.plan.epsilon < back.epsilon
    assert "had it been the only run" in str(back)
    assert (", with its score" in str(back)) == (score is not None)  # one of public data adds nothing to a run


def test_a_search_without_a_run_comes_back(tmp_path):
    certificate = replace(found(Poisson(3)), best=None, settings=None)
    assert SearchCertificate.load(saved(tmp_path, certificate)) == certificate


def test_amplified_searches_are_read_where_the_file_is_trusted(tmp_path):
    plan = plan_at_sigma(2.0, dataset_size=12, batch_size=4, epochs=1, order="poisson", delta=1e-6)
    best = ao.Certificate(plan, plan.n, f"{0:032x}", "a" * 64, "b" * 64)
    claim = SearchClaim(Fixed(2), plan.curve, 1e-6)
    certificate = SearchCertificate(claim, "f" * 32, best, {"clip_norm": 1.0}, (f"{0:032x}", f"{1:032x}"))
    path = saved(tmp_path, certificate)
    assert SearchCertificate.load(path) == certificate
    rewritten(path, lambda d: (d["search"].update(law={"kind": "geometric", "mean": 2.0}), d.update(fingerprints=[])))
    with pytest.raises(CertificateError, match="takes more time than a file is given"):
        SearchCertificate.load(path)


FORGERIES = [
    lambda d: d["claims"].update(epsilon=5.9),
    lambda d: d["claims"].update(mu=d["claims"]["mu"] * 0.99),
    lambda d: d["claims"].update(best_epsilon=1.0),
    lambda d: d["claims"].update(best_epsilon=None),
    lambda d: d["claims"].pop("mu"),
    lambda d: d["search"].update(delta=1e-5),
    lambda d: d["search"]["law"].update(mean=9.0),
    lambda d: d["search"]["law"].update(mean=11.0),
    lambda d: d["search"]["law"].update(kind="logarithmic"),
    lambda d: d["search"]["law"].update(colour="red"),
    lambda d: d["search"].update(law=[]),
    lambda d: d["search"]["curve"].update(mu=d["search"]["curve"]["mu"] * 0.999),
    lambda d: d["search"]["curve"].update(mu=d["search"]["curve"]["mu"] * 1.001),
    lambda d: d["search"]["curve"].update(unit="user"),
    lambda d: d["search"]["curve"].update(neighbours="replace-one"),
    lambda d: d["search"]["curve"].update(kind="sampled"),
    lambda d: d["search"]["score"].update(std=d["search"]["score"]["std"] * 0.99),
    lambda d: d["search"]["score"].update(sensitivity=1.0),
    lambda d: d["search"].pop("score"),
    lambda d: d["search"].update(colour="red"),
    lambda d: d["best"]["plan"].update(sigma=d["best"]["plan"]["sigma"] * 0.99),
    lambda d: d["best"]["plan"].update(batch_size=5),
    lambda d: d["best"]["plan"].update(delta=1e-5),
    lambda d: d["best"]["claims"].update(epsilon=1.0),
    lambda d: d["best"]["claims"].update(noise_std=100.0),
    lambda d: d["best"]["settings"].update(batch_size=6),
    lambda d: d["best"].update(settings=[]),
    lambda d: d["best"]["settings"].update(rate={"a": 1}),
    lambda d: d["best"]["settings"].update({"a b": 1}),
    lambda d: d["best"]["run"].update(steps=7),
    lambda d: d["best"]["run"].update(steps=True),
    lambda d: d["best"]["run"].update(key_fingerprint="f" * 32),
    lambda d: d["best"]["run"].update(receipt_root="b" * 63),
    lambda d: d.update(best=None),
    lambda d: d.update(key_fingerprint="\x1b[2J"),
    lambda d: d.update(fingerprints=["a" * 32]),
    lambda d: d.update(fingerprints=3),
    lambda d: d.update(colour="red"),
    lambda d: d.pop("claims"),
]


def test_alterations_are_caught_even_with_a_new_hash(tmp_path):
    path = saved(tmp_path, found())
    SearchCertificate.load(path)
    sound = path.read_text()
    for number, change in enumerate(FORGERIES):
        path.write_text(sound)
        rewritten(path, change)
        with pytest.raises(CertificateError):
            pytest.fail(f"forgery {number} is read as {SearchCertificate.load(path)}")


def test_every_byte_of_the_file_is_under_the_hash(tmp_path):
    path = saved(tmp_path, found())
    text = path.read_text()
    for i in range(0, len(text), 7):
        if text[i].isdigit():
            path.write_text(text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1 :])
            with pytest.raises(CertificateError):
                SearchCertificate.load(path)


def test_a_plan_that_tells_more_than_the_search_counts_is_refused():
    certificate = found()
    loud = replace(certificate.best.plan, sigma=certificate.best.plan.sigma * 0.9)
    with pytest.raises(ArgumentError, match="one that the search counts"):
        replace(certificate, best=replace(certificate.best, plan=loud))
    quiet = replace(certificate.best.plan, sigma=certificate.best.plan.sigma * 2)
    assert replace(certificate, best=replace(certificate.best, plan=quiet)).epsilon == certificate.epsilon


def test_of_a_grid_all_fingerprints_are_shown_and_differ(tmp_path):
    certificate = found(Fixed(5))
    for prints in (
        ("a" * 32,) * 5,
        certificate.fingerprints[:4],
        tuple(f"{i:032x}" for i in range(1, 6)),
        ("f" * 32,) * 5,
    ):
        with pytest.raises(ArgumentError, match="fingerprints must"):
            replace(certificate, fingerprints=prints)


def test_what_a_run_alone_would_have_realised_is_not_shown():
    plan = found().best.plan
    release = ao.Release(plan, size=1)
    release.step([1], np.array([0.5]))
    shown = release.certificate(public_stop=True)
    assert shown.realised is not None
    certificate = replace(found(), best=shown)
    assert certificate.best.realised is None
    assert certificate.epsilon > 5.9


@pytest.mark.parametrize(
    "curve",
    [
        Gaussian(1.0), Gaussian(0.0, neighbours="replace-one", unit="user"), Sampled(1.0, 0.1, 10),
        BoundedRange(0.1, 3),
        compose(Gaussian(1.0), BoundedRange(0.1, 3)), Sampled(1.0, 0.1, 10, e0=0.1, draws=2),
        compose(Gaussian(1.0, neighbours="add-or-remove"), Sampled(1.0, 0.1, 10)),
    ],
)  # fmt: skip
def test_curves_come_back(curve):
    assert curve_from_dict(json.loads(json.dumps(curve_to_dict(curve)))) == curve


HOSTILE = {
    "a law of a million runs": lambda d: d["search"].update(law={"kind": "fixed", "runs": 10**6}),
    "a law of heavy tails": lambda d: d["search"].update(law={"kind": "negative-binomial", "eta": -0.999, "mean": 1.5}),
    "a mean of a million": lambda d: d["search"]["law"].update(mean=1e6),
    "a huge mu": lambda d: d["search"]["curve"].update(mu=1e150),
    "a tiny mu": lambda d: d["search"]["curve"].update(mu=1e-300),
    "a tiny delta": lambda d: d["search"].update(delta=1e-300),
    "many steps": lambda d: d["search"].update(
        law={"kind": "fixed", "runs": 2},
        curve={"kind": "sampled", "sigma": 0.5, "sampling_probability": 1e-3, "n": 10**6, "e0": 0.0, "draws": 0,
               "unit": "example"},
    ),
    "little noise": lambda d: d["search"].update(
        law={"kind": "fixed", "runs": 2},
        curve={"kind": "sampled", "sigma": 1e-3, "sampling_probability": 0.5, "n": 10, "e0": 0.0, "draws": 0,
               "unit": "example"},
    ),
    "many draws": lambda d: d["search"].update(
        law={"kind": "fixed", "runs": 1000},
        curve={"kind": "bounded range", "e0": 1e-3, "draws": 10**6, "neighbours": "zero-out", "unit": "example"},
    ),
    "many parts": lambda d: d["search"].update(curve={"kind": "composed", "parts": [{"kind": "gaussian"}] * 50}),
    "fingerprints without end": lambda d: d.update(fingerprints=["a" * 32] * 100_000),
    "a deep setting": lambda d: d["best"]["settings"].update(rate=json.loads("[" * 900 + "]" * 900)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_cost_little(name, tmp_path):
    path = saved(tmp_path, found(score=None))
    rewritten(path, HOSTILE[name])
    began = time.process_time()
    with pytest.raises(CertificateError) as caught:
        SearchCertificate.load(path)
    assert time.process_time() - began < 2
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("law", 3), ("curve", 1.0), ("delta", 0.0), ("score", 0.5)],
)
def test_claims_are_of_their_kinds(name, value):
    given = {"law": Geometric(5), "curve": Gaussian(1.0), "delta": 1e-6, "score": None}
    with pytest.raises(ArgumentError, match=name):
        SearchClaim(**{**given, name: value})


def test_noise_on_scores_is_not_told_as_more_than_it_is():
    for i in range(200):
        noise = ScoreNoise(0.1 + i / 7, 0.3 + i / 11)
        assert Fraction(noise.mu) * Fraction(noise.std) > Fraction(noise.sensitivity)
