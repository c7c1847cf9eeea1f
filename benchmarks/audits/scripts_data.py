"""What public training scripts say of their loaders: facts read in their text, and nothing of it copied.

`path` is in the repository at the state of November 2026 or before. Sizes are of the data set that the script names, or
`ours` says what was chosen for it. Where a script trains without privacy, noise multiplier 1 and delta 1e-5 are taken;
where it asks for a target epsilon, the noise that its accountant gives for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.audits import loaders

__all__ = ["SCRIPTS", "Script"]


@dataclass(frozen=True)
class Script:
    """One loader.

    Attributes:
        repository, path: where it was read.
        pattern: one line.
        make: the loader, by its number of batches.
        batches: in an epoch of one process.
        epochs, steps: one of the two.
        accumulate: batches in a step.
        sigma: its noise multiplier; None for a target epsilon.
        target: its target epsilon.
        delta: its delta.
        is_private: whether the script claims privacy.
        ours: what was chosen here.
    """

    repository: str
    path: str
    pattern: str
    make: Callable[[int], Any]
    batches: int
    epochs: int | None = None
    steps: int | None = None
    accumulate: int = 1
    sigma: float | None = 1.0
    target: float | None = None
    delta: float = 1e-5
    is_private: bool = False
    ours: str = ""


def _private(
    repository: str, path: str, pattern: str, make: Callable[[int], Any], batches: int, **facts: Any
) -> Script:
    return Script(repository, path, pattern, make, batches, is_private=True, **facts)


_OPACUS, _TF, _EXAMPLES, _PYG = "pytorch/opacus", "tensorflow/privacy", "pytorch/examples", "pyg-team/pytorch_geometric"
_POISSON = "make_private, its own sampling"

SCRIPTS = (
    # with privacy
    _private(_OPACUS, "examples/mnist.py", _POISSON, loaders.poisson_of_opacus, 938, epochs=10),
    _private(_OPACUS, "examples/cifar10.py", _POISSON, loaders.poisson_of_opacus, 25, epochs=90, sigma=1.5),
    _private(_OPACUS, "examples/imdb.py", "shuffle=True, make_private(poisson_sampling=False)", loaders.shuffled, 391,
             epochs=10, sigma=0.56),
    _private(_OPACUS, "examples/dcgan.py", _POISSON + " (one digit of MNIST)", loaders.poisson_of_opacus, 92,
             epochs=25),
    _private(_OPACUS, "examples/char-lstm-classification.py", _POISSON, loaders.poisson_of_opacus, 21, epochs=10,
             delta=8e-5),
    _private(_OPACUS, "examples/mnist_lightning.py", "DPDataLoader, then make_private",
             loaders.poisson_of_opacus, 938,
             epochs=10),
    _private(_OPACUS, "examples/vision_benchmark.py", "no shuffle, make_private(poisson_sampling=False)",
             loaders.sequential, 100, epochs=1, ours="100 batches, one epoch"),
    _private(_OPACUS, "tutorials/building_image_classifier.ipynb", _POISSON + ", BatchMemoryManager",
             loaders.poisson_of_opacus, 98, epochs=20, sigma=None, target=50.0),
    _private(_OPACUS, "tutorials/building_lstm_name_classifier.ipynb", _POISSON, loaders.poisson_of_opacus, 21,
             epochs=50,
             sigma=None, target=12.0, delta=8e-5),
    _private("awslabs/fast-differential-privacy", "examples/image_classification/CIFAR_TIMM.py",
             "shuffle=True, 20 batches of 50 in a step", loaders.shuffled, 1000, epochs=3, accumulate=20, sigma=None,
             target=2.0),
    _private("lxuechen/private-transformers", "examples/table2text/trainer.py",
             "RandomSampler, 64 batches of 16 in a step",
             loaders.shuffled, 2629, epochs=10, accumulate=64, sigma=None, target=8.0, delta=8e-6),
    _private("microsoft/dp-transformers", "src/dp_transformers/dp_utils.py",
             "authors shuffled, the next example of each",
             loaders.by_authors, 15625, epochs=3, accumulate=4, sigma=None, target=8.0),
    _private("adap/flower", "examples/opacus/opacus_fl/client_app.py", _POISSON + ", in each round",
             loaders.poisson_of_opacus,
             625, epochs=3, ours="two clients of 20 000, three rounds as one run"),
    _private(_TF, "tutorials/mnist_dpsgd_tutorial.py", "shuffle of all, repeated, then batched", loaders.endless, 235,
             steps=7031, sigma=1.1),
    _private(_TF, "tutorials/mnist_dpsgd_tutorial_eager.py", "buffer of 1000, batched", loaders.buffered, 240,
             epochs=60,
             sigma=1.1),
    _private(_TF, "tutorials/mnist_dpsgd_tutorial_vectorized.py", "shuffle of all, repeated, then batched",
             loaders.endless,
             300, steps=18000, sigma=1.1),
    _private(_TF, "research/GDP_2019/adult_tutorial.py", "a draw for each example in each step, by hand",
             loaders.poisson_by_hand, 114, epochs=20, sigma=0.55),
    _private(_TF, "tutorials/movielens_tutorial.py", "a draw for each example in each step, by hand",
             loaders.poisson_by_hand, 80, epochs=25, sigma=0.55, delta=1e-6),
    _private("google-deepmind/jax_privacy", "examples/keras_api_example.py", "poisson_sampling_in_fit=True",
             loaders.poisson_by_hand, 117, epochs=5, sigma=None, target=1.1),
    # without
    Script(_EXAMPLES, "mnist/main.py", "shuffle=True", loaders.shuffled, 938, epochs=14),
    Script(_EXAMPLES, "mnist_rnn/main.py", "shuffle=True", loaders.shuffled, 938, epochs=14),
    Script(_EXAMPLES, "imagenet/main.py", "shuffle=True on one GPU", loaders.shuffled, 5005, epochs=90),
    Script(_EXAMPLES, "imagenet/main.py", "DistributedSampler, eight GPUs", loaders.dealt_out, 5005, epochs=90),
    Script(_EXAMPLES, "word_language_model/main.py", "pieces of text in turn, the same in each epoch",
           loaders.listed, 2984,
           epochs=40),
    Script(_EXAMPLES, "dcgan/main.py", "shuffle=True", loaders.shuffled, 782, epochs=25, ours="on CIFAR-10"),
    Script(_EXAMPLES, "vae/main.py", "shuffle=True", loaders.shuffled, 469, epochs=10),
    Script(_EXAMPLES, "super_resolution/main.py", "shuffle=True", loaders.shuffled, 4, epochs=2),
    Script(_EXAMPLES, "fast_neural_style/neural_style/neural_style.py", "no shuffle", loaders.sequential,
           20696, epochs=2,
           ours="on COCO 2014"),
    Script(_EXAMPLES, "distributed/ddp-tutorial-series/multigpu.py", "DistributedSampler, set_epoch",
           loaders.dealt_out_evenly, 8, epochs=3, ours="eight GPUs, three epochs"),
    Script("karpathy/nanoGPT", "train.py", "random windows, 480 in a step", loaders.with_replacement, 18383,
           steps=600_000,
           ours="a window is the unit, and none overlap"),
    Script("karpathy/minGPT", "mingpt/trainer.py", "RandomSampler(replacement=True, num_samples=10^10)",
           loaders.ten_billion_draws, 156_250_000, steps=5000, ours="10 000 examples, 5000 steps"),
    Script("pytorch/vision", "references/classification/train.py", "DistributedSampler, eight GPUs",
           loaders.dealt_out, 5005,
           epochs=90),
    Script("pytorch/vision", "references/detection/group_by_aspect_ratio.py", "batches of one shape, filled up",
           loaders.grouped, 7330, epochs=3, ours="on COCO, 16 in a batch, three epochs"),
    Script("facebookresearch/detectron2", "detectron2/data/samplers/distributed_sampler.py", "shuffles without end",
           loaders.endless, 7330, steps=40_000),
    Script("facebookresearch/deit", "samplers.py", "a third of the data, each three times in a step",
           loaders.repeated_thrice, 2502, epochs=300),
    Script("facebookresearch/mae", "main_pretrain.py", "DistributedSampler, drop_last", loaders.dealt_out_evenly, 312,
           epochs=400, ours="4096 in a step"),
    Script("huggingface/pytorch-image-models", "train.py", "shuffle=True, drop_last",
           loaders.shuffled_and_dropped, 2502,
           epochs=300, ours="four GPUs as one"),
    Script("kuangliu/pytorch-cifar", "main.py", "shuffle=True", loaders.shuffled, 391, epochs=200),
    Script("ultralytics/yolov5", "utils/dataloaders.py",
           "a loader of its own that never ends, 4 batches of 16 in a step",
           loaders.own_loader, 7393, epochs=100, accumulate=4),
    Script("facebookresearch/fairseq", "fairseq/data/iterators.py", "batches by length, their order shuffled",
           loaders.frozen_batches, 1100, epochs=50, ours="1100 batches, 50 epochs"),
    Script(_PYG, "examples/reddit.py", "a loader of its own (a node, and its neighbours)", loaders.own_loader, 150,
           epochs=10),
    Script(_PYG, "examples/mutag_gin.py", "shuffle=True", loaders.shuffled, 2, epochs=100),
    Script(_PYG, "examples/proteins_topk_pool.py", "no shuffle", loaders.sequential, 17, epochs=200),
    Script(_PYG, "examples/cluster_gcn_reddit.py", "clusters shuffled", loaders.shuffled, 75, epochs=30,
           ours="a cluster is the unit"),
    Script("facebookresearch/dlrm", "dlrm_data_pytorch.py", "no shuffle, one epoch", loaders.sequential,
           306_969, epochs=1,
           ours="128 in a batch"),
    Script("facebookresearch/dlrm", "dlrm_data_pytorch.py", "batches of a file, shuffled",
           loaders.shuffled_batches, 306_969,
           epochs=1, ours="128 in a batch"),
    Script("huggingface/transformers", "examples/pytorch/language-modeling/run_clm_no_trainer.py", "shuffle=True",
           loaders.shuffled, 290, epochs=3, ours="on WikiText-2"),
    Script("pytorch/torchtitan", "torchtitan/components/data/sources.py", "a stream", loaders.stream, 0,
           steps=10_000),
)  # fmt: skip
