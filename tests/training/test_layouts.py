"""Batches of other layouts than one row an example: trained in the ways of docs/models.md, or refused by name."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.data import DataLoader, default_collate

import anyorder as ao
from anyorder.errors import ArgumentError, LoaderError, ModelError
from anyorder.plan.planner import plan_at_sigma

N, B, CLIP, MOST = 12, 6, 0.5, 6
RNG = torch.Generator().manual_seed(5)
ROWS = [(torch.randn(2 + i % 4, 3, generator=RNG), torch.tensor(i % 2)) for i in range(N)]
BAGS = [(torch.randint(1, 9, (1 + i % 4,), generator=RNG), torch.tensor(i % 2)) for i in range(N)]


def labels(rows):
    return torch.stack([row[-1] for row in rows])


def padded(rows):
    x = torch.stack([F.pad(x, (0, 0, 0, MOST - len(x))) for x, _ in rows])
    return x, torch.tensor([len(x) for x, _ in rows]), labels(rows)


def stacked(rows):
    return torch.stack([x[0] for x, _ in rows]), labels(rows)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))


class TimeFirst(Net):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        out = self.layer(self.inner(x.transpose(0, 1)))
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out.transpose(0, 1).mean(1))


class BothDirections(nn.Module):
    def __init__(self):
        super().__init__()
        self.forth, self.back = nn.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        last = (lengths - 1)[:, None, None].expand(-1, 1, 4)
        places = (lengths[:, None] - 1 - torch.arange(x.shape[1])).clamp(min=0)
        turned = x.gather(1, places[..., None].expand_as(x))
        states = [self.forth(x)[0].gather(1, last), self.back(turned)[0].gather(1, last)]
        return self.head(torch.cat(states, 2)[:, 0])


class Packed(nn.Module):
    """What `BothDirections` stands for."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][0].transpose(0, 1).flatten(1))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, ids, offsets=None):
        return self.head(self.table(ids, offsets))


def bags(rows):
    return torch.stack([F.pad(ids, (0, 4 - len(ids))) for ids, _ in rows]), labels(rows)


def with_offsets(rows):
    ends = torch.tensor([len(ids) for ids, _ in rows]).cumsum(0)
    return torch.cat([ids for ids, _ in rows]), F.pad(ends[:-1], (1, 0)), labels(rows)


def graph(nodes):
    """A ring."""
    n = len(nodes)
    return nodes, torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])


class Messages(Net):
    def forward(self, x, edges, is_edge, is_node):
        h = self.inner(x)
        source, target = (edges[:, i, :, None].expand(-1, -1, 4) for i in (0, 1))
        messages = h.gather(1, source) * is_edge[..., None]
        h = F.relu(h + torch.zeros_like(h).scatter_add(1, target, messages))
        return self.head((h * is_node[..., None]).sum(1))


def graphs(rows):
    x, edges = torch.zeros(len(rows), MOST, 3), torch.zeros(len(rows), 2, MOST, dtype=torch.int64)
    is_edge, is_node = torch.zeros(len(rows), MOST), torch.zeros(len(rows), MOST)
    for k, (nodes, pairs) in enumerate(graph(x) for x, _ in rows):
        x[k, : len(nodes)], is_node[k, : len(nodes)] = nodes, 1
        edges[k, :, : pairs.shape[1]], is_edge[k, : pairs.shape[1]] = pairs, 1
    return x, edges, is_edge, is_node, labels(rows)


def end_to_end(rows):
    """As PyG joins graphs."""
    starts = [0, *torch.tensor([len(x) for x, _ in rows]).cumsum(0).tolist()]
    edges = torch.cat([graph(x)[1] + start for (x, _), start in zip(rows, starts, strict=False)], 1)
    return torch.cat([x for x, _ in rows]), edges, labels(rows)


class Own(torch.Tensor):
    pass


class Marked(dict):
    def __init__(self, x, y):
        super().__init__(x=x, y=y)
        self.x, self.scale = x, float(x.sum())


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor


torch.export.register_dataclass(Fields)


@dataclasses.dataclass
class Unregistered:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Negatives:
    """With those that a row is compared with, which are the row itself where the batch is one."""

    x: torch.Tensor
    y: torch.Tensor
    negatives: torch.Tensor | None = None

    def __post_init__(self):
        self.negatives = self.x.roll(1, 0)


class Centred(dict):
    def update(self, *fields):
        super().update(*fields)
        self["x"] = self["x"] - self["x"][1:].sum(0)


def compared(model, batch):
    return (model(batch.x).square().sum(1) * (batch.x * batch.negatives).sum(1)).mean()


class OfFields(Net):
    def forward(self, batch):
        return super().forward(batch.x)


def loss_of(model, batch):
    return F.cross_entropy(model(*batch[:-1]), batch[-1])


def trained(model, rows, collate, loss=loss_of):
    plan = plan_at_sigma(
        1e-9, dataset_size=N, batch_size=B, epochs=1, delta=1e-5, clip_norm=CLIP, mechanism="independent"
    )
    optimizer, engine = torch.optim.SGD(model.parameters(), 0.5), ao.PrivacyEngine(plan, key=bytes(32))
    private, optimizer, loader = engine.make_private(model, optimizer, DataLoader(rows, B, collate_fn=collate))
    for batch in loader:
        optimizer.zero_grad()
        loss(private, batch).backward()
        optimizer.step()


