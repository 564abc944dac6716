"""Shipped configs on workers that share nothing with the controller: all goes through pickle."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from helpers import computed, tiny_config
from pickling import ObjectStore, PicklingExecutor

import hjax
from hjax.controller import ResourcePool, WorkerGroup, join
from hjax.controller.messages import BuildWorker, Call, deserialize, serialize
from hjax.errors import ConfigError, RunError
from hjax.settings.config_loading import config_names

# Two steps of each shipped config, cut to what a test has time for.
SHORT = {
    "steps": 2,
    "eval.every": 2,
    "rollout.prompts": 8,
    "rollout.samples": 2,
    "algorithm.minibatch": 8,
    "warm_start.steps": 2,
    "warm_start.batch": 8,
    "model.hidden_size": 32,
    "model.layers": 1,
    "model.mlp_size": 64,
    "eval.prompts": 8,
    "display.enabled": False,
}
# Of them those that the config has no use for.
UNUSED = {
    "sft": ("algorithm.minibatch", "warm_start.steps"),
    "remax": ("algorithm.minibatch",),
    "stories": ("warm_start.steps",),
    **dict.fromkeys(
        ("reward_model", "cost_model", "process_reward_model"),
        ("algorithm.minibatch", "warm_start.steps"),
    ),
}
RUNNABLE = sorted(
    pathlib.Path(name).stem
    for name in config_names()
    if "7b" not in name and not name.endswith("_cartpole.py")  # those in tests/test_playing.py
)


def run(config, workdir=None, executor=None, steps=None):
    options = {} if executor is None else {"executor": executor}
    trainer = hjax.Trainer(config, workdir, **options)
    try:
        return [computed(row) for row in trainer.run(steps)]
    finally:
        trainer.close()


def pickling():
    return functools.partial(PicklingExecutor, ObjectStore())


@pytest.mark.parametrize(
    # Everyday the fastest.
    "name",
    [
        pytest.param(n, marks=[] if n == "sft" else [pytest.mark.slow])
        for n in RUNNABLE
    ],
)
def test_a_shipped_config_has_the_same_metrics(name, request):
    if name == "stories":
        request.getfixturevalue("test_data")
    changes = {k: v for k, v in SHORT.items() if k not in UNUSED.get(name, ())}
    config = hjax.get_config(name, [f"--config.{key}={value}" for key, value in changes.items()])
    expected = run(config)
    assert len(expected) == 2 and expected[0]["actor/loss"] is not None
    assert run(config, executor=pickling()) == expected


def test_it_resumes_across_pools_and_layouts(tmp_path):
    changes = {
        "placement": "split",
        "layout.actor.train.tensor": 2,
        "actor.offload": "optimizer",
        "checkpoint.every": 1,
        "warm_start.steps": 1,
    }
    config = tiny_config("GRPO", changes)
    expected = run(config)
    first = run(config, tmp_path, pickling(), steps=2)
    assert first + run(config, tmp_path, pickling()) == expected


def test_what_a_users_file_defines_travels_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import hjax, dataclasses\n"
        "from hjax.algorithms.losses import PolicyLoss\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class Halved(PolicyLoss):\n"
        "    def __call__(self, *arguments):\n"
        "        loss, stats = super().__call__(*arguments)\n"
        "        return loss / 2, stats\n"
        "class Judge(hjax.workers.Worker):\n"
        "    @hjax.protocol('ALL_TO_ALL', reads=('response_text',))\n"
        "    def compute_reward(self, batch):\n"
        "        assert set(batch) == {'response_text'}\n"
        "        import numpy as np\n"
        "        return {'rewards': np.float32([len(t) for t in batch['response_text']])}\n"
        "class Mine(hjax.algorithms.GRPO):\n"
        "    workers = {'reward': Judge}\n"
        "    @classmethod\n"
        "    def losses(cls, config, length):\n"
        "        return {'actor': Halved(aggregation='sequence', kl_coef=config.kl_coef)}\n"
    )
    config = tiny_config(f"{tmp_path}/mine.py:Mine", {"steps": 2})
    assert run(config, executor=pickling()) == run(config)


class Desk(hjax.workers.Worker):
    """Says what reached it."""

    @hjax.protocol("3D_PROTO", reads=("x",))
    def use(self, batch):
        return {"seen": sorted(batch), "x": batch["x"], "large": np.zeros(10**6)}

    @hjax.protocol("3D_PROTO")
    def fail(self, batch):
        raise ConfigError("no such thing")


@pytest.fixture
def desks():
    store = ObjectStore()
    pools = [
        ResourcePool(name, devices, executor=functools.partial(PicklingExecutor, store))
        for name, devices in (("left", jax.devices()[:4]), ("right", jax.devices()[4:]))
    ]
    context = {"sizes": {"train": {"data": -1}}}
    groups = [
        WorkerGroup(pool, Desk, hjax.workers.WorkerContext(pool.name, **context), role=pool.name)
        for pool in pools
    ]
    yield store, groups
    for pool in pools:
        pool.close()


def test_only_what_is_read_travels_between_workers(desks):
    store, (left, right) = desks
    x = np.arange(8, dtype=np.float32)
    result = right.use(left.use({"x": x, "unread": np.zeros(10**6)}))
    assert join(result)["seen"] == ["x"]
    # The second call took 32 bytes of numbers from the first's result; the controller took all of
    # the second's, eight million bytes of zeros among them, in float32.
    assert store.sent_bytes < 2 * 10**3 + 8 * 10**6
    result.result()
    np.testing.assert_array_equal(join(result)["x"], x)


def test_an_error_arises_where_its_result_is_asked_for(desks):
    _, (left, right) = desks
    with pytest.raises(ConfigError, match="no such thing") as caught:
        right.use(left.fail({})).result()
    assert caught.value.__notes__ == ["in the call left.fail"]


def test_a_worker_is_out_of_reach(desks):
    _, (left, _) = desks
    with pytest.raises(RunError, match="left: its worker is in another process"):
        _ = left.worker


def test_messages_are_plain(desks):
    trainer = hjax.Trainer(tiny_config("PPO"))
    try:
        for build in trainer.roles.builds.values():
            assert isinstance(build, BuildWorker)
            data = serialize(build)
            # No device is in it, and reading it again gives the same description.
            assert b"Device" not in data
            context = deserialize(data).arguments[0]
            assert context.sizes == build.arguments[0].sizes and context.layouts is None
    finally:
        trainer.close()
    call = Call("actor", "update_actor", ({"x": jax.numpy.arange(3)},))
    np.testing.assert_array_equal(deserialize(serialize(call)).arguments[0]["x"], [0, 1, 2])
