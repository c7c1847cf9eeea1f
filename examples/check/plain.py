"""A training without privacy: clipping the gradient of a whole batch is not clipping each example."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(200, 10)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=20, shuffle=True)
model = torch.nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, labels in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
