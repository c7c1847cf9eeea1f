"""DLRM on made-up clicks: bags of three ids for each of three tables."""

REPOSITORY, COMMIT = "https://github.com/facebookresearch/dlrm", "090956ee2319ddd349a42232958aefccfe3f7b0a"
SCRIPT, COPIED = "dlrm_s_pytorch.py", "."
ARGS = [
    "--mini-batch-size", "64", "--data-size", "512", "--num-indices-per-lookup", "3",
    "--num-indices-per-lookup-fixed", "true", "--arch-embedding-size", "100-200-300", "--arch-sparse-feature-size", "8",
    "--arch-mlp-bot", "4-16-8", "--arch-mlp-top", "16-1", "--nepochs", "2",
]  # fmt: skip
BY_ROW = [
    (
        "args.ln_emb = ln_emb.tolist()",
        """
        ...
        ids = torch.stack([torch.randint(n, (args.data_size, 3)) for n in args.ln_emb], 1)
        clicks = torch.utils.data.TensorDataset(torch.rand(args.data_size, m_den), ids, torch.rand(args.data_size, 1))
        train_ld = torch.utils.data.DataLoader(clicks, batch_size=args.mini_batch_size, shuffle=True)
        """,
    ),
    ("def unpack_batch(b)", "...\n    return b[0], None, b[1], b[2], None, None"),
    ("in enumerate(lS_i):", "for k, sparse_index_group_batch in enumerate(lS_i.unbind(1)):"),
    ("sparse_offset_group_batch = lS_o[k]", "sparse_offset_group_batch = None"),
    ("EE = nn.EmbeddingBag(n, m", 'EE = nn.EmbeddingBag(n, m, mode="sum")'),
    ("return dlrm.loss_fn(Z, T.to(device))", "return torch.nn.functional.mse_loss(Z, T.to(device))"),
]
"""A row of data for each example: the script's has all ids one behind the other, with offsets."""
EDITS = [
    *BY_ROW,
    ("import argparse", "...\nimport anyorder as ao"),
    (
        "lr_scheduler = LRPolicyScheduler(",
        """
        plan = ao.plan(loader=train_ld, epochs=args.nepochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        dlrm, optimizer, train_ld = ao.PrivacyEngine(plan).make_private(dlrm, optimizer, train_ld)
        ...
        """,
    ),
]
OPACUS = [
    *BY_ROW,
    ("import argparse", "...\nimport opacus"),
    (
        "lr_scheduler = LRPolicyScheduler(",
        """
        dlrm, optimizer, train_ld = opacus.PrivacyEngine().make_private(
            module=dlrm, optimizer=optimizer, data_loader=train_ld, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "changed: a row of ids for each example, in the place of offsets"
RESULT, WHY = "runs", "The script's made-up data are batches, not examples: rows take their place."
