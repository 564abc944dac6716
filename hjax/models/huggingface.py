"""Hugging Face directories: read and write Llama weights (config.json + safetensors)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.parameters import Params

LAYER = "model.layers.{}."


def read_config(path: str | os.PathLike) -> ModelConfig:
    """The shapes in a directory's config.json.

    Raises:
      ConfigError: no such file, or a model this version does not support.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path}: no config.json there; give a Hugging Face model directory")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must be a JSON object, not {type(content).__name__}")
    return ModelConfig.from_hf(content, str(file))


def load_weights(
    path: str | os.PathLike, unembedding: bool = True
) -> tuple[ModelConfig, Params]:
    """Read a Llama directory.

    Args:
      path: the directory.
      unembedding: read the output table of an untied model; a sequence classifier has none.

    Returns:
      the shapes, and the decoder's parameters as float32 numpy arrays, layers stacked.

    Raises:
      ConfigError: missing files or tensors, or tensors of another shape, by name.
    """
    config = read_config(path)
    tensors = _Tensors(Path(path))
    d, h, k, e = config.hidden_size, config.heads, config.kv_heads, config.head_dim

    def stack(read: Callable[[str], np.ndarray]) -> np.ndarray:
        return np.stack([read(LAYER.format(i)) for i in range(config.layers)])

    def projection(name: str, heads: int) -> Callable[[str], np.ndarray]:
        return lambda at: tensors(f"{at}self_attn.{name}_proj.weight", (heads * e, d)).T.reshape(
            d, heads, e
        )

    def mlp(name: str) -> Callable[[str], np.ndarray]:
        return lambda at: tensors(f"{at}mlp.{name}_proj.weight", (config.mlp_size, d)).T

    params: Params = {
        "embedding": tensors("model.embed_tokens.weight", (config.vocab_size, d)),
        "final_norm": tensors("model.norm.weight", (d,)),
        "layers": {
            "attention_norm": stack(lambda at: tensors(f"{at}input_layernorm.weight", (d,))),
            "mlp_norm": stack(lambda at: tensors(f"{at}post_attention_layernorm.weight", (d,))),
            "q": stack(projection("q", h)),
            "kv": np.stack([stack(projection("k", k)), stack(projection("v", k))], axis=2),
            "o": stack(
                lambda at: tensors(f"{at}self_attn.o_proj.weight", (d, h * e)).T.reshape(h, e, d)
            ),
            "gate_up": np.stack([stack(mlp("gate")), stack(mlp("up"))], axis=2),
            "down": stack(
                lambda at: tensors(f"{at}mlp.down_proj.weight", (d, config.mlp_size)).T
            ),
        },
    }
    if unembedding and not config.tie_embeddings:
        params["unembedding"] = tensors("lm_head.weight", (config.vocab_size, d))
    return config, params


def check_files(path: str | os.PathLike) -> None:
    """Open a directory's safetensors files without reading their tensors.

    Raises:
      ConfigError: there are none, or one is damaged or cut short.
    """
    _Tensors(Path(path))


def read_head(path: str | os.PathLike, hidden_size: int) -> np.ndarray | None:
    """The scalar head of a sequence classifier, float32 [hidden_size], or None without one."""
    tensors = _Tensors(Path(path))
    if "score.weight" not in tensors.files:
        return None
    return tensors("score.weight", (1, hidden_size))[0]


def save_weights(
    path: str | os.PathLike, config: ModelConfig, params: Params, tokenizer: Any = None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` that transformers' Llama loads.

    Args:
      path: the directory; made if need be.
      config: shapes.
      params: of the decoder.
      tokenizer: its special ids go into config.json; its own files are for it to save.
    """
    from safetensors.numpy import save_file

    d, mlp = config.hidden_size, config.mlp_size
    tensors = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"],
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = params["unembedding"]
    layers = params["layers"]
    for i in range(config.layers):
        at = LAYER.format(i)
        tensors |= {
            f"{at}input_layernorm.weight": layers["attention_norm"][i],
            f"{at}post_attention_layernorm.weight": layers["mlp_norm"][i],
            f"{at}self_attn.q_proj.weight": np.reshape(layers["q"][i], (d, -1)).T,
            f"{at}self_attn.k_proj.weight": np.reshape(layers["kv"][i][:, 0], (d, -1)).T,
            f"{at}self_attn.v_proj.weight": np.reshape(layers["kv"][i][:, 1], (d, -1)).T,
            f"{at}self_attn.o_proj.weight": np.reshape(layers["o"][i], (-1, d)).T,
            f"{at}mlp.gate_proj.weight": np.reshape(layers["gate_up"][i][:, 0], (d, mlp)).T,
            f"{at}mlp.up_proj.weight": np.reshape(layers["gate_up"][i][:, 1], (d, mlp)).T,
            f"{at}mlp.down_proj.weight": np.asarray(layers["down"][i]).T,
        }
    write_config(path, config, tokenizer)
    save_file(
        {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()},
        Path(path) / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_config(path: str | os.PathLike, config: ModelConfig, tokenizer: Any = None) -> None:
    """Write ``config.json``, with the tokenizer's special ids where one is given."""
    content = config.to_hf()
    for key in ("bos", "eos", "pad"):
        if tokenizer is not None and getattr(tokenizer, f"{key}_id") is not None:
            content[f"{key}_token_id"] = getattr(tokenizer, f"{key}_id")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content, indent=1) + "\n")


class _Tensors:
    """The tensors of a directory's safetensors files, read one at a time."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        self.files: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            try:
                reader = safe_open(str(file), framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file}: not a readable safetensors file ({error})") from error
            self.files |= dict.fromkeys(reader.keys(), reader)
        if not self.files:
            raise ConfigError(
                f"{path}: no *.safetensors files there; this version reads only those"
            )

    def __call__(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.files:
            raise ConfigError(f"{self.path}: tensor {name!r} is missing")
        tensor = self.files[name].get_tensor(name)
        if tensor.shape != shape:
            raise ConfigError(
                f"{self.path}: {name} has shape {tensor.shape}, config.json implies {shape}"
            )
        return np.asarray(tensor, np.float32)
