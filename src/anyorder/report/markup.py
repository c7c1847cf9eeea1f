"""HTML and SVG from Python: every text is escaped where it is put in, so that no text can be markup."""

from html import escape

from anyorder.checks import final
from anyorder.formats import printable

__all__ = ["Html", "document", "join", "tag"]


@final
class Html(str):
    """Markup that this module made. Any other text is escaped before it is put beside it."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float | None) -> Html:
    """<name attributes>children</name>.

    Args:
        name: of the element, a literal of this package.
        children: `Html` as it is; any other text escaped, with what a screen could act on spelt out.
        attributes: "class_" is class, "stroke_width" is stroke-width; None is left out.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{told}>{join(*children)}</{name}>")


def join(*parts: str, between: str = "") -> Html:
    """The parts one after the other, escaped where they are not `Html`."""
    return Html(between.join(part if type(part) is Html else escape(printable(part)) for part in parts))


def document(title: str, *body: str) -> str:
    """A page in one file: no script, and nothing from elsewhere, which its content policy also forbids."""
    head = join(
        Html('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
        Html(
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        ),
        Html('<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'),
        tag("title", title),
        Html(f"\n<style>{_STYLE}</style>\n"),
    )
    page = tag("main", *body)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}</head>\n<body>\n{page}\n</body>\n</html>\n'


_STYLE = """
:root { --paper: #fff; --ink: #1c2430; --soft: #56606e; --rule: #d9dee5; --panel: #f5f7fa; --good: #17693f;
  --good-paper: #e7f5ed; --bad: #a3161f; --bad-paper: #fdeaea; --accent: #0b5fa5;
  --c0: #0b5fa5; --c1: #c2410c; --c2: #15803d; --c3: #7e3fb2; --c4: #57606a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181e; --ink: #e6eaf0; --soft: #a0abb8; --rule: #333b46;
  --panel: #1c222b; --good: #7fd6a4; --good-paper: #16301f; --bad: #ff9c9c; --bad-paper: #3b1618; --accent: #79b8f3;
  --c0: #79b8f3; --c1: #f6a56b; --c2: #74d39a; --c3: #c9a2f0; --c4: #a0abb8; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; } p { margin: .5rem 0; } .soft { color: var(--soft); }
.small { font-size: .875rem; } .whole { white-space: nowrap; }
.banner { border-left: .3rem solid; border-radius: .3rem; padding: .7rem 1rem; margin: 1rem 0; }
.good { color: var(--good); background: var(--good-paper); } .bad { color: var(--bad); background: var(--bad-paper); }
.banner p { margin: .15rem 0; } .bad strong { font-size: 1.2rem; }
.headline { background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem; padding: 1rem 1.2rem; }
.headline .number { font-size: 1.9rem; font-weight: 650; line-height: 1.25; letter-spacing: -.01em; }
.cells { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin-top: .9rem; }
.cell { border-top: 2px solid var(--accent); padding-top: .4rem; } .cell b { font-size: 1.25rem; display: block; }
dl { margin: 0; display: grid; grid-template-columns: minmax(8rem, 13rem) 1fr; }
dt, dd { margin: 0; padding: .45rem 0; border-top: 1px solid var(--rule); }
dt { font-weight: 600; padding-right: 1rem; }
dd p { margin: .1rem 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem; }
figure { margin: 0; } figure svg { display: block; width: 100%; max-width: 40rem; height: auto; }
figcaption { font-size: .875rem; color: var(--soft); }
svg text { fill: var(--soft); font-size: 12px; } svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .mark { stroke: var(--paper); stroke-width: 1.5; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); stroke-dasharray: 7 3; }
.c2 { stroke: var(--c2); stroke-dasharray: 2 3; } .c3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
.c4 { stroke: var(--c4); stroke-dasharray: 4 4; } .f0 { fill: var(--c0); } .f1 { fill: var(--c1); }
.f2 { fill: var(--c2); } .f3 { fill: var(--c3); } .f4 { fill: var(--c4); } .band { fill: var(--c0); opacity: .25; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; margin: .3rem 0; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-top: 1px solid var(--rule); vertical-align: top; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; } .num { text-align: right; white-space: nowrap; }
.key { display: inline-block; width: 1.8rem; height: .7rem; vertical-align: middle; }
ul { margin: .3rem 0; padding-left: 1.2rem; } li { margin: .25rem 0; }
pre, code { font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: .4rem; padding: .6rem .8rem;
  white-space: pre-wrap; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { border-top: 0; padding-top: 0; }
  .headline .number { font-size: 1.5rem; } }
@media print { :root { --paper: #fff; --ink: #000; --soft: #444; --rule: #bbb; --panel: #fff; --good: #17693f;
  --good-paper: #fff; --bad: #a3161f; --bad-paper: #fff; --accent: #0b5fa5; --c0: #0b5fa5; --c1: #c2410c;
  --c2: #15803d; --c3: #7e3fb2; --c4: #57606a; } body { font-size: 11pt; } main { max-width: none; padding: 0; }
  figure, .headline, dt, dd, li, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
