"""Sharded modules are known by their class."""

import sys
from types import SimpleNamespace

from torch import nn

from anyorder.training import distributed


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
