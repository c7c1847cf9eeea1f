"""Every strategy, at any n, from the registry; every participation and rule of clipping: one line for a new one."""

import inspect
from collections.abc import Callable, Iterable

from anyorder.clipping import Adaptive, Automatic, Flat, PerGroup
from anyorder.clipping.norms import ClipRule
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    EpochShuffle,
    FixedOrder,
    KnownOrder,
    MinSeparation,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    SingleEpoch,
    TruncatedPoisson,
)
from anyorder.patterns import Participation
from anyorder.strategy import Strategy
from anyorder.strategy.registry import KINDS

STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    name: make for kind in KINDS for name, make in kind.examples.items()
}

PARTICIPATIONS: dict[str, Callable[[int], Participation]] = {
    "single epoch": SingleEpoch,
    "fixed order": lambda n: FixedOrder(n, k=-(-n // 3), b=3),
    "two epochs": lambda n: FixedOrder(n, k=2, b=-(-n // 2)),
    "one shuffled epoch": lambda n: EpochShuffle(1, n),
    "epochs of two steps": lambda n: EpochShuffle(n // 2, 2) if n % 2 == 0 else EpochShuffle(n, 1),
    "two shuffled epochs": lambda n: EpochShuffle(2, n // 2) if n % 2 == 0 else EpochShuffle(1, n),
    "any steps": lambda n: MinSeparation(n, b=1),
    "three steps": lambda n: MinSeparation(n, b=1, k=3),
    "separated": lambda n: MinSeparation(n, b=3),
    "separated twice": lambda n: MinSeparation(n, b=2, k=2),
    "known order": lambda n: KnownOrder([[t % 4, 10 + t * t % 7] for t in range(n)]),
    "empty steps": lambda n: KnownOrder([[t] if t == (n - 1) // 2 else [] for t in range(n)]),
}

# Orders drawn in secret: no sensitivity answers for them, and the laws say that none is given.
SAMPLED: dict[str, Callable[[int], Participation]] = {
    "poisson": lambda n: PoissonSampling(n, 0.1),
    "cyclic poisson": lambda n: CyclicPoisson(n, 3, 0.2),
    "truncated poisson": lambda n: TruncatedPoisson(n, 0.2, 4, 12),
    "truncated cyclic poisson": lambda n: TruncatedPoisson(n, 0.2, 4, 12, 2),
    "balls in bins": lambda n: BallsInBins(n // 2, 2) if n % 2 == 0 else BallsInBins(1, n),
    "random allocation": lambda n: RandomAllocation(n // 2, 2) if n % 2 == 0 else RandomAllocation(1, n),
    "sampling with separation": lambda n: MinSeparationSampling(n, 3, 0.3),
    "sampling with separation, all at once": lambda n: MinSeparationSampling(n, 2, 0.3, warm_start=False),
}

# Of a network with the parameters 0.weight, 0.bias, 2.weight, 2.bias.
CLIP_RULES: dict[str, ClipRule | Adaptive] = {
    "flat": Flat(),
    "per parameter": PerGroup(),
    "per group": PerGroup((("0",), ("2.weight", "2.bias")), (0.6, 0.8)),
    "equal groups": PerGroup((("0", "2.bias"), ("2.weight",))),
    "automatic": Automatic(),
    "adaptive": Adaptive(share=0.3),
}


def over(name: str, values: Iterable[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, in one test: such a case costs less than what pytest adds to it."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def each(**others: object) -> None:
            for value in values:
                try:
                    test(**others, **{name: value})
                except BaseException as problem:
                    problem.add_note(f"where {name} is {value!r}")
                    raise

        own = inspect.signature(test)
        left = [parameter for parameter in own.parameters.values() if parameter.name != name]
        each.__signature__ = own.replace(parameters=left)  # type: ignore[attr-defined]
        each.__name__, each.__doc__ = test.__name__, test.__doc__
        each.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        each.of_one = getattr(test, "of_one", test)  # type: ignore[attr-defined]  # for who asks for a single case
        return each

    return decorate
