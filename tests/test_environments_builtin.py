"""The built-in environments and their tasks: episodes worked by hand, rules, bad input."""

import itertools
from collections import deque

import numpy as np
import pytest

from hjax.data.tasks import TASKS, get_task
from hjax.data.tasks.calculator_task import calculation_steps
from hjax.data.tasks.sokoban_rules import parse_level, read_levels, solve
from hjax.environments import anchor_digest
from hjax.environments.calculator import Calculator
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.maze import Maze
from hjax.environments.sokoban import Sokoban
from hjax.environments.twenty_questions import TwentyQuestions
from hjax.errors import ConfigError, DataError

PLAYED = sorted(name for name, cls in TASKS.items() if cls.environment)
VARIANTS = [
    *((name, {}) for name in PLAYED),
    ("maze", {"side": 10, "view": "walls", "noise": 0.5}),
    ("maze", {"side": 3, "distance": 2}),
    ("sokoban", {"side": 8, "boxes": 2, "view": "map"}),
    ("sokoban", {"side": 5, "noise": 0.5}),
    ("calculator", {"terms": 4, "digits": 3, "noise": 0.5}),
    ("calculator", {"terms": 2, "digits": 1, "tool": False}),
    ("twenty_questions", {"items": 16, "noise": 0.3}),
    ("twenty_questions", {"items": 2, "attributes": 1}),
]


def played(environment, row, actions, seed=0):
    """What an episode shows: the first observation, and each step's text, reward, done, valid."""
    shown = [environment.reset(row, seed).text]
    for action in actions:
        step = environment.step(action)
        shown.append((step.observation.text, step.reward, step.done, step.valid))
    return shown


def anchor_after(environment, row, actions, seed=0):
    """Digest of the anchor after the actions."""
    seen = environment.reset(row, seed)
    for action in actions:
        seen = environment.step(action).observation
    return anchor_digest(seen.anchor)


# Mazes

MAZE = {"maze": "@.#\n..G\n#..", "prompt": "@.#\n..G\n#..\n00"}


def test_a_maze_by_hand():
    assert played(Maze(), MAZE, ["E", "S", "E"]) == [
        "@.#\n..G\n#..\n00", ("01", 0, False, True), ("11", 0, False, True), ("12", 1, True, True),
    ]  # fmt: skip
    assert played(Maze(), MAZE | {"step_cost": 0.25}, ["W", "N", "x", "E", "E"])[1:] == [
        ("!00", -0.25, False, False), ("!00", -0.25, False, False), ("!00", -0.25, False, False),
        ("01", -0.25, False, True), ("!01", -0.25, False, False),
    ]  # fmt: skip


def test_a_maze_seen_from_within():
    assert played(Maze(), MAZE | {"view": "walls"}, ["E", "S", "E"]) == [
        "#..#", ("##..", 0, False, True), (".G..", 0, False, True), ("##..", 1, True, True),
    ]  # fmt: skip
    assert played(Maze(), MAZE | {"view": "walls"}, ["N"])[1] == ("!#..#", 0, False, False)


def test_a_row_without_prompt_or_with_one_of_its_own():
    assert Maze().reset({"maze": "@G"}, 0).text == "@G\n00"
    assert Maze().reset({"maze": "@G", "prompt": "Walk to G: @G"}, 0).text == "Walk to G: @G"


def moves_to_goal(maze):
    """Fewest moves from @ to G, breadth first over characters, written apart from hjax."""
    width = maze.index("\n") + 1
    start, goal = maze.index("@"), maze.index("G")
    seen, queue = {start}, deque([(start, 0)])
    while queue:
        place, moves = queue.popleft()
        if place == goal:
            return moves
        for near in (place - width, place + width, place - 1, place + 1):
            if 0 <= near < len(maze) and maze[near] in ".@G" and near not in seen:
                seen.add(near)
                queue.append((near, moves + 1))


