"""What is published: the source archive holds the whole project, and the README reads the same elsewhere."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import anyorder

ROOT = Path(__file__).parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked():
    """What git tracks; in an unpacked archive there is no git, and nothing to compare with."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout: only git knows which files belong to the project")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def test_the_source_archive_holds_every_file_of_the_project(tmp_path):
    wanted = tracked()
    copy = tmp_path / "project"
    for name in wanted:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, tmp_path], cwd=copy, check=True, capture_output=True, timeout=240
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    assert wanted - found == set()
    assert not [name for name in found if name.endswith((".so", ".pyc"))]


def test_links_of_the_readme_are_absolute_and_lead_to_files_that_exist():
    home = METADATA["urls"]["Source"]
    places = (f"{home}/blob/main/", home.replace("github.com", "raw.githubusercontent.com") + "/main/")
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert link.startswith("https://"), link
        for place in places:
            if link.startswith(place):
                assert (ROOT / link.removeprefix(place).partition("#")[0]).exists(), link


def test_every_reference_file_says_where_its_numbers_come_from():
    described = set(re.findall(r"^\| `(\w+\.json)` \|", (ROOT / "tests/refs/README.md").read_text(), re.MULTILINE))
    assert described == {path.name for path in (ROOT / "tests/refs").glob("*.json")}


def test_the_code_blocks_of_every_page_are_tests():
    patterns = ",".join(re.findall(r"patterns=\[(.*?)\]", (ROOT / "conftest.py").read_text()))
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md") if "```python" in page.read_text()]
    assert len(pages) > 10
    assert not [page for page in pages if not any(page.match(p.strip(' "')) for p in patterns.split(","))]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_between_files_of_the_project_lead_somewhere(page):
    """mkdocs checks those inside docs, the test above those of the README, which is read elsewhere too."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]


def test_one_version_and_one_licence_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {METADATA['version']}\n" in citation
    assert f"license: {METADATA['license']}\n" in citation
    assert anyorder.__version__ == METADATA["version"]


def test_every_extra_is_on_the_page_of_installing():
    described = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert set(described) == set(METADATA["optional-dependencies"])
