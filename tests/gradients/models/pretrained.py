"""Hugging Face's models in tiny configurations with random weights."""

import torch

from .cases import Case

OFF = ("drop", "mask_time_prob", "mask_feature_prob")
TEXT = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**TEXT, **BLOCKS, "num_key_value_heads": 2, "max_position_embeddings": 64}
PICTURE = {"image_size": 32, "num_labels": 3}
PAIR = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1},
}

# Name: the stem of the configuration's class, the model's class, its batch, its sizes.
MODELS = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", "text", {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("Llama", "LlamaForCausalLM", "text", GROUPED),
    "t5": (
        *("T5", "T5ForConditionalGeneration", "text"),
        {
            **{"vocab_size": 61, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
            **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
        },
    ),
    "bert": ("Bert", "BertForMaskedLM", "text", {**TEXT, **BLOCKS, "max_position_embeddings": 64}),
    "vit": ("ViT", "ViTForImageClassification", "image", {**PICTURE, **BLOCKS, "patch_size": 8}),
    "mixtral": (
        *("Mixtral", "MixtralForCausalLM", "text"),
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    "mamba": (
        *("Mamba", "MambaForCausalLM", "text"),
        {**TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    ),
    "whisper": (
        *("Whisper", "WhisperForConditionalGeneration", "spectrum"),
        {**TEXT, **PAIR, "max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8},
    ),
    "convnext": (
        *("ConvNext", "ConvNextForImageClassification", "image"),
        {**PICTURE, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "layer_scale_init_value": 0.5},
    ),
    "swin": (
        *("Swin", "SwinForImageClassification", "image"),
        {**PICTURE, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "bart": ("Bart", "BartForConditionalGeneration", "text", {**TEXT, **PAIR, "max_position_embeddings": 64}),
    "wav2vec2": (
        *("Wav2Vec2", "Wav2Vec2ForCTC", "sound"),
        {
            **TEXT,
            **BLOCKS,
            **{"conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2},
            **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        },
    ),
}
HF = list(MODELS)


def make(name: str) -> Case:
    """A model that returns its loss, nothing random in its forward pass."""
    import transformers

    stem, model, batch, sizes = MODELS[name]
    kind = getattr(transformers, f"{stem}Config")
    off = [key for key, value in vars(kind()).items() if type(value) is float and any(word in key for word in OFF)]
    config = kind(**sizes, **dict.fromkeys(off, 0.0))
    config.use_cache = False
    return Case(getattr(transformers, model)(config), BATCHES[batch](), lambda output: output.loss, "hugging face")


def _text() -> dict:
    ids = torch.randint(3, 61, (2, 16))
    return {"input_ids": ids, "labels": ids.flip(1)}


def _image() -> dict:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 2, 1, 1])}


def _sound() -> dict:
    return {"input_values": torch.randn(2, 512), "labels": torch.randint(3, 61, (2, 5))}


def _spectrum() -> dict:
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 61, (2, 8))}


BATCHES = {"text": _text, "image": _image, "sound": _sound, "spectrum": _spectrum}
