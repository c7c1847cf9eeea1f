"""What Windows lacks is asked for nowhere: engine, budget, training and verify load and work without it.

It stands in: on Linux, Python's Unix modules are blocked and the functions of `os` taken away; the lock is that of a
process that is alone. What locks there, `filelock` tests.
"""

import subprocess
import sys
import textwrap

GONE = """
import multiprocessing, os, subprocess, sys, tempfile
import matplotlib.figure, numpy, rich, sklearn.datasets, torch, torch.utils.data, typer
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in (
    "pread", "pwrite", "fork", "register_at_fork", "geteuid", "getuid", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY",
    "O_NOFOLLOW", "fchmod", "sched_getaffinity",
):
    if hasattr(os, name):
        delattr(os, name)
import filelock
filelock.lock_descriptor = lambda descriptor, *, blocking=True, poll_interval=0.05: True
filelock.unlock_descriptor = lambda descriptor: None
"""


def run(code, folder):
    code = textwrap.dedent(GONE) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_loads_and_works(tmp_path):
    """Release, ledger, budget, device and verify; then a training and its resume."""
    code = """
    from pathlib import Path
    import numpy as np, anyorder as ao
    from anyorder.accounting import Gaussian
    from anyorder.federated import DeviceRecord
    folder = Path(sys.argv[1])
    plan = ao.plan(dataset_size=6, batch_size=2, epochs=1, epsilon=4, delta=1e-5, mechanism="tree")
    def release():
        return ao.Release(plan, 3, checkpoint=folder / "run", ledger_on_disk=True)
    with release() as first:
        shown = [first.step([t, t + 3], np.ones(3)) for t in range(2)]
    with release() as again:
        assert all(np.array_equal(again.step([t, t + 3], np.ones(3)), shown[t]) for t in range(2))
        again.step([2, 5], np.ones(3))
        again.save()
        again.certificate().save(folder / "run.privacy.json")
        again.evidence().save(folder / "run.evidence.json")
    assert ao.verify(folder / "run.privacy.json", evidence=folder / "run.evidence.json").certificate.steps == 3
    ao.Budget(folder / "people.budget", 8.0, 1e-5).spend(plan)
    assert ao.Budget(folder / "people.budget").spend(Gaussian(0.1)).entries == 2
    DeviceRecord(folder / "device", (1, 2, 0.0)).take(0)
    assert not DeviceRecord(folder / "device", (1, 2, 0.0)).may(0)
    from anyorder.app.cli import run
    assert run(["verify", str(folder / "run.privacy.json")]) == 0
    assert run(["budget", str(folder / "people.budget"), "show"]) == 0
    from anyorder.app.job import Observer, Settings, resume, train
    class Stop(Observer):
        def stepped(self, step):
            if step > 2:
                raise KeyboardInterrupt
    folder = folder / "trained"
    settings = Settings.of("digits", epsilon=8.0, mechanism="tree", epochs=1, batch_size=480)
    try:
        train(settings, folder, observer=Stop())
    except KeyboardInterrupt:
        pass
    print(resume(folder).steps)
    """
    printed = run(code, tmp_path)
    assert "verified: this certificate claims" in printed
    assert int(printed.split()[-1]) > 2
