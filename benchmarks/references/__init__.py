"""Every value of the reference files beside ours, with the reason where they differ.

    python -m benchmarks.factorize --only references          prints the counts, writes page and CSV
    python -m benchmarks.factorize --only references --quick  leaves out what takes seconds, writes nothing

The files lie in tests/refs, whose README.md says where their numbers come from.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._report import Row
from benchmarks.references import _page, google, jax_privacy, literature, state_of_the_art
from benchmarks.references._value import Rule, Value, apply

__all__ = ["SOURCES", "Source", "rows", "values"]

ROOT = Path(__file__).resolve().parents[2]
REFS = ROOT / "tests" / "refs"


class Source(NamedTuple):
    """A reference file, or a part of one: its entries, each with an id, and how they are computed."""

    file: str
    title: str
    entries: Callable[[Any], list[dict[str, Any]]]
    rules: tuple[Rule, ...]


SOURCES = (
    Source("jax_privacy.json", "jax_privacy", lambda data: data["values"], jax_privacy.RULES),
    Source("google_federated.json", "google-research/federated", lambda data: data["values"], google.FEDERATED),
    Source("dpftrl.json", "DP-FTRL and tree accountants", google.dpftrl_entries, google.DPFTRL_RULES),
    Source("dense_optima.json", "Dense optima", lambda data: _named(data["values"]), state_of_the_art.RULES),
    Source(
        "state_of_the_art.json", "Independent computations",
        lambda data: state_of_the_art.entries(data["computed_here"]), state_of_the_art.RULES,
    ),
    Source("state_of_the_art.json", "Literature and tests", literature.entries, literature.RULES),
)  # fmt: skip

ABOUT = {
    "jax_privacy": "jax_privacy 2.3.0.dev0 at 8967688, float64, with dp-accounting 0.6.0.",
    "google-research/federated": "google-research/federated at a5af8c4, tensorflow/privacy at 03035d5: notebooks, "
    "tests, docstrings, read-me files.",
    "DP-FTRL and tree accountants": "google-research/DP-FTRL at 513500a, tensorflow/privacy at 03035d5, dp-accounting "
    "0.6.0. Calls are numbered as in the file.",
    "Dense optima": "An independent solver with a duality bound, one participation, mean error.",
    "Independent computations": "Own code in NumPy, with jax_privacy's optimisers for BLT, BandInvMF and banded "
    "Toeplitz; root scale, sensitivity included.",
    "Literature and tests": "Papers and notebooks, and constants in the tests of tensorflow/privacy, jax_privacy and "
    "google-research/federated.",
}


def _named(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": name} | value for name, value in values.items()]


def values(source: Source, data: Any, *, slow: bool = True) -> Iterator[Value]:
    """All values of a source; without `slow`, those that take no seconds."""
    for entry in source.entries(data):
        yield from apply(source.rules, entry, slow=slow)


def rows(quick: bool) -> Iterator[Row]:
    """How many values of each file are equal, and every value where ours is no better; then the page."""
    found = {}
    for source in SOURCES:
        data = json.loads((REFS / source.file).read_text())
        found[source.title] = list(values(source, data, slow=not quick))
        total = len(found[source.title])
        for verdict, count in Counter(value.verdict for value in found[source.title]).most_common():
            yield Row(f"references, {source.title}: {verdict}", count, total, None, "values")
        for value in found[source.title]:
            if value.verdict == "open" and value.difference is not None:
                yield Row(f"{value.id}, {value.what}", _first(value.ours), _first(value.theirs), None, "open")
    if not quick:
        (ROOT / "docs" / "references.md").write_text(_page.page(found))
        (ROOT / "benchmarks" / "results" / "references.csv").write_text(_page.data(found))


def _first(number: Any) -> float:
    return float(number) if isinstance(number, (int, float)) else float("nan")
