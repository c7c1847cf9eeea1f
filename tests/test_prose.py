"""The words that users read: one meaning each, and none that only this project has.

What is read are the pages, README, the docstrings of public names, the help of the command line and the messages of
errors, without code. `PRIVATE` says which word is not for users, and what an editor writes in its place.
tests/prose.json
says how many each file still has: a file that it does not name has none, and a number in it may only fall.

    python tests/test_prose.py          print each place
    python tests/test_prose.py --fall   lower the numbers to what there is
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("prose.json")
ONCE = ("accuracy", "compared", "experiments", "numbers", "papers", "references", "scale")
"""Research: reports, and no guides."""

PRIVATE = {
    r"cuts?|cutting": "clip (truncate a batch, divide a text)",
    r"coins?": "random draw",
    r"anew": "again",
    r"beside": "compared with, next to, in addition to",
    r"handed|hands? (?:out|on|over|it|them)": "give, return, pass",
    r"rooms?": "module, package",
    r"nobody's|rows of nobody": "public, of no person",
    r"iterates": "weights during training",
    r"whoever|whosoever": "anyone who, or a plain subject",
    r"dear|dearer": "costly, slow",
    r"holds? for(?! one)": "applies to",
    r"(?:units?|users?|examples?|persons?|people|those who) (?:may |can |that |who )?(?:comes?|came)": "appear",
    r"(?:comes?|came) (?:too|twice|often|again|back|early|late)": "appear",
    r"(?:as|by|of) rule|order's rule|rule of (?:the |an )?order": "participation pattern, order",
    r"totals|the total|a total|the whole (?:of|over)|whole of (?:it|them)": "sum",
}
MEANT = [
    r"cut short|is cut short or altered|(?:make|want of|is|no) room|room for",
    r"as a rule|(?:the|a) total (?:number|variation|cost|time|size)",
    r"as (?:it|they) comes?",
    r"totals and shares|scales, totals|totals (?:=|were)|row for the total|the total's",  # names of arguments
]
"""Where a word is meant in its plain sense."""

WORDS = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): instead for pattern, instead in PRIVATE.items()}
PLAIN = re.compile("|".join(MEANT), re.IGNORECASE)
NO_PROSE = re.compile(
    r"^```[\s\S]*?^```$|<!--[\s\S]*?-->|^ *>>>.*$|^:::.*$|^ +options:.*$|``.*?``|`[^`]*`|\]\([^)\n]*\)|https?://\S+",
    re.MULTILINE,
)


def private_words(text: str) -> list[tuple[str, str]]:
    """(words as they stand, what an editor writes) of each private word of a text."""
    text = PLAIN.sub(" ", NO_PROSE.sub(" ", text))
    return [(found[0], instead) for word, instead in WORDS.items() for found in word.finditer(text)]


def pages() -> Iterator[tuple[Path, str]]:
    """README and the site, but for Research."""
    docs = ROOT / "docs"
    for page in [ROOT / "README.md", *sorted(docs.rglob("*.md"))]:
        if page.parent == ROOT or page.relative_to(docs).parts[0].removesuffix(".md") not in ONCE:
            yield page, page.read_text()


def public_names() -> set[str]:
    """Those of every `__all__`, and those that a page of the reference shows by themselves."""
    names = set()
    for path in (ROOT / "src").rglob("*.py"):
        found = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
        names |= set(ast.literal_eval(found[1])) if found else set()
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    return names | {place.rpartition(".")[2] for place in re.findall(r"^::: (\S+)$", reference, re.MULTILINE)}


def docstrings(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Those of public names of a module, and of their public methods."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in names:
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name[0] != "_"]
            for one in [node, *(methods if isinstance(node, ast.ClassDef) else [])]:
                yield ast.get_docstring(one) or ""


def strings(node: ast.AST) -> str:
    """All strings in a piece of source."""
    return " ".join(one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def messages(tree: ast.Module) -> Iterator[str]:
    """What is raised, warned of, and said by the command line's help."""
    for node in ast.walk(tree):
        is_warning = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn"
        is_help = isinstance(node, ast.keyword) and node.arg == "help"
        if isinstance(node, ast.Raise) or is_warning or is_help:
            yield strings(node)


def found() -> dict[str, list[str]]:
    """{file: what stands in it, and what an editor writes}."""
    names, texts = public_names(), list(pages())
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        texts += [(path, text) for text in [*docstrings(tree, names), *messages(tree)]]
    places: dict[str, list[str]] = {}
    for path, text in texts:
        for word, instead in private_words(text):
            around = re.search(rf".{{0,40}}\b{re.escape(word)}\b.{{0,30}}", text)
            said = f"{word!r}, write {instead}: ..{around[0] if around else ''}.."
            places.setdefault(str(path.relative_to(ROOT)), []).append(said)
    return places


def test_no_private_word_comes_back():
    allowed = json.loads(TABLE.read_text())
    more = {path: words for path, words in found().items() if len(words) > allowed.get(path, 0)}
    assert not more, "\n".join("\n  ".join([f"{path}, at most {allowed.get(path, 0)}:", *more[path]]) for path in more)


@pytest.mark.parametrize("text", [
    "Each message is cut to the clip norm.", "A unit that comes\ntoo often is refused.", "Every step draws anew.",
    "Of these rooms the last one holds for all.", "A coin for each example, handed to the loop.",
])  # fmt: skip
def test_a_private_word_is_seen(text):
    assert private_words(text)


@pytest.mark.parametrize("text", [
    "`cut` is a name.", "```python\ncut = coin\n```", "Each message is clipped.", "As a rule, it comes from a file.",
])  # fmt: skip
def test_code_and_plain_words_are_left_alone(text):
    assert private_words(text) == []


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    places = found()
    if "--fall" in sys.argv:
        before = (
            json.loads(TABLE.read_text()) if TABLE.exists() else {path: len(words) for path, words in places.items()}
        )
        now = {path: min(before.get(path, 0), len(words)) for path, words in sorted(places.items())}
        TABLE.write_text(json.dumps({path: count for path, count in now.items() if count}, indent=0) + "\n")
    print("\n".join(f"{path}: {word}" for path, words in sorted(places.items()) for word in words))
    print(sum(map(len, places.values())), "in", len(places), "files")
