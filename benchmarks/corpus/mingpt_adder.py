"""A GPT that learns to add, from batches drawn with replacement without end, in a trainer of the repository."""

REPOSITORY, COMMIT = "https://github.com/karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26"
SCRIPT, COPIED = "projects/adder/adder.py", "."
ARGS = ["--trainer.max_iters=12", "--trainer.num_workers=0", "--trainer.device=cpu"]
TRAINER = "mingpt/trainer.py"
EDITS = [
    (TRAINER, "import time", "import anyorder as ao\n..."),
    (TRAINER, "sampler=torch.utils.data.RandomSampler(", ""),
    (TRAINER, "shuffle=False", "shuffle=True, drop_last=True,"),
    (
        TRAINER,
        "model.train()",
        """
        epochs = -(-config.max_iters // len(train_loader))
        plan = ao.plan(loader=train_loader, epochs=epochs, epsilon=8, delta=1e-5, optimizer=self.optimizer)
        engine = ao.PrivacyEngine(plan)
        model, self.optimizer, train_loader = engine.make_private(model, self.optimizer, train_loader)
        ...
        """,
    ),
    (TRAINER, "self.loss = model(x, y)", "...\nself.loss = self.loss.mean()"),
]
OPACUS = [
    (TRAINER, "import time", "import opacus\n..."),
    (
        TRAINER,
        "model.train()",
        """
        ...
        model, self.optimizer, train_loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=self.optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
    (TRAINER, "sampler=torch.utils.data.RandomSampler(", ""),
]
MODEL = "untouched"
RESULT, WHY = "runs", "a pass over shuffled data takes the place of draws with replacement without end"
