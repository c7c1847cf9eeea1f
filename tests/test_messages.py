"""What messages and pages tell people to write exists: each keyword is one of the function that they name."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import anyorder as ao

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "anyorder"
CALL = re.compile(r"\bao\.([\w.]+)\(")
PLANNED = re.compile(r"\b[Pp]lan with(?:out)? (\w+)=")  # "plan without secure=": a keyword of ao.plan


def calls_in(text):
    """(name, what stands between its parentheses) of every `ao.name(..)` that is closed in the text."""
    for found in CALL.finditer(text):
        depth = 1
        for end in range(found.end(), len(text)):
            depth += (text[end] in "([{") - (text[end] in ")]}")
            if not depth:
                yield found[1], text[found.end() : end]
                break


def outermost(text):
    """The text without what stands in parentheses, brackets and quotes."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    while (shorter := re.sub(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", text)) != text:
        text = shorter
    return text


def unknown_keywords(text):
    """`ao.name(keyword=)` of those that there are not, and names that the package has not."""
    wrong = [f"ao.plan({word}=)" for word in PLANNED.findall(text) if word not in inspect.signature(ao.plan).parameters]
    for name, inside in calls_in(text):
        value = ao
        try:
            for part in name.split("."):
                value = getattr(value, part)
            known = inspect.signature(value).parameters
        except (AttributeError, ValueError):
            wrong.append(f"ao.{name}")
            continue
        if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            wrong += [
                f"ao.{name}({word}=)" for word in re.findall(r"(\w+) ?=(?!=)", outermost(inside)) if word not in known
            ]
    return wrong


def texts_of(source):
    """Every string of a source file, parts of one message joined."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_name_keywords_that_there_are():
    wrong = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if (found := {word for text in texts_of(path.read_text()) for word in unknown_keywords(text)})
    }
    assert wrong == {}


def test_pages_name_keywords_that_there_are():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    wrong = {str(page.relative_to(ROOT)): found for page in pages if (found := unknown_keywords(page.read_text()))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("plan without secure=", ["ao.plan(secure=)"]),
        ("ao.plan(.., estimator='full')", ["ao.plan(estimator=)"]),
        ("ao.plan(.., mechanism=ao.mechanism('tree', restarts=1))", ["ao.mechanism(restarts=)"]),
        ("ao.plans(..)", ["ao.plans"]),
        ("ao.plan(.., mechanism=ao.mechanism(secure=True)), plan with limits=", []),
    ],
)
def test_a_keyword_that_is_gone_is_seen(text, wrong):
    assert unknown_keywords(text) == wrong
