"""What goes wrong between controller and workers is told, and leaves nothing behind."""

import functools
import pathlib
import threading

import jax
import numpy as np
import pytest
from helpers import tiny_config, trainer_of
from pickling import ObjectStore, PicklingExecutor

import hjax
from hjax.controller import ResourcePool, WorkerGroup
from hjax.errors import ConfigError, DataError, RunError
from hjax.models.checkpoint import Checkpoints


class Base(hjax.workers.Worker):
    @hjax.protocol("ONE_TO_ALL", reads=("x",))
    def use(self, batch):
        return {"seen": sorted(batch)}

    @hjax.protocol("ONE_TO_ALL")
    def wait_for(self, gate):
        assert gate.wait(30)
        return {}

    @hjax.protocol("ONE_TO_ALL")
    def answer(self, value):
        return value


class Override(Base):
    def use(self, batch):  # not bound again
        return {"mine": sorted(batch)}

    def initialize(self):
        self.ready = True


@pytest.fixture(params=["threads", "pickled"])
def pool(request):
    options = {}
    if request.param == "pickled":
        options["executor"] = functools.partial(PicklingExecutor, ObjectStore())
    pool = ResourcePool("desk", (), **options)
    yield pool
    pool.close()


def group(pool, worker=Override):
    return WorkerGroup(pool, worker, hjax.workers.WorkerContext("clerk"), role="clerk")


def test_an_override_answers_the_call_it_overrides(pool):
    clerk = group(pool)
    assert clerk.use({"x": 1, "y": 2}).result(30) == {"mine": ["x"]}
    assert clerk.has("initialize")
    clerk.initialize().result(30)


def test_a_result_that_cannot_be_written_down_is_an_error_of_its_call():
    pool = ResourcePool("desk", (), executor=functools.partial(PicklingExecutor, ObjectStore()))
    clerk = group(pool)
    with pytest.raises(Exception, match="pickle"):
        clerk.use({"x": 1}).result(30) and clerk.answer(5).result(30)
        WorkerGroup(pool, Locked, hjax.workers.WorkerContext("safe"), role="safe").lock().result(30)
    assert clerk.answer(5).result(30) == 5  # and the pool goes on
    pool.close()


class Locked(hjax.workers.Worker):
    @hjax.protocol("ONE_TO_ALL")
    def lock(self):
        return {"lock": threading.Lock()}


