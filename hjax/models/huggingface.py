"""Hugging Face model directories: read and write config.json and safetensors.

Each ``ParameterSpec`` names the tensors that hold the parameter.
"""

import contextlib
import gc
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError, short_repr
from hjax.files import StrPath, replace_file
from hjax.models.architecture import decoder_parameters, scalar_parameters
from hjax.models.families import from_hf, to_hf
from hjax.models.families.family import DTYPE_KEYS, NO_DTYPE
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import ParameterSpec, TensorPart, parts
from hjax.models.parameters import Params
from hjax.models.peft_files import Adapter
from hjax.models.quantized import input_dimensions, quantize
from hjax.models.safetensors_files import DTYPES, TensorFile, create_file
from hjax.models.sharded_loading import ParameterShards
from hjax.progress import report_progress
from hjax.sharded_values import ArrayRegions
from hjax.user_input import check_directory, read_object

# Tensors in files that are not decoder parameters: buffers, and a scalar head.
SCORE_HEAD = "score.weight"
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", SCORE_HEAD)
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
OUTPUT_TABLE = "lm_head.weight"
# What torch's wrappers put into names, and what stands before a text model's names in files of
# wrappers or of a model that sees images too.
_WRAPPERS = re.compile(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
_PREFIX = re.compile(r"^(module\.)*((model\.)?language_model\.)?")


def read_config(path: StrPath) -> ModelConfig:
    """The shapes in a directory's config.json. If it names no dtype, that of the files is used, or
    float32 if they differ.

    Raises:
      ConfigError: no such file, or a model this version does not support.
    """
    content = read_config_json(path)
    if all(content.get(key) in NO_DTYPE for key in DTYPE_KEYS):
        content |= {DTYPE_KEYS[0]: _dtype_of_files(Path(path))}
    return from_hf(content, str(Path(path) / "config.json"))


def _dtype_of_files(path: Path) -> str:
    """The dtype of a directory's weights; float32 if there are several, or no weights."""
    if not (path / INDEX).is_file() and not any(path.glob("*.safetensors")):
        return "float32"
    files = _Tensors(path).files
    found = {file.dtypes[name] for name, file in files.items() if not name.endswith(_IGNORED)}
    return DTYPES.get(found.pop(), "float32") if len(found) == 1 else "float32"


def stored_dtypes(path: StrPath, config: ModelConfig) -> dict[str, str]:
    """Dtypes of a directory's tensors, by their names in ``save_weights``; reads headers only.

    Args:
      path: the directory.
      config: of the language model there.
    """
    tensors, found = _Tensors(Path(path)), {}
    for parameter, _ in _specs_and_values(decoder_parameters(config)):
        for part in parts(parameter):
            if (name := tensors.name(part)) is not None:
                found[part.name] = tensors.files[name].dtype(name).name
    return found


def read_config_json(path: StrPath) -> dict[str, Any]:
    """The content of a directory's config.json.

    Raises:
      ConfigError: no such file, or not a JSON object.
    """
    file = Path(path) / "config.json"
    check_directory(Path(path))
    if not file.is_file():
        raise ConfigError(f"{path}: no config.json there; give a Hugging Face model directory")
    return read_object(file)


def load_weights(path: StrPath, adapter: Adapter | None = None) -> tuple[ModelConfig, Params]:
    """Read a directory's language model, with an adapter merged if one is given.

    Returns:
      the config, and the decoder's parameters as float32 numpy arrays, layers stacked.

    Raises:
      ConfigError: as of ``load_params``.
    """
    config = read_config(path)
    return config, load_params(path, config, decoder_parameters(config), adapter=adapter)


def load_params(
    path: StrPath,
    config: ModelConfig,
    declared: Mapping[str, Any],
    shardings: Params | None = None,
    shapes: Params | None = None,
    adapter: Adapter | None = None,
) -> Params:
    """Load parameters tensor by tensor, each directly onto the devices.

    Args:
      path: the directory.
      config: of the model there.
      declared: nested dict of ``ParameterSpec``, see ``hjax.models.architecture``.
      shardings: nested dict like it, of shardings; a process reads what its own devices hold. None:
        return numpy arrays.
      shapes: nested dict like it, of jax.ShapeDtypeStruct with the dtypes to load; None: float32.
        Matrices declared as quantized are quantized tensor by tensor.
      adapter: to merge into the matrices; a scalar head is taken from it.

    Returns:
      nested dict of arrays.

    Raises:
      ConfigError: missing files or tensors, tensors of another shape or dtype or of another model,
        values that are not finite, by name; or there is no memory.
    """
    tensors = _checked_tensors(path, config, declared, adapter)
    total, done = sum(x.size for x, _ in _specs_and_values(declared)), 0
    what = f"loading {Path(path).name}"
    report_progress(what, 0, total)

    def read_all(
        declared: Mapping[str, Any], shardings: Params | None, shapes: Params | None
    ) -> Params:
        nonlocal done
        params: Params = {}
        for name, parameter in declared.items():
            if name in params:  # a scale, loaded with its matrix
                continue
            where, like = (None if tree is None else tree[name] for tree in (shardings, shapes))
            if not isinstance(parameter, ParameterSpec):
                params[name] = read_all(parameter, where, like)
                continue
            if parameter.quantized:
                assert shardings is not None, f"{name} is quantized onto devices"
                scale = f"{name}_scale"
                both = tensors.read_quantized(parameter, declared[scale], where, shardings[scale])
                params |= zip((name, scale), both)
                done += declared[scale].size
            else:
                dtype = np.dtype(np.float32 if like is None else like.dtype)
                params[name] = tensors.parameter(parameter, where, dtype)
            done += parameter.size
            report_progress(what, done, total)
        return params

    with _in_memory(path):
        return read_all(declared, shardings, shapes)


@contextlib.contextmanager
def _in_memory(path: StrPath) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise ConfigError(f"{path}: there is no memory for its weights ({error})") from error


def _checked_tensors(
    path: StrPath, config: ModelConfig, declared: Mapping[str, Any], adapter: Adapter | None
) -> "_Tensors":
    """The tensors of a directory, which with the adapter are those of the model."""
    tensors = _Tensors(Path(path), adapter)
    tensors.check(declared, config)
    tensors.check_tied(config)
    if adapter is not None:
        adapter.check(declared, path)
    return tensors


def check_headers(path: StrPath) -> None:
    """Check the headers of a directory's safetensors files against its config.json.

    Reads no tensor; non-finite values are found when weights are loaded.

    Raises:
      ConfigError: there are no files, or one is missing, damaged or cut short; a tensor is missing,
        of another shape or dtype, or not one of this model.
    """
    config, tensors = read_config(path), _Tensors(Path(path))
    declared = dict(decoder_parameters(config))
    if SCORE_HEAD in tensors.names:  # a sequence classifier may have no output table
        declared.pop("unembedding", None)
    tensors.check(declared, config)


def has_score_head(path: StrPath) -> bool:
    """Whether a directory's weights have a sequence classifier's head; reads headers only."""
    return SCORE_HEAD in _Tensors(Path(path)).names


def save_weights(
    path: StrPath,
    config: ModelConfig,
    params: Params,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Write ``config.json`` and the safetensors files that transformers loads.

    Args:
      path: the directory; created if missing.
      config: shapes; its ``dtype`` is the default where ``dtypes`` has none.
      params: of a decoder, with or without scalar head: jax.Array, numpy arrays or
        ``ArrayRegions``, fetched one at a time.
      tokenizer: its special token ids go into config.json if the config has none; its files are not
        written.
      shard_bytes: maximal size of a file, unless one tensor is larger.
      dtypes: by tensor name, as of ``stored_dtypes``.

    Raises:
      ConfigError: values that are not finite, or are not in the dtype of their tensor.
    """
    scalar = "decoder" in params
    write_config(path, config, tokenizer, scalar)
    declared = scalar_parameters(config) if scalar else decoder_parameters(config)
    every = (part for parameter, _ in _specs_and_values(declared) for part in parts(parameter))
    requested = dtypes or {}
    wanted = {part.name: (part.shape, requested.get(part.name, config.dtype)) for part in every}
    sizes = {n: math.prod(x) * jnp.dtype(dtype).itemsize for n, (x, dtype) in wanted.items()}
    tensors: dict[str, np.ndarray] = {}
    index: dict[str, str] = {}
    for file, names in _shard_files(sizes, shard_bytes).items():
        tensors |= create_file(Path(path) / file, {n: wanted[n] for n in names})
        index |= dict.fromkeys(names, file)
    if len(set(index.values())) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (Path(path) / INDEX).write_text(json.dumps(content, indent=1) + "\n")
    for parameter, values in _specs_and_values(declared, params):
        here = values.whole() if isinstance(values, ArrayRegions) else np.asarray(values)
        for part in parts(parameter):
            into = tensors[part.name]
            if not _all_finite(part.write(into, here[part.at])):
                raise ConfigError(
                    f"{part.name} has values that are not finite as {into.dtype}, in which its "
                    "tensor is stored"
                )


def _specs_and_values(declared: Mapping[str, Any], params: Params | None = None) -> Iterator[tuple]:
    """Every ``ParameterSpec`` in a nested dict, with its values if ``params`` is given."""
    for name, parameter in declared.items():
        values = None if params is None else params[name]
        if isinstance(parameter, ParameterSpec):
            yield parameter, values
        else:
            yield from _specs_and_values(parameter, values)


def _shard_files(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Split tensors into files of at most ``most`` bytes: tensor names by file name."""
    shards: list[list[str]] = [[]]
    unexpected = most
    for name, size in sizes.items():
        if shards[-1] and size > unexpected:
            shards.append([])
            unexpected = most
        shards[-1].append(name)
        unexpected -= size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i + 1:05d}-of-{count:05d}.safetensors": x for i, x in enumerate(shards)}


def write_config(
    path: StrPath, config: ModelConfig, tokenizer: Any = None, scalar: bool = False
) -> None:
    """Write ``config.json``; special token ids missing in the config are taken from the tokenizer.

    Args:
      path: the directory; created if missing.
      config: shapes.
      tokenizer: of the model.
      scalar: as a transformers sequence classifier with one class.
    """
    content = to_hf(config, scalar)
    for key in ("bos", "eos", "pad"):
        if tokenizer is not None and content[f"{key}_token_id"] is None:
            content[f"{key}_token_id"] = getattr(tokenizer, f"{key}_id")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    replace_file(path / "config.json", json.dumps(content, indent=1) + "\n")


def _all_finite(tensor: np.ndarray) -> bool:
    """Whether all values are finite, checked in chunks of rows."""
    rows = tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    step = max(1, 2**18 // max(rows.shape[1], 1))
    return all(np.isfinite(rows[i : i + step]).all() for i in range(0, len(rows), step))


class _Tensors:
    """The tensors of a directory's safetensors files, read one at a time.

    Attributes:
      files: by the tensor's name in it.
      names: in files, by themselves and without known prefixes.
    """

    def __init__(self, path: Path, adapter: Adapter | None = None):
        self.path, self._adapter = path, adapter
        self.files: dict[str, TensorFile] = {}
        self._read: set[str] = set()
        self._listing: dict[str, str] = {}
        check_directory(path)
        for file in self._listed():
            reader = TensorFile(file)
            if twice := sorted(reader.shapes.keys() & self.files.keys()):
                raise ConfigError(
                    f"{path}: tensor {short_repr(twice[0])} is in both "
                    f"{self.files[twice[0]].path.name} and {file.name}; keep one"
                )
            self.files |= dict.fromkeys(reader.shapes, reader)
        for name, shard in sorted(self._listing.items()):
            if name not in self.files or self.files[name].path.name != shard:
                raise ConfigError(
                    f"{path}: tensor {short_repr(name)} of the index is not in shard {shard!r}"
                )
        if not self.files:
            raise ConfigError(
                f"{path}: no *.safetensors files there; this version reads only those"
            )
        self.names = {_PREFIX.sub("", _WRAPPERS.sub("", name)): name for name in self.files}
        self.names |= {name: name for name in self.files}

    def _listed(self) -> list[Path]:
        """``model.safetensors`` alone, as in transformers, else the files that the index names, or
        all there are: some models publish the same weights again under other names."""
        index, single = self.path / INDEX, self.path / SINGLE_FILE
        if single.is_file():
            return [single]
        if not index.is_file():
            return sorted(self.path.glob("*.safetensors"))
        listing = read_object(index).get("weight_map")
        if not isinstance(listing, dict):
            raise ConfigError(f"{index}: weight_map is {short_repr(listing)}; an object of names")
        self._listing = listing
        for name in self._listing.values():
            if not isinstance(name, str) or Path(name).name != name or len(name) > 255:
                raise ConfigError(
                    f"{index}: shard {short_repr(name)}; the name of a file beside the index"
                )
        names = sorted(set(self._listing.values()))
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise ConfigError(f"{self.path}: shard {missing[0]!r} of its index is missing")
        return [self.path / name for name in names]

    def read(self, part: TensorPart) -> np.ndarray:
        """One tensor in its stored dtype and dimensions, with the adapter merged if there is one.

        Raises:
          ConfigError: it has another shape or dtype, or values that are not finite.
        """
        if self._adapter is not None and part.name in self._adapter.names:  # a scalar head
            return self._adapter.tensor(part.name)
        name = self.name(part)
        assert name is not None, part.name
        self._check_form(name, part)
        tensor = self.files[name].rows(name)
        if name not in self._read and not _all_finite(tensor):
            raise ConfigError(f"{self.path}: {name} has values that are not finite")
        self._read.add(name)
        return tensor if self._adapter is None else self._adapter.merge(tensor, part)

    def _check_form(self, name: str, part: TensorPart) -> None:
        """Raise ConfigError if a part's tensor has another shape or dtype."""
        file = self.files[name]
        if file.dtypes[name] not in DTYPES:
            raise ConfigError(
                f"{self.path}: {name} is of dtype {file.dtypes[name]}; supported: "
                f"{', '.join(DTYPES.values())}"
            )
        if file.shapes[name] != part.shape:
            raise ConfigError(
                f"{self.path}: {name} has shape {file.shapes[name]}, config.json implies "
                f"{part.shape}"
            )

    def name(self, part: TensorPart) -> str | None:
        """The tensor's name in the files, which may lack the first component or have a known prefix
        before it; None: missing."""
        names = (part.name, part.name.partition(".")[2], part.other)
        return next((self.names[name] for name in names if name in self.names), None)

    def parameter(self, parameter: ParameterSpec, sharding: Any, dtype: Any) -> Any:
        """Load a parameter onto the devices of a sharding; a numpy array without one. Each tensor
        is read once, so the host holds one tensor at a time, not all stacked layers."""
        stored_parts = list(parts(parameter))
        if parameter.optional and not self._any(stored_parts):
            stored_parts = []
        if sharding is None:
            read = np.full(parameter.shape, parameter.fill, dtype)
            for part in stored_parts:
                read[part.at] = part.read(self.read(part))
            return read
        shards = ParameterShards(parameter, sharding, dtype)
        for part in stored_parts:
            if slices := shards.slices(part.at):
                tensor = self.read(part)
                shards.write(part.read(tensor), slices, part, tensor)
                del tensor
                gc.collect(0)  # JAX frees buffers that it was given at a collection
        return shards.array()

    def read_quantized(
        self, parameter: ParameterSpec, scale: ParameterSpec, sharding: Any, scale_sharding: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Load a matrix quantized, with its scales, onto the devices of their shardings."""
        matrix = ParameterShards(parameter, sharding, parameter.dtype)
        scales = ParameterShards(scale, scale_sharding, scale.dtype)
        inputs = input_dimensions(parameter)
        for part in parts(parameter):
            at = tuple(index for i, index in enumerate(part.at) if i not in inputs)
            slices, scale_slices = matrix.slices(part.at), scales.slices(at)
            if not slices and not scale_slices:
                continue
            over = part.inputs
            assert over is not None
            small, each = quantize(self.read(part), (over,), parameter.dtype)
            matrix.write(part.read(small), slices, part, small)
            # A scale per element; all along the inputs are equal, so take the first.
            every = part.read(np.broadcast_to(np.expand_dims(each, over), small.shape))
            kept = [i for i, index in enumerate(part.at) if isinstance(index, slice)]
            index = tuple(0 if i in inputs else slice(None) for i in kept)
            scales.write(every[index], scale_slices)
            del small
            gc.collect(0)
        return matrix.array(), scales.array()

    def _any(self, stored_parts: Iterable[TensorPart]) -> bool:
        """Whether the files or the adapter have one of these tensors."""
        beside = () if self._adapter is None else self._adapter.names
        return any(self.name(part) or part.name in beside for part in stored_parts)

    def check(self, declared: Mapping[str, Any], config: ModelConfig) -> None:
        """Check by the headers that the files hold all tensors of this model and no others.

        Raises:
          ConfigError: a tensor is missing, unexpected, or of another shape or dtype, by name.
        """
        # The output table may be present though not loaded; see also ``check_tied``.
        expected = {self.names.get(OUTPUT_TABLE)}
        for parameter, _ in _specs_and_values(declared):
            for part in parts(parameter):
                name = self.name(part)
                if name is not None:
                    self._check_form(name, part)
                    expected.add(name)
                elif not parameter.optional:
                    raise self._missing_error(part.name)
        unexpected = sorted(n for n in self.files if n not in expected and not n.endswith(_IGNORED))
        if unexpected:
            raise ConfigError(
                f"{self.path}: tensor {unexpected[0]!r} is not one of a {config.family} model as "
                "config.json describes it"
            )

    def _missing_error(self, name: str) -> ConfigError:
        there = next((x for x in self.files if x.endswith(f".{name}")), None)
        hint = f"; {there!r} is there: give files of names without that prefix" if there else ""
        return ConfigError(f"{self.path}: tensor {name!r} is missing{hint}")

    def check_tied(self, config: ModelConfig) -> None:
        """Check that an output table stored besides the tied embedding equals it.

        Raises:
          ConfigError: it differs.
        """
        table = self.names.get(OUTPUT_TABLE)
        if table is None or not config.tie_embeddings:
            return
        [embedding] = parts(decoder_parameters(config)["embedding"])
        self._check_form(table, embedding)
        if not np.array_equal(self.files[table].rows(table), self.read(embedding)):
            raise ConfigError(
                f"{self.path}: {OUTPUT_TABLE} differs from {embedding.name}, but config.json ties "
                "them (tie_word_embeddings)"
            )
