"""Every front end of the package, honest and with every fault; and the audit itself, with parts of it left out."""

import ast
import dataclasses
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import anyorder
import anyorder as ao
from anyorder.audit.faults import Fault, FrontEnd, audit_front_end, cases, patched
from anyorder.audit.faults import core as planted
from anyorder.audit.faults.core import FAULTS, one_step_closer
from anyorder.audit.faults.front_end import Reached, SumFault
from anyorder.audit.faults.judge import PARTS, Case, Verdict, attack, echoes, noise
from anyorder.audit.faults.trial import FaultTrial, SampledTrial, banded, tree
from anyorder.audit.laws import NoiseLaw
from anyorder.errors import ArgumentError, TrainingError
from audit.front_ends import FRONT_ENDS, core, core_summing, engine, run_core

pytest_plugins = ["anyorder.audit.faults", "pytester"]
front_ends = [front_end for room in FRONT_ENDS.values() for front_end in room]
BY_NAME = {fault.name: fault for fault in FAULTS}
SMALL = {"n": 12, "size": 400, "count": 80, "others": 8}
LARGE = {"n": 24, "size": 2000, "count": 200, "others": 24}


def audited():
    """Honest runs and its own faults of each front end; of what is planted in the core, all there, elsewhere a fifth.

    Each fault is planted in every fifth front end, another fifth for the next fault; those of draws in the engine too,
    whose loaders draw in a way of their own.
    """
    for i, front_end in enumerate(front_ends):
        own = {fault.name for fault in front_end.faults}
        for j, case in enumerate(cases(front_end)):
            fault = case.fault
            of_draws = front_end is engine and isinstance(fault, Fault) and (fault.sampled or fault.bins)
            chosen = front_end is core or fault is None or fault.name in own or of_draws or (i + j) % 5 == 0
            if chosen and case.excuse is None:
                yield case


@pytest.mark.parametrize("case", list(audited()), ids=lambda case: case.name)
def test_audit_of(case):
    case.check()


# -- who is audited ----------------------------------------------------------------------------------------------------

ROOT = Path(anyorder.__file__).parent
WATCHES = {"release", "audit"}  # the core itself, and what looks at it
OUTSIDE = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in WATCHES]


