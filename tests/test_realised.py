"""The realised epsilon is that of who took part, never less; verify recomputes it; claimed only where it may be."""

import json
import re
from itertools import combinations, pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

import anyorder as ao
from anyorder.accounting import gdp_epsilon
from anyorder.app import html_report
from anyorder.app.cli import app
from anyorder.errors import CertificateError
from anyorder.formats import save_json
from anyorder.formatting import rounded_up
from anyorder.ledger import replay
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.plan.certificate import PUBLIC_STOP, Certificate, realised_claim
from anyorder.strategy.registry import sensitivity
from laws.cases import STRATEGIES
from plans import flat_plan

N = 8
RULE = MinSeparation(N, b=1, k=4)
HISTORY = [["a", "b"], ["c"], [], ["a"], ["c", "b"], [], ["a"]]  # at most 3 times, at least 3 apart


def planned(strategy="tree", rule=RULE, **changes):
    settings = {"participation": rule, "batch_size": 4, "epsilon": 4, "delta": 1e-5, "mechanism": strategy}
    return flat_plan(**{**settings, **changes})


def run(history=HISTORY, folder=None, **changes):
    release = ao.Release(planned(**changes), 3, key=bytes(32))
    for units in history:
        release.step(units, np.zeros(3, np.float32))
    if folder is not None:
        release.certificate(public_stop=True).save(folder / "c.json")
        release.evidence().save(folder / "e.json")
    return release


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_never_below_the_mu_of_any_steps_of_that_kind_nor_above_the_plans(name, neighbours):
    plan = planned(STRATEGIES[name](N), neighbours=neighbours)
    for k, b in ((1, N), (2, 1), (2, 5), (3, 3), (4, 1), (4, 2)):
        claim = realised_claim(plan, k, b)
        assert claim.mu <= plan.mu
        assert claim.epsilon <= plan.epsilon
        for size in range(1, k + 1):
            for steps in combinations(range(N), size):
                if all(later - t >= b for t, later in pairwise(steps)):
                    own = plan.unit_mus(KnownOrder([[0] if t in steps else [] for t in range(N)])).max()
                    assert own <= claim.mu * (1 + 1e-12)
        assert claim.epsilon >= gdp_epsilon(claim.mu, plan.delta) * (1 - 1e-9)
    assert realised_claim(plan, 4, 1).mu == plan.mu
    assert realised_claim(plan, 0, N).epsilon == 0


def test_by_hand():
    """Independent noise: mu^2 is the number of participations over sigma^2."""
    plan = planned("independent")
    assert realised_claim(plan, 1, N).mu == pytest.approx(plan.mu / 2)
    assert realised_claim(plan, 3, 3).epsilon == pytest.approx(gdp_epsilon(plan.mu * 3**0.5 / 2, 1e-5))


def test_the_certificate_shows_it_and_verify_recomputes_it(tmp_path):
    release = run(folder=tmp_path)
    shown = release.certificate(public_stop=True).realised
    assert (shown.max_participations, shown.min_separation) == (3, 3)
    plan = release.plan
    share = sensitivity(plan.strategy, MinSeparation(N, 3, 3)).value / plan.sensitivity.value
    assert shown.mu == pytest.approx(plan.mu * share, rel=1e-12)
    assert shown.epsilon < plan.epsilon
    found = ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json", receipt=None)
    assert found.certificate.realised == shown == found.evidence.realised
    release.evidence().receipt("a").save(tmp_path / "r.json")
    ao.verify(tmp_path / "c.json", receipt=tmp_path / "r.json")
    assert dict(release.certificate(public_stop=True).facts())["realised"].startswith(
        f"epsilon <= {rounded_up(shown.epsilon)} of who took part"
    )
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "c.json"), "--evidence", str(tmp_path / "e.json")])
    text = " ".join(done.output.split())
    assert done.exit_code == 0
    assert f"Realised epsilon, by the evidence: <= {rounded_up(shown.epsilon)}" in text
    assert f"claims epsilon <= {rounded_up(plan.epsilon)}" in text
    assert "not checked: that participation and stopping did not depend on released results" in text
    told = CliRunner().invoke(app, ["verify", str(tmp_path / "c.json"), "--json"])
    assert json.loads(told.output)["realised"] == shown.to_dict()


def altered(path, change):
    data = json.loads(path.read_text())
    data.pop("sha256")
    change(data)
    save_json(path, data)


@pytest.mark.parametrize(("name", "value"), [
    ("mu", 0.1), ("epsilon", 0.1), ("mu", None), ("epsilon", "1"), ("max_participations", 2), ("max_participations", 5),
    ("max_participations", -1), ("max_participations", True), ("max_participations", 3.0), ("max_participations", 0),
    ("min_separation", 4), ("min_separation", 0), ("min_separation", 8), ("min_separation", 3.0), ("other", 1),
])  # fmt: skip
def test_an_altered_claim_is_refused(name, value, tmp_path):
    run(folder=tmp_path)
    altered(tmp_path / "c.json", lambda data: data["realised"].update({name: value}))
    with pytest.raises(CertificateError):
        ao.verify(tmp_path / "c.json")
    altered(tmp_path / "c.json", lambda data: data.update(realised=None))
    with pytest.raises(CertificateError, match="realised must be an object"):
        ao.verify(tmp_path / "c.json")


