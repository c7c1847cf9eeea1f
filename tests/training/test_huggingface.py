"""The private Trainer is the engine in a plain loop, prints no loss, resumes, and refuses what it cannot cover."""

import json
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import anyorder as ao
from anyorder.errors import ArgumentError, CheckpointError, LoaderError, ModelError, PlanError
from anyorder.participation import BallsInBins, MinSeparation

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from anyorder.sampling.shapes import CollatedAlone  # noqa: E402
from anyorder.training.trainers.huggingface import PrivateTrainer, PrivateTrainerMixin, example_losses  # noqa: E402
from plans import flat_plan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate

KEY = bytes(32)
N, B, EPOCHS, LENGTH = 32, 8, 2, 6


class Sentences(Dataset):
    def __init__(self, language_model=False, size=N):
        self.ids = torch.randint(0, 20, (size, LENGTH), generator=torch.Generator().manual_seed(0))
        self.language_model = language_model

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids, mask = self.ids[i], torch.arange(LENGTH) < 3 + i % 4
        labels = torch.where(mask, ids, -100) if self.language_model else ids.sum() % 2
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def bert(dropout=0.0):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )  # fmt: skip


class Translations(Sentences):
    def __getitem__(self, i):
        return {**super().__getitem__(i), "labels": torch.where(torch.arange(4) < 2 + i % 3, self.ids[i, 2:], -100)}


def t5():
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def planned(**changes):
    settings = {"dataset_size": N, "batch_size": B, "epochs": EPOCHS, "epsilon": 8, "delta": 1e-3, "mechanism": "tree"}
    return flat_plan(**{**settings, **changes})


def trainer(
    model, data, folder, plan=None, *, private=None, data_collator=None, callbacks=None, kind=PrivateTrainer, **options
):
    arguments = transformers.TrainingArguments(str(folder), **{
        "per_device_train_batch_size": B, "num_train_epochs": EPOCHS, "optim": "sgd", "learning_rate": 0.1,
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
        "save_strategy": "no", **options,
    })  # fmt: skip
    private = {"plan": plan or planned(), "key": KEY, **(private or {})}
    more = {"data_collator": data_collator, "callbacks": callbacks}
    return kind(model, arguments, train_dataset=data, eval_dataset=data, **more, **private)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_generators_of_the_process_tell_nothing_of_texts(tmp_path, seed):
    """They would count what the stock collator drew, a number for each place of a padded text, and dropout."""
    words = words_of_twenty()

    def left(length):
        data = [{"input_ids": [3 + i % 9] * (length if i == 5 else 6)} for i in range(N)]
        run = trainer(
            transformers.BertForMaskedLM(bert(dropout=0.1).config), data, tmp_path / str(length),
            data_collator=transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.4, seed=seed),
            private={"pad_to": (8, 16)},
        )  # fmt: skip
        run.train()
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002

    assert left(6) == left(14)


