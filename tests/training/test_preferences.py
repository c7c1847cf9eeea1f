"""TRL's trainers of pairs train on the clipped sum over examples, each with TRL's own loss of it alone."""

import copy
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import anyorder as ao
from anyorder.errors import ArgumentError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it may change
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from anyorder.training.trainers.huggingface import PrivateTrainer, PrivateTrainerMixin  # noqa: E402
from anyorder.training.trainers.preferences import Pairs, all_rows, losses_of, trl_kind  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and trl

WORDS, N, B, CLIP, RATE = [f"w{i}" for i in range(8)], 6, 3, 0.3, 0.5


def words(i, shift):
    """Three to five words."""
    return " ".join(WORDS[(i * (place + 1) + shift) % 8] for place in range(3 + (i + shift) % 3))


PAIRS = datasets.Dataset.from_list([
    {"prompt": words(i, 0) + " ", "chosen": words(i, 1), "rejected": words(i, 5), "user": i // 2} for i in range(N)
])  # fmt: skip
OPINIONS = datasets.Dataset.from_list([
    {"prompt": words(i, 0) + " ", "completion": words(i, 1), "label": i % 3 > 0} for i in range(N)
])  # fmt: skip
TEXTS = datasets.Dataset.from_list([{"text": words(i, 1)} for i in range(N)])
SCORED = datasets.Dataset.from_list([
    {"chosen": words(i, 1), "rejected": words(i, 5), "margin": 0.1 * i} for i in range(N)
])  # fmt: skip


def tokenizer():
    """A token for each word; what fills up is no token 0."""
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate([*WORDS, "<pad>", "<eos>"])}, unk_token="w0")
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")


def gpt2(kind="GPT2LMHeadModel", seed=0, **options):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=10, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        pad_token_id=8, eos_token_id=9, bos_token_id=9, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def adapters():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p) if p.requires_grad else 0)
    return model


def arguments(kind, folder, **options):
    return kind(str(folder), **{
        "per_device_train_batch_size": B, "max_steps": N // B, "optim": "sgd", "learning_rate": RATE, "bf16": False,
        "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "gradient_checkpointing": False,
        "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, **options,
    })  # fmt: skip


def planned(**changes):
    settings = {"dataset_size": N, "batch_size": B, "epochs": 1, "mechanism": "independent", "clip_norm": CLIP}
    return ao.plan(**{**settings, "noise_multiplier": 1e-7, "delta": 1e-3, **changes})


def made_private(kind, plan=None, **options):
    own = type(f"Private{kind.__name__}", (PrivateTrainerMixin, kind), {})
    return own(plan=plan or planned(), key=bytes(32), pad_to=(16,), **options)


def of_dpo(folder, losses=("sigmoid",), **options):
    args = arguments(trl.DPOConfig, folder, loss_type=list(losses), beta=0.7, **options)
    return {"model": gpt2(), "ref_model": gpt2(seed=1), "args": args, "train_dataset": PAIRS}


def of_adapters(folder):
    """Whose reference is a copy of the adapters."""
    return {"model": adapters(), "args": arguments(trl.DPOConfig, folder, beta=0.7), "train_dataset": PAIRS}


def of_new_adapters(folder):
    """Whose reference is the model without them."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    new = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], init_lora_weights=False)
    return {**of_adapters(folder), "model": gpt2(), "peft_config": new}


def of_scores(folder):
    args = arguments(trl.RewardConfig, folder, center_rewards_coefficient=0.2)
    model = gpt2("GPT2ForSequenceClassification", num_labels=1)
    return {"model": model, "args": args, "train_dataset": SCORED}


def of_odds(folder):
    return {"model": gpt2(), "args": arguments(ORPOConfig, folder, beta=0.7, max_length=16), "train_dataset": PAIRS}


def of_opinions(folder):
    args = arguments(trl.KTOConfig, folder, loss_type="apo_zero_unpaired", beta=0.7, undesirable_weight=0.5)
    return {"model": gpt2(), "ref_model": gpt2(seed=1), "args": args, "train_dataset": OPINIONS}


KINDS = {
    "DPO": (trl.DPOTrainer, of_dpo),
    "DPO of adapters": (trl.DPOTrainer, of_adapters),
    "DPO of new adapters": (trl.DPOTrainer, of_new_adapters),
    "reward": (trl.RewardTrainer, of_scores),
    "ORPO": (ORPOTrainer, of_odds),
    "KTO": (trl.KTOTrainer, of_opinions),
}


def plain_loss(trainer, i):
    """TRL's own, of a batch of one."""
    return trainer.compute_loss(trainer.model.train(), trainer.data_collator([trainer.train_dataset[i]]))


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_the_clipped_sum_of_trls_own_losses(name, tmp_path):
    kind, options = KINDS[name]
    run = made_private(kind, processing_class=tokenizer(), **options(tmp_path / "private"))
    run.train()
    assert run.engine.step == N // B
    assert run.engine.training.loss_kept == "proved"
    assert {key for line in run.state.log_history for key in line} <= {
        "learning_rate",
        "epoch",
        "step",
        "train_runtime",
    }

    plain = kind(processing_class=tokenizer(), **options(tmp_path / "plain"))
    parameters = [p for p in plain.model.parameters() if p.requires_grad]
    clipped = 0
    for start in range(0, N, B):
        total = [torch.zeros_like(p) for p in parameters]
        for i in range(start, start + B):
            gradients = torch.autograd.grad(plain_loss(plain, i), parameters, allow_unused=True, materialize_grads=True)
            norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
            clipped += norm > CLIP
            total = [t + g * min(1.0, CLIP / norm) for t, g in zip(total, gradients, strict=True)]
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= RATE * t / B
    assert clipped
    trained = [p for p in run.model.parameters() if p.requires_grad]
    assert len(trained) == len(parameters)
    for own, other in zip(trained, parameters, strict=True):
        torch.testing.assert_close(own, other, atol=2e-6, rtol=1e-4)


