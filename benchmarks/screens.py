"""Pictures of the pages: the problem in one figure, and what the site looks like in a browser.

`python -m benchmarks.screens problem` makes docs/problem.png, of numbers that `ao.check` computes;
`python -m benchmarks.screens site` makes screens/*.png, of the site as it is now (needs Chromium, playwright).
`python -m benchmarks.screens planner` makes docs/screens/planner.png, of `anyorder planner`;
`python -m benchmarks.screens report` makes docs/screens/report.png, of a run on digits.
"""

import argparse
import functools
import http.server
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao

DOCS = Path(__file__).parents[1] / "docs"
DPI = 130
PRINTED, HOLDS, SHOWN = "#9aa4b2", "#b3470a", "#24405f"

EXAMPLES, BATCH, SIGMA, EPOCHS, DELTA = 2000, 100, 1.0, 3, 1e-5


def problem() -> Any:
    """What `ao.check` finds for a shuffled loader, and the figure of it."""
    from matplotlib.figure import Figure

    loader = DataLoader(TensorDataset(torch.zeros(EXAMPLES, 1)), batch_size=BATCH, shuffle=True)
    seen = ao.check(loader, noise_multiplier=SIGMA, epochs=EPOCHS, delta=DELTA)
    figure = Figure(figsize=(8, 1.9), layout="constrained")
    bars = figure.add_subplot()
    for place, epsilon, colour in ((1, seen.claimed, PRINTED), (0, seen.true, HOLDS)):
        bars.barh(place, epsilon, 0.7, color=colour)
        bars.text(epsilon + 0.12, place, f"{epsilon:.2f}", va="center", fontsize=12, weight="bold")
    bars.vlines(seen.at_least, -0.45, 0.45, color=SHOWN, linewidth=2.5)
    bars.text(seen.at_least - 0.1, 0, "an attack shows at least this", va="center", ha="right", color="white")
    bars.set(yticks=[0, 1], xlim=(0, 10), xlabel=f"epsilon at delta {DELTA:g}")
    bars.set_yticklabels(["valid", "reported by a\nPoisson accountant"], fontsize=11)
    run = f"shuffle=True, {EPOCHS} epochs, batches of {BATCH / EXAMPLES:.0%} of the data, noise multiplier {SIGMA:g}"
    bars.set_title(run, fontsize=10, loc="left")
    bars.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(DOCS / "problem.png", dpi=DPI)
    return seen


SCREENS = {  # file: page, width, height, colours
    "start.png": ("", 1280, 860, "light"),
    "start_dark.png": ("", 1280, 860, "dark"),
    "start_phone.png": ("", 400, 860, "light"),
    "tutorial.png": ("certificates/", 1280, 860, "light"),
}


def site() -> list[Path]:
    """Build the pages, look at some of them in Chromium, and keep what is seen."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
        subprocess.run(command, cwd=DOCS.parent, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
        handler = functools.partial(_Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as driver:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            address = f"http://127.0.0.1:{server.server_port}/"
            made = [_screen(browser, address, name, *how) for name, how in SCREENS.items()]
            browser.close()
            server.shutdown()
    return made


def planner() -> Path:
    """The page of `anyorder planner`, once all its numbers are there."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "anyorder", "planner", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        assert server.stdout is not None
        address = re.findall(r"http://\S+", server.stdout.readline())[0]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        sheet = browser.new_page(viewport={"width": 1280, "height": 1180})
        sheet.goto(address)
        sheet.locator("tr.reference").wait_for(timeout=120_000)
        made = _kept(sheet.screenshot(), "planner.png")
        browser.close()
        server.terminate()
    return made


def report() -> Path:
    """The report that `anyorder train` leaves in its folder."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        run = Path(folder) / "run"
        train = [sys.executable, "-m", "anyorder", "train", "--dataset", "digits", "--epsilon", "8"]
        subprocess.run([*train, "--output", str(run)], check=True, stdout=subprocess.DEVNULL)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        sheet = browser.new_page(viewport={"width": 1000, "height": 940})
        sheet.goto((run / "report.html").as_uri())
        made = _kept(sheet.screenshot(), "report.png")
        browser.close()
    return made


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def _screen(browser: Any, address: str, name: str, page: str, width: int, height: int, scheme: str) -> Path:
    sheet = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    sheet.goto(address + page)
    sheet.wait_for_timeout(300)
    made = _kept(sheet.screenshot(), name, Path("screens"))
    sheet.close()
    return made


def _kept(picture: bytes, name: str, folder: Path = DOCS / "screens") -> Path:
    """A picture of 128 colours: text needs no more, and a page shows it at once."""
    from PIL import Image

    seen = Image.open(io.BytesIO(picture)).convert("RGB")
    folder.mkdir(exist_ok=True)
    seen.quantize(128).save(folder / name, optimize=True)
    return folder / name


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("problem", "site", "planner", "report"))
    part = parser.parse_args().part
    if part != "problem":
        made = {"site": site, "planner": lambda: [planner()], "report": lambda: [report()]}[part]()
        for path in made:
            print(f"{path.name:<20} {path.stat().st_size / 1000:.0f} kB")
        return
    seen = problem()
    print(f"reported {seen.claimed:.3f}, true {seen.true:.3f}, attacked {seen.at_least:.3f}")


if __name__ == "__main__":
    main()