def words_of_twenty():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {word: i for i, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *map(str, range(17))])}
    own = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def plain_loop(model, data, loss, inputs=lambda batch: batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=B, shuffle=True)
    private, _, batches = ao.PrivacyEngine(planned(), key=KEY).make_private(
        model, optimizer, loader, loss_reduction="sum"
    )
    for _ in range(EPOCHS):
        for batch in batches:
            labels = batch.pop("labels")
            loss(private(**inputs({**batch, "labels": labels}))["logits"], labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def _without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def _with_decoder_inputs(batch):
    start = torch.zeros(len(batch["labels"]), 1, dtype=torch.long)
    shifted = torch.cat([start, batch["labels"][:, :-1].clamp(min=0)], dim=1)
    return {**_without_labels(batch), "decoder_input_ids": shifted}


def _sum_of_token_means(logits, labels):
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return (losses.sum(1) / (labels != -100).sum(1)).sum()


LOOPS = {
    "classes": (bert, Sentences(), _without_labels, lambda x, y: F.cross_entropy(x, y, reduction="sum")),
    "tokens": (gpt2, Sentences(True), _without_labels, lambda x, y: _sum_of_token_means(x[:, :-1], y[:, 1:])),
    "translations": (t5, Translations(), _with_decoder_inputs, _sum_of_token_means),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_train_is_the_plain_loop(kind, tmp_path):
    make, data, inputs, loss = LOOPS[kind]
    run = trainer(make().eval(), data, tmp_path, max_grad_norm=1e-9)  # from_pretrained gives models in eval mode
    run.train()
    assert run.engine.step == EPOCHS * N // B
    torch.testing.assert_close(weights(run.model), plain_loop(make(), data, loss, inputs), atol=1e-6, rtol=1e-5)
    run.engine.certificate().save(tmp_path / "run.privacy.json")
    assert ao.verify(tmp_path / "run.privacy.json").certificate.steps == run.engine.step


def test_a_decoder_whose_inputs_nobody_makes(tmp_path, monkeypatch):
    monkeypatch.delattr(transformers.T5ForConditionalGeneration, "prepare_decoder_input_ids_from_labels")
    with pytest.raises(ModelError, match="let the data collator return decoder_input_ids"):
        trainer(t5(), Translations(), tmp_path).train()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_change_nothing(reentrant, tmp_path):
    kind, data = {"use_reentrant": reentrant}, Sentences(True)
    enabled = gpt2()
    enabled.gradient_checkpointing_enable(kind)
    plain = trainer(gpt2(), data, tmp_path / "0")
    plain.train()
    for run in (
        trainer(enabled, data, tmp_path / "1"),
        trainer(gpt2(), data, tmp_path / "2", gradient_checkpointing=True, gradient_checkpointing_kwargs=kind),
    ):
        run.train()
        assert run.model.is_gradient_checkpointing
        torch.testing.assert_close(weights(run.model), weights(plain.model), atol=1e-7, rtol=1e-6)


def test_nothing_of_the_training_data_is_logged(tmp_path):
    run = trainer(bert(), Sentences(False), tmp_path, eval_strategy="epoch", private={"public_evaluation": True})
    result = run.train()
    logged = {name for line in run.state.log_history for name in line}
    assert "eval_loss" in logged
    assert not logged & {"loss", "train_loss", "grad_norm", "total_flos"}
    assert result.training_loss == 0.0


class Interrupt(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


def test_a_run_goes_on_from_its_last_checkpoint(tmp_path):
    whole = trainer(gpt2(), Sentences(True), tmp_path / "whole")
    whole.train()
    first = trainer(gpt2(), Sentences(True), tmp_path / "run", save_strategy="steps", save_steps=3)
    first.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.engine.close()
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    with pytest.raises(CheckpointError, match="earlier run"):
        trainer(gpt2(), Sentences(True), tmp_path / "run").train()
    second = trainer(gpt2(), Sentences(True), tmp_path / "run")
    second.train(resume_from_checkpoint=True)
    assert second.engine.step == EPOCHS * N // B
    torch.testing.assert_close(weights(second.model), weights(whole.model), atol=1e-6, rtol=1e-5)


def test_a_run_that_was_refused_before_its_first_step_goes_on(tmp_path):
    """The corrected program finds the refused one's checkpoint, which has the key and no step."""
    data = Sentences(False)
    uneven = [{**data[i], "input_ids": data[i]["input_ids"][: 3 + i % 4]} for i in range(N)]
    uneven = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in uneven]
    whole = trainer(bert(), uneven, tmp_path / "whole", private={"pad_to": LENGTH})
    whole.train()
    other = bert()
    other.classifier.weight.data.zero_()
    with pytest.raises(LoaderError, match="pad_to"):
        trainer(other, uneven, tmp_path / "run", learning_rate=3.0).train()
    mended = trainer(bert(), uneven, tmp_path / "run", private={"pad_to": LENGTH})
    mended.train()
    assert mended.engine.step == EPOCHS * N // B
    assert torch.equal(weights(mended.model), weights(whole.model))


def test_a_run_that_ended_before_its_first_save_repeats_its_steps(tmp_path):
    whole = trainer(bert(dropout=0.1), Sentences(), tmp_path / "whole")
    whole.train()
    first = trainer(bert(dropout=0.1), Sentences(), tmp_path / "run", save_strategy="steps", save_steps=6)
    first.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.engine.close()
    with pytest.raises(CheckpointError, match="took steps"):
        trainer(bert(dropout=0.1), Sentences(), tmp_path / "run").train()
    second = trainer(bert(dropout=0.1), Sentences(), tmp_path / "run")
    second.train(resume_from_checkpoint=True)
    assert second.engine.step == EPOCHS * N // B
    assert torch.equal(weights(second.model), weights(whole.model))


def test_a_run_in_micro_batches_goes_on_within_an_epoch_that_ends_within_a_step(tmp_path):
    def run(name, **options):
        return trainer(
            gpt2(), Sentences(True, size=28), tmp_path / name, planned(dataset_size=28, clip_norm=100.0),
            per_device_train_batch_size=4, gradient_accumulation_steps=2, **options,
        )  # fmt: skip

    whole = run("whole")
    whole.train()
    assert whole.engine.step == whole.plan.n == 8
    first = run("run", save_strategy="steps", save_steps=3)
    first.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.engine.close()
    second = run("run")
    second.train(resume_from_checkpoint=True)
    assert second.engine.step == 8
    torch.testing.assert_close(weights(second.model), weights(whole.model), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("kind", "divides"), [("classes", True), ("tokens", False)])
def test_micro_batches_are_one_large_batch(kind, divides, tmp_path, monkeypatch):
    """With gradients below the clip norm, which show a loss that was divided; also of copies, as on a device."""
    make, data, _, _ = LOOPS[kind]
    plan = ao.plan(dataset_size=N, batch_size=B, epochs=EPOCHS, noise_multiplier=1e-6, delta=1e-3, clip_norm=100.0)
    large = trainer(make(), data, tmp_path / "8", plan)
    large.train()
    micro = trainer(
        make(), data, tmp_path / "4", plan, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )  # fmt: skip
    micro.model_accepts_loss_kwargs = not divides  # where false, the Trainer divides by the number of micro-batches
    monkeypatch.setattr(micro, "_prepare_input", lambda inputs: {name: t.clone() for name, t in inputs.items()})
    micro.train()
    assert micro.engine.step == large.engine.step == micro.state.global_step == plan.n
    torch.testing.assert_close(weights(micro.model), weights(large.model), atol=1e-6, rtol=1e-5)


def keys_in_words(users):
    return [f"user {user}" for user in users]


def table(users, size=N):
    """A data set with columns, one of them the users' keys."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [Sentences(size=size)[i] for i in range(size)]
    columns = {name: [row[name].tolist() for row in rows] for name in rows[0]}
    return datasets.Dataset.from_dict({**columns, "user_id": list(users)})


class Rows(Dataset):
    """A data set without columns, whose examples have the users' keys."""

    def __init__(self, users, size=N):
        self.sentences, self.users = Sentences(size=size), users

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, i):
        return {**self.sentences[i], "user_id": self.users[i]}


USERS = [7, 7, 7, 3, 3, 9, 9, 9]


ONE, TWO = ([[0, 1, 2, 3, 4, 5, 6, 7]], True), ([[3, 0, 1, 4, 2], [5, 6, 7]], False)


@pytest.mark.parametrize(
    ("data", "keys", "batches"),
    [
        (table, list, ONE),
        (table, keys_in_words, TWO),
        (Rows, list, TWO),
        (Rows, keys_in_words, ONE),
    ],  # each pair of two
)
def test_the_examples_of_a_user_are_clipped_together(data, keys, batches, tmp_path, monkeypatch):
    micro, unused = batches
    plan = ao.plan(
        order=MinSeparation(1, 1, 1), batch_size=4, noise_multiplier=1e-7, delta=1e-3, clip_norm=0.05,
        unit="user",
    )  # fmt: skip
    rows = data(keys(USERS), size=8)
    sampler = ao.sampling.UnitOrderSampler(keys(USERS), batch_size=5)
    monkeypatch.setattr(sampler, "_batches", micro)
    run = trainer(
        bert(), rows, tmp_path, plan, num_train_epochs=1,
        private={"unit": "user_id", "batch_sampler": sampler, "public_evaluation": True},
        per_device_train_batch_size=5, gradient_accumulation_steps=len(micro), remove_unused_columns=unused,
    )  # fmt: skip
    run.train()
    by_hand = torch.zeros(())
    for user in (7, 3, 9):
        model, loss = bert(), torch.zeros(())
        for i in (i for i in range(8) if USERS[i] == user):
            example = {name: value[None] for name, value in Sentences(size=8)[i].items()}
            loss = loss + F.cross_entropy(model(**_without_labels(example))["logits"], example["labels"])
        loss.backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        assert gradient.norm() > 0.05
        by_hand = by_hand + 0.05 * gradient / gradient.norm()
    torch.testing.assert_close(weights(bert()) - weights(run.model), 0.1 * by_hand / 4, atol=1e-6, rtol=1e-3)
    assert [list(units) for units in run.engine.ledger.history()] == [sorted(keys([3, 7, 9]))]
    assert "eval_loss" in run.evaluate()  # whose model is not shown the keys either


def test_a_run_for_users_in_an_order_read_off_their_keys(tmp_path):
    users = [i * i % 13 for i in range(N)]
    data = table(users)
    by_user = ao.sampling.UnitOrderSampler(data["user_id"], batch_size=B, seed=1)
    keys = DataLoader(data.select_columns("user_id"), batch_sampler=by_user)
    plan = ao.plan(loader=keys, unit="user_id", epochs=EPOCHS, epsilon=8, delta=1e-3, mechanism="tree")
    run = trainer(bert(), data, tmp_path, plan, private={"unit": "user_id", "batch_sampler": by_user})
    run.train()
    steps = [sorted({users[i] for i in batch}) for _ in range(EPOCHS) for batch in by_user]
    assert [units.tolist() for units in run.engine.ledger.history()] == steps
    assert run.state.global_step == plan.n


def test_refusals_of_units(tmp_path):
    users = ao.plan(order=MinSeparation(8, 1, 8), batch_size=B, epsilon=8, delta=1e-3, mechanism="tree", unit="user")
    data = table(USERS * 4)
    by_user = ao.sampling.UnitOrderSampler(USERS * 4, batch_size=B)
    with pytest.raises(PlanError, match="protects one user, but without unit="):
        trainer(bert(), data, tmp_path, users)
    with pytest.raises(PlanError, match="the plan protects one example"):
        trainer(bert(), data, tmp_path, private={"unit": "user_id"})
    with pytest.raises(ArgumentError, match="unit must be the name of a column"):
        trainer(bert(), data, tmp_path, users, private={"unit": 2})
    with pytest.raises(ArgumentError, match="give unit="):
        trainer(bert(), data, tmp_path, private={"batch_sampler": by_user})
    with pytest.raises(ArgumentError, match="that of batch_sampler, 8, got 4"):
        private = {"unit": "user_id", "batch_sampler": by_user}
        trainer(bert(), data, tmp_path, users, private=private, per_device_train_batch_size=4)
    with pytest.raises(ArgumentError, match="keys of train_dataset, 8, got 32"):
        trainer(bert(), table(USERS, size=8), tmp_path / "0", users, private=private).train()
    with pytest.raises(LoaderError, match="must name a column of train_dataset"):
        trainer(bert(), Sentences(), tmp_path / "1", users, private={"unit": "user_id"}).train()


@pytest.mark.parametrize(
    ("make", "task", "data", "adapter"),
    [
        (bert, "SEQ_CLS", Sentences(), lambda peft, task: peft.LoraConfig(task_type=task, r=2, use_dora=True)),
        (
            gpt2,
            "CAUSAL_LM",
            Sentences(True),
            lambda peft, task: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=2),
        ),
        (
            t5,
            "SEQ_2_SEQ_LM",
            Translations(),
            lambda peft, task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=2),
        ),
    ],
    ids=["DoRA", "prompt", "prefix"],
)
def test_adapters_train(make, task, data, adapter, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(make(), adapter(peft, task))
    before = {name: p.clone() for name, p in model.named_parameters()}
    trainer(model, data, tmp_path).train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}


