"""`anyorder check` without the seconds in which the command and the script under it each import torch and Opacus.

    done = run("-m", "anyorder", "check", "train.py", cwd=folder)      # a subprocess.CompletedProcess
    subprocess.run(["bash", "-c", "python -m anyorder check train.py"], env=environment(tmp_path))

One process imports both, and does nothing else; it is forked for each command, and that one for the script.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Client, Listener
from pathlib import Path

import processes

_folder = tempfile.TemporaryDirectory()


def run(*command, cwd, address=None):
    """`python *command` to its end."""
    with tempfile.TemporaryDirectory() as folder, Client(address or _server(), "AF_UNIX") as server:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        server.send(([os.fspath(part) for part in command], os.fspath(cwd), dict(os.environ), files))
        code = server.recv()
        return subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))


def environment(folder):
    """In which a shell's `python` is `run`; a file of that name is made in the folder."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from audit import checked; checked.main()"
    )
    words = [sys.executable, "-c", code, _server()]
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    (folder / "python").chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def main():
    """`run` for a shell."""
    address, *command = sys.argv[1:]
    done = run(*command, cwd=Path.cwd(), address=address)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)


@functools.cache
def _server():
    """The address of a process that serves to the end of this one."""
    address = os.path.join(_folder.name, "server")
    process = multiprocessing.get_context("forkserver").Process(target=_serve, args=(address,), daemon=True)
    process.start()
    while not os.path.exists(address):
        assert process.is_alive()
        time.sleep(0.01)
    return address


def _serve(address):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("opacus", "anyorder.app.script_runner", "anyorder.training.engine"):
            importlib.import_module(name)
    with Listener(address, "AF_UNIX") as listener:
        while True:
            with listener.accept() as client, contextlib.suppress(EOFError):
                client.send(_forked(_command, *client.recv()))


def _command(*about):
    def ran(line, stdout, check):
        return subprocess.CompletedProcess(line, _forked(_script, line[1:], 1 if stdout is None else stdout.fileno()))

    subprocess.run = ran
    processes._program(*about)


def _script(line, stdout):
    os.dup2(stdout, 1)
    sys.modules.pop("anyorder.app.script_runner")  # `python -m` runs it under the name of the main module alone
    processes._program(line, os.getcwd(), dict(os.environ), [])


def _forked(call, *arguments):
    """The exit code of a call in a process of its own."""
    if number := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    try:
        call(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
