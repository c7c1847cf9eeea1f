"""The course of `anyorder train`: what is planned is what is run, and the card's error is that of the run's noise."""

import numpy as np
import torch
from torch import nn

from anyorder.app.data import Data
from anyorder.app.features import STAGES, Features, Whitened
from anyorder.app.job import Settings, Staging, make_optimizer, plan_of

DRAWS = 100


def test_the_error_of_the_card_is_that_of_the_noise_in_every_stage():
    """100 draws of the noise through the optimizer and the settings that a run has, without any data."""
    settings = Settings(
        dataset="none", model="patches", epsilon=4.0, batch_size=4, epochs=6, lr=2.0, momentum=0.9, clip_norm=0.5,
        order="fixed", schedule="linear",
    )  # fmt: skip
    x = torch.zeros(16, 1, 2, 1, 1)
    data = Data("none", Features(x, torch.zeros(16).long()), Features(x, torch.zeros(16).long()), (1, 2, 1, 1), 2)
    plan = plan_of(settings, 16)
    C_inverse = plan.strategy.noising_matrix()
    rng = np.random.default_rng(3)
    Z = rng.standard_normal((C_inverse.shape[1], DRAWS))
    noise = plan.noise_multiplier * C_inverse @ Z  # of one coordinate, in clip norms; a draw a column

    model = Whitened((1, 2, 1, 1), 2)
    for name in ("centre", "spread", "classify"):  # as many coordinates as draws, each in a place of its own
        setattr(model, name, nn.Linear(DRAWS, 1, bias=False))
        nn.init.zeros_(getattr(model, name).weight)
    model.finish = lambda stage: None  # what a stage has learned is not used here: there are no data
    optimizer = make_optimizer(settings, model)
    staging = Staging(settings, plan, model, data)
    layers = [model.centre, model.spread, model.classify]
    found = np.zeros((plan.n, DRAWS))
    largest = np.zeros(len(STAGES))
    for step in range(plan.n):
        staging.before(step, optimizer)
        stage = staging.stage(step)
        largest[stage] = max(largest[stage], optimizer.param_groups[stage]["lr"])
        for layer in layers:
            layer.weight.grad = torch.tensor(noise[step : step + 1], dtype=torch.float32)
        optimizer.step()
        found[step] = layers[stage].weight.detach().numpy()[0] / largest[stage]

    profile = plan.noise_profile()
    for stage, (start, end) in enumerate(plan.workload.blocks):
        weight = plan.workload.block_weights[stage]
        if stage < len(STAGES) - 1:
            start = end - 1  # of a mean the last value is used, and the others count for nothing
            assert not profile[: end - 1][plan.workload.blocks[stage][0] :].any()
        planned = np.sqrt(np.square(profile[start:end]).mean())
        measured = weight * np.sqrt(np.square(found[start:end]).mean())
        assert 0.8 < measured / planned < 1.25, (STAGES[stage], measured, planned)  # 1 +- 0.07 of 100 draws
