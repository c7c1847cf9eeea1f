"""The pages as tests: their blocks run at small size, and what they print is what the page shows.

    name = 4000  # small: 400            the tests take 400; a reader who copies the block has 4000

    <!-- invisible-code-block: python    sets up what readers need not see, up to a line with -->

A ```text fence behind a ```python fence is what that block prints; in a ```console fence, lines with "$ " are commands
and the others what they print. At small size both are compared but for numbers and space.
`ANYORDER_TUTORIALS=full pytest docs/tutorials` runs the pages as a reader does, and compares the numbers too;
`ANYORDER_TUTORIALS=write` puts what was printed in the place of what the pages show. An HTML comment in front of the
output says what may differ:

    <!-- by chance: 0.1 -->              numbers that noise decides: in a full run each is within 0.1 of the page's
    <!-- exact -->                       numbers are compared at every size
    <!-- full size -->                   at small size other lines are printed: compared in full runs alone
    <!-- full size, by chance: 0.1 -->   both
    <!-- by chance: 0.1, true claim -->  and an audit of a true claim, of whose bounds noise decides how many lie above
                                         it: each verdict that does not refute it is as good as the page's
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from sybil import Region

MODE = os.environ.get("ANYORDER_TUTORIALS", "small")
SMALL = re.compile(r"^(\s*[\w, ]+ = ).+?(  # small: )(.+)$", re.MULTILINE)
PYTHON = re.compile(
    r"^```python[^\n]*\n(?P<source>.*?)^```$(?:\n\n(?:<!-- (?P<note>[^>]+) -->\n\n)?```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
CONSOLE = re.compile(
    r"(?:^<!-- (?P<note>[^>]+) -->\n\n)?^```console\n(?P<source>(?P<shown>\$ .*?))^```$", re.MULTILINE | re.DOTALL
)
HASH = re.compile(r"[0-9a-f]{24,}")
HIDDEN = re.compile(r"^<!-- invisible-code-block: python\n(?P<source>.*?)^-->$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def parse(document):
    """The regions of a page, as Sybil's parsers yield them."""
    for pattern, run in ((HIDDEN, _hidden), (PYTHON, _python), (CONSOLE, _console)):
        for match in pattern.finditer(document.text):
            yield Region(match.start(), match.end(), match, run)


def finish(namespace):
    """Put what was printed into the page, where that is asked for."""
    for path, edits in namespace.pop("_printed", {}).items():
        text = Path(path).read_text()
        for start, end, printed in sorted(edits, reverse=True):
            text = text[:start] + printed + text[end:]
        Path(path).write_text(text)


def small(source):
    """The block at the size of tests."""
    return source if MODE != "small" else SMALL.sub(r"\1\3", source)


def _python(example):
    match = example.parsed
    line = example.document.text.count("\n", 0, match.start("source"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + small(match["source"]), example.path, "exec"), example.namespace)
    del example.namespace["__builtins__"]
    if match["shown"] is not None:
        _same(example, printed.getvalue())


def _hidden(example):
    exec(compile(example.parsed["source"], example.path, "exec"), example.namespace)
    del example.namespace["__builtins__"]


def _console(example):
    from anyorder.app.cli import run

    printed = io.StringIO()
    for line in example.parsed["source"].splitlines():
        if not line.startswith("$ "):
            continue
        program, *arguments = shlex.split(line[2:])
        assert program == "anyorder", line
        printed.write(line + "\n")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
            run(arguments)
    _same(example, printed.getvalue())


def _same(example, printed):
    match = example.parsed
    printed = "".join(line.rstrip() + "\n" for line in printed.splitlines())
    if MODE == "write":
        edits = example.namespace.setdefault("_printed", {}).setdefault(example.path, [])
        edits.append((match.start("shown"), match.end("shown"), printed))
    elif difference := compare(match["shown"], printed, match["note"], MODE == "full"):
        raise AssertionError(f"{difference}\nthe page shows:\n{match['shown']}\nprinted is:\n{printed}")


def compare(shown, printed, note, full):
    """What is wrong with `printed` beside `shown`, or "" if nothing is."""
    if note == "exact":
        return "" if shown == printed else "other text is printed"
    found = re.fullmatch(r"(full size)?(?:, )?(?:by chance: ([\d.]+))?(, true claim)?", note or "")
    if found is None:
        return (
            "the comment must be `full size`, `by chance: NUMBER` or both with a comma between, and `, true claim` "
            f"behind them where an audit is printed, got {note!r}"
        )
    full_alone, by_chance, true_claim = found.groups()
    if full_alone and not full:
        return ""
    shown, printed = HASH.sub("", shown), HASH.sub("", printed)
    if true_claim:
        shown, printed = _without_chance(shown), _without_chance(printed)
    if full and not by_chance:
        return "" if shown == printed else "other text is printed"
    if _words(shown) != _words(printed):
        return "other words are printed"
    if full and by_chance:
        pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
        far = [(a, b) for a, b in pairs if abs(float(a) - float(b)) > float(by_chance)]
        return f"these numbers differ by more than {by_chance}: {far}" if far else ""
    return ""


def _without_chance(text):
    """With one verdict for all that do not refute a claim: how many of its four bounds lie above it, noise decides."""
    from anyorder.app.charts import not_refuted

    for above in range(1, 5):
        text = text.replace(f" {not_refuted(above)}\n", f" {not_refuted(0)}\n")
    return text


def _words(text):
    """Without numbers, space and lines drawn."""
    return re.sub(r"[\s─-]+", "", NUMBER.sub("", text))
