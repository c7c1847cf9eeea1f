"""Loopback alone, this page alone: what is refused, by its headers and by requests; and the process behind it."""

import asyncio
import http.client
import io
import json
import re
import socket
import time
from queue import Queue
from urllib.parse import urlsplit

import pytest

from anyorder.app.planner_page import child
from anyorder.app.planner_page.server import BODY_SECONDS, HEADER_SECONDS, MAX_BODY, Worker, document, policy, refusal

SIZES = {"dataset_size": 240, "batch_size": 20, "epochs": 2, "epsilon": 2.0, "delta": 1e-5, "order": "fixed"}


def request(address: str, method: str, path: str, body: object = None, **headers: str):
    """(status, headers, text)"""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    text = body if isinstance(body, bytes) or body is None else json.dumps(body)
    connection.request(method, path, text, named)
    reply = connection.getresponse()
    found = reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode()
    connection.close()
    return found


def ask(address: str, kind: str, question: object, **headers: str):
    status, got, text = request(
        address, "POST", f"/ask/{kind}", question, **{"content_type": "application/json", **headers}
    )
    return status, got, [json.loads(line) for line in text.splitlines()] if status == 200 else text


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"host": "127.0.0.1:80"}, 421),
        ("GET", {"host": "evil.example:8017"}, 421),
        ("GET", {"host": "127.0.0.1.evil.example:8017"}, 421),
        ("GET", {"host": "0.0.0.0:8017"}, 421),
        ("GET", {}, 421),
        ("GET", {"host": "localhost:8017", "origin": "https://evil.example"}, 403),
        ("GET", {"host": "localhost:8017", "origin": "null"}, 403),
        ("POST", {"host": "localhost:8017", "origin": "http://localhost:9999"}, 403),
        ("POST", {"host": "localhost:8017"}, 415),
        ("POST", {"host": "localhost:8017", "content-type": "text/plain"}, 415),
    ],
)  # fmt: skip
def test_requests_that_are_not_of_the_page_are_refused(method, headers, status):
    found = refusal(method, headers, 8017)
    assert found is not None
    assert found[0] == status


def test_requests_of_the_page_are_not():
    assert refusal("GET", {"host": "127.0.0.1:8017"}, 8017) is None
    own = {
        "host": "localhost:8017",
        "origin": "http://localhost:8017",
        "content-type": "application/json; charset=utf-8",
    }
    assert refusal("POST", own, 8017) is None
    assert refusal("GET", {"host": "localhost"}, 80) is None


def test_the_page_is_served_and_may_do_no_more_than_it_needs(address):
    status, headers, text = request(address, "GET", "/")
    assert status == 200
    assert text == document(None)
    rules = headers["content-security-policy"]
    assert rules == policy(text, connect=True)
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    assert not [name for name in headers if name.startswith("access-control")]
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)


def test_no_other_machine_can_ask(address):
    """Every address of 127.0.0.0/8 is this machine's: one that listens to all of its addresses would answer here."""
    place = urlsplit(address)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", place.port), timeout=5).close()


def test_no_other_site_may_frame_the_page_or_read_it_and_nothing_keeps_it(address):
    for status, headers, _ in (request(address, "GET", "/"), request(address, "GET", "/", host="evil.example"),
                               ask(address, "plan", {}), ask(address, "plan", b"{")):  # fmt: skip
        assert status in (200, 400, 421)
        rules = headers["content-security-policy"].split("; ")
        assert {"frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "connect-src 'self'"} <= set(rules)
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"  # an answer of another version would be shown
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == headers["cross-origin-opener-policy"] == "same-origin"
        assert not [name for name in headers if name.startswith("access-control")]


def test_other_hosts_origins_methods_and_bodies_are_refused(address):
    assert request(address, "GET", "/", host="evil.example")[0] == 421
    assert ask(address, "plan", SIZES, host="evil.example")[0] == 421
    status, headers, _ = ask(address, "plan", SIZES, origin="https://evil.example")
    assert status == 403
    assert not [name for name in headers if name.startswith("access-control")]
    assert request(address, "OPTIONS", "/ask/plan", origin="https://evil.example")[0] == 405
    assert request(address, "GET", "/ask/plan")[0] == 405
    assert request(address, "GET", "/static/page.html")[0] == 404
    assert request(address, "GET", "/../../etc/passwd")[0] == 404
    assert ask(address, "other", SIZES)[0] == 404
    assert ask(address, "plan", b"{")[0] == 400
    assert ask(address, "plan", b"[" * 10_000)[0] == 400
    assert ask(address, "plan", b" " * (MAX_BODY + 1))[0] == 413


def test_a_question_that_dawdles_is_ended(hurried):
    place = urlsplit(hurried)
    with socket.create_connection((place.hostname, place.port), timeout=60) as slow:
        head = f"POST /ask/plan HTTP/1.1\r\nHost: 127.0.0.1:{place.port}\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_process_that_cannot_be_started_is_an_answer(monkeypatch):
    async def none_left(*_, **__):
        raise OSError("no processes left")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none_left)

    async def asked():
        return [piece async for piece in Worker(5.0).ask({"kind": "plan", "asked": SIZES})]

    (piece,) = asyncio.run(asked())
    assert (piece["kind"], "OSError" in piece["message"]) == ("error", True)


def test_a_question_is_answered_in_lines(address):
    status, headers, (first, found, end) = ask(address, "plan", SIZES)
    assert first["rough"]
    assert not found.get("rough")
    assert (status, headers["content-type"], end) == (200, "application/x-ndjson", {"kind": "end"})
    assert [row["name"] for row in found["rows"] if row["best"]]
    (refused,) = ask(address, "plan", {**SIZES, "epsilon": -1})[2]
    assert (refused["kind"], refused["field"]) == ("error", "epsilon")
    cells = ask(address, "sweep", {"base": SIZES, "batch_sizes": [20, 40], "epoch_counts": [1], "mechanism": "tree"})[2]
    assert [piece["kind"] for piece in cells] == ["cell", "cell", "end"]


