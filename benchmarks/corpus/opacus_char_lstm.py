"""Opacus' own classifier of names: an LSTM over letters, padded to the longest name of a batch."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/opacus", "4d0ebc84613d214fbfd37fbfd1390e3747a625ce"
SCRIPT = "examples/char-lstm-classification.py"
ARGS = ["--device", "cpu", "--data-root", "names", "-b", "64", "--epochs", "2", "--disable-dp"]
HERE = [("rnn_type = DPLSTM", "rnn_type = nn.LSTM")]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        'print(f"Train stats',
        """
        plan = ao.plan(loader=train_loader, epochs=args.epochs, noise_multiplier=args.sigma, delta=args.delta,
                       clip_norm=args.max_per_sample_grad_norm, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        model, optimizer, train_loader = engine.make_private(model, optimizer, train_loader, pad_to=(8, 16, 24))
        ...
        """,
    ),
]
OPACUS = [("rnn_type = nn.LSTM", "rnn_type = DPLSTM"), ("args = parser.parse_args()", "...\nargs.disable_dp = False")]
MODEL = "untouched"
RESULT, WHY = (
    "runs",
    "padded to public lengths: the longest of a batch would change the others",
)


def stand_in(folder: Path) -> None:
    (folder / "names").mkdir()
    for language in ("one", "two", "three"):
        (folder / "names" / f"{language}.txt").write_text("\n".join(_made_up.words(120, language)))
