"""The command line: what it prints, writes and refuses, and with which exit code."""

import contextlib
import inspect
import json
import math
import re
import sys
import time
import warnings

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import anyorder
import processes
from anyorder.__main__ import main
from anyorder.accounting import poisson
from anyorder.accounting.selection import Counts, Top, Uniform
from anyorder.app import cli, waiting
from anyorder.app.cli import app, plans, run, training, verification
from anyorder.app.exits import MEANINGS, ExitCode
from anyorder.app.job import Settings
from anyorder.app.verdict_page import EXIT_CODES
from anyorder.formatting import rounded_up
from anyorder.participation import EpochShuffle
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan_at_sigma
from plans import flat_plan

SIZES = ["--dataset-size", "2000", "--batch-size", "100", "--epochs", "3"]
FEW = ["--dataset-size", "400", "--batch-size", "100", "--epochs", "2"]
AT = [*SIZES, "--delta", "1e-5"]
TRAIN = ["train", "--epsilon", "8", "--mechanism", "tree", "--epochs", "1", "--batch-size", "480"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(waiting, "_SECONDS", 3600.0)  # on a machine that is busy


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments, **options):
    return processes.run("-m", "anyorder", *map(str, arguments), **options)


def refused(outcome, code, *phrases):
    """One line on stderr, nothing on stdout, no traceback."""
    assert outcome.exit_code == code, outcome.output
    assert outcome.stdout == ""
    line, *rest = outcome.stderr.splitlines()
    assert not rest
    assert line.startswith("anyorder: ")
    for phrase in phrases:
        assert phrase in line


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "run"
    outcome = invoke(*TRAIN, "--output", folder)
    assert outcome.exit_code == 0, outcome.output
    return folder, outcome


# -- train -----------------------------------------------------------------------------------------------------------


def test_train_prints_the_card_and_the_result(run_folder):
    folder, outcome = run_folder
    for phrase in ("privacy card", "epsilon <= 8 at delta", "at most one of 3 steps", "test accuracy", "check it"):
        assert phrase in outcome.stdout, phrase
    assert (folder / "model.pt").exists()
    assert "loss" not in outcome.stdout


def test_train_in_exact_integers(tmp_path):
    outcome = invoke(*TRAIN, "--secure", "--output", tmp_path / "run")
    assert outcome.exit_code == 0, outcome.output
    assert "exact integers" in outcome.stdout
    assert "exact integers" in invoke("verify", tmp_path / "run" / "run.privacy.json").stdout
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["settings"]["secure"] is True


@pytest.mark.parametrize("mechanism", ["poisson", "blt"])
def test_secure_is_refused_where_it_does_not_hold(tmp_path, mechanism):
    words = ["train", "--epsilon", "8", "--epochs", "1", "--batch-size", "480", "--mechanism", mechanism, "--secure"]
    refused(invoke(*words, "--output", tmp_path / "run"), 2, "exact integers")
    assert not (tmp_path / "run").exists()


