"""Processes on this machine that help the first one, joined in a torch.distributed group on the loopback."""

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anyorder.errors import AnyorderError, TrainingError

__all__ = ["helpers"]

_PATIENCE = timedelta(minutes=30)


@contextmanager
def helpers(processes: int, work: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """A group of so many processes, of which this is the first; each of the others calls `work(*arguments)` in it.

    With one process nothing is started. At the end they are given a while to leave, and are then stopped.

    Args:
        work: a function of a module, and arguments that can be pickled.
    """
    if processes == 1:
        yield
        return
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as room, _on_loopback():
        store = str(Path(room) / "store")
        others = [
            spawn.Process(target=_begin, args=(store, rank, processes, work, arguments), daemon=True)
            for rank in range(1, processes)
        ]
        for one in others:
            one.start()
        try:
            _join(store, 0, processes, others)
            yield
            for one in others:
                one.join(30)
        finally:
            for one in others:
                one.terminate()
                one.join()
            if dist.is_initialized():
                dist.destroy_process_group()


def _begin(store: str, rank: int, processes: int, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """A helper's life. Errors of the package are told to the first process, which says them; it may be gone itself."""
    torch.set_num_threads(1)
    try:
        _join(store, rank, processes, [])
        work(*arguments)
    except (AnyorderError, KeyboardInterrupt):
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort the interpreter's own end (pytorch/pytorch, issue 190489)


def _join(path: str, rank: int, processes: int, others: Sequence[BaseProcess]) -> None:
    """Meet the others; the first process notices one that ends before it came."""
    store = dist.FileStore(path, processes)  # type: ignore[attr-defined]
    store.set(f"came {rank}", "")
    while others and not store.check([f"came {one}" for one in range(processes)]):
        if not all(one.is_alive() for one in others):
            raise TrainingError("a helping process ended before the simulation began; what it printed says why")
        time.sleep(0.02)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=_PATIENCE)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Gloo speaks without encryption or passwords: on the loopback alone, unless somebody chose another interface."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    loop = next((each for _, each in socket.if_nameindex() if each.startswith("lo")), None)
    if before is None and loop is not None:
        os.environ[name] = loop
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
