"""Text by its speakers: each of them is a user, protected as a whole, in a simulated federation.

    python examples/speakers.py                        # made-up speakers
    python examples/speakers.py FOLDER [ROUNDS]        # Parquet files with the columns "speaker" and "text"

What `users` returns is what `anyorder federated --dataset speakers:users` takes.
"""

import sys

import numpy as np
import torch
from torch import nn

import anyorder as ao
from anyorder.app import by_key
from anyorder.federated import CheckIn, LocalTraining, Server, simulate
from anyorder.participation import MinSeparation

LETTERS, LENGTH = " abcdefghijklmnopqrstuvwxyz", 16  # all else is a space


class NextLetter(nn.Module):
    """Scores of the next letter at each place, from the three letters before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 8)
        self.mix = nn.Conv1d(8, 32, 3)
        self.out = nn.Linear(32, len(LETTERS))

    def forward(self, x):
        before = nn.functional.pad(self.embed(x).transpose(1, 2), (2, 0))
        return self.out(torch.tanh(self.mix(before)).transpose(1, 2))


def speeches(folder=None):
    """Rows {"speaker": .., "text": ..}."""
    if folder is not None:
        from datasets import load_dataset

        return list(load_dataset(str(folder))["train"])
    rng = np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "nobler", "in", "mind", "suffer"]
    said = ((f"speaker {i}", " ".join(rng.choice(words, 60))) for i in range(160))
    return [{"speaker": speaker, "text": text} for speaker, text in said]


def pairs(text):
    """(x, y): runs of LENGTH letters, and the letters that follow each; what is left over at the end is dropped."""
    known = [max(0, LETTERS.find(letter)) for letter in text.lower()]
    runs = torch.tensor(known[: (len(known) - 1) // LENGTH * LENGTH + 1])
    return runs[:-1].view(-1, LENGTH), runs[1:].view(-1, LENGTH)


def users(folder=None):
    """({speaker: (x, y)}, (x, y) of every tenth speaker, who is nobody's user, a maker of models)."""
    rows = speeches(folder)
    spoken = {
        speaker: pairs(" ".join(rows[i]["text"] for i in places))
        for speaker, places in by_key(row["speaker"] for row in rows).items()
    }
    spoken = {speaker: pair for speaker, pair in spoken.items() if len(pair[0])}
    held_out = list(spoken)[::10]
    x, y = (torch.cat([spoken[speaker][part] for speaker in held_out]) for part in (0, 1))
    return {speaker: spoken[speaker] for speaker in spoken if speaker not in held_out}, (x, y), NextLetter


def loss(output, target):
    """Mean over all letters."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def main(folder=None, rounds="40"):
    torch.manual_seed(0)
    speakers, (x, y), make_model = users(folder)
    goal, rounds = max(1, len(speakers) // 10), int(rounds)
    timer = CheckIn(hours=9, spread=3)
    apart = timer.separation(rounds, len(speakers), cohort=goal, report_goal=goal)
    plan = ao.plan(
        order=MinSeparation(rounds, apart), batch_size=goal, epsilon=8, delta=1e-5, mechanism="blt",
        clip_norm=0.3, optimizer=ao.SGD(momentum=0.9), unit="user",
    )  # fmt: skip
    model = make_model()
    server = Server(plan, model, ao.FTRL(model.parameters(), lr=1.0, momentum=0.9))
    result = simulate(server, speakers, LocalTraining(loss, lr=0.5, batch_size=4), availability=timer)
    right = (model(x).argmax(-1) == y).float().mean().item()
    print(f"{len(speakers)} speakers, {result.rounds} rounds of {goal}: {100 * right:.1f} % of the next letters")
    print(f"epsilon for one speaker: {result.planned_epsilon:.3g} as planned, {result.realised_epsilon:.3g} as it came")
    server.certificate().save("run.privacy.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
