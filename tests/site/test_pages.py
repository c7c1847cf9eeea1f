"""Pages of the site in headless Chromium, wide and narrow, and every link: the site is built once for all."""

import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from browser import OVERFLOW, Watched, chromium, served
from test_reference import OF_THE_PACKAGE, PUBLIC

ROOT = Path(__file__).parents[2]
SOURCES = sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
LIMIT = 500_000  # bytes of a page, without its pictures
LAID_OUT = re.compile(r"!\[|<(?:div|img|svg)|^=== ", re.MULTILINE)  # pictures, boxes, tabs


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the extra docs is not installed")
    if "ANYORDER_SITE" in os.environ:  # .ci/run has built it a moment ago, by the same command
        return Path(os.environ["ANYORDER_SITE"])
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, with which mkdocs drops warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    with served(site) as where:
        yield where


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def reader(browser):
    return without_search(browser)


def without_search(browser, **context):
    """Each page starts to read the index of the search, a megabyte: here it does so in the test of the search alone."""
    watched = Watched(browser, **context)
    watched.page.add_init_script("window.Worker = class { postMessage() {} addEventListener() {} terminate() {} }")
    return watched


def path_of(source):
    """`api/index.md` is shown at api/, `api/plan.md` at api/plan/."""
    return re.sub(r"(^|/)index$", r"\1", source.removesuffix(".md")).rstrip("/") + "/" if source != "index.md" else ""


class Links(HTMLParser):
    """What a page has of places to go to, and of links."""

    def __init__(self, text):
        super().__init__()
        self.places, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.places |= {named[key] for key in ("id", "name") if named.get(key)}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        self.loaded += [named[key] for key in ("src", "data") if named.get(key)]
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "dns-prefetch"):
            self.loaded.append(named["href"])


def dead_links(folder):
    """Every link and every loaded file that leads nowhere, or to another host where it must not."""
    files = sorted(folder.rglob("*.html"))
    pages = {"/" + str(file.relative_to(folder)).removesuffix("index.html"): Links(file.read_text()) for file in files}
    dead = []
    for path, page in pages.items():
        if path == "/404.html":
            continue  # its links are of the published address
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                fine = parts.scheme == "https" and "." in parts.netloc and not re.search(r"[\s<>]", link)
                if link in page.loaded or not fine:
                    dead.append(f"{path}: {link}")
                continue
            target = urlsplit(urljoin(path, link))
            name, place = unquote(target.path), unquote(target.fragment)
            exists = name in pages or (folder / name.lstrip("/")).is_file()
            if not exists or (place and name in pages and place not in pages[name].places and place != "__toc"):
                dead.append(f"{path}: {link}")
    return dead


