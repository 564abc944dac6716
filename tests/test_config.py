"""The tree of settings: slips answered in one line, and what else a ConfigDict can do."""

import copy
import pickle

import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

import hjax
from hjax.config import Config, flatten


def assign(key, value):
    def act(config):
        *sections, last = key.split(".")
        for section in sections:
            config = config[section]
        setattr(config, last, value)

    return act


@pytest.mark.parametrize(
    ("act", "kind", "says"),
    [
        (assign("stepss", 3), AttributeError, "config.stepss; did you mean config.steps?"),
        (assign("rollout.promts", 3), AttributeError, "did you mean config.rollout.prompts?"),
        (assign("prompts", 3), AttributeError, "config.eval.prompts or config.rollout.prompts?"),
        (lambda c: c["stepss"], KeyError, "config.stepss; did you mean config.steps?"),
        (lambda c: c.stepss, AttributeError, "config.stepss; did you mean config.steps?"),
        (lambda c: c.rolout, AttributeError, "did you mean config.rollout?"),
        (lambda c: c["rollout.promts"], KeyError, "did you mean config.rollout.prompts?"),
        (lambda c: c.algorithm.nme, AttributeError, "did you mean config.algorithm.name?"),
        (lambda c: c.data.task_options.x, AttributeError, "this section has no keys yet"),
        (lambda c: c.layout.actor.train.tensr, AttributeError, "config.layout.actor.train.tensor?"),
        (assign("steps", "many"), TypeError, "config.steps='many': expected a whole number (int)"),
        (assign("rollout.prompts", 1.5), TypeError, "config.rollout.prompts=1.5: expected a whole"),
        (assign("steps", True), TypeError, "config.steps=True: expected a whole number (int)"),
        (assign("rollout", 3), TypeError, "config.rollout is a section; set one of its keys: "),
        (assign("actor.schedule", 3), TypeError, "config.actor.schedule=3: expected a string"),
    ],
)
def test_a_slip_is_one_line(act, kind, says):
    with pytest.raises(kind) as caught:
        act(hjax.default_config())
    assert says in caught.value.args[0]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_complete_config_names_slips_in_the_algorithms_keys():
    config = hjax.get_config("ppo.py")
    with pytest.raises(AttributeError, match=r"gama; did you mean config.algorithm.gamma"):
        config.algorithm.gama = 0.9
    # Handed to the algorithm, the section still knows where it stands.
    section = config.algorithm
    with pytest.raises(AttributeError, match=r"unknown key config.algorithm.gama; did you mean"):
        section.gama  # noqa: B018


def test_values_take_the_type_of_the_key():
    config = hjax.default_config()
    config.rollout.temperature = 2
    config.rollout.stop = ["a"]
    config.steps = np.int64(7)
    assert type(config.rollout.temperature) is float and config.rollout.stop == ("a",)
    assert type(config.steps) is int


def test_hasattr_get_and_contains_answer_as_ever():
    config = hjax.default_config()
    assert hasattr(config, "steps") and not hasattr(config, "stepss")
    assert config.get("stepss", 5) == 5 and "stepss" not in config
    assert not hasattr(config, "_ipython_display_")


def test_what_may_grow_grows():
    config = hjax.default_config()
    config.algorithm.threshold = 0.1  # the algorithm's class says whether there is such a key
    config.data.task_options = {"length": 4}
    assert config.data.task_options.length == 4
    loose = Config({"a": 1, "b": {"c": 2}})
    loose.b.d = {"e": 3}
    assert loose.b.d.e == 3 and flatten(loose) == {"a": 1, "b.c": 2, "b.d.e": 3}
    with pytest.raises(AttributeError, match=r"config.b.d.f; did you mean config.b.d.e"):
        loose.b.d.f  # noqa: B018


@pytest.mark.parametrize(
    "twin",
    [
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: config.copy_and_resolve_references(),
        Config,
    ],
    ids=["deepcopy", "pickle", "copy_and_resolve_references", "Config"],
)
def test_a_copy_is_equal_locked_and_as_helpful(twin):
    config = hjax.get_config("ppo.py")
    copied = twin(config)
    assert type(copied) is Config and copied == config and copied.is_locked
    assert type(copied.rollout) is Config and type(copied.layout.actor) is Config
    with pytest.raises(AttributeError, match=r"unknown key config.rollout.promts; did you mean"):
        copied.rollout.promts = 3


def test_a_pickled_section_knows_where_it_stood():
    section = pickle.loads(pickle.dumps(hjax.default_config().rollout))
    with pytest.raises(AttributeError, match=r"unknown key config.rollout.promts"):
        section.promts  # noqa: B018


def test_it_is_a_config_dict():
    config = hjax.default_config()
    with config.unlocked():
        config.more = 1
    config.update({"steps": 5, "rollout": {"prompts": 8}})
    assert isinstance(config, ConfigDict) and config.is_locked
    assert (config.more, config.steps, config.rollout.prompts) == (1, 5, 8)
    assert FrozenConfigDict(config).rollout.prompts == 8
    plain = ConfigDict(config.to_dict()).lock()
    config.lock()  # what default_config leaves open, too
    assert plain == config and config == plain and not config != plain
    plain.steps = 6
    assert plain != config and config != plain
    with pytest.raises(KeyError, match="unknown key config.stps"):
        config.update({"stps": 5})
