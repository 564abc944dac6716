"""Tunix's sampler as a contestant of `rollout.py`, in an environment of Tunix's own.

    python benchmarks/rollout_tunix.py DIR

DIR is a Llama in Hugging Face's format, float32. Reads a JSON object a line, `prompts` (lists of
tokens), `length` (that they are padded to), `limit`, `ends` and `seed`; answers each with a line
`ROLLOUT ` and a list of responses, each up to its end. One device, whose products use all cores.
"""

from __future__ import annotations

import functools
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from tunix.generate import sampler
from tunix.models.llama3 import model, params

MARK = "ROLLOUT "


class Words:
    """A tokenizer of which a token's text is its number."""

    def __init__(self, size: int):
        self.size = size

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none is put before a text

    def eos_id(self) -> int:
        return self.size  # is never drawn

    def pad_id(self) -> int:
        return self.size + 1


def main() -> None:
    folder = sys.argv[1]
    with open(os.path.join(folder, "config.json")) as file:
        told = json.load(file)
    config = model.ModelConfig(
        num_layers=told["num_hidden_layers"],
        vocab_size=told["vocab_size"],
        embed_dim=told["hidden_size"],
        hidden_dim=told["intermediate_size"],
        num_heads=told["num_attention_heads"],
        head_dim=told["head_dim"],
        num_kv_heads=told["num_key_value_heads"],
        rope_theta=told["rope_theta"],
        norm_eps=told["rms_norm_eps"],
        weight_tying=told["tie_word_embeddings"],
    )
    kind = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=kind)

    with mesh:
        network = params.create_model_from_safe_tensors(folder, config, mesh, jnp.float32)

        @functools.cache
        def sampler_of(columns: int) -> sampler.Sampler:
            sizes = sampler.CacheConfig(
                columns, config.num_layers, config.num_kv_heads, config.head_dim
            )
            return sampler.Sampler(network, Words(config.vocab_size), sizes)

        for line in sys.stdin:
            asked = json.loads(line)
            limit, length = asked["limit"], asked["length"]
            found = sampler_of(length + limit)(
                [" ".join(map(str, prompt)) for prompt in asked["prompts"]],
                max_generation_steps=limit,
                max_prompt_length=length,
                eos_tokens=asked["ends"] or None,
                temperature=1.0,
                top_p=1.0,
                seed=asked["seed"],
            )
            # A response comes without the token that has ended it.
            end = asked["ends"][:1]
            texts = [list(map(int, tokens)) for tokens in found.tokens]
            responses = [text + end if len(text) < limit else text for text in texts]
            print(MARK + json.dumps(responses), flush=True)


if __name__ == "__main__":
    main()
