"""Lightning hands its closure's loss to nobody, and logs, stops and schedules by what is said to be public alone."""

import warnings

import pytest
import torch
from torch import nn

import anyorder as ao
from anyorder.errors import ArgumentError, OptimizerWarning, TrainingError

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from anyorder.training.trainers.lightning import PrivacyCallback  # noqa: E402
from training.test_boundary import Polyak  # noqa: E402
from training.test_lightning import EPOCHS, KEY, STEPS, Module, loader, planned, trainer, weights  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on workers, loggers and pytrees
]


class Logging(Module):
    """Logs what most modules do; its plateau goes by `monitor`."""

    def __init__(self, monitor=None, optimizer=None):
        super().__init__()
        self.monitor, self.optimizer = monitor, optimizer

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": loss * 2, "rate": 0.5})
        self.log("told", ao.Public(0.25))
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", super().training_step(batch, index))

    def configure_optimizers(self):
        optimizer = (
            torch.optim.SGD(self.parameters(), lr=0.5) if self.optimizer is None else self.optimizer(self.parameters())
        )
        if self.monitor is None:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


def fit(folder, module, *, public=(), callbacks=(), **options):
    privacy = PrivacyCallback(planned(), network="net", key=KEY, public_metrics=public)
    module, batches = privacy.make_private(module, loader())
    run = trainer(privacy, folder, **{"num_sanity_val_steps": 0, **options, "callbacks": [privacy, *callbacks]})
    run.fit(module, batches, torch.utils.data.DataLoader(loader().dataset, batch_size=30))
    return privacy, module, run


def test_a_polyak_step_is_refused(tmp_path):
    """Lightning hands every optimizer a closure with the loss: the weights had it, to the last bit."""
    with pytest.raises(TrainingError, match="reads the loss"):
        fit(tmp_path, Logging(optimizer=Polyak))


def test_metrics_that_nobody_said_are_public_are_not_logged(tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", OptimizerWarning)
        privacy, module, run = fit(tmp_path, Logging(), public=["val_loss", "rate"])
    assert privacy.engine.step == EPOCHS * STEPS
    assert run.logged_metrics.keys() == {"val_loss", "rate", "told"}
    assert run.callback_metrics.keys() == {"val_loss", "rate", "told"}
    ours = [str(one.message) for one in told if one.category is OptimizerWarning]
    assert len(ours) == 2  # each name once
    assert ["'train_loss'" in ours[0], "'accuracy'" in ours[1]] == [True, True]


def test_files_of_a_logger_have_public_numbers_alone(tmp_path):
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    fit(tmp_path, Logging(), public=["val_loss"], logger=logger, log_every_n_steps=1)
    [path] = tmp_path.rglob("metrics.csv")
    names = set(path.read_text().splitlines()[0].split(","))
    assert names <= {"epoch", "step", "told", "val_loss"}
    assert "told" in names


@pytest.mark.parametrize("monitor", ["train_loss", "train_loss_epoch", "val_loss"])
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "EarlyStopping", "plateau"])
def test_what_monitors_a_metric_is_refused_unless_it_is_public(kind, monitor, tmp_path):
    before = weights(Module())

    def parts():
        if kind == "plateau":
            return Logging(monitor), []
        return Logging(), [getattr(lightning.pytorch.callbacks, kind)(monitor=monitor)]

    module, callbacks = parts()
    with pytest.raises(ArgumentError, match="nobody said that it is public"):
        fit(tmp_path, module, callbacks=callbacks, enable_checkpointing=kind == "ModelCheckpoint")
    assert torch.equal(weights(module), before)
    if monitor != "val_loss" and kind != "plateau":
        public = getattr(lightning.pytorch.callbacks, kind)(monitor="told")
        with pytest.raises(ArgumentError, match=f"goes by '{monitor}'"):  # each of several is looked at
            fit(tmp_path, parts()[0], callbacks=[*parts()[1], public], public=["told"], enable_checkpointing=True)
    if monitor == "val_loss":
        module, callbacks = parts()
        privacy, _, run = fit(
            tmp_path, module, callbacks=callbacks, enable_checkpointing=kind == "ModelCheckpoint", public=["val_loss"]
        )
        assert privacy.engine.step > 0
        if kind == "plateau":
            assert run.optimizers[0].param_groups[0]["lr"] < 0.5


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("val_loss", True), ("val_loss_epoch", True), ("val_loss_step", True), ("val_loss/dataloader_idx_1", True),
        ("val_loss_epoch/dataloader_idx_0", True), ("my_val_loss", False), ("val_loss_of_training", False),
        ("val", False), ("epoch_val_loss", False), ("train/dataloader_idx_0", False),
    ],
)  # fmt: skip
def test_a_public_name_is_public_as_lightning_writes_it_and_no_longer_one_is(name, public):
    assert PrivacyCallback(planned(), network="net", public_metrics=["val_loss"])._is_public(name) is public


