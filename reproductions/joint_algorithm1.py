"""Algorithm 1 of Huang et al. 2023 (A_NSGD) as printed, and the attack that shows why no epsilon is printed here.

    sigma^2 = L^2 T log(1/delta) / (epsilon^2 m^2 n^2),   T = (m n)^2
    t < T:  i ~ [m], j ~ [n] uniform;   b_t ~ N(0, sigma^2 I);
            (x_j, u) <- Proj( (x_j, u) - eta ( grad h(x_j, u, z_ij) + (0, b_t) ) )

It is to be (epsilon, delta) jointly private for a record. But x_j gets no noise, is kept, and is read in every later
gradient of owner j: a record acts with probability 1 / (m n) when it is drawn, and with 1 / n ever after.

The loss of the attack is L-Lipschitz in (x, u) and not convex (a network's is not either). One record of owner 0 is +1
in one world, -1 in the other; all other records are 0, at all owners.

    h(x, u, z) = -L z x              for z = +1, -1: the record pulls x to its side
    h(x, u, 0) = 0.99 L S(x) w(u)    S: 0 for |x| <= 5 eta, then linear to +-1 at +-15 eta
                                     w: a triangle wave of slope +-1, |w| <= eta

so that |grad h| <= 0.99 L (1 + (eta S')^2)^(1/2) < L. The attacker sees what all owners see, u_0, .., u_T, and adds up
w'(u_t) (u_t - u_{t+1}) / eta: noise, and +-0.99 L whenever owner 0 was drawn with a record that is the same in both
worlds. It guesses by the sign, fixed beforehand. The control holds x at 0 and lets the record pull u itself: that is
what the printed noise is made for.

For convex and smooth losses steps of SGD do not move x's apart, which may save the theorem up to a constant; no proof
of that is printed, and the paper's experiments are with networks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder.audit import epsilon_lower_bound
from reproductions._show import Finding, main

EPSILON, DELTA = 1.0, 1e-4
"""What the noise is made for by the paper's formula: inputs of it, no claim."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Sizes: n owners of m records each; noise is the printed one times `noise`."""

    n: int
    m: int
    noise: float = 1.0

    @property
    def steps(self) -> int:
        """T = (m n)^2."""
        return (self.m * self.n) ** 2

    @property
    def sigma(self) -> float:
        """As printed, for L = 1."""
        return self.noise * math.sqrt(self.steps * math.log(1 / DELTA)) / (EPSILON * self.m * self.n)


def scores(world: World, signs: Floats, *, private_state: bool, seed: int) -> Floats:
    """What the attacker adds up in each trial, in which the record is signs[trial]. All trials run side by side.

    Args:
        private_state: False for the control: x stays 0, and the record pulls u.
    Returns: (trials,), from u_0 .. u_T alone.
    """
    generator = np.random.default_rng(seed)
    eta, trials = 1.0, len(signs)  # a unit of length: all domains are in multiples of it
    bound_u = 1e5 * eta  # never reached: u is a walk of 600 eta
    x, u, found = np.zeros(trials), np.zeros(trials), np.zeros(trials)
    for _ in range(world.steps):
        owner = generator.integers(world.n, size=trials) == 0  # others hold zeros, and x = 0 there: no gradient
        record = owner & (generator.integers(world.m, size=trials) == 0)
        slope = np.where(np.floor(u / (2 * eta)) % 2 == 0, 1.0, -1.0)  # w'
        wave = slope * (u - 2 * eta * np.round(u / (2 * eta) - 0.5) - eta)  # |w| <= eta
        if private_state:
            gate = np.clip((np.abs(x) - 5 * eta) / (10 * eta), 0, 1) * np.sign(x)
            steep = (np.abs(x) > 5 * eta) & (np.abs(x) < 15 * eta)
            plain = owner & ~record
            grad_u = np.where(plain, 0.99 * gate * slope, 0.0)
            grad_x = np.where(record, -signs, np.where(plain & steep, 0.99 * wave / (10 * eta), 0.0))
            x = np.clip(x - eta * grad_x, -15 * eta, 15 * eta)
        else:
            grad_u = np.where(record, signs * slope, 0.0)
        moved = np.clip(u - eta * (grad_u + world.sigma * generator.standard_normal(trials)), -bound_u, bound_u)
        found += slope * (u - moved) / eta
        u = moved
    return found


def run(quick: bool) -> Iterator[Finding]:
    """The printed noise, four times as much, and the control."""
    n, m, each = (2, 10, 100) if quick else (4, 50, 500)
    signs = np.tile([1.0, -1.0], each)
    yield Finding(f"owners {n}, records each {m}, steps (m n)^2", World(n, m).steps)
    cap = epsilon_lower_bound(signs, signs > 0, DELTA, method="clopper_pearson", threshold=0.0)
    for name, noise, state in (
        ("printed noise", 1.0, True),
        ("four times the printed noise", 4.0, True),
        ("printed noise, control without a private state", 1.0, False),
    ):
        world = World(n, m, noise)
        found = scores(world, signs, private_state=state, seed=1)
        apart = (found[signs > 0].mean() - found[signs < 0].mean()) / math.sqrt(
            (found[signs > 0].var() + found[signs < 0].var()) / 2
        )
        yield Finding(f"{name}: sigma / L", world.sigma)
        yield Finding(f"{name}: worlds apart, in standard deviations", float(apart))
        yield Finding(f"{name}: accuracy of the guess", float((np.sign(found) == signs).mean()))
        least = epsilon_lower_bound(found, signs > 0, DELTA, method="clopper_pearson", threshold=0.0)
        name = f"{name}: lower bound of epsilon, at confidence 0.95"
        if not state:
            yield Finding(name, least, f"<= {EPSILON:g}", least <= EPSILON)
        elif noise > 1 and quick:
            yield Finding(name, least)
        else:
            expected = f"> {EPSILON:g}: no such privacy (at most {cap:.2f} by so many)"
            yield Finding(name, least, expected, least > EPSILON)


if __name__ == "__main__":
    main(__doc__ or "", run)