class FourBits(torch.nn.Module):
    """A frozen linear map, two weights to a byte, as that of QLoRA; and an adapter."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.scale = torch.nn.Buffer(weight.abs().amax(1, keepdim=True) / 7)
        levels = ((weight / self.scale).round() + 8).to(torch.uint8)
        self.packed = torch.nn.Parameter(levels[:, ::2] * 16 + levels[:, 1::2], requires_grad=False)
        self.adapter = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)

    def weight(self):
        levels = torch.stack([self.packed // 16, self.packed % 16], dim=2).flatten(1)
        return (levels.float() - 8) * self.scale

    def forward(self, x):
        return F.linear(x, self.weight()) + self.adapter(x)


class Unpacked(FourBits):
    """The same in floats."""

    def __init__(self, linear):
        super().__init__(linear)
        self.floats = torch.nn.Parameter(self.weight(), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.floats) + self.adapter(x)


def test_frozen_weights_of_four_bits(tmp_path):
    trained = []
    for kind in (FourBits, Unpacked):
        model = bert().requires_grad_(False)
        attention = model.bert.encoder.layer[0].attention.self
        torch.manual_seed(1)
        attention.query = kind(attention.query)
        before = attention.query.adapter.weight.detach().clone()
        trainer(model, Sentences(), tmp_path / kind.__name__, num_train_epochs=1).train()
        trained.append(attention.query.adapter.weight)
        assert (trained[-1] - before).norm() > 1e-3
    torch.testing.assert_close(*trained, atol=1e-6, rtol=1e-5)


def test_tokens_in_front_of_a_prompt_have_no_labels(tmp_path):
    run, data = trainer(gpt2(), Sentences(True), tmp_path), Sentences(True)
    labels, logits = torch.stack([data[i]["labels"] for i in range(3)]), torch.randn(3, LENGTH, 20)
    longer = torch.cat([torch.randn(3, 2, 20), logits], dim=1)
    torch.testing.assert_close(
        run.example_losses({"logits": longer}, labels), run.example_losses({"logits": logits}, labels)
    )


def test_losses_are_of_each_example_alone():
    logits, labels = torch.randn(3, 4, 5), torch.tensor([[1, 2, -100, -100], [0, 1, 2, 3], [-100] * 4])
    losses = example_losses({"logits": logits}, labels)
    by_hand = [F.cross_entropy(logits[0, :2], labels[0, :2]), F.cross_entropy(logits[1], labels[1]), torch.tensor(0.0)]
    torch.testing.assert_close(losses, torch.stack(by_hand))
    numbers = torch.randn(3)
    torch.testing.assert_close(example_losses({"logits": numbers[:, None]}, torch.zeros(3)), numbers.square())
    with pytest.raises(ModelError, match="example_losses"):
        example_losses({"logits": logits}, torch.zeros(3, dtype=torch.long))


def _smoothed(logits, labels):
    """As transformers' own LabelSmoother has it, for one example at a time."""
    smoother = transformers.trainer_pt_utils.LabelSmoother(0.2)
    return sum(smoother({"logits": logits[i : i + 1]}, labels[i : i + 1]) for i in range(len(labels)))


