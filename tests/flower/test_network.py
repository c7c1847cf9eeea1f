"""The example app on a real SuperLink and two SuperNodes, over TLS; each part is killed, and the run goes on."""

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import anyorder as ao
from anyorder.errors import CheckpointError
from anyorder.release.checkpoint import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
ROUNDS, PARTICIPATIONS = 2, 2
# Flower's programs look for messages each three seconds; here they look oftener.
IMPATIENT = "import time\n_sleep = time.sleep\ntime.sleep = lambda s: _sleep(0.1 if s == 3 else s)\n"
PATIENCE = 900.0  # seconds for any one thing, on a machine with much else to do


def certificates(folder):
    """A certificate of 127.0.0.1 and the authority that signed it, for a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def made(subject, public, issuer, signer, extension, critical):
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(serial_number=x509.random_serial_number())
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, word)]) for word in (subject, issuer)]
        builder = builder.subject_name(names[0]).issuer_name(names[1]).public_key(public)
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(extension, critical=critical)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    constraint = x509.BasicConstraints(ca=True, path_length=None)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / "ca.crt").write_bytes(made("ca", authority.public_key(), "ca", authority, constraint, True))
    (folder / "server.pem").write_bytes(made("server", own.public_key(), "ca", authority, names, False))
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(own.private_bytes(*encoding))


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


class Federation:
    """The processes of a federation, each in a group of its own, so that a kill takes what it started along."""

    def __init__(self, folder):
        self.folder, self.processes, self.runs = folder, {}, 0
        certificates(folder)
        self.port = free_port()
        self.ports = {"link": self.port}
        home = folder / "home"
        home.mkdir()
        (home / "sitecustomize.py").write_text(IMPATIENT)
        own, authority = f"127.0.0.1:{self.port}", folder / "ca.crt"
        lines = ["[superlink]", 'default = "here"', "[superlink.here]", f'address = "{own}"']
        (home / "config.toml").write_text("\n".join([*lines, f'root-certificates = "{authority}"', ""]))
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(home), str(Path(ao.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        self.tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def link(self):
        own = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        self.start("link", "flower-superlink", *self.tls, *own)
        self.wait(self.listens, "the SuperLink")

    def listens(self):
        with socket.socket() as own:
            return own.connect_ex(("127.0.0.1", self.port)) == 0

    def node(self, user):
        self.ports[user] = free_port()
        to = ["--root-certificates", "ca.crt", "--superlink", f"127.0.0.1:{self.port}", "--port", str(self.ports[user])]
        self.start(user, "flower-supernode", *self.tls, *to, "--node-config", f'user="{user}"')

    def run(self, **config):
        """`flwr run`; its stream is this run's log."""
        self.runs += 1
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        command = ["flwr", "run", str(EXAMPLE), "here", "--run-config", words, "--stream"]
        self.start(f"run{self.runs}", *command)

    def said(self, words):
        return words in (self.folder / f"run{self.runs}.log").read_text(errors="replace")

    def wait(self, condition, what):
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                logs = [
                    f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
                ]
                raise TimeoutError("\n".join([f"no sign of {what}", *logs]))
            time.sleep(0.5)  # a look costs more than it does to wait

    def kill(self, name):
        """SIGKILL to a part and to all that it started, which Flower puts into groups of their own."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while left := self.started_by(name):
            for number in left:
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)

    def started_by(self, name, program=b""):
        """Numbers of the living processes that talk to a part, which they are told by its port."""
        found, port = [], b"127.0.0.1:%d" % self.ports.get(name, 0)
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended meanwhile
                continue
            runtime = b"--runtime-api-address" in words and port in words
            if runtime and any(word.endswith(program) for word in words[:2]):
                found.append(int(folder.name))
        return found

    def kill_server_app(self):
        self.wait(lambda: self.started_by("link", b"flwr-serverapp"), "the ServerApp")
        while numbers := self.started_by("link", b"flwr-serverapp"):
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)

    def close(self):
        for name in list(self.processes):
            self.kill(name)


@pytest.fixture
def federation(tmp_path):
    made = Federation(tmp_path)
    try:
        yield made
    finally:
        made.close()


def ledger(config):
    """Who was in which round, of the checkpoint."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from federation.server_app import server_of
    finally:
        sys.path.remove(str(EXAMPLE))
    end = time.monotonic() + PATIENCE
    while True:
        try:
            server = server_of(config)
            break
        except CheckpointError as problem:  # a killed process gives its files back some moments after its end
            if "is locked" not in str(problem) or time.monotonic() > end:
                raise
            time.sleep(0.2)
    try:
        return [sorted(str(user) for user in users) for users in server.release.ledger.history()]
    finally:
        server.close()


def rounds_on_disk(folder):
    """How many rounds the checkpoint holds, read beside the server that writes it.

    The link's replies do not tell: one may be of a run that was killed.
    """
    path = folder / "run.checkpoint"
    return load(path)["ledger"]["steps"] if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ServerApp's process in /proc")
def test_a_federation_whose_parts_are_killed_goes_on(federation, tmp_path):
    # One is asked a round. For a node that was killed Flower answers with an error, and its round is of nobody.
    options = {"rounds": ROUNDS, "participations": PARTICIPATIONS, "report-goal": 1, "cohort": 1}
    # A round whose node was killed lasts until its time is up, where Flower does not answer for it.
    options |= {"timeout": 60.0, "output": str(tmp_path)}
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] | options
    federation.link()
    federation.node("ann")
    federation.node("bob")
    federation.run(**options)

    federation.wait(lambda: rounds_on_disk(tmp_path) >= 1, "the first round on the disk")
    federation.kill("bob")
    federation.kill_server_app()
    federation.kill("link")
    before = ledger(config)
    assert before
    federation.link()
    federation.kill("ann")  # a SuperLink with its state in memory does not know its nodes after a restart
    for user in ("ann", "bob"):  # both come back under another node's number
        federation.node(user)
    federation.run(**options)
    federation.wait((tmp_path / "model.pt").exists, "the end of the run")
    federation.close()

    rounds = ledger(config)
    assert len(rounds) == ROUNDS  # every round once: none was lost, none was made again
    assert rounds[: len(before)] == before
    joined = [user for users in rounds for user in users]
    assert all(len(users) <= 1 for users in rounds)
    assert joined
    assert set(joined) <= {"ann", "bob"}
    assert all(joined.count(user) <= PARTICIPATIONS for user in joined)
    ao.verify(tmp_path / "run.privacy.json")
