"""Plans of options side by side: a table of test cases changes one of them, wherever `ao.plan` takes it."""

import anyorder as ao
from anyorder.plan.options import from_flat
from anyorder.plan.planner import plan_at_sigma


def flat_plan(*, sigma=None, participation=None, workload=None, **options):
    """`ao.plan` of `from_flat(options)`; with a sigma, noise of so many whole sensitivities."""
    for keyword, value in (("order", participation), ("optimizer", workload)):
        if value is not None:
            assert options.get(keyword) is None
            options[keyword] = value
    keywords = from_flat(options)
    return ao.plan(**keywords) if sigma is None else plan_at_sigma(sigma, **keywords)
