"""What stands under every file that must outlast a crash: many writers of one file leave one of their values, whole."""

import threading

import pytest

from anyorder import durable


def test_writers_that_meet_take_no_file_of_each_other_away(tmp_path):
    target, problems = tmp_path / "value", []

    def write(number):
        try:
            for _ in range(150):
                durable.replace(target, bytes([number]) * 100)
        except OSError as problem:
            problems.append(problem)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert problems == []
    found = target.read_bytes()
    assert found in {bytes([number]) * 100 for number in range(4)}
    assert [path.name for path in tmp_path.iterdir()] == ["value"]


def test_a_file_that_was_taken_for_a_rest_before_its_lock_is_made_again(tmp_path, monkeypatch):
    real, taken = durable.lock, []

    def lock(descriptor, **how):
        if not taken:
            taken.extend(tmp_path.glob(".value.*.tmp"))
            taken[0].unlink()  # another writer was faster
        return real(descriptor, **how)

    monkeypatch.setattr(durable, "lock", lock)
    durable.replace(tmp_path / "value", b"whole")
    assert (tmp_path / "value").read_bytes() == b"whole"
    assert len(taken) == 1


def test_what_a_killed_writer_left_goes_with_the_next_value(tmp_path):
    (tmp_path / ".value.00c0ffee.tmp").write_bytes(b"half")
    with pytest.raises(KeyError), durable.replacing(tmp_path / "value"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
