"""Each private name of torch is there and does what the package takes it for; a new release fails here first."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from anyorder.clipping import torch_private as private
from anyorder.clipping.coupling import ASKED
from anyorder.errors import MissingDependencyError


def inside_vmap(look):
    """What `look` finds in one example under vmap."""
    found = []
    vmap(lambda x: (found.append(look(x)), x)[1])(torch.arange(6.0).view(3, 2))
    return found[0]


def test_what_is_missing_is_named():
    private.check_names(torch._C._functorch, private.FUNCTORCH, torch)
    with pytest.raises(MissingDependencyError, match=r"torch 2.* has no get_unwrapped, is_batchedtensor, on which"):
        names = [name for name in private.FUNCTORCH if name not in ("get_unwrapped", "is_batchedtensor")]
        private.check_names(SimpleNamespace(**dict.fromkeys(names)), private.FUNCTORCH, torch)


def test_levels():
    assert private.current_level() is None
    assert inside_vmap(lambda x: private.current_level()) == 1


def test_a_backward_pass_is_known_while_it_runs():
    assert private.backward_pass() < 0
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda g: seen.append(private.backward_pass()))
    torch.autograd.grad(x.sum(), x)
    assert seen[0] >= 0


def test_wrapped_and_batched():
    x = torch.ones(2)
    assert not private.is_wrapped(x)
    assert not private.is_batched(x)
    assert inside_vmap(private.is_wrapped)
    assert inside_vmap(private.is_batched)
    assert inside_vmap(private.is_of_batch)
    wrapped = []
    grad(lambda t: (wrapped.append((private.is_wrapped(t), private.is_of_batch(t))), t.sum())[1])(x)
    assert wrapped == [(True, False)]


def test_what_is_behind_a_wrapped_tensor():
    assert inside_vmap(lambda x: private.unwrapped(x).shape) == (3, 2)
    assert inside_vmap(lambda x: private.get_unwrapped(x).shape) == (3, 2)
    whole, dim = inside_vmap(lambda x: private.unwrap_batched(x, 1))
    assert whole.shape == (3, 2)
    assert dim == 0


def test_a_batch_dimension_is_added_and_taken_away():
    assert private.enter_vmap is not None
    assert private.leave_vmap is not None
    level = private.enter_vmap(3, "different")
    try:
        one = private.add_batch_dim(torch.arange(6.0).view(3, 2), 0, level)
        assert one.shape == (2,)
        back = private.remove_batch_dim(2 * one, level, 3, 0)
    finally:
        private.leave_vmap()
    assert back.tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]


def test_out_of_a_transform_and_in_again():
    assert private.interpreter is not None

    def look(x):
        with private.interpreter().lower():
            lower = private.current_level()
        with private.outside_transforms():
            return lower, private.current_level(), private.is_wrapped(torch.ones(1) + 1)

    assert inside_vmap(look) == (None, None, False)


def test_requiring_gradients_in_place_is_refused_under_a_transform():
    assert not inside_vmap(lambda x: private.inplace_requires_grad_allowed())
    assert private.requires_grad_(torch.ones(1), True).requires_grad


class Count(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Count.seen += 1
        return func(*args, **(kwargs or {}))


def test_modes_are_counted_and_left_out():
    assert private.function_modes() == private.dispatch_modes() == 0
    with Count():
        assert private.function_modes() == 1
        with private.WithoutModes():
            torch.ones(1)
    assert Count.seen == 0


def test_a_mode_is_below_all_but_a_default_device():
    below, other, stack = Count(), Count(), torch.overrides._get_current_function_mode_stack
    private.place_below(ASKED, False)  # of a run that lives
    with other:
        assert not private.place_below(below, True)
        assert stack() == [below, other]
        assert private.function_modes() == 1
        with torch.device("cpu"):
            assert private.place_below(below, False)
            assert below not in stack()
            assert not private.place_below(below, True)
        torch.set_default_device("cpu")
        try:
            assert private.place_below(below, False)
            assert not private.place_below(below, True)
            assert stack()[1:] == [below, other]
        finally:
            torch.set_default_device(None)
        assert stack() == [below, other]
    assert stack() == [below]
    assert private.function_modes() == 0
    assert private.place_below(below, False)
    assert not stack()


def test_subclasses_are_left_out():
    class Own(Tensor):
        pass

    own = torch.ones(1).as_subclass(Own)
    assert type(own + 1) is Own
    with private.WithoutSubclasses():
        assert type(own + 1) is Tensor


def test_a_view_that_may_be_written():
    x = torch.ones(6, requires_grad=True) * 2
    assert private.unsafe_view(x, (2, 3)).shape == (2, 3)
    assert not private.unsafe_view(x, (2, 3))._is_view()


def test_versions_count_writes():
    x = torch.ones(2)
    before = private.version(x)
    x.add_(1)
    assert private.version(x) == before + 1
    with torch.inference_mode():
        assert private.version(torch.ones(1)) == 0


def test_references():
    x = torch.ones(2)
    private.held_by_python(x)
    assert private.use_count(x) is None or private.use_count(x) >= 1


def test_structures():
    leaves, structure = private.pytree.tree_flatten(({"a": torch.ones(1)}, [2]))
    assert private.pytree.tree_unflatten(leaves, structure)[1] == [2]
    assert private.pytree.tree_leaves((1, [2])) == [1, 2]
    assert private.pytree.tree_map_only(int, lambda n: n + 1, (1, "a")) == (2, "a")


def test_bases_of_layers():
    assert issubclass(nn.BatchNorm2d, private.BatchNorm)
    assert issubclass(nn.SyncBatchNorm, private.BatchNorm)
    assert issubclass(nn.InstanceNorm1d, private.InstanceNorm)


def test_weights_of_recurrent_layers():
    layer = nn.GRU(2, 3)
    names = [name for names in layer._all_weights for name in names]
    assert names == list(layer._flat_weights_names) == list(dict(layer.named_parameters()))
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))


def test_hooks_of_all_modules_are_listed():
    assert private.HOOKS_OF_ALL_MODULES
    assert not any(private.HOOKS_OF_ALL_MODULES)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert any(private.HOOKS_OF_ALL_MODULES)
    handle.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_looks_its_variants_up(reentrant, monkeypatch):
    (owner, name) = private.CHECKPOINT_VARIANTS[0 if reentrant else 1]
    called, original = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (called.append(1), original(*a, **k))[1])
    checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    assert called


def test_the_compiler_leaves_a_kind_of_tensors():
    import torch._dynamo.config

    class Own(Tensor):
        pass

    assert private.compiler_leaves(Own)
    assert not private.compiler_leaves(Own)
    torch._dynamo.config.nontraceable_tensor_subclasses.remove(Own)


def test_no_other_file_of_clipping_names_torchs_own():
    """One home: `torch._C`, its functorch, private modules."""
    from pathlib import Path

    for path in Path(private.__file__).parent.glob("*.py"):
        if path.name != "torch_private.py":
            text = path.read_text()
            assert not [word for word in ("torch._C", "_functorch", "_pytree as", "import _") if word in text], path


def test_versions_are_those_of_each_tensor():
    with torch.inference_mode():
        made = torch.zeros(2)  # torch refuses to tell its version
    written = torch.zeros(2).add_(1).add_(1)
    assert private.versions([torch.zeros(2), written]) == [0, 2]
    assert private.versions([written, made]) == [2, 0]


@pytest.mark.parametrize("make", [torch.zeros, lambda size: torch.nn.Parameter(torch.zeros(size))])
def test_uses_of_memory_are_counted_one_by_one(make):
    """One too few, and nobody sees that somebody else shows what numbers of a batch are written into."""
    tensor = make(3)
    assert private.uses_of_memory(tensor) == 1
    others = []
    for alias in (lambda t: t.detach(), lambda t: t.data, lambda t: t.view(3, 1)):
        others.append(alias(tensor))
        assert private.uses_of_memory(tensor) == 1 + len(others)
        assert private.uses_of_memory(others[-1]) == 1 + len(others)
    del others
    assert private.uses_of_memory(tensor) == 1


def test_who_shows_memory_is_found_and_the_search_is_not_repeated(monkeypatch):
    searches, collected = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(0) or collected())
    tensor, other = torch.zeros(3), torch.zeros(3)
    assert private.showing(tensor, (torch.Tensor,)) == [tensor]
    assert not searches
    aliases = [tensor.data, tensor.detach()[1:], other.view(3, 1), torch.nn.Parameter(tensor, requires_grad=False)]
    aliases[1] = aliases[1][1:]  # whose base nobody holds
    found = {id(one) for one in private.showing(tensor, (torch.Tensor,))}
    assert found == {id(one) for one in (tensor, *aliases[:2], aliases[1]._base)}
    assert private.uses_of_memory(tensor) == len(found) + 1  # the parameter
    del aliases[3]
    assert len(private.showing(aliases[0], (torch.Tensor,))) == 4
    assert len(searches) == 1
    made = torch.tensordot(torch.ones(2, 3, 4), torch.ones(4, 5, 6), 1)  # a view of what Python never had
    alias = made.detach()
    assert len(private.showing(alias, (torch.Tensor,))) == private.uses_of_memory(made) == 3
    searches.clear()
    further = tensor[:1]
    assert len(private.showing(aliases[0], (torch.Tensor,))) == private.uses_of_memory(further) == 5
    assert len(searches) == 1
