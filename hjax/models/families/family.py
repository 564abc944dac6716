"""``Family``, the base class of model families: names in ``config.json`` and of tensors.

Its defaults are Llama's. A family reads every meaningful key through a ``CheckedConfig``; keys that
it does not read are refused by name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hjax.data.tokenizer_files import MOST_ENDS
from hjax.errors import short_repr
from hjax.models.families.checked_config import CheckedConfig
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameter_spec import StoredTensor
from hjax.models.rotary import (
    Rope,
    RopeScaling,
    is_number,
    original_length,
    read_scaling,
    stretched_length,
    write_scaling,
)

Tensors = dict[str, tuple[StoredTensor, ...]]

DTYPES = ("float32", "float16", "bfloat16")
DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json; the second is the older spelling
NO_DTYPE = (None, "", "auto")  # their values that name none: the dtype is that of the files
FULL, SLIDING = "full_attention", "sliding_attention"  # layer_types

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_MAX_LAYERS = 10_000  # a model has fewer


class ConfigField(NamedTuple):
    """A key of config.json whose value is that of one or several fields of ``ModelConfig``.

    Attributes:
      kind: ``size``, ``number`` or ``flag``, the method of ``CheckedConfig`` that reads it.
      fields: of ``ModelConfig``.
      default: if the key is missing; None: it is required.
    """

    kind: str
    fields: tuple[str, ...]
    default: Any = None


# Biases of all four attention projections, and of the MLP.
ATTENTION_BIAS = {"attention_bias": ConfigField("flag", ("qkv_bias", "output_bias"), False)}
MLP_BIAS = {"mlp_bias": ConfigField("flag", ("mlp_bias",), False)}
ROUTER_LOSS = {"router_aux_loss_coef": ConfigField("number", ("router_loss",), 0.001)}


class Family:
    """A model family; a subclass defines what differs from Llama.

    Attributes:
      model_type: in config.json.
      architecture: transformers' class for it.
      keys: the keys of sizes in config.json.
      defaults: of keys that config.json may lack.
      own: further keys, read and written unchanged.
      always: fields of ``ModelConfig`` that are constant in the family.
      fixed: keys with their allowed values; the first is the default.
      activation: the key of the MLP's activation, as in ``fixed``; the first value is written.
      unread: keys that some files have and no forward reads.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "mlp_size": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
    }
    defaults: Mapping[str, Any] = {}
    own: Mapping[str, ConfigField] = {}
    always: Mapping[str, Any] = {}
    fixed: Mapping[str, tuple[Any, ...]] = {}
    activation: Mapping[str, tuple[str, ...]] = {"hidden_act": ("silu",)}
    unread: tuple[str, ...] = ()

    @property
    def classifier(self) -> str:
        """Transformers' class for sequence classification with this family."""
        return self.architecture.removesuffix("ForCausalLM") + "ForSequenceClassification"

    def read(self, content: Mapping[str, Any], what: str = "config.json") -> ModelConfig:
        """The ``ModelConfig`` that a config.json describes.

        Raises:
          ConfigError: a key or value that this family does not support.
        """
        hf_config = CheckedConfig(content, what, self.defaults)
        hf_config.refuse_quantized()
        check_classes(hf_config, self.architecture, self.classifier)
        ids = {key: hf_config.get(key) for key in TOKEN_IDS}
        for key, value in ids.items():
            values = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int for i in values) or len(values) > MOST_ENDS:
                raise hf_config.error(
                    f"{key} is {short_repr(value, 80)}; a token id, or a list of at most "
                    f"{MOST_ENDS} of them"
                )
        for key, allowed in {**self.activation, **self.fixed}.items():
            hf_config.only(key, *allowed)
        for key in self.unread:
            hf_config.get(key)
        fields = {**self.fields(hf_config), **self.always}
        for key, own in self.own.items():
            fields |= dict.fromkeys(own.fields, getattr(hf_config, own.kind)(key, own.default))
        hf_config.finish()
        fields["token_ids"] = tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in ids.items()
            if value is not None
        )
        return ModelConfig(**fields)

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """Fields of ``ModelConfig`` other than those of ``always`` and ``own``; subclasses extend
        it."""
        fields: dict[str, Any] = {name: hf_config.size(key) for name, key in self.keys.items()}
        if fields["layers"] > _MAX_LAYERS:
            key = self.keys["layers"]
            raise hf_config.error(f"{key} is {fields['layers']}; at most {_MAX_LAYERS}")
        heads = fields["heads"]
        fields["family"] = self.model_type
        fields["kv_heads"] = hf_config.size("num_key_value_heads", heads)
        if "num_key_value_heads" in hf_config.content and hf_config.null("num_key_value_heads"):
            fields["kv_heads"] = heads
        fields["head_dim"] = hf_config.size("head_dim", max(fields["hidden_size"] // heads, 1))
        fields["max_length"] = hf_config.size("max_position_embeddings", 2048)
        fields["norm_epsilon"] = hf_config.number("rms_norm_eps", 1e-6)
        fields["tie_embeddings"] = hf_config.flag("tie_word_embeddings")
        fields["dtype"] = read_dtype(hf_config)
        fields["ropes"] = self.ropes(hf_config, fields["max_length"])
        for rope in fields["ropes"]:
            rope.check(fields["head_dim"], hf_config.what)
        fields["max_length"] = stretched_length(fields["ropes"], fields["max_length"])
        return fields

    def ropes(self, hf_config: CheckedConfig, max_length: int) -> tuple[Rope, ...]:
        """The model's ropes, from either spelling."""
        return (read_rope(hf_config, max_length),)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The ``config.json`` that ``read`` and transformers read."""
        content: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.written(config),
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": original_length(config.ropes, config.max_length),
            "rms_norm_eps": config.norm_epsilon,
            "tie_word_embeddings": config.tie_embeddings,
            "torch_dtype": config.dtype,
        }
        if config.ropes:
            content |= write_rope(config.ropes[0])
        return content

    def written(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of ``activation``, ``keys`` and ``own``."""
        content: dict[str, Any] = {key: allowed[0] for key, allowed in self.activation.items()}
        content |= {key: getattr(config, name) for name, key in self.keys.items()}
        return content | {key: getattr(config, own.fields[0]) for key, own in self.own.items()}

    def tensors(self, config: ModelConfig) -> Tensors:
        """The tensors of every parameter, by its name; those of layers by ``layers.<name>``."""
        q, k, v = (f"{LAYER}self_attn.{x}_proj" for x in "qkv")
        tensors = {
            "embedding": one("model.embed_tokens.weight", "vocab embed", other=tied_to(config)),
            "unembedding": one(HEAD, "vocab embed"),
            "final_norm": one("model.norm.weight", "embed"),
            "layers.q": one(f"{q}.weight", "(heads head_dim) embed"),
            "layers.kv": pair(f"{k}.weight", f"{v}.weight", "(kv_heads head_dim) embed"),
            "layers.q_bias": one(f"{q}.bias", "(heads head_dim)"),
            "layers.kv_bias": pair(f"{k}.bias", f"{v}.bias", "(kv_heads head_dim)"),
            "layers.o": one(f"{LAYER}self_attn.o_proj.weight", "embed (heads head_dim)"),
            "layers.o_bias": one(f"{LAYER}self_attn.o_proj.bias", "embed"),
            "layers.down": one(f"{LAYER}mlp.down_proj.weight", "embed mlp"),
            "layers.down_bias": one(f"{LAYER}mlp.down_proj.bias", "embed"),
        }
        for end, form in (("weight", "mlp embed"), ("bias", "mlp")):
            name = "layers.gate_up" if end == "weight" else "layers.gate_up_bias"
            gate, up = (f"{LAYER}mlp.{x}_proj.{end}" for x in ("gate", "up"))
            tensors[name] = pair(gate, up, form)
        for name, form in self.query_key_norms(config).items():
            tensors[f"layers.{name}"] = one(f"{LAYER}self_attn.{name}.weight", form)
        for name, stored in self.norm_names().items():
            tensors[f"layers.{name}"] = one(f"{LAYER}{stored}.weight", "embed")
        return tensors

    def query_key_norms(self, config: ModelConfig) -> dict[str, str]:
        """Forms of the QK-norm weights."""
        if config.query_key_norm == "all":
            return {"q_norm": "(heads head_dim)", "k_norm": "(kv_heads head_dim)"}
        return {"q_norm": "head_dim", "k_norm": "head_dim"}

    def norm_names(self) -> dict[str, str]:
        """Names in files of a layer's norms."""
        return {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def tied_to(config: ModelConfig) -> str:
    """An alternative name of the embedding in files: of a tied table some have only the head."""
    return HEAD if config.tie_embeddings else ""


LAYER = "model.layers.{layer}."
EXPERTS = f"{LAYER}mlp.experts."  # transformers' arrays of all experts of a layer
HEAD = "lm_head.weight"


def one(name: str, form: str, **more: Any) -> tuple[StoredTensor, ...]:
    """A parameter stored in one tensor, or one per layer."""
    return (StoredTensor(name, form, **more),)


def pair(first: str, second: str, form: str, **more: Any) -> tuple[StoredTensor, ...]:
    """A parameter whose ``pair`` axis is stored in two tensors."""
    return (StoredTensor(first, form, pair=0, **more), StoredTensor(second, form, pair=1, **more))


def expert_tensors(names: Mapping[str, str]) -> Tensors:
    """The tensors of experts that are stored separately.

    Args:
      names: of ``gate``, ``up`` and ``down``, with ``{layer}`` and ``{expert}``.
    """
    gate, up, down = (f"{names[name]}.weight" for name in ("gate", "up", "down"))
    return {
        "layers.gate_up": pair(gate, up, "mlp embed", stacked=f"{EXPERTS}gate_up_proj"),
        "layers.down": one(down, "embed mlp", stacked=f"{EXPERTS}down_proj"),
    }


def read_dtype(hf_config: CheckedConfig) -> str:
    """The dtype of the files, as config.json says."""
    found = [hf_config.get(key) for key in DTYPE_KEYS]
    name = str(next((x for x in found if x not in NO_DTYPE), "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise hf_config.error(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def read_rope(hf_config: CheckedConfig, max_length: int, theta: float = 10000.0) -> Rope:
    """The rope of all layers, from ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    base, scaling, parameters, share = (hf_config.get(key) for key in keys)
    both = dict(parameters or scaling or {})
    if parameters and scaling and dict(parameters) != dict(scaling):
        raise hf_config.error("rope_parameters and rope_scaling differ; give one of them")
    if any(isinstance(value, Mapping) for value in both.values()):
        raise hf_config.error("rope_parameters per layer type is not supported for this family")
    return rope_of(both, hf_config, max_length, base or theta, share or 1.0)


def check_theta(hf_config: CheckedConfig, theta: Any) -> float:
    """A rope's base; ConfigError if it is none. The largest published one is 4.6e10."""
    if not is_number(theta) or not 1 < theta <= 1e15:
        raise hf_config.error(f"rope_theta is {theta!r}; a finite number above 1, at most 1e15")
    return float(theta)


def rope_of(
    parameters: Mapping[str, Any],
    hf_config: CheckedConfig,
    max_length: int,
    theta: float,
    share: float = 1.0,
    partial: bool = False,
) -> Rope:
    """A rope from a dict of parameters; ``theta`` and ``share`` are defaults.

    Args:
      partial: whether transformers' class of this family supports partial rotary embeddings.
    """
    left = dict(parameters)
    theta = left.pop("rope_theta", None) or theta
    share = left.pop("partial_rotary_factor", None) or share
    theta = check_theta(hf_config, theta)
    if not is_number(share) or not 0 < share <= 1 or (share != 1 and not partial):
        allowed = "a number above 0, at most 1" if partial else "1 for this family"
        raise hf_config.error(f"partial_rotary_factor is {share!r}; {allowed}")
    return Rope(theta, read_scaling(left, max_length, hf_config.what), float(share))


def write_rope(rope: Rope) -> dict[str, Any]:
    """The keys that ``read_rope`` reads, in the older spelling, which all transformers support."""
    content: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.rotary_fraction != 1:
        content["partial_rotary_factor"] = rope.rotary_fraction
    if isinstance(rope.scaling, RopeScaling):
        content["rope_scaling"] = write_scaling(rope.scaling)
    return content


def read_windows(
    hf_config: CheckedConfig, layers: int, types: list[str] | None
) -> tuple[LayerKind, ...]:
    """Layer kinds with alternating sliding windows.

    Args:
      hf_config: read for ``layer_types`` and ``sliding_window``.
      layers: number of layers.
      types: default of ``layer_types``; None: all full attention.
    """
    window = hf_config.get("sliding_window")
    types = hf_config.get("layer_types", types) or [FULL] * layers
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise hf_config.error(f"layer_types {unknown[0]!r} is not supported; {FULL} or {SLIDING}")
    if len(types) != layers:
        raise hf_config.error(f"layer_types has {len(types)} entries for {layers} layers")
    if SLIDING not in types:
        return ()
    if window is None:
        raise hf_config.error(f"{SLIDING} in layer_types needs sliding_window")
    window = hf_config.size("sliding_window")
    return tuple(LayerKind(window if kind == SLIDING else None) for kind in types)


def read_switched_windows(
    hf_config: CheckedConfig, layers: int, types: list[str]
) -> tuple[LayerKind, ...]:
    """``read_windows`` if ``use_sliding_window`` is true; else all layers have full attention."""
    if hf_config.flag("use_sliding_window") and hf_config.get("sliding_window") is not None:
        return read_windows(hf_config, layers, types)
    hf_config.get("sliding_window")
    if set(hf_config.get("layer_types", [FULL])) != {FULL}:
        raise hf_config.error("layer_types with windows needs use_sliding_window=true")
    return ()


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys that ``read_windows`` reads."""
    windows = [kind.window for kind in config.layer_kinds if kind.window is not None]
    types = [FULL if k.window is None else SLIDING for k in config.layer_kinds]
    return {
        "sliding_window": windows[0] if windows else None,
        "layer_types": types or [FULL] * config.layers,
    }


# A transformers class: the family's name, then the task.
_CLASS = re.compile(
    r"(\w+?)(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|PreTrainedModel|Model|Config)", re.ASCII
)


def check_classes(hf_config: CheckedConfig, own: str, classifier: str) -> None:
    """Check ``architectures``, ``auto_map`` and ``is_encoder_decoder`` against the family.

    Classes of the family with any head are accepted; heads are checked when tensors are read.
    The model's own code (``auto_map``) is never run. It is ignored if its class has the name of the
    family's, as in transformers without ``trust_remote_code``; a class of another name may compute
    something else and is refused.

    Args:
      hf_config: the config.json.
      own: transformers' class of this family.
      classifier: its class for sequence classification, which has the family's name.

    Raises:
      ConfigError: a class of another family, custom code, or an encoder, by name.
    """
    hf_config.only("is_encoder_decoder", False)
    kind = hf_config.content.get("model_type")

    def of_family(name: str) -> bool:
        return name == own or _family(name) == _family(classifier)

    for name in _class_names(hf_config, "architectures", hf_config.get("architectures", [])):
        if not of_family(name):
            raise hf_config.error(
                f"architectures has {name!r}, which is no class of model_type {kind} (its own is "
                f"{own!r}); give the config.json of these weights"
            )
    code = hf_config.get("auto_map", {})
    if not isinstance(code, Mapping):
        raise hf_config.error(f"auto_map is {code!r}; names of classes by what they are for")
    for key, found in code.items():
        if not str(key).startswith(("AutoConfig", "AutoModel")):
            continue  # a tokenizer's class; tokenizer.json is used
        for name in _class_names(hf_config, f"auto_map.{key}", found):
            if not of_family(name.rpartition(".")[2]):
                raise hf_config.error(
                    f"auto_map.{key} has {name!r}, code of the model's own, which is not run; "
                    f"remove auto_map if transformers' {own!r} is the same model"
                )


def _family(name: str) -> str:
    """The family in a class's name, in lower case: Llama's was once LLaMA."""
    match = _CLASS.fullmatch(name)
    return (match[1] if match else name).lower()


def _class_names(hf_config: CheckedConfig, key: str, found: Any) -> Iterable[str]:
    values = [found] if isinstance(found, str) else found
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        raise hf_config.error(f"{key} is {found!r}; names of classes")
    return values
