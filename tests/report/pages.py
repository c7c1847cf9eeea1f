"""What tests of the report share: claims of many kinds, and a reader that is strict about HTML."""

import re
from functools import cache
from html.parser import HTMLParser

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.app import html_report
from anyorder.budget.claim import SearchCertificate, SearchClaim
from anyorder.budget.search_privacy import Geometric
from anyorder.participation import BallsInBins, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.plan.certificate import Certificate
from anyorder.plan.plan import Plan
from anyorder.strategy import Independent
from anyorder.workload import prefix_sum
from plans import flat_plan

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Tags that match, attributes of their own, and the text that a person reads."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.words, self.attributes = [], [], [], []

    def handle_decl(self, decl):
        assert decl == "DOCTYPE html"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def read(page: str) -> Reader:
    """The page, which must be well-formed, and ask for nothing from anywhere."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open, reader.open
    assert not set(reader.tags) & {"script", "iframe", "object", "embed", "link", "img", "form", "base", "a"}
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert not re.search(r"https?:|//|url\(|@import|javascript:|data:", page), "something from elsewhere"
    assert "default-src 'none'" in page
    return reader


def text(page: str) -> str:
    """What a person reads of it, on one line."""
    return " ".join(" ".join(read(page).words).split())


def certified(plan: Plan, steps: int | None = None) -> Certificate:
    """A certificate of the plan, of a run that nobody made."""
    return Certificate(plan.public(), plan.n if steps is None else steps, "0a" * 16, "1b" * 32, "2c" * 32)


def _independent(order, **others):
    rest = {"sigma": 1.5, "delta": 1e-5, "clip_norm": 1.0, "batch_size": 10, **others}
    return Plan(participation=order, strategy=Independent(order.n), workload=prefix_sum(order.n), **rest)


@cache
def page(name):
    """Of one of the claims, as it is without any word of an owner."""
    return html_report(claims()[name])


@cache
def claims():
    """name -> claim; one of every kind that the page tells apart. No test changes one."""
    plan = ao.plan(dataset_size=120, batch_size=10, epochs=3, epsilon=3, delta=1e-5, mechanism="tree", order="fixed")
    users = MinSeparation(40, 5, 4)
    of_users = {"participation": users, "unit": "user", "batch_size": 8, "epsilon": 2, "delta": 1e-6}
    known = KnownOrder([["ann", "bob"], ["bob", "<b>zoltan"], ["ann"]])
    bins = BallsInBins(2, 12)
    shuffled = ao.plan(dataset_size=120, batch_size=10, epochs=3, epsilon=3, delta=1e-5, mechanism="tree")
    search = SearchClaim(Geometric(5), Gaussian(plan.mu * 1.0), 1e-5)
    best = certified(plan)
    return {
        "plan": plan,
        "fixed": certified(plan),
        "shuffled": certified(shuffled),
        "users": certified(flat_plan(**of_users, mechanism="independent", on_device=("clipping", "record"))),
        "replace": certified(flat_plan(**of_users, mechanism="tree", neighbours="replace-one", dataset_size=200)),
        "absent": certified(flat_plan(**of_users, mechanism="tree", neighbours="add-or-remove", dataset_size=200)),
        "once": certified(_independent(SingleEpoch(9))),
        "one step": certified(_independent(SingleEpoch(1))),
        "secure": certified(ao.plan(dataset_size=120, batch_size=10, epochs=1, epsilon=3, delta=1e-5,
                                    mechanism=ao.mechanism("independent", secure=True))),
        "known": certified(_independent(known)),
        "poisson": certified(_independent(PoissonSampling(50, 0.1), neighbours="add-or-remove", dataset_size=100)),
        "bins": certified(_independent(bins, neighbours="zero-out", dataset_size=120)),
        "by chance": certified(_independent(bins, method=MonteCarlo(20_000))),
        "search": SearchCertificate(search, "3d" * 16, best, {"rate": 0.5, "name": "<script>alert(1)</script>"}),
        "empty search": SearchCertificate(search, "3d" * 16, None, None),
    }  # fmt: skip
