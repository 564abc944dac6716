"""Tasks of other packages: gymnasium's environments and reasoning-gym's questions."""

import pickle
import sys

import numpy as np
import pytest

import hjax
from hjax.data.tasks import get_task
from hjax.errors import ConfigError, DataError
from hjax.launch.questions import find_task
from hjax.settings.config_loading import check_config

LAKE = "gymnasium:FrozenLake-v1"


def played(environment, row, actions, seed=0):
    shown = [environment.reset(row, seed).text]
    for action in actions:
        step = environment.step(action)
        shown.append((step.observation.text, step.reward, step.done, step.valid))
        if step.done:
            break
    environment.close()
    return shown


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason="the extra environments")


@pytest.mark.parametrize("slippery", [False, True])
def test_the_lake_is_gymnasiums(gymnasium, slippery):
    """The same row, seed and actions, played here and by gymnasium itself."""
    task, rng = get_task(LAKE, is_slippery=slippery, map_name="8x8"), np.random.default_rng(0)
    for seed, record in enumerate(task.examples("train", 0, 5)):
        actions = [int(action) for action in rng.integers(4, size=60)]
        game = gymnasium.make("FrozenLake-v1", is_slippery=slippery, map_name="8x8")
        state, _ = game.reset(seed=record["seed"])
        game.unwrapped.np_random = np.random.default_rng([record["seed"], seed])
        expected = [f"{state};"]
        for action in actions:
            state, reward, terminated, truncated, _ = game.step(action)
            expected.append((f"{state};", reward, terminated or truncated, True))
            if terminated or truncated:
                break
        assert played(task.make_environment(), record, map(str, actions), seed) == expected
        assert record["prompt"] == expected[0]


def test_the_goal_by_named_actions(gymnasium):
    """4x4: down, down, right, right, down, right leads around the holes."""
    task = get_task(LAKE, is_slippery=False, actions="left,down,right,up")
    record = task.examples("eval", 0, 1)[0]
    way = ["down", "down", "right", "right", "down", "right"]
    assert played(task.make_environment(), record, way) == [
        "0;", ("4;", 0, False, True), ("8;", 0, False, True), ("9;", 0, False, True),
        ("10;", 0, False, True), ("14;", 0, False, True), ("15;", 1, True, True),
    ]  # fmt: skip
    assert played(task.make_environment(), record, ["up", "2"])[1:] == [
        ("0;", 0, False, True), ("!0;", 0, False, False),
    ]  # fmt: skip
    assert (task.turn_length, task.observation_length, task.max_turns) == (6, 4, 100)


def test_the_episodes_seed_is_its_chance(gymnasium):
    task = get_task(LAKE)
    record = task.examples("train", 0, 1)[0]
    ways = [
        str(played(task.make_environment(), record, "1212", seed)) for seed in [0, 0, *range(9)]
    ]
    assert ways[0] == ways[1] == ways[2] and len(set(ways)) > 3
    alone = {key: value for key, value in record.items() if key != "seed"}
    assert played(task.make_environment(), alone, "1212", 7)[0] == "0;"


def test_seeds_are_split_and_demonstrations_are_actions(gymnasium):
    task = get_task("gymnasium:Blackjack-v1", natural=True)
    train, held_out = task.examples("train", 0, 300), task.examples("eval", 0, 40)
    seeds = {r["seed"] for r in train}
    assert len(seeds) == 300 and not seeds & {r["seed"] for r in held_out}
    assert train == task.examples("train", 0, 300) != task.examples("train", 1, 300)
    tokenizer, rng = task.tokenizer(), np.random.default_rng(0)
    for seed, record in enumerate(train[:40]):
        assert len(record["prompt"].split(" ")) == 3  # the player's sum, the dealer's card, an ace
        actions = task.demonstration_actions(record, rng, seed)
        shown = played(task.make_environment(), record, actions, seed)
        assert shown[0] == record["prompt"] and shown[-1][2] and {*actions} <= {"0", "1"}
        texts = [record["prompt"], *actions, *(text for text, *_ in shown[1:])]
        assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)
        assert max(map(len, texts)) <= task.observation_length


