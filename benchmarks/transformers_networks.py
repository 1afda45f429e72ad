"""Networks of transformers and diffusers in tiny configurations, for `transformers_table`.

Classes are of the libraries, settings are here, and inputs are random: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Inputs = dict[str, Any]  # tensors, or dicts of them
TOKENS = 96  # of a vocabulary
LENGTH = 24  # of a text
TEXT = {
    "vocab_size": TOKENS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "use_cache": False}  # a cache is no tensor that a file gives
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
IMAGE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "image_size": 32, "patch_size": 8, "num_labels": 10}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """How one network is made. library: where its classes are; config: "" where the class takes its settings itself."""

    library: str
    kind: str
    config: str
    settings: Mapping[str, Any]
    inputs: Callable[[], Inputs]


def ids() -> Inputs:
    """Two texts."""
    return {"input_ids": torch.randint(3, TOKENS, (2, LENGTH))}


def masked() -> Inputs:
    """Two texts, of which the second is shorter."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, LENGTH // 2 :] = 0
    return {**ids(), "attention_mask": mask}


def pixels() -> Inputs:
    """Two images."""
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def translated() -> Inputs:
    """Two texts, and the beginnings of two others."""
    return {"input_ids": torch.randint(3, TOKENS, (2, 10)), "decoder_input_ids": torch.randint(3, TOKENS, (2, 6))}


def described() -> Inputs:
    """Two images and two texts of them, whose last token is that of the end."""
    found = {**masked(), **pixels()}
    found["input_ids"][:, -1] = TOKENS - 1
    return found


def latents() -> Inputs:
    """What a denoising UNet reads: noise, its time step, a text of 8 tokens, its embedding, sizes of the image."""
    more = {"text_embeds": torch.randn(2, 16), "time_ids": torch.randint(0, 64, (2, 6)).float()}
    step = {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([10, 500])}
    return {**step, "encoder_hidden_states": torch.randn(2, 8, 32), "added_cond_kwargs": more}


def prompted() -> Inputs:
    """What Stable Diffusion 3 reads: noise, a text of 8 tokens and its embedding, the time step."""
    text = {"encoder_hidden_states": torch.randn(2, 8, 32), "pooled_projections": torch.randn(2, 16)}
    return {"hidden_states": torch.randn(2, 4, 16, 16), **text, "timestep": torch.tensor([10, 500])}


def joined() -> Inputs:
    """What a block of FLUX reads: tokens of image and text, and the embedding of the time step."""
    states, text = torch.randn(2, 16, 64), torch.randn(2, 8, 64)
    return {"hidden_states": states, "encoder_hidden_states": text, "temb": torch.randn(2, 64)}


