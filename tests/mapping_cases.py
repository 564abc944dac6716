"""Random planning problems, and the answer by trying everything."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np

from hjax.models.cost_inputs import MASTERS, ModelCounts, Numerics, Workload
from hjax.planning.constants import Constants
from hjax.planning.hardware import legal_counts
from hjax.planning.plan_types import Cluster, Dataflow, Device, DevicePool, PlannedCall
from hjax.planning.role_options import role_options
from hjax.planning.search import PlanProblem
from hjax.planning.search_space import SearchSpace

ROLES = ("actor", "critic", "reference", "reward", "cost")


def model(rng: random.Random, name: str) -> ModelCounts:
    """Some decoder, of 10^7 to 10^9 parameters."""
    heads = rng.choice([2, 4, 8])
    hidden, mlp = heads * 128, rng.choice([2, 4]) * heads * 128
    kv_heads = rng.choice([k for k in (1, 2, heads) if heads % k == 0])
    layer = hidden * 128 * 2 * (heads + kv_heads) + 3 * hidden * mlp + 2 * hidden
    vocab = rng.choice([512, 32000])
    layers = rng.choice([2, 4, 12, 24])
    return ModelCounts(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        vocab=vocab,
        experts=0,
        experts_per_token=0,
        parameters=layers * layer + vocab * hidden + hidden,
        layer_parameters=layer,
        layer_active=layer,
        layer_expert=0,
        head_parameters=vocab * hidden,
        attention_width=heads * 128,
        cache_elements=2 * kv_heads * 128,
        layer_activations=4 * hidden + 2 * (heads + kv_heads) * 128 + 3 * mlp,
        layer_activations_whole=4 * hidden,
    )


def cluster(rng: random.Random, most: int) -> Cluster:
    """One or two pools of at most so many devices, hosts of 6 and torus slices among them."""
    pools, left = [], most
    for _ in range(rng.choice([1, 1, 1, 2])):
        shapes = [(h, p) for h in (1, 2, 3, 4) for p in (1, 2, 4, 6, 8) if h * p <= left]
        if not shapes:
            break
        hosts, per_host = rng.choice(shapes)
        torus = rng.random() < 0.2 and hosts * per_host in (1, 2, 4, 8, 16)
        size = hosts * per_host
        cores = rng.choice([1, 2, 3]) if rng.random() < 0.2 else 0  # shared by simulated devices
        device = Device(
            name=f"device{len(pools)}",
            memory=rng.choice([2, 4, 8, 16, 64]) * 2.0**30,
            flops={"bfloat16": rng.choice([1e13, 1e14])},
            bandwidth=rng.choice([2e11, 2e12]),
            link=rng.choice([2e10, 3e11]),
            network=rng.choice([1e9, 2.5e10]),
            per_host=per_host,
            torus=2 if torus else 0,
            source="",
            alone=tuple(
                (n, min(1, cores / n) / min(1, cores / size), min(1, n / cores))
                for n in range(1, size + 1)
            )
            if cores
            else (),
        )
        shape = (hosts, per_host) if torus else ()
        slices = rng.choice([1, 2, 3]) if torus and not cores else 1
        slices = slices if slices * size <= left else 1
        pools.append(DevicePool(device, slices * hosts, per_host, shape, slices=slices))
        left -= slices * size
    return Cluster(tuple(pools))


def dataflow(rng: random.Random, roles: tuple[str, ...]) -> Dataflow:
    """An actor that generates once or twice, and models that score or learn."""
    calls = [PlannedCall("actor", "generate_sequences", "generate", 1.0)] * rng.choice([1, 1, 2])
    calls += [PlannedCall(r, "score", "forward", 1.0) for r in roles if rng.random() < 0.8]
    updates = rng.choice([1, 2, 4])
    for role in roles:
        if role == "actor" or (role == "critic" and rng.random() < 0.8):
            calls += [PlannedCall(role, "update", "update", 1 / updates)] * updates
    return Dataflow("random", roles, tuple(calls))


def random_problem(seed: int, devices: int, models: int, wide: bool) -> PlanProblem:
    """A random problem; ``wide`` ones have more layouts per model."""
    rng = random.Random(seed)
    roles = ROLES[: rng.randint(1, models)]
    shapes = {role: model(rng, role) for role in roles}
    if rng.random() < 0.3:  # one shape for all, so that fronts are shared between roles
        shapes = dict.fromkeys(roles, shapes["actor"])
    space = SearchSpace(
        pipes=rng.choice([(1,), (1, 2)]),
        tensors=rng.choice([(1, 2), (1, 2, 4)]) if wide else rng.choice([(1,), (1, 2)]),
        shardings=tuple(rng.sample(["data", "fsdp", "hybrid"], 2 if wide else 1)),
        micro_rows=rng.choice([(1,), (1, 4)]) if wide else (rng.choice([1, 4]),),
        remat=rng.choice([("full",), ("none",), ("none", "attention")]),
        contexts=rng.choice([(1,), (1, 2)]) if wide else (1,),
        waves=rng.choice([(1,), (1, 4)]),
        even=rng.random() < 0.3,
    )
    work = Workload(
        rng.choice([16, 256, 1024]),
        rng.choice([16, 256, 1024]),
        rng.choice([8, 48, 256]),
        rng.choice([1, 4]),
    )
    constants = Constants(
        workspace=0.0, overlap=rng.random(), decode_row=rng.choice([0.0, 1e-4]), logits=2.0**24
    )
    numerics = rng.choice([Numerics(), Numerics(4, 8, shared_prompt=True, in_place=False), MASTERS])
    flow = dataflow(rng, roles)
    offload = {}
    if rng.random() < 0.2:
        offload = {role: rng.choice(["none", "optimizer", "all", "any", "any"]) for role in roles}
    pools = cluster(rng, devices)
    return PlanProblem(flow, shapes, work, pools, constants, numerics, space, offload)


def groupings(items: tuple[str, ...]) -> set[frozenset[frozenset[str]]]:
    """Set partitions, by trying every colouring."""
    found = set()
    for colours in itertools.product(range(len(items)), repeat=len(items)):
        sets = [frozenset(i for i, c in zip(items, colours) if c == n) for n in set(colours)]
        found.add(frozenset(sets))
    return found


def packs(parts: list[int], room: list[int]) -> bool:
    """Whether parts find room in hosts, by trying every host for each."""
    if not parts:
        return True
    for i, left in enumerate(room):
        if parts[0] <= left:
            if packs(parts[1:], room[:i] + [left - parts[0]] + room[i + 1 :]):
                return True
    return False


def room_for(cluster: Cluster, chosen: list[tuple[int, int]]) -> bool:
    """Whether sets on (pool, devices) fit: whole hosts or slices first, the rest inside them."""
    for number, pool in enumerate(cluster.pools):
        counts = [n for p, n in chosen if p == number]
        each = math.prod(pool.shape) if pool.shape else pool.per_host
        whole = pool.size // each - sum(n // each for n in counts if n >= each)
        parts = sorted((n for n in counts if n < each), reverse=True)
        if whole < 0 or not packs(parts, [each] * whole):
            return False
    return True


def brute_force(problem: PlanProblem) -> float:
    """The least seconds of a step over every placement, allocation and layout, jointly."""
    pools = problem.cluster.pools
    spots = [(i, n) for i, pool in enumerate(pools) for n in legal_counts(pool)]
    table = {}
    for role in problem.dataflow.roles:
        for number, devices in spots:
            place = problem.place(pools[number], devices)
            found = role_options(
                place,
                problem.models[role],
                problem.dataflow,
                role,
                problem.work,
                problem.space,
                problem.offload.get(role, "none"),
                every=True,
            )
            rows = [(*o.seconds, o.resident, *o.transients, o.learning) for o in found]
            table[role, number, devices] = _different(np.array(rows).reshape(-1, 8))
    best = np.inf
    for grouping in groupings(problem.dataflow.roles):
        sets = [tuple(sorted(s)) for s in grouping]
        for chosen in itertools.product(spots, repeat=len(sets)):
            if room_for(problem.cluster, list(chosen)):
                best = min(best, _fastest(problem, sets, chosen, table))
    return best


def _different(rows: np.ndarray) -> np.ndarray:
    """Those that no other is below in every column: trying all pairs of them takes too long
    otherwise. By comparing each with each."""
    below = (rows[:, None] <= rows[None]).all(-1) & (rows[:, None] < rows[None]).any(-1)
    return np.unique(rows[~below.any(axis=0)], axis=0).reshape(-1, 8)


def _fastest(problem, sets, chosen, table) -> float:
    """Over every combination of the roles' layouts, those that do not fit left out."""
    roles = problem.dataflow.roles
    stages = [0.0, 0.0, 0.0]
    cores = {}  # seconds of the cores that a pool's simulated devices share, by pool and stage
    fits = True
    for names, (number, devices) in zip(sets, chosen):
        limit = problem.place(problem.cluster.pools[number], devices).capacity
        columns = []
        for role in names:
            rows = table[role, number, devices]
            shape = [1] * len(roles)
            shape[roles.index(role)] = len(rows)
            columns.append([rows[:, i].reshape(shape) for i in range(8)])
        held = sum(column[3] for column in columns)
        # What an update brings back from the host stays until all updates are done.
        learning = held + sum(column[7] for column in columns)
        for column in columns:
            for transient in column[4:6]:
                fits = fits & (held + transient <= limit)
            fits = fits & (learning + column[6] <= limit)
        pool = problem.cluster.pools[number]
        for stage in range(3):
            taken = sum(column[stage] for column in columns)
            stages[stage] = np.maximum(stages[stage], taken)
            if pool.device.alone:
                share = {n: cores for n, _, cores in pool.device.alone}[devices]
                cores[number, stage] = cores.get((number, stage), 0.0) + taken * share
    for (_, stage), taken in cores.items():
        stages[stage] = np.maximum(stages[stage], taken)
    total = np.where(fits, stages[0] + stages[1] + stages[2], np.inf)
    return float(total.min()) if total.size else np.inf
