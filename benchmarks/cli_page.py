"""The reference of the command line in docs/cli.md, from the commands themselves.

python -m benchmarks.cli_page          # writes it
python -m benchmarks.cli_page --check  # says whether it is as the commands are
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyorder.app.cli import COMMANDS, load_command
from anyorder.app.exits import MEANINGS

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_PLACE = "<!-- {}: written by `python -m benchmarks.cli_page` -->"
_END = "<!-- end of what is written by a command -->"


def page(text: str) -> str:
    """The page with its generated parts as the commands are now."""
    for name, made in (("exit codes", exit_codes()), ("reference", reference())):
        begin, end = _PLACE.format(name), _END
        count = text.count(begin)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{made}\n{end}{rest.partition(end)[2]}"
        if count != 1:
            raise ValueError(f"docs/cli.md must have one place for the {name}, and has {count}")
    return text


def exit_codes() -> str:
    """One table of all exit codes."""
    rows = [f"| {int(code)} | {text} |" for code, text in MEANINGS.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows]) + "\n"


def reference() -> str:
    """Every command: what it does, examples, options; what several commands share comes first."""
    return "\n".join(_all_commands())


def _all_commands() -> Iterator[str]:
    shared = _shared()
    rows = "\n".join(_line(name, meaning, default) for (name, meaning), default in sorted(shared.items()))
    yield f"### Options of several commands\n\n{rows}\n"
    group = None
    for name, (panel, _, _) in COMMANDS.items():
        if panel != group:
            group = panel
            yield f"### {group}\n"
        command = load_command(name)
        found = getattr(command, "commands", None)
        if found is None:
            yield from _one(f"anyorder {name}", command, shared)
        else:
            yield f"#### anyorder {name}\n\n{_words(command.help)}\n"
            for inner, one in found.items():
                yield from _one(f"anyorder {name} {inner}", one, shared)


def _shared() -> dict[tuple[str, str], str]:
    """Most common default of each (option, meaning) that commands have alike; of an option the most common meaning."""
    commands = [load_command(name) for name in COMMANDS]
    every = [one for command in commands for one in getattr(command, "commands", {"": command}).values()]
    options = [one for command in every for one in command.params if not one.required and one.opts[-1][0] == "-"]
    shared: dict[str, tuple[str, str]] = {}
    for said, count in Counter(map(_said, options)).most_common():
        if count > 1:
            shared.setdefault(said[0], said)
    defaults = {said: Counter(_default(one) for one in options if _said(one) == said) for said in shared.values()}
    return {said: found.most_common(1)[0][0] for said, found in defaults.items()}


def _said(option: Any) -> tuple[str, str]:
    return option.opts[-1], _cell(option.help)


def _one(name: str, command: Any, shared: dict[tuple[str, str], str]) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    yield f"#### {name}\n\n{_words(command.help)}\n"
    own = [one for one in options if one.required or _said(one) not in shared]
    rows = [
        *(_line(_metavar(one), _cell(one.help), _default(one)) for one in arguments),
        *(_line(one.opts[-1], _cell(one.help), _default(one)) for one in own),
    ]
    if rows:
        yield "\n".join(rows) + "\n"
    rest = [one for one in options if one not in own and one.opts[-1] != "--json"]  # every command has --json
    others = [f"`{one.opts[-1]}`" + _other_default(one, shared) for one in rest]
    if others:
        yield f"[Shared](#options-of-several-commands): {', '.join(others)}.\n"


def _line(name: str, meaning: str, default: str) -> str:
    """An option in a list: a flag has no value, and most others a default."""
    if default == "off":
        return f"- `{name}` (flag): {meaning}"
    told = {"": "", "needed": " Needed."}.get(default, f" Default: {default}.")
    return f"- `{name}`: {meaning}{told}"


def _other_default(option: Any, shared: dict[tuple[str, str], str]) -> str:
    """The default in brackets, where it is not that of the table of shared options."""
    default = _default(option)
    return "" if default == shared[_said(option)] else f" ({default})"


def _words(text: str) -> str:
    """The help as Markdown: lines that begin with a prompt are examples. Exit codes have a table of their own."""
    made: list[str] = []
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        if line.startswith("$ "):
            if made and made[-1].startswith("```bash"):
                made[-1] = made[-1].removesuffix("\n```") + f"\n{line[2:]}\n```"
            else:
                made.append(f"```bash\n{line[2:]}\n```")
        elif line and not line.startswith("Exit code"):
            made.append(_plain(re.sub(r"^\.\. ", "Add ", line)))
    return "\n\n".join(made)


def _plain(text: str) -> str:
    return re.sub(r"\[/?bold\]", "`", text).replace("<", "&lt;")


_SAID = re.compile(r"\s*Default: (.*?)\.?$")  # at the end of a help, where a default is no value


def _cell(text: str | None) -> str:
    """The help without its default, which is told in one way for all."""
    return _plain(_SAID.sub("", " ".join((text or "").split())))


def _metavar(argument: Any) -> str:
    name = argument.human_readable_name.upper()
    return f"{name} .." if argument.nargs == -1 else name if argument.required else f"[{name}]"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    if getattr(parameter, "is_flag", False):
        return "off"
    value = parameter.default
    if value is None or value is False or value == "" or callable(value):
        said = _SAID.search(" ".join((parameter.help or "").split()))
        return "" if said is None else _plain(said[1])
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def main() -> None:
    """Write the page, or say whether it is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if parser.parse_args().check:
        raise SystemExit(0 if new == old else "docs/cli.md is not as the commands are: python -m benchmarks.cli_page")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
