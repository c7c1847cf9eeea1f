"""Files, logs and results of a private Trainer, and what its schedule goes by, are functions of settings and releases.

The pair: one table of texts, and the same with one text replaced by a longer one. Both are trained with one key; what
is compared is all that is shown beside the weights.
"""

import json
import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import anyorder as ao
from anyorder.errors import ArgumentError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from training.test_huggingface import B, N, bert, planned, trainer, weights  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate


class Texts(Dataset):
    def __init__(self, replaced=False):
        self.lengths = [4 + i % 3 for i in range(N)]
        self.lengths[5] = 12 if replaced else 5

    def __len__(self):
        return N

    def __getitem__(self, i):
        ids = torch.arange(self.lengths[i]) * (i + 1) % 20
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.sum() % 2}


def padded(rows):
    by_name = {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}
    batch = {name: pad_sequence(texts, batch_first=True) for name, texts in by_name.items()}
    return {**batch, "labels": torch.stack([row["labels"] for row in rows])}


class Draws(transformers.TrainerCallback):
    """A loop in which a text's length decides how many random numbers are drawn, as dropout does."""

    def __init__(self, data):
        self.data = data

    def on_step_end(self, args, state, control, **kwargs):
        torch.rand(sum(self.data.lengths))


def texts(folder, data=None, *, callbacks=None, public=False, **options):
    """A Trainer on texts of several lengths."""
    private = {"pad_to": (6, 12), "public_evaluation": public}
    data = data or Texts()
    return trainer(bert(), data, folder, private=private, data_collator=padded, callbacks=callbacks, **options)


def shown(folder, replaced):
    data = Texts(replaced)
    run = texts(folder, data, save_strategy="epoch", callbacks=[Draws(data)])
    result = run.train()
    run.save_metrics("train", result.metrics)
    run.save_state()
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith(("_privacy", "._privacy", ".")):
            files[str(path.relative_to(folder))] = path
    return run, result, files


OF_RELEASES = ("model.safetensors", "optimizer.pt", "training_args.bin")  # the last has the folder's name


def test_all_that_is_shown_is_the_same_for_neighbours(tmp_path):
    """Counts of operations, rates and the state of generators stood in files that are shown."""
    runs = [shown(tmp_path / name, name == "replaced") for name in ("one", "replaced")]
    (run, result, files), (other, of_other, files_of_other) = runs
    assert not torch.equal(weights(run.model), weights(other.model))  # or the pair shows nothing
    assert files.keys() == files_of_other.keys()
    compared = set()
    for name, path in files.items():
        if not name.endswith(OF_RELEASES):
            own, others = _without_seconds(path), _without_seconds(files_of_other[name])
            assert own == others, name
            compared.add(path.name)
    assert {"train_results.json", "all_results.json", "trainer_state.json", "scheduler.pt"} <= compared
    assert "rng_state.pth" not in compared
    assert result.metrics.keys() == of_other.metrics.keys() == {"train_runtime"}
    assert isinstance(result.metrics["train_runtime"], int)
    assert run.state.total_flos == other.state.total_flos == 0
    assert [line.keys() for line in run.state.log_history] == [line.keys() for line in other.state.log_history]


def _without_seconds(path):
    if path.suffix != ".json":
        return path.read_bytes()
    text = json.loads(path.read_text())
    for line in [text, *text.get("log_history", [])]:
        assert isinstance(line.pop("train_runtime", 0), int)
    return text


def test_a_state_that_a_new_release_has_is_not_shown_unless_it_is_known(tmp_path):
    run = texts(tmp_path)
    run.train()
    run.state.num_input_tokens_seen, run.state.total_flos = 1234, 99.0
    run.save_state()
    found = json.loads((tmp_path / "trainer_state.json").read_text())
    assert (found["num_input_tokens_seen"], found["total_flos"]) == (0, 0)


def test_what_code_of_ones_own_logs_is_left_out_unless_it_is_public(tmp_path):
    run = texts(tmp_path)
    run.train()
    run.log({"entropy": 1.5, "grad_norm": 2.0, "eval_loss": 3.0, "told": ao.Public(0.5), "learning_rate": 0.1})
    assert run.state.log_history[-1].keys() == {"told", "learning_rate", "epoch", "step"}