@pytest.mark.parametrize("options", [{}, {"side": 10, "distance": 9}, {"wall_share": 0.5}])
def test_demonstrations_take_the_shortest_way(options):
    task, rng = get_task("maze", **options), np.random.default_rng(0)
    for record in task.examples("train", 0, 40):
        actions = task.demonstration_actions(record, rng, 0)
        shortest = moves_to_goal(record["maze"])
        assert len(actions) == shortest and task.distance <= shortest <= 3 * task.side
        assert played(Maze(), record, actions)[-1][1:3] == (1, True)


def test_noise_is_a_share_of_random_moves():
    """All at random, each letter comes as often; at a half, more than half of them are good."""
    records = get_task("maze").examples("train", 0, 200)
    rng = np.random.default_rng(0)
    told = {}
    for noise in (0.0, 0.5, 1.0):
        task = get_task("maze", noise=noise)
        episodes = [task.demonstration_actions(record, rng, 0) for record in records]
        told[noise] = np.mean([played(Maze(), r, a)[-1][2] for r, a in zip(records, episodes)])
    letters = "".join(itertools.chain(*episodes))
    assert told[0.0] == 1 > told[0.5] > 0.7 > 0.6 > told[1.0]
    assert all(abs(letters.count(a) / len(letters) - 0.25) < 0.03 for a in "NESW")


# Sokoban

LEVEL = {"level": "#####\n#@$.#\n#   #\n#####", "prompt": "#####\n#@$.#\n#   #\n#####\n11 12"}
TWO = {"level": "#######\n#.$@$.#\n#     #\n#######"}


def test_a_level_by_hand():
    assert played(Sokoban(), LEVEL, ["U", "D", "U", "R"]) == [
        LEVEL["prompt"], ("!11 12", 0, False, False), ("21 12", 0, False, True),
        ("11 12", 0, False, True), ("12 13", 1, True, True),
    ]  # fmt: skip
    assert played(Sokoban(), TWO | {"box_reward": 0.1}, ["L", "R", "R"]) == [
        f"{TWO['level']}\n13 12 14", ("12 11 14", pytest.approx(0.1), False, True),
        ("13 11 14", 0, False, True), ("14 11 15", pytest.approx(1.1), True, True),
    ]  # fmt: skip


def test_boxes_are_not_pulled_nor_pushed_in_pairs_or_through_walls():
    row = {"level": "#######\n#@$$..#\n#######"}
    assert played(Sokoban(), row, ["R"])[1] == ("!11 12 13", 0, False, False)
    row = {"level": "######\n# @$ #\n#  $.#\n# .  #\n######"}
    steps = played(Sokoban(), row, ["R", "R", "L", "L", "L"])[1:]
    assert [text for text, *_ in steps] == [
        "13 14 23",
        "!13 14 23",
        "12 14 23",
        "11 14 23",
        "!11 14 23",
    ]


def test_a_box_pushed_off_its_goal_costs_what_it_earned():
    row = {"level": "#######\n#@* $.#\n#######"}
    steps = played(Sokoban(), row | {"box_reward": 0.5}, ["R"])[1:]
    assert steps == [("12 13 14", pytest.approx(-0.5), False, True)]


def test_the_map_is_shown_anew_and_replaces_the_history():
    environment = Sokoban()
    assert environment.reset({"level": LEVEL["level"], "view": "map"}, 0).text == LEVEL["level"]
    step = environment.step("D")
    assert step.fresh and step.observation.text == "#####\n# $.#\n#@  #\n#####"
    assert environment.step("x").observation.text.startswith("!#####\n")
    environment.step("U")
    assert environment.step("R").observation.text == "#####\n# @*#\n#   #\n#####"


def pushed(level, action):
    """The level after a move, by replacing characters; written apart from hjax."""
    width = level.index("\n") + 1
    step = {"U": -width, "D": width, "L": -1, "R": 1}[action]
    here = max(level.find("@"), level.find("+"))
    near, far = here + step, here + 2 * step
    cells = list(level)
    if cells[near] in "$*":
        if cells[far] not in " .":
            return level
        cells[far] = {" ": "$", ".": "*"}[cells[far]]
        cells[near] = {"$": " ", "*": "."}[cells[near]]
    if cells[near] not in " .":
        return level
    cells[near] = {" ": "@", ".": "+"}[cells[near]]
    cells[here] = {"@": " ", "+": "."}[cells[here]]
    return "".join(cells)


