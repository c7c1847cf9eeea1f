"""The threat model in one picture: `python -m benchmarks.threats` writes docs/threats.svg."""

from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "threats.svg"
THINGS = (
    "finished model", "every step's release", "certificate, report", "own receipt", "batches", "evidence",
    "checkpoint, key", "the data",
)  # fmt: skip
PARTIES: tuple[tuple[str, str, str, str], ...] = (
    ("the public", "x.x.....", "epsilon of the certificate", "kept"),
    ("who follows the training", "xxx.....", "the same epsilon: it is for all steps together", "kept"),
    ("a unit (a person, a client)", "xxxx....", "the same, and its own mu in the receipt", "kept"),
    ("who learns the batches, order public", "xxx.x...", "the same epsilon: no claim rests on the batches", "kept"),
    (
        "who learns the batches, drawn order",
        "xxx.x...",
        "the epsilon 'if known' on the card, far above",
        "weak",
    ),
    ("who holds the evidence, an auditor", "xxx.xx..", "the same; it knows who took part, and when", "weak"),
    ("who holds the checkpoint", "xxx.x.x.", "nothing: its key takes the noise off", "none"),
    ("who trains", "xxx.xxxx", "nothing: sees the data, and is trusted", "none"),
)
"""Who; what each sees of `THINGS`; what is promised about them; how much that is."""
COLOURS = {"kept": "#1b7f4d", "weak": "#b26a00", "none": "#b3261e"}
LEFT, TOP, COLUMN, LINE, RIGHT = 310, 130, 44, 34, 390


def picture() -> Iterator[str]:
    """Lines of the SVG."""
    width, height = LEFT + COLUMN * len(THINGS) + RIGHT, TOP + LINE * len(PARTIES) + 14
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="15" role="img" aria-label="Who sees what, and what is promised about them">'
    )
    yield f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    for i, thing in enumerate(THINGS):
        x = LEFT + COLUMN * i + COLUMN // 2
        yield f'<text x="{x}" y="{TOP - 14}" transform="rotate(-40 {x} {TOP - 14})" fill="#222222">{thing}</text>'
    yield f'<text x="{LEFT + COLUMN * len(THINGS) + 60}" y="{TOP - 14}" fill="#222222">what holds against them</text>'
    for row, (party, sees, promise, strength) in enumerate(PARTIES):
        y = TOP + LINE * row + LINE // 2
        if row % 2 == 0:
            yield f'<rect x="8" y="{y - LINE // 2}" width="{width - 16}" height="{LINE}" fill="#f2f4f7"/>'
        yield f'<text x="18" y="{y + 5}" fill="#222222">{party}</text>'
        for i, mark in enumerate(sees):
            x = LEFT + COLUMN * i + COLUMN // 2
            seen = 'r="8" fill="#33415c"' if mark == "x" else 'r="2" fill="#b8bfcc"'
            yield f'<circle cx="{x}" cy="{y}" {seen}/>'
        x = LEFT + COLUMN * len(THINGS) + 18
        yield f'<rect x="{x - 8}" y="{y - 9}" width="6" height="18" rx="2" fill="{COLOURS[strength]}"/>'
        yield f'<text x="{x + 6}" y="{y + 5}" fill="{COLOURS[strength]}">{promise}</text>'
    yield "</svg>"


def main() -> None:
    """The command."""
    PAGE.write_text("\n".join(picture()) + "\n")


if __name__ == "__main__":
    main()
