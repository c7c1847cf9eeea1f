"""A batch is recognised by the memory of its tensors, and its rows by where they lie in it."""

import gc

import pytest
import torch

from anyorder.errors import ArgumentError, TrainingError
from anyorder.sampling.loader import Batch, BatchIdentity

ROWS = 4


def handed_out(*batches):
    out, handed = BatchIdentity(), []
    for t, batch in enumerate(batches):
        handed.append(Batch([str(i) for i in range(ROWS)], t, 1))
        out.add(batch, handed[-1])
    return out, handed


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


IN_PLACE = {
    "itself": lambda x: x,
    "flattened": lambda x: x.flatten(1),
    "columns": lambda x: x[:, 1:],
    "one column": lambda x: x[:, 2],
    "every other": lambda x: x[:, ::2],
    "axes": lambda x: x.transpose(1, 2),
    "more axes": lambda x: x[:, None],
    "bytes": lambda x: x.view(torch.int32),
    "detached": lambda x: x.detach(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
}
MOVED = {
    "one row": lambda x: x[1].expand(ROWS, 6, 5),
    "shifted": lambda x: x.as_strided((ROWS - 1, 30), (30, 1), 30).as_strided((ROWS, 20), (30, 1), 30),
    "cut anew": lambda x: x.view(-1)[: ROWS * 6].view(ROWS, 6),
}


@pytest.mark.parametrize("view", IN_PLACE)
def test_views_with_the_rows_in_place_are_recognised(view):
    """Among several batches, the first of which is meant, so that the order of fetching says nothing."""
    batches = [[numbers(ROWS, 6, 5)] for _ in range(3)]
    out, handed = handed_out(*batches)
    assert out.find([IN_PLACE[view](batches[1][0])]) is handed[1]
    assert out.find([IN_PLACE[view](batches[0][0])]) is handed[0]  # passed over, but recognised


@pytest.mark.parametrize("view", MOVED)
def test_views_with_other_rows_are_refused(view):
    batch = [torch.randn(ROWS + 1, 6, 5)[:ROWS]]
    out, _ = handed_out(batch)
    with pytest.raises(TrainingError, match="another order"):
        out.find([MOVED[view](batch[0])])


def test_batches_with_the_examples_in_another_dimension():
    batch = [numbers(7, ROWS, 5), numbers(ROWS, ROWS, 5)]
    out, handed = handed_out(batch, [numbers(7, ROWS, 5)])
    for x in batch:
        assert out.find([x.transpose(0, 1)]) is handed[0]
    assert out.find([batch[0][3]]) is handed[0]
    with pytest.raises(ArgumentError, match="whole batch, one row for each"):
        out.find([batch[0]])


def test_batches_that_are_slices_of_one_tensor():
    everything = numbers(3 * ROWS, 5)
    batches = [everything[i : i + ROWS] for i in range(0, 3 * ROWS, ROWS)]
    out, handed = handed_out(*batches)
    assert [out.find([everything[i : i + ROWS]]) for i in (8, 0, 4)] == [handed[2], handed[0], handed[1]]
    with pytest.raises(TrainingError, match=r"another order|several batches"):
        out.find([everything[2 : 2 + ROWS]])


def test_a_batch_of_a_single_number_is_recognised():
    first, second = torch.zeros(1), torch.ones(1)
    out = BatchIdentity()
    out.add([first], mine := Batch(["a"], 0, 1))
    out.mark_used(out.find([first]))
    out.add([second], following := Batch(["b"], 1, 1))
    assert mine.used
    with pytest.raises(TrainingError, match="already used"):
        out.find([first.view(1, 1)])
    assert out.find([second.view(1, 1)]) is following


def test_a_tensor_that_comes_with_every_batch_says_nothing():
    mask = torch.ones(ROWS, 5)
    batches = [[numbers(ROWS, 5), mask] for _ in range(3)]
    out, handed = handed_out(batches[0])
    out.mark_used(out.find([batches[0][0].clone(), mask]))
    out.add(batches[1], handed1 := Batch([""] * ROWS, 1, 1))
    assert out.find([batches[1][0].clone(), mask]) is handed1
    with pytest.raises(TrainingError, match=r"already used|two batches"):
        out.find([batches[0][0], mask])


def test_memory_of_batches_that_are_gone_is_not_taken_for_theirs():
    out, handed = handed_out([torch.zeros(ROWS, 5)])
    out.mark_used(handed[0])
    gc.collect()
    out.add([torch.zeros(ROWS, 5)], following := Batch([""] * ROWS, 1, 1))
    assert all(out.find([torch.ones(ROWS, 5)]) is following for _ in range(50))


def test_a_list_of_batches_is_recognised_in_each_epoch():
    batches = [[numbers(ROWS, 5)] for _ in range(3)]
    out, handed = handed_out()
    for t in range(9):
        out.add(batches[t % 3], mine := Batch([""] * ROWS, t, 1 + t // 3))
        assert out.find(batches[t % 3]) is mine
        out.mark_used(mine)
    assert len(out._known) == 3


def test_a_batch_that_was_passed_over_waits_no_longer():
    batches = [[numbers(ROWS, 5)] for _ in range(4)]
    out, handed = handed_out(*batches[:2])
    assert out.find(batches[1]) is handed[1]
    out.mark_used(handed[1])
    out.add(batches[2], following := Batch([""] * ROWS, 2, 1))
    assert out.find([batches[2][0].clone()]) is following
    with pytest.raises(TrainingError, match="already used"):
        out.find(batches[1])


def test_an_iteration_that_was_left_takes_no_batch_of_others_with_it():
    batches = [[numbers(ROWS, 5)] for _ in range(3)]
    out = BatchIdentity()
    for t, iteration in enumerate((1, 2)):
        out.add(batches[t], Batch([""] * ROWS, t, iteration))
    out.leave(2)
    out.add(batches[2], Batch([""] * ROWS, 2, 1))
    with pytest.raises(TrainingError, match="several batches"):
        out.find([batches[0][0].clone()])


def test_only_what_the_loader_gave_can_be_chosen():
    texts = ["a"] * ROWS
    out, handed = handed_out([numbers(ROWS, 2)], texts)
    out.use(texts)
    assert out.find([numbers(ROWS, 3)]) is handed[1]
    with pytest.raises(TrainingError, match="use"):
        out.use(numbers(ROWS, 2))


def test_a_copy_of_a_batch_that_was_passed_over_is_not_taken_for_a_later_one():
    batches = [[numbers(ROWS, 5)] for _ in range(2)]
    out, handed = handed_out(*batches)
    assert out.find(batches[1]) is handed[1]  # called, and not trained on
    with pytest.raises(TrainingError, match="several batches"):
        out.find([batches[0][0].clone()])
    out.mark_used(handed[1])
    with pytest.raises(TrainingError, match="already used"):
        out.find([batches[0][0].clone()])


@pytest.mark.filterwarnings("ignore:.*nested")
def test_rows_of_a_nested_tensor_are_refused_in_words():
    batch = numbers(ROWS, 3)
    identity, _ = handed_out([batch])
    with pytest.raises(ArgumentError, match="nested tensor, which has no rows"):
        identity.find([torch.nested.nested_tensor(list(batch))])
