"""A release of torch or transformers without a name that the guarantee rests on is refused, not worked around."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from anyorder._undocumented import FUNCTORCH, TRAINER, check_names
from anyorder.errors import MissingDependencyError
from anyorder.training import distributed


def test_what_is_missing_is_named():
    check_names(torch._C._functorch, FUNCTORCH, torch)
    with pytest.raises(MissingDependencyError, match=r"torch 2.* has no _save_checkpoint, on which"):
        check_names(SimpleNamespace(**dict.fromkeys(TRAINER[:-1])), TRAINER, torch)


def test_a_sharded_module_is_known_by_its_class_not_by_a_name(monkeypatch):
    class FSDPModule(nn.Linear):
        """Of somebody else."""

    class Sharded:
        pass

    class Part(Sharded, nn.Linear):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=Sharded))
    assert not distributed._is_fsdp(FSDPModule(1, 1))
    assert distributed._is_fsdp(Part(1, 1))