def test_train_as_json_in_a_process_of_its_own(tmp_path):
    done = process(*TRAIN, "--json", "--seed", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one object, nothing else
    assert result["output"].startswith("runs/digits-")
    assert result["settings"]["seed"] == 3
    assert result["steps"] == 3
    assert result["claims"]["epsilon"] <= 8
    assert "privacy card" in done.stderr
    metrics = json.loads((tmp_path / result["output"] / "metrics.json").read_text())
    assert metrics == {**{name: value for name, value in result.items() if name != "output"}, "began": True}


def test_resume_of_a_finished_run_and_what_goes_with_it(run_folder):
    folder, _ = run_folder
    outcome = invoke("train", "--resume", folder, "--json")
    assert outcome.exit_code == 0
    assert json.loads(outcome.stdout)["finished"]
    refused(invoke("train", "--resume", folder, "--lr", "1"), 2, "--resume takes the settings", "--lr")
    refused(invoke("train", "--resume", folder, "--output", "x", "--batch-size", 3), 2, "--batch-size, --output")
    refused(invoke("train", "--resume", folder / "absent"), 1, "not the folder of a run")


def test_own_data_and_model(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))\n"
        "    pairs = TensorDataset(x, (x[:, 0] > 0).long())\n"
        "    return pairs, pairs\n"
        "def model(shape, classes): return torch.nn.Linear(*shape, classes)\n"
    )
    parts = ["--dataset", "own_parts:data", "--classes", 2, "--model", "own_parts:model"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    outcome = invoke("train", *parts, "--batch-size", 20, "--noise-multiplier", 0.1, "--json")
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(outcome.stdout)
    assert result["steps"] == 15
    assert result["test_accuracy"][-1] > 0.6
    assert result["claims"]["noise_std"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--epsilon", "-1"], "epsilon must be above 0, got -1.0"),
        ([], "exactly one of epsilon and noise_multiplier"),
        (["--epsilon", "8", "--noise-multiplier", "1"], "exactly one of epsilon and noise_multiplier"),
        (["--epsilon", "8", "--delta", "2"], "delta must lie strictly between 0 and 1"),
        (["--epsilon", "8", "--dataset", "imagenet"], "dataset must be one of"),
        (["--epsilon", "8", "--dataset", "absent_module:load"], "cannot be found"),
        (["--epsilon", "8", "--model", "cnn", "--mechanism", "tree"], "20 pixels"),
        (["--epsilon", "8", "--batch-size", "0"], "batch_size must be"),
        (["--epsilon", "8", "--lr", "nan"], "lr must be a finite number"),
        (["--epsilon", "8", "--order", "poisson", "--mechanism", "tree"], "amplified DP-SGD"),
        (["--epsilon", "8", "--mechanism", "independent", "--restart-every", "1"], "'tree' only"),
        (["--epsilon", "8", "--device", "abacus"], "device 'abacus'"),
    ],
)
def test_a_bad_value_is_one_line(arguments, phrase, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(invoke("train", *arguments), 2, phrase)
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    refused(invoke(*TRAIN, "--output", tmp_path / "file" / "run"), 2, "cannot be written")
    refused(invoke(*TRAIN, "--output", tmp_path), 2, "holds files already")


def test_an_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("anyorder.app.progress.ProgressBar.stepped", interrupt)
    outcome = invoke(*TRAIN, "--output", tmp_path / "run")
    assert outcome.exit_code == 1
    told = outcome.stderr.strip()  # a bar of rich 13 ends with an empty line
    assert told == f"anyorder: stopped; go on with: anyorder train --resume {tmp_path / 'run'}"


# -- plan and epsilon ------------------------------------------------------------------------------------------------


def test_plan_as_json_is_the_plan(tmp_path):
    outcome = invoke(
        "plan", *AT, "--epsilon", "4", "--order", "fixed", "--mechanism", "tree", "--momentum", "0.9", "--json",
        "--save", tmp_path / "plan.json", "--plot", tmp_path / "noise.png",
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    described = json.loads(outcome.stdout)
    expected = anyorder.plan(
        dataset_size=2000, batch_size=100, epochs=3, order="fixed", epsilon=4, delta=1e-5, mechanism="tree",
        optimizer=anyorder.SGD(momentum=0.9),
    )  # fmt: skip
    assert described["plan"] == json.loads(json.dumps(expected.to_dict()))
    assert described["claims"]["epsilon"] == expected.epsilon
    assert Plan.load(tmp_path / "plan.json") == expected
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")


def test_plan_takes_a_selection_in_words(tmp_path):
    for words, expected in (("counts:5:0.2", Counts(5.0, share=0.2)), ("top:30", Top(30)), ("uniform:9", Uniform(9))):
        file = tmp_path / "plan.json"
        outcome = invoke("plan", *FEW, "--delta", "1e-5", "--epsilon", "4", "--selection", words, "--save", file)
        assert outcome.exit_code == 0, outcome.output
        assert "selection" in outcome.stdout
        found = Plan.load(file)
        shared = {"dataset_size": 400, "batch_size": 100, "epochs": 2, "epsilon": 4, "delta": 1e-5}
        assert found == flat_plan(**shared, selection=expected)
    for words in ("counts", "counts:a", "counts:1:2:3", "top:1.5", "uniform:1:1", "lots:3", "counts:1:1.5", "top:0"):
        outcome = invoke("plan", *SIZES, "--epsilon", "4", "--selection", words)
        assert outcome.exit_code == 2
        assert "must" in outcome.stderr


def test_plan_compares_those_that_go_with_a_selection(monkeypatch):
    monkeypatch.setattr(poisson, "calibrate_poisson", lambda *_: 1.0)
    shown = invoke("plan", *SIZES, "--noise-multiplier", "2", "--selection", "counts:3", "--compare")
    assert shown.exit_code == 0, shown.output
    for phrase in ("banded inverse", "independent", "poisson"):
        assert phrase in shown.stdout
    assert "blt" not in shown.stdout


def test_plan_compares_mechanisms(monkeypatch):
    monkeypatch.setattr(poisson, "calibrate_poisson", lambda *_: 1.0)  # the search takes seconds
    shown = invoke("plan", *SIZES, "--noise-multiplier", "2", "--mechanism", "tree", "--compare")
    assert shown.exit_code == 0, shown.output
    for phrase in ("privacy card", "over bound", "secret", "tree", "independent", "poisson"):
        assert phrase in shown.stdout
    described = json.loads(invoke("plan", *SIZES, "--noise-multiplier", "2", "--mechanism", "tree", "--json").stdout)
    assert described["claims"]["noise_std"] == pytest.approx(2.0)


def test_epsilon_tells_the_truth_and_what_would_be_printed_elsewhere():
    for order in ("shuffled", "sequential"):
        shown = invoke("epsilon", *AT, "--noise-multiplier", "1", "--order", order)
        assert shown.stdout.startswith("mu = 1.733 (Gaussian DP), which is epsilon = 8.386 at delta = 1e-05")
        assert "1 % of those who took no part finds at most 27.7 % of those who did" in shown.stdout
        assert "would print 2.857" in shown.stdout
        assert "does not hold" in shown.stdout
    described = json.loads(invoke("epsilon", *AT, "--noise-multiplier", "1", "--json").stdout)
    assert described["epsilon"] == pytest.approx(8.3854, abs=1e-4)
    assert described["mu"] == pytest.approx(3**0.5)
    assert described["poisson_epsilon"] == pytest.approx(2.857, abs=0.002)
    assert described["poisson_epsilon_holds"] is False


def test_epsilon_of_a_sampled_run_and_of_a_tree():
    sampled = invoke("epsilon", *AT, "--noise-multiplier", "1", "--order", "poisson")
    assert sampled.stdout.startswith("epsilon = 2.857")
    assert "does not hold" not in sampled.stdout
    tree = json.loads(invoke("epsilon", *AT, "--noise-multiplier", "4", "--mechanism", "tree", "--json").stdout)
    plan = anyorder.plan(dataset_size=2000, batch_size=100, epochs=3, mechanism="tree", noise_multiplier=4, delta=1e-5)
    assert tree["mu"] == pytest.approx(plan.mu)
    assert tree["poisson_epsilon"] is None


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_says_what_was_checked(run_folder):
    folder, _ = run_folder
    shown = invoke("verify", folder / "run.privacy.json")
    assert shown.exit_code == 0
    for phrase in ("recomputed", "not checked: that the noise was added", "verified: this certificate"):
        assert phrase in shown.stdout
    assert "every unit kept" not in shown.stdout  # that is in no public file
    backed = invoke("verify", folder / "run.privacy.json", "--evidence", folder / "secret" / "run.evidence.json")
    assert backed.exit_code == 0
    for phrase in ("every unit kept to the order in all 3 steps", "the one that the certificate was made of"):
        assert phrase in backed.stdout
    refused(invoke("verify", folder / "run.privacy.json", "--evidence", folder / "plan.json"), 1, "NOT verified")
    described = json.loads(invoke("verify", folder / "run.privacy.json", "--json").stdout)
    assert described["ok"]
    assert described["steps"] == 3
    assert "not checked: that anything was trained" not in shown.stdout
    plan = invoke("verify", folder / "plan.json")
    assert "not checked: that anything was trained" in plan.stdout
    assert "verified: this plan" in plan.stdout


def test_verify_shows_a_receipts_steps_and_mu(run_folder, tmp_path):
    path = run_folder[0] / "run.privacy.json"
    evidence = anyorder.verify(path, evidence=run_folder[0] / "secret" / "run.evidence.json").evidence
    unit = list(evidence.ledger.history())[1][0]
    own = evidence.receipt(unit)
    own.save(tmp_path / "mine.json")
    shown = invoke("verify", path, "--receipt", tmp_path / "mine.json")
    assert shown.exit_code == 0
    for phrase in (
        "bound to the receipt's steps",
        "1: 1",
        f"{rounded_up(own.mu, 5)} (the plan's: {rounded_up(evidence.plan.mu, 5)})",
    ):
        assert phrase in shown.stdout
    described = json.loads(invoke("verify", path, "--receipt", tmp_path / "mine.json", "--json").stdout)
    assert described["receipt"] == {"unit": unit, "steps": [1], "mu": own.mu}
    refused(invoke("verify", path, "--receipt", run_folder[0] / "plan.json"), 1, "NOT verified")


@pytest.mark.parametrize("file", ["run.privacy.json", "plan.json"])
def test_verify_refuses_any_altered_claim(file, run_folder, tmp_path):
    original = json.loads((run_folder[0] / file).read_text())
    altered = tmp_path / "altered.json"
    places = [("claims", name) for name in original["claims"]]
    places += [("plan", name) for name in ("sigma", "clip_norm", "delta", "batch_size", "unit")]
    places += [("run", name) for name in original.get("run", {})]
    for part, name in places:
        data = json.loads(json.dumps(original))
        value = data[part][name]
        data[part][name] = value + "x" if isinstance(value, str) else (not value if value is True else value * 1.25)
        altered.write_text(json.dumps(data))
        outcome = invoke("verify", altered)
        refused(outcome, 1, "NOT verified")
        assert json.loads(invoke("verify", altered, "--json").stdout)["ok"] is False


def test_verify_of_what_is_no_certificate(tmp_path):
    refused(invoke("verify", tmp_path / "absent.json"), 1, "NOT verified", "cannot read")
    (tmp_path / "text").write_text("no json")
    refused(invoke("verify", tmp_path / "text"), 1, "NOT verified", "not JSON")
    refused(invoke("verify", tmp_path), 1, "NOT verified")


# -- audit -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_setup(tmp_path, monkeypatch):
    (tmp_path / "own_setup.py").write_text(
        "import torch, anyorder as ao\n"
        "from anyorder.app import Setup\n"
        "def make():\n"
        "    plan = ao.plan(dataset_size=40, batch_size=10, epochs=2, epsilon=8, delta=1e-5, mechanism='tree')\n"
        "    model = torch.nn.Linear(160, 1)\n"
        "    loader = torch.utils.data.DataLoader(torch.randn(40, 160), batch_size=10)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return Setup(plan, model, optimizer, loader, lambda model, x: model(x).square().mean())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return ["audit", "run", "own_setup:make", "--canaries", 160]


@pytest.fixture
def half_the_noise(monkeypatch):
    from anyorder.release import release as run

    real = run.SharedNoise
    monkeypatch.setattr(run, "SharedNoise", lambda C, source, std, *rest: real(C, source, std / 2, *rest))


def test_an_audit_shows_its_verdict_beside_the_claim(own_setup, tmp_path):
    outcome = invoke(*own_setup, "--out", "audit", "--plot", "own.png")
    assert outcome.exit_code == 0, outcome.output
    for phrase in ("privacy card", "epsilon <= 8 at delta", "mu seen", "clopper_pearson", "not refuted"):
        assert phrase in outcome.stdout, phrase
    assert "loss" not in outcome.stdout
    assert {path.name for path in (tmp_path / "audit").iterdir()} == {"audit.json", "audit.png", "run.privacy.json"}
    assert (tmp_path / "own.png").exists()
    shown = invoke("verify", tmp_path / "audit" / "run.privacy.json", "--audit", tmp_path / "audit" / "audit.json")
    assert shown.exit_code == 0, shown.output
    assert "did not refute its claim" in " ".join(shown.stdout.split())


def test_an_audit_that_refutes_leaves_with_1(own_setup, half_the_noise, tmp_path):
    outcome = invoke(*own_setup, "--out", "audit")
    assert outcome.exit_code == 1
    assert "REFUTED" in outcome.stdout
    refused(
        invoke("verify", tmp_path / "audit" / "run.privacy.json", "--audit", tmp_path / "audit" / "audit.json"),
        1, "NOT verified", "160 canaries, refuted its claim",
    )  # fmt: skip


def test_an_audit_as_json(own_setup, half_the_noise):
    outcome = invoke(*own_setup, "--json", "--method", "gaussian", "--method", "one_run", "--confidence", "0.9")
    assert outcome.exit_code == 1
    found = json.loads(outcome.stdout)  # one object, nothing else
    assert found["audit"]["refuted"] is True
    assert set(found["audit"]["epsilon_at_least"]) == {"gaussian", "one_run"}
    assert found["audit"]["epsilon_at_least"]["gaussian"] > found["claims"]["epsilon"]
    assert found["audit"]["confidence"] == 0.9
    assert "privacy card" in outcome.stderr


def test_an_audit_of_the_folder_of_a_run(run_folder, tmp_path):
    folder, _ = run_folder
    outcome = invoke("audit", "run", folder, "--canaries", 500, "--out", tmp_path / "audit", "--json")
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["steps"] == 3
    # The run itself is of the same plan, so its certificate can be shown with this audit.
    assert invoke("verify", folder / "run.privacy.json", "--audit", tmp_path / "audit" / "audit.json").exit_code == 0


def test_an_audit_of_another_plan_says_nothing_of_a_certificate(own_setup, run_folder, tmp_path):
    folder, _ = run_folder
    assert invoke(*own_setup, "--out", "audit").exit_code == 0
    path = tmp_path / "audit" / "audit.json"
    refused(invoke("verify", folder / "run.privacy.json", "--audit", path), 1, "NOT verified", "of another plan")
    altered = tmp_path / "altered.json"
    altered.write_text(path.read_text().replace('"refuted": false', '"refuted": true'))
    refused(invoke("verify", tmp_path / "audit" / "run.privacy.json", "--audit", altered), 1, "altered")


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["nothing"], "module:function or the folder"),
        (["own_setup:absent"], "has no function"),
        (["."], "or the folder of a run"),
        (["own_setup:make", "--canaries", "0"], "canaries must be"),
        (["own_setup:make", "--coordinates", "162"], "coordinates must be at most 161"),
        (["own_setup:make", "--method", "best"], "method must be one of"),
        (["own_setup:make", "--confidence", "95"], "confidence must lie"),
        (["own_setup:make", "--delta", "0"], "delta must lie"),
        (["own_setup:make", "--out", "."], "holds files already"),
        (["own_setup:make", "--plot", "absent/a.png"], "folder that exists"),
    ],
)
def test_what_cannot_be_audited_is_one_line_and_2(arguments, phrase, own_setup):
    outcome = invoke("audit", "run", *arguments)
    assert outcome.exit_code == 2, outcome.output
    assert phrase in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert "REFUTED" not in outcome.output


