"""What is imported when: torch only where it is needed, and names that mean the same in whatever order."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anyorder

NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""


# Of click 8.5, about names that older releases of typer import: Flower's release allows no newer one.
STRICT = [sys.executable, "-W", "error", "-W", "ignore:'click.utils.:DeprecationWarning", "-c"]


def run(code: str) -> str:
    done = subprocess.run([*STRICT, code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


NAMES = """
import anyorder as ao
assert set(ao.__all__) <= set(dir(ao))
assert {name for name in dir(ao.audit) if not name.startswith("__")} == set(ao.audit.__all__)
assert all(getattr(ao, name) is not None for name in ao.__all__)
from anyorder import *
assert PrivacyEngine is ao.PrivacyEngine and callable(plan)
"""


def test_plan_and_sensitivity_are_functions_in_whatever_order():
    """Each order in a process of its own, forked from one that has imported others' packages and none of this one."""
    orders = [
        "import anyorder.plan; import anyorder as ao",
        "import anyorder as ao; import anyorder.plan",
        "import anyorder as ao; ao.PrivacyEngine; import anyorder.plan",
        "from anyorder.plan.plan import Plan; import anyorder as ao; import anyorder.strategy.registry",
        "from anyorder import plan; import anyorder.plan; import anyorder as ao; assert ao.plan is plan",
        NAMES,
        "import anyorder.strategy.registry; from anyorder import sensitivity; import anyorder as ao",
    ]
    code = f"""
import os, sys
import numpy, scipy.optimize, scipy.special, torch
assert not [name for name in sys.modules if name.startswith("anyorder")]
draws = torch.get_rng_state()
for order in {orders!r}:
    child = os.fork()
    if child == 0:
        try:
            exec(order, globals())
            assert all(type(f).__name__ == "function" for f in (ao.plan, ao.sensitivity)), (ao.plan, ao.sensitivity)
            ao.PrivacyEngine
            assert torch.equal(draws, torch.get_rng_state()), "an import drew from torch's generator"
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order
"""
    run(code)


def test_a_name_that_is_not_there_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'PrivacyEngin'"):
        _ = anyorder.PrivacyEngin


def test_type_checkers_see_every_public_name():
    """mypy reads the import statements; `__getattr__` would tell it Any for every name, misspelt or not."""
    tree = ast.parse(Path(anyorder.__file__).read_text())
    stated = {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    assert set(anyorder.__all__) <= stated


def test_plans_files_cards_and_the_shell_need_no_torch(tmp_path):
    """And a plan without secret draws loads no filters of SciPy."""
    code = f"""
{NO_TORCH}
import os
import numpy as np, anyorder as ao
os.environ["ANYORDER_CACHE"] = "off"
given = {{"order": "fixed", "epsilon": 8, "delta": 1e-5, "mechanism": "banded inverse, 2 bands"}}
ao.plan(dataset_size=40, batch_size=10, epochs=2, **given)
assert "scipy.signal" not in sys.modules
from anyorder._numerics import fftconvolve, lfilter
from scipy import signal
x, f = np.random.default_rng(0).standard_normal((40, 3)), np.array([1.5, 0.3, -0.2])
for a, b in ((f, [1.0]), ([2.0], [1.0]), ([1.0, -0.9], [1.9, -0.9])):
    assert (lfilter(b, a, x, axis=0) == signal.lfilter(b, a, x, axis=0)).all()
assert np.allclose(fftconvolve(x[:, 0], f), signal.fftconvolve(x[:, 0], f), rtol=1e-14, atol=1e-14)
del os.environ["ANYORDER_CACHE"]

from anyorder.ledger import Ledger
from anyorder.app.cards import card
chosen = ao.plan(dataset_size=100, batch_size=10, epochs=2, epsilon=8, delta=1e-5)
chosen.save({str(tmp_path / "plan.json")!r})
assert ao.verify({str(tmp_path / "plan.json")!r}).plan == chosen
card(chosen)
Ledger(chosen.participation).record(0, ["a", "b"])
try:
    ao.PrivacyEngine
except AttributeError as problem:  # so that hasattr and help() can ask
    assert "needs torch" in str(problem)
else:
    raise AssertionError("torch was not blocked")

import anyorder.app.cli
anyorder.app.version.find_spec = lambda name: None  # as where it is not installed
PLAN = {str(tmp_path / "plan.json")!r}
for command in (
    ["verify", PLAN],
    ["report", PLAN],
    ["plan", "--dataset-size", "100", "--batch-size", "10", "--epsilon", "8", "--compare", "--save", PLAN],
    ["plan", "--dataset-size", "100", "--batch-size", "10", "--epsilon", "8", "--mechanism", "blt, 1 buffer"],
    ["epsilon", "--dataset-size", "100", "--batch-size", "10", "--noise-multiplier", "1"],
    ["--version"],
):
    code = anyorder.app.cli.run(command)
    assert code == 0, (code, command)
"""
    run(code)


def test_an_audit_of_a_training_says_that_it_needs_torch():
    code = f"{NO_TORCH}\nimport anyorder.app.cli\nanyorder.app.cli.run(['audit', 'run', 'own:setup'])"
    done = subprocess.run([*STRICT, code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "anyorder: this audit needs torch, which is not installed: pip install torch\n"


def test_the_package_and_its_version_load_no_numpy_and_no_command_line():
    run("import sys, anyorder; assert not {'numpy', 'scipy', 'torch'} & sys.modules.keys()")
    code = """
import atexit, sys
sys.argv = ["anyorder", "--version"]
atexit.register(lambda: print(sorted({"numpy", "scipy", "torch", "typer", "rich"} & sys.modules.keys())))
from anyorder.__main__ import main
main()
"""
    lines = run(code).splitlines()
    assert lines[0] == anyorder.__version__
    assert lines[-1] == "[]"


def test_a_command_loads_what_it_needs_and_no_more(tmp_path):
    """Each in a process of its own, forked from one that has imported the package alone."""
    plan = tmp_path / "plan.json"
    anyorder.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=8, delta=1e-5).save(plan)
    commands = ["--help", f"verify {plan}", "plan --help"]
    code = f"""
import os, sys
import anyorder
heavy = {{"torch", "scipy.stats", "matplotlib", "sklearn", "datasets", "starlette", "anyorder.app.planner_page"}}
for command in {commands!r}:
    more = {{"numpy", "scipy"}} if command in ("--version", "--help") else {{"scipy.signal"}}
    child = os.fork()
    if child == 0:
        try:
            from anyorder.app.cli import run
            run(command.split())
            assert not (heavy | more) & sys.modules.keys(), (heavy | more) & sys.modules.keys()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, command
"""
    run(code)
