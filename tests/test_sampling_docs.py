"""The table of sampling options, and where else each of them must be found."""

import inspect
import pathlib

import pytest

import hjax
from hjax.config import flatten
from hjax.launch import serve
from hjax.launch.sampling_flags import UNSET, options_help
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.sampling_params import OPTIONS, SamplingParams

DOCS = pathlib.Path(hjax.__file__).parents[1] / "docs"


def test_the_page_has_the_table():
    shown = {"": "(none)"}
    rows = [
        f"| `{name}` | `{shown.get(key.default, key.default)}` | {key.doc} | {key.rule.text} |"
        for name, key in OPTIONS.items()
    ]
    assert "\n".join(rows) in (DOCS / "sampling.md").read_text()


def test_every_option_is_a_key_an_argument_a_flag_and_a_field():
    keys = flatten(hjax.default_config())
    help_text = options_help("T")
    fields = (DOCS / "serving.md").read_text()
    for name, key in OPTIONS.items():
        assert keys[f"rollout.{name}"] == key.default
        for function in (LanguageModel.generate, LanguageModel.stream):
            assert name in inspect.signature(function).parameters
        assert name in UNSET and f"--{name}=" in help_text
        assert name in serve._JETSTREAM
        assert f"`{name}`" in fields


def test_defaults_change_nothing():
    sampling = SamplingParams(**{name: key.default for name, key in OPTIONS.items()})
    assert sampling == SamplingParams()
    changes = sampling.greedy, sampling.tempered, sampling.truncates, sampling.changes_logits
    assert not any(changes)


@pytest.mark.parametrize(
    "text, biases",
    [("", {}), ("5:-100", {5: -100.0}), ("5:-100,7:2.5", {5: -100.0, 7: 2.5})],
)
def test_biases_may_be_text(text, biases):
    assert SamplingParams(logit_bias=text).logit_bias == biases
