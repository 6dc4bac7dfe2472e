"""The demo's language models: Hugging Face transformers, on the CPU, one thread.

`llama` is built on the spot from a configuration and a seed. Its weights are scaled so that every
page of the cache decides which tokens come out: a lost or torn page changes them. (Two whole pages
in each other's place do not: attention sees a set of keys, and positions are inside the keys. The
digest of `paging.digest` sees those.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY = 4096
_WEIGHT_GAIN = 2.0
"""Weights have the standard deviation gain / sqrt(columns). At the usual 0.02 attention is nearly
uniform, and a page could be lost without another token coming out."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a pool has to know about a model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


class DemoModel:
    """A causal language model that fills a KV cache and continues from one.

    Threads:  the caller's only; torch is held to one thread, so that the same input gives the same
              bits in every process.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model.eval()
        self.config: LlamaConfig = model.config

    @property
    def geometry(self) -> Geometry:
        """Layers, KV heads, head size and dtype of its cache."""
        return Geometry(
            layers=self.config.num_hidden_layers,
            kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            dtype=str(self._model.dtype).removeprefix("torch."),
        )

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
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                deviation = 1.0 if "embed" in name else _WEIGHT_GAIN / weight.shape[1] ** 0.5
                weight.normal_(0.0, deviation)
    return DemoModel(model.to(getattr(torch, dtype)))


def load_saved(folder: Path) -> DemoModel:
    """The model that `smollm2.prepare` saved, in float32."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return DemoModel(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


def load(name: str, seed: int, dtype: str, folder: str) -> DemoModel:
    """The model a worker was told to run: `llama` (seed, dtype) or `smollm2` (folder)."""
    if name == "smollm2":
        return load_saved(Path(folder))
    return build_llama(seed, dtype)
