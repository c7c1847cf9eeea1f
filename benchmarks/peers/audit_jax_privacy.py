"""A linear model trained with jax_privacy, to be attacked. Runs in an environment of its own; prints its claim as JSON.

    audit_jax_privacy.py SETTINGS_AND_COINS.npz OUTPUT.npz

The gradient of an example is the example itself: 1 in coordinate i if the coin of i says so, else zero. With Keras
(`keras_api.DPKerasConfig`, its defaults, noise calibrated by it to the epsilon that is asked for):

    sequential   fit(shuffle=False)
    shuffled     fit(), as Keras does it: shuffled anew in every epoch; the order as NumPy's global generator gave it
    poisson      fit(), poisson_sampling_in_fit=True

With `BandMFExecutionPlanConfig`, the loop of its documentation:

    plan         one band: DP-SGD with Poisson sampling
    cyclic       four bands, its strategy, cyclic Poisson sampling

With the functions, as in `examples/jax_api_example.py`, which adds the noise of a sum to a mean:

    example      batches of a shuffled set; noise calibrated for Poisson sampling; sensitivity of replace-one

The output holds what every step released (in units of the clip norm), C where noise is correlated, and, where it is
fixed, what is known of the steps of each example: `steps` (sequential, shuffled), `group` (cyclic).
"""

import copy
import json
import os
import secrets
import sys
from importlib.metadata import version

os.environ["KERAS_BACKEND"] = "jax"

import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy
import keras
import numpy as np
from jax_privacy import batch_selection, keras_api, noise_addition
from jax_privacy.accounting.accountants import PldAccountantConfig
from jax_privacy.accounting.analysis import DpParams, DpsgdTrainingAccountant
from jax_privacy.accounting.calibrate import calibrate_noise_multiplier
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig

BANDS = 4


def main(source: str, target: str) -> None:
    """Train and write."""
    given = np.load(source)
    task, coins = json.loads(str(given["task"])), given["coins"]
    train = {"plan": with_plan, "cyclic": with_plan, "example": as_example}.get(task["order"], with_keras)
    found, said = train(np.diag(coins.astype(np.float32)), task)
    np.savez(target, **found)
    print(json.dumps({"version": version("jax-privacy"), "bands": BANDS} | said))