def test_an_error_of_ones_own_code_is_shown_whole_and_is_no_verdict(own_setup, tmp_path):
    (tmp_path / "own_fault.py").write_text("def make():\n    raise RuntimeError('no data here')\n")
    outcome = invoke("audit", "run", "own_fault:make")
    assert outcome.exit_code == 2
    assert "Traceback" in outcome.stderr
    assert "RuntimeError: no data here" in outcome.stderr


def test_an_interrupted_audit_is_no_audit(own_setup, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("anyorder.app.progress.StepsBar.stepped", interrupt)
    outcome = invoke(*own_setup)
    assert outcome.exit_code == 2
    assert outcome.stderr == "anyorder: stopped: there is no audit of half a run\n"


# -- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["loading", "running"])
def test_stopped_by_a_key_it_leaves_one_line(stage, monkeypatch, capsys):
    """While modules load too; and with a code that is no verdict of an audit or a verification."""
    import builtins

    from anyorder.__main__ import main as program

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    if stage == "running":
        monkeypatch.setattr("anyorder.app.cli.run", interrupt)
    else:
        real = builtins.__import__
        monkeypatch.setattr(
            builtins, "__import__", lambda name, *rest: (interrupt if name == "anyorder.app.cli" else real)(name, *rest)
        )
    with pytest.raises(SystemExit) as left:
        program()
    assert left.value.code == 130
    assert capsys.readouterr().err == "anyorder: stopped\n"


def test_version_and_help():
    version, noise, clipping = invoke("--version").stdout.splitlines()
    assert version == anyorder.__version__
    assert noise.startswith(("noise: compiled, ", "noise: NumPy ("))
    assert clipping.startswith(("clipping: compiled, ", "clipping: torch ("))
    assert "Exit codes" in invoke("--help").stdout
    for command in ("train", "plan", "epsilon", "report-goals", "verify", "check"):
        assert f"anyorder {command} " in invoke(command, "--help").stdout.replace("Usage:", "")
    assert "Exit code 0" in invoke("audit", "run", "--help").stdout
    assert invoke().exit_code == 2
    assert invoke("audit").exit_code == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_all_commands_says_what_each_says_of_itself(name):
    stood_for, own = cli.COMMANDS[name][2], cli.load_command(name)
    assert " ".join(own.help.split("\n\n")[0].split()) == stood_for
    assert own.name == name


def test_every_command_names_its_default_order_and_they_agree():
    assert Settings.of("mnist").order == "fixed"
    assert Settings.of("mnist", model="cnn").order == "shuffled"
    assert inspect.signature(anyorder.plan).parameters["order"].default is None
    assert plan_at_sigma(1, dataset_size=4, batch_size=2, epochs=2, delta=0.1).participation == EpochShuffle(2, 2)
    assert Settings.of("digits").order == "fixed"
    for command in ("plan", "epsilon"):
        order = inspect.signature(getattr(plans, command)).parameters["order"]
        assert order.default is None
        assert "Default: shuffled" in order.annotation.__metadata__[0].help
    hint = inspect.signature(training.train).parameters["order"].annotation
    assert "Default: fixed for digits, patches and scattering, else shuffled" in hint.__metadata__[0].help


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["epsilon", "--noise-multiplier", "much"], "--noise-multiplier"),
        (["plan"], "anyorder: Missing options --dataset-size, --batch-size. See anyorder plan --help\n"),
        (
            ["plan", "--epochs", "x", "--quickly"],
            r"--quickly'?; Invalid value for '--epochs': .* valid integer.*; Missing options --d",
        ),
        (["audit", "canaries"], "Missing option --text. See anyorder audit canaries --help"),
        (["verify"], "Missing argument FILES. See"),
        (["trian"], r"No such command 'trian'. Did you mean 'train'\? See anyorder --help"),
        (["verify", "file", "--quickly"], "No such option"),
    ],
)
def test_bad_usage_is_one_line_and_2(arguments, phrase, capsys):
    with pytest.raises(SystemExit) as left:
        run(arguments)
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(phrase, captured.err)
    assert captured.err.count("\n") == 1