def test_random_moves_as_by_replacing_characters():
    rng, pushes = np.random.default_rng(0), 0
    for record in get_task("sokoban", side=8, boxes=2).examples("train", 0, 30):
        environment, level = Sokoban(), record["level"]
        environment.reset(record | {"view": "map", "box_reward": 1.0}, 0)
        for action in rng.choice(list("UDLR"), 150):
            before, level = level, pushed(level, action)
            step = environment.step(action)
            assert step.valid == (level != before)
            assert step.observation.text.removeprefix("!") == level
            solved = "$" not in level
            assert (step.done, step.reward) == (
                solved,
                level.count("*") - before.count("*") + solved,
            )
            pushes += level.count("*") != before.count("*")
            if solved:
                break
    assert pushes > 10


def test_a_player_on_a_goal_is_drawn_and_read():
    text = "#####\n#+$ #\n# $.#\n#####"
    assert str(parse_level(text)) == text


def test_solutions_are_shortest():
    """Against all strings of moves up to that length."""
    level = "######\n#  @ #\n# $  #\n#   .#\n######"
    found = solve(parse_level(level))
    assert played(Sokoban(), {"level": level}, found)[-1][2]
    for length in range(1, len(found)):
        for actions in itertools.product("UDLR", repeat=length):
            environment = Sokoban()
            environment.reset({"level": level}, 0)
            assert not any(environment.step(action).done for action in actions)
    cornered = parse_level("#####\n#@ .#\n#$  #\n#####")
    assert solve(cornered) is None
    assert solve(parse_level(level), limit=3) is None


def test_boxoban_levels_are_read(test_data):
    path = test_data / "boxoban" / "unfiltered_test_000.txt"
    levels = read_levels(path)
    assert len(levels) == 1000
    assert path.read_text().splitlines()[1:11] == levels[0].splitlines()
    for level in levels:
        state = parse_level(level)
        assert str(state) == level and len(state.boxes) == 4
        assert all(len(row) == 10 for row in state.rows) and len(state.rows) == 10


def test_files_of_levels(tmp_path):
    path = tmp_path / "levels.txt"
    path.write_text("; 0\n####\n#@$.#\n####\n\n; 1\n#####\n#.$@#\n#####\n")
    assert read_levels(path) == ["####\n#@$.#\n####", "#####\n#.$@#\n#####"]
    path.write_text("; 0\n####\n#@$ #\n####\n")
    with pytest.raises(DataError, match="levels.txt: level 0: level is .*goals: 0; it must have"):
        read_levels(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="has no levels"):
        read_levels(path)


# The calculator

SUM = {"prompt": "47*38-129?", "result": 1657}


def test_a_sum_by_hand():
    assert played(Calculator(), SUM, ["47*38=", "1786-129=", "#1657"]) == [
        "47*38-129?", ("1786;", 0, False, True), ("1657;", 0, False, True), ("", 1, True, True),
    ]  # fmt: skip
    assert played(Calculator(), SUM | {"tool": False}, ["47*38=", "#1658"])[1:] == [
        ("?;", 0, False, False), ("", 0, True, True),
    ]  # fmt: skip
    assert played(Calculator(), SUM | {"partial": 0.5}, ["#1658"])[1][1] == pytest.approx(
        0.5 * 3 / 4
    )


@pytest.mark.parametrize("action, shown", [
    ("-5+3=", "-2;"), ("3--4=", "7;"), ("-3*-4=", "12;"), ("007*2=", "14;"), (" 1+1= ", "2;"),
    ("1+1", "?;"), ("1+1+1=", "?;"), ("1/2=", "?;"), ("2**9=", "?;"), ("=", "?;"), ("nan+1=", "?;"),
    ("1.5+1=", "?;"), ("1e9+1=", "?;"), ("²+1=", "?;"), ("١+١=", "?;"), ("1+\n1=", "?;"),
    ("9" * 18 + "*1=", "9" * 18 + ";"), ("9" * 19 + "*1=", "?;"), ("9999999999*999999999=", "?;"),
    ("9" * 1_000_000 + "*1=", "?;"), ("__import__('os')=", "?;"),
])  # fmt: skip
def test_what_the_calculator_computes(action, shown):
    assert played(Calculator(), SUM, [action])[1][0] == shown