def by_loop(model, rows, collate, loss=loss_of):
    parameters = list(model.parameters())
    for start in (0, B):
        total = [torch.zeros_like(p) for p in parameters]
        for row in rows[start : start + B]:
            gradients = torch.autograd.grad(loss(model, collate([row])), parameters)
            norm = float(torch.sqrt(sum(g.square().sum() for g in gradients)))
            total = [t + g * min(1.0, CLIP / norm) for t, g in zip(total, gradients, strict=True)]
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= 0.5 * t / B


WAYS = {
    "time first, recurrent": (lambda: TimeFirst(nn.LSTM(4, 4)), ROWS, padded),
    "time first, attention": (lambda: TimeFirst(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)), ROWS, padded),
    "both directions by lengths": (BothDirections, ROWS, padded),
    "bags filled up": (Bag, BAGS, bags),
    "graphs filled up": (Messages, ROWS, graphs),
    "sparse in coordinates": (Sparse, ROWS, lambda rows: (stacked(rows)[0].to_sparse(), labels(rows))),
    "a dataclass with code": (Net, ROWS, lambda rows: Negatives(*stacked(rows)), compared),
    "a mapping with code": (
        Net, [Centred(x=x[0], y=y) for x, y in ROWS], default_collate,
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    ),
    "a class of tensors": (
        Net, ROWS, lambda rows: (stacked(rows)[0].as_subclass(Own), labels(rows)), loss_of,
    ),
    "a registered dataclass": (
        OfFields, ROWS, lambda rows: Fields(*stacked(rows)), lambda model, batch: F.cross_entropy(model(batch), batch.y)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", WAYS)
def test_the_ways_that_are_named_train_as_a_loop_over_examples(name):
    make, *rest = WAYS[name]
    torch.manual_seed(0)
    model = make()
    by_hand = copy.deepcopy(model)
    trained(model, *rest)
    by_loop(by_hand, *rest)
    for own, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=2e-5)


def test_both_directions_are_those_of_a_packed_sequence():
    packed, model = Packed(), BothDirections()
    model.head.load_state_dict(packed.head.state_dict())
    for name, value in packed.layer.state_dict().items():
        layer = model.back if name.endswith("_reverse") else model.forth
        layer.state_dict()[name.removesuffix("_reverse")].copy_(value)
    x, lengths, _ = padded(ROWS)
    torch.testing.assert_close(model(x, lengths), packed(x, lengths), atol=1e-6, rtol=1e-6)


def nested(layout):
    return lambda rows: (torch.nested.nested_tensor([x for x, _ in rows], layout=layout), labels(rows))


def given(change):
    """The model on a changed batch."""
    return lambda model, batch: loss_of(model, change(*batch))


REFUSED = {
    "time first": (Net, padded, given(lambda x, n, y: (x.transpose(0, 1), y)), "first dimension does not go over"),
    "time first, collated": (Net, lambda rows: (padded(rows)[0].transpose(0, 1), labels(rows)), loss_of, "one row"),
    "an input of its own dimension": (
        Bag, stacked, given(lambda x, y: (x.long().abs(), x.T, y)), "in another dimension than the first",
    ),
    "offsets": (Bag, lambda rows: with_offsets(BAGS[1 : 1 + len(rows)]), loss_of, "bags with offsets"),
    "graphs end to end": (Messages, end_to_end, loss_of, "nodes of graphs"),
    "packed": (Packed, padded, loss_of, "reversed by their lengths"),
    "packed, collated": (Net, lambda rows: (pack_sequence([x for x, _ in rows]), labels(rows)), loss_of, "packed"),
    "packed in the loop": (
        Net, padded, given(lambda x, n, y: (pack_padded_sequence(x, n, True, False), y)), "given a packed sequence",
    ),
    "nested": (Net, nested(torch.strided), loss_of, "nested or compressed"),
    "nested, jagged": (Net, nested(torch.jagged), loss_of, "nested or compressed"),
    "nested in the loop": (
        Net, padded, given(lambda x, n, y: (torch.nested.nested_tensor(list(x)), y)),
        "nested.nested_tensor was given a tensor of the batch",
    ),
    "sparse rows": (
        Sparse, lambda rows: (stacked(rows)[0].to_sparse_csr(), labels(rows)), loss_of, "in coordinates",
    ),
    "sparse in the loop": (Sparse, stacked, given(lambda x, y: (x.to_sparse(), y)), "the training loop made"),
    "a number beside the fields": (
        OfFields, lambda rows: Marked(*stacked(rows)),
        lambda model, batch: model(batch).mean() * batch.scale, "Python number",
    ),
    "a class of tensors, centred": (
        Net, lambda rows: (stacked(rows)[0].as_subclass(Own), labels(rows)), given(lambda x, y: (x - x.mean(0), y)),
        "takes rows of the batch together",
    ),
    "a dataclass": (
        OfFields, lambda rows: Unregistered(*stacked(rows)),
        lambda model, batch: F.cross_entropy(model(batch), batch.y), "register_dataclass",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR)")
@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_are_refused_by_their_names(name):
    make, collate, loss, match = REFUSED[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ArgumentError, LoaderError, ModelError), match=match):
        trained(model, ROWS, collate, loss)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