def test_names_are_a_list():
    with pytest.raises(ArgumentError, match="list of names"):
        PrivacyCallback(planned(), network="net", public_metrics="val_loss")


def test_a_plateau_of_a_module_in_a_plain_loop_is_refused_too():
    module = Logging("train_loss")
    configured = module.configure_optimizers()
    ao.PrivacyEngine(planned(), key=KEY).make_private(module.net, configured["optimizer"], loader())
    with pytest.raises(TrainingError, match=r"ao\.Public"):
        configured["lr_scheduler"]["scheduler"].step(nn.functional.mse_loss(torch.zeros(1), torch.ones(1)))


def test_a_search_for_the_rate_is_refused(tmp_path):
    """A rate that was found by exact losses went into the weights."""
    found = lightning.pytorch.callbacks.LearningRateFinder(num_training_steps=5)
    privacy = PrivacyCallback(planned(), network="net", key=KEY)
    module, batches = privacy.make_private(Logging(), loader())
    module.lr = 0.1
    with pytest.raises(ArgumentError, match="LearningRateFinder"):
        trainer(privacy, tmp_path, callbacks=[found, privacy]).fit(module, batches)
    assert privacy.engine.step == 0
    assert torch.equal(weights(module), weights(Module()))


class Measured(Logging):
    """Its loss is measured as well; it logs the exact one under the same name, as modules do."""

    engine = None

    def training_step(self, batch, index):
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.engine().measure(loss=losses)
        self.log("loss", losses.mean(), on_epoch=True)
        return losses.mean()


@pytest.mark.parametrize("callbacks_first", [True, False])
def test_released_metrics_are_logged_and_what_goes_by_them_is_allowed(callbacks_first, tmp_path):
    module = Measured("loss")
    rule = ao.Metrics({"loss": 2.0}, share=0.3)
    privacy = PrivacyCallback(planned(), network="net", key=KEY, released=rule)
    stop = lightning.pytorch.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9, check_on_train_epoch_end=True)
    module.engine = lambda: privacy.engine
    module, batches = privacy.make_private(module, loader())
    callbacks = [stop, privacy] if callbacks_first else [privacy, stop]
    run = trainer(privacy, tmp_path, callbacks=callbacks)
    run.fit(module, batches)
    released = privacy.engine.metrics
    assert privacy.engine.step == released.steps == 2 * STEPS  # one epoch better than none, and one that is not
    assert float(run.callback_metrics["loss"]) == pytest.approx(released.mean("loss", STEPS), rel=1e-5)
    assert run.callback_metrics.keys() == {"loss"}
    assert run.optimizers[0].param_groups[0]["lr"] < 0.5  # the plateau went by it


def test_a_metric_that_is_not_released_is_still_refused(tmp_path):
    privacy = PrivacyCallback(planned(), network="net", key=KEY, released=ao.Metrics({"loss": 2.0}))
    module, batches = privacy.make_private(Measured("accuracy"), loader())
    with pytest.raises(ArgumentError, match="goes by 'accuracy'"):
        trainer(privacy, tmp_path).fit(module, batches)