@pytest.mark.parametrize("answer, reward, valid", [
    ("#1657", 1, True), ("#01657", 1, True), ("# 1657", 0, False), ("#", 0, False),
    ("#1657#", 0, False), ("#nan", 0, False), ("#١٦٥٧", 0, False), ("#-1657", 0, True),
    ("#" + "9" * 1_000_000, 0, True), ("#1657=", 0, False),
])  # fmt: skip
def test_which_answers_are_right(answer, reward, valid):
    assert played(Calculator(), SUM, [answer])[1] == ("", reward, True, valid)


@pytest.mark.parametrize("options", [{}, {"terms": 4, "digits": 3}, {"terms": 2, "digits": 1}])
def test_calculations_follow_python(options):
    task = get_task("calculator", **options)
    for record in task.examples("train", 0, 200):
        expression = record["prompt"].removesuffix("?")
        assert eval(expression) == record["result"]
        *calculations, answer = calculation_steps(expression)
        assert len(calculations) == task.terms - 1 and answer == f"#{eval(expression)}"
        for action, shown in zip(calculations, played(Calculator(), record, calculations)[1:]):
            assert shown[0] == f"{eval(action[:-1])};"


def test_lengths_hold_for_the_largest_numbers():
    for terms, digits in itertools.product((2, 3, 4), (1, 2, 3)):
        task, nines = get_task("calculator", terms=terms, digits=digits), "9" * digits
        for signs in itertools.product("+-*", repeat=terms - 1):
            expression = nines + "".join(sign + nines for sign in signs)
            row = task.settings | {"prompt": "", "result": eval(expression)}
            shown = played(Calculator(), row, actions := calculation_steps(expression))[1:]
            assert shown[-1][1] == 1
            assert max(map(len, actions)) < task.turn_length
            assert max(len(text) for text, *_ in shown) <= task.observation_length


# Twenty questions

TABLE = {"table": "Ayn\nBny\nCyy", "item": "C"}


def test_questions_by_hand():
    environment, row = TwentyQuestions(), TABLE | {"question_cost": 0.25}
    assert played(environment, row, ["1", "2", "C"]) == [
        "Ayn\nBny\nCyy", ("y", -0.25, False, True), ("y", -0.25, False, True), ("", 1, True, True),
    ]  # fmt: skip
    assert played(environment, row, ["3", "0", "D", "A"])[1:] == [
        ("?", -0.25, False, False), ("?", -0.25, False, False), ("?", -0.25, False, False),
        ("", 0, True, True),
    ]  # fmt: skip


def test_the_seed_draws_every_item_as_often():
    row = {"table": "Ayn\nBny\nCyy"}
    found = "".join(
        name for seed in range(900) for name in "ABC"
        if played(TwentyQuestions(), row, [name], seed)[1][1]
    )  # fmt: skip
    assert len(found) == 900 and all(abs(found.count(name) - 300) < 60 for name in "ABC")


@pytest.mark.parametrize("items, attributes", [(16, 4), (8, 4), (5, 8)])
def test_demonstrations_find_the_item_within_the_attributes(items, attributes):
    task = get_task("twenty_questions", items=items, attributes=attributes)
    rng = np.random.default_rng(0)
    for seed, record in enumerate(task.examples("train", 0, 60)):
        actions = task.demonstration_actions(record, rng, seed)
        assert played(TwentyQuestions(), record, actions, seed)[-1][1:3] == (1, True)
        assert np.log2(items) <= len(actions) - 1 <= attributes or items < 2**attributes
        assert len(actions) - 1 <= attributes


# All of them