SHOW = """text => {
  const other = new DOMParser().parseFromString(text, "text/html").querySelector("article");
  document.querySelector("article").replaceWith(other);
}"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes where nothing else runs
def test_every_page_fits_every_screen_without_a_fault(reader, address, site):
    """Those that have more than text are opened, narrow and wide.

    The text of the others is shown in the place of another's, on the narrow screen, where what is too wide shows: what
    is around it, they have in common, and of what they load each file is looked for below.
    """
    laid_out = [source for source in SOURCES if LAID_OUT.search((ROOT / "docs" / source).read_text())]
    assert len(laid_out) > 5
    faults = {source: reader.faults_of(address + path_of(source), (1280, 400)) for source in laid_out}
    for source in set(SOURCES) - set(laid_out):
        reader.page.evaluate(SHOW, (site / path_of(source) / "index.html").read_text())
        faults[source] = reader.page.evaluate(OVERFLOW)
    assert {source: found for source, found in faults.items() if found} == {}


def test_no_link_is_dead(site):
    assert dead_links(site) == []


def test_every_address_that_there_was_still_leads_somewhere(site):
    """A page that goes leaves a line in `redirects` of mkdocs.yml; whether its link is good is tested above."""
    known = Path(__file__).with_name("addresses.txt").read_text().split()
    assert set(SOURCES) <= set(known), "add the new pages to tests/site/addresses.txt"
    assert [source for source in known if not (site / path_of(source) / "index.html").exists()] == []


def test_a_page_tells_its_version_and_where_it_is_edited(site):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (site / "install" / "index.html").read_text()
    assert f"anyorder {project['version']}" in page
    assert f'href="{project["urls"]["Source"]}/edit/main/docs/install.md"' in page


def test_no_page_is_heavy(site):
    """Its own text as it lies, and all that a first visit fetches as hosts send it (compressed), pictures left out."""
    every = [*site.glob("assets/**/*.css"), *site.glob("stylesheets/*.css")]
    every += [*site.glob("assets/javascripts/bundle*.js"), *site.glob("assets/javascripts/workers/*.js")]
    shared = sum(len(gzip.compress(file.read_bytes(), 6)) for file in [*every, site / "search/search_index.json"])
    pages = {str(file.relative_to(site)): file.read_bytes() for file in site.rglob("*.html")}
    weights = {name: (len(text), shared + len(gzip.compress(text, 6))) for name, text in pages.items()}
    assert {name: both for name, both in weights.items() if max(both) > LIMIT} == {}


QUESTIONS = {
    "ao.plan": "api/plan/", "LoaderError": "api/errors/", "what is epsilon": "risk/", "choose delta": "choosing/",
    "clip norm": "clipping/", "batch norm": "models/", "opacus": "opacus/", "certificate": "certificates/",
    "DDP": "distributed/", "GDPR": "guarantee/", "resume checkpoint": "checkpoints/", "install": "install/",
    "hugging face trainer": "ecosystem/", "shuffled batches": "orders/", "learning rate tuning": "tuning/",
    "embedding table": "tables/", "logistic regression": "online/", "command line exit codes": "cli/",
    "github action check": "check/", "user level privacy": "users/", "publish model": "files/",
    "streaming data": "streams/", "accuracy is low": "quickstart/", "GAN": "patterns/",
}  # fmt: skip
"""What people type, and the page that answers it."""


def test_the_search_finds_the_answer_among_its_first_three(browser, address):
    watched = Watched(browser, viewport={"width": 1280, "height": 900})
    page, item = watched.page, ".md-search-result__item"
    page.goto(address)

    def first_three(words):
        page.fill("input.md-search__input", words)
        page.press("input.md-search__input", "End")  # the page waits for a key
        page.wait_for_selector(item, timeout=30_000)
        links = page.eval_on_selector_all(item, "all => all.slice(0, 3).map(e => e.querySelector('a').href)")
        page.fill("input.md-search__input", "zzzz")
        page.press("input.md-search__input", "End")
        page.wait_for_selector(item, state="detached", timeout=30_000)  # the next answers are the next question's
        return [urlsplit(link).path.lstrip("/") for link in links]

    found = {words: first_three(words) for words in QUESTIONS}
    assert {words: pages for words, pages in found.items() if QUESTIONS[words] not in pages} == {}
    assert watched.faults == []
    page.close()


def test_every_public_name_is_on_a_page(site):
    anchors = {
        anchor
        for page in (site / "api").rglob("index.html")
        for anchor in re.findall(r'id="([\w.]+)"', page.read_text())
    }
    missing = [
        f"{module}.{name}"
        for module, name in [*PUBLIC, *OF_THE_PACKAGE]
        if not {f"{module}.{name}", f"{module}.{name}.{name}"} & anchors
    ]
    assert not missing, (
        "give each a docstring, or take it out of __all__; where a file of the room has its name, the page names it "
        f"by its whole path, as docs/api/plan.md does: {missing}"
    )


def test_examples_of_docstrings_are_code_and_not_quotations(site):
    pages = [page.read_text() for page in (site / "api").rglob("index.html")]
    assert sum(page.count('class="language-pycon') for page in pages) > 40
    assert not any("<blockquote>" in page for page in pages)


# The contrast of each text with what lies behind it, by the formula of WCAG 2: large text needs 3, other text 4.5.
CONTRAST = """() => {
  const parse = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = (top, below) => {
    const a = top.length > 3 ? top[3] : 1;
    return [0, 1, 2].map(i => a * top[i] + (1 - a) * below[i]);
  };
  const light = c => {
    const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    if (!e) return [255, 255, 255];
    const own = parse(getComputedStyle(e).backgroundColor);
    return own.length > 3 && own[3] < 1 ? over(own, behind(e.parentElement)) : own.slice(0, 3);
  };
  const poor = new Set();
  for (const e of document.querySelectorAll("article *, .md-tabs a, .md-nav a, .md-header span")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !box.width || style.visibility === "hidden" || e.closest(".headerlink, svg")) continue;
    let shown = 1;
    for (let p = e; p; p = p.parentElement) shown *= Number(getComputedStyle(p).opacity);
    if (!shown) continue;
    const back = behind(e), text = parse(style.color);
    const pair = [light(over([...text.slice(0, 3), (text[3] ?? 1) * shown], back)), light(back)].sort((x, y) => y - x);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05), large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) poor.add(`${e.localName}.${e.className} ${style.color} ${ratio.toFixed(2)}`);
  }
  return [...poor].slice(0, 12);
}"""


@pytest.mark.parametrize(("scheme", "name"), [("light", "default"), ("dark", "slate")])
def test_text_stands_out_in_light_and_dark_and_the_button_changes_the_colours(browser, address, scheme, name):
    watched = without_search(browser, viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    found = {}
    for source in ("index.md", "guarantee.md", "api/plan.md"):
        watched.page.goto(address + path_of(source))
        assert watched.page.get_attribute("body", "data-md-color-scheme") == name
        found[source] = watched.page.evaluate(CONTRAST)
    assert {source: poor for source, poor in found.items() if poor} == {}
    seen = []
    for _ in range(3):
        seen.append(watched.page.get_attribute("body", "data-md-color-scheme"))
        watched.page.locator("form.md-header__option label:not([hidden])").click()
    assert set(seen) == {"default", "slate"}
    assert watched.faults == []
    watched.page.close()


LONG = "x" * 400
ICON = "<link rel=icon href='data:,'>"
FAULTS = {
    "wide": ("<article><div style='width: 900px'>wide</div></article>", "at 400 pixels: the page is"),
    "cut": (f"<article><div style='overflow: hidden'><pre>{LONG}</pre></div></article>", "at 400 pixels: <div> is cut"),
    "console": ("<script>console.error('planted')</script>", "console: planted"),
    "script": ("<script>throw new Error('planted')</script>", "script: planted"),
    "host": ("<script src='https://example.org/a.js'></script>", "another host: https://example.org/a.js"),
    "picture": ("<img src='none.png'>", "no picture"),
}  # fmt: skip


def test_planted_faults_of_a_page_are_seen(reader, tmp_path):
    scrolls = f"<article><div style='overflow-x: auto'><pre>{LONG}</pre></div></article>"
    for name, (text, _) in {**FAULTS, "fine": (scrolls, "")}.items():
        (tmp_path / f"{name}.html").write_text(f"<!doctype html>{ICON}<body>{text}")
    with served(tmp_path) as where:
        for fault, (_, seen) in FAULTS.items():
            assert any(said.startswith(seen) for said in reader.faults_of(f"{where}{fault}.html")), fault
        assert reader.faults_of(where + "fine.html") == []


def test_planted_faults_of_links_are_seen(tmp_path):
    dead = ["none/", "#nowhere", "../b/#nowhere", "http://plain.example.org", "https://nothost"]
    fine = ["#here", "../b/#there", "../b/", "https://example.org/page"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    links = "".join(f"<a href='{link}'>x</a>" for link in [*fine, *dead])
    (tmp_path / "a/index.html").write_text(
        f"<p id=here>{links}<img src='none.png'><script src='https://a.org/b.js'></script>"
    )
    (tmp_path / "b/index.html").write_text("<p id=there>")
    assert dead_links(tmp_path) == [f"/a/: {link}" for link in [*dead, "none.png", "https://a.org/b.js"]]


def test_the_search_leaves_research_out(site):
    """Tables of thousands of numbers are not looked for by words."""
    research = ("accuracy/", "compared/", "experiments/", "papers/", "references/")
    index = json.loads((site / "search/search_index.json").read_text())
    assert not [entry for entry in index["docs"] if entry["location"].startswith(research)]
