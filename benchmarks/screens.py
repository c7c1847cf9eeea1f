"""Pictures of the pages: the problem in one figure, and what the site looks like in a browser.

`python -m benchmarks.screens problem` makes docs/problem.png, of numbers that `ao.check` computes;
`python -m benchmarks.screens site` makes docs/screens/*.png, of the site as it is now (needs Chromium, playwright).
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

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao

DOCS = Path(__file__).parents[1] / "docs"
DPI = 130
PRINTED, HOLDS, SHOWN = "#9aa4b2", "#b3470a", "#24405f"

EXAMPLES, BATCH, SIGMA, EPOCHS, DELTA = 2000, 100, 1.0, 3, 1e-5


def problem() -> list[tuple[str, Any]]:
    """What `ao.check` finds for three loaders of one data set, and the figure of it."""
    from matplotlib.figure import Figure

    dataset = TensorDataset(torch.zeros(EXAMPLES, 1))
    source = ao.noise.NoiseSource.random()
    coins = ao.sampling.samplers.PoissonBatchSampler(EXAMPLES, BATCH / EXAMPLES, EXAMPLES // BATCH, source)
    loaders: dict[str, DataLoader[Any]] = {
        "secret coins for each\nexample and step": DataLoader(dataset, batch_sampler=coins),
        "shuffle=True": DataLoader(dataset, batch_size=BATCH, shuffle=True),
        "front to back": DataLoader(dataset, batch_size=BATCH),
    }
    found = [
        (name, ao.check(loader, noise_multiplier=SIGMA, epochs=EPOCHS, delta=DELTA)) for name, loader in loaders.items()
    ]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    grid = figure.add_gridspec(len(found), 2, width_ratios=(1, 2.6))
    bars = figure.add_subplot(grid[:, 1])
    for row, ((name, seen), order) in enumerate(zip(found, orders(), strict=True)):
        axes = figure.add_subplot(grid[row, 0])
        axes.imshow(order, cmap="Greys", vmax=1.3, aspect="auto", interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
        if row == len(found) - 1:
            axes.set_xlabel("steps of two epochs →", fontsize=9)
        if row == 0:
            axes.set_title("who is in which step", fontsize=10, loc="left")
        place = len(found) - 1 - row
        bars.barh(place + 0.2, seen.claimed, 0.36, color=PRINTED, label="a Poisson accountant prints")
        bars.barh(place - 0.2, seen.true, 0.36, color=HOLDS, label="what holds: anyorder prints this")
        bars.text(seen.claimed + 0.12, place + 0.2, f"{seen.claimed:.2f}", va="center", fontsize=11)
        bars.text(seen.true + 0.12, place - 0.2, f"{seen.true:.2f}", va="center", fontsize=11, weight="bold")
        if seen.true > seen.claimed:
            least = {"ymin": place - 0.42, "ymax": place + 0.02, "color": SHOWN, "linewidth": 2.5}
            bars.vlines(seen.at_least, **least, label="an attack shows: no less than this")
    drawn = dict(zip(*reversed(bars.get_legend_handles_labels()), strict=True))
    named = sorted(drawn, key=len)
    bars.legend(
        [drawn[name] for name in named],
        named,
        frameon=False,
        fontsize=9,
        loc="upper right",
        bbox_to_anchor=(1.05, 1.02),
    )
    bars.set(yticks=[], xlim=(0, 10), xlabel=f"epsilon at delta {DELTA:g}")
    title = f"{EPOCHS} epochs, batches of {BATCH / EXAMPLES:.0%}, noise multiplier {SIGMA:g}"
    bars.set_title(title, fontsize=10, loc="left")
    bars.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(DOCS / "problem.png", dpi=DPI)
    return found


def orders(examples: int = 24, batch: int = 3) -> list[np.ndarray]:
    """(examples, steps) of 0 and 1, small ones to be drawn, in the order of the loaders of the figure."""
    draw, steps = np.random.default_rng(1), 2 * examples // batch
    shuffled, read = np.zeros((examples, steps)), np.zeros((examples, steps))
    for step in range(steps):
        if step * batch % examples == 0:
            order = draw.permutation(examples)
        at = step * batch % examples
        shuffled[order[at : at + batch], step] = 1
        read[at : at + batch, step] = 1
    return [(draw.random((examples, steps)) < batch / examples).astype(float), shuffled, read]


SCREENS = {  # file: page, width, height, colours
    "start.png": ("", 1280, 860, "light"),
    "start_dark.png": ("", 1280, 860, "dark"),
    "start_phone.png": ("", 400, 860, "light"),
    "tutorial.png": ("tutorials/certificate/", 1280, 860, "light"),
}


def site() -> list[Path]:
    """Build the pages, look at some of them in Chromium, and keep what is seen."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
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
    made = _kept(sheet.screenshot(), name)
    sheet.close()
    return made


def _kept(picture: bytes, name: str) -> Path:
    """A picture of 128 colours: text needs no more, and a page shows it at once."""
    from PIL import Image

    seen = Image.open(io.BytesIO(picture)).convert("RGB")
    (DOCS / "screens").mkdir(exist_ok=True)
    seen.quantize(128).save(DOCS / "screens" / name, optimize=True)
    return DOCS / "screens" / name


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
    print(f"{'loader':<42}{'printed':>9}{'holds':>9}{'attacked':>10}")
    for name, seen in problem():
        print(f"{' '.join(name.split()):<42}{seen.claimed:>9.3f}{seen.true:>9.3f}{seen.at_least:>10.3f}")


if __name__ == "__main__":
    main()