def test_smoothed_labels_are_those_of_transformers(tmp_path):
    logits, labels = torch.randn(3, 4, 5), torch.tensor([[1, 2, -100, -100], [0, 1, 2, 3], [4, -100, 2, 1]])
    torch.testing.assert_close(example_losses({"logits": logits}, labels, 0.2).sum(), _smoothed(logits, labels))
    run = trainer(bert(), Sentences(), tmp_path, label_smoothing_factor=0.2)
    run.train()
    other = plain_loop(bert(), Sentences(), _smoothed, _without_labels)
    torch.testing.assert_close(weights(run.model), other, atol=1e-6, rtol=1e-5)
    assert run.engine.training.loss_kept == "proved"
    with pytest.raises(ModelError, match="labels that are classes"):
        example_losses({"logits": torch.randn(3, 1)}, torch.zeros(3), 0.2)


class Doubled(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        labels = inputs.pop("labels")
        return 2 * F.cross_entropy(model(**inputs).logits, labels)


class OfTheUser(transformers.Trainer):
    compute_loss = Doubled.compute_loss


class MadePrivate(PrivateTrainerMixin, OfTheUser):
    pass


class Beside(PrivateTrainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


def _doubled(outputs, labels, num_items_in_batch=None):
    assert num_items_in_batch is None
    return 2 * F.cross_entropy(outputs.logits, labels)


OWN_LOSSES = {"override": (Doubled, {}), "made private": (MadePrivate, {}), "beside": (Beside, {})}
OWN_LOSSES["function"] = (PrivateTrainer, {"compute_loss_func": _doubled})


@pytest.mark.parametrize(("name", "micro"), [("override", 2), ("made private", 1), ("beside", 1), ("function", 2)])
def test_a_loss_of_the_users_own_trains_the_private_model(name, micro, tmp_path):
    kind, options = OWN_LOSSES[name]
    run = trainer(
        bert(), Sentences(), tmp_path, kind=kind, private=options,
        per_device_train_batch_size=B // micro, gradient_accumulation_steps=micro,
    )  # fmt: skip
    run.train()
    doubled = plain_loop(bert(), Sentences(), lambda x, y: 2 * F.cross_entropy(x, y, reduction="sum"), _without_labels)
    torch.testing.assert_close(weights(run.model), doubled, atol=1e-6, rtol=1e-5)


def test_a_loss_of_the_users_own_that_couples_is_refused(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, reduction="none").max()

    with pytest.raises(ModelError, match="couples examples"):
        trainer(bert(), Sentences(), tmp_path, private={"compute_loss_func": loss}).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "batch_size=8, got 16"),
        ({"per_device_train_batch_size": 4}, "batch_size=8, got 4"),
        ({"push_to_hub": True}, "noise key"),
        ({"train_sampling_strategy": "group_by_length"}, "order depend on the data"),
        ({"include_num_input_tokens_seen": "all"}, "counts of tokens"),
    ],
)
def test_refusals(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        trainer(bert(), Sentences(False), tmp_path, **options)


def test_secret_orders_train_in_micro_batches_of_one_size(tmp_path):
    plan = ao.plan(
        order=BallsInBins(EPOCHS, N // B), batch_size=B, mechanism="independent", noise_multiplier=1.0,
        delta=1e-3,
    )  # fmt: skip
    run = trainer(
        bert(), Sentences(), tmp_path, plan, private={"micro_batch": B}, gradient_accumulation_steps=2,
        per_device_train_batch_size=B // 2,
    )  # fmt: skip
    run.train()
    assert run.engine.step == plan.n
    history, steps = [units.tolist() for units in run.engine.ledger.history()], N // B
    assert history[:steps] == history[steps : 2 * steps]
    assert sorted(unit for units in history[:steps] for unit in units) == list(range(N))


class Texts(Dataset):
    """Ids without padding; the first text has another length, and its class makes no difference to the others."""

    def __init__(self, first, language_model=False):
        generator = torch.Generator()
        lengths = [first] + [3 + i % 5 for i in range(1, N)]
        self.ids = [torch.randint(1, 20, (n,), generator=generator.manual_seed(i)) for i, n in enumerate(lengths)]
        self.language_model = language_model

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i].tolist(), **({} if self.language_model else {"labels": i % 2})}