LONG = {"kind": "sweep", "asked": {"base": {**SIZES, "dataset_size": 60000, "order": "poisson"},
                                   "batch_sizes": [500, 600, 700, 800], "epoch_counts": [1, 2, 3]}}  # fmt: skip
SHORT = {"kind": "plan", "asked": SIZES}


def test_the_newest_question_is_answered_and_the_older_is_told():
    async def both():
        worker = Worker(120.0)
        older = asyncio.create_task(collect(worker, LONG))
        while worker._process is None:
            await asyncio.sleep(0.02)
        newer = await collect(worker, SHORT)
        await worker.close()
        return await older, newer

    older, newer = asyncio.run(both())
    assert older[-1] == {"kind": "superseded"}
    assert [piece["kind"] for piece in newer] == ["plan", "plan", "end"]


def test_a_question_that_takes_too_long_or_dies_is_ended_and_the_next_is_answered():
    async def all_three():
        worker = Worker(0.05)
        late = await collect(worker, LONG)
        worker.limit = 120.0
        dying = asyncio.create_task(collect(worker, LONG))
        while worker._process is None:
            await asyncio.sleep(0.02)
        worker._process.kill()
        died = await dying
        answered = await collect(worker, SHORT)
        await worker.close()
        assert worker._process is None
        return late, died, answered

    late, died, answered = asyncio.run(all_three())
    assert "longer than the 0.05 seconds" in late[-1]["message"]
    assert "lost" in died[-1]["message"]
    assert answered[-1] == {"kind": "end"}


def test_a_page_that_was_left_stops_its_question():
    async def left():
        worker = Worker(120.0)
        pieces = worker.ask(LONG)
        first = asyncio.create_task(anext(pieces))
        while worker._process is None:
            await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.wait([first])
        found = await collect(worker, SHORT)
        await worker.close()
        return found

    assert asyncio.run(left())[-1] == {"kind": "end"}


async def collect(worker: Worker, question: dict) -> list[dict]:
    return [piece async for piece in worker.ask(question)]


def test_the_process_takes_no_module_from_where_it_is_started(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise ImportError('of the folder')\n")
    monkeypatch.chdir(tmp_path)

    async def pieces() -> list[dict[str, object]]:
        worker = Worker(60)
        found = [piece async for piece in worker.ask({"kind": "plan", "asked": 3})]
        await worker.close()
        return found

    (piece,) = asyncio.run(pieces())
    assert "a question must be an object" in str(piece["message"])


def test_a_process_whose_page_is_gone_ends_in_the_middle_of_an_answer(monkeypatch):
    ended, lines = [], Queue()
    monkeypatch.setattr(child.sys, "stdin", io.StringIO("first\nstop\n"))
    monkeypatch.setattr(child.os, "_exit", ended.append)
    child._read(lines)
    assert [lines.get(timeout=1) for _ in range(3)] == ["first", "stop", None]
    assert ended == [0]


def test_nothing_of_an_older_answer_is_in_the_next_one():
    """The older has many pieces, which are quick: its process is kept, and what it had written already is not shown."""
    sizes = {"batch_sizes": list(range(20, 32)), "epoch_counts": list(range(1, 13)), "mechanism": "independent"}

    async def both():
        worker = Worker(120.0)
        await collect(worker, {"kind": "plan", "asked": 3})  # starts the process
        first = worker._process
        older = worker.ask({"kind": "sweep", "asked": {"base": SIZES, **sizes}})
        seen = [await anext(older)]
        newer = await collect(worker, SHORT)
        seen += [piece async for piece in older]
        kept = worker._process is first
        await worker.close()
        return seen, newer, kept

    older, newer, kept = asyncio.run(both())
    assert older[-1] == {"kind": "superseded"}
    assert len(older) < 144
    assert [piece["kind"] for piece in newer] == ["plan", "plan", "end"]
    assert kept


def test_a_fault_of_ours_is_named_by_its_kind_alone(monkeypatch):
    def broken(kind, asked):
        yield {"kind": "progress", "text": "so far"}
        raise KeyError("/home/me/secret")

    monkeypatch.setattr(child, "pieces", broken)
    first, last = child._guarded("plan", SIZES)
    assert first["kind"] == "progress"
    assert (last["kind"], last["field"]) == ("error", None)
    assert "failed (KeyError)" in last["message"]
    assert "secret" not in last["message"]


def test_headers_that_do_not_come_hold_the_page_for_seconds_alone(hurried):
    """40 connections that never ended their headers kept the page from everybody, for good."""
    place = urlsplit(hurried)
    held = [socket.create_connection((place.hostname, place.port)) for _ in range(40)]
    try:
        for one in held:
            one.sendall(b"GET / HTTP/1.1\r\nHost: ")
        began = time.monotonic()
        while request(hurried, "GET", "/")[0] != 200:
            assert time.monotonic() - began < 30
            time.sleep(0.05)
        for one in held:
            one.settimeout(30)
            assert one.recv(1) == b""
    finally:
        for one in held:
            one.close()


def test_nobody_is_waited_for_longer_than_seconds():
    assert 1 <= HEADER_SECONDS <= 10
    assert 1 <= BODY_SECONDS <= 10


def test_a_connection_may_ask_again_before_its_time(address):
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    for _ in range(3):
        connection.request("GET", "/")
        assert connection.getresponse().read().decode() == document(None)
        time.sleep(0.1)
    connection.close()
