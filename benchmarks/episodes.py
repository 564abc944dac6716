"""Episodes of many turns: what the prefix cache, batched admission and waiting environments cost.

64 episodes of the built-in maze (5 by 5, 20 turns of at most 2 tokens) are played at a time by a
model with weights from a seed, in environments' processes of their own. Contestants, in turns whose
order rotates, in one process:

- `episodes`: as training plays them: rows stay in their slots, and a turn appends what is new.
- `full_prefill`: rows leave, and without a prefix cache each turn prefills its whole row.
- `single_turn`: no environments; from the same first observations the same engine draws as many
  tokens as the episodes drew, in one turn each, all 64 at a time.
- `single_turn_rows`: the same, but as many tokens as the episodes' rows have after their prompts,
  observations included: as many pass through the model.
- `slow_environment`: `episodes` whose environment takes `--step_ms` a step.

Weights from a seed hardly ever find the goal, so all episodes have all turns. Prints one JSON line:
medians over the rounds of wall and CPU seconds of this process (its children's not counted), tokens
drawn per second, and of the environments: `seconds`, from when a part of the episodes has acted to
its environments' last answer, `waited`, how long generation stood still for them, and `hidden`, the
share of the first that is not the second. `ratios`: `full_prefill`'s seconds over those of
`episodes` (aim 1.5), tokens drawn per second of `episodes` over `single_turn`'s (aim .6), and
tokens of rows per second over `single_turn_rows`', by wall and by CPU time. `programs`: compiled
after the warm-up, a round of each (aim 0).

    python benchmarks/episodes.py [--rounds=5] [--turn_tokens=2] [--hidden=256] [--step_ms=5]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import machine

from hjax.environments.environment import Step
from hjax.environments.maze import Maze

EPISODES = 64


class SlowMaze(Maze):
    """A maze that takes a while to step."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def step(self, action: str) -> Step:
        time.sleep(self._seconds)
        return super().step(action)


