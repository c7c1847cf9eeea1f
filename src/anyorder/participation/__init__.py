"""Who takes part when: the sets of steps at which one privacy unit may contribute.

A participation is public. It must not depend on the data: it is the order in which a loader hands out units, or a
rule that arrivals obey. Steps count from 0; `b` is the distance from one step of a unit to its next (b = 1: every
step), never the number of steps between them. An order is what people have; `anyorder.patterns` holds the few families
of sets of steps that each of them reduces to, and that all claims are proven for.
"""

from anyorder.participation import registry
from anyorder.participation.registry import *  # noqa: F403  the orders, by its list

__all__: list[str] = []
__all__ += registry.__all__
