"""A pytest plugin: the fixture `isolation`, which fails a test where one unit of a training loop reaches others.

In a test module or a conftest.py:

    pytest_plugins = ["anyorder.audit.pytest_plugin"]

    def test_my_loop(isolation):
        isolation(train, rows)

It takes what `anyorder.audit.isolation.check` takes, raises what was found, and returns the report.
"""

from collections.abc import Callable
from typing import Any

import pytest

from anyorder.audit.isolation import IsolationReport, check


@pytest.fixture
def isolation() -> Callable[..., IsolationReport]:
    """`anyorder.audit.isolation.check`, which raises IsolationError for what it finds."""

    def checked(train: Callable[..., Any], dataset: Any, **options: Any) -> IsolationReport:
        report = check(train, dataset, **options)
        report.raise_if_found()
        return report

    return checked
