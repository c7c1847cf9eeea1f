"""Files of strangers: one line of refusal, whatever they hold, in bounded time and memory."""

import base64
import json
import os
import random
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import cache
from hashlib import sha256

import numpy as np
import pytest

import anyorder as ao
from anyorder import formats
from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import printable, quoted, read_json, save_json
from anyorder.ledger import replay
from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, PoissonSampling, SingleEpoch
from anyorder.plan.certificate import Evidence
from anyorder.plan.plan import FORMAT
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, Tree
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT
from plans import flat_plan

KEY = bytes(range(32))


def plan_of(participation, grid=None, **changes):
    given = {"participation": participation, "batch_size": 2, "sigma": 2.0, "delta": 1e-6, "mechanism": "tree"}
    return replace(flat_plan(**{**given, **changes}), grid=grid)


def described(plan, **changes):
    return {"format": FORMAT, "plan": {**plan.to_dict(), **changes}, "claims": plan.claims()}


def refused(path, *phrases):
    """With one short line, harmless on a terminal."""
    with pytest.raises(CertificateError) as caught:
        ao.verify(path)
    text = str(caught.value)
    assert text.isprintable(), ascii(text)
    assert len(text) < 800
    for phrase in phrases:
        assert phrase in text
    return text


# -- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": {"b\\u001b[2J": 1, "b\\u001b[2J": 2}}', "twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e400}', "double precision"),
        ('{"a": 0.' + "1" * 100 + "}", "double precision"),
        ('{"a": 1' + "0" * 400 + "}", "64 bits"),
        ('{"a": 9223372036854775808}', "64 bits"),
        ('{"a": -9223372036854775808}', "64 bits"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested"),
        ('{"a": ' * 10_000 + "1" + "}" * 10_000, "nested"),
        ("[1]", "object"),
        ("7", "object"),
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
        ('{"a": "\x1b"}', "not JSON"),
        ('{"a": "ü"}', "ASCII"),
        ("[" + "{}," * 100 + "{}]", "objects"),
        ('{"a": [' + "0," * (formats.MAX_VALUES + 1) + "0]}", "values"),
        (" " * (formats.MAX_BYTES + 1), "bytes"),
    ],
    ids=lambda value: value[:24],
)
def test_json_that_no_program_of_ours_wrote(text, phrase, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    refused(path, phrase)


def test_bounds_are_lifted_for_files_of_ones_own(tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"a": [' + "0," * formats.MAX_VALUES + "0]}")
    with pytest.raises(CertificateError, match="large=True"):
        read_json(path)
    assert len(read_json(path, large=True)["a"]) == formats.MAX_VALUES + 1


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "no regular file")
    refused("/dev/zero", "no regular file")
    refused(tmp_path, "cannot read")
    refused(tmp_path / "with\n\x1b[2Jmarks", "cannot read", "\\x1b")
    refused("zero\0byte", "cannot read")


def test_printable_and_quoted():
    assert printable("\x1b[2J\n\u202egood\ud800é") == "\\x1b[2J\\n\\u202egood\\ud800é"
    assert quoted("x" * 1000) == "'" + "x" * 59 + " .."
    assert quoted([1] * 1000) == "a list of 1000"
    assert quoted("\x1b\u202e") == "'\\x1b\\u202e'"


# -- words -----------------------------------------------------------------------------------------------------------

BAD_WORDS = [
    "user\n       privacy  epsilon <= 0.1", "user\x1b[1A", "a\u202eb", "a\u200bb", "שלום", "a\tb", "", " user", "user ",
    "[red]user[/red]", "x" * 41, "u\u0308ser", "a\x00", "\ud800", "user (of a phone)", 7, None,
]  # fmt: skip


@pytest.mark.parametrize("word", BAD_WORDS, ids=ascii)
def test_units_are_words(word, tmp_path):
    """What a card shows of a unit can neither forge its rows nor move a cursor."""
    with pytest.raises(ArgumentError, match="unit must be a word") as caught:
        plan_of(MinSeparation(4, 2), unit=word)
    assert str(caught.value).isprintable()
    save_json(tmp_path / "plan.json", described(plan_of(MinSeparation(4, 2)), unit=word))
    refused(tmp_path / "plan.json", "unit must be a word")


@pytest.mark.parametrize("word", ["user", "user-day", "Gerät", "пользователь", "用户", "user's phone 2", "row_id"])
def test_words_of_many_languages_are_units(word, tmp_path):
    plan_of(MinSeparation(4, 2), unit=word).save(tmp_path / "plan.json")
    assert ao.Plan.load(tmp_path / "plan.json").unit == word


# -- bombs -----------------------------------------------------------------------------------------------------------

BIG = 10**9


@cache
def bomb(size):
    """Zeros, a thousand times smaller than they are."""
    squeeze = zlib.compressobj(1)
    parts = [squeeze.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return base64.b64encode(b"".join([*parts, squeeze.flush()])).decode()


def asked(participation, strategy, **changes):
    """What a plan's description asks for, beside small settings: (the order), (the mechanism)."""
    order = participation if isinstance(participation, dict) else participation.to_dict()
    chosen = strategy if isinstance(strategy, dict) else strategy.to_dict()
    n = chosen.get("n", order.get("n"))
    work = {"kind": "momentum", "n": n, "momentum": 0.0, "learning_rates": None}
    return {"participation": order, "strategy": chosen, "workload": work, **changes}


def hostile():
    """Name -> what asks for more time or memory than a file is given."""
    n, small = 3000, Tree(4).to_dict()
    single, fixed, often = SingleEpoch(BIG).to_dict(), FixedOrder(n, n, 1), MinSeparation(n, 1, n // 2)
    known, falling = KnownOrder([[0]] * 4).to_dict(), np.tri(n, 700, -1)[::-1, ::-1].T.copy()
    bands = {"kind": "banded", "n": n, "p": 700, "bands": base64.b64encode((falling + 0.1 * (falling > 0)).tobytes())}
    every = list(range(1, n))
    crowd = KnownOrder([list(range(300))] * 1500)
    return {
        "steps": asked(MinSeparation(BIG, 1), {"kind": "independent", "n": BIG}),
        "epochs": asked({"kind": "epoch_shuffle", "k": BIG, "steps_per_epoch": BIG}, small),
        "tree": asked(single, {**small, "n": BIG}),
        "dense": asked(single, {"kind": "dense", "n": 100_000, "lower": ""}),
        "bands": asked(single, {"kind": "banded", "n": BIG, "p": BIG, "bands": ""}),
        "workload": asked(known, small, workload={"kind": "custom", "n": 100_000, "entries": None}),
        "rates": asked(known, small, workload={**asked(known, small)["workload"], "learning_rates": bomb(1 << 28)}),
        "order": asked({**known, "steps": "q:" + bomb(1 << 28)}, small),
        "ids": asked({**known, "units": "b:" + bomb(1 << 28)}, small),
        "buffers": asked(fixed, {"kind": "blt", "decays": [0.5] * n, "scales": [0.1] * n, "n": n}),
        "restarts": asked(often, {**Tree(n).to_dict(), "restarts": every, "completion": [True] * len(every)}),
        "pairs": asked(often, BLT([0.9, -0.5], [0.1, -0.1], n)),
        "banded": asked(often, {**bands, "bands": bands["bands"].decode()}),
        "rescaled": asked(often, Rescaled(BLT([0.9], [0.1], n), np.linspace(1, 2, n))),
        "shuffled": asked(EpochShuffle(1 << 17, 4), BLT([0.9], [0.1], 1 << 19)),
        "crowd": asked(crowd, BLT([0.9, -0.5], [0.1, -0.1], 1500)),
        "largest": asked(MinSeparation(1700, 1, 60), BLT([0.9, -0.5], [0.1, -0.1], 1700)),
        "sampled": {**asked(PoissonSampling(30, 1e-6), Independent(30)), "sigma": 0.05, "neighbours": "add-or-remove"},
        "nothing": asked(known, {"kind": "rescaled", "strategy": {"kind": "rescaled"}, "scales": [1.0]}),
    }


def ledger_bomb(folder):
    """The files of a run whose one step unpacks to a thousand times its size."""
    rule = PoissonSampling(1, 0.5)
    evidence = Evidence(plan_of(rule, mechanism="independent"), replay(rule, [[1]]), "f" * 32, KEY)
    evidence.certificate.save(folder / "c.json")
    evidence.save(folder / "e.json")
    chunk = b"1" + base64.b64decode(bomb(1 << 28))
    head = evidence.ledger.to_bytes()[: len(b"anyorder ledger 1\n") + 36] + len(chunk).to_bytes(4, "little") + chunk
    data = json.loads((folder / "e.json").read_text())
    data.pop("sha256")
    save_json(folder / "e.json", {**data, "ledger": base64.b64encode(head + sha256(head).digest()).decode()})
    return folder / "c.json", folder / "e.json"


MEASURED = """
import sys, time
import anyorder as ao
from anyorder.errors import CertificateError

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024

for line in sys.stdin.read().splitlines():
    path, *evidence = line.split("|")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins here
    before, begin, told = memory("VmRSS"), time.process_time(), "accepted"
    try:
        ao.verify(path, evidence=evidence[0] if evidence else None)
    except CertificateError as problem:
        told = str(problem)
    print(time.process_time() - begin, memory("VmHWM") - before, told, sep="|")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks of memory are measured on Linux")
def test_a_refusal_takes_two_seconds_and_200_mb_at_most(tmp_path):
    lines = []
    for name, changes in hostile().items():
        save_json(tmp_path / f"{name}.json", described(plan_of(KnownOrder([[0]] * 4)), **changes))
        lines.append(str(tmp_path / f"{name}.json"))
    (tmp_path / "floats.json").write_text('{"a": [' + "0.12345678901234567," * (formats.MAX_VALUES - 9) + "0]}")
    (tmp_path / "lists.json").write_text("[" * 400 + "[]," * (formats.MAX_VALUES // 2 - 300) + "[]" + "]" * 400)
    (tmp_path / "text.json").write_text('{"format": "\\ud83d\\ude00' + "x" * (formats.MAX_BYTES - 99) + '"}')
    (tmp_path / "huge.json").write_bytes(b"")
    os.truncate(tmp_path / "huge.json", 1 << 40)
    lines += [str(tmp_path / f"{name}.json") for name in ("floats", "lists", "text", "huge")]
    lines.append("|".join(map(str, ledger_bomb(tmp_path))))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], input="\n".join(lines), capture_output=True, text=True, check=False,
        timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = [line.split("|", 2) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(lines)
    for name, (seconds, megabytes, told) in zip(lines, outcomes, strict=True):
        print(f"{os.path.basename(name):14s} {float(seconds):.2f} s {float(megabytes):5.0f} MB  {told[:90]}")
    for name, (seconds, megabytes, told) in zip(lines, outcomes, strict=True):
        assert told != "accepted", name
        assert len(told) < 800
        assert told.isprintable()
        assert float(seconds) < 2, name
        assert float(megabytes) < 200, name


def test_large_lifts_the_bounds(tmp_path):
    """A run of many steps, whose claims take long: refused as a stranger's, read as one's own."""
    plan = plan_of(FixedOrder(3100, 4, 775), mechanism=Rescaled(BLT([0.9], [0.1], 3100), np.linspace(1, 2, 3100)))
    plan.save(tmp_path / "plan.json")
    refused(tmp_path / "plan.json", "large=True", "--large")
    assert (
        ao.verify(tmp_path / "plan.json", large=True).plan == plan == ao.Plan.load(tmp_path / "plan.json", large=True)
    )


# -- anything at all -------------------------------------------------------------------------------------------------


def mutants(data, rng):
    """The JSON value with one thing changed, somewhere."""
    places = []

    def walk(value):
        if isinstance(value, dict):
            places.extend((value, key) for key in value)
        if isinstance(value, list):
            places.extend((value, i) for i in range(len(value)))
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(part)

    walk(data)
    holder, key = rng.choice(places)
    old = holder[key]
    strange = [None, True, 0, -1, 1, 2**62, 1e308, -0.0, 5e-324, "", "1", "\x1b", [], {}, [old], {"a": old}, [0] * 9]
    near = [old + 1, old * 2, -old, float(old), str(old)] if isinstance(old, (int, float)) else []
    near += [old[:-1], old * 2, old.swapcase(), old[::-1], old[4:]] if isinstance(old, str) else []
    near += [old[1:], old * 2, old[::-1]] if isinstance(old, list) else []
    action = rng.random()
    if action < 0.1 and isinstance(holder, dict):
        del holder[key]
    elif action < 0.2 and isinstance(holder, dict):
        holder[str(rng.choice(["n", "kind", "x", "\n"]))] = rng.choice(strange)
    else:
        holder[key] = rng.choice(near + strange)
    return data


def parts():
    n = 8
    return [
        plan_of(MinSeparation(n, 2)),
        plan_of(FixedOrder(n, 4, 2), grid=2.0**-20),
        plan_of(KnownOrder([["a", "b"], ["b"], ["c"], [], ["a"], [], [], []]), mechanism=Dense(np.tri(n))),
        plan_of(EpochShuffle(2, 4), mechanism=BLT([0.9, 0.5], [0.1, 0.2], n), momentum=0.9),
        plan_of(EpochShuffle(2, 4), mechanism=RestartedBLT([[0.9]] * 2, [[0.1]] * 2, [0.1] * 2, [1.0] * 2, n, 4)),
        plan_of(MinSeparation(n, 2), mechanism=Rescaled(Banded(np.tri(n)), np.linspace(1, 2, n))),
        plan_of(SingleEpoch(n), mechanism=BandedInverse([1.0, -0.5], n), learning_rates=np.linspace(1, 0.1, n)),
        plan_of(PoissonSampling(n, 0.5), mechanism="independent"),
    ]


@pytest.mark.parametrize("number", range(8))
def test_whatever_a_file_holds_only_one_error_comes_out(number, tmp_path):
    """Sealed anew, so that what is read is looked at."""
    rng, plan = random.Random(number), parts()[number]
    history = [[], [3, 4]] if number != 2 else [["a"], ["b"]]
    evidence = Evidence(plan, replay(plan.participation, history), "f" * 32, KEY)
    evidence.certificate.save(tmp_path / "c.json")
    evidence.save(tmp_path / "e.json")
    good = {name: json.loads((tmp_path / name).read_text()) for name in ("c.json", "e.json")}
    assert ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json").evidence is not None
    told = []
    for i in range(6 if plan.amplified else 60):  # a Poisson accountant takes its time
        name = ("c.json", "e.json")[i % 3 == 0]
        data = json.loads(json.dumps(good[name]))
        data.pop("sha256")
        for _ in range(rng.choice([1, 1, 2, 5])):
            data = mutants(data, rng) if data else data
        save_json(tmp_path / name, data)
        try:
            ao.verify(tmp_path / "c.json", evidence=tmp_path / "e.json")
        except CertificateError as problem:
            told.append(str(problem))
        save_json(tmp_path / name, {key: value for key, value in good[name].items() if key != "sha256"})
    assert len(told) > 0.6 * i
    assert all(text.isprintable() and len(text) < 800 for text in told), told


def test_bytes_at_random_are_refused(tmp_path):
    rng, path = random.Random(0), tmp_path / "plan.json"
    plan_of(MinSeparation(4, 2)).save(path)
    good = path.read_bytes()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        if path.read_bytes() != good:
            try:
                ao.Plan.load(path)
            except CertificateError:
                continue
            assert json.loads(path.read_text()) == json.loads(good)  # a blank more or less
