"""Edits of scripts whose whole data is one batch: tensors that the loop gives to the model in every step."""

_LOADER = """
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset({tensors}), batch_size=len({first}))
"""
_OURS = """
plan = ao.plan(loader=loader, epochs={epochs}, epsilon=8, delta=1e-5, optimizer=optimizer)
model, optimizer, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader)
"""
_OPACUS = """
model, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
"""
_LOOP = """
...
    [({tensors})] = loader
"""


def ours(tensors: str, epochs: int) -> list[tuple[str, ...]]:
    """Edits that train privately on tensors, named as the script does, with a comma between."""
    return _edits("import anyorder as ao", _OURS, tensors, epochs)


def with_opacus(tensors: str, epochs: int) -> list[tuple[str, ...]]:
    """The same with Opacus."""
    fixed = ("optimizer = ", "model = opacus.validators.ModuleValidator.fix(model)\n...")
    return [fixed, *_edits("import opacus", _OPACUS, tensors, epochs)]


def _edits(imported: str, private: str, tensors: str, epochs: int) -> list[tuple[str, ...]]:
    lines = (_LOADER + private + _LOOP).format(tensors=tensors, first=tensors.split(",")[0], epochs=epochs)
    return [("import torch.nn as nn", f"...\n{imported}"), ("for epoch in range(", lines)]