@pytest.fixture
def own_games(gymnasium):
    """Environments of this test's own, by the id they are registered with."""
    spaces = gymnasium.spaces

    class Game(gymnasium.Env):
        def __init__(self, render_mode=None, space="text", size=3, odd=None):
            text = spaces.Text(6, charset="ab")
            pair = spaces.MultiDiscrete([12, 3])
            self.action_space, self.observation_space = {
                "text": (text, text),
                "pair": (pair, spaces.Dict({"at": pair, "on": spaces.MultiBinary(2)})),
                "offset": (spaces.Discrete(3, start=-1), spaces.Discrete(3, start=-1)),
                "box": (spaces.Box(0, 1), text),
                "inner": (text, spaces.Tuple([text, spaces.Box(0, 1)])),
            }[space]
            self.seen = []

        def observation(self, action):
            if isinstance(self.observation_space, spaces.Dict):
                return {"at": np.array([11, 2]), "on": np.array([1, 0], np.int8)}
            return action

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation(self.action_space.sample()), {}

        def step(self, action):
            assert self.action_space.contains(action)
            return self.observation(action), 0.5, False, False, {}

    gymnasium.register("Spaces-v0", entry_point=Game, max_episode_steps=3)
    yield "gymnasium:Spaces-v0"
    del gymnasium.registry["Spaces-v0"]


def test_spaces_as_text(own_games):
    task = get_task(own_games, space="text")
    actions = ["abba", "abc", "", "b", "a" * 7, "a"]
    assert played(task.make_environment(), task.settings, actions)[1:] == [
        ("abba", 0.5, False, True), ("!abba", 0, False, False), ("!abba", 0, False, False),
        ("b", 0.5, False, True), ("!b", 0, False, False), ("a", 0.5, True, True),
    ]  # fmt: skip
    task = get_task(own_games, space="pair")
    assert (task.turn_length, task.observation_length) == (5, 10)
    shown = played(task.make_environment(), task.settings, ["11 2", "12 0", "11", "1 1 1", "-1 0"])
    assert shown[:2] == ["11 2 1 0;", ("11 2 1 0;", 0.5, False, True)]
    assert all(step == ("!11 2 1 0;", 0, False, False) for step in shown[2:])
    for names, actions in (("", ["-1", "1"]), ("x,y,z", ["x", "z"])):
        task = get_task(own_games, space="offset", actions=names)
        shown = played(task.make_environment(), task.settings, actions)
        assert [text for text, *_ in shown[1:]] == ["-1;", "1;"]
        drawn = task.demonstration_actions(task.settings, np.random.default_rng(0), 0)
        assert set(drawn) <= set(names.split(",") if names else ["-1", "0", "1"])


def test_the_limit_of_steps_ends_an_episode(own_games):
    task = get_task(own_games)
    assert task.max_turns == 3
    assert [s[2] for s in played(task.make_environment(), task.settings, "abab")[1:]] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("action", [
    "", " ", "4", "-1", "1 1", "01x", "1.0", "nan", "١", "9" * 400_000, "x" * 1_000_000, "\n",
    "\ud800",
])  # fmt: skip
def test_senseless_actions_are_not_passed_on(gymnasium, action):
    task = get_task(LAKE)
    assert played(task.make_environment(), {**task.settings, "seed": 1}, [action])[1] == (
        "!0;", 0, False, False,
    )  # fmt: skip


