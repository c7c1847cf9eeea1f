"""Planted faults: a pytest plugin that audits a front end, honest and with each fault that others have made.

In a test module:

    pytest_plugins = ["anyorder.audit.faults"]
    front_end = FrontEnd("my server", run, summing=summing)

    def test_audit(audit_case):
        audit_case.check()

which gives one test for each fault, and some honest ones. `pytest -p anyorder.audit.faults` does what `pytest_plugins`
does; nothing is loaded where neither is asked for. `front_ends = [..]`, a list of several, is found as well.

PYTEST_DONT_REWRITE: test modules import names from here, before pytest knows of the plugin.
"""

from typing import Any

from anyorder.audit.faults.front_end import Fault, FrontEnd, patched
from anyorder.audit.faults.judge import audit_front_end, cases
from anyorder.audit.faults.trial import Moved
from anyorder.errors import ArgumentError

__all__ = [
    "Fault",
    "FrontEnd",
    "Moved",
    "audit_front_end",
    "cases",
    "patched",
]


def pytest_generate_tests(metafunc: Any) -> None:
    """A test that takes `audit_case` becomes one for each case of each front end of its module."""
    if "audit_case" not in metafunc.fixturenames:
        return
    import pytest

    found = _front_ends(metafunc.module)
    if not found:
        raise ArgumentError(f"{metafunc.module.__name__} has a test of audit_case, and must have a FrontEnd in it")
    parameters = [
        pytest.param(case, id=case.name, marks=[pytest.mark.skip(reason=case.excuse)] if case.excuse else [])
        for front_end in found
        for case in cases(front_end)
    ]
    metafunc.parametrize("audit_case", parameters)


def _front_ends(module: Any) -> list[FrontEnd]:
    """Those among the values of a module and in its lists and tuples, each once, in order."""
    found: dict[str, FrontEnd] = {}
    for value in vars(module).values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, FrontEnd):
                found.setdefault(one.name, one)
    return list(found.values())
