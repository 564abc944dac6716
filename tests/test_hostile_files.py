"""What is wrong with paths and files that users hand over is one line, soon, and nothing hangs."""

import contextlib
import functools
import json
import os
import struct
import time

import jax
import numpy as np
import pytest
from helpers import save_model, trainer_of
from safetensors.numpy import load_file, save_file

import hjax
from hjax.data import chat_templates, limited_process
from hjax.data.dataset import Dataset, PromptSampler
from hjax.data.tasks import get_task
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, exit_status
from hjax.files import read_json, read_rows
from hjax.launch.jax_setup import drop_corrupt_entries
from hjax.models.export import export_model
from hjax.models.families import from_hf
from hjax.models.huggingface import load_weights, read_config
from hjax.models.parameters import scalar_network
from hjax.models.peft_files import Adapter
from hjax.models.safetensors_files import TensorFile
from hjax.models.weights import load_params, model_directory
from hjax.planning.profile import read_profile
from hjax.run.placement import make_plan
from hjax.settings.config_loading import find_config
from hjax.sharding.layout import make_layouts
from hjax.user_code import load_object
from hjax.user_input import user_path

HEAD = "base_model.model.lm_head.weight"
DEEP = b"[" * 100_000 + b"]" * 100_000


def one_line(work, *says):
    """The error of a piece of work, which is one short line."""
    with pytest.raises(ConfigError) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700 and all(s in text for s in says), text
    return text


