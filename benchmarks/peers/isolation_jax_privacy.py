"""The steps of a loop by jax_privacy's clipped_grad, with its defaults. Runs in an environment of its own.

Requests and answers are pickles on standard input and output: `begin`, then for each step `sum` and `update`. The loss
is written for a batch, as the loops of benchmarks/isolation.py are; `clipped_grad` calls it on one example at a time.
"""

import pickle
import sys
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.clipping import clipped_grad

RATE = 0.5


def outputs(params: dict, x: jax.Array, kind: str, key: jax.Array, longest: int) -> jax.Array:
    """Logits (B, classes)."""
    if kind == "flat":
        return x @ params["w"] + params["b"]
    if kind == "mlp":
        return jnp.tanh(x @ params["v"] + params["c"]) @ params["w"] + params["b"]
    h = params["embed"][x]
    if kind == "dropout":
        h = h * jax.random.bernoulli(key, 0.5, h.shape) * 2
    h = h * (x > 0)[..., None]
    h = h.mean(1) * 10 if kind == "mean" else h.sum(1) / (longest if kind == "longest" else 1)
    return h @ params["w"] + params["b"]


def loss(params: dict, x: jax.Array, y: jax.Array, key: jax.Array, loop: dict, longest: int) -> jax.Array:
    """Of a batch."""
    each = optax.softmax_cross_entropy_with_integer_labels(
        loop["scale"] * outputs(params, x, loop["kind"], key, longest), y
    )
    if loop["hardest"]:
        each = each * (jax.lax.stop_gradient(each) / jnp.nan_to_num(jax.lax.stop_gradient(each)).max()) ** 4 * 100
    return each.mean()


class Run:
    """A loop's state in this process."""

    def __init__(self, loop: dict[str, Any], params: dict[str, np.ndarray]) -> None:
        self.loop, self.params, self.longest, self.steps = loop, jax.tree.map(jnp.asarray, params), 0, 0
        self.optimizer = {
            "sgd": lambda: optax.with_extra_args_support(optax.sgd(RATE)),
            "plateau": lambda: optax.chain(
                optax.sgd(RATE), optax.contrib.reduce_on_plateau(factor=0.1, patience=1, rtol=0.0, atol=1.0)
            ),
            "polyak": lambda: optax.polyak_sgd(max_learning_rate=10.0),
        }[loop["optimizer"]]()
        self.state = self.optimizer.init(self.params)
        self.value = 0.0

    def sum(self, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
        """The clipped sum of a batch."""
        self.longest = max(self.longest, x.shape[1])
        gradient = clipped_grad(
            lambda p, x, y, key: loss(p, x, y, key, self.loop, self.longest),
            l2_clip_norm=self.loop["clip_norm"], batch_argnums=(1, 2), return_values=True, prng_argnum=3,
        )  # fmt: skip
        sums, told = gradient(self.params, jnp.asarray(x), jnp.asarray(y), jax.random.key(self.steps))
        self.value = told.values.mean()
        return {name: np.asarray(value) for name, value in sums.items()}

    def update(self, private: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A step of the optimizer; one that reads the loss is given it. The weights after it."""
        value = -self.value if self.loop["optimizer"] == "plateau" else self.value
        updates, self.state = self.optimizer.update(
            jax.tree.map(jnp.asarray, private), self.state, self.params, value=value
        )
        self.params, self.steps = optax.apply_updates(self.params, updates), self.steps + 1
        return {name: np.asarray(value) for name, value in self.params.items()}


def main() -> None:
    """Answer until the input ends."""
    run: Any = None
    pickle.dump({"jax_privacy": version("jax-privacy"), "jax": version("jax")}, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    while True:
        try:
            word, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if word == "begin":
            run = Run(*arguments)
        pickle.dump(None if word == "begin" else getattr(run, word)(*arguments), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
