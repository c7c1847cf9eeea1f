"""The tables of docs/compared.md: a column for each peer where names say whom, and a row for each line elsewhere."""

from benchmarks import compared


def test_a_column_for_each_peer() -> None:
    own: list[dict[str, object]] = [
        {"name": "MLP, step; peer: hooks (target 3: met)", "ours": 1.0, "peer": 2.0, "unit": "ms"},
        {"name": "MLP, step; peer: opake", "ours": 1.0, "peer": 3.0, "unit": "ms"},
        {"name": "MLP, clipping; peer: opake: memory", "ours": 5.0, "peer": 6.0, "unit": "MiB"},
    ]
    lines = compared._by_peer(own)
    assert lines[0] == "MLP:"
    assert lines[2:] == [
        "| | anyorder | Opacus, hooks | opake |",
        "|---|---|---|---|",
        "| step, ms | 1 | 2 | 3 |",
        "| clipping, memory, MiB | 5 |  | 6 |",
    ]
    assert compared._by_peer([*own, {"name": "no peer named", "ours": 1.0, "peer": 2.0, "unit": "ms"}]) == []
