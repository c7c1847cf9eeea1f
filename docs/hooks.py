"""Hooks of the site: the version in the footer, and a page at each address that has moved."""

import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.utils import get_relative_url

MOVED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>This page has moved</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={link}"></head>
<body><p>This page has moved to <a href="{link}">{link}</a>.</p></body></html>
"""


def on_config(config: Any) -> None:
    """Take version and licence from the package's metadata."""
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text())["project"]
    config.copyright = f"anyorder {project['version']} · {project['license']}"


def on_post_build(config: Any) -> None:
    """Write a page for each old address of `extra.redirects` in mkdocs.yml."""
    for old, new in config.extra["redirects"].items():
        page, _, place = new.partition("#")
        moved = Path(config.site_dir, address(old), "index.html")
        if moved.exists() or not Path(config.site_dir, address(page), "index.html").exists():
            raise PluginError(f"mkdocs.yml redirects {old}, which is still a page, or to {page}, which is none")
        moved.parent.mkdir(parents=True, exist_ok=True)
        link = get_relative_url(address(page) or ".", address(old)) + (f"#{place}" if place else "")
        moved.write_text(MOVED.format(link=link), encoding="utf-8")


def address(page: str) -> str:
    """`api/plan.md` is shown at api/plan/, and `api/index.md` at api/."""
    return "" if page == "index.md" else page.removesuffix(".md").removesuffix("/index") + "/"
