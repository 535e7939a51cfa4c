"""A Llama of a few thousand random parameters on disk: what the tests of the engine generate with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, EOS = 0, 1


def tiny_llama(path: Path, vocabulary: int = 12, seed: int = 0, **more: Any) -> Any:
    """Save a random model to `path` and return it. Weights are large enough for uneven distributions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "initializer_range": 0.4,
        **more,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    model.save_pretrained(path)
    return model