@pytest.mark.parametrize("name, options, message", [
    ("gymnasium:FrozenLke-v1", {}, "no task 'gymnasium:FrozenLke-v1': did you mean FrozenLake-v1"),
    ("gymnasium:FrozenLake-v99", {}, "VersionNotFound"),
    ("gymnasium:", {}, "no task 'gymnasium:'"),
    ("gymnasium:no_such_module:Game-v0", {}, "No module named 'no_such_module'"),
    ("gymnasium:CartPole-v1", {}, "observations are Box.*only Discrete.*hjax.Environment"),
    ("gymnasium:Pendulum-v1", {}, "actions are Box"),
    (LAKE, {"slippery": False}, "has no option 'slippery': did you mean is_slippery"),
    (LAKE, {"is_slippery": 1}, "is_slippery is 1; it must be of the kind of True"),
    (LAKE, {"map_name": "9x9"}, "gymnasium:FrozenLake-v1 cannot be made: KeyError: '9x9'"),
    (LAKE, {"actions": "left,right"}, "has 4 numbered actions, and the names are left, right"),
    (LAKE, {"actions": "a,b,c,a"}, "a name of its own"),
])  # fmt: skip
def test_what_gymnasium_cannot_do_is_one_line(gymnasium, name, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        get_task(name, **options)
    assert "\n" not in str(caught.value)


def test_other_spaces_within_are_refused(own_games):
    for space in ("box", "inner"):
        with pytest.raises(ConfigError, match="are Box.*can be text"):
            get_task(own_games, space=space)
    with pytest.raises(ConfigError, match="has no option 'odd'"):  # its default is no plain value
        get_task(own_games, odd=1)


def test_rows_that_name_no_environment(gymnasium):
    environment = get_task(LAKE).make_environment()
    for row in ({}, {"gymnasium": 3}, {"gymnasium": "FrozenLake-v1", "settings": [1]}):
        with pytest.raises(DataError, match="they must be the id of an environment and arguments"):
            environment.reset(row, 0)


@pytest.mark.parametrize(
    "family, module", [("gymnasium", "gymnasium"), ("reasoning_gym", "reasoning_gym")]
)
def test_a_missing_package_is_named_with_its_extra(family, module, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'hjax\[environments\]'") as caught:
        get_task(f"{family}:not_asked_for_before")
    assert "\n" not in str(caught.value)


def test_a_config_takes_their_names_and_options(gymnasium):
    config = hjax.get_config("base.py", {"data.task": LAKE, "data.task_options.is_slippery": False})
    assert config.data.task_options.is_slippery is False
    assert config.data.task_options.map_name == "4x4"
    assert check_config(config).rollout.max_response_length == 100 * (2 + 4)
    with pytest.raises(ConfigError, match="did you mean config.data.task_options.is_slippery"):
        hjax.get_config("base.py", {"data.task": LAKE, "data.task_options.is_slipery": False})
    with pytest.raises(ConfigError, match="config.data.task_options.is_slippery=3: expected true"):
        hjax.get_config("base.py", {"data.task": LAKE, "data.task_options.is_slippery": 3})


@pytest.mark.extended
def test_evaluates_flag_has_names_with_colons(gymnasium, tmp_path):
    task = find_task(f"{LAKE}:is_slippery=False,map_name=8x8", str(tmp_path))
    assert (task.is_slippery, task.map_name) == (False, "8x8")
    assert find_task(LAKE, str(tmp_path)).is_slippery is True
    assert find_task("sorting:length=3", str(tmp_path)).length == 3
    pytest.importorskip("reasoning_gym", reason="the extra environments")
    assert find_task("reasoning_gym:leg_counting:size=10", str(tmp_path)).size == 10


def test_tasks_of_packages_are_pickled(gymnasium):
    task = get_task(LAKE, is_slippery=False)
    assert pickle.loads(pickle.dumps(task)) == task
    assert pickle.loads(pickle.dumps(task.reward)).__self__ == task


# reasoning-gym

LEGS = {
    "chicken": 2,
    "human": 2,
    "duck": 2,
    "cat": 4,
    "dog": 4,
    "tiger": 4,
    "cow": 4,
    "elephant": 4,
}
LEGS |= {"spider": 8, "beetle": 6, "snake": 0, "lobster": 10, "ant": 6, "bee": 6, "crab": 10}


@pytest.fixture
def reasoning_gym():
    return pytest.importorskip("reasoning_gym", reason="the extra environments")


def test_questions_are_reasoning_gyms_and_it_scores_them(reasoning_gym):
    task = get_task("reasoning_gym:leg_counting", size=80, seed=3, max_animals=4)
    data = reasoning_gym.create_dataset("leg_counting", size=80, seed=3, max_animals=4)
    train, held_out = (
        task.examples("train", 0, task.largest_count("train")),
        task.examples("eval", 0, 5),
    )
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    assert len(train) + task.largest_count("eval") == 80
    for record in train:
        entry = data[record["index"]]
        assert (record["prompt"], record["answer"]) == (entry["question"], entry["answer"])
    columns = {key: [r[key] for r in train] for key in ("answer", "index")}
    prompts = [r["prompt"] for r in train]
    assert task.reward(prompts, columns["answer"], **columns) == [1.0] * len(train)
    wrong = [f"{int(answer) + 1}" for answer in columns["answer"]]
    assert task.correct(prompts, wrong, **columns) == [False] * len(train)
    assert task.correct(prompts, columns["answer"], **columns) == [True] * len(train)


def test_legs_by_hand(reasoning_gym):
    """Questions whose animals are all in the table above."""
    counted = 0
    for record in get_task("reasoning_gym:leg_counting", size=400, max_animals=3).examples(
        "train", 0, 300
    ):
        listed = record["prompt"].split("if you have ")[1].split("?")[0].split(", ")
        animals = [
            (int(text.split(" ")[0]), text.split(" ")[1].removesuffix("s")) for text in listed
        ]
        if all(name in LEGS for _, name in animals):
            assert int(record["answer"]) == sum(count * LEGS[name] for count, name in animals)
            counted += 1
    assert counted > 3


def test_text_fits_alphabet_and_length_of_questions(reasoning_gym):
    task = get_task("reasoning_gym:spell_backward", size=60)
    tokenizer = task.tokenizer()
    for record in task.examples("eval", 0, 3):
        text = record["prompt"] + task.demonstration(record, None)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(task.demonstration(record, None)) < task.response_length
    assert pickle.loads(pickle.dumps(task)) == task
    assert task.environment == "" and task.max_turns == 0


def test_what_a_scorer_cannot_read_is_wrong(reasoning_gym):
    """prime_factorization's raises for a response without numbers."""
    task = get_task("reasoning_gym:prime_factorization", size=20)
    record = task.examples("train", 0, 1)[0]
    columns = {key: [record[key]] for key in ("answer", "index")}
    for response in ("", "x", "nan", "1/0", "9" * 5000, "\ud800", "\n"):
        assert task.reward([record["prompt"]], [response], **columns) == [
            pytest.approx(0, abs=0.02)
        ]
    assert task.reward([record["prompt"]], [record["answer"]], **columns) == [1.0]


@pytest.mark.parametrize("name, options, message", [
    ("reasoning_gym:leg_countin", {}, "reasoning_gym:leg_countin': did you mean leg_counting"),
    ("reasoning_gym:", {}, "there are ab, acre"),
    ("reasoning_gym:leg_counting", {"size": 0}, "option size is 0; from 1 to 131072"),
    ("reasoning_gym:leg_counting", {"size": 10.0}, "size is 10.0; it must be of the kind of 500"),
    ("reasoning_gym:leg_counting", {"min_animals": 9, "max_animals": 2}, "cannot be made of its"),
    ("reasoning_gym:leg_counting", {"legs": 2}, "has no option 'legs'"),
])  # fmt: skip
def test_what_reasoning_gym_cannot_do_is_one_line(reasoning_gym, name, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        get_task(name, **options)
    assert "\n" not in str(caught.value)


def test_questions_without_answers_have_no_demonstrations(reasoning_gym):
    task = get_task("reasoning_gym:graph_color", size=10)
    record = task.examples("train", 0, 1)[0]
    with pytest.raises(DataError, match="has no answer to question"):
        task.demonstration(record, None)
