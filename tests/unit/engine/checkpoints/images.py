"""Small configs of decoders that read images."""

from transformers import (
    Exaone4_5_Config,
    Exaone4Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm4vMoeTextConfig,
    Glm4vTextConfig,
    GlmOcrConfig,
    GlmOcrTextConfig,
    Idefics3Config,
    InklingConfig,
    InklingTextConfig,
    LlamaConfig,
    LlavaConfig,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLTextConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeTextConfig,
    Qwen3VLTextConfig,
    SmolVLMConfig,
)

from tests.unit.engine.checkpoints.shapes import (
    DELTA_NET,
    EXPERTS,
    GLM_VISION,
    INKLING,
    MINIMAX_M3,
    MROPE,
    QWEN_VISION,
    ROUTED,
    SHAPE,
    VISION,
    WIDE,
    YARN,
)

_HALF_MROPE = MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}

IMAGES: dict[str, PreTrainedConfig] = {
    "gemma3, with images": Gemma3Config(  # type: ignore[call-arg]
        text_config=Gemma3TextConfig(**WIDE | {"tie_word_embeddings": True}, sliding_window=9),
        vision_config=VISION,
        mm_tokens_per_image=1,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        eos_token_id=[1, 7],
        architectures=["Gemma3ForConditionalGeneration"],
    ),
    "exaone4.5": Exaone4_5_Config(
        text_config=Exaone4Config(**SHAPE, sliding_window=9, sliding_window_pattern=2),
        vision_config=QWEN_VISION | {"num_key_value_heads": 1},
    ),
    "glm4v": Glm4vConfig(
        text_config=Glm4vTextConfig(**SHAPE, rope_parameters=_HALF_MROPE),
        vision_config=GLM_VISION,
    ),
    "glm4v moe": Glm4vMoeConfig(
        text_config=Glm4vMoeTextConfig(**SHAPE | ROUTED, rope_parameters=_HALF_MROPE),
        vision_config=GLM_VISION,
    ),
    "glm ocr": GlmOcrConfig(
        text_config=GlmOcrTextConfig(  # type: ignore[call-arg]
            **SHAPE, head_dim=32, rope_parameters=_HALF_MROPE | {"mrope_section": [2, 2, 4]}
        ),
        vision_config=GLM_VISION,
    ),
    "llava, llama": LlavaConfig(text_config=LlamaConfig(**SHAPE), vision_config=VISION),
    "llava, mistral": LlavaConfig(
        text_config=MistralConfig(**SHAPE, sliding_window=11), vision_config=VISION
    ),
    "llava, qwen2": LlavaConfig(text_config=Qwen2Config(**SHAPE), vision_config=VISION),
    "mistral3": Mistral3Config(
        text_config=MistralConfig(**SHAPE, sliding_window=None),
        vision_config=VISION,
        tie_word_embeddings=False,
    ),
    "idefics3": Idefics3Config(text_config=LlamaConfig(**SHAPE), vision_config=VISION),
    "smolvlm, tied": SmolVLMConfig(
        text_config=LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
        vision_config=VISION,
        tie_word_embeddings=True,
    ),
    "qwen2 vl": Qwen2VLConfig(
        text_config=Qwen2VLTextConfig(**SHAPE, rope_parameters=MROPE),
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 64, "num_heads": 1},
    ),
    "qwen2.5 vl, tied": Qwen2_5_VLConfig(
        text_config=Qwen2_5_VLTextConfig(**SHAPE, rope_parameters=MROPE),
        vision_config=QWEN_VISION,
        tie_word_embeddings=True,
    ),
    "qwen3 vl": Qwen3VLConfig(
        text_config=Qwen3VLTextConfig(**WIDE, rope_parameters=MROPE | {"mrope_section": [8, 4, 4]}),
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3 vl moe": Qwen3VLMoeConfig(
        text_config=Qwen3VLMoeTextConfig(
            **WIDE,
            **EXPERTS,
            decoder_sparse_step=2,
            rope_parameters=MROPE | {"mrope_section": [8, 4, 4]},
        ),
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3.5 vl": Qwen3_5Config(
        text_config=Qwen3_5TextConfig(
            **SHAPE | DELTA_NET, rope_parameters=MROPE | {"mrope_section": [2, 1, 1]}
        ),
        vision_config=QWEN_VISION,
    ),
    "mistral3, ministral3": Mistral3Config(
        text_config=Ministral3Config(
            **SHAPE, head_dim=16, rope_parameters=YARN | {"llama_4_scaling_beta": 0.4}
        ),
        vision_config=VISION,
        tie_word_embeddings=False,
    ),
    "minimax m3, with images": MiniMaxM3VLConfig(
        text_config=MiniMaxM3VLTextConfig(
            **MINIMAX_M3, index_topk_blocks=3, index_block_size=4, index_local_blocks=2
        ),
        vision_config=VISION,
    ),
    "inkling, with images": InklingConfig(
        text_config=InklingTextConfig(
            **INKLING,
            mlp_layer_types=["dense", "sparse", "sparse"],
            local_layer_ids=[1],
        ),
        vision_config={"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1},
        audio_config={"n_mel_bins": 2, "mel_vocab_size": 4},
    ),
}