def test_calls_that_wait_when_a_pool_is_closed_say_so():
    pool, gate = ResourcePool("desk"), threading.Event()
    clerk = group(pool)
    running, waiting = clerk.wait_for(gate), clerk.use({})
    closing = threading.Thread(target=pool.close)
    while not clerk.built.done():
        pass
    closing.start()
    with pytest.raises(RunError, match=r"clerk\.use was not run: its pool was closed"):
        waiting.result(30)
    gate.set()
    assert running.result(30) == {}
    closing.join(30)
    with pytest.raises(RunError, match=r"clerk\.use was called after its pool was closed"):
        clerk.use({})


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """A trainer after its first step, of GRPO with a metric of its own, and that step's row."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "told.py").write_text(
        "import hjax\n"
        "class Told(hjax.algorithms.GRPO):\n"
        "    def step(self, prompts):\n"
        "        self.log({'mine': 1.5}, 'actor')\n"
        "        return super().step(prompts)\n"
    )
    with trainer_of(f"{folder}/told.py:Told", {"rollout.samples": 2}) as trainer:
        yield trainer, trainer.step()


@pytest.mark.extended
def test_prompts_of_two_calls_are_never_taken_for_one_another(stepped):
    trainer, _ = stepped
    actor = trainer.roles.groups["actor"]
    width = trainer.inputs.prompt_length
    ask = {"prompts": np.ones((8, width), np.int32), "prompt_mask": np.ones((8, width), bool)}
    first, second = (actor.generate_sequences(ask | {"step": 3}).result() for _ in range(2))
    ids = [np.asarray(batch["prompt_id"]) for batch in (first, second)]
    assert all((x.reshape(8, 2)[:, 0] == x.reshape(8, 2)[:, 1]).all() for x in ids)
    assert not set(ids[0]) & set(ids[1])
    mixed = {"prompt_id": np.stack(ids, axis=1).ravel()}
    assert not actor.worker.grouped(mixed)


def test_a_save_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)

    class Failed:
        def result(self):
            raise OSError("no space left")

    def full(folder: pathlib.Path):
        raise RunError("a worker is gone")

    checkpoints.save(1, lambda folder: [Failed()], {"step": 1})
    with pytest.raises(RunError, match="could not be written: no space left"):
        checkpoints.wait()
    with pytest.raises(RunError, match="a worker is gone"):
        checkpoints.save(1, full, {"step": 1})
    assert list(tmp_path.iterdir()) == [] and checkpoints.latest() is None
    checkpoints.save(1, lambda folder: [], {"step": 1})
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoints.controller(1) == {"step": 1}


def roles_file(folder, entry):
    (folder / "own.py").write_text(
        "import hjax\n"
        "class Own(hjax.algorithms.GRPO):\n"
        f"    workers = {{{entry}}}\n"
        "    @classmethod\n"
        "    def losses(cls, config, length):\n"
        "        found = super().losses(config, length)\n"
        "        return found | {'mentor': found['actor']}\n"
    )
    return f"{folder}/own.py:Own"


@pytest.mark.parametrize(
    "entry, said",
    [
        (
            "'mentor': hjax.Role(hjax.workers.Actor, trained=True, model=True)",
            "'mentor' is trained, but the config has no section 'mentor'",
        ),
        (
            "'mentor': hjax.Role(hjax.workers.Reference, model=True, starts_from='critic')",
            "'mentor' starts from 'critic', which this config has no use for",
        ),
        (
            "'one': hjax.Role(hjax.workers.Reference, model=True, starts_from='two'),"
            "'two': hjax.Role(hjax.workers.Reference, model=True, starts_from='one')",
            "start from each other in a circle: one, two",
        ),
    ],
)
def test_a_role_that_cannot_start_is_refused_in_one_line(entry, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        hjax.Trainer(tiny_config(roles_file(tmp_path, entry)))


def test_a_role_may_start_from_one_that_is_listed_later(tmp_path):
    entry = (
        "'copy': hjax.Role(hjax.workers.Reference, model=True, starts_from='mentor'),"
        "'mentor': hjax.Role(hjax.workers.Reference, model=True, starts_from='actor')"
    )
    with trainer_of(roles_file(tmp_path, entry)) as trainer:
        trainer.prepare()
        groups = trainer.roles.groups
        for name in ("copy", "mentor"):
            jax.tree.map(
                np.testing.assert_array_equal,
                groups[name].worker.params,
                groups["actor"].worker.params,
            )


@pytest.mark.extended
def test_state_that_nobody_shows_at_the_start_is_not_lost_in_silence(tmp_path):
    (tmp_path / "lazy.py").write_text(
        "import hjax, numpy as np\n"
        "class Lazy(hjax.workers.Worker):\n"
        "    calls = 0\n"
        "    @hjax.protocol('ALL_TO_ALL')\n"
        "    def compute_reward(self, batch):\n"
        "        self.calls += 1\n"
        "        return {'rewards': np.float32([0.0] * len(batch['response_text']))}\n"
        "    def state(self):\n"
        "        return {'calls': {'n': np.int32([self.calls])}} if self.calls else {}\n"
        "class Mild(hjax.algorithms.GRPO):\n"
        "    workers = {'reward': Lazy}\n"
    )
    name = f"{tmp_path}/lazy.py:Mild"
    with trainer_of(name, {"steps": 1}, workdir=tmp_path / "run") as trainer:
        trainer.run()
    with trainer_of(name, {"steps": 2}, workdir=tmp_path / "run") as trainer:
        with pytest.raises(DataError, match="reward.calls was saved, but the new worker of reward"):
            trainer.run()


def test_metrics_of_ones_own_stand_beside_an_updates(stepped):
    _, row = stepped
    assert row["actor/mine"] == 1.5 and np.isfinite(row["actor/loss"])


def test_a_role_on_the_host_has_no_model():
    with pytest.raises(ConfigError, match="host=True, trained=True.*no devices and so no model"):
        hjax.Role(hjax.workers.Reference, trained=True, host=True)
