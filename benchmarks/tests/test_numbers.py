"""The checker of numbers: the guides as they are, and each kind of fault."""

import json

from benchmarks import adaptive, again, bins, numbers

PAGE = "docs/mnist_guide.md"


def test_each_number_of_the_guides_has_its_source():
    assert numbers.faults(numbers.texts(), numbers.entries()) == []
    assert numbers.unsound() == []


def told(text, *known):
    return numbers.faults({PAGE: text}, [{"page": PAGE, **one} for one in known])


def test_a_number_without_a_source_or_of_another_place_is_found():
    given = {"numbers": ["96.2"], "near": "Trees", "given": "why"}
    assert told("On MNIST trees have 96.2 %.", given) == []
    assert (
        told("Elsewhere first.\n\nNow, trees, moved and said anew: 96.2 % of images.", given) == []
    )  # a page rewritten
    assert "no source for 96.3" in told("On MNIST trees have 96.3 %.", given)[0]
    assert "no longer has 96.2" in told("On MNIST trees have 96.3 %.", given)[1]
    assert "no source for 96.2" in told("On MNIST bands have 96.2 %.", given)[0]
    assert "no source for 12" in told("It takes 12 ms.")[0]
    assert "no source for 12" in told("```text\nepsilon 3, 12 seconds\n```")[0]  # a block that nothing runs
    assert told("It has 8.39, as `3.5` and [here](x.md#1.5).\n\n```python\nassert f() == 8.385\n```") == []
    assert "8.41" in told("It has 8.41.\n\n```python\nassert f() == 8.385\n```")[0]


def test_a_source_with_other_numbers_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("| trees | 96.16 ± 0.16 (lr 0.1) |\n| bands | 0.9641 |\n")
    one = {"page": PAGE, "numbers": ["96.2"]}
    source = {"written": "page.md", "at": "| trees"}
    assert list(numbers.stale({**one, **source})) == []
    assert list(numbers.stale({**one, "numbers": ["96.4"], "written": "page.md"})) == []  # a share, in percent
    assert "96.4 not in page.md" in next(numbers.stale({**one, **source, "numbers": ["96.4"]}))
    assert "needs one source" in next(numbers.stale(one))
    assert "needs one source" in next(numbers.stale({**one, **source, "given": "why"}))


def test_what_a_command_printed_is_kept_with_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "PRINTED", tmp_path / "printed.jsonl")
    one = {"page": PAGE, "numbers": ["3.7"], "command": "echo 3.66"}
    assert "nothing is kept of echo 3.66" in next(numbers.stale(one))
    row = numbers.keep("echo 3.66")
    assert row["processor"]
    assert row["date"]
    assert row["output"] == "3.66\n"
    assert list(numbers.stale(one)) == []
    assert next(numbers.stale({**one, "numbers": ["3.8"]}))
    text = numbers.PRINTED.read_text()
    numbers.PRINTED.write_text(text.replace("3.66\\n", "3.80\\n"))
    assert any("is not what it printed" in fault for fault in numbers.unsound())


def test_another_results_file_is_told(monkeypatch):
    monkeypatch.setattr(numbers, "digest", lambda content: "0")
    assert any("mnist.jsonl: is another file" in fault for fault in numbers.unsound())


def test_the_tables_of_a_page_are_those_of_its_results_file():
    page = bins.PAGE.read_text(encoding="utf-8")
    for lines in bins.tables().values():
        assert "\n".join(lines) in page
    assert adaptive.table() in adaptive.PAGE.read_text(encoding="utf-8")


def test_entries_without_a_number_on_their_page_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "TABLE", tmp_path / "numbers.toml")
    entry = '[[line]]\npage = "p.md"\nnumbers = ["1.5", "2.5"]\ngiven = "a setting"\n'
    numbers.TABLE.write_text("# first\n\n" + entry + "\n" + entry.replace("p.md", "q.md"))
    numbers.prune({"p.md": "Only 2.5.", "q.md": "None."}, numbers.entries())
    assert numbers.TABLE.read_text() == "# first\n\n" + entry.replace('"1.5", ', "") + "\n"


def test_what_moved_is_told():
    assert again.moved([1.0, "a"], [1.0 + 1e-12, "a"]) is None
    assert again.moved({"x": [1.0]}, {"x": [1.1]}) == "x[0]: 1.0 -> 1.1"
    assert again.moved([1.0], [1.0, 2.0]) == "1 numbers -> 2"
    assert again.moved("a", "b") == "'a' -> 'b'"
    assert again.chosen(list(range(40)), 0.1, 3) == again.chosen(list(range(40)), 0.1, 3)
    assert len(again.chosen(list(range(40)), 0.1, 3)) == 4


def test_records_of_both_kinds_are_made_again_and_what_moved_is_told(tmp_path, monkeypatch):
    """A tenth of what is cheap, without the hours of the rest; a number of a clock may be three times another."""
    lines = again.records(5.0)
    told = again.listed(again.cheap(5.0), lines) + again.whole()
    assert any("kairouz2021 thm4_1" in line for line in told)
    assert any("mnist.jsonl: as a whole, by python -m benchmarks.train" in line for line in told)
    assert {one.file for one in lines} >= {"regret.jsonl", "bins_bounds.jsonl", "printed.jsonl"}
    bound = next(one for one in lines if one.file == "bins_bounds.jsonl" and one.seconds < 0.5)
    assert again.remade(bound)["moved"] == ""
    assert "->" in again.remade(bound._replace(kept=1.01 * bound.kept))["moved"]
    timed = [again._told(json.dumps({"name": "a", "ours": x, "unit": "s"})) for x in (1.0, 2.9, 3.1)]
    assert again.moved(timed[0], timed[1]) is None
    assert "1 -> 3.1" in again.moved(timed[0], timed[2])
    monkeypatch.setattr(again, "SIGHTINGS", tmp_path / "again.jsonl")
    row = {"file": "a.jsonl", "claim": "c", "moved": "", "processor": "Z"}
    again.SIGHTINGS.write_text(json.dumps(row) + "\n" + json.dumps({**row, "processor": "Y", "moved": "1 -> 2"}) + "\n")
    assert again.seen() == {("a.jsonl", "c"): {"Z"}}