ALL = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "sft",
)  # fmt: skip


def test_each_loss_of_a_pair_is_that_of_trl(tmp_path):
    plain = trl.DPOTrainer(processing_class=tokenizer(), **of_dpo(tmp_path, label_smoothing=0.1))
    losses = losses_of(plain, "DPOTrainer")
    rows = Pairs(plain.data_collator)([plain.train_dataset[i] for i in range(B)])
    for loss in ALL:
        plain.loss_types, plain.loss_weights = [loss, "sigmoid"], [0.5, 2.0]
        theirs = torch.stack([plain_loss(plain, i) for i in range(B)])
        torch.testing.assert_close(losses(plain, plain.model, rows), theirs, msg=lambda text, loss=loss: loss + text)


def test_the_pairs_of_a_user_are_clipped_together(tmp_path):
    sampler = ao.sampling.UnitOrderSampler(PAIRS["user"], batch_size=N)
    plan = ao.plan(
        order=ao.participation.FixedOrder(1, k=1, b=1), batch_size=3, noise_multiplier=1e-7, delta=1e-3, clip_norm=0.2,
        unit="user",
    )  # fmt: skip
    options = of_dpo(tmp_path, per_device_train_batch_size=N, max_steps=1)
    run = made_private(
        trl.DPOTrainer, plan, processing_class=tokenizer(), unit="user", batch_sampler=sampler, **options
    )  # fmt: skip
    before = copy.deepcopy(run.model)
    run.train()
    moved = torch.cat([(a - b).reshape(-1) for a, b in zip(before.parameters(), run.model.parameters(), strict=True)])
    plain = trl.DPOTrainer(processing_class=tokenizer(), **of_dpo(tmp_path))
    expected = 0
    for user in range(3):
        loss = plain_loss(plain, 2 * user) + plain_loss(plain, 2 * user + 1)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(plain.model.parameters()))])
        assert gradient.norm() > 0.2
        expected = expected + 0.2 * gradient / gradient.norm()
    torch.testing.assert_close(moved, RATE * expected / 3, atol=2e-6, rtol=1e-3)


def stand_in(config, **options):
    """What a trainer of TRL shows of its settings."""
    args = config("unused", use_cpu=True, bf16=False, **options)
    return types.SimpleNamespace(args=args, model=gpt2(), is_encoder_decoder=False)


@pytest.mark.parametrize(
    ("kind", "config", "options", "message"),
    [
        ("DPOTrainer", trl.DPOConfig, {"loss_type": ["sigmoid", "aot"]}, "sorts the pairs of a batch"),
        ("DPOTrainer", trl.DPOConfig, {"use_weighting": True}, "use_weighting"),
        ("DPOTrainer", trl.DPOConfig, {"ld_alpha": 0.5}, "ld_alpha"),
        ("DPOTrainer", trl.DPOConfig, {"f_divergence_type": "forward_kl"}, "reverse_kl"),
        ("DPOTrainer", trl.DPOConfig, {"precompute_ref_log_probs": True}, "lengths of other texts"),
        ("KTOTrainer", trl.KTOConfig, {}, "KL term is a mean over the batch"),
        ("SFTTrainer", trl.SFTConfig, {"loss_type": "dft"}, "'nll' is"),
        ("GRPOTrainer", trl.GRPOConfig, {}, "not known for each example alone"),
    ],
)
def test_losses_that_join_examples_are_refused(kind, config, options, message):
    with pytest.raises(ArgumentError, match=message):
        losses_of(stand_in(config, **options), kind)