@pytest.fixture
def loop(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path / "loop"


@pytest.mark.parametrize("kind", ["user", "long", "loop", "zero"])
@pytest.mark.parametrize(
    "door",
    {
        "data": Dataset.from_file,
        "tokenizer": Tokenizer.load,
        "model": model_directory,
        "config": find_config,
        "reward": lambda path: load_object(f"{path}.py:f", "reward.function"),
        "placement": lambda path: make_plan(f"{path}.json", ["actor"], 1),
        "workdir": lambda path: user_path(path, "--workdir="),
    }.items(),
    ids=lambda door: door[0],
)
def test_paths(kind, door, loop):
    bad = {
        "user": ("~nosuchuser/mine", "there is no user"),
        "long": ("x" * 5000, "File name too long"),
        "loop": (f"{loop}/mine", "Too many levels of symbolic links"),
        "zero": ("mine\0", "embedded null "),  # byte, or character on newer Pythons
    }
    path, says = bad[kind]
    one_line(lambda: door[1](path), says)


def test_an_error_of_the_system_that_names_its_file_is_one_line(capsys, tmp_path):
    def work():
        open(tmp_path / ("x" * 300))

    assert exit_status(work) == 1
    assert "Traceback" not in (said := capsys.readouterr().err)
    assert said == f"hjax: error: {tmp_path}/{'x' * 300}: File name too long\n"


def test_a_current_directory_that_was_removed(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert exit_status(lambda: len(os.getcwd())) == 2
    said = capsys.readouterr().err
    assert said == (
        "hjax: error: the current directory is not there any more; change to another (cd)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        open("absent")
    assert exit_status(lambda: open("absent")) == 1 and "absent" in capsys.readouterr().err


# Of a file that should hold a JSON object, and of one with a row per line.
BROKEN = {
    "deep": DEEP,
    "bytes": b'{"prompt": "\xff\xfe", "step": 1}',
    "list": b"[1, 2]",
    "number": b"5",
    "text": b'"prompt"',
    "null": b"null",
    "half": b'{"prompt": "a',
    "large": b'{"prompt": ' + b"9" * 10_000 + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_json_object(name, tmp_path):
    content = BROKEN[name]
    file = tmp_path / "adapter_config.json"
    file.write_bytes(content)
    (tmp_path / "rows.jsonl").write_bytes(content + b"\n")
    (tmp_path / "config.json").write_bytes(content)
    one_line(lambda: read_config(tmp_path))
    one_line(lambda: Adapter(tmp_path))
    one_line(lambda: make_plan(str(file), ["actor"], 1))
    one_line(lambda: read_profile(file))
    one_line(lambda: Dataset.from_file(tmp_path / "rows.jsonl"))
    if content:
        one_line(lambda: read_rows(tmp_path / "rows.jsonl"))
    if name not in ("list", "number", "text", "null", "large"):
        one_line(lambda: read_json(file))
    # The header of a file of tensors.
    tensors = tmp_path / "model.safetensors"
    tensors.write_bytes(struct.pack("<Q", len(content)) + content)
    one_line(lambda: TensorFile(tensors))
    tokenizer = Tokenizer.characters("ab")
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    one_line(lambda: Tokenizer.load(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(content)
    one_line(lambda: Tokenizer.load(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lora_alpha", float("nan"), "lora_alpha is nan; a number of 0 to 1e6"),
        ("lora_alpha", 10**400, "a number of 0 to 1e6"),
        ("lora_alpha", "8", "lora_alpha is '8'; a number"),
        ("r", [2], "r is [2]; a number"),
        ("use_rslora", "no", "use_rslora is 'no'; true or false"),
        ("alpha_pattern", 4, "alpha_pattern is 4; numbers of 0 to 1e6 by name"),
        ("rank_pattern", {"q_proj": "x"}, "numbers of 0 to 1e6 by name"),
        ("alpha_pattern", {"([a-z._0-9]*)*!": 4}, "; a name, or an expression"),
        ("alpha_pattern", {".?" * 300 + "!": 4}, "would take too long"),
        ("peft_type", "x" * 99999, "is not supported"),
        ("alpha_pattern", {"[": 4}, "; a name, or an expression"),
        ("target_parameters", {"x": 1}, "; a list of names"),
    ],
)
def test_values_of_an_adapters_config(key, value, says, tmp_path):
    config = {"peft_type": "LORA", "init_lora_weights": True, "base_model_name_or_path": "a/b"}
    kept = {"r": 2, "lora_alpha": 4, "alpha_pattern": {r".*layers\.0\..*q_proj": 8, "a|b": 1.5}}
    tensors = {"base_model.model.m.lora_A.weight": np.ones((2, 3), np.float32)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | kept))
    adapter = Adapter(tmp_path)
    assert adapter.scaling("model.layers.0.self_attn.q_proj", 2) == 4.0
    assert adapter.scaling("model.layers.1.self_attn.q_proj", 2) == 2.0
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | kept | {key: value}))
    one_line(lambda: Adapter(tmp_path), says)


def weights_of(folder):
    """Saves a tiny model; returns its tensors."""
    save_model(folder)
    return load_file(folder / "model.safetensors")


def test_adapters_that_lie_are_not_merged(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    size = weights_of(model)["model.layers.0.self_attn.q_proj.weight"].shape[0]
    name, where = "base_model.model.model.layers.0.self_attn.q_proj.", tmp_path / "adapter"
    where.mkdir()
    config = {"peft_type": "LORA", "init_lora_weights": True, "r": 2, "lora_alpha": 4}
    a, b, m = name + "lora_A.weight", name + "lora_B.weight", name + "lora_magnitude_vector"
    both = {a: np.ones((2, size), np.float32), b: np.ones((size, 2), np.float32)}
    twice = {**both, a.removeprefix("base_model.model."): both[a] * 5}
    cases = [
        ({}, {}, "no tensors"),
        ({}, twice, "with and without"),
        ({"r": 7}, both, "of rank 2, its adapter_config.json says 7"),
        ({"use_dora": True}, {**both, m: np.ones(1, np.float32)}, "1 magnitudes for"),
        ({"use_dora": True}, {**both, m: np.ones(size + 1, np.float32)}, "magnitudes for"),
        ({"modules_to_save": ["score"]}, both, "has no score.weight"),
        ({"modules_to_save": ["lm_head"]}, both, "modules_to_save=['lm_head']"),
        ({}, {**both, HEAD: np.ones((16, size), np.float32)}, "'lm_head.weight' adapts an"),
    ]
    for keys, tensors, says in cases:
        base = {"base_model_name_or_path": str(model)}
        (where / "adapter_config.json").write_text(json.dumps(config | base | keys))
        save_file(tensors, where / "adapter_model.safetensors")
        one_line(lambda: export_model(where, out), says)
        assert not out.exists()


def test_merged_weights_beyond_the_dtype_of_their_tensor(tmp_path):
    """They are finite in float32, in which they are merged; nothing of the export stays."""
    model, where = tmp_path / "model", tmp_path / "adapter"
    save_model(model, dtype="float16")
    where.mkdir()
    config = {"peft_type": "LORA", "init_lora_weights": True, "r": 2, "lora_alpha": 4}
    config |= {"base_model_name_or_path": str(model)}
    (where / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    both = {f"{name}A.weight": np.ones((2, 32)), f"{name}B.weight": np.full((32, 2), 2e4)}
    file = where / "adapter_model.safetensors"
    save_file({key: value.astype(np.float32) for key, value in both.items()}, file)
    out = tmp_path / "new" / "folders" / "out"
    one_line(lambda: export_model(where, out), "q_proj.weight", "not finite as float16")
    assert not (tmp_path / "new").exists()


def test_weights_that_no_memory_holds(tmp_path):
    """A file without content is as large as it says: 2^31 rows take no room on the disk."""
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 2**37:
        pytest.skip("this machine may hold them")
    tensors = weights_of(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 2**31 - 1}
    (tmp_path / "config.json").write_text(json.dumps(content))
    offset, header = 0, {}
    for name, tensor in tensors.items():
        shape = [2**31 - 1 if n == 16 else n for n in tensor.shape]
        stop = offset + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    one_line(lambda: load_weights(tmp_path), "there is no memory for its weights")


def test_a_scalar_head_is_never_left_out_of_a_language_model(tmp_path):
    """Nor of an adapter that learned one, on a plain base; where scores are wanted it is used."""
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    size = weights_of(base)["model.layers.0.self_attn.q_proj.weight"].shape[0]
    save_model(tmp_path / "judge", head=True)
    adapter.mkdir()
    name, rng = "base_model.model.", np.random.default_rng(3)
    q = f"{name}model.layers.0.self_attn.q_proj.lora_"
    shapes = {
        f"{q}A.weight": (2, size),
        f"{q}B.weight": (size, 2),
        f"{name}score.weight": (1, size),
    }
    tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "init_lora_weights": True, "r": 2, "lora_alpha": 4}
    config |= {"base_model_name_or_path": str(base), "modules_to_save": ["classifier", "score"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    for path in (adapter, tmp_path / "judge"):
        one_line(functools.partial(export_model, path, out), "a sequence classifier's head")
        one_line(functools.partial(hjax.load_model, path), "gives scores and no text")
        assert not out.exists()
    config = read_config(base)
    network, layout = scalar_network(config), make_layouts(jax.devices()[:1]).train
    head = load_params(adapter, network, layout)["head"]
    assert np.array_equal(head, tensors[f"{name}score.weight"][0])


def test_a_tensor_in_two_files_and_an_index_that_lies(tmp_path):
    tensors = weights_of(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[1:]}, tmp_path / "a.safetensors")
    save_file({n: tensors[n] for n in names[:2]}, tmp_path / "b.safetensors")
    one_line(lambda: load_weights(tmp_path), "is in both a.safetensors and b")
    save_file({n: tensors[n] for n in names[:1]}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for shards, says in (
        (dict.fromkeys(names, "a.safetensors"), "is not in shard 'a.safetensors'"),
        ([[n, "a.safetensors"] for n in names], "weight_map is [["),
        ({names[0]: "a" * 9999}, "the name of a file beside the index"),
    ):
        index.write_text(json.dumps({"weight_map": shards}))
        one_line(lambda: load_weights(tmp_path), says)


@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (1, 2, 3)])
def test_shapes_that_no_adapter_has(shape, tmp_path):
    config = {"peft_type": "LORA", "init_lora_weights": True, "base_model_name_or_path": "a/b"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {"base_model.model.m.lora_A.weight": np.ones(shape, np.float32)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    one_line(lambda: Adapter(tmp_path), "m.lora_A.weight has shape", "which no adapter has")


def test_rows_of_a_run_without_a_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"steps": 2}\n')
    one_line(lambda: read_rows(tmp_path / "metrics.jsonl"), "metrics.jsonl:2: not a JSON object wi")


def test_a_parquet_file_whose_values_cannot_be_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    # A time that Python's datetime has not: it is found when rows are made of it.
    late = pyarrow.array([-(10**18)], pyarrow.timestamp("us"))
    table = pyarrow.table({"prompt": ["a"], "when": late})
    pyarrow.parquet.write_table(table, tmp_path / "late.parquet")
    one_line(lambda: Dataset.from_file(tmp_path / "late.parquet"), "not a readable parquet file")


@pytest.mark.parametrize("state", [
    {"position": -5}, {"position": None}, {"position": "3"}, {"position": 1.5},
])  # fmt: skip
def test_a_position_that_is_none(state):
    sampler = PromptSampler(4, 2, seed=0)
    one_line(lambda: sampler.restore({"size": 4, "seed": 0, **state}), "has position")


@pytest.mark.parametrize("key", ["bos_token", "eos_token", "pad_token"])
@pytest.mark.parametrize("value", [5, ["<bos>"], {"content": 5}, True])
def test_special_tokens_that_are_no_text(key, value, tmp_path):
    Tokenizer.characters("ab").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
    one_line(lambda: Tokenizer.load(tmp_path), f"{key} is ")


@pytest.mark.parametrize(
    "value, line",
    [
        (5, "chat_template is 5; text, or a list of named ones"),
        ({"default": "{{ messages }}"}, "chat_template is {'default'"),
        (["{{ messages }}"], r"text, or a list of named ones"),
        ([{"name": "default"}], "text, or a list of named ones"),
        ([{"name": "", "template": ""}], "text, or a list of named ones"),
        ([{"name": "../../config", "template": ""}], "is named '../../config'; a name without /"),
    ],
)
def test_chat_templates_that_are_none(value, line, tmp_path):
    Tokenizer.characters("ab").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    one_line(lambda: Tokenizer.load(tmp_path), line)


NO_ENDS = ["2", 2.5, [None], [[2]], True, -1, {}, 10**30, float("nan"), list(range(257))]


@pytest.mark.parametrize("value", NO_ENDS, ids=range(len(NO_ENDS)))
def test_ends_that_are_no_ids(value, tmp_path):
    """With a tokenizer and without one, and in the model's own file."""
    Tokenizer.characters("ab").save(tmp_path)
    save_model(tmp_path / "model")
    for name in ("generation_config.json", "model/generation_config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    one_line(lambda: Tokenizer.load(tmp_path), "eos_token_id is")
    one_line(lambda: hjax.load_model(tmp_path / "model"), "eos_token_id is")
    one_line(lambda: export_model(tmp_path / "model", tmp_path / "out"), "eos_token_id is")
    (tmp_path / "model" / "generation_config.json").unlink()
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(content | {"eos_token_id": value}))
    one_line(lambda: hjax.load_model(tmp_path / "model"), "eos_token_id is")


def test_what_a_generation_config_may_say(tmp_path):
    """Its ids end responses; what else it says is not asked, and an export has it."""
    save_model(tmp_path / "model", tokenizer=get_task("sorting").tokenizer())
    file = tmp_path / "model" / "generation_config.json"
    said = {"eos_token_id": [3, 3, 5, 2**22], "temperature": 1e308, "top_k": -5, "do_sample": "x"}
    file.write_text(json.dumps(said))
    assert set(hjax.load_model(tmp_path / "model").eos_ids) == {2, 3, 5}
    export_model(tmp_path / "model", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == said
    for depth in (900, 940, 960, 980, 990, 100_000):
        file.write_bytes(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
        with contextlib.suppress(ConfigError):
            hjax.load_model(tmp_path / "model")
            with trainer_of("GRPO", {"actor.path": str(tmp_path / "model")}, tmp_path / "run") as t:
                t.prepare()
    file.write_bytes(b'{"a":' + b" " * 2**26 + b"1}")
    one_line(lambda: hjax.load_model(tmp_path / "model"), "at most 67108864")


WRONG = ["12", None, 0, -1, 1.5, True, [], {}, [None], {"a": 1}, "silu", 10**30, float("nan")]


def test_a_models_config_with_values_of_other_kinds(tmp_path):
    save_model(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    read, refused = 0, 0
    for key in content:
        for value in WRONG:
            try:
                from_hf(content | {key: value})
                read += 1
            except ConfigError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 100 and read > 20  # null means the default, and some keys mean nothing


# Time, memory and output without end.
TEMPLATES = {
    "time": ("{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
             "takes longer than 0.5 s"),
    "power": ("{{ 9 ** (9 ** 9) }}", "takes longer than 0.5 s"),
    "memory": ("{{ ('a' * 10 ** 10) | length }}", "the chat template refuses this: MemoryError"),
    "output": ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
               "it writes more than 16777216 characters"),
    "depth": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    "wrong": ("{{ 1 / 0 }}", "division by zero"),
    "syntax": ("{% if %}", "Expected an expression"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_without_end(name, tmp_path, monkeypatch):
    monkeypatch.setattr(limited_process, "SECONDS", 0.5)
    template, says = TEMPLATES[name]
    if name == "output":
        monkeypatch.setattr(limited_process, "SECONDS", 20.0)
    Tokenizer.characters("ab").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    begun = time.monotonic()
    one_line(lambda: tokenizer.chat([{"role": "user", "content": "a"}]), says)
    assert time.monotonic() - begun < 30
    chat_templates._renderer.cache_clear()


def test_torn_entries_of_the_compile_cache_are_dropped(tmp_path):
    import jax
    import jax.numpy as jnp

    options = {"jax_enable_compilation_cache": True,  # compiling for other hardware turns it off
               "jax_compilation_cache_dir": str(tmp_path),
               "jax_persistent_cache_min_compile_time_secs": 0.0,
               "jax_persistent_cache_min_entry_size_bytes": -1}  # fmt: skip
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: jnp.sin(x) * 3 + 1)(jnp.ones(3)).block_until_ready()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    entries = sorted(tmp_path.glob("*-cache"))
    assert entries and drop_corrupt_entries(tmp_path) == 0
    whole = entries[0].read_bytes()
    entries[0].write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty-cache").write_bytes(b"")
    assert drop_corrupt_entries(tmp_path) == 2 and not entries[0].exists()
    # What was whole long ago is not looked at again.
    old = tmp_path / "old-cache"
    old.write_bytes(b"torn")
    os.utime(old, (1, 1))
    assert drop_corrupt_entries(tmp_path) == 0 and drop_corrupt_entries(tmp_path / "nowhere") == 0


def test_a_kept_program_that_is_torn_is_compiled_again_and_replaced(tmp_path, monkeypatch):
    import types

    import jax

    from hjax.dryrun import compilation

    counted = []
    monkeypatch.setattr(compilation, "_compile", lambda *_: counted.append(1) or {"bytes": 3})
    adding = jax.jit(lambda x: x + 1)
    traced = types.SimpleNamespace(trace=lambda: adding.trace(1.0), loop_trips=None)
    program = types.SimpleNamespace(program=traced, role="actor", name="add", rows=1, runs=1)
    topology = types.SimpleNamespace(platform="cpu", name="one", versions="1")
    found = []
    for torn in (False, False, True, False):
        if torn:
            [file] = tmp_path.glob("*.json")
            file.write_bytes(file.read_bytes()[:5])
        found.append(compilation.compile_program(program, topology, 1, "O1", tmp_path))
    assert [x["kept"] for x in found] == [False, True, False, True] and len(counted) == 2
    assert {x["bytes"] for x in found} == {3}
