"""Adapters of peft on models of transformers."""

from collections.abc import Iterator

import peft
import torch
from torch import nn

from benchmarks.models.case import Batch, Case
from benchmarks.models.transformers_models import CAUSAL, ENCODER, T5, build, text

__all__ = ["cases"]

_MODELS = {
    "Bert": (lambda: build("BertForSequenceClassification", ENCODER), "SEQ_CLS"),
    "GPT2": (lambda: build("GPT2LMHeadModel", {**CAUSAL, "n_embd": 16, "n_layer": 2, "n_head": 2}), "CAUSAL_LM"),
    "Llama": (lambda: build("LlamaForCausalLM", CAUSAL), "CAUSAL_LM"),
    "T5": (lambda: build("T5ForConditionalGeneration", T5), "SEQ_2_SEQ_LM"),
}
_ADAPTERS = {
    "LoRA": lambda task: peft.LoraConfig(task_type=task, r=2),
    "DoRA": lambda task: peft.LoraConfig(task_type=task, r=2, use_dora=True),
    "AdaLoRA": lambda task: peft.AdaLoraConfig(task_type=task, init_r=3, target_r=2, total_step=10),
    "IA3": lambda task: peft.IA3Config(task_type=task),
    "prompt tuning": lambda task: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=2),
    "prefix tuning": lambda task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=2),
    "P-tuning": lambda task: peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=2, encoder_hidden_size=8),
}
_OF_LINEAR = {
    "LoKr": lambda task: peft.LoKrConfig(task_type=task, r=2, target_modules="all-linear"),
    "OFT": lambda task: peft.OFTConfig(task_type=task, oft_block_size=4, r=0, target_modules="all-linear"),
    "FourierFT": lambda task: peft.FourierFTConfig(task_type=task, n_frequency=10, target_modules="all-linear"),
}
_CONFIGURATIONS = {
    **_ADAPTERS,
    **_OF_LINEAR,
    "LoHa": lambda task: peft.LoHaConfig(task_type=task, r=2, target_modules="all-linear"),
}


def cases() -> Iterator[Case]:
    """The usual adapters on four models, others on two whose layers they know."""
    for model in _MODELS:
        yield from (_case(model, adapter) for adapter in _ADAPTERS)
    for model in ("Bert", "Llama"):
        yield from (_case(model, adapter) for adapter in _OF_LINEAR)
        yield _case(model, "LoHa", refused="setup_context")


def _case(model: str, adapter: str, refused: str = "") -> Case:
    def make() -> tuple[nn.Module, Batch]:
        base, task = _MODELS[model]
        module = peft.get_peft_model(base(), _CONFIGURATIONS[adapter](task)).train()
        for p in module.parameters():
            if p.requires_grad:  # some adapters begin at zero, where most gradients are zero too
                p.data.add_(torch.randn_like(p), alpha=0.05)
        return module, text(decoder=task == "SEQ_2_SEQ_LM")

    return Case("peft", f"{adapter}, {model}", make, refused=refused)
