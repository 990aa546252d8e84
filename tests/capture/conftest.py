"""Tiny randomly initialised models of many architectures, a tokenizer made on the spot, and a sink for arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from kvtool.capture.generation import Feed
from kvtool.capture.hook import observed
from kvtool.capture.probe import probe
from kvtool.capture.quiet import quiet
from kvtool.capture.recorder import Recorder
from kvtool.capture.request import parse_queries
from kvtool.capture.rotation_watch import RotaryState

VOCABULARY = 300
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _config(cls: str, **changes: Any) -> Any:
    return getattr(transformers, cls)(**{**_BASE, **changes})


CONFIGS: dict[str, Any] = {
    "llama": lambda: _config("LlamaConfig"),
    "llama3-scaled": lambda: _config(
        "LlamaConfig",
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "llama-yarn": lambda: _config(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-dynamic": lambda: _config(
        "LlamaConfig",
        max_position_embeddings=48,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "qwen3": lambda: _config("Qwen3Config", head_dim=24),
    "qwen3-wide": lambda: _config("Qwen3Config", head_dim=128),
    "mistral": lambda: _config("MistralConfig", sliding_window=9),
    "mistral-wide": lambda: _config("MistralConfig", sliding_window=40),
    "gemma2": lambda: _config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=9,
        attn_logit_softcapping=0.5,
        query_pre_attn_scalar=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3": lambda: _config(
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=9,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma3n": lambda: _config(
        "Gemma3nTextConfig",
        num_hidden_layers=6,
        head_dim=16,
        sliding_window=9,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        intermediate_size=[96] * 6,
        activation_sparsity_pattern=[0.0] * 6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "gpt_oss": lambda: _config(
        "GptOssConfig",
        head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **_MOE,
    ),
    "deepseek_v3": lambda: _config(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "deepseek_v2": lambda: _config(
        "DeepseekV2Config",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "phi3": lambda: _config(
        "Phi3Config", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    ),
    "stablelm": lambda: _config("StableLmConfig"),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=1,
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
        init_std=0.3,
        eos_token_id=2,
        pad_token_id=None,
        bos_token_id=1,
        dropout=0.0,
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=64,
        n_layer=3,
        n_head=4,
        rotary_dim=8,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=1,
    ),
    "smollm3": lambda: _config("SmolLM3Config", num_hidden_layers=4, no_rope_layer_interval=4),
    "cohere2": lambda: _config(
        "Cohere2Config",
        num_hidden_layers=4,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
    "glm4": lambda: _config("Glm4Config", head_dim=16),
    "qwen3_next": lambda: _config(
        "Qwen3NextConfig",
        num_hidden_layers=4,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "llama4": lambda: _config(
        "Llama4TextConfig",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size_mlp=96,
        attention_chunk_size=9,
        interleave_moe_layer_step=2,
        num_local_experts=2,
    ),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=False
    ),
    "mamba": lambda: transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
}


@functools.cache
def _tiny(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with quiet():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norms, biases and sinks start at 0 or 1: only random ones are really tested.
            if parameter.dim() == 1 or "sinks" in parameter_name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False).to(dtype)


class Arrays:
    """A sink that keeps what is appended: layer -> name -> tensor."""

    def __init__(self) -> None:
        self.parts: dict[int, dict[str, list[torch.Tensor]]] = {}

    def append(self, layer: int, **arrays: torch.Tensor | None) -> None:
        for name, array in arrays.items():
            if array is not None:
                self.parts.setdefault(layer, {}).setdefault(name, []).append(array.clone())

    def __getitem__(self, layer: int) -> dict[str, torch.Tensor]:
        return {name: torch.cat(p, 0 if name == "query_steps" else 1) for name, p in self.parts[layer].items()}


class Captured:
    """One recorded run of a tiny model: logits behind each forward, arrays, final geometries, samples."""

    def __init__(
        self, model: Any, pushes: list[list[int]], chunk: int | None, queries: str, known: bool, kept: Any
    ) -> None:
        self.probed = probe(model)
        self.arrays = Arrays()
        total = sum(map(len, pushes))
        recorder = Recorder(
            model, self.probed, len(pushes[0]), parse_queries(queries), total if known else None, self.arrays, kept
        )
        state = RotaryState(model)
        feed = Feed(model, chunk=chunk, around=recorder.forward)
        with observed(model, recorder), recorder.watching():
            self.logits = [feed.push(part) for part in pushes]
        state.restore()
        self.geometries = recorder.finish()
        self.samples, self.ran = recorder.samples(), recorder.ran
        self.tokens = total


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Function of (name, dtype) -> a tiny model with large random weights, in evaluation mode."""
    torch.set_num_threads(1)
    return lambda name, dtype=torch.float32: _tiny(name, dtype)


@pytest.fixture(scope="session")
def record() -> Callable[..., Captured]:
    """Function of (model, pushes) -> the recorded run of feeding these lists of tokens one after another."""
    return lambda model, pushes, chunk=None, queries="all", known=True, kept=None: Captured(
        model, pushes, chunk, queries, known, kept
    )


@pytest.fixture(scope="session")
def pushes() -> list[list[int]]:
    """A prompt of 23 tokens (more than twice the window of 9), then eleven single ones and a block of five."""
    tokens = torch.randint(3, VOCABULARY, (39,), generator=torch.Generator().manual_seed(5)).tolist()
    return [tokens[:23], *[[t] for t in tokens[23:34]], tokens[34:]]


def byte_tokenizer() -> Any:
    """A byte-level tokenizer without merges: one token a byte, ids 3 to 258, <s> 1, </s> 2."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{character: 3 + i for i, character in enumerate(alphabet)}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function of an architecture's name -> a folder with its tiny model as safetensors, and a tokenizer."""

    @functools.cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp("models") / name
        with quiet():
            _tiny(name, torch.float32).save_pretrained(path)
            byte_tokenizer().save_pretrained(path)
        return path

    return made
