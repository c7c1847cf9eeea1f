"""diffprivlib's LogisticRegression: one class against the rest, pure epsilon. Prints JSON.

    python streams_diffprivlib.py DATA.npz JOBS

JOBS: JSON list of [epsilon, seed, C]. Rows have norm at most 1, which it is told (data_norm); their last column is the
intercept's, so that it adds none of its own, which would cost it a larger norm.
"""

import json
import sys
import time
import warnings

import numpy as np
from diffprivlib.models import LogisticRegression


def main() -> None:
    data, jobs = np.load(sys.argv[1]), json.loads(sys.argv[2])
    warnings.filterwarnings("ignore")
    x, y, tx, ty = (
        data[name].astype(np.float64) if name in ("x", "tx") else data[name] for name in ("x", "y", "tx", "ty")
    )
    for epsilon, seed, c in jobs:
        started = time.process_time()
        model = LogisticRegression(
            epsilon=epsilon, data_norm=1.0, C=c, fit_intercept=False, max_iter=30, random_state=seed
        ).fit(x, y)
        right = float(model.score(tx, ty))
        print(json.dumps({"accuracy": right, "seconds": time.process_time() - started}), flush=True)


if __name__ == "__main__":
    main()
