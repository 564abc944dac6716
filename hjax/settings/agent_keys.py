"""The config keys of agents."""

from hjax.rewards.reward_results import LARGEST_REWARD
from hjax.rules import Key, Rule, at_least, between, deadline, one_of

# Reward of a late session that has none.
NO_REWARD = "unscored"


def is_reward(text: str) -> bool:
    """Whether it is a reward's number as text, or NO_REWARD."""
    try:
        return text == NO_REWARD or abs(float(text)) <= LARGEST_REWARD
    except ValueError:
        return False


AGENT_KEYS = {
    "function": Key(
        "",
        "`path.py:name`, an `async def` that is given a task, a base URL of OpenAI's API and a "
        "key, and returns a reward; the policy answers its calls (docs/agents.md)",
    ),
    "command": Key(
        "",
        "instead of function: a program that is run for each session, with {session} for the path "
        "of a JSON file with url, key, task and seed, or {url}, {key} and {task}",
    ),
    "verifier": Key(
        "",
        "with command: `path.py:name`, a function of a task and of what the program has left that "
        "returns the reward (docs/agents.md)",
    ),
    "confined": Key(
        True,
        "with command: whether the program runs in the sandbox, where it has its folder, what it "
        "may read, and no network but the policy's address; else it has your rights "
        "(docs/security.md)",
    ),
    "readable": Key(
        "",
        "with command and confined: files and folders that the program can read, separated by "
        "commas, beside the system's, Python's, and those among its words",
    ),
    "hidden": Key(
        "answer,solution,ground_truth,reward_model,reward_spec,test,tests",
        "with command: columns of a row that the verifier is given, and the program is not",
    ),
    "max_calls": Key(64, "calls that a session is answered at most", at_least(1)),
    "call_tokens": Key(
        0,
        "tokens of an answer at most; 0: what rollout.max_response_length leaves",
        at_least(0),
    ),
    "seconds": Key(
        1800.0, "deadline of a session, in seconds, the policy's answers included", deadline()
    ),
    "timeout_reward": Key(
        NO_REWARD,
        f"of a session that is late: a number, or {NO_REWARD}: it is not learned from",
        Rule(f"a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}, or {NO_REWARD}", is_reward),
    ),
    "concurrent": Key(0, "sessions that are open at a time; 0: all of a step", at_least(0)),
    "wait_seconds": Key(
        10.0,
        "seconds without news after which calls no longer wait for those of the other sessions, "
        "with which they are drawn where generation does not run ahead",
        deadline(),
    ),
    "processes": Key(1, "processes of agents, over which sessions are shared out", at_least(1)),
    "memory_gib": Key(
        4.0,
        "memory of each of these processes, and of a confined program with all that it starts, in "
        "GiB; 0: no limit",
        between(0, 2**20),
    ),
    "history": Key(
        "sampled",
        "what a call that goes on from another sees: sampled: the tokens that were drawn; "
        "template: at a new question of the user's the chat template writes all of it anew, and a "
        "row begins",
        one_of("sampled", "template"),
    ),
    "echo": Key(
        "exact",
        "when a call goes on from another: exact: it gives back the answer that it got; trust: it "
        "has any answer in its place",
        one_of("exact", "trust"),
    ),
    "constrained": Key(
        False,
        "whether what a call asks of its answer's form holds in training too (a tool_choice other "
        "than auto, strict, response_format): tokens that it leaves no choice of are not learned "
        "from; else it is logged and has no effect",
    ),
    "train_call": Key(
        "agent",
        "which calls are learned from: agent: those that the agent went on from, and none without "
        "tools beside others with tools; all; or `path.py:name`, a function of a call's record "
        "that says whether",
    ),
}
