"""PEFT adapter directories (github.com/huggingface/peft), read and written:
``adapter_config.json`` and ``adapter_model.safetensors``.

``lora_A`` is [rank, inputs] and ``lora_B`` [outputs, rank], however the matrix itself is stored.
transformers 5 stores a layer's experts in arrays, and PEFT adapts these (``target_parameters``):
``lora_A`` is [experts rank, inputs] then, ``lora_B`` [outputs, rank experts].
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.errors import ConfigError, short_repr
from hjax.files import StrPath
from hjax.models.lora import INNER, NESTED, Lora, layers_of
from hjax.models.parameter_spec import ParameterKind, ParameterSpec, TensorPart, parts
from hjax.models.rotary import is_number
from hjax.models.safetensors_files import DTYPES, TensorFile, create_file
from hjax.user_input import check_directory, read_object, user_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B, _M = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
# Keys that do not affect the tensors' meaning or the scaling, or are handled.
_IGNORED_KEYS = frozenset(
    """
    auto_mapping base_model_name_or_path corda_config eva_config exclude_modules fan_in_fan_out
    inference_mode init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout
    modules_to_save peft_type peft_version r rank_pattern alpha_pattern revision runtime_config
    target_modules task_type use_rslora loftq_config ensure_weight_tying megatron_core
    qalora_group_size use_dora target_parameters
    """.split()
)
# Values of init_lora_weights that leave the base as it is; others change its weights too.
_BASE_KEEPING_INITS = ("none", "true", "false", "gaussian", "eva", "orthogonal", "mica")
_HEADS = {"score", "classifier"}  # in modules_to_save of every sequence classifier
_TABLES = re.compile(r"(^|\.)(lm_head|embed_tokens|wte|embed_out|embed_in)\.")
_QUANTIZED_NAME = re.compile(r"(-unsloth)?-bnb-[48]bit$")
_MERGE = "merge it with PEFT (merge_and_unload) and give the merged model"


def split_base(path: StrPath) -> tuple[StrPath, str]:
    """The directory and the base of ``DIRECTORY,base=MODEL``; the base is empty without one."""
    directory, given, base = str(path).partition(",base=")
    return (directory, base) if given and not Path(path).is_dir() else (path, "")


def is_adapter(path: StrPath) -> bool:
    """Whether a directory, with or without ``,base=MODEL``, holds adapters and no model."""
    directory = user_path(split_base(path)[0], "model ")
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


class Adapter:
    """The adapters in a PEFT directory.

    Attributes:
      path: the directory.
      base: directory or name of the base model: that of ``path,base=MODEL``, or of the config.

    Raises:
      ConfigError: missing, damaged or truncated files, or an unsupported kind, by name.
    """

    def __init__(self, path: StrPath):
        directory, given = split_base(path)
        self.path = user_path(directory, "model ")
        self._config = self._read_config()
        self.base = given or str(self._config.get("base_model_name_or_path") or "")
        if not self.base or is_adapter(self.base):
            what = "an adapter itself" if self.base else "not named"
            raise ConfigError(
                f"{self.path / CONFIG}: base_model_name_or_path is {what}; give the model's "
                f"directory or name there, or {self.path},base=MODEL"
            )
        if not given and _QUANTIZED_NAME.search(self.base) and not Path(self.base).is_dir():
            raise ConfigError(
                f"{self.path / CONFIG}: base_model_name_or_path is {self.base}, quantized weights; "
                f"give the model that it was made of: {self.path},base="
                f"{_QUANTIZED_NAME.sub('', self.base)}"
            )
        check_directory(self.path)
        if not (self.path / WEIGHTS).is_file():
            raise ConfigError(
                f"{self.path}: no {WEIGHTS} there; adapters are read from that file alone"
            )
        self.file = TensorFile(self.path / WEIGHTS)
        self.names = {name.removeprefix(_PREFIX): name for name in self.file.shapes}
        if not self.names or len(self.names) < len(self.file.shapes):
            what = f"a tensor with and without {_PREFIX!r}" if self.names else "no tensors"
            raise ConfigError(f"{self.path / WEIGHTS}: it has {what}")
        if (saved := self._config.get("modules_to_save")) and "score.weight" not in self.names:
            raise ConfigError(
                f"{self.path / CONFIG}: modules_to_save={short_repr(saved)}, and {WEIGHTS} has no "
                "score.weight; a head is read from there alone"
            )
        for name, full in self.names.items():
            if _TABLES.search(name):
                raise ConfigError(
                    f"{self.path}: {name!r} adapts an embedding or output table; here matrices of "
                    f"layers have adapters: {_MERGE}"
                )
            if self.file.dtypes[full] not in DTYPES:
                raise ConfigError(
                    f"{self.path}: {name} is of dtype {self.file.dtypes[full]}; supported: "
                    f"{', '.join(DTYPES.values())}"
                )
            shape = self.file.shapes[full]
            if 0 in shape or len(shape) != (1 if name.endswith(_M) else 2):
                raise ConfigError(f"{self.path}: {name} has shape {shape}, which no adapter has")

    def _read_config(self) -> dict[str, Any]:
        file = self.path / CONFIG
        config = read_object(file)
        if config.get("peft_type") != "LORA":
            kind = config.get("peft_type")
            raise ConfigError(
                f"{file}: peft_type {short_repr(kind)} is not supported; supported: LORA"
            )
        left = {key: x for key, x in config.items() if x and key not in _IGNORED_KEYS}
        if left.get("bias") == "none":
            del left["bias"]
        start = config.get("init_lora_weights")
        if str(start).lower() not in _BASE_KEEPING_INITS:
            raise ConfigError(
                f"{file}: init_lora_weights={short_repr(start)} changes the base's weights; "
                "convert to plain LoRA (PEFT's save_pretrained with "
                "path_initial_model_for_weight_conversion)"
            )
        saved = config.get("modules_to_save") or []
        if not isinstance(saved, list) or set(map(str, saved)) - _HEADS:
            raise ConfigError(
                f"{file}: modules_to_save={short_repr(saved)}, whole modules beside the adapters, "
                f"is not supported: {_MERGE}"
            )
        if left:
            shown = ", ".join(f"{key}={value!r}" for key, value in sorted(left.items()))
            raise ConfigError(f"{file}: adapters with {shown[:200]} are not supported")
        _check_values(config, file)
        return config

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its name without PEFT's prefix, in its stored dtype.

        Raises:
          ConfigError: it has values that are not finite.
        """
        tensor = self.file.rows(self.names[name])
        if not np.isfinite(tensor).all():
            raise ConfigError(f"{self.path}: {name} has values that are not finite")
        return tensor

    def scaling(self, module: str, rank: int) -> float:
        """The factor of ``lora_B lora_A`` of a module."""
        alpha = self._pattern_value("alpha_pattern", module, self._config.get("lora_alpha", 8))
        root = math.sqrt(rank) if self._config.get("use_rslora") else rank
        return float(alpha) / root

    def _rank(self, module: str) -> int:
        """The rank of a module's adapters, of each expert's in an array of them."""
        return int(self._pattern_value("rank_pattern", module, self._config.get("r", 8)))

    def _pattern_value(self, key: str, module: str, default: Any) -> Any:
        for pattern, value in (self._config.get(key) or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return default

    def _expert_module(self, part: TensorPart) -> str:
        """The adapted module (array of experts) that a tensor belongs to; empty: none."""
        wanted = self._config.get("target_parameters") or ()

        def targeted(array: str) -> bool:
            return any(f".{array}".endswith(f".{name}") for name in wanted)

        if not part.stacked or not targeted(part.stacked):
            return ""
        module, _, name = part.stacked.rpartition(".")
        inside = name == INNER and targeted(f"{module}.down_proj")
        return module + NESTED * inside

    def merge(self, tensor: np.ndarray, part: TensorPart) -> np.ndarray:
        """A tensor of the base with its adapter, if any, merged in float32.

        Raises:
          ConfigError: the adapter has another shape.
        """
        module = part.name.removesuffix(".weight")
        if array := self._expert_module(part):
            return self._merge_into_experts(tensor, part, array)
        if module + _A not in self.names:
            return tensor
        a, b = self.tensor(module + _A), self.tensor(module + _B)
        shape = (b.shape[0], a.shape[1])
        fits = (shape[::-1] if part.inputs_first else shape) == tensor.shape
        if not fits or a.shape[0] != b.shape[1]:
            raise self._wrong_base_error(module, a, b, tensor)
        if a.shape[0] != (rank := self._rank(module)):
            raise ConfigError(
                f"{self.path}: {module} has adapters of rank {a.shape[0]}, its {CONFIG} says {rank}"
            )
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            addition = b.astype(np.float32) @ a.astype(np.float32)
            addition *= self.scaling(module, a.shape[0])
            both = tensor.astype(np.float32) + (addition.T if part.inputs_first else addition)
            if self.dora:
                both *= self._norm_scale(module, both, over=0 if part.inputs_first else 1)
        return self._finite(both.astype(np.float32), module)

    def _finite(self, merged: np.ndarray, module: str) -> np.ndarray:
        if not np.isfinite(merged).all():
            raise ConfigError(f"{self.path}: {module} is not finite with its adapter merged")
        return merged

    def _norm_scale(self, module: str, both: np.ndarray, over: int) -> np.ndarray:
        """DoRA's factor of each output of a matrix with its adapter, whose inputs are ``over``."""
        magnitudes, outputs = self.tensor(module + _M), both.shape[1 - over]
        if len(magnitudes) != outputs:
            raise ConfigError(
                f"{self.path}: {module} has {len(magnitudes)} magnitudes for {outputs} outputs"
            )
        norm = np.linalg.norm(both, axis=over, keepdims=True)
        return np.asarray(np.expand_dims(magnitudes, over) / norm)

    def _wrong_base_error(
        self, module: str, a: np.ndarray, b: np.ndarray, tensor: np.ndarray
    ) -> ConfigError:
        return ConfigError(
            f"{self.path}: {module} is for a matrix of {a.shape[1]} inputs and {b.shape[0]} "
            f"outputs, the base's is {tensor.shape}; these adapters are for another base"
        )

    def _merge_into_experts(self, tensor: np.ndarray, part: TensorPart, module: str) -> np.ndarray:
        """``merge`` for a tensor of one expert, [outputs, inputs], or of all, [experts, inputs,
        outputs]."""
        a, b = self.tensor(module + _A), self.tensor(module + _B)
        rank = self._rank(part.stacked)
        experts = max(a.shape[0] // max(rank, 1), 1)
        expert, *rest = part.at[1:]
        half = next((index for index in rest if not isinstance(index, slice)), None)
        shape = (b.shape[0] // (1 if half is None else 2), a.shape[1])
        whole = isinstance(expert, slice)
        fits = (experts, *shape[::-1]) if whole else shape
        if fits != tensor.shape or not a.shape[0] == b.shape[1] == experts * rank:
            raise self._wrong_base_error(module, a, b, tensor)
        a = a.astype(np.float32).reshape(experts, rank, -1)
        b = b.astype(np.float32).reshape(-1, rank, experts)
        scaling = np.float32(self.scaling(part.stacked, rank))
        if whole:
            addition = np.einsum("eri,ore->eio", a, b, optimize=True)
        elif expert >= experts:
            raise self._wrong_base_error(module, a[0], b, tensor)
        else:
            start = (half or 0) * shape[0]
            addition = b[start : start + shape[0], :, expert] @ a[expert]
        with np.errstate(over="ignore", invalid="ignore"):
            return self._finite(tensor.astype(np.float32) + scaling * addition, module)

    @property
    def dora(self) -> bool:
        """Whether the adapters are DoRA's, with magnitudes."""
        return bool(self._config.get("use_dora"))

    def check(self, declared: Mapping[str, Any], path: Any) -> None:
        """Check that every tensor belongs to a matrix of the base, or is its scalar head.

        Raises:
          ConfigError: one does not, by name.
        """
        every = [
            part
            for parameter in layers_of(declared).values()
            if parameter.kind is ParameterKind.MATRIX
            for part in parts(parameter)
        ]
        matrices = {self._expert_module(p) or p.name.removesuffix(".weight") for p in every}
        suffixes = (_A, _B, _M) if self.dora else (_A, _B)
        known = {f"{module}{end}" for module in matrices for end in suffixes} | {"score.weight"}
        for name in self.names:
            if name not in known:
                raise ConfigError(
                    f"{self.path}: {name!r} is no adapter of a matrix in the layers of {path}"
                )
            module = name.rpartition(".lora_")[0]
            for counterpart in (f"{module}{end}" for end in suffixes if module):
                if counterpart not in self.names:
                    raise ConfigError(f"{self.path}: {counterpart!r} is missing")

    def parameter(self, parameter: ParameterSpec, lora: Lora) -> np.ndarray:
        """The values of an adapter's parameter, float32.

        Raises:
          ConfigError: a tensor is missing, or its rank, shape or scaling differs from ``lora``.
        """
        read = np.zeros(parameter.shape, np.float32)
        for part in parts(parameter):
            if part.name not in self.names:
                raise ConfigError(
                    f"{self.path}: {part.name!r} is missing; {lora.key}.targets must name what "
                    "the adapters are of"
                )
            tensor = self.tensor(part.name)
            if tensor.shape != part.shape:
                raise ConfigError(
                    f"{self.path}: {part.name} has shape {tensor.shape}; "
                    f"{lora.key}.rank={lora.rank} and the base imply {part.shape}"
                )
            module = part.stacked or part.name.rpartition(".lora_")[0]
            if not math.isclose(scaling := self.scaling(module, lora.rank), lora.scaling):
                raise ConfigError(
                    f"{self.path}: its adapters are scaled by {scaling:g}, {lora.key}.alpha="
                    f"{lora.alpha:g} with rank {lora.rank} by {lora.scaling:g}; set "
                    f"{lora.key}.alpha"
                )
            read[part.at] = part.read(tensor)
        return read

    def check_matches(self, declared: Mapping[str, Any], lora: Lora) -> None:
        """Check that the directory has adapters of these parameters only, with the same settings.

        Raises:
          ConfigError: there are others, also of other matrices in the same tensors, or DoRA or
            dropout differ from ``lora``.
        """
        if self.dora != lora.dora:
            raise ConfigError(
                f"{self.path}: its adapters have use_dora={self.dora}, {lora.key}.dora is "
                f"{lora.dora}; set {lora.key}.dora={str(self.dora).lower()}"
            )
        rate = float(self._config.get("lora_dropout") or 0.0)
        if rate != lora.dropout:
            raise ConfigError(
                f"{self.path}: its adapters learned with lora_dropout={rate:g}, {lora.key}.dropout "
                f"is {lora.dropout:g}; set {lora.key}.dropout={rate:g}, or change it in {CONFIG}"
            )
        ours: dict[str, list[TensorPart]] = {}
        for parameter in layers_of(declared).values():
            for part in parts(parameter) if parameter.kind is ParameterKind.ADAPTER else ():
                ours.setdefault(part.name, []).append(part)
        left = sorted(set(self.names) - ours.keys() - {"score.weight"})
        if left and re.search(r"\.experts\.\d+\.", left[0]):
            raise ConfigError(
                f"{self.path}: {left[0]!r} is of one expert, as beside transformers 4; such "
                f"adapters are read merged ({lora.key}.rank=0), those that learn on are of the "
                "arrays of all experts (target_parameters)"
            )
        if left:
            raise ConfigError(
                f"{self.path}: {left[0]!r} is not among {lora.key}.targets; name its matrix there "
                "too"
            )
        for name, own in ours.items():
            if own[0].part is None or name not in self.names:
                continue
            rest = np.array(self.tensor(name))
            if rest.shape == own[0].shape:
                for part in own:
                    part.clear(rest)
                if rest.any():
                    raise ConfigError(
                        f"{self.path}: {name!r} is of matrices too that are not among "
                        f"{lora.key}.targets; name them there"
                    )


# What a pattern of modules may be: repetitions of no group, and few enough ways to match a name.
_PATTERN = re.compile(r"[^*+{}]*((?<!\))[*+][^*+{}]*){0,4}")
_MOST_WAYS = 2**18


def _ways(pattern: str) -> int:
    """A bound on the choices that matching an expression may try, 1 for a plain name: 16 for each
    repetition, 2 for each ``?``, and the alternatives of each group."""
    repeated = pattern.count("*") + pattern.count("+")
    alternatives = math.prod(each.count("|") + 1 for each in pattern.split("("))
    return int(16**repeated * 2 ** pattern.count("?") * alternatives)


def _check_values(config: Mapping[str, Any], file: Path) -> None:
    """Check the numbers, flags and patterns of an ``adapter_config.json``.

    Raises:
      ConfigError: one is something else, by its key.
    """

    def is_size(value: Any) -> bool:
        return is_number(value) and 0 <= value <= 1e6

    for key in ("r", "lora_alpha", "lora_dropout"):
        if not is_size(value := config.get(key, 0)):
            raise ConfigError(f"{file}: {key} is {short_repr(value)}; a number of 0 to 1e6")
    for key in ("use_rslora", "use_dora"):
        if not isinstance(value := config.get(key) or False, bool):
            raise ConfigError(f"{file}: {key} is {short_repr(value)}; true or false")
    if not _is_list_of_text(value := config.get("target_parameters") or []):
        raise ConfigError(f"{file}: target_parameters is {short_repr(value)}; a list of names")
    for key in ("rank_pattern", "alpha_pattern"):
        value = config.get(key) or {}
        if not isinstance(value, Mapping) or not all(map(is_size, value.values())):
            raise ConfigError(f"{file}: {key} is {short_repr(value)}; numbers of 0 to 1e6 by name")
        for pattern in value:
            try:
                usable = len(pattern) < 1000 and _PATTERN.fullmatch(pattern) and re.compile(pattern)
            except re.error:
                usable = None
            if not usable:
                raise ConfigError(
                    f"{file}: {key} has the pattern {short_repr(pattern)}; a name, or an "
                    "expression with at most four * or +, none after a group"
                )
        if sum(map(_ways, value)) > _MOST_WAYS:
            raise ConfigError(
                f"{file}: {key} has expressions that would take too long; name the modules, or "
                "use fewer * + ? and alternatives"
            )


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


# A matrix's adapter: part and values of A, part and values of B.
_Piece = tuple[TensorPart, np.ndarray, TensorPart, np.ndarray]


def save_adapter(
    directory: Path,
    declared: Mapping[str, Any],
    params: Mapping[str, Any],
    lora: Lora,
    base: str,
    scalar: bool = False,
) -> None:
    """Write a PEFT directory, float32.

    A stored tensor that holds several matrices (a fused q, k and v) gets one block-diagonal adapter
    whose rank is the sum of theirs.

    Args:
      directory: created if missing.
      declared: of the model with adapters, see ``hjax.models.architecture``.
      params: nested dict of numpy arrays like it, the trainable ones at least.
      lora: the adapters' settings.
      base: directory or name of the base model.
      scalar: the model has a scalar head, which is written too.
    """
    layers, values = layers_of(declared), layers_of(params)
    modules: dict[str, list[_Piece]] = {}
    for name in (n for n in layers if n.endswith("_a") and layers[n].kind is ParameterKind.ADAPTER):
        counterpart = name.removesuffix("_a") + "_b"
        for a, b in zip(parts(layers[name]), parts(layers[counterpart]), strict=True):
            found = a, values[name][a.at], b, values[counterpart][b.at]
            modules.setdefault(a.name.removesuffix(_A), []).append(found)
    shapes: dict[str, tuple[int, ...]] = {}
    ranks: dict[str, int] = {}
    for module, pieces in modules.items():
        (low, inputs), outputs = pieces[0][0].shape, pieces[0][2].shape[0]
        shapes[f"{_PREFIX}{module}{_A}"] = (low * len(pieces), inputs)
        shapes[f"{_PREFIX}{module}{_B}"] = (outputs, low * len(pieces))
        if len(pieces) > 1:
            ranks[_name_in_layer(module)] = lora.rank * len(pieces)
    vectors = {
        f"{_PREFIX}{part.name}": (part, values[name][part.at])
        for name in (
            n for n in layers if n.endswith("_m") and layers[n].kind is ParameterKind.ADAPTER
        )
        for part in parts(layers[name])
    }
    shapes |= {name: part.shape for name, (part, _) in vectors.items()}
    if scalar:
        shapes[f"{_PREFIX}score.weight"] = (1, params["head"].shape[0])
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {name: (shape, "float32") for name, shape in shapes.items()}
    tensors = create_file(directory / WEIGHTS, wanted)
    for module, pieces in modules.items():
        _write_blocks(tensors[f"{_PREFIX}{module}{_A}"], tensors[f"{_PREFIX}{module}{_B}"], pieces)
    for name, (part, vector) in vectors.items():
        part.write(tensors[name], vector)
    if scalar:
        tensors[f"{_PREFIX}score.weight"][0] = params["head"]
    sources = {module: pieces[0][0] for module, pieces in modules.items()}
    turned = any(part.inputs_first for p in layers.values() for part in parts(p))
    config = _adapter_config(lora, base, scalar, sources=sources, ranks=ranks, turned=turned)
    (directory / CONFIG).write_text(json.dumps(config, indent=1) + "\n")


def _write_blocks(into: Any, out: Any, pieces: Sequence[_Piece]) -> None:
    """Write the adapters of a tensor's matrices as one block-diagonal adapter, A and B."""
    for number, (a, first, b, second) in enumerate(pieces):
        own = slice(number * a.shape[0], (number + 1) * a.shape[0])
        a.write(into[own], first)
        b.write(out[:, own], second)


def _adapter_config(
    lora: Lora,
    base: str,
    scalar: bool,
    sources: Mapping[str, TensorPart],
    ranks: Mapping[str, int],
    turned: bool,
) -> dict[str, Any]:
    """The content of PEFT's ``adapter_config.json``.

    Args:
      lora, base, scalar: as of ``save_adapter``.
      sources: by module, the tensor of its adapter's first part.
      ranks: by module, ranks that differ from ``lora.rank``.
      turned: whether the base stores matrices [inputs, outputs].
    """
    # Larger alphas give block-diagonal adapters the same scaling at their larger rank.
    grow = {n: rank / lora.rank for n, rank in ranks.items()}
    alphas = {n: lora.alpha * (math.sqrt(x) if lora.rslora else x) for n, x in grow.items()}
    arrays = sorted({_name_in_layer(part.stacked) for part in sources.values() if part.stacked})
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": turned,
        "target_modules": sorted(
            {m.rpartition(".")[2] for m, part in sources.items() if not part.stacked}
        ),
        **({"target_parameters": arrays} if arrays else {}),
        **({"rank_pattern": ranks, "alpha_pattern": alphas} if ranks else {}),
        **({"modules_to_save": ["score"]} if scalar else {}),
        "inference_mode": True,
    }


def _name_in_layer(name: str) -> str:
    """The name of a module or array within its layer."""
    return re.sub(r"^.*\.\d+\.", "", name)
