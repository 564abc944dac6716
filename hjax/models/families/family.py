"""What a family is: how its ``config.json`` and its tensors are named.

A family is a subclass of ``Family``, whose defaults are Llama's. Reading asks a ``CheckedConfig``
for every key that means something; what nobody asked for is refused by name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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
DTYPE_KEYS = ("dtype", "torch_dtype")  # config.json's, the second as it was once spelled
FULL, SLIDING = "full_attention", "sliding_attention"  # layer_types

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_MAX_LAYERS = 10_000  # a model has fewer


class ConfigField(NamedTuple):
    """A key of config.json that says one or several fields of ``ModelConfig`` as they are.

    Attributes:
      kind: ``size``, ``number`` or ``flag``, the method of ``CheckedConfig`` that reads it.
      fields: of ``ModelConfig``.
      default: where it is missing; None: it has to be there.
    """

    kind: str
    fields: tuple[str, ...]
    default: Any = None


# Biases of all four products of attention, and of the MLP's.
ATTENTION_BIAS = {"attention_bias": ConfigField("flag", ("qkv_bias", "output_bias"), False)}
MLP_BIAS = {"mlp_bias": ConfigField("flag", ("mlp_bias",), False)}
ROUTER_LOSS = {"router_aux_loss_coef": ConfigField("number", ("router_loss",), 0.001)}


class Family:
    """A family of decoders; a subclass changes what differs from Llama's plain form.

    Attributes:
      model_type: in config.json.
      architecture: the class of transformers that loads it.
      keys: config.json's key of each size.
      defaults: of keys that config.json may leave out.
      own: further keys, which are read and written as they stand.
      always: fields of ``ModelConfig`` that are the same in all of the family.
      fixed: keys that may have these values alone; missing they mean the first.
      activation: the key of the MLP's activation, as of ``fixed``; the first is written.
      unread: keys that some write and no forward reads.
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
        """The class of transformers that loads it with a head for one or more classes."""
        return self.architecture.removesuffix("ForCausalLM") + "ForSequenceClassification"

    def read(self, content: Mapping[str, Any], what: str = "config.json") -> ModelConfig:
        """The shapes that a config.json describes.

        Raises:
          ConfigError: a key of a value or a name that this family does not have.
        """
        given = CheckedConfig(content, what, self.defaults)
        if given.get("quantization_config"):
            raise given.error(
                "quantized weights are not supported; give the float32, float16 or bfloat16 ones"
            )
        check_classes(given, self.architecture, self.classifier)
        ids = {key: given.get(key) for key in TOKEN_IDS}
        for key, value in ids.items():
            every = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in every):
                raise given.error(f"{key} is {value!r}; a token id, or a list of them")
        for key, allowed in {**self.activation, **self.fixed}.items():
            given.only(key, *allowed)
        for key in self.unread:
            given.get(key)
        fields = {**self.fields(given), **self.always}
        for key, own in self.own.items():
            fields |= dict.fromkeys(own.fields, getattr(given, own.kind)(key, own.default))
        given.finish()
        fields["token_ids"] = tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in ids.items()
            if value is not None
        )
        return ModelConfig(**fields)

    def fields(self, given: CheckedConfig) -> dict[str, Any]:
        """Fields of ``ModelConfig`` but for ``always`` and those of ``own``; a subclass adds to
        these."""
        fields: dict[str, Any] = {name: given.size(key) for name, key in self.keys.items()}
        if fields["layers"] > _MAX_LAYERS:
            raise given.error(f"{self.keys['layers']} is {fields['layers']}; at most {_MAX_LAYERS}")
        heads = fields["heads"]
        fields["family"] = self.model_type
        fields["kv_heads"] = given.size("num_key_value_heads", heads)
        if "num_key_value_heads" in given.content and given.null("num_key_value_heads"):
            fields["kv_heads"] = heads
        fields["head_dim"] = given.size("head_dim", max(fields["hidden_size"] // heads, 1))
        fields["max_length"] = given.size("max_position_embeddings", 2048)
        fields["norm_epsilon"] = given.number("rms_norm_eps", 1e-6)
        fields["tie_embeddings"] = given.flag("tie_word_embeddings")
        fields["dtype"] = read_dtype(given)
        fields["ropes"] = self.ropes(given, fields["max_length"])
        for rope in fields["ropes"]:
            rope.check(fields["head_dim"], given.what)
        fields["max_length"] = stretched_length(fields["ropes"], fields["max_length"])
        return fields

    def ropes(self, given: CheckedConfig, max_length: int) -> tuple[Rope, ...]:
        """The rotary positions, in either spelling."""
        return (read_rope(given, max_length),)

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
        """The tensors of every parameter, by its name; in ``layers``: ``layers.<name>``."""
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
        """Forms of the weights that norm queries and keys."""
        if config.query_key_norm == "all":
            return {"q_norm": "(heads head_dim)", "k_norm": "(kv_heads head_dim)"}
        return {"q_norm": "head_dim", "k_norm": "head_dim"}

    def norm_names(self) -> dict[str, str]:
        """A layer's norms and their names in files."""
        return {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
        }


def tied_to(config: ModelConfig) -> str:
    """Under what name else files may have the embedding: of a tied table some have only that."""
    return HEAD if config.tie_embeddings else ""


LAYER = "model.layers.{layer}."
EXPERTS = f"{LAYER}mlp.experts."  # as transformers has them in memory, all of a layer in an array
HEAD = "lm_head.weight"


def one(name: str, form: str, **more: Any) -> tuple[StoredTensor, ...]:
    """A parameter that is one tensor, or one per layer."""
    return (StoredTensor(name, form, **more),)


def pair(first: str, second: str, form: str, **more: Any) -> tuple[StoredTensor, ...]:
    """A parameter whose ``pair`` axis joins two tensors."""
    return (StoredTensor(first, form, pair=0, **more), StoredTensor(second, form, pair=1, **more))


def expert_tensors(names: Mapping[str, str]) -> Tensors:
    """The tensors of experts that are stored one by one.

    Args:
      names: of ``gate``, ``up`` and ``down``, with ``{layer}`` and ``{expert}``.
    """
    gate, up, down = (f"{names[name]}.weight" for name in ("gate", "up", "down"))
    return {
        "layers.gate_up": pair(gate, up, "mlp embed", stacked=f"{EXPERTS}gate_up_proj"),
        "layers.down": one(down, "embed mlp", stacked=f"{EXPERTS}down_proj"),
    }


def read_dtype(given: CheckedConfig) -> str:
    """The dtype of the files."""
    said = (given.get(key) for key in DTYPE_KEYS)
    name = str(next(filter(None, list(said)), "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise given.error(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def read_rope(given: CheckedConfig, max_length: int, theta: float = 10000.0) -> Rope:
    """Rotary positions of all layers: ``rope_parameters``, or ``rope_theta`` with
    ``rope_scaling``."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    base, scaling, parameters, share = (given.get(key) for key in keys)
    both = dict(parameters or scaling or {})
    if parameters and scaling and dict(parameters) != dict(scaling):
        raise given.error("rope_parameters and rope_scaling differ; give one of them")
    if any(isinstance(value, Mapping) for value in both.values()):
        raise given.error("rope_parameters per layer type is not supported for this family")
    return rope_of(both, given, max_length, base or theta, share or 1.0)


def rope_of(
    parameters: Mapping[str, Any],
    given: CheckedConfig,
    max_length: int,
    theta: float,
    share: float = 1.0,
    partial: bool = False,
) -> Rope:
    """Of one dict of parameters; the base and the share are those given where it lacks them.

    Args:
      partial: transformers' class of this family turns a share of a head; the others' have no use
        for the key.
    """
    left = dict(parameters)
    theta = left.pop("rope_theta", None) or theta
    share = left.pop("partial_rotary_factor", None) or share
    if not is_number(theta) or theta <= 1:
        raise given.error(f"rope_theta is {theta!r}; a finite number above 1")
    if not is_number(share) or not 0 < share <= 1 or (share != 1 and not partial):
        allowed = "a number above 0, at most 1" if partial else "1 for this family"
        raise given.error(f"partial_rotary_factor is {share!r}; {allowed}")
    return Rope(float(theta), read_scaling(left, max_length, given.what), float(share))


def write_rope(rope: Rope) -> dict[str, Any]:
    """The keys that ``read_rope`` reads, in the older spelling, which every transformers reads."""
    content: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.share != 1:
        content["partial_rotary_factor"] = rope.share
    if isinstance(rope.scaling, RopeScaling):
        content["rope_scaling"] = write_scaling(rope.scaling)
    return content


def read_windows(
    given: CheckedConfig, layers: int, types: list[str] | None
) -> tuple[LayerKind, ...]:
    """Kinds of layers whose windows alternate.

    Args:
      given: ``layer_types`` and ``sliding_window`` are asked for.
      layers: how many there are.
      types: what ``layer_types`` is where it is missing; None: all full.
    """
    window = given.get("sliding_window")
    types = given.get("layer_types", types) or [FULL] * layers
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise given.error(f"layer_types {unknown[0]!r} is not supported; {FULL} or {SLIDING}")
    if len(types) != layers:
        raise given.error(f"layer_types has {len(types)} entries for {layers} layers")
    if SLIDING not in types:
        return ()
    if window is None:
        raise given.error(f"{SLIDING} in layer_types needs sliding_window")
    window = given.size("sliding_window")
    return tuple(LayerKind(window if kind == SLIDING else None) for kind in types)


def read_switched_windows(
    given: CheckedConfig, layers: int, types: list[str]
) -> tuple[LayerKind, ...]:
    """``read_windows`` where ``use_sliding_window`` is true; else all layers are full."""
    if given.flag("use_sliding_window") and given.get("sliding_window") is not None:
        return read_windows(given, layers, types)
    given.get("sliding_window")
    if set(given.get("layer_types", [FULL])) != {FULL}:
        raise given.error("layer_types with windows needs use_sliding_window=true")
    return ()


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys that ``read_windows`` reads."""
    windows = [kind.window for kind in config.layer_kinds if kind.window is not None]
    types = [FULL if k.window is None else SLIDING for k in config.layer_kinds]
    return {
        "sliding_window": windows[0] if windows else None,
        "layer_types": types or [FULL] * config.layers,
    }


# A class of transformers: the family's name, then what the class is for.
_CLASS = re.compile(
    r"(\w+?)(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|PreTrainedModel|Model|Config)", re.ASCII
)


def check_classes(given: CheckedConfig, own: str, classifier: str) -> None:
    """Hold ``architectures``, ``auto_map`` and ``is_encoder_decoder`` against the family.

    Classes with any head are the family's: heads are tensors, which are looked at where these are
    read. Code of the model's own is never run. As transformers without ``trust_remote_code`` takes
    its own class of a known ``model_type``, so is it here, where both have the name of one; a class
    of another name computes something else.

    Args:
      given: the config.json.
      own: transformers' class of this family.
      classifier: its class for sequence classification, called as its others are.

    Raises:
      ConfigError: a class of another family, code of a model of its own, or an encoder, by name.
    """
    given.only("is_encoder_decoder", False)
    kind = given.content.get("model_type")

    def of_family(name: str) -> bool:
        return name == own or _family(name) == _family(classifier)

    for name in _class_names(given, "architectures", given.get("architectures", [])):
        if not of_family(name):
            raise given.error(
                f"architectures has {name!r}, which is no class of model_type {kind} (its own is "
                f"{own!r}); give the config.json of these weights"
            )
    code = given.get("auto_map", {})
    if not isinstance(code, Mapping):
        raise given.error(f"auto_map is {code!r}; names of classes by what they are for")
    for key, found in code.items():
        if not str(key).startswith(("AutoConfig", "AutoModel")):
            continue  # how text is read: tokenizer.json says it
        for name in _class_names(given, f"auto_map.{key}", found):
            if not of_family(name.rpartition(".")[2]):
                raise given.error(
                    f"auto_map.{key} has {name!r}, code of the model's own, which is not run; "
                    f"remove auto_map if transformers' {own!r} is the same model"
                )


def _family(name: str) -> str:
    """Of a class's name that of its family, in small letters: Llama's was once LLaMA."""
    match = _CLASS.fullmatch(name)
    return (match[1] if match else name).lower()


def _class_names(given: CheckedConfig, key: str, found: Any) -> Iterable[str]:
    every = [found] if isinstance(found, str) else found
    if not isinstance(every, list) or not all(isinstance(name, str) for name in every):
        raise given.error(f"{key} is {found!r}; names of classes")
    return every