ASKED = (  # the others are recorded by the command, and a part of them tested
    "llama", "gpt2", "mixtral", "qwen3-moe", "gpt-oss", "bert", "vit", "deit", "whisper", "segformer", "flux-block",
    "unet2d", "vae",
)  # fmt: skip
NETWORKS: dict[str, Network] = {
    "llama": Network("transformers", "LlamaForCausalLM", "LlamaConfig", GROUPED, ids),
    "gpt2": Network(
        "transformers", "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}, ids,
    ),
    "mixtral": Network(
        "transformers", "MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}, ids
    ),
    "qwen3-moe": Network(
        "transformers", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**GROUPED, **EXPERTS, "head_dim": 16}, ids
    ),
    "gpt-oss": Network(
        "transformers", "GptOssForCausalLM", "GptOssConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}, ids,
    ),
    "bert": Network("transformers", "BertForTokenClassification", "BertConfig", {**TEXT, "num_labels": 9}, masked),
    "vit": Network("transformers", "ViTForImageClassification", "ViTConfig", IMAGE, pixels),
    "deit": Network("transformers", "DeiTForImageClassification", "DeiTConfig", IMAGE, pixels),
    "whisper": Network(
        "transformers", "models.whisper.modeling_whisper.WhisperEncoder", "WhisperConfig",
        {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
         "num_mel_bins": 16, "max_source_positions": 32},
        lambda: {"input_features": torch.randn(2, 16, 64)},
    ),
    "segformer": Network(
        "transformers", "SegformerForSemanticSegmentation", "SegformerConfig",
        {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
         "decoder_hidden_size": 64, "num_labels": 5},
        lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
    ),
    "flux-block": Network(
        "diffusers", "models.transformers.transformer_flux.FluxTransformerBlock", "",
        {"dim": 64, "num_attention_heads": 4, "attention_head_dim": 16}, joined,
    ),
    "unet2d": Network(  # as of SDXL
        "diffusers", "UNet2DConditionModel", "",
        {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "norm_num_groups": 8,
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4),  # which is how many heads
         "use_linear_projection": True,
         "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64},
        latents,
    ),
    "gemma3": Network(
        "transformers", "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**GROUPED, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}, ids,
    ),
    "phi": Network("transformers", "PhiForCausalLM", "PhiConfig", {**GROUPED, "num_key_value_heads": 4}, ids),
    "olmoe": Network("transformers", "OlmoeForCausalLM", "OlmoeConfig", {**GROUPED, **EXPERTS}, ids),
    "deepseek-v3": Network(
        "transformers", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**GROUPED, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32,
         "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}, ids,
    ),
    "mamba": Network(
        "transformers", "MambaForCausalLM", "MambaConfig",
        {"vocab_size": TOKENS, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "use_cache": False}, ids,
    ),
    "distilbert": Network(
        "transformers", "DistilBertForSequenceClassification", "DistilBertConfig",
        {"vocab_size": TOKENS, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4,
         "max_position_embeddings": 64, "num_labels": 3}, masked,
    ),
    "roberta": Network(
        "transformers", "RobertaForSequenceClassification", "RobertaConfig", {**TEXT, "num_labels": 3}, masked
    ),
    "t5": Network(
        "transformers", "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
         "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}, translated,
    ),
    "bart": Network(
        "transformers", "BartForConditionalGeneration", "BartConfig",
        {"vocab_size": TOKENS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
         "use_cache": False}, translated,
    ),
    "clip": Network(
        "transformers", "CLIPModel", "CLIPConfig",
        {"text_config": {**TEXT, "eos_token_id": TOKENS - 1}, "vision_config": IMAGE, "projection_dim": 32}, described,
    ),
    "siglip": Network("transformers", "SiglipVisionModel", "SiglipVisionConfig", IMAGE, pixels),
    "dinov2": Network("transformers", "Dinov2ForImageClassification", "Dinov2Config", IMAGE, pixels),
    "swin": Network(
        "transformers", "SwinForImageClassification", "SwinConfig",
        {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 2,
         "num_labels": 10}, pixels,
    ),
    "modernbert": Network(
        "transformers", "ModernBertForSequenceClassification", "ModernBertConfig",
        {**TEXT, "num_labels": 3, "local_attention": 8, "global_attn_every_n_layers": 2}, masked,
    ),
    "wav2vec2": Network(
        "transformers", "Wav2Vec2ForCTC", "Wav2Vec2Config",
        {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
         "mask_time_prob": 0.0},
        lambda: {"input_values": torch.randn(2, 400)},
    ),
    "sd3": Network(
        "diffusers", "SD3Transformer2DModel", "",
        {"sample_size": 16, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
         "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 16, "pos_embed_max_size": 16,
         "out_channels": 4}, prompted,
    ),
    "dit": Network(
        "diffusers", "DiTTransformer2DModel", "",
        {"sample_size": 8, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
         "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 8},
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]),
                 "class_labels": torch.tensor([1, 2])},
    ),
    "vae": Network(
        "diffusers", "AutoencoderKL", "",
        {"block_out_channels": (32, 64), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 8,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        lambda: {"sample": torch.randn(2, 3, 32, 32)},
    ),
}  # fmt: skip
