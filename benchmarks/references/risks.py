"""What riskcal finds of 1000 curves, for tests/refs/riskcal.json: it needs an environment of its own.

    python -m venv /tmp/riskcal && /tmp/riskcal/bin/pip install riskcal==1.5.1
    /tmp/riskcal/bin/python -P benchmarks/references/risks.py

It imports nothing of this package. A row is [kind, what the curve is of, advantage, TPR at FPR 0.1, 1, 5 %]:

    "gaussian"  [mu]
    "point"     [epsilon, delta]
    "sampled"   [noise multiplier, sampling probability, steps]     of dp-accounting's loss distribution, grid 1e-3
"""

import importlib.metadata
import json
import random
from pathlib import Path
from typing import Any

RATES = (0.001, 0.01, 0.05)
INTERVAL = 1e-3
FILE = Path(__file__).resolve().parents[2] / "tests" / "refs" / "riskcal.json"


def curves() -> list[tuple[str, list[float]]]:
    """500 Gaussians, 200 points, 300 sampled ones."""
    draw = random.Random(1)
    gaussian = [("gaussian", [round(0.01 * 1000 ** (i / 499), 6)]) for i in range(500)]
    points = [("point", [0.02 * 1.35**i, 10.0**-j]) for i in range(20) for j in range(1, 11)]
    steps = [1, 3, 10, 100, 1000]
    sampled = [
        ("sampled", [round(draw.uniform(0.6, 6), 4), round(10 ** draw.uniform(-3, -0.3), 5), steps[i % 5]])
        for i in range(300)
    ]
    return [*gaussian, *points, *sampled]


def main() -> None:
    """Compute and write."""
    import numpy as np
    from dp_accounting.pld import privacy_loss_distribution as pld
    from riskcal import analysis

    alphas, rows = np.array(RATES), []
    for kind, given in curves():
        if kind == "gaussian":
            betas, advantage = analysis.get_beta_from_gdp(*given, alphas), analysis.get_advantage_from_gdp(*given)
        elif kind == "point":
            betas, advantage = analysis.get_beta_from_adp(*given, alphas), analysis.get_advantage_from_adp(*given)
        else:
            sigma, q, n = given
            losses: Any = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=INTERVAL)
            losses = losses.self_compose(int(n))
            betas, advantage = analysis.get_beta_from_pld(losses, alphas), analysis.get_advantage_from_pld(losses)
        rows.append([kind, given, float(advantage), [float(1 - beta) for beta in betas]])
    version = importlib.metadata.version("riskcal")
    told = {"about": f"riskcal {version}, by benchmarks/references/risks.py", "rates": RATES, "interval": INTERVAL}
    lines = ",\n".join(json.dumps(row) for row in rows)
    FILE.write_text(json.dumps(told)[:-1] + f', "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