def test_a_consistent_lie_is_found_by_evidence_and_receipts(tmp_path):
    release = run(folder=tmp_path)
    lie = realised_claim(release.plan, 2, 3)
    altered(tmp_path / "c.json", lambda data: data.update(realised=lie.to_dict()))
    assert ao.verify(tmp_path / "c.json").certificate.realised == lie  # the public file alone cannot tell
    with pytest.raises(CertificateError, match="not those of the evidence"):
        ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json")
    release.evidence().receipt("a").save(tmp_path / "r.json")
    with pytest.raises(CertificateError, match="more, or nearer"):
        ao.verify(tmp_path / "c.json", receipt=tmp_path / "r.json")
    altered(tmp_path / "c.json", lambda data: data.update(realised=realised_claim(release.plan, 3, 3).to_dict()))
    ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json", receipt=tmp_path / "r.json")


@pytest.mark.parametrize(("history", "honest", "lie"), [
    ([["a"], ["b"], ["a"], [], [], [], []], (2, 2), (2, 5)),
    ([["a"], ["b"], ["a"], [], [], [], ["b"]], (2, 2), (2, 6)),
])  # fmt: skip
def test_a_lie_about_the_separation_alone_is_found(history, honest, lie, tmp_path):
    release = run(history, folder=tmp_path)
    release.evidence().receipt("a").save(tmp_path / "r.json")
    ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json", receipt=tmp_path / "r.json")
    shown = release.certificate(public_stop=True).realised
    assert (shown.max_participations, shown.min_separation) == honest
    claim = realised_claim(release.plan, *lie)
    assert claim.mu < shown.mu
    altered(tmp_path / "c.json", lambda data: data.update(realised=claim.to_dict()))
    with pytest.raises(CertificateError, match="not those of the evidence"):
        ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json")
    with pytest.raises(CertificateError, match="more, or nearer"):
        ao.verify(tmp_path / "c.json", receipt=tmp_path / "r.json")


@pytest.mark.parametrize(("steps", "k", "b", "fits"), [
    (4, 3, 1, True), (4, 3, 2, False), (5, 3, 2, True), (5, 3, 3, False), (3, 2, 2, True), (3, 2, 3, False),
    (2, 2, 1, True), (2, 3, 1, False), (1, 1, N, True), (0, 1, N, False), (1, 1, N - 1, False), (0, 0, N, True),
])  # fmt: skip
def test_a_claim_is_refused_for_which_there_were_too_few_steps(steps, k, b, fits, tmp_path):
    release = run([[]] * steps, folder=tmp_path)
    altered(tmp_path / "c.json", lambda data: data.update(realised=realised_claim(release.plan, k, b).to_dict()))
    if fits:
        assert ao.verify(tmp_path / "c.json").certificate.realised.min_separation == b
        return
    with pytest.raises(CertificateError, match="must be an integer from"):
        ao.verify(tmp_path / "c.json")


def test_either_of_fewer_times_and_further_apart_costs_less():
    plan = planned()
    shares = {(k, b): realised_claim(plan, k, b).mu / plan.mu for k, b in ((4, 1), (4, 2), (3, 1), (3, 2))}
    assert shares[4, 1] == 1 > max(shares[4, 2], shares[3, 1])
    assert shares[3, 2] < min(shares[4, 2], shares[3, 1])
    for (k, b), share in shares.items():
        own = sensitivity(plan.strategy, MinSeparation(N, b, k)).value / plan.sensitivity.value
        assert share == pytest.approx(own, rel=1e-12)


def test_certificates_without_it_still_verify(tmp_path):
    run(folder=tmp_path)
    altered(tmp_path / "c.json", lambda data: data.pop("realised"))
    found = ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json")
    assert found.certificate.realised is None
    assert "realised" not in dict(found.certificate.facts())


@pytest.mark.parametrize("changes", [
    {"neighbours": "add-or-remove"},
    {"rule": PoissonSampling(N, 0.5), "strategy": "independent"},
    {"on_device": ("record",)},
])  # fmt: skip
def test_no_claim_where_neighbours_differ_in_it_or_nobody_knows(changes, tmp_path):
    release = run([[]] * 3, folder=tmp_path, **changes) if "rule" not in changes else ao.Release(planned(**changes), 3)
    assert release.certificate(public_stop=True).realised is None
    assert realised_claim(release.plan, 1, N) is None
    release.certificate().save(tmp_path / "c.json")
    assert "realised" not in json.loads((tmp_path / "c.json").read_text())
    other = {"max_participations": 0, "min_separation": N, "mu": 0.0, "epsilon": 0.0}
    altered(tmp_path / "c.json", lambda data: data.update(realised=other))
    with pytest.raises(CertificateError, match="cannot be claimed"):
        Certificate.load(tmp_path / "c.json")


