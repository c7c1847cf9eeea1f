"""The report in headless Chromium: wide, narrow, dark, printed, and as a file from the disk."""

import pytest

from anyorder.app import html_report
from anyorder.app.report import Attacked, Shown, html_refusal
from browser import Watched, chromium, served
from report.pages import claims, page

HOSTILE = '<script>document.title = "ran"</script><img src=x onerror="document.title=1">'
RATIO = """() => {  // the least contrast of a text beside what lies behind it, and the text
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    const own = getComputedStyle(e).backgroundColor;
    return own !== "rgba(0, 0, 0, 0)" ? own : e.parentElement ? behind(e.parentElement) : "rgb(255, 255, 255)";
  };
  let least = [21, ""];
  for (const e of document.querySelectorAll("main *")) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), ink = e instanceof SVGElement ? style.fill : style.color;
    const two = [light(ink), light(behind(e.closest("svg") || e))].sort((a, b) => b - a);
    const ratio = (two[0] + 0.05) / (two[1] + 0.05);
    if (ratio < least[0]) least = [ratio, e.textContent.slice(0, 60)];
  }
  return least;
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages")
    shown = Shown(
        title="A training on a_name_without_any_space_in_it" * 3, accuracy=((1, 0.5), (2, 0.75), (3, 0.7)),
        training=(("model", "x" * 80), (HOSTILE, HOSTILE)), audit=Attacked(canaries=9, p_value=0.5, at_least=0.1),
        budget="ab" * 16, notes=("a" * 200,),
    )  # fmt: skip
    made = {name: page(name) for name in ("plan", "bins", "known", "search", "empty search", "poisson")}
    made |= {"run": html_report(claims()["fixed"], shown), "refused": html_refusal(HOSTILE + "y" * 200)}
    for name, text in made.items():
        (path / f"{name.replace(' ', '-')}.html").write_text(text, encoding="utf-8")
    (path / "favicon.ico").write_bytes(b"")
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


def test_every_page_fits_wide_and_narrow_screens_without_a_fault(folder, browser):
    reader = Watched(browser)
    with served(folder) as address:
        for file in sorted(folder.glob("*.html")):
            assert reader.faults_of(address + file.name) == [], file.name
            assert reader.page.title().startswith(("Privacy report", "NOT VERIFIED")), file.name


def test_every_text_can_be_read_in_the_colours_of_the_system(folder, browser):
    page, seen = browser.new_page(), set()
    for name in ("run", "refused", "bins"):
        page.goto((folder / f"{name}.html").as_uri())  # from the disk, as a reader has it
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            ratio, text = page.evaluate(RATIO)
            assert ratio >= 4.5, (name, scheme, text)
            seen.add((scheme, page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert seen == {("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 30)")}
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(RATIO)[0] >= 4.5
    page.close()


def test_a_script_that_got_in_would_not_run(folder, browser):
    """The page's content policy, were escaping to fail."""
    text = (folder / "plan.html").read_text().replace("<main>", f"<main>{HOSTILE}")
    (folder / "hurt.htm").write_text(text)
    page = browser.new_page()
    page.goto((folder / "hurt.htm").as_uri())
    assert page.title().startswith("Privacy report")
    page.close()
