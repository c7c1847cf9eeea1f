"""What torch makes of a tensor of a batch is followed too, or refused: by every function, under every transform."""

import re

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functionalize, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from anyorder.clipping.coupling import LossWatch, _Watched
from anyorder.clipping.rows import Total
from anyorder.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own rules for jvp

B, C = 8, 5


def batch():
    watch = LossWatch()
    return watch, watch.batch([torch.rand(B, C) + 0.1], B)[0]


def is_followed(made):
    return all(type(leaf) is _Watched for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor))


CONSTANT = torch.ones(B, C)


def returned(total):
    return lambda a: total


UNDER_TRANSFORMS = {
    "vmap, not mapped": lambda x: vmap(lambda a, b: a * b.sum(), in_dims=(0, None))(CONSTANT, x),
    "vmap, read": lambda x: vmap(lambda a: a * x.sum())(CONSTANT),
    "vmap, returned": lambda x: vmap(returned(x.sum()))(CONSTANT),
    "vmap, returned by one of the batch": lambda x: vmap(returned(x.sum()))(x),
    "vmap, a number": lambda x: vmap(lambda a, n=x.sum().item(): a * n)(CONSTANT),
    "grad": lambda x: grad(lambda a: (a * x.sum()).sum())(CONSTANT),
    "grad and value": lambda x: grad_and_value(lambda a: (a * x.sum()).sum())(CONSTANT)[1],
    "vjp": lambda x: vjp(lambda a: a * x.sum(), CONSTANT)[0],
    "vjp of the batch": lambda x: vjp(torch.sin, CONSTANT)[1](x),
    "jvp": lambda x: jvp(lambda a: a * x.sum(), (CONSTANT,), (CONSTANT,))[1],
    "jvp, returned": lambda x: jvp(returned(x.sum()), (CONSTANT,), (CONSTANT,))[0],
    "jvp along the batch": lambda x: jvp(torch.sin, (CONSTANT,), (x,))[1],
    "jacrev": lambda x: jacrev(lambda a: a * x.sum())(CONSTANT[0]),
    "jacfwd": lambda x: jacfwd(lambda a: a * x.sum())(CONSTANT[0]),
    "hessian": lambda x: hessian(lambda a: (a * a * x.sum()).sum())(CONSTANT[0]),
    "functionalize": lambda x: functionalize(lambda a: a * x.sum())(CONSTANT),
    "functionalize of the batch": lambda x: functionalize(lambda a: a * a.sum())(x),
}


@pytest.mark.parametrize("name", UNDER_TRANSFORMS)
def test_no_transform_makes_a_constant_of_the_batch(name):
    _, x = batch()
    told = "Multiply with" if "vjp of" in name else "in_dims=0"
    with pytest.raises(ModelError, match=told):
        UNDER_TRANSFORMS[name](x)


@pytest.mark.parametrize("name", UNDER_TRANSFORMS)
def test_what_a_transform_makes_of_an_earlier_batch_is_known_to_be_written_somewhere(name):
    """It may be looked at, after the backward pass; constants of later losses may have it."""
    watch, x = batch()
    x.tape.close()
    try:
        made = UNDER_TRANSFORMS[name](x)
    except ModelError:
        assert "vjp of" in name
    else:
        assert watch.escaped or is_followed(made) or "a number" in name


def test_transforms_that_are_given_rows_alone_go_on():
    """Gradients inside of a function that is mapped along the rows; shapes that others read."""
    _, x = batch()
    inner = vmap(lambda row, other: grad(lambda z: (z * other).sum() ** 2)(row) * x.shape[1])(x, x)
    torch.testing.assert_close(inner.detach(), 2 * C * x * (x * x).sum(1, keepdim=True))
    assert is_followed(inner)
    assert not isinstance(inner.tape.states[inner.number], Total)


