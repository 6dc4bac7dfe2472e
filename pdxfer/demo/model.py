"""The demo's language models: Hugging Face transformers, on the CPU, one thread.

All but `smollm2` are built on the spot from a configuration and a seed. Their weights are scaled so
that every page of the cache decides which tokens come out: a lost or torn page changes them. (Two
whole pages in each other's place do not: attention sees a set of keys, and positions are inside the
keys. The digest of `paging.digest` sees those.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from pdxfer.demo.options import KV_HEADS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VOCABULARY = 4096
_WEIGHT_GAIN = 2.0
"""Weights have the standard deviation gain / sqrt(columns). At the usual 0.02 attention is nearly
uniform, and a page could be lost without another token coming out."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a pool has to know about a model."""

    layers: int
    kv_heads: int
    key_dim: int
    """Elements of a head's key; where the cache is `latent`, its kv_lora_rank."""
    value_dim: int
    """Elements of a head's value; where the cache is `latent`, its qk_rope_head_dim."""
    dtype: str
    latent: bool = False
    """A token is one latent row and its rope, not heads of keys and values."""

    @property
    def parts(self) -> tuple[str, str]:
        """What a layout calls the two tensors of a layer."""
        return ("latent", "rope") if self.latent else ("k", "v")


class DemoModel:
    """A causal language model that fills a KV cache and continues from one.

    Threads:  the caller's only; torch is held to one thread, so that the same input gives the same
              bits in every process.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval()
        self.config: PretrainedConfig = model.config

    @property
    def geometry(self) -> Geometry:
        """Layers, heads, sizes and dtype of its cache."""
        config, dtype = self.config, str(self._model.dtype).removeprefix("torch.")
        layers = config.num_hidden_layers
        if isinstance(config, DeepseekV3Config):
            widths = config.kv_lora_rank, config.qk_rope_head_dim
            return Geometry(layers, 1, *widths, dtype, latent=True)
        return Geometry(layers, config.num_key_value_heads, config.head_dim, config.head_dim, dtype)

    def new_cache(self) -> DynamicCache:
        """An empty cache of this model."""
        return DynamicCache(config=self.config)

    def prefill(self, tokens: Sequence[int], chunk_tokens: int) -> tuple[DynamicCache, int]:
        """Read a prompt in chunks, as a serving engine does.

        Returns:  the filled cache and the first token of the answer (greedy).
        """
        cache = self.new_cache()
        first = -1
        for start in range(0, len(tokens), chunk_tokens):
            first = self._step(tokens[start : start + chunk_tokens], cache)
        return cache, first

    def decode(self, cache: DynamicCache, first: int, count: int) -> list[int]:
        """Continue greedily: `count` tokens, of which `first` is the first. The cache grows."""
        answer = [first]
        while len(answer) < count:
            answer.append(self._step(answer[-1:], cache))
        return answer

    def _step(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        with torch.inference_mode():
            output = self._model(
                torch.tensor([list(tokens)]), cache=cache, use_cache=True, logits_to_keep=1
            )
            return int(output.logits[0, -1].argmax())


def build_llama(seed: int, dtype: str = "float32") -> DemoModel:
    """A small Llama with grouped-query attention (8 heads, 4 KV heads) and seeded weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS["llama"],
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return _seeded(LlamaForCausalLM, config, seed, dtype)


def build_qwen3(seed: int, dtype: str = "float32") -> DemoModel:
    """A small Qwen3: norms inside attention, heads of 128, 2 KV heads."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS["qwen3"],
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return _seeded(Qwen3ForCausalLM, config, seed, dtype)


def build_deepseek_v3(seed: int, dtype: str = "float32") -> DemoModel:
    """A small DeepSeek-V3: latent attention with the real model's rows (512 + 64), experts."""
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=128,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return _seeded(DeepseekV3ForCausalLM, config, seed, dtype)


def _seeded(
    kind: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    seed: int,
    dtype: str,
) -> DemoModel:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = kind(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:  # experts are stacked in one tensor
                deviation = 1.0 if "embed" in name else _WEIGHT_GAIN / weight.shape[-1] ** 0.5
                weight.normal_(0.0, deviation)
    return DemoModel(model.to(getattr(torch, dtype)))


BUILDERS: Final[dict[str, Callable[[int, str], DemoModel]]] = {
    "llama": build_llama,
    "qwen3": build_qwen3,
    "deepseek-v3": build_deepseek_v3,
}


def load_saved(folder: Path) -> DemoModel:
    """The model that `smollm2.prepare` saved, in float32."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return DemoModel(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


def load(name: str, seed: int, dtype: str, folder: str) -> DemoModel:
    """The model a worker was told to run: `smollm2` by its folder, others by seed and dtype."""
    if name == "smollm2":
        return load_saved(Path(folder))
    return BUILDERS[name](seed, dtype)
