"""Papers run again: each claim, what came out, and the verdict.

    python -m reproductions --list                     papers and their figures
    python -m reproductions PAPER [FIGURE ..]          run, print; exit code 1 where a verdict is not the kept one
    python -m reproductions PAPER [FIGURE ..] --write  and keep it in reproductions/results/PAPER.jsonl
    python -m reproductions --page                     docs/papers from what is kept

Whole papers leave out the figures that train for minutes (marked in the list): name those.
"""

import argparse
import sys
from types import ModuleType

from reproductions import _page, _runs, denisov2022, huang2023, kairouz2021, smith_lecture, zhang2021
from reproductions._claims import Figure, Kept, Run, found, line, results, write

PAPERS: dict[str, ModuleType] = {
    "kairouz2021": kairouz2021,
    "denisov2022": denisov2022,
    "zhang2021": zhang2021,
    "huang2023": huang2023,
    "smith": smith_lecture,
}
"""In the order of the page. Each has TITLE and FIGURES."""


def parser() -> argparse.ArgumentParser:
    """Of the command; unknown papers and figures are told by `main`."""
    made = argparse.ArgumentParser(
        prog="python -m reproductions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("paper", nargs="?", choices=tuple(PAPERS))
    made.add_argument("figures", nargs="*", metavar="FIGURE", help="all that do not train, where none is named")
    made.add_argument("--quick", action="store_true", help="small sizes")
    made.add_argument("--seeds", type=int, default=3, help="how many, of what is random")
    made.add_argument("--first-seed", type=int, default=0, help="others than those whose outcome was seen")
    made.add_argument("--fresh", action="store_true", help="train stored runs again: hours for some figures")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    made.add_argument("--write", action="store_true", help="keep the results")
    made.add_argument("--list", action="store_true", help="print papers and figures")
    made.add_argument("--page", action="store_true", help="write docs/papers")
    return made


def chosen_figures(paper: str, names: list[str]) -> tuple[Figure, ...]:
    """Those named; without names all that do not train."""
    figures: tuple[Figure, ...] = PAPERS[paper].FIGURES
    unknown = sorted(set(names) - {figure.name for figure in figures})
    if unknown:
        raise SystemExit(f"{paper} has no figure {', '.join(unknown)}; it has {', '.join(f.name for f in figures)}")
    return tuple(figure for figure in figures if (figure.name in names if names else not figure.trains))


def show(kept: Kept, known: dict[tuple[str, str], str]) -> bool:
    """Print a claim; True where its verdict turned from what is kept."""
    claim = kept.claim
    before = known.get((claim.place, claim.statement))
    turned = before is not None and before.split(",")[0] != claim.verdict.split(",")[0]
    print(f"{claim.place}: {claim.statement}\n  they say  {claim.theirs}\n  we got    {claim.ours}")
    print(f"  verdict   {claim.verdict}{'. ' + claim.why if claim.why else ''}")
    if turned:
        print(f"  KEPT WAS  {before}")
    if claim.stored or claim.measured:
        where = ", ".join(claim.stored) or f"{claim.measured}, which runs it again; --fresh does not"
        print(f"  stored    {where}")
    print(flush=True)
    return turned


def main() -> None:
    """Run what was asked for."""
    options = parser()
    asked = options.parse_args()
    if asked.list:
        for name, module in PAPERS.items():
            print(f"{name}: {module.TITLE}")
            for figure in module.FIGURES:
                print(f"    {figure.name}{'  (trains)' if figure.trains else ''}")
    if asked.page:
        for path in _page.write({name: module.TITLE for name, module in PAPERS.items()}):
            print(path)
    if asked.paper is None:
        if not (asked.list or asked.page):
            options.error("name a paper, or use --list or --page")
        return
    if asked.quick and asked.write:
        options.error("--quick is not kept")
    _runs.FRESH = asked.fresh
    known = {(row.claim.place, row.claim.statement): row.claim.verdict for row in results(asked.paper)}
    run, turned = Run(quick=asked.quick, seeds=tuple(range(asked.first_seed, asked.first_seed + asked.seeds))), 0
    fresh: dict[str, list[Kept]] = {}
    for figure in chosen_figures(asked.paper, asked.figures):
        fresh[figure.name] = []
        for kept in found(asked.paper, figure, run):
            fresh[figure.name].append(kept)
            if asked.json:
                print(line(kept), flush=True)
            else:
                turned += show(kept, known)
    if asked.write:
        write(asked.paper, PAPERS[asked.paper].FIGURES, fresh)
    elif turned:
        sys.exit(f"{turned} verdicts are not those that are kept")


if __name__ == "__main__":
    main()