def with_keras(x: np.ndarray, task: dict) -> tuple[dict, dict]:
    """A model of Keras, made private, fitted."""
    size, batch, epochs, order = len(x), task["batch_size"], task["epochs"], task["order"]
    model = keras.Sequential(
        [keras.Input(shape=(size,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    config = keras_api.DPKerasConfig(
        epsilon=task["epsilon"], delta=task["deltas"][0], clipping_norm=1.0, batch_size=batch,
        gradient_accumulation_steps=1, train_steps=epochs * (size // batch), train_size=size,
        poisson_sampling_in_fit=order == "poisson", seed=secrets.randbelow(2**31),  # its own are refused where below 0
    )  # fmt: skip
    private = keras_api.make_private(model, config)
    sigma = private.get_noise_multiplier()
    private.compile(optimizer=keras.optimizers.SGD(1.0), loss=lambda _, out: -jnp.mean(out, axis=-1))
    seen, shuffles, permutation = Seen(), [], np.random.permutation

    def recorded(count: int) -> np.ndarray:
        shuffles.append(permutation(count))
        return shuffles[-1]

    np.random.permutation = recorded
    try:
        y = np.zeros((size, 1), np.float32)
        private.fit(x, y, batch_size=batch, epochs=epochs, shuffle=order != "sequential", verbose=0, callbacks=[seen])
    finally:
        np.random.permutation = permutation
    models = np.stack([np.zeros(size), *seen.models])
    found = {"released": np.diff(models, axis=0) * batch}
    if order != "poisson":
        epoch = size // batch
        orders = shuffles[-epochs:] if order == "shuffled" else [np.arange(size)] * epochs  # one before, to build it
        assert len(orders) == epochs, "Keras did not shuffle by numpy.random.permutation"
        places = [np.argsort(order) for order in orders]
        found["steps"] = np.stack([e * epoch + places[e] // batch for e in range(epochs)], axis=1)
    said = {str(delta): _epsilon(config, sigma, delta) for delta in task["deltas"]}
    return found, {"claimed": said, "noise_multiplier": sigma, "keras": version("keras")}


def _epsilon(config: keras_api.DPKerasConfig, sigma: float, delta: float) -> float:
    """What the configuration's accountant says of the run: at the first delta, at most what was asked for."""
    params = DpParams(noise_multipliers=sigma, batch_size=config.batch_size, num_samples=config.train_size, delta=delta)
    return float(config._accountant.compute_epsilon(config.train_steps, params))


class Seen(keras.callbacks.Callback):
    """Keeps the weights after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.models = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        del batch, logs
        self.model.jax_state_sync()
        self.models.append(np.asarray(self.model.trainable_variables[0].value)[:, 0].astype(float))


def with_plan(x: np.ndarray, task: dict) -> tuple[dict, dict]:
    """The loop of the documentation of `execution_plan`."""
    size, batch = len(x), task["batch_size"]
    bands = BANDS if task["order"] == "cyclic" else 1
    n = task["epochs"] * (size // batch)
    config = BandMFExecutionPlanConfig.default(
        num_bands=bands, iterations=n, epsilon=None, delta=None, noise_multiplier=task["noise_multiplier"],
        sampling_prob=batch * bands / size, normalize_by=batch,
    )  # fmt: skip
    plan = config.plan
    gradient = plan.clipped_grad(lambda w, row: -jnp.mean(row @ w), batch_argnums=1)
    weights, data = jnp.zeros(size), jnp.asarray(x)
    state, released, seed = plan.noise_addition_transform.init(weights), [], int.from_bytes(os.urandom(4))
    for which in plan.batch_selection_strategy.batch_iterator(size, rng=seed):
        padded = batch_selection.pad_to_multiple_of(which, 32) if len(which) else np.full(32, -1)
        summed = gradient(weights, data[padded], is_padding_example=jnp.asarray(padded == -1))
        private, state = plan.noise_addition_transform.update(summed, state)
        weights = weights - private
        released.append(np.asarray(-private * batch))
    accountant = copy.deepcopy(config.accountant).compose(plan.dp_event)
    found = {"released": np.stack(released)}
    if bands > 1:
        c = np.zeros(n)
        c[:bands] = np.asarray(config.strategy)
        found["strategy"] = np.array([[c[t - s] if t >= s else 0.0 for s in range(n)] for t in range(n)])
        dtype = np.min_scalar_type(-size)
        groups = batch_selection._equal_split_partition(size, bands, np.random.default_rng(seed), dtype)  # as it draws
        found["group"] = np.full(size, -1)
        for g, members in enumerate(groups):
            found["group"][members] = g
    said = {str(delta): float(accountant.get_epsilon(delta)) for delta in task["deltas"]}
    return found, {"claimed": said}


def as_example(x: np.ndarray, task: dict) -> tuple[dict, dict]:
    """The loop of the example, with a linear model."""
    size, batch, epochs = len(x), task["batch_size"], task["epochs"]
    n = epochs * (size // batch)
    accountant = DpsgdTrainingAccountant(dp_accountant_config=PldAccountantConfig())
    sigma = calibrate_noise_multiplier(
        target_epsilon=task["epsilon"], accountant=accountant, batch_sizes=batch, num_updates=n, num_samples=size,
        target_delta=task["deltas"][0],
    )  # fmt: skip
    gradient = jax_privacy.clipped_grad(lambda w, row: -jnp.mean(row @ w), l2_clip_norm=1.0, batch_argnums=1)
    sensitivity = gradient.sensitivity(dp_accounting.NeighboringRelation.REPLACE_ONE)
    privatizer = noise_addition.gaussian_privatizer(
        stddev=sigma * sensitivity, prng_key=jax.random.key(secrets.randbelow(2**31))
    )
    weights, data, rng = jnp.zeros(size), jnp.asarray(x), np.random.default_rng()
    state, released, steps = privatizer.init(weights), [], np.zeros((size, epochs), int)
    for epoch in range(epochs):
        for which in rng.permutation(size).reshape(-1, batch):
            steps[which, epoch] = len(released)
            mean = gradient(weights, data[which]) / batch
            private, state = privatizer.update(mean, state)
            weights = weights - private
            released.append(np.asarray(-private * batch))
    said = {}
    for delta in task["deltas"]:
        params = DpParams(noise_multipliers=sigma, batch_size=batch, num_samples=size, delta=delta)
        said[str(delta)] = float(accountant.compute_epsilon(n, params))
    found = {"released": np.stack(released), "steps": steps}
    return found, {"claimed": said, "noise_multiplier": sigma, "std": sigma * sensitivity * batch}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