def tokenizer(longest=40):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w19"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", mask_token="w18", padding_side="left", model_max_length=longest
    )


def gpt2_classifier():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=40, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        pad_token_id=0, num_labels=2,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config)


class OthersCount(PrivateTrainer):
    """The loss of the first row of a batch does not count."""

    def example_losses(self, outputs, labels):
        losses = super().example_losses(outputs, labels)
        return losses * (torch.arange(len(losses)) > 0) * 1000


@pytest.mark.parametrize("words", [False, True], ids=["classes", "language model"])
def test_the_length_of_one_text_moves_no_other(words, tmp_path):
    found = []
    for first in (3, 30):
        collate = transformers.DataCollatorWithPadding(tokenizer())
        if words:
            collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        torch.manual_seed(0)
        model = gpt2_classifier()
        if words:
            model = transformers.GPT2LMHeadModel(model.config)
        arguments = transformers.TrainingArguments(
            str(tmp_path / f"{first}"), per_device_train_batch_size=B, max_steps=1, optim="sgd", learning_rate=0.1,
            lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
            train_sampling_strategy="sequential",
        )  # fmt: skip
        plan = planned(epochs=1, epsilon=None, noise_multiplier=1e-6, mechanism="independent")
        run = OthersCount(
            model, arguments, train_dataset=Texts(first, words), data_collator=collate, plan=plan, key=KEY,
            **({"pad_to": (8, 40)} if words else {}),
        )  # fmt: skip
        before = weights(model).detach().clone()
        run.train()
        found.append(weights(model) - before)
    assert (found[0] - found[1]).norm() < 1e-3 * found[0].norm()