def test_the_first_command_is_check_and_all_that_print_results_print_json():
    assert next(iter(cli.COMMANDS)) == "check"
    for name in cli.COMMANDS:
        command = cli.load_command(name)
        for one in getattr(command, "commands", {name: command}).values():
            assert "--json" in {opt for parameter in one.params for opt in parameter.opts}, one.name


def test_one_table_has_all_exit_codes():
    assert set(EXIT_CODES.values()) | {ExitCode.USAGE, ExitCode.STOPPED} == set(ExitCode) == set(MEANINGS)


def test_a_shell_completes_commands_and_their_options(monkeypatch, capsys):
    monkeypatch.setenv("_ANYORDER_COMPLETE", "complete_bash")
    for words, found in (("anyorder pl", "plan\nplanner"), ("anyorder plan --ep", "--epochs\n--epsilon")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with contextlib.suppress(SystemExit):
            run([])
        assert capsys.readouterr().out.strip() == found


def test_in_a_pipe_progress_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SECONDS", 0.01)
    with waiting.Wait("thinking") as wait:
        wait.update("planning order fixed")
        time.sleep(0.1)
    bar = waiting.Steps()
    with bar:
        task = bar.add_task("", total=40)
        for step in range(41):
            bar.update(task, completed=step)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "anyorder: planning order fixed"
    assert lines[1].startswith("anyorder: planning order fixed (")
    assert [line for line in lines if "of 40" in line] == [f"anyorder: {n} of 40 steps" for n in range(4, 41, 4)]


def test_a_warning_is_one_line(monkeypatch, capsys):
    sizes = ["--dataset-size", "20", "--batch-size", "10", "--noise-multiplier", "1", "--mechanism", "independent"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert run(["plan", *sizes, "--delta", "0.1", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("anyorder: warning: delta 0.1 is above one over the 20 units")
    assert captured.err.count("\n") == 1
    assert json.loads(captured.out)["plan"]["delta"] == 0.1


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_extra_the_program_says_so(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"the package '{package}', which is not installed" in message
    assert "in a clone of anyorder" in message
    assert "'.[cli]'" in message


# -- verify, of several certificates ---------------------------------------------------------------------------------


def certificates(tmp_path, *plans):
    paths = []
    for i, plan in enumerate(plans):
        with anyorder.Release(plan, size=1) as release:
            paths.append(tmp_path / f"{i}.privacy.json")
            release.certificate().save(paths[-1])
    return paths


def test_several_certificates_are_composed_for_who_is_in_all(tmp_path):
    order = {"dataset_size": 12, "batch_size": 4, "epochs": 1}
    plans = [flat_plan(**order, noise_multiplier=z, delta=d) for z, d in ((2.0, 1e-6), (3.0, 1e-5))]
    a, b = certificates(tmp_path, *plans)
    mu = math.hypot(plans[0].mu, plans[1].mu)
    assert anyorder.compose(*plans).mu == pytest.approx(mu)
    told = json.loads(invoke("verify", a, b, "--json").stdout)
    assert told["ok"]
    assert told["together"]["mu"] == pytest.approx(mu)
    assert told["together"]["delta"] == 1e-5
    assert told["together"]["epsilon"] == pytest.approx(anyorder.compose(*plans).epsilon(1e-5))
    assert told["together"]["epsilon"] > max(one["claims"]["epsilon"] for one in told["files"])
    shown = invoke("verify", a, b)
    assert shown.exit_code == 0, shown.output
    assert "together they claim epsilon <= " in shown.stdout
    refused(invoke("verify", a, b, a), 1, "NOT verified", "one noise key")
    refused(invoke("verify", a, b, "--evidence", a), 2, "belong to one file")
    b.write_text(b.read_text().replace('"steps": 0', '"steps": 1'))
    refused(invoke("verify", a, b), 1, "NOT verified", "altered")


def test_certificates_of_different_units_are_not_composed(tmp_path):
    order = {"dataset_size": 12, "batch_size": 4, "epochs": 1, "noise_multiplier": 2.0, "delta": 1e-5}
    a, b = certificates(tmp_path, flat_plan(**order), flat_plan(**order, neighbours="replace-one"))
    refused(invoke("verify", a, b), 1, "NOT verified", "neighbours")


def test_a_receipt_of_a_run_that_stopped_counts_whole_unless_the_reason_is_stated(tmp_path):
    """Whoever stops by what is released has lost more than the steps before the stop tell."""
    plan, both, stated = flat_plan(dataset_size=8, batch_size=2, epochs=2, noise_multiplier=2.0, delta=1e-5), [], []
    for i in range(2):
        with anyorder.Release(plan, size=1) as release:
            for t in range(4 * (i + 1)):
                release.step([2 * (t % 4), 2 * (t % 4) + 1], np.zeros(1, np.float32))
            both += [tmp_path / f"{i}.privacy.json", "--receipt", tmp_path / f"{i}.receipt.json"]
            release.certificate().save(both[-3])
            release.evidence().receipt(1).save(both[-1])
            stated += [tmp_path / f"{i}.stated.json", *both[-2:]]
            release.certificate(public_stop=True).save(stated[-3])
    whole, less = (
        json.loads(invoke("verify", *files, "--json").stdout)["together"]["mu"] for files in (both, stated)
    )  # fmt: skip
    assert whole == pytest.approx(math.hypot(plan.mu, plan.mu), rel=1e-5)
    mus = [anyorder.verify(both[i], receipt=both[i + 2]).receipt.mu for i in (0, 3)]
    assert less < whole
    assert less == pytest.approx(math.hypot(*mus), rel=1e-5)
    assert "why the run stopped early is not stated" in invoke("verify", *both).stdout


def test_receipts_of_one_unit_over_several_runs(tmp_path):
    """In how many steps of each run it was, and what all of them tell of it; a run without its receipt counts whole."""
    plan = flat_plan(dataset_size=8, batch_size=2, epochs=2, noise_multiplier=2.0, delta=1e-5)
    files, receipts = [], []
    for i, times in enumerate((1, 2)):
        with anyorder.Release(plan, size=1) as release:
            for t in range(plan.n):
                now = [2 * (t % 4), 2 * (t % 4) + 1] if t < 4 * times else []
                release.step(now, np.zeros(1, np.float32))
            files.append(tmp_path / f"{i}.privacy.json")
            release.certificate().save(files[-1])
            receipts += [tmp_path / f"{i}.{unit}.json" for unit in (1, 2)]
            release.evidence().receipt(1).save(receipts[-2])
            release.evidence().receipt(2).save(receipts[-1])
    a, _, b, other = receipts
    whole = json.loads(invoke("verify", *files, "--json").stdout)["together"]["mu"]
    mine = json.loads(invoke("verify", *files, "--receipt", a, "--receipt", b, "--json").stdout)["together"]["mu"]
    mus = [anyorder.verify(file, receipt=own).receipt.mu for file, own in zip(files, (a, b), strict=True)]
    assert mine == pytest.approx(math.hypot(*mus))
    assert mus[0] < mus[1]
    one = json.loads(invoke("verify", *files, "--receipt", a, "--json").stdout)["together"]["mu"]
    assert one == pytest.approx(math.hypot(mus[0], plan.mu))
    assert mine <= one < whole
    shown = invoke("verify", *files, "--receipt", a, "--receipt", b).stdout
    assert "the unit: in 1 step" in shown
    assert "the unit: in 2 steps" in shown
    refused(invoke("verify", *files, "--receipt", a, "--receipt", other), 1, "NOT verified", "several units")
    refused(invoke("verify", *files, "--receipt", a, "--receipt", a), 1, "NOT verified", "second one of one run")
    refused(invoke("verify", files[0], "--receipt", a, "--receipt", b), 2, "one file was given")
    refused(invoke("verify", files[0], files[0], "--receipt", a), 1, "NOT verified", "one noise key")
    (third,) = certificates(tmp_path, plan)  # in place of the first, and a run of its own
    refused(invoke("verify", third, files[1], "--receipt", a), 1, "NOT verified", "none of the certificates")


def test_a_run_that_was_started_over_claims_all_that_it_released(tmp_path):
    plan = flat_plan(dataset_size=8, batch_size=2, epochs=1, noise_multiplier=2.0, delta=1e-5)
    a, b = tmp_path / "a.privacy.json", tmp_path / "b.privacy.json"
    for file, checkpoint in ((a, "a.ckpt"), (a, "a.ckpt"), (b, "b.ckpt")):
        with anyorder.Release(plan, 1, checkpoint=tmp_path / checkpoint, start_over=True) as release:
            for t in range(plan.n):
                release.step([] if t else [1], np.zeros(1))
            release.certificate().save(file)
            release.evidence().receipt(1).save(tmp_path / f"{checkpoint}.receipt")
    twice = anyorder.compose(plan, plan).epsilon(1e-5)
    told = json.loads(invoke("verify", a, "--json").stdout)
    assert told["claims"]["epsilon"] == pytest.approx(twice)
    assert told["started_over"] == [plan.n]
    assert f"claims epsilon <= {rounded_up(twice)} at" in " ".join(invoke("verify", a).stdout.split())
    own = tmp_path / "a.ckpt.receipt"
    mus = plan.mu, plan.mu, anyorder.verify(a, receipt=own).receipt.mu  # of b, of the start before, and of the receipt
    mine = json.loads(invoke("verify", a, b, "--receipt", own, "--json").stdout)["together"]["mu"]
    assert mine == pytest.approx(math.hypot(*mus))


def test_under_secret_draws_a_receipt_lowers_no_claim(tmp_path):
    """Its mu is against those who know the steps, and the plan's curve may be above it or below."""
    plan = flat_plan(order="poisson", dataset_size=8, batch_size=4, epochs=2, noise_multiplier=2.0, delta=1e-5)
    with anyorder.Release(plan, 1) as release:
        for _ in range(plan.n):
            release.step(release.sample(8), np.zeros(1))
        certificate, evidence = release.certificate(), release.evidence()
        unit = next(u for row in release.ledger.history() for u in row)
    assert verification._of_unit(certificate, evidence.receipt(unit)) == certificate.curve