@pytest.mark.parametrize("name", ["compute_loss", "_compute_loss"])
def test_another_loss_is_not_taken_for_that_of_the_class_behind(name):
    of_trl = type("Newer", (trl.DPOTrainer,), {name: None, "__module__": "trl.newer"})
    assert trl_kind(object.__new__(of_trl)) == "Newer"
    own = object.__new__(type("Private", (PrivateTrainerMixin, type("Own", (trl.DPOTrainer,), {name: None})), {}))
    own.compute_loss_func = None
    assert own._has_own_loss()
    assert not object.__new__(
        type("Private", (PrivateTrainerMixin, of_trl), {"compute_loss_func": None})
    )._has_own_loss()


@pytest.mark.parametrize("of_trl", [False, True])
def test_a_loss_that_balances_experts_is_refused(of_trl, tmp_path):
    config = transformers.MixtralConfig(
        vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, output_router_logits=not of_trl, pad_token_id=8,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    with pytest.raises(ArgumentError, match="balances experts over the tokens of the whole batch"):
        if of_trl:
            made_private(
                trl.SFTTrainer, model=model, args=arguments(trl.SFTConfig, tmp_path), train_dataset=TEXTS,
                processing_class=tokenizer(),
            )  # fmt: skip
        else:
            PrivateTrainer(model, arguments(transformers.TrainingArguments, tmp_path), plan=planned())


def test_metrics_of_trl_are_not_logged(tmp_path):
    """TRL adds them to a log after the private trainer has looked at it."""

    class Own(trl.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits, labels = model(inputs["input_ids"])["logits"], inputs["labels"]
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
            self._metrics["train"]["entropy"].append(loss.item())
            self._metrics["train"]["published"].append(1.0)
            return loss

    seen = []

    class Sees(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.extend(logs)

    run = made_private(
        Own, model=gpt2(), args=arguments(trl.SFTConfig, tmp_path, max_length=16), train_dataset=TEXTS,
        processing_class=tokenizer(), callbacks=[Sees()],
    )  # fmt: skip
    run.train()
    logged = {name for line in run.state.log_history for name in line}
    assert logged == {"learning_rate", "epoch", "step", "train_runtime"}
    assert set(seen) < logged


HEALTH = "w1 w2 hivpositive"


def rows_with(one, rows, **changes):
    """The data with another row in one place."""
    return datasets.Dataset.from_list([{**row, **(changes if i == one else {})} for i, row in enumerate(rows)])


LONG = " ".join(["w3"] * 40)
UNFIT = {  # what TRL would drop, warn of with its words, or fail on
    "DPO": (trl.DPOTrainer, of_dpo, rows_with(1, PAIRS, prompt=HEALTH, chosen="w3", rejected="w5")),
    "a long prompt": (trl.DPOTrainer, of_dpo, rows_with(1, PAIRS, prompt=LONG + " ")),
    "KTO": (trl.KTOTrainer, of_opinions, rows_with(1, OPINIONS, prompt=HEALTH, completion="w3")),
    "reward": (trl.RewardTrainer, of_scores, rows_with(1, SCORED, chosen=LONG, margin=None)),
    "ORPO": (ORPOTrainer, of_odds, rows_with(1, PAIRS, prompt=LONG + " ")),
}


@pytest.mark.parametrize("name", UNFIT)
def test_no_text_is_told_of_or_dropped(name, tmp_path, capfd, caplog, recwarn):
    """Without one, all rows behind it would be in other batches."""
    kind, options, data = UNFIT[name]
    options = {**options(tmp_path), "train_dataset": data}
    options["args"].max_length = 14
    own = tokenizer()
    own.add_tokens(["hivpositive"])  # so that it can be told
    own.model_max_length = 16
    for each in (options["model"], options.get("ref_model")):
        if each is not None:
            each.resize_token_embeddings(len(own), mean_resizing=False)
    capfd.readouterr(), caplog.clear(), recwarn.clear()
    run = made_private(kind, processing_class=own, **options)
    said = "".join([*capfd.readouterr(), caplog.text, *(str(each.message) for each in recwarn)])
    assert not said
    assert len(run.train_dataset) == N
    run.train()
    assert run.engine.step == N // B
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_rows_that_are_joined_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="one example of each row"):
        made_private(
            trl.SFTTrainer, model=gpt2(), processing_class=tokenizer(), train_dataset=TEXTS,
            args=arguments(trl.SFTConfig, tmp_path, max_length=16, packing=True),
        )  # fmt: skip


def test_other_threads_filter_as_ever():
    """Rows are kept for the thread that prepares a trainer, and for it alone."""

    class Rows(list):
        def filter(self, kept):
            return Rows(filter(kept, self))

    def prepare():
        with ThreadPoolExecutor(1) as other:
            assert other.submit(Rows(range(4)).filter, bool).result() == [1, 2, 3]
        return Rows(range(4)).filter(bool)

    assert all_rows(Rows(range(4)), prepare) == [0, 1, 2, 3]
    assert Rows(range(4)).filter(bool) == [1, 2, 3]
