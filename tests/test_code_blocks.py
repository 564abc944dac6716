"""Code blocks in responses (ThinC): turns worked by hand, what is not valid, sums by code."""

import numpy as np
import pytest

from hjax.data.tasks import get_task
from hjax.data.tasks.code_sums_task import code_steps
from hjax.environments.code_blocks import INJECTED, CodeBlocks
from hjax.environments.episode_pool import EpisodePool
from hjax.errors import DataError
from hjax.sandbox.local_sandbox import sandbox_layers

needs_sandbox = pytest.mark.skipif("too little" in sandbox_layers(), reason=sandbox_layers())


class Says:
    """An interpreter that says what a test has it say."""

    def __init__(self, *outputs):
        self.outputs, self.ran, self.closed = list(outputs), [], False

    def run(self, code):
        self.ran.append(code)
        return self.outputs.pop(0)

    def close(self):
        self.closed = True


def started(*outputs, **row):
    environment, session = CodeBlocks(), Says(*outputs)
    environment.open_session = lambda seed: session
    environment.reset({"prompt": "47*38-129?", "answer": "1657"} | row, seed=3)
    return environment, session


def test_plan_code_and_answer_by_hand():
    environment, session = started("1786", "1657\n")
    step = environment.step("product first<code>a=47*38\na</code>")
    assert step.observation.stop == ("</code>",)
    assert (step.observation.text, step.reward, step.done, step.valid) == (
        "<out>1786</out>", 0.0, False, True,
    )  # fmt: skip
    assert step.metrics == {"code_blocks": 1.0, "code_errors": 0.0}
    assert environment.step("<code>a-129</code>\n").observation.text == "<out>1657</out>"
    step = environment.step("so #### 1,657")
    assert (step.observation.text, step.reward, step.done, step.valid) == ("", 1.0, True, True)
    assert step.metrics == {"grounded": 1.0, "after_error": 0.0, "recovered": 0.0}
    assert session.ran == ["a=47*38\na", "a-129"]
    environment.close()
    assert session.closed


@pytest.mark.parametrize(
    ("outputs", "answer", "reward", "grounded"),
    [
        (["1657"], "\\boxed{1657}", 1.0, 1.0),
        (["x = 1657.0!"], "#### 1657", 1.0, 0.0),  # another number than is said
        (["21657"], "#### 1657", 1.0, 0.0),
        (["-1657"], "#### 1657", 1.0, 1.0),
        (["12"], "#### 12", 0.0, 1.0),
        ([], "#### 1657", 1.0, 0.0),  # by heart
        (["7", "1657", "8"], "#### 1657 apples", 1.0, 1.0),
    ],
)
def test_an_answer_is_grounded_if_an_output_has_it(outputs, answer, reward, grounded):
    environment, session = started(*outputs)
    for _ in outputs[:]:
        environment.step("<code>x</code>")
    step = environment.step(answer)
    assert (step.reward, step.metrics["grounded"], step.done) == (reward, grounded, True)


@pytest.mark.parametrize(
    "turn",
    [
        "<code>1/0",
        "1</code>",
        "<code>1</code><code>2</code>",
        "<code>a<code>1</code>",
        "<code>1</code> ####1657",
        "####1657 <code>1</code>",
        "",
        "I do not know",
        "#### ",
    ],
)
def test_what_is_neither_a_block_nor_an_answer_runs_nothing(turn):
    environment, session = started()
    step = environment.step(turn)
    assert not step.valid and not step.done and step.reward == 0 and not session.ran
    assert step.observation.text.startswith("<out>") and "<code>" not in step.observation.text
    assert environment.step("####1657").reward == 1.0


def test_tags_in_outputs_are_escaped_and_long_ones_lose_their_middle():
    environment, session = started(
        "</out><code>x</code>", "a" * 30 + "b" * 30, output_characters=25
    )
    text = environment.step("<code>x</code>").observation.text
    assert text == "<out>&lt;/out>&lt;code>x&lt;/code></out>"
    text = environment.step("<code>x</code>").observation.text
    assert text == f"<out>{'a' * 10} ... {'b' * 10}</out>"


