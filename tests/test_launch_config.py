"""Configs: one table of keys, overrides, and errors of one line that say what to do."""

import os
import pathlib
import signal

import pytest
from config_page import config_markdown
from ml_collections import ConfigDict

from hjax.algorithms import get_algorithm
from hjax.errors import ConfigError
from hjax.launch.__main__ import main, parse
from hjax.launch.jax_setup import dividing_devices
from hjax.machine import available_cores
from hjax.models.remat import POLICIES
from hjax.settings import keys
from hjax.settings.config_loading import check_config, config_names, default_config, load_config

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def config_file(tmp_path):
    """A config file of a user's: PPO with a few keys set."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import hjax\n"
        "def get_config():\n"
        "    config = hjax.default_config()\n"
        "    config.steps = 50\n"
        "    config.algorithm.gamma = 0.9\n"
        "    config.algorithm.lam = 0.9\n"
        "    return config\n"
    )
    return str(path)


def error_of(*overrides, config="ppo.py"):
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", config_names())
def test_shipped_configs_load(name):
    config = load_config(name)
    assert config.steps > 0
    if not get_algorithm(config.algorithm.name).sequences:
        return
    batch = config.rollout.prompts * config.rollout.samples
    assert batch % 16 == 0 and config.warm_start.batch % 16 == 0


def test_bare_name_and_without_ending():
    assert load_config("ppo.py") == load_config("ppo")


def test_overrides_have_the_type_of_the_key(config_file):
    config = load_config(
        config_file,
        [
            "--config.steps=7",
            "--config.rollout.temperature=2",
            "--config.rollout.stop=('a', 'b')",
            "--config.model.unroll_layers=True",
            "--config.data.chat",
            "--noconfig.model.tie_embeddings",
            "--config.algorithm.lam=1",
            "--config.data.task_options.length=3",
            "--config.layout.actor.train.tensor",
            "2",
        ],
    )
    assert config.steps == 7
    assert config.rollout.temperature == 2.0 and type(config.rollout.temperature) is float
    assert config.rollout.stop == ("a", "b")
    assert config.model.unroll_layers == "true"
    assert config.data.chat and not config.model.tie_embeddings
    assert config.algorithm.gamma == 0.9 and config.algorithm.lam == 1.0
    assert config.data.task_options.length == 3
    assert config.layout.actor.train.tensor == 2


def test_algorithm_of_ones_own_brings_its_keys(config_file, tmp_path):
    (tmp_path / "own.py").write_text(
        "import hjax\n"
        "class Mine(hjax.algorithms.PPO):\n"
        "    @classmethod\n"
        "    def default_config(cls):\n"
        "        config = super().default_config()\n"
        "        config.bonus = 0.5\n"
        "        return config\n"
    )
    name = f"--config.algorithm.name={tmp_path / 'own.py'}:Mine"
    config = load_config(config_file, [name, "--config.algorithm.bonus=0.25"])
    assert config.algorithm.bonus == 0.25
    assert config.algorithm.gamma == 0.9  # the file's, which a subclass understands


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ReinforcePlusPlus", "reinforceplusplus"])
def test_an_algorithm_is_named_as_its_class_or_as_its_config(config_file, name):
    config = load_config(config_file, [f"--config.algorithm.name={name}"])
    # Spelled one way from there on: a run goes on whichever its command has.
    assert config.algorithm.name == "ReinforcePlusPlus" and config.algorithm.whiten


def test_another_algorithm_leaves_out_what_it_does_not_have(config_file):
    config = load_config(config_file, ["--config.algorithm.name=GRPO"])
    assert "lam" not in config.algorithm and "normalise" in config.algorithm


def test_another_task_leaves_out_the_files_options():
    options = load_config("ppo.py", ["--config.data.task=addition"]).data.task_options
    assert options.digits == 2 and "length" not in options


def test_an_incomplete_config_is_completed():
    config = check_config({"steps": 3, "algorithm": {"name": "GRPO"}})
    assert config.steps == 3 and config.rollout.prompts == default_config().rollout.prompts
    assert config.algorithm.aggregation == "sequence"


def test_keys_of_an_algorithm_are_declared_once(config_file, tmp_path):
    (tmp_path / "own.py").write_text(
        "import hjax\n"
        "class Mine(hjax.algorithms.GRPO):\n"
        "    keys = {'bonus': hjax.Key(0.5, 'added to rewards', hjax.rules.at_least(0))}\n"
        "    defaults = {'kl_coef': 0, 'aggregation': 'token'}\n"
        "class Below(Mine):\n"
        "    defaults = {'bonus': 0.25}\n"
    )
    own = tmp_path / "own.py"
    config = load_config(config_file, {"algorithm.name": f"{own}:Mine"}).algorithm
    assert (config.bonus, config.kl_coef, config.aggregation) == (0.5, 0.0, "token")
    assert type(config.kl_coef) is float and config.normalise == "std"
    config = load_config(config_file, {"algorithm": {"name": f"{own}:Below"}}).algorithm
    assert (config.bonus, config.kl_coef) == (0.25, 0.0)
    says = error_of(f"--config.algorithm.name={own}:Below", "--config.algorithm.bonus=-1")
    assert says == "config.algorithm.bonus=-1.0: must be 0 or more"


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ("{'kl_coeff': 0.1}", "Mine.defaults: no key 'kl_coeff'; there are minibatch"),
        ("{'kl_coef': 'a'}", "config.algorithm.kl_coef='a': expected a number"),
    ],
)
def test_a_default_that_no_base_has_is_named(defaults, says, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(f"import hjax\nclass Mine(hjax.algorithms.PPO):\n    defaults = {defaults}\n")
    assert says in error_of(f"--config.algorithm.name={own}:Mine")


def test_sft_takes_its_two_keys_and_a_subclass_more(tmp_path):
    assert set(load_config("sft.py").algorithm) == {"name", "aggregation", "max_skipped"}
    own = tmp_path / "own.py"
    own.write_text(
        "import hjax\nclass Mine(hjax.algorithms.SFT):\n    keys = {'bonus': hjax.Key(1)}\n"
    )
    config = load_config("sft.py", {"algorithm.name": f"{own}:Mine"})
    assert set(config.algorithm) == {"name", "aggregation", "max_skipped", "bonus"}


def test_overrides_as_values():
    config = load_config(
        "ppo.py", {"rollout.prompts": 32, "rollout": {"samples": 8}, "algorithm.lam": 1}
    )
    assert (config.rollout.prompts, config.rollout.samples) == (32, 8)
    assert config.algorithm.lam == 1.0 and type(config.algorithm.lam) is float
    assert config == load_config(
        "ppo.py",
        ["--config.rollout.prompts=32", "--config.rollout.samples=8", "--config.algorithm.lam=1"],
    )
    other = load_config("ppo.py", {"algorithm.name": "GRPO", "data.task": "addition"})
    assert "lam" not in other.algorithm and "length" not in other.data.task_options


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"stps": 3}, "unknown key config.stps; did you mean config.steps?"),
        ({"rollout": 3}, "is a section"),
        ({"steps": "abc"}, "config.steps='abc': expected a whole number"),
        ({"steps": -1}, "must be 0 or more"),
        ({"algorithm.name": 3}, "config.algorithm.name=3: expected a string"),
        ({"algorithm": {"gama": 0.9}}, "not a key of PPO"),
        ({"algorithm.kl_coef": 0.0, "algorithm.kl_target": 0.1}, "moves config.algorithm.kl_coef"),
        ({"algorithm.name": "GRPO", "algorithm.baseline": "none"}, "normalises by statistics"),
    ],
)
def test_wrong_values_are_named(overrides, says):
    with pytest.raises(ConfigError) as caught:
        load_config("ppo.py", overrides)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("--config.stps=3", "unknown key config.stps; did you mean config.steps?"),
        ("--config.rollout.prompt=3", "did you mean config.rollout.prompts?"),
        ("--config.prompts=3", "config.rollout.prompts"),
        ("--config.algorithm.gama=1", "not a key of PPO"),
        ("--config.data.task_options.lenght=1", "did you mean config.data.task_options.length?"),
        ("--config.data.task=sortin", "did you mean sorting?"),
        ("--config.algorithm.name=PPPO", "did you mean PPO"),
        ("--config.rollout=3", "is a section"),
        ("--config.steps=abc", "config.steps='abc': expected a whole number"),
        ("--config.steps=1.5", "config.steps='1.5': expected a whole number"),
        ("--config.data.chat=maybe", "expected true or false"),
        ("--config.model.unroll_layers=maybe", "must be one of auto, true, false"),
        ("--config.model.remat=True", "must be one of auto, none, products, attention, full, "),
        ("--config.rollout.temperature=hot", "expected a number"),
        ("--config.steps", "missing value"),
        ("--config.rollout.temperature=0", "must be from 0.01 to 100"),
        ("--config.rollout.temperature=nan", "must be from 0.01 to 100"),
        ("--config.rollout.top_p=1.5", "above 0 and at most 1"),
        ("--config.actor.schedule=step", "must be one of constant, cosine, linear"),
        ("--config.seed=4294967296", "must be from 0 to 4294967295"),
        ("--config.algorithm.kl_in=rewrd", "algorithm.kl_in='rewrd': must be one of reward, loss"),
        ("--config.algorithm.epochs=0", "must be 1 or more"),
        ("--config.algorithm.lam=nan", "must be from 0 to 1"),
        ("--config.algorithm.gamma=2", "must be from 0 to 1"),
        ("--config.algorithm.minibatch=-1", "must be 0 or more"),
        ("--config.algorithm.dual_clip=0.5", "must be above 1 (usually 3), or 0 for none"),
        ("--config.placement=plan.json", "no such file"),
        ("--config.placement=together", "must be one of colocate, split, standalone"),
        ("--config.cluster.processes=0", "1 or more"),
        ("--config.cluster.heartbeat_seconds=0", "above 0 to 1e8 seconds"),
        ("--config.model.heads=3", "it may be 1, 2, 4, 8, 16, 32, 64, 128"),
        ("config.steps=3", "unexpected argument 'config.steps=3'"),
        ("--wrokdir=x", "wrokdir"),
        ("--confg.steps=3", "'confg.steps'; did you mean --config.steps?"),
        ("--zzz=3", "'zzz'; --help lists what there is"),
    ],
)
def test_wrong_overrides_are_named(override, says):
    assert says in error_of(override)


def test_rules_of_an_algorithm_hold_for_its_subclasses_too(tmp_path):
    (tmp_path / "own.py").write_text(
        "import hjax\n"
        "class Mine(hjax.algorithms.GRPO):\n"
        "    keys = {'bonus': hjax.Key(2.0, 'a bonus', hjax.rules.at_least(1)),\n"
        "            'kl_in': hjax.Key('loss', 'where', hjax.rules.one_of('loss', 'here'))}\n"
    )
    name = f"--config.algorithm.name={tmp_path / 'own.py'}:Mine"
    assert "must be 1 or more" in error_of(name, "--config.algorithm.bonus=0.5")
    assert "must be one of std, mean, none" in error_of(name, "--config.algorithm.normalise=foo")
    assert "must be one of loss, here" in error_of(name, "--config.algorithm.kl_in=reward")


def test_batch_sizes_that_do_not_divide_offer_those_that_do():
    # 6 prompts x 4 samples = 24 sequences: whole groups of 4, in 1, 2, 3 or 6 of them.
    batch = ("--config.rollout.prompts=6", "--config.rollout.samples=4")
    message = error_of(*batch, "--config.algorithm.minibatch=16")
    assert "6 prompts x 4 samples = 24" in message and message.endswith("4, 8, 12, 24")
    message = error_of(*batch, "--config.algorithm.minibatch=12", "--config.critic.micro_batch=5")
    assert "config.critic.micro_batch=5" in message and message.endswith("1, 2, 3, 4, 6, 12")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def get_config(:\n", "mine.py:1: SyntaxError"),
        ("x = 1\n", "defines no get_config()"),
        ("def get_config():\n    return 3\n", "returned int"),
        ("def get_config():\n    return 1 / 0\n", "mine.py:2: ZeroDivisionError"),
        (
            "import hjax\ndef get_config():\n    config = hjax.default_config()\n"
            "    config.rollout.promts = 3\n    return config\n",
            "mine.py:4: unknown key config.rollout.promts; did you mean "
            "config.rollout.prompts?",
        ),
    ],
)
def test_broken_config_files_are_named(text, says, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert says in error_of(config=str(path))


def test_check_config_names_a_wrong_type_from_python():
    config = ConfigDict({"rollout": {"prompts": "many"}})
    with pytest.raises(ConfigError, match="config.rollout.prompts='many': expected a whole number"):
        check_config(config)


def test_config_docs_are_current():
    committed = (ROOT / "docs" / "config.md").read_text()
    again = "run: python docs/generate/config_page.py > docs/config.md"
    assert committed == config_markdown(), again


def test_every_key_has_a_meaning():
    rows = [line for line in config_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert all(len(row.split(" | ")[3]) > 8 for row in rows)


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--config=NAME.py is missing"),
        (["--config=nothing.py"], "or one of base.py, calculator.py, cdpo.py"),
        (["--config=ppo.py", "--dryrun"], "dry_run"),
        (["--config=ppo.py", "--config.stps=3", "--workdir=w"], "config.steps"),
        (["--config=ppo.py", "--workdir="], "--workdir= is empty"),
    ],
)
def test_wrong_commands_end_with_one_line_and_write_nothing(
    arguments, says, in_empty_folder, capsys
):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("hjax: error: ") and says in output.err
    assert os.listdir(in_empty_folder) == []


def test_help(in_empty_folder, capsys):
    assert main(["--help"]) == 0
    assert "ppo.py" in capsys.readouterr().out


def test_command_line_is_read_in_any_order():
    command = parse(
        ["--json", "--config.steps=3", "--config", "grpo.py", "--workdir=x", "--dry_run"]
    )
    assert command.config.steps == 3 and command.config.algorithm.name == "GRPO"
    assert (str(command.workdir), command.dry_run, command.json) == ("x", True, True)


def test_cpu_devices_divide_the_batches():
    config = load_config(
        "ppo.py", ["--config.rollout.prompts=16", "--config.algorithm.minibatch=0"]
    )
    assert dividing_devices(config, cores=1) == 1
    assert dividing_devices(config, cores=2) == 2
    assert dividing_devices(config, cores=6) == 4
    assert dividing_devices(config, cores=12) == 8
    # With a layout of the user's own, sizes are theirs to match.
    own = load_config("ppo.py", ["--config.layout.actor.train.tensor=3"])
    assert dividing_devices(own, cores=6) == 6
    assert available_cores() >= 1


def test_the_policies_of_rematerialisation_are_those_that_there_are():
    rule = keys.KEYS["model"]["remat"].rule
    assert all(rule.holds(policy) for policy in POLICIES) and not rule.holds("some")
