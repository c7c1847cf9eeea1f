"""Steps of tensorflow_privacy's AdaFEST, "sparsity-preserving noise" [Ghazi et al. 2023]. Prints them as JSON.

    python wide_tensorflow.py adafest|dense|plain ROWS BATCH STEPS

adafest: `DPModel` with its fast clipping and noise on the rows that it selects; dense: the same without selection;
plain: Keras alone, without privacy. In its favour: the graph is compiled (by XLA, where it can be: not with selection),
and the batches are tensors already.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
from tensorflow_privacy.privacy.keras_models import dp_keras_model
from tensorflow_privacy.privacy.sparsity_preserving_noise import layer_registry as selection_registry
from wide_task import CLIP, IDS, LR, NOISE, WARM, WIDTH, Clock, batches

THRESHOLD, SHARE = 4, 0.3  # of the noise, as the package splits it


def main() -> None:
    kind, rows, batch, steps = sys.argv[1], *(int(word) for word in sys.argv[2:])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    ids = tf.constant(batches(rows, batch, WARM + steps), tf.int32)
    clock = Clock(WARM)
    made = model(kind, rows)
    keras = tf.keras.optimizers if kind == "dense" else tf.keras.optimizers.legacy  # whichever is the faster one
    made.compile(keras.SGD(LR), loss=tf.keras.losses.BinaryCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices(ids).map(lambda x: (x, tf.one_hot(tf.zeros(batch, tf.int32), IDS - 1)))
    made.fit(data, epochs=1, verbose=0, callbacks=[Ticks(clock)])
    clock.report()


class Ticks(tf.keras.callbacks.Callback):
    """Tells the clock of each step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.clock.tick()


def model(kind: str, rows: int) -> tf.keras.Model:
    inputs = tf.keras.Input((IDS,), dtype=tf.int32)
    read = tf.keras.layers.Embedding(rows, WIDTH)(inputs)
    logits = tf.keras.layers.Lambda(lambda e: tf.einsum("bd,bnd->bn", e[:, 0], e[:, 1:]))(read)
    if kind == "plain":
        return tf.keras.Model(inputs, logits)
    config = None
    if kind == "adafest":
        config = dp_keras_model.SparsityPreservingDPSGDConfig(
            sparse_selection_privacy_budget_fraction=SHARE, sparse_selection_threshold=THRESHOLD,
            sparse_selection_layer_registry=selection_registry.make_default_layer_registry(),
        )  # fmt: skip
    return dp_keras_model.DPModel(
        l2_norm_clip=CLIP, noise_multiplier=NOISE, layer_registry=layer_registry.make_default_layer_registry(),
        sparsity_preserving_dpsgd_config=config, use_xla=kind == "dense",
        inputs=inputs, outputs=logits,
    )  # fmt: skip


if __name__ == "__main__":
    main()