@dataclasses.dataclass
class Figures:
    """What a round of a contestant took.

    Attributes:
      seconds, cpu_seconds: of this process, in all.
      drawing: seconds of generation.
      tokens: drawn.
      row_tokens: after the prompts, drawn and observed.
      environment, waited: as the module says.
      counts: tokens that were prefilled or found in the prefix cache.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    drawing: float = 0.0
    tokens: int = 0
    row_tokens: int = 0
    environment: float = 0.0
    waited: float = 0.0
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Timed:
    """Context manager that adds wall and CPU seconds to figures."""

    def __init__(self, figures: Figures):
        self._figures = figures

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self._figures.seconds += time.perf_counter() - self._start[0]
        self._figures.cpu_seconds += time.process_time() - self._start[1]


class Bench:
    """A model, and mazes to play.

    Args:
      options: of the command.

    Attributes:
      limits: of the episodes.
    """

    def __init__(self, options: argparse.Namespace):
        import jax

        from hjax.data.tasks import get_task
        from hjax.data.tasks.environment_task import EnvironmentTask
        from hjax.environments.episode import EpisodeLimits
        from hjax.environments.episode_text import ObservationEncoder
        from hjax.models.compute import Compute
        from hjax.models.model_config import ModelConfig
        from hjax.models.parameters import decoder_network
        from hjax.rollout.generator import Generator
        from hjax.sharding.layout import make_layouts

        self.task = get_task("maze")
        assert isinstance(self.task, EnvironmentTask)
        self.tokenizer = self.task.tokenizer()
        self.encoder = ObservationEncoder(self.tokenizer)
        turn = options.turn_tokens or self.task.turn_length
        response = self.task.max_turns * (turn + 1 + self.task.observation_length)
        self.limits = EpisodeLimits(
            turns=self.task.max_turns,
            turn_tokens=turn,
            prompt_tokens=64,
            response_tokens=response,
        )
        self.rows = self.task.examples("train", 0, EPISODES)
        hidden = options.hidden
        config = ModelConfig(
            self.tokenizer.vocab_size, hidden, 3 * hidden, options.layers, 4, 4, hidden // 4, 4096
        )
        layout = make_layouts(jax.devices()).generate
        network = decoder_network(config)
        self.params = network.create(0, layout)
        generator = Generator(network, layout, Compute(unroll_layers=True))
        self.params = generator.decoding_params(self.params)
        self.engine = generator.engine

    def generator(self, slots: int, cached: bool = True) -> Any:
        """Of so many turns at a time, with or without a prefix cache."""
        from hjax.rollout.turn_generator import TurnGenerator

        return TurnGenerator(
            self.engine,
            self.params,
            self.tokenizer,
            slots=slots,
            row_tokens=self.limits.prompt_tokens + self.limits.response_tokens,
            rows=EPISODES if cached else 0,
        )

    def sampling(self, ends: bool = True) -> Any:
        """Of all turns; ``ends``: whether a turn may end before its limit."""
        from hjax.rollout.sampling_params import SamplingParams

        return SamplingParams(stop=tuple(self.tokenizer.eos_ids) if ends else ())


def play(bench: Bench, turns: Any, pool: Any, seed: int) -> Figures:
    """Play the episodes once.

    Args:
      bench: what is played.
      turns: the generator.
      pool: of environments.
      seed: of what is drawn.
    """
    from hjax.environments.episode import Episode, EpisodePlayer

    figures = Figures()
    turns.replace_params(bench.params)  # as training has new weights each step
    before = dict(turns.totals)

    def draw(requests: Sequence[Any]) -> Sequence[Any]:
        start = time.perf_counter()
        drawn = turns.draw(requests, seed=seed, sampling=bench.sampling())
        figures.drawing += time.perf_counter() - start
        return drawn

    class Player(EpisodePlayer):
        """Which measures how long it waits, and for how long environments are at work."""

        def _ready(self, cohort: list[Episode]) -> list[Episode]:
            start = time.perf_counter()
            concurrent.futures.wait([self._answers[each.number] for each in cohort])
            figures.waited += time.perf_counter() - start
            return super()._ready(cohort)

        def _play_turn(self, episodes: list[Episode], cohort: int) -> None:
            super()._play_turn(episodes, cohort)
            acted, last = time.perf_counter(), [0.0]
            for each in episodes:
                self._answers[each.number].add_done_callback(
                    lambda _: last.__setitem__(0, time.perf_counter())
                )
            spans.append((acted, last))

    spans: list[tuple[float, list[float]]] = []
    episodes = [Episode(i, i, row, seed) for i, row in enumerate(bench.rows)]
    with Timed(figures):
        Player(pool, bench.encoder, bench.limits, draw).play(episodes)
    figures.tokens = sum(len(turn.tokens) for each in episodes for turn in each.turns)
    figures.row_tokens = sum(row.response_length for each in episodes for row in each.rows)
    figures.environment = sum(max(last - acted, 0.0) for acted, [last] in spans)
    figures.counts = {name: turns.totals[name] - count for name, count in before.items()}
    return figures


def single_turn(bench: Bench, turns: Any, tokens: int, seed: int) -> Figures:
    """Draw ``tokens`` in a turn of each of the first observations."""
    from hjax.environments.episode import TurnRequest

    figures = Figures()
    turns.replace_params(bench.params)
    requests = [
        TurnRequest(i, 0, bench.encoder.begin(row["prompt"]), [], 0, tokens // EPISODES)
        for i, row in enumerate(bench.rows)
    ]
    with Timed(figures):
        drawn = turns.draw(requests, seed=seed, sampling=bench.sampling(ends=False))
    figures.drawing = figures.seconds
    figures.tokens = figures.row_tokens = sum(len(each.tokens) for each in drawn)
    return figures


def medians(rounds: Sequence[Figures]) -> dict[str, Any]:
    """Of the rounds of a contestant."""
    table = {
        name: statistics.median(getattr(one, name) for one in rounds)
        for name in (
            "seconds",
            "cpu_seconds",
            "drawing",
            "tokens",
            "row_tokens",
            "environment",
            "waited",
        )
    }
    found = {name: round(value, 4) for name, value in table.items()}
    found["tokens_per_second"] = round(table["tokens"] / table["seconds"], 1)
    if table["environment"]:
        found["hidden"] = round(
            statistics.median(1 - min(one.waited / one.environment, 1.0) for one in rounds), 3
        )
    return found | {"counts": dict(rounds[-1].counts)}


def ratios(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, float]:
    """Medians of the rounds' ratios."""

    found: dict[str, float] = {}
    for kind, name in (("wall", "seconds"), ("cpu", "cpu_seconds")):
        each: dict[str, list[float]] = {
            "full_prefill": [], "single_turn": [], "single_turn_rows": [],
        }  # fmt: skip
        for episodes, *others in zip(
            *(rounds[which] for which in ("episodes", *each)), strict=True
        ):
            full, single, rows = (getattr(one, name) / getattr(episodes, name) for one in others)
            each["full_prefill"].append(full)
            each["single_turn"].append(single * episodes.tokens / others[1].tokens)
            each["single_turn_rows"].append(rows * episodes.row_tokens / others[2].tokens)
        found |= {f"{of}_{kind}": round(statistics.median(some), 3) for of, some in each.items()}
    return found


