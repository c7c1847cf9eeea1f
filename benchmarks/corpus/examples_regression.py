"""A polynomial fitted to data that is made in each step, without a loader and without an optimizer."""

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "regression/main.py"
ARGS: list[str] = []
HERE = [("if loss < 1e-3", "if batch_idx == 100:")]
EDITS = [
    ("import print_function", "...\nimport anyorder as ao"),
    (
        "for batch_idx in count",
        """
        optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(*get_batch(3200))
        loader = torch.utils.data.DataLoader(data, batch_size=32)
        plan = ao.plan(loader=loader, epochs=1, epsilon=8, delta=1e-5, optimizer=optimizer)
        private, optimizer, loader = ao.PrivacyEngine(plan).make_private(fc, optimizer, loader)
        for batch_idx, (batch_x, batch_y) in enumerate(loader, 1):
        """,
    ),
    ("batch_x, batch_y = get_batch()", ""),
    ("fc.zero_grad()", "private.zero_grad()"),
    ("output = F.smooth_l1_loss(", "output = F.smooth_l1_loss(private(batch_x), batch_y)"),
    ("for param in fc.parameters()", "optimizer.step()"),
    ("param.data.add_", ""),
]
OPACUS = [
    ("import print_function", "...\nimport opacus"),
    (
        "for batch_idx in count",
        """
        optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(*get_batch(3200))
        loader = torch.utils.data.DataLoader(data, batch_size=32)
        private, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=fc, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
        for batch_idx, (batch_x, batch_y) in enumerate(loader, 1):
        """,
    ),
    ("batch_x, batch_y = get_batch()", ""),
    ("fc.zero_grad()", "private.zero_grad()"),
    ("output = F.smooth_l1_loss(", "output = F.smooth_l1_loss(private(batch_x), batch_y)"),
    ("for param in fc.parameters()", "optimizer.step()"),
    ("param.data.add_", ""),
]
MODEL = "untouched"
RESULT, WHY = (
    "runs",
    "data, loader and optimizer had to be written; it stops at a step, not at a loss",
)