ASIDE = {
    "forward mode": lambda x: dual(x),
    "a gradient that is the batch": lambda x: torch.autograd.grad((a := leaf()) * 2, a, x),
    "gradients that are the batch": lambda x: torch.autograd.grad([(a := leaf()) * 2], [a], [x.detach()]),
    "backward along the batch": lambda x: trained(lambda a: (a * 2).backward(x)),
    "a gradient that a hook multiplies": lambda x: hooked(
        lambda a, total: (a * 2).sum(), lambda g, total: g * total, x
    ),
    "a gradient that a hook keeps": lambda x: hooked(lambda a, total: (a * total).sum(), lambda g, total: None, x),
    "a jacobian": lambda x: torch.autograd.functional.jacobian(lambda a: a * x.sum(), CONSTANT[0], vectorize=True),
    "a vector of a product": lambda x: torch.autograd.functional.vjp(torch.sin, CONSTANT, x)[1],
    "its class": lambda x: x.as_subclass(torch.Tensor),
    "another class": lambda x: x.as_subclass(nn.Parameter),
    "its data": lambda x: x.data,
    "compressed columns": lambda x: torch.sparse_csc_tensor([0, 1], [0], x[0, :1], (B, 1)),
    "blocks": lambda x: torch.sparse_compressed_tensor([0, 1], [0], x[0, :1], (1, B), layout=torch.sparse_csr),
    "nested": lambda x: torch.nested.as_nested_tensor([x[0], x[1]]).to_padded_tensor(0.0),
}


def leaf():
    return CONSTANT.clone().requires_grad_()


def trained(train):
    a = leaf()
    train(a)
    return a.grad


def hooked(loss, hook, x):
    a, total, seen = leaf(), x.sum(), []
    a.register_hook(lambda g: (seen.append(g), hook(g, total))[1])
    return [*torch.autograd.grad(loss(a, total), a), *seen]


def dual(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(CONSTANT, CONSTANT) * x.sum()).tangent


@pytest.mark.parametrize("name", ASIDE)
def test_ways_around_the_functions_of_torch_are_followed_or_refused(name):
    _, x = batch()
    try:
        made = ASIDE[name](x)
    except ModelError:
        return
    assert is_followed(made)


OF_NOBODY = {
    *("from_dlpack", "tensor", "new", "new_tensor"),  # which are not seen, as docs/guarantee.md says
    *("to", "type_as", "softmax", "softmin", "log_softmax"),  # which read no number of what they are given there
}
LEFT_OUT = re.compile("_|set_|seed|manual|save|load|init|fork|wait|compile|use_|parse|result_type|lobpcg|import|assert")


@pytest.mark.filterwarnings("ignore")
def test_every_function_of_torch_follows_what_it_is_given_or_is_known():
    """In places where a tensor may stand. Where a number stands, a tensor is one, as by `float(t)`: see the docs."""
    _, x = batch()
    rows, place = x.sum(1).detach(), (0 * x.sum(1)).long()
    ways = [
        lambda: (rows.clone(),), lambda: ([rows, rows],), lambda: (torch.ones(B), rows.clone()),
        lambda: (torch.ones(B), 0, place),
    ]  # fmt: skip
    sparse = [lambda: (place[None], torch.ones(B)), lambda: ([0, B], [*range(B)], rows)]
    unseen, called = set(), set()
    functions = {
        getattr(owner, n): n
        for owner in (torch.Tensor, F, torch.nested, torch)
        for n in dir(owner)[::-1]
        if not LEFT_OUT.match(n) and type(getattr(owner, n)).__hash__
    }
    for function, name in functions.items():
        if not callable(function) or isinstance(function, type):
            continue
        for way in ways + sparse * ("sparse" in name):
            try:
                made = function(*way())
            except Exception:  # what cannot be called so makes nothing
                continue
            called.add(name)
            if not is_followed(made):
                unseen.add(name)
    assert len(called) > 400
    assert unseen <= OF_NOBODY


def test_data_of_a_tensor_of_the_batch_tells_of_its_writes():
    """Between a loss and its backward pass: torch compares the versions of what the loss has saved."""
    _, x = batch()
    before = x._version
    assert torch.equal(x.data.mean(0), x.mean(0))
    assert x._version == before
    x.data.sub_(1)
    assert x._version == before + 1
    weight = leaf()
    weight.data = torch.zeros(B, C)
    assert not weight.any()
    target = x * 2
    loss = (weight * target).sum()
    target.data.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, weight)