def measure(bench: Bench, options: argparse.Namespace) -> tuple[dict[str, list[Figures]], int]:
    """The contestants' rounds, and how many programs were compiled in them."""
    from hjax.environments.episode import COHORTS
    from hjax.environments.episode_pool import EpisodePool
    from hjax.run.backends import ProcessProbe

    together = EPISODES // COHORTS
    cached, full = bench.generator(together), bench.generator(together, cached=False)
    whole = bench.generator(EPISODES)
    slow = {"seconds": options.step_ms / 1000}
    with (
        EpisodePool(Maze, processes=options.processes) as pool,
        EpisodePool(f"{__file__}:SlowMaze", slow, processes=options.processes) as slow_pool,
    ):
        played = Figures()

        def episodes(seed: int) -> Figures:
            nonlocal played
            played = play(bench, cached, pool, seed)
            return played

        contestants: dict[str, Callable[[int], Figures]] = {
            "episodes": episodes,
            "full_prefill": lambda seed: play(bench, full, pool, seed),
            "single_turn": lambda seed: single_turn(bench, whole, played.tokens, seed),
            "single_turn_rows": lambda seed: single_turn(bench, whole, played.row_tokens, seed),
            "slow_environment": lambda seed: play(bench, cached, slow_pool, seed),
        }
        for contestant in contestants.values():
            contestant(0)
        probe = ProcessProbe()
        rounds: dict[str, list[Figures]] = {name: [] for name in contestants}
        names = list(contestants)
        for number in range(options.rounds):
            for name in names:
                rounds[name].append(contestants[name](1 + number))
            names = names[1:] + names[:1]
    return rounds, probe.count


def main() -> None:
    """Measure, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn_tokens", type=int, default=0, help="0: the task's, 2")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--step_ms", type=float, default=5.0, help="of the slow environment")
    parser.add_argument("--processes", type=int, default=8, help="of environments")
    parser.add_argument("--devices", type=int, default=1, help="simulated")
    options = parser.parse_args()
    from hjax.launch.jax_setup import prepare_devices

    prepare_devices(options.devices)
    use = machine.CoreUse()
    bench = Bench(options)
    rounds, programs = measure(bench, options)
    line = {
        "benchmark": "episodes",
        "options": vars(options),
        "contestants": {name: medians(some) for name, some in rounds.items()},
        "ratios": ratios(rounds),
        "hidden": medians(rounds["slow_environment"])["hidden"],
        "programs": programs,
        **use.read(),
        **machine.describe(),
        **machine.versions("jax", "jaxlib"),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
