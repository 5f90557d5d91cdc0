"""Hugging Face architectures in tiny random configurations, with a batch for each."""

import contextlib

# What a size is called in configurations, and what it is here; only names that a configuration has are set.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads",), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner", "dff"), 48
    ),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "sliding_window"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    "num_decoder_layers": 2,
    "vocab_size": 61,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "image_size": 32,
    "patch_size": 8,
    "state_size": 8,
    "conv_kernel": 4,
}
OFF = ("drop", "layerdrop", "mask_time_prob", "mask_feature_prob")

# Name: kind, automatic class, the batch, and what differs from SIZES.
ARCHITECTURES: dict[str, tuple] = {}


def _add(kind: str, task: str, batch: str, **architectures: dict) -> None:
    for name, own in architectures.items():
        ARCHITECTURES[name] = (kind, task, batch, own)


_CLASSES = {"num_labels": 3}
_PLAIN: dict = {}
_add(
    *("decoder", "CausalLM", "text"),
    gpt2=_PLAIN,
    llama=_PLAIN,
    qwen2=_PLAIN,
    qwen3=_PLAIN,
    gemma=_PLAIN,
    gemma2=_PLAIN,
    gemma3_text=_PLAIN,
    mistral=_PLAIN,
    phi=_PLAIN,
    phi3=_PLAIN,
    gpt_neox=_PLAIN,
    gpt_neo={"attention_types": [[["global", "local"], 1]], "window_size": 8},
    gptj={"rotary_dim": 4},
    codegen={"rotary_dim": 4},
    opt=_PLAIN,
    bloom=_PLAIN,
    falcon=_PLAIN,
    mpt=_PLAIN,
    stablelm=_PLAIN,
    starcoder2=_PLAIN,
    olmo=_PLAIN,
    olmo2=_PLAIN,
    cohere=_PLAIN,
    granite=_PLAIN,
    persimmon=_PLAIN,
    biogpt=_PLAIN,
    xglm={"attention_heads": 4},
    nemotron={"head_dim": 8, "num_key_value_heads": 2},
    helium=_PLAIN,
    glm=_PLAIN,
    smollm3=_PLAIN,
    gpt_bigcode=_PLAIN,
    ernie4_5=_PLAIN,
)
_add(
    *("mixture of experts", "CausalLM", "text"),
    mixtral=_PLAIN,
    qwen2_moe=_PLAIN,
    qwen3_moe=_PLAIN,
    olmoe=_PLAIN,
    granitemoe=_PLAIN,
    gpt_oss={"layer_types": ["sliding_attention", "full_attention"]},
    phimoe=_PLAIN,
)
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8}
_add(
    *("state space", "CausalLM", "text"),
    mamba={"time_step_rank": 4, "use_mambapy": False},
    mamba2=_MAMBA2,
    falcon_mamba={"time_step_rank": 4},
    rwkv={"attention_hidden_size": 32, "context_length": 64},
    recurrent_gemma={"lru_width": 32, "attention_window_size": 64, "num_hidden_layers": 3},
    bamba={
        **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1},
        **{"attn_layer_indices": [1]},
    },
)
_add(
    *("encoder", "MaskedLM", "text"),
    bert=_PLAIN,
    roberta={"max_position_embeddings": 66},
    albert=_PLAIN,
    distilbert=_PLAIN,
    electra=_PLAIN,
    deberta={"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    mpnet=_PLAIN,
    modernbert={"global_attn_every_n_layers": 2, "local_attention": 8},
    mobilebert={"intra_bottleneck_size": 32, "true_hidden_size": 32},
    squeezebert=_PLAIN,
    convbert=_PLAIN,
    roformer=_PLAIN,
    nystromformer={"num_landmarks": 4, "segment_means_seq_len": 16},
    layoutlm=_PLAIN,
    esm={"vocab_size": 61, "pad_token_id": 0, "max_position_embeddings": 66, "position_embedding_type": "rotary"},
)
_ENCODER_DECODER = ("encoder-decoder", "Seq2SeqLM", "text")
_add(
    *_ENCODER_DECODER,
    t5=_PLAIN,
    umt5=_PLAIN,
    longt5={"local_radius": 4},
    bart=_PLAIN,
    mbart=_PLAIN,
    pegasus=_PLAIN,
    marian=_PLAIN,
    m2m_100=_PLAIN,
    blenderbot=_PLAIN,
    switch_transformers={"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
)
_add(
    *("vision", "ImageClassification", "image"),
    vit=_CLASSES,
    beit={**_CLASSES, "out_indices": [1, 2]},
    dinov2=_CLASSES,
    swin={**_CLASSES, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    convnext={**_CLASSES, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    convnextv2={**_CLASSES, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    resnet={**_CLASSES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    regnet={**_CLASSES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    mobilenet_v2={**_CLASSES, "depth_multiplier": 0.25, "output_stride": 8},
    poolformer={
        **_CLASSES,
        **{"depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [3, 3]},
        **{"strides": [2, 2], "padding": [1, 1]},
    },
    segformer={
        **_CLASSES,
        **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]},
        **{"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
    },
)
_CONVOLUTIONS = {"conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_conv_pos_embeddings": 4}
_SPEECH = {**_CONVOLUTIONS, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "conv_bias": False}
_add(
    *("audio", "CTC", "sound"),
    wav2vec2=_SPEECH,
    hubert=_SPEECH,
    wavlm={**_SPEECH, "num_buckets": 16, "max_bucket_distance": 32},
    unispeech=_SPEECH,
)
ARCHITECTURES["whisper"] = (
    *("audio", "SpeechSeq2Seq", "spectrum"),
    {"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8},
)
ARCHITECTURES["speech_to_text"] = (
    *("audio", "SpeechSeq2Seq", "spectrum"),
    {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 32},
)
ARCHITECTURES["audio-spectrogram-transformer"] = (
    *("audio", "AudioClassification", "mel"),
    {**_CLASSES, "max_length": 32, "num_mel_bins": 16},
)


def build(name: str):
    """An architecture's kind, its model with random weights, and a batch by argument names."""
    import torch
    import transformers

    kind, task, batch, own = ARCHITECTURES[name]
    config = _config(transformers.AutoConfig.for_model(name), own)
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # no path may be shut by a zero
                parameter.normal_(0, 0.1)
    return kind, model.train(), _BATCHES[batch](config)


def _config(default, own: dict):
    known = {**vars(default), **{name: getattr(default, name, None) for name in default.attribute_map}}
    values = {name: size for name, size in SIZES.items() if type(known.get(name)) is int or name.endswith("token_id")}
    for name, value in known.items():
        if type(value) is float and any(word in name for word in OFF):
            values[name] = 0.0
    for name in default.attribute_map:
        # Both names of one size would be one too many.
        if name in values and default.attribute_map[name] in values:
            del values[name]
    made = type(default)(**{**values, **own})
    with contextlib.suppress(AttributeError):
        made.use_cache = False
    return made


def _text(config) -> dict:
    import torch

    ids = torch.randint(3, 61, (2, 16))
    return {"input_ids": ids, "labels": ids.flip(1)}


def _image(config) -> dict:
    import torch

    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 2, 1, 1])}


def _sound(config) -> dict:
    import torch

    return {"input_values": torch.randn(2, 512), "labels": torch.randint(3, 61, (2, 5))}


def _spectrum(config) -> dict:
    import torch

    shape = (2, 8, 32) if config.model_type == "whisper" else (2, 32, 8)
    return {"input_features": torch.randn(shape), "labels": torch.randint(3, 61, (2, 8))}


def _mel(config) -> dict:
    import torch

    return {"input_values": torch.randn(2, 32, 16), "labels": torch.tensor([0, 2])}


_BATCHES = {"text": _text, "image": _image, "sound": _sound, "spectrum": _spectrum, "mel": _mel}