@pytest.mark.parametrize("name, options", VARIANTS)
def test_demonstrations_keep_to_alphabet_lengths_and_turns(name, options):
    task, rng = get_task(name, **options), np.random.default_rng(0)
    tokenizer = task.tokenizer()
    count = min(40, task.largest_count("train") or 100)
    solved = []
    for seed, record in enumerate(task.examples("train", 0, count)):
        actions = task.demonstration_actions(record, rng, seed)
        shown = played(task.make_environment(), record, actions, seed)
        solved.append(shown[-1][2])
        assert 0 < len(actions) <= task.max_turns
        assert max(map(len, actions)) < task.turn_length
        assert all(len(text) <= task.observation_length for text, *_ in shown[1:])
        if options.get("view") != "walls":
            assert shown[0] == record["prompt"]
        for text in [record["prompt"], shown[0], *actions, *(text for text, *_ in shown[1:])]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert task.response_length == task.max_turns * (task.turn_length + task.observation_length)
    assert all(solved) or options.get("noise")


@pytest.mark.parametrize("name", PLAYED)
def test_an_episode_follows_from_row_seed_and_actions(name):
    task = get_task(name, noise=0.5)
    for seed, record in enumerate(task.examples("eval", 0, 10)):
        first, again = (
            task.demonstration_actions(record, np.random.default_rng(seed), seed) for _ in range(2)
        )
        assert first == again
        used = task.make_environment()  # which has played another episode before
        played(used, task.examples("train", 1, 1)[0], ["x"], 7)
        new = task.make_environment()
        assert played(used, record, first, seed) == played(new, record, first, seed)


def test_a_process_plays_as_this_one_does():
    task = get_task("sokoban", view="map", box_reward=0.5)
    record = task.examples("train", 0, 1)[0]
    actions = [*task.demonstration_actions(record, np.random.default_rng(0), 0)[:-1], "x"]
    expected = played(task.make_environment(), record, actions)
    with EpisodePool(task.environment) as pool:
        seen = [pool.reset(0, record, 0).result(60)]
        seen += [pool.step(0, action).result(60) for action in actions]
    assert [answer.fault for answer in seen] == [""] * len(seen)
    assert seen[0].observation == expected[0] and all(answer.fresh for answer in seen[1:])
    assert [(a.observation, a.reward, a.done, a.valid) for a in seen[1:]] == expected[1:]


ANCHORS = {
    "maze": (Maze, MAZE, ["E", "S"], ["S", "x", "E"], ["S"]),
    "walls": (Maze, MAZE | {"view": "walls"}, ["E", "S"], ["S", "", "E"], ["E"]),
    "sokoban": (Sokoban, TWO, ["D", "L"], ["D", "R", "L", "x", "L"], ["L"]),
    "map": (Sokoban, LEVEL | {"view": "map"}, ["D"], ["x", "D", "D"], []),
    "calculator": (Calculator, SUM, ["1+2=", "3*4="], ["3*4=", "?", "1+2=", "3*4="], ["1+2="]),
    "twenty_questions": (TwentyQuestions, TABLE, ["1", "2"], ["2", "x", "1", "2"], ["1"]),
}  # fmt: skip


@pytest.mark.parametrize("which", ANCHORS)
def test_anchors_are_equal_where_states_are(which):
    make, row, way, other_way, elsewhere = ANCHORS[which]
    assert anchor_after(make(), row, way) == anchor_after(make(), row, other_way)
    assert anchor_after(make(), row, way) != anchor_after(make(), row, elsewhere)
    assert anchor_after(make(), row, []) != anchor_after(make(), row, way)


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize("action", [
    "", " ", "\n", "\0", "NN", "n", "x" * 1_000_000, "ÜÉ中文🙂", "\ud800", "nan", "-1", "1" * 5000,
    "Ｎ", "N\nN", "__class__", "{}", "%s",
])  # fmt: skip
def test_senseless_actions_change_nothing_and_the_episode_goes_on(name, action):
    task = get_task(name)
    record = task.examples("train", 0, 1)[0]
    environment = task.make_environment()
    start = anchor_digest(environment.reset(record, 0).anchor)
    step = environment.step(action)
    assert (step.valid, step.done, step.reward) == (False, False, 0.0)
    assert len(step.observation.text) <= task.observation_length
    assert anchor_digest(step.observation.anchor) == start