GREEDY = [] if "greedy" not in {one.value for one in transformers.SchedulerType} else [{"lr_scheduler_type": "greedy"}]
BY_METRICS = [
    {"eval_strategy": "epoch"},
    {"metric_for_best_model": "loss"},
    {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    *({**later, "eval_strategy": "epoch"} for later in GREEDY),  # of later releases
]


@pytest.mark.parametrize("options", BY_METRICS)
def test_what_goes_by_a_metric_is_refused_unless_it_is_public(options, tmp_path):
    with pytest.raises(ArgumentError, match="public_evaluation=True"):
        texts(tmp_path, **options)
    texts(tmp_path, public=True, **options)


def test_stopping_early_is_refused_however_it_comes(tmp_path):
    stop = transformers.EarlyStoppingCallback()
    with pytest.raises(ArgumentError, match="EarlyStoppingCallback"):
        texts(tmp_path, callbacks=[stop])
    run = texts(tmp_path)
    run.add_callback(stop)
    with pytest.raises(ArgumentError, match="EarlyStoppingCallback"):
        run.train()
    assert run.engine is None


def test_evaluation_is_of_public_data_alone(tmp_path):
    run = texts(tmp_path)
    with pytest.raises(ArgumentError, match="public_evaluation=True"):
        run.evaluate()
    assert run.state.log_history == []


def test_a_plateau_of_a_public_evaluation_sets_the_rate(tmp_path):
    run = texts(
        tmp_path, public=True, eval_strategy="steps",
        eval_steps=1, lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="loss",
        lr_scheduler_kwargs={"patience": 0, "threshold": 1e9},
    )  # fmt: skip
    run.train()
    rates = [line["learning_rate"] for line in run.state.log_history if "learning_rate" in line]
    assert rates[-1] < rates[0]
    assert run.engine.step == math.ceil(N / B) * 2 == planned().n


class StopsBelow(transformers.TrainerCallback):
    """Stops at the first logged loss, if it is public."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            assert isinstance(logs["loss"], ao.Public)
            control.should_training_stop = True


def test_a_released_loss_is_logged_returned_and_may_stop_the_training(tmp_path):
    private = {"pad_to": (6, 12), "released": ao.Metrics({"loss": 2.0}, share=0.3)}
    run = trainer(bert(), Texts(), tmp_path / "whole", private=private, data_collator=padded, logging_steps=2)
    result = run.train()
    metrics, logged = run.engine.metrics, [row["loss"] for row in run.state.log_history if "loss" in row]
    values = metrics.values("loss")
    assert metrics.steps == run.engine.step
    assert logged == pytest.approx([sum(values[i : i + 2]) / 2 for i in range(0, 2 * len(logged), 2)])
    assert len(logged) >= 2
    assert result.metrics["train_loss"] == pytest.approx(metrics.mean("loss"))
    run = trainer(
        bert(), Texts(), tmp_path / "stopped", private=private, data_collator=padded, logging_steps=2,
        callbacks=[StopsBelow()],
    )  # fmt: skip
    run.train()
    assert run.engine.step == 2


def test_other_metrics_are_measured_by_a_method(tmp_path):
    from anyorder.training.trainers.huggingface import PrivateTrainer

    class Right(PrivateTrainer):
        def example_metrics(self, outputs, labels, losses):
            return {"loss": losses, "right": outputs["logits"].argmax(1) == labels}

    private = {"pad_to": (6, 12), "released": ao.Metrics({"loss": 2.0, "right": 1.0})}
    run = trainer(bert(), Texts(), tmp_path, private=private, data_collator=padded, logging_steps=1, kind=Right)
    run.train()
    assert all(row["right"] for row in run.state.log_history if "loss" in row)
    with pytest.raises(ArgumentError, match="loss, right"):
        trainer(bert(), Texts(), tmp_path / "two", private=private, data_collator=padded).train()
