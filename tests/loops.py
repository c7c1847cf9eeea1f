"""The training loop of most tests, as people write it."""

from torch import nn


def backward(model, batch):
    """Of the mean cross entropy of (inputs, classes)."""
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def train_to(until, engine, model, optimizer, loader, *, backward=backward, save_every=None):
    """Train to the given step, in as many epochs as that takes, and save on the way."""
    while engine.step < until:
        for batch in loader:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            if save_every and engine.step % save_every == 0:
                engine.save()
            if engine.step == until:
                break
