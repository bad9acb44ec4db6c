"""Tests with networks of transformers and adapters of PEFT: `make test-adapters`, and not part of `make test`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

if not os.environ.get("UNALIKE_TEST_ADAPTERS") or importlib.util.find_spec("peft") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random networks as ``save_pretrained`` writes them."""
    import transformers as tf

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    words = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **words)
    llama = tf.LlamaConfig(num_key_value_heads=1, max_position_embeddings=32, **words, **small)
    networks = {
        "bert": tf.BertModel(tf.BertConfig(max_position_embeddings=32, **words, **small)),
        "gpt2": tf.GPT2LMHeadModel(gpt2),
        "llama": tf.LlamaForCausalLM(llama),
        "vit": tf.ViTForImageClassification(tf.ViTConfig(image_size=8, patch_size=4, num_channels=3, **small)),
    }
    found = {}
    for name, network in networks.items():
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        found[name] = tmp_path_factory.mktemp(name)
        network.save_pretrained(found[name])
    return found
