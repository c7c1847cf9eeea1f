"""What every reproduction shares: its options, and one way to print."""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """One number found, and the verdict on what was expected; None for a number that is only told."""

    name: str
    value: float
    expected: str = ""
    holds: bool | None = None


def main(description: str, run: Callable[[bool], Iterable[Finding]]) -> None:
    """Parse `--quick` and `--json`, run, print; the last line is the verdict, and exit code 1 says that it failed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    chosen = parser.parse_args()
    failed = 0
    for finding in run(chosen.quick):
        failed += finding.holds is False
        if chosen.json:
            print(json.dumps(asdict(finding)), flush=True)
        else:
            verdict = {None: "", True: "  holds", False: "  DOES NOT HOLD"}[finding.holds]
            print(f"{finding.name:<78}{finding.value:>11.4g}  {finding.expected}{verdict}", flush=True)
    if not chosen.json:
        print(f"verdict: {'as expected' if not failed else f'{failed} of the expectations do not hold'}")
    raise SystemExit(bool(failed))