def test_what_a_tokenizer_keeps_of_texts_is_of_no_batch():
    """The batch had the first text's alone."""

    def collate(texts):
        return tokenizer()(texts, padding="max_length", max_length=4, return_tensors="pt")

    texts = ["w1", "w2 w3", "w4"]
    batch = CollatedAlone(collate, None)(texts).whole()
    assert type(batch) is type(collate(texts))
    assert batch.encodings is batch.n_sequences is None
    assert torch.equal(batch["input_ids"], collate(texts)["input_ids"])


def test_texts_of_several_lengths_need_public_ones(tmp_path):
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    run = trainer(gpt2(), Texts(9, True), tmp_path, data_collator=collate)
    with pytest.raises(LoaderError, match="state the public lengths"):
        run.train()
    assert run.engine.step == 0


@pytest.mark.parametrize("prepared", ["loader", "optimizer"])
def test_what_accelerate_prepared_before_is_refused(prepared):
    model, loader = torch.nn.Linear(2, 1), DataLoader(torch.randn(N, 2), batch_size=B)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = accelerate.Accelerator(cpu=True)
    loader = before.prepare(loader) if prepared == "loader" else loader
    optimizer = before.prepare(optimizer) if prepared == "optimizer" else optimizer
    with pytest.raises((ArgumentError, LoaderError), match="prepare what (it|make_private) returns"):
        ao.PrivacyEngine(planned()).make_private(model, optimizer, loader)
