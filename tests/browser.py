"""For tests that look at pages: the system's Chromium without a window, and a folder served on this machine alone.

Nothing is downloaded. Without a browser such tests are skipped; with ANYORDER_NEEDS_BROWSER=1 they fail.
"""

import contextlib
import functools
import http.server
import os
import shutil
import threading

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _missing(what):
    reason = f"needs {what}: `apt-get install chromium` and `pip install playwright`"
    if os.environ.get("ANYORDER_NEEDS_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def chromium():
    """A browser that reaches no host but this machine: another one's name leads nowhere."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright")
    where = os.environ.get("ANYORDER_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if where is None:
        _missing("Chromium")
    quiet = ["--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=where, args=quiet)
        yield browser
        browser.close()


@contextlib.contextmanager
def served(folder):
    """The folder's address, as in http://127.0.0.1:8123/."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def end_headers(self):
            self.send_header("Cache-Control", "max-age=600")  # what pages share is read once
            super().end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


# What reaches beyond the window, and does not lie in a box that scrolls by itself.
OVERFLOW = """() => {
  const root = document.scrollingElement, width = root.clientWidth, found = [];
  if (root.scrollWidth > width) found.push(`the page is ${root.scrollWidth} wide`);
  const scrolls = e => e !== document.body && e !== root && /auto|scroll/.test(getComputedStyle(e).overflowX);
  const inside = new Map([[document.body, false]]);
  const held = e => {
    if (e === null) return false;
    if (!inside.has(e)) inside.set(e, scrolls(e) || held(e.parentElement));
    return inside.get(e);
  };
  for (const e of (document.querySelector("article") || document.body).querySelectorAll("*")) {
    const box = e.getBoundingClientRect();
    if (box.width <= 1 || held(e)) continue;
    const out = box.right > width + 1 || box.left < -1;
    const cut = e.scrollWidth > e.clientWidth + 1 && /hidden|clip/.test(getComputedStyle(e).overflowX);
    if (out || cut) found.push(`<${e.localName}> is ${out ? "beyond the edge" : "cut"}: ${e.textContent.slice(0, 60)}`);
  }
  return found.slice(0, 5);
}"""

PICTURES = "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => `no picture: ${i.src}`)"


class Watched:
    """A page of the browser that remembers each error, and each request to another host."""

    def __init__(self, browser, **context):
        self.page = browser.new_page(**context)
        self.faults = []
        self.page.on("console", lambda said: said.type == "error" and self.faults.append(f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.on("request", self._asked)

    def _asked(self, request):
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            self.faults.append(f"another host: {request.url}")

    def faults_of(self, address, widths=(1280, 400)):
        """Open it and say all that is wrong at these widths."""
        self.faults.clear()
        self.page.set_viewport_size({"width": widths[0], "height": 900})
        answer = self.page.goto(address)
        if answer is None or not answer.ok:
            self.faults.append(f"{address} does not open")
        for width in widths:
            self.page.set_viewport_size({"width": width, "height": 900})
            self.faults += [f"at {width} pixels: {fault}" for fault in self.page.evaluate(OVERFLOW)]
        return [*self.faults, *self.page.evaluate(PICTURES)]