@pytest.mark.parametrize("make, row, message", [
    (Maze, {}, "maze is None; it must be lines of equal length"),
    (Maze, {"maze": "@.\nG"}, "it must be lines of equal length"),
    (Maze, {"maze": "@@G"}, "one @ and one G"),
    (Maze, {"maze": "@G" + "." * 9}, "at most 10 by 10"),
    (Maze, {"maze": 3}, "maze is 3"),
    (Maze, {"maze": ""}, "maze is ''"),
    (Maze, MAZE | {"view": "top"}, "view is 'top'; it must be 'map' or 'walls'"),
    (Maze, MAZE | {"step_cost": float("inf")}, "step_cost is inf; it must be a finite number"),
    (Maze, MAZE | {"step_cost": [1]}, "step_cost is .1.; it must be a finite number"),
    (Maze, MAZE | {"step_cost": True}, "step_cost is True; it must be a finite number"),
    (Maze, MAZE | {"step_cost": "1"}, "step_cost is '1'; it must be a finite number"),
    (Sokoban, LEVEL | {"view": "walls"}, "view is 'walls'; it must be 'positions' or 'map'"),
    (Sokoban, {"level": None}, "level is None.*players: 0"),
    (Sokoban, {"level": "#@$.#x"}, "it has 'x'; allowed are"),
    (Sokoban, {"level": "#@$..#"}, "boxes: 1, goals: 2"),
    (Sokoban, {"level": "@@$."}, "players: 2"),
    (Sokoban, {"level": "@*"}, "every box stands on a goal already"),
    (Sokoban, {"level": "@$." + " " * 40}, "more than 36 rows or columns"),
    (Calculator, {"prompt": "1+1?"}, "result is None; it must be a whole number"),
    (Calculator, {"prompt": "1+1?", "result": float("nan")}, "result is nan"),
    (Calculator, {"prompt": "1+1?", "result": "9" * 5000}, "it must be a whole number"),
    (Calculator, {"prompt": [1], "result": 2}, "prompt is .1.; it must be text"),
    (TwentyQuestions, {}, "table is None"),
    (TwentyQuestions, {"table": "Ayn\nAny"}, "each another character"),
    (TwentyQuestions, {"table": "Ayn\nBn"}, "table is"),
    (TwentyQuestions, {"table": "Ayn\n1ny"}, "no digit"),
    (TwentyQuestions, {"table": "A\nB"}, "1 to 9 attributes"),
    (TwentyQuestions, {"table": "Ay\nBn", "item": "C"}, "item is 'C'; the table has A, B"),
])  # fmt: skip
def test_bad_rows_are_named(make, row, message):
    with pytest.raises(DataError, match=message) as caught:
        make().reset(row, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call, message", [
    (lambda: get_task("maze", view="top"), "option view is 'top'; it must be 'map' or 'walls'"),
    (lambda: get_task("maze", distance=9), "distance is 9; with side=5 it must be at most 8"),
    (lambda: get_task("maze", noise=1.5), "noise is 1.5; it must be a number from 0.0 to 1.0"),
    (lambda: get_task("calculator", tool=1), "tool is 1; it must be True or False"),
    (lambda: get_task("twenty_questions", items=5, attributes=2), "tell at most 4 apart"),
    (lambda: get_task("maze").reward(["@G"], ["E"]), "is played over several turns"),
    (lambda: get_task("maze").demonstration({"prompt": "@G"}, None), "played over several turns"),
    (lambda: get_task("calculator").mistake({"prompt": "1+1?"}, None), "no right and wrong"),
    (lambda: get_task("sorting").demonstration_actions({}, None, 0), "sorting has no environment"),
])  # fmt: skip
def test_bad_options_and_calls_are_named(call, message):
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_no_single_response_is_right():
    assert get_task("maze").correct(["@G"], ["E"]) is None
