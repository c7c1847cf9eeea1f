"""Skip-grams in batches that are drawn at random in each step."""

REPOSITORY, COMMIT = "https://github.com/graykode/nlp-tutorial", "d05e31ec81d56d70c1db89b99ab07e948f7ebc11"
SCRIPT = "1-2.Word2Vec/Word2Vec-Skipgram(Softmax).py"
ARGS: list[str] = []
HERE = [("for epoch in range(5000)", "for epoch in range(48):")]
_LOADER = """
x = torch.eye(voc_size)[[pair[0] for pair in skip_grams]]
pairs = torch.utils.data.TensorDataset(x, torch.tensor([pair[1] for pair in skip_grams]))
loader = torch.utils.data.DataLoader(pairs, batch_size=batch_size, shuffle=True)
"""
_LOOP = """
batches = (batch for _ in range(3) for batch in loader)
...
    input_batch, target_batch = next(batches)
"""
_BATCHES = [
    ("input_batch, target_batch = random_batch()", ""),
    ("input_batch = torch.Tensor(input_batch)", ""),
    ("target_batch = torch.LongTensor(target_batch)", ""),
]
EDITS = [
    *_BATCHES,
    ("import torch.nn as nn", "...\nimport anyorder as ao"),
    (
        "for epoch in range(",
        _LOADER
        + """
plan = ao.plan(loader=loader, epochs=3, epsilon=8, delta=1e-5, optimizer=optimizer)
model, optimizer, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader)
"""
        + _LOOP,
    ),
]
OPACUS = [
    *_BATCHES,
    ("import torch.nn as nn", "...\nimport opacus"),
    (
        "for epoch in range(",
        _LOADER
        + """
model, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
"""
        + _LOOP,
    ),
]
MODEL = "untouched"
RESULT = "runs"
WHY = "a pair of words is the unit, and a word is in several pairs; a pass takes the place of draws of its own"
