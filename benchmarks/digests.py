"""Plans of fifty settings, and whether they are the same on another processor.

    python -m benchmarks.digests                 plans anew under each kernel of OpenBLAS and 1 and 2 threads: minutes
    python -m benchmarks.digests --quick         six of them
    python -m benchmarks.digests --write         the digests of here, to tests/golden/plans.json

A digest is SHA-256 of all that a plan fixes: order, strategy with every coefficient, workload, noise. The kernels stand
for processors, as `OPENBLAS_CORETYPE` makes the library take another's; `NPY_DISABLE_CPU_FEATURES` takes NumPy's own
vector forms away, and `GLIBC_TUNABLES` the fused products of the library of C. What a library really took is said.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._report import Row, add_options, show

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "plans.json"
QUICK = ("shuffled 240 momentum", "fixed 256", "separated 300", "fixed 60", "long blt", "bins")
PLAIN = "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F"
VECTORS = "AVX2 FMA3 AVX512F AVX512_SKX X86_V3 X86_V4"
KERNELS = {
    "Haswell, 1 thread": {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1"},
    "Haswell, 2 threads": {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
    "SkylakeX, 1 thread": {"OPENBLAS_CORETYPE": "SkylakeX", "OPENBLAS_NUM_THREADS": "1"},
    "Nehalem, 2 threads": {"OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
    "Nehalem, NumPy without vectors": {"OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": VECTORS},
    "Nehalem, the library of C too": {
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": VECTORS,
        "GLIBC_TUNABLES": PLAIN,
    },
}


def settings() -> dict[str, dict[str, Any]]:
    """Fifty of them by name: what `plan` is given beside epsilon and delta."""
    import anyorder as ao
    from anyorder.participation import BallsInBins, EpochShuffle, FixedOrder, MinSeparation, SingleEpoch
    from anyorder.workload import cosine

    found: dict[str, dict[str, Any]] = {}
    sgds = {
        "": None,
        " momentum": ao.SGD(momentum=0.9),
        " cosine": lambda n: ao.SGD(momentum=0.9, learning_rates=cosine(n)),
    }
    orders = {
        "shuffled 240": EpochShuffle(4, 60), "shuffled 600": EpochShuffle(10, 60), "fixed 60": FixedOrder(60, 3, 20),
        "fixed 256": FixedOrder(256, 4, 64), "fixed 600": FixedOrder(600, 10, 60),
        "separated 300": MinSeparation(300, 60, 5), "separated 40": MinSeparation(40, 8, 5),
        "single 200": SingleEpoch(200), "single 1000": SingleEpoch(1000),
    }  # fmt: skip
    for name, order in orders.items():
        for words, sgd in sgds.items():
            if words == " cosine" and order.n == 1000:
                continue
            found[name + words] = {"order": order, "optimizer": sgd(order.n) if callable(sgd) else sgd}
    for kind in ("blt", "tree", "banded inverse, 8 bands", "banded toeplitz, 16 bands", "blt, 2 buffers",
                 "banded, 12 bands", "restarted blt"):  # fmt: skip
        found[f"{kind}, shuffled 240"] = {"order": orders["shuffled 240"], "mechanism": kind}
    for objective in ("max", "last"):
        for name in ("shuffled 240", "fixed 60", "separated 300"):
            found[f"{name}, {objective}"] = {
                "order": orders[name], "mechanism": ao.mechanism("auto", objective=objective)
            }  # fmt: skip
    found["long blt"] = {"order": FixedOrder(100_000, 5, 20_000), "mechanism": "blt"}
    found["long"] = {"order": EpochShuffle(5, 1200)}
    found["no state"] = {"order": orders["fixed 600"], "limits": ao.Limits(memory=0)}
    found["bins"] = {"order": BallsInBins(4, 10)}
    found["bins 160"] = {"order": BallsInBins(4, 40)}
    sized = {"dataset_size": 6000, "batch_size": 60, "epochs": 3}
    for word in ("poisson", "cyclic-poisson", "random-allocation", "shuffled"):
        found[word] = {"order": word, **sized}
    return found


def digests(names: list[str]) -> dict[str, list[Any]]:
    """Name -> (digest, mechanism, seconds) of plans, nothing read from disk."""
    os.environ["ANYORDER_CACHE"] = "off"
    import anyorder as ao

    result = {}
    for name, given in settings().items():
        if not names or name in names:
            start = time.perf_counter()
            plan = ao.plan(**{"batch_size": 10, "epsilon": 4.0, "delta": 1e-5} | given)
            result[name] = [plan.digest, repr(plan.strategy), round(time.perf_counter() - start, 2)]
    return result


def kernel() -> list[str]:
    """The architectures that the loaded libraries of linear algebra have taken."""
    import numpy as np
    import scipy.linalg  # noqa: F401
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    del np
    return sorted({str(one.get("architecture")) for one in threadpool_info() if one["user_api"] == "blas"})


def under(environment: dict[str, str], names: list[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """The kernel that was really taken, and the digests under it, in a process of its own."""
    code = f"import json; from benchmarks.digests import *; print(json.dumps([digests({names!r}), kernel()]))"
    clean = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    found, taken = json.loads(done.stdout.splitlines()[-1])
    return taken, found


def rows(names: list[str], jobs: int) -> Iterator[Row]:
    """Of each setting: how many kernels gave another plan than the first; the seconds of the first."""
    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(lambda one: under(one, names), KERNELS.values()))
    for words, (taken, _) in zip(KERNELS, made, strict=True):
        print(f"# {words}: libraries took {', '.join(taken)}", file=sys.stderr)
    for name, (digest, mechanism, seconds) in made[0][1].items():
        others = sum(found[name][0] != digest for _, found in made[1:])
        yield Row(f"{name}: {mechanism}, {seconds:g} s", float(others), 0.0, None, "other plans")


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--write", action="store_true", help="the digests of here, to tests/golden/plans.json")
    parser.add_argument("--jobs", type=int, default=1, help="kernels that are tried side by side")
    chosen = parser.parse_args()
    if chosen.write:
        found = digests([])
        GOLDEN.write_text(json.dumps({name: one[:2] for name, one in found.items()}, indent=1) + "\n", encoding="utf-8")
        return
    show(rows(list(QUICK) if chosen.quick else [], chosen.jobs), chosen.json)


if __name__ == "__main__":
    main()
