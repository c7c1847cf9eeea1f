"""Models of transformers, with random weights and small configurations."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models.case import EXAMPLES, Batch, Case

__all__ = ["CAUSAL", "ENCODER", "T5", "build", "cases", "text"]

VOCABULARY, LENGTH, IMAGE = 30, 6, 16

_NO_DROPOUT = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "dropout": 0.0, "activation_dropout": 0.0, "classifier_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "embedding_dropout": 0.0, "residual_dropout": 0.0, "drop_path_rate": 0.0, "dropout_rate": 0.0,
}  # fmt: skip
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, "num_labels": 3}
_BLOCKS = {"embed_dim": 8, "depths": [1, 1], "num_attention_heads": [1, 2], "window_size": 2, "patch_size": 2}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4}

ENCODER = {**_TOKENS, **_SIZES, **_NO_DROPOUT}
CAUSAL = {**ENCODER, "bos_token_id": 1, "eos_token_id": 2}
SEQUENCES = {
    **_TOKENS, **_NO_DROPOUT, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
_VISION = {**_SIZES, **_NO_DROPOUT, "image_size": IMAGE, "patch_size": 8, "num_channels": 3, "num_labels": 3}
_OLD_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


def text(*, decoder: bool = False) -> Batch:
    """Sentences of 6, 4 and 5 tokens, padded on the right."""
    mask = (torch.arange(LENGTH) < torch.tensor([6, 4, 5])[:, None]).long()
    batch = {"input_ids": torch.randint(3, VOCABULARY, (EXAMPLES, LENGTH)) * mask, "attention_mask": mask}
    if decoder:
        batch["decoder_input_ids"] = torch.randint(3, VOCABULARY, (EXAMPLES, 4))
    return batch


def build(model: str, settings: dict[str, Any], config: str = "") -> nn.Module:
    """A model in training mode."""
    family = config or next(f for f in _prefixes(model) if hasattr(transformers, f"{f}Config"))
    made: nn.Module = getattr(transformers, model)(getattr(transformers, f"{family}Config")(**settings))
    return made.train()


def _prefixes(model: str) -> Iterator[str]:
    return (model[:i] for i in range(len(model), 0, -1))


def _images() -> Batch:
    return {"pixel_values": torch.randn(EXAMPLES, 3, IMAGE, IMAGE)}


def _sound(name: str, *shape: int) -> Batch:
    return {name: torch.randn(EXAMPLES, *shape)}


_ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {}, "DistilBert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24, "seq_classif_dropout": 0.0},
    "Roberta": {}, "XLMRoberta": {}, "Electra": {"embedding_size": 16, "summary_last_dropout": 0.0}, "ModernBert": {},
    "Albert": {"embedding_size": 8, "classifier_dropout_prob": 0.0}, "DebertaV2": {}, "MPNet": {}, "FNet": {},
    "BigBird": {}, "MobileBert": {"embedding_size": 8, "intra_bottleneck_size": 16}, "RoFormer": {"embedding_size": 16},
    "ConvBert": {"embedding_size": 16, "conv_kernel_size": 3}, "Nystromformer": {}, "EuroBert": {},
}  # fmt: skip
_DECODERS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": _OLD_GPT, "GPTNeoForCausalLM": {
        "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2, "window_size": 4,
        "embed_dropout": 0.0, "resid_dropout": 0.0,
    }, "GPTJForCausalLM": {**_OLD_GPT, "rotary_dim": 4}, "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 24, "word_embed_proj_dim": 16}, "LlamaForCausalLM": {}, "MistralForCausalLM": {
        "num_key_value_heads": 1}, "MixtralForCausalLM": {"num_local_experts": 4, "num_key_value_heads": 1},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1}, "Qwen3ForCausalLM": {"num_key_value_heads": 1, "head_dim": 8},
    "Qwen2MoeForCausalLM": {
        "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
    }, "GemmaForCausalLM": {"num_key_value_heads": 1, "head_dim": 8},
    "Gemma2ForCausalLM": {"num_key_value_heads": 1, "head_dim": 8}, "PhiForCausalLM": {},
    "Phi3ForCausalLM": {}, "FalconForCausalLM": {}, "StableLmForCausalLM": {"num_key_value_heads": 1},
    "Starcoder2ForCausalLM": {"num_key_value_heads": 1}, "OlmoForCausalLM": {}, "Olmo2ForCausalLM": {},
    "CohereForCausalLM": {"num_key_value_heads": 1}, "GraniteForCausalLM": {},
    "SmolLM3ForCausalLM": {"num_key_value_heads": 1},
    "MptForCausalLM": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
    "MambaForCausalLM": {"state_size": 4}, "RwkvForCausalLM": {}, "BioGptForCausalLM": {},
    "Mamba2ForCausalLM": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
}  # fmt: skip
_IMAGES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {}, "DeiTForImageClassification": {}, "BeitForImageClassification": {},
    "Dinov2ForImageClassification": {"mlp_ratio": 1}, "SwinForImageClassification": _BLOCKS,
    "Swinv2ForImageClassification": _BLOCKS, "ConvNextForImageClassification": _STAGES,
    "ConvNextV2ForImageClassification": _STAGES,
}  # fmt: skip


def cases() -> Iterator[Case]:
    """What people fine-tune, with attention masks, and caches left on."""
    for family, settings in _ENCODERS.items():
        yield _case(f"{family}ForSequenceClassification", {**ENCODER, **settings}, text)
    yield _case("BertForMaskedLM", ENCODER, text)
    yield _case("BertForTokenClassification", ENCODER, text)
    for model, settings in _DECODERS.items():
        yield _case(model, {**CAUSAL, **settings}, text)
    yield _case("Gemma3ForCausalLM", {**CAUSAL, "head_dim": 8, "num_key_value_heads": 1}, text, config="Gemma3Text")
    yield _case("LlamaForSequenceClassification", CAUSAL, text)
    yield _case("BloomForCausalLM", {**CAUSAL, "n_layer": 2, "n_head": 2}, text, refused="setup_context")
    pairs = functools.partial(text, decoder=True)
    for model in ("BartForConditionalGeneration", "MarianMTModel"):
        yield _case(model, SEQUENCES, pairs)
    yield _case("T5ForConditionalGeneration", T5, pairs)
    yield _case("T5ForConditionalGeneration", T5, _labelled, given="labels, its loss is one for each example")
    yield _case("WhisperForConditionalGeneration", {
        **SEQUENCES, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 8,
    }, lambda: {**_sound("input_features", 8, 16), "decoder_input_ids": pairs()["decoder_input_ids"]})  # fmt: skip
    yield _case("Wav2Vec2ForSequenceClassification", {
        **ENCODER, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0,
        "classifier_proj_size": 8,
    }, lambda: _sound("input_values", 400))  # fmt: skip
    for model, settings in _IMAGES.items():
        yield _case(model, {**_VISION, **settings}, _images)
    yield _case("SegformerForImageClassification", {
        **_VISION, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2],
        "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2],
        "classifier_dropout_prob": 0.0,
    }, _images)  # fmt: skip
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    yield _case("ResNetForImageClassification", resnet, _images, refused="GroupNorm")
    yield _case("ResNetForImageClassification", resnet, _images, given="converted", converted=True)
    yield Case("transformers", "CLIPModel", lambda: (_clip(), {**text(), **_images()}))


def _labelled() -> Batch:
    return {**text(), "labels": torch.randint(3, VOCABULARY, (EXAMPLES, 4))}


def _clip() -> nn.Module:
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config={**ENCODER, "eos_token_id": 2}, vision_config=_VISION, projection_dim=8)
    )


def _case(
    model: str, settings: dict[str, Any], batch: Callable[[], Batch], *, config: str = "", **options: Any
) -> Case:
    return Case("transformers", model, lambda: (build(model, settings, config), batch()), **options)