def carries_out(source):
    """Whether a file has to do with the class that carries plans out, by whatever import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anyorder"):
            if {alias.name for alias in node.names} & {"Release", "release"}:
                return True
            if "release" in node.module and any(alias.name == "*" for alias in node.names):
                return True
        elif (getattr(node, "attr", None) or getattr(node, "value", None)) in ("Release", "of_ranks"):
            return True
    return False


def test_every_room_that_carries_plans_out_has_its_front_ends():
    found = {path.relative_to(ROOT).parts[0] for path in OUTSIDE if carries_out(path.read_text())}
    found.discard("__init__.py")
    assert found <= set(FRONT_ENDS), "a room carries plans out: give it its line in tests/audit/front_ends.py"
    assert set(FRONT_ENDS) <= found | {"release"}, "a line for a room that carries nothing out"


@pytest.mark.parametrize(
    "source",
    [
        "from anyorder.release import Release",
        "from anyorder.release.release import Release as R",
        "from anyorder.release import release",
        "from anyorder.release import *",
        "import anyorder as ao\nao.Release(1)",
        "getattr(module, 'Release')",
        "Other.of_ranks(1)",
    ],
)
def test_the_walk_sees_each_way(source):
    assert carries_out(source)


# -- honest runs are not refuted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("front_end", "strategy", "runs"),
    [(core, banded, 120), (core, tree, 80), (engine, banded, 40)],
    ids=["core-banded", "core-tree", "engine-banded"],
)
def test_honest_runs_are_refuted_at_most_at_the_nominal_rate(front_end, strategy, runs):
    """All p-values, and all of them together, lie above uniform ones, by Massart's bound at 1e-6."""
    verdicts = [audit_front_end(front_end, seed=seed, strategy=strategy, **SMALL) for seed in range(runs // 2)]
    everything = {name: [verdict.law.p_values[name] for verdict in verdicts] for name in verdicts[0].law.p_values}
    everything["together"] = [verdict.p_value for verdict in verdicts]
    for name, p_values in everything.items():
        excess = (np.arange(1, len(p_values) + 1) / len(p_values) - np.sort(p_values)).max()
        assert excess < np.sqrt(np.log(1e6) / 2 / len(p_values)), name


# -- each part is needed -----------------------------------------------------------------------------------------------

NEEDED = {
    attack: ["one participation accounted", "separation off by one", "one participation too many"],
    noise: ["noise shared by two shards", "no noise on the last coordinates"],
    echoes: ["unit kept for later"],
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in NEEDED.items() for name in names])
def test_an_audit_without_a_part_lets_its_faults_through(part, name):
    rest = tuple(other for other in PARTS if other is not part)
    assert not audit_front_end(core, BY_NAME[name], parts=rest, **LARGE).refuted
    assert audit_front_end(core, BY_NAME[name], parts=(part,), **LARGE).refuted


def test_every_part_is_shown_to_be_needed():
    assert set(NEEDED) == set(PARTS)


def test_what_is_found_does_not_hang_on_one_seed():
    seed = 1
    for fault in FAULTS:
        if not (isinstance(fault, Fault) and fault.sampled):
            assert audit_front_end(core, fault, seed=seed).refuted, fault.name


# -- faults come and go, and are reached -------------------------------------------------------------------------------


def everything_patched():
    from anyorder._draws import Draws
    from anyorder.ledger import Ledger
    from anyorder.noise import program
    from anyorder.release.release import Release, SharedNoise
    from audit import front_ends as ours

    owners = (Ledger, program, sys.modules["anyorder.plan.plan"], Release, SharedNoise, Draws, ours)
    return [dict(vars(owner)) for owner in owners]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_gone_afterwards_whatever_happened(fault):
    before = everything_patched()
    reached = Reached()
    planted = core_summing(fault.make()) if isinstance(fault, SumFault) else fault.plant(reached)
    with pytest.raises(KeyError), planted:
        assert everything_patched() != before
        raise KeyError
    assert everything_patched() == before


def test_a_patch_of_what_is_inherited_leaves_nothing_behind():
    class Parent:
        x = 1

    class Child(Parent):
        pass

    with patched(Child, "x", 2):
        assert (Child.x, Parent.x) == (2, 1)
    assert "x" not in vars(Child)
    with pytest.raises(AttributeError), patched(Child, "y", 2):
        pass


def run_by_hand(trial):
    """A front end that goes its own way: its noise is right, and the core's part of the package never sees it."""
    generator = np.random.default_rng(0)
    plan = trial.plan
    Z = plan.noise_std * plan.strategy.noising_matrix() @ generator.normal(size=(plan.strategy.num_rows, trial.size))
    for row, (units, vectors) in zip(Z, trial.steps, strict=True):
        yield (ao.bounded_sum(vectors, units, plan.clip_norm) + row) / plan.batch_size


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_that_is_not_reached_is_an_error(fault):
    if fault.name == "one participation accounted":
        assert audit_front_end(FrontEnd("by hand", run_by_hand), fault, **SMALL).refuted  # of the plan itself
        return

    @contextmanager
    def seam(make):
        yield

    def sampled(trial):
        return [np.zeros(trial.size)] * trial.plan.n

    by_hand = FrontEnd("by hand", run_by_hand, seam, sampled, bins=sampled)
    with pytest.raises(TrainingError, match="was not reached by by hand"):
        audit_front_end(by_hand, fault, **SMALL)


def test_a_front_end_without_a_seam_must_say_so():
    bare = FrontEnd("bare", run_core)
    with pytest.raises(ArgumentError, match="summing="):
        audit_front_end(bare, BY_NAME["weights by count"])
    with pytest.raises(ArgumentError, match="sampled="):
        audit_front_end(bare, BY_NAME["larger sampling probability"])
    with pytest.raises(ArgumentError, match="bins="):
        audit_front_end(bare, BY_NAME["draws of another run"])
    with pytest.raises(AssertionError, match="does not find"):
        Case(core, Fault("none", harmless)).check()


@contextmanager
def harmless(reached):
    reached()
    yield


@contextmanager
def louder(reached):
    """Noise that is twice what the noise law allows: an honest run would be refuted."""
    from anyorder.release.release import SharedNoise

    real = SharedNoise.__init__

    def init(self, strategy, source, std, *rest):
        reached()
        real(self, strategy, source, 2 * std, *rest)

    with patched(SharedNoise, "__init__", init):
        yield


def test_an_honest_case_fails_where_the_run_is_refuted():
    with louder(Reached()), pytest.raises(AssertionError, match="refutes an honest run"):
        Case(core, strategy=banded).check()


@pytest.mark.parametrize(("p_value", "refuted"), [(0.9e-6, True), (1.1e-6, False), (0.5, False)])
def test_a_case_is_judged_at_one_in_a_million(p_value, refuted, monkeypatch):
    judge = sys.modules["anyorder.audit.faults.judge"]
    verdict = Verdict("mine", None, NoiseLaw({"attack": p_value}), 0.0)
    monkeypatch.setattr(judge, "audit_front_end", lambda *given, **options: verdict)
    honest, faulty = Case(core, strategy=banded), Case(core, Fault("none", harmless))
    passes, fails = (faulty, honest) if refuted else (honest, faulty)
    assert passes.check() is verdict
    with pytest.raises(AssertionError):
        fails.check()


def test_an_own_fault_is_one_more_case():
    mine = dataclasses.replace(core, faults=(*core.faults, Fault("too loud", louder)))
    assert [case.name for case in cases(mine)][-1] == "release core: too loud"
    [*_, last] = cases(mine)
    assert last.check().reached == 1


def test_what_the_package_refuses_is_found():
    """The honest ledger lets no unit come early, and the core takes no total that is not finite."""
    verdict = audit_front_end(core, Fault("honest ledger", harmless, looser=one_step_closer), **SMALL)
    assert (verdict.refused, verdict.p_value, verdict.strongest) == ("ParticipationError", 0.0, "refused")
    nothing = SumFault("no number", lambda: lambda vectors, units, clip_norm: np.full(vectors.shape[1], np.nan))
    assert audit_front_end(core, nothing, **SMALL).refused == "ArgumentError"


@pytest.mark.parametrize("excuses", [{"no such fault": "because"}, {"stale kernel": " "}])
def test_excuses_must_name_a_fault_and_a_reason(excuses):
    with pytest.raises(ArgumentError, match="excuse"):
        FrontEnd("mine", run_core, excuses=excuses)


def test_faults_have_names_of_their_own():
    with pytest.raises(ArgumentError, match="names that differ"):
        FrontEnd("mine", run_core, faults=(Fault("stale kernel", harmless),))


def test_too_few_or_too_many_rows_are_refused():
    def few(trial):
        return list(run_core(trial))[:-1]

    def many(trial):
        rows = list(run_core(trial))
        return [*rows, rows[0]]

    for run, words in ((few, "released 11 rows"), (many, "more than the 12 rows")):
        with pytest.raises(TrainingError, match=words):
            audit_front_end(FrontEnd("mine", run), **SMALL)


# -- the trial ---------------------------------------------------------------------------------------------------------


def test_a_trial_keeps_to_its_plan_and_is_hard():
    trial = FaultTrial(0)
    for own in trial.own:
        assert trial.plan.participation.pattern.allows(own)
    early = FaultTrial(0, looser=one_step_closer)
    assert {b - a for own in early.own for a, b in pairwise(own)} == {3}
    rows = [len(vectors) / len(set(units.tolist())) for units, vectors in trial.steps]
    assert min(rows) > 1.2  # units bring several rows
    everything = np.concatenate([vectors for _, vectors in trial.steps])
    assert not np.isfinite(everything).all()
    norms = np.linalg.norm(np.nan_to_num(everything, posinf=0.0), axis=1)
    assert 0.2 < (norms > trial.plan.clip_norm).mean() < 0.9


def test_the_sums_of_a_trial_are_those_of_bounded_sum():
    trial = FaultTrial(3, **SMALL)
    for t, (units, vectors) in enumerate(trial.steps):
        total = ao.bounded_sum(vectors.astype(np.float64), units, trial.plan.clip_norm)
        np.testing.assert_allclose(total, trial.total(t, trial.plan.clip_norm), atol=1e-9)


def test_trials_are_made_again_from_their_seed():
    first, again, other = FaultTrial(1, **SMALL), FaultTrial(1, **SMALL), FaultTrial(2, **SMALL)
    assert first.key == again.key != other.key
    for (a, b), (c, d) in zip(first.steps, again.steps, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
    assert SampledTrial(1).key != first.key


# -- the plugin --------------------------------------------------------------------------------------------------------

MODULE = """
import anyorder as ao
from anyorder.audit.faults import FrontEnd
{plugins}

def run(trial):
    release = ao.Release(trial.plan, trial.size, key=trial.key)
    for units, vectors in trial.steps:
        yield release.step(units, ao.bounded_sum(vectors, units, {norm}))

front_end = FrontEnd("mine", run, excuses={excuses})

def test_audit(audit_case):
    audit_case.check()
"""


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


EXCUSES = {
    fault.name: "not here"
    for fault in FAULTS
    if isinstance(fault, SumFault) or (fault.sampled or fault.bins or fault.looser)
}
DECLARED = 'pytest_plugins = ["anyorder.audit.faults"]'


def outcomes(pytester, *options, plugins=DECLARED, norm="release.clip_norm", excuses=EXCUSES):
    pytester.makepyfile(test_mine=MODULE.format(plugins=plugins, norm=norm, excuses=excuses))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-W", "error", *options)


def test_a_module_gets_a_test_for_each_case(pytester):
    result = outcomes(pytester)
    result.assert_outcomes(passed=4 + len(FAULTS) - len(EXCUSES), skipped=len(EXCUSES))


def test_a_module_that_declares_nothing_gets_them_by_an_option(pytester):
    outcomes(pytester, "-p", "anyorder.audit.faults", "-k", "honest", plugins="").assert_outcomes(passed=4)


def test_a_dishonest_front_end_fails_and_excuses_are_shown(pytester):
    result = outcomes(pytester, "-rs", "-k", "honest or weights", norm="3 * release.clip_norm")
    result.assert_outcomes(failed=4, skipped=1)
    result.stdout.fnmatch_lines(["*refutes an honest run: mine*", "SKIPPED*not here*"])


def test_a_fault_without_seam_or_excuse_fails(pytester):
    result = outcomes(pytester, "-k", "weights", excuses={})
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*mine must have summing=*"])


def test_a_module_without_a_front_end_is_told_so(pytester):
    pytester.makepyfile(f"{DECLARED}\n\ndef test_audit(audit_case):\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*must have a FrontEnd in it*"])


def test_nobodys_pytest_loads_it_unasked(pytester):
    pytester.makepyfile(
        "import sys\n\ndef test_none():\n    assert not any(name.startswith('anyorder') for name in sys.modules)\n"
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.parametrize("fault", [planted.larger_probability, planted.draws_of_another_run])
def test_a_planted_fault_of_draws_keeps_the_rates_of_examples(fault, monkeypatch):
    seen = []
    monkeypatch.setattr(planted.Draws, "__init__", lambda self, rule, size, source, rates=None: seen.append(rates))
    with fault(lambda: None):
        planted.Draws(ao.participation.PoissonSampling(4, 0.5), 4, None, [0.1])
    assert seen == [[0.1]]
