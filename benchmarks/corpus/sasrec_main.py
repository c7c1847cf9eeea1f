"""Self-attention over the items of a user, with privacy for users, whom a process of the script's own draws."""

from pathlib import Path

from benchmarks.corpus import _recommenders

REPOSITORY, COMMIT = "https://github.com/pmixer/SASRec.pytorch", "fde8a9c08febc2c898dc269b1d98ab762c50d2be"
SCRIPT = "python/main.py"
ARGS = [
    "--dataset", "made_up", "--train_dir", "kept", "--batch_size", "16", "--maxlen", "20", "--num_epochs", "3",
    "--device", "cpu",
]  # fmt: skip
BY_USER = [
    ("maxlen=args.maxlen, n_workers=3)", "users = Users(user_train, itemnum, args.maxlen)"),
    ("for step in range(num_batch)", "for step, (u, seq, pos, neg) in enumerate(loader):"),
    ("sampler.next_batch()", ""),
    ("np.array(seq), np.array(pos)", ""),
    ("indices = np.where(pos != 0)", "counts = (pos != 0) / (pos != 0).sum(1, keepdim=True).clamp(min=1)"),
    ("loss = bce_criterion(pos_logits", "loss = (bce_criterion(pos_logits, pos_labels) * counts).sum(1).mean()"),
    ("loss += bce_criterion(neg_logits", "loss += (bce_criterion(neg_logits, neg_labels) * counts).sum(1).mean()"),
    ("bce_criterion = torch.nn.BCEWithLogitsLoss()", "bce_criterion = torch.nn.BCEWithLogitsLoss(reduction='none')"),
    ("for param in model.item_emb.parameters()", ""),
    ("sampler.close()", ""),
    ("python/model.py", "seqs = self.item_emb(torch.LongTensor", "seqs = self.item_emb(log_seqs)"),
    ("python/model.py", "poss = np.tile(", "poss = torch.arange(1, log_seqs.shape[1] + 1).expand_as(log_seqs)"),
    ("python/model.py", "poss *= (log_seqs", "poss = poss * (log_seqs != 0)"),
    ("python/model.py", "seqs += self.pos_emb(", "seqs += self.pos_emb(poss)"),
    ("python/model.py", "pos_embs = self.item_emb(", "pos_embs = self.item_emb(pos_seqs)"),
    ("python/model.py", "neg_embs = self.item_emb(", "neg_embs = self.item_emb(neg_seqs)"),
    (
        "python/utils.py",
        "class WarpSampler(object)",
        """
        class Users(torch.utils.data.Dataset):
            def __init__(self, taken, items, longest):
                self.users, self.taken, self.items, self.longest = list(taken), taken, items, longest

            def __len__(self):
                return len(self.users)

            def __getitem__(self, k):
                own = self.taken[self.users[k]][-self.longest - 1 :]
                before = self.longest - len(own) + 1
                seq, pos = [0] * before + own[:-1], [0] * before + own[1:]
                neg = [0] * before + [random_neq(1, self.items + 1, own) for _ in own[1:]]
                return self.users[k], torch.tensor(seq), torch.tensor(pos), torch.tensor(neg)


        ...
        """,
    ),
]
"""Tensors for arrays, and a loss of each user alone: the script's is a mean over the positions of a batch."""
EDITS = [
    *BY_USER,
    ("import argparse", "...\nimport anyorder as ao"),
    (
        "best_val_ndcg, best_val_hr = 0.0, 0.0",
        """
        loader = torch.utils.data.DataLoader(users, batch_size=args.batch_size, shuffle=True)
        plan = ao.plan(loader=loader, epochs=args.num_epochs, epsilon=8, delta=1e-5, optimizer=adam_optimizer)
        model, adam_optimizer, loader = ao.PrivacyEngine(plan).make_private(model, adam_optimizer, loader)
        ...
        """,
    ),
]
OPACUS = [
    *BY_USER,
    ("import argparse", "...\nimport opacus.validators"),
    ("model.train() # enable", "model = opacus.validators.ModuleValidator.fix(model)\n..."),
    (
        "best_val_ndcg, best_val_hr = 0.0, 0.0",
        """
        loader = torch.utils.data.DataLoader(users, batch_size=args.batch_size, shuffle=True)
        model, adam_optimizer, loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=adam_optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "changed: tensors in the place of arrays"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _recommenders.sequences(folder / "data")
