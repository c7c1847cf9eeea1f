"""An ordinary training loop made private: digits, any order, exact epsilon.

Run: python examples/loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao

EPOCHS = 10


def main() -> None:
    """Train, evaluate, and write the certificate."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    train_set = TensorDataset(x[:1500], y[:1500])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    # Shuffled once, the same order in every epoch: the least noise that a loader can have.
    loader = DataLoader(train_set, batch_size=100, sampler=ao.FixedOrderSampler(train_set))

    plan = ao.plan(loader=loader, epochs=EPOCHS, epsilon=8, delta=1e-5, clip_norm=1.0, optimizer=ao.SGD(momentum=0.9))
    print(plan)
    engine = ao.PrivacyEngine(plan)
    model, optimizer, loader = engine.make_private(model, optimizer, loader)

    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    model.eval()
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"\ntest accuracy {accuracy:.3f}")
    engine.certificate().save("digits.privacy.json")
    print("wrote digits.privacy.json; check it with: anyorder verify digits.privacy.json")


if __name__ == "__main__":
    main()
