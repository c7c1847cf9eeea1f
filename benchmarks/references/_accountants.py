"""The conversions of others, to show where an epsilon of theirs comes from."""

import numpy as np
from numpy.typing import ArrayLike

from anyorder.accounting.gaussian import rdp_epsilon, zcdp_rho

TENTHS = [1 + x / 10 for x in range(1, 100)]
GOOGLE = [*TENTHS, *range(11, 64), 128, 256, 512, 1024]  # orders of dp-accounting
PRIVACY = [*TENTHS, *range(12, 64)]  # of tensorflow-privacy's tree accountant
DPFTRL = (1 + np.arange(1, 1990) / 10).tolist()  # of google-research/DP-FTRL

GAUSS = (
    "theirs rounds the privacy loss up to a grid of 1e-4 (PLD), ours is exact; dp-accounting's number is met by its "
    "own accountant here"
)
RENYI = "theirs converts from Rényi DP, which is above the exact epsilon; at their orders we get theirs"


def renyi(mu: float, delta: float, orders: ArrayLike = GOOGLE) -> float:
    """Epsilon of mu-GDP from the Rényi curve at some orders."""
    orders = np.asarray(orders, dtype=np.float64)
    return rdp_epsilon((orders, orders * zcdp_rho(mu)), delta)


def pld(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism by dp-accounting's privacy loss distribution."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    return float(PLDAccountant().compose(GaussianDpEvent(1 / mu)).get_epsilon(delta))


def smallest(epsilon: float, delta: float) -> float:
    """dp-accounting's noise multiplier for a Gaussian mechanism."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    return float(dp_accounting.calibrate_dp_mechanism(PLDAccountant, dp_accounting.GaussianDpEvent, epsilon, delta))


def sampled(kind: str, sigma: float, q: float, steps: int, delta: float) -> float:
    """Epsilon of DP-SGD with Poisson sampling by dp-accounting, from "rdp" or "pld"."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    accountant = RdpAccountant() if kind == "rdp" else PLDAccountant()
    return float(accountant.compose(step, steps).get_epsilon(delta))
