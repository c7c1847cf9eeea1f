"""Python programs in processes of their own, without the two seconds in which each of them would import torch.

They are forked from a server that has imported what they need, and has done nothing else. It is for programs that are
killed, that hold a file, or whose output counts. What is imported when, and by whom, needs a process from nothing:
those tests start one by `subprocess`.

    done = run("-m", "anyorder", "verify", path, cwd=folder)      # a subprocess.CompletedProcess
    program = start("-c", CODE, folder)                           # goes on; kill(), printed(), wait()
"""

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

# The first optimizer of a process imports torch._dynamo, which takes as long as torch.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "scipy.stats", "sklearn.datasets", "matplotlib.figure", "rich.console", "typer",
     "anyorder.app.cli", "anyorder.training.engine", "anyorder.online", "anyorder.app", "anyorder.federated"]
)  # fmt: skip


def start(*command, cwd=None, env=None):
    """`python *command`, which goes on meanwhile."""
    return Program([os.fspath(part) for part in command], cwd, env)


def run(*command, cwd=None, env=None, timeout=240.0):
    """`python *command` to its end."""
    return start(*command, cwd=cwd, env=env).wait(timeout)


def run_on_two_ranks(*command, env=None):
    """`python *command` as rank 0 and as rank 1 of two, as torchrun starts them; what both printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {**(os.environ if env is None else env), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    about |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [start(*command, env={**about, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    first, second = (rank.wait() for rank in ranks)
    code = first.returncode or second.returncode
    return subprocess.CompletedProcess(command, code, first.stdout + second.stdout, first.stderr + second.stderr)


class Program:
    def __init__(self, command, cwd, env):
        self.command, self._folder = command, tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for file in self._files:
            file.touch()
        about = command, os.fspath(cwd or Path.cwd()), dict(os.environ if env is None else env), self._files
        self.process = _context.Process(target=_program, args=about, daemon=True)
        self.process.start()

    def printed(self):
        """What it wrote to stdout so far."""
        return self._files[0].read_text()

    def wait_for(self, text, timeout=120.0):
        """Until it has printed that, or has ended."""
        end = time.monotonic() + timeout
        while text not in self.printed() and self.is_alive():
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"{self.command} has not printed {text!r}")
            time.sleep(0.005)

    def is_alive(self):
        return self.process.is_alive()

    def kill(self):
        """kill -9, at once."""
        self.process.kill()

    def wait(self, timeout=240.0):
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            raise TimeoutError(f"{self.command} has not ended in {timeout} s")
        outputs = [file.read_text() for file in self._files]
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.command, self.process.exitcode, *outputs)


def _program(command, cwd, env, files):
    """In the new process: what the interpreter does with its arguments."""
    for descriptor, path in enumerate(files, start=1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    while command[0] == "-W":
        warnings.simplefilter(command[1])
        command = command[2:]
    match command:
        case ["-c", code, *rest]:
            sys.argv, sys.modules["__main__"] = ["-c", *rest], types.ModuleType("__main__")
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path.insert(0, cwd)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [file, *rest]:
            sys.argv = [file, *rest]
            sys.path.insert(0, str(Path(file).parent))
            with contextlib.suppress(KeyError):
                del sys.modules["__main__"]
            runpy.run_path(file, run_name="__main__")