@pytest.mark.parametrize(
    ("output", "failed"),
    [
        ("Traceback (most recent call last):\nNameError: name 'b' is not defined", 1.0),
        ("KeyboardInterrupt", 1.0),
        ("[the interpreter was ended (its limit: memory); its variables are lost]", 1.0),
        ("a ValueError: no", 0.0),
        ("Error: 3\n5", 0.0),
    ],
)
def test_errors_are_counted_and_what_comes_after_them(output, failed):
    environment, session = started(output, "1657")
    assert environment.step("<code>b</code>").metrics["code_errors"] == failed
    environment.step("<code>c</code>")
    told = environment.step("####1657").metrics
    assert (told["after_error"], told["recovered"]) == (failed, failed)


def test_injected_errors_follow_from_the_seed_and_run_nothing():
    said = []
    for _ in range(2):
        environment, session = started(*["1"] * 40, failures=0.25)
        said.append([environment.step("<code>1</code>").observation.text for _ in range(40)])
    assert said[0] == said[1] and set(said[0]) == {"<out>1</out>", f"<out>{INJECTED}</out>"}
    failed = said[0].count(f"<out>{INJECTED}</out>")
    assert 3 <= failed <= 18 and len(session.ran) == 40 - failed


def test_without_an_interpreter_and_bad_rows():
    environment, session = started(interpreter=False)
    assert "no interpreter" in environment.step("<code>1</code>").observation.text
    rows = (
        {"answer": 3},
        {"answer": 3, "prompt": 4},
        {"prompt": "a"},
        {"prompt": "a", "answer": ""},
    )
    for row in rows:
        with pytest.raises(DataError):
            CodeBlocks().reset(row, 0)


@needs_sandbox
@pytest.mark.extended
def test_a_process_of_environments_runs_code_in_the_sandbox():
    pool = EpisodePool("hjax.environments.code_blocks:CodeBlocks", processes=1)
    pool.reset(0, {"prompt": "a", "answer": "24"}, seed=1).result()
    texts = [
        pool.step(0, f"<code>{code}</code>").result().observation
        for code in ("x = 3\nprint(x)", "x * 8", "1 / 0", "open('/etc/hostname').read()")
    ]
    assert texts[:2] == ["<out>3</out>", "<out>24</out>"]
    assert "ZeroDivisionError" in texts[2] and "Error" in texts[3]
    answer = pool.step(0, "####24").result()
    assert answer.reward == 1.0 and answer.metrics["recovered"] == 1.0
    pool.close()


def test_steps_of_sums_by_hand():
    assert code_steps("47*38-129") == [
        "times, minus<code>a=47*38\na</code>", "<code>a-129</code>", "####1657",
    ]  # fmt: skip
    assert code_steps("5-9-3*2") == [
        "times, minus, minus<code>a=3*2\na</code>", "<code>b=5-9\nb</code>", "<code>b-a</code>",
        "####-10",
    ]  # fmt: skip


def test_demonstrations_with_noise_answer_what_the_code_said():
    task = get_task("code_sums", terms=3, digits=2, noise=0.3, failures=0.3)
    rows = task.examples("train", 0, 300)
    right = repeated = 0
    for number, row in enumerate(rows):
        actions = task.demonstration_actions(row, np.random.default_rng(number), number)
        environment = task.make_environment()
        environment.reset(row, number)
        steps = [environment.step(action) for action in actions]
        assert all(step.valid for step in steps)
        assert max(map(len, actions)) <= task.turn_length
        shown = [action + step.observation.text for action, step in zip(actions, steps)]
        assert len("".join(shown)) + len(actions) <= task.response_length
        if steps[-1].done:
            assert actions[-1] == f"####{environment.outputs[-1]}"
            assert steps[-1].metrics["grounded"] == 1.0
            right += steps[-1].reward
        repeated += any(INJECTED in step.observation.text for step in steps)
    # Two blocks that run, neither with a wrong digit, before two that fail: .384.
    assert 0.31 < right / len(rows) < 0.46 and 0.42 < repeated / len(rows) < 0.6
