"""The Gaussian curve to many digits, and one Poisson-sampled step in closed form."""

from mpmath import erfc, exp, expm1, log, log1p, mp, mpf, sqrt

mp.dps = 140  # a delta of 1e-100 at epsilon 0 loses 100


def tail(x):
    return erfc(x / sqrt(2)) / 2


def delta_of(mu, epsilon):
    """Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    mu, epsilon = mpf(mu), mpf(epsilon)
    return tail(epsilon / mu - mu / 2) - exp(epsilon) * tail(epsilon / mu + mu / 2)


def epsilon_of(mu, delta):
    """The root of delta_of in epsilon, 0 where delta suffices, to 30 digits."""
    mu, delta = mpf(mu), mpf(delta)
    if delta_of(mu, 0) <= delta:
        return mpf(0)
    low, high = mpf(0), mu * mu / 2 + mu * sqrt(-2 * log(delta))
    while high - low > high * mpf(10) ** -30:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(mu, middle) <= delta else (middle, high)
    return high


def poisson_step_epsilon(sigma, q, delta):
    """One Gaussian step under Poisson sampling: delta(eps) = q delta_G(ln(1 + (e^eps - 1) / q)) [Balle et al. 2018]."""
    if mpf(delta) >= q:
        return mpf(0)
    return log1p(q * expm1(epsilon_of(1 / mpf(sigma), mpf(delta) / q)))