def test_clipping_on_devices_leaves_the_record_here():
    assert run(on_device=("clipping",)).certificate(public_stop=True).realised.max_participations == 3


@pytest.mark.parametrize("rule", [SingleEpoch(N), FixedOrder(N, 2, 4), EpochShuffle(2, 4), KnownOrder([[1], [2]] * 4)])
def test_a_whole_run_in_a_planned_order_has_the_plans_epsilon(rule):
    plan = planned(rule=rule)
    history = [[t % 4] for t in range(N)] if rule.max_participations == 2 else [[t] for t in range(N)]
    history = [[1], [2]] * 4 if isinstance(rule, KnownOrder) else history
    bounds = replay(rule, history).realised_bounds()
    assert realised_claim(plan, *bounds).mu <= plan.mu
    if not isinstance(rule, EpochShuffle):
        assert realised_claim(plan, *bounds).epsilon == plan.epsilon


@pytest.mark.parametrize("steps", [1, 5])
def test_a_forged_record_of_nobody_is_no_good_result(steps, tmp_path):
    """k = 0 agrees with itself in any file, and leads to an epsilon of 0."""
    release = run([["a", "b"]] * 1 + [["c"], ["d"], ["e"], ["f"]][: steps - 1], folder=tmp_path)
    lie = realised_claim(release.plan, 0, N)
    altered(tmp_path / "c.json", lambda data: data.update(realised=lie.to_dict()))
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "c.json")], env={"FORCE_COLOR": "1", "COLUMNS": "200"})
    assert "\x1b[32mverified" not in done.output
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", done.output).split())
    assert f"Nobody took part in any of {steps} step{'s' * (steps > 1)}, which is unchecked and implausible" in text
    assert "epsilon <= 0" not in text
    page = html_report(ao.verify(tmp_path / "c.json").certificate)
    assert "nothing here checks it: no realised epsilon is shown" in page
    assert "epsilon 0" not in page
    assert "epsilon &lt;= 0" not in page
    altered(tmp_path / "c.json", lambda data: data.update(realised=realised_claim(release.plan, 1, N).to_dict()))
    told = CliRunner().invoke(app, ["verify", str(tmp_path / "c.json")]).output
    assert "Realised epsilon, by the file's own unchecked record: <= " in " ".join(told.split())


def test_a_run_of_nobody_is_told_as_one(tmp_path):
    release = run([[], [], []], folder=tmp_path)
    arguments = ["verify", str(tmp_path / "c.json"), "--evidence", str(tmp_path / "e.json")]
    text = " ".join(CliRunner().invoke(app, arguments).output.split())
    assert ". Nobody took part in any of 3 steps, as the evidence has it" in text
    assert "nobody took part in any of 3 steps" in str(release.certificate(public_stop=True))
    assert "nobody took part" not in str(run([]).certificate(public_stop=True))  # nor was there a step


def test_a_run_that_stopped_early_claims_it_only_where_its_owner_states_why(tmp_path):
    """A rule that stops when the releases say enough about somebody loses more than its length tells."""
    release = run()
    assert release.certificate().realised is None
    release.certificate().save(tmp_path / "c.json")
    assert {"realised", "stated"}.isdisjoint(json.loads((tmp_path / "c.json").read_text()))
    release.certificate(public_stop=True).save(tmp_path / "c.json")
    found = ao.verify(tmp_path / "c.json").certificate
    assert found.realised is not None
    assert found.stated == (PUBLIC_STOP,)
    assert dict(found.facts())["stated"] == f"by the owner: {PUBLIC_STOP}"
    for change in (
        lambda data: data.pop("stated"), lambda data: data.update(stated=[]), lambda data: data.update(stated=["x"]),
        lambda data: data.update(stated=[PUBLIC_STOP, PUBLIC_STOP]),
    ):  # fmt: skip
        release.certificate(public_stop=True).save(tmp_path / "c.json")
        altered(tmp_path / "c.json", change)
        with pytest.raises(CertificateError, match="stated|states"):
            ao.verify(tmp_path / "c.json")


def test_after_all_steps_there_is_nothing_to_state(tmp_path):
    release = run([*HISTORY, []], folder=tmp_path)
    assert release.certificate() == release.certificate(public_stop=True)
    assert release.certificate().realised == release.certificate(public_stop=True).realised is not None
    assert release.certificate(public_stop=True).stated == ()
    altered(tmp_path / "c.json", lambda data: data.update(stated=[PUBLIC_STOP]))
    with pytest.raises(CertificateError, match="stated"):
        ao.verify(tmp_path / "c.json")
