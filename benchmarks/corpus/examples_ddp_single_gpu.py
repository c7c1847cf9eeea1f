"""The first of the tutorials on several GPUs: a trainer class, which peeks at a batch before each epoch."""

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "distributed/ddp-tutorial-series/single_gpu.py"
ARGS = ["2", "1", "--batch_size", "64"]
HERE = [("device = 0", 'device = "cpu"')]
EDITS = [
    ("import torch.nn.functional as F", "...\nimport anyorder as ao"),
    (
        "trainer = Trainer(model",
        """
        plan = ao.plan(loader=train_data, epochs=total_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_data = ao.PrivacyEngine(plan).make_private(model, optimizer, train_data)
        ...
        """,
    ),
]
OPACUS = [
    ("import torch.nn.functional as F", "...\nimport opacus"),
    (
        "trainer = Trainer(model",
        """
        model, optimizer, train_data = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=train_data, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""
