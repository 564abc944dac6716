"""The classes that a config.json names: transformers' own tables say which are a family's."""

import pytest
from families import MODELS, config
from references import modeling_auto

from hjax.errors import ConfigError
from hjax.models.families import FAMILIES, from_hf, to_hf

PARTS = (
    "",
    "FOR_CAUSAL_LM_",
    "FOR_SEQUENCE_CLASSIFICATION_",
    "FOR_TOKEN_CLASSIFICATION_",
    "FOR_QUESTION_ANSWERING_",
)


@pytest.fixture(scope="module")
def tables():
    return [getattr(modeling_auto, f"MODEL_{part}MAPPING_NAMES") for part in PARTS]


@pytest.fixture(scope="module")
def contents():
    """A sound config.json of each family."""
    first = {}
    for name, (family, _) in MODELS.items():
        first.setdefault(family, name)
    return {family: to_hf(from_hf(config(name).to_dict())) for family, name in first.items()}


def classes(table, model_type):
    found = table.get(model_type, ())
    return {found} if isinstance(found, str) else set(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_the_family_are_read_and_all_others_refused(family, contents, tables):
    content, read = contents[family], from_hf(contents[family])
    own = set().union(*(classes(table, family) for table in tables))
    assert len(own) > 2
    for name in own:
        assert from_hf({**content, "architectures": [name]}) == read
    others = {name for table in tables for kind in table for name in classes(table, kind)} - own
    assert len(others) > 300
    taken = []
    for name in others:
        try:
            from_hf({**content, "architectures": [name]})
            taken.append(name)
        except ConfigError as error:
            assert f"architectures has {name!r}" in str(error) and family in str(error)
    assert not taken


@pytest.mark.parametrize(
    "family, changes, line",
    [
        ("llama", {"architectures": ["MistralForCausalLM"]}, "has 'MistralForCausalLM', which is"),
        ("gemma3_text", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForCond"),
        ("llama", {"architectures": "GemmaForCausalLM"}, "has 'GemmaForCausalLM'"),
        ("llama", {"architectures": [1]}, r"architectures is \[1\]; names of classes"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder True is not supported"),
        ("qwen2", {"auto_map": "mine.py"}, "auto_map is 'mine.py'"),
        ("qwen2", {"auto_map": {"AutoModel": 3}}, "auto_map.AutoModel is 3"),
        ("qwen2", {"auto_map": {"AutoModelForCausalLM": "mine.MyModel"}}, "'mine.MyModel', code"),
        ("qwen2", {"auto_map": {"AutoConfig": "a--b.QwenConfig"}}, "'a--b.QwenConfig', code"),
    ],
)
def test_what_is_refused_is_named(family, changes, line, contents):
    with pytest.raises(ConfigError, match=line):
        from_hf(contents[family] | changes, "here/config.json")


def test_what_has_the_familys_name_is_read(contents, family="phi3"):
    """As Phi-3's own files have it, whose code transformers leaves aside unless told otherwise."""
    content, read = contents[family], from_hf(contents[family])
    for changes in (
        {"architectures": None, "auto_map": None, "is_encoder_decoder": False},
        {"architectures": []},
        {"architectures": ["Phi3ForRewardModel"]},
        {
            "auto_map": {
                "AutoConfig": "microsoft/Phi-3-mini-4k-instruct--configuration_phi3.Phi3Config",
                "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
                "AutoTokenizer": ["tokenization_mine.Mine", None],
            }
        },
    ):
        assert from_hf(content | changes) == read
