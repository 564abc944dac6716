"""Writes tests/peer_values.json: what the functions of TRL and verl give, and their gradients.

    python tests/make_peer_values.py --trl=CHECKOUT --verl=CHECKOUT --prime=FILE

Neither needs to be installed: their functions are read out of checkouts and run with torch.
`--prime` is `recipe/prime/prime_core_algos.py` of a verl that still has it. Values in the file are
of the commits that it names.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import pathlib
import subprocess
import types
import typing

import numpy as np
import torch
import torch.nn.functional as F

GROUPS, SAMPLES, LENGTH, WORDS = 2, 3, 5, 4
ROWS = GROUPS * SAMPLES
HERE = pathlib.Path(__file__).parent


def inputs() -> dict[str, np.ndarray]:
    """Ragged responses of two groups; what a step has."""
    rng = np.random.default_rng(20)
    mask = np.arange(LENGTH) < np.array([5, 2, 4, 1, 3, 5])[:, None]
    old = -rng.uniform(0.2, 2.0, mask.shape)
    made = {
        "mask": mask.astype(float),
        "old": old,
        "new": np.minimum(old + rng.normal(0, 0.35, mask.shape), -0.05),
        "reference": old + rng.normal(0, 0.3, mask.shape),
        "advantages": rng.normal(size=mask.shape),
        "row_advantages": rng.normal(size=ROWS),
        "rewards": rng.normal(size=ROWS),
        "baselines": rng.normal(size=ROWS),
        "dense": rng.normal(size=mask.shape),
        "values": rng.normal(size=mask.shape),
        "old_values": rng.normal(size=mask.shape),
        "returns": rng.normal(size=mask.shape),
        "right": np.array([1, 0, 0, 1, 1, 0], float),
        "student": rng.normal(size=(ROWS, LENGTH, WORDS)),
        "teacher": rng.normal(size=(ROWS, LENGTH, WORDS)),
    }
    made["near"] = old + 0.1 * (made["new"] - old)
    return {name: np.round(x, 4) for name, x in made.items()}


def source(checkout: pathlib.Path, path: str) -> str:
    show = ["git", "-C", str(checkout), "show", f"HEAD:{path}"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def named(text: str, names: tuple[str, ...], space: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Functions of a file, wherever in it they stand, without its decorators and imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            exec(compile(ast.Module([node], []), node.name, "exec"), space)
    return space


def statement(text: str, holds: str, kind: type) -> typing.Any:
    """The last statement of a kind whose head holds some text, compiled."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kind)]
    held = [x for x in found if holds in ast.unparse(x.iter if kind is ast.For else x.test)]
    return compile(ast.Module(held[-1:], []), holds, "exec")


def tensors(given: dict[str, np.ndarray]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        **{name: torch.tensor(x, dtype=torch.float64) for name, x in given.items()}
    )


def with_gradient(compute: typing.Callable, x: torch.Tensor) -> dict[str, typing.Any]:
    x = x.clone().requires_grad_()
    loss = compute(x)
    loss.backward()
    return {"loss": loss.item(), "gradient": x.grad.numpy().round(8).tolist()}


def listed(x: torch.Tensor) -> typing.Any:
    return x.detach().numpy().round(8).tolist()


class Config(types.SimpleNamespace):
    """Stands for verl's configs."""

    def get(self, name: str, default: typing.Any = None) -> typing.Any:
        return getattr(self, name, default)


def of_verl(checkout: pathlib.Path, prime: str, t: types.SimpleNamespace) -> dict[str, typing.Any]:
    core = source(checkout, "verl/trainer/ppo/core_algos.py")
    tools = source(checkout, "verl/utils/torch_functional.py")
    names = ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value")
    space = {"torch": torch, "np": np, "defaultdict": collections.defaultdict, "F": F}
    space |= {"ActorConfig": Config, "AlgoConfig": type(None)}
    verl_f = types.SimpleNamespace(**named(tools, names, dict(space)))
    space["verl_F"] = verl_f
    found = {n.name for n in ast.walk(ast.parse(core)) if isinstance(n, ast.FunctionDef)}
    of = named(core, tuple(found), space)
    index = np.repeat(np.arange(GROUPS), SAMPLES)
    last = t.mask * (t.mask.cumsum(1) == t.mask.sum(1, keepdim=True))
    scores = last * t.rewards[:, None]
    own = {"response_mask": t.mask, "index": index}
    grpo = of["compute_grpo_outcome_advantage"]
    plus = Config(gamma=0.9)
    made = {
        "grpo": grpo(scores, **own)[0],
        "dr_grpo": grpo(scores, **own, norm_adv_by_std_in_grpo=False)[0],
        "rloo": of["compute_rloo_outcome_advantage"](scores, **own)[0],
        "opo": of["compute_opo_outcome_advantage"](scores, **own)[0],
        "gpg": of["compute_gpg_outcome_advantage"](scores, **own)[0],
        "reinforce_plus_plus": of["compute_reinforce_plus_plus_outcome_advantage"](
            t.dense * t.mask, t.mask, plus
        )[0],
        "reinforce_plus_plus_baseline": of[
            "compute_reinforce_plus_plus_baseline_outcome_advantage"
        ](scores, t.mask, index)[0],
        "remax": of["compute_remax_outcome_advantage"](scores, t.baselines, t.mask)[0],
        "gae": of["compute_gae_advantage_return"](t.dense, t.values, t.mask, 0.9, 0.8)[0],
        "gae_returns": of["compute_gae_advantage_return"](t.dense, t.values, t.mask, 0.9, 0.8)[1],
    }
    advantages = {name: listed(x * t.mask) for name, x in made.items()}

    shared = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    cov = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.6}
    cov |= {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}
    config = Config(
        **shared, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05, global_batch_info={},
        policy_loss=Config(**cov),
    )  # fmt: skip

    def policy(name: str, mode: str = "token-mean", old: torch.Tensor = t.old) -> typing.Any:
        loss = of[f"compute_policy_loss_{name}"]
        return lambda x: loss(old, x, t.advantages, t.mask, mode, config)[0]

    means = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    losses = {f"vanilla {mode}": with_gradient(policy("vanilla", mode), t.new) for mode in means}
    for name in ("gspo", "sapo", "gpg", "cispo"):
        losses[name] = with_gradient(policy(name), t.new)
    # In a step's first update the policy is the old one, later it is still near: covariances of
    # either choose the same tokens.
    losses["clip_cov"] = with_gradient(policy("clip_cov"), t.old)
    losses["kl_cov"] = with_gradient(policy("kl_cov"), t.near)
    value = of["compute_value_loss"]
    losses["value"] = with_gradient(
        lambda x: value(x, t.returns, t.old_values, t.mask, 0.5)[0], t.values
    )
    kl = of["kl_penalty"]
    for name in ("k1", "k2", "k3"):
        losses[f"kl {name}"] = with_gradient(
            lambda x, name=name: (kl(x, t.reference, name) * t.mask).sum(), t.new
        )
    recipe: dict[str, typing.Any] = {"torch": torch, "verl_F": verl_f}
    named(prime, ("compute_rloo_advantage_return", "compute_ce_dpo_loss_rm"), recipe)
    data = types.SimpleNamespace(
        batch={
            "rm_scores": 0.5 * (t.new - t.reference) * t.mask,
            "acc": t.right,
            "prompts": torch.zeros(ROWS, 1),
            "attention_mask": torch.cat([torch.ones(ROWS, 1, dtype=torch.double), t.mask], 1),
        }
    )
    weights = Config(algorithm=Config(dpo_coef=2.0, gt_coef=3.0))
    # It makes float32 arrays itself, and counts tokens.
    kinds = {"attention_mask": torch.long}
    data.batch = {k: v.to(kinds.get(k, torch.float32)) for k, v in data.batch.items()}
    both = recipe["compute_rloo_advantage_return"](data, t.mask.float(), SAMPLES, weights)
    advantages["prime"] = listed(both[0] * t.mask.float())
    entropy = recipe["compute_ce_dpo_loss_rm"]
    losses["prime"] = with_gradient(
        lambda x: entropy(x - t.reference, t.right, t.mask, 0.5), t.new
    )
    return {"advantages": advantages, "losses": losses}


class Anything:
    """Stands for a trainer's parts that only note metrics."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x: typing.Any) -> typing.Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: typing.Any, reduction: str = "") -> typing.Any:
        return x


def of_trl(checkout: pathlib.Path, t: types.SimpleNamespace) -> dict[str, typing.Any]:
    least = {"nanmin": lambda x: x.min(), "nanmax": lambda x: x.max()}
    grpo = named(
        source(checkout, "trl/trainer/grpo_trainer.py"),
        ("_compute_loss",),
        {"torch": torch, "F": F, **least},
    )["_compute_loss"]
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)

    def loss_of(x: torch.Tensor, **changes: typing.Any) -> torch.Tensor:
        settings = {"delta": None, "use_bias_correction_kl": False} | {
            "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        }  # fmt: skip
        facts = {
            "loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0,
            "epsilon_low": 0.2, "epsilon_high": 0.28,
        }  # fmt: skip
        settings |= {k: v for k, v in changes.items() if k in settings}
        facts |= {k: v for k, v in changes.items() if k in facts}
        trainer = types.SimpleNamespace(
            **facts,
            args=types.SimpleNamespace(**settings),
            _get_per_token_logps_and_entropies=lambda *a, **k: (x, torch.zeros_like(x), None),
            accelerator=Anything(),
            model=types.SimpleNamespace(training=True),
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
            use_vllm=False, vllm_importance_sampling_correction=False,
            current_gradient_accumulation_steps=1, max_completion_length=7,
            _entropy_bonus_enabled=False, use_adaptive_entropy=False,
            _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        )  # fmt: skip
        batch = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1],
            "completion_ids": ids, "completion_mask": t.mask, "advantages": t.row_advantages,
            "old_per_token_logps": t.old, "ref_per_token_logps": t.reference,
            "num_items_in_batch": t.mask.sum(),
        }  # fmt: skip
        made: torch.Tensor = grpo(trainer, None, batch)
        return made

    options: dict[str, dict[str, typing.Any]] = {
        "grpo": {"beta": 0.04},
        "dapo": {"loss_type": "dapo"},
        "dr_grpo": {"loss_type": "dr_grpo"},
        "delta": {"delta": 1.1, "loss_type": "dapo"},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
        "sapo": {"loss_type": "sapo"},
        "sequence": {"importance_sampling_level": "sequence"},
    }
    losses = {
        name: with_gradient(lambda x, own=own: loss_of(x, **own), t.new)
        for name, own in options.items()
    }
    # Pairs: rows in turn chosen and rejected.
    dpo = source(checkout, "trl/trainer/dpo_trainer.py")
    loop = statement(dpo, "zip(self.loss_types", ast.For)
    for name, smoothing in (("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1)):

        def pairs(x: torch.Tensor, name: str = name, smoothing: float = smoothing) -> torch.Tensor:
            gained = ((x - t.reference) * t.mask).sum(1)
            own = types.SimpleNamespace(
                loss_types=[name], loss_weights=[1.0], beta=0.3, label_smoothing=smoothing,
                use_weighting=False, args=types.SimpleNamespace(),
            )  # fmt: skip
            space = {
                "self": own, "torch": torch, "F": F, "loss": 0.0,
                "chosen_scores": gained[::2], "rejected_scores": gained[1::2],
                "delta_score": gained[::2] - gained[1::2],
                "completion_mask": torch.cat([t.mask[::2], t.mask[1::2]]),
            }  # fmt: skip
            exec(loop, space)
            made: torch.Tensor = space["loss"]  # type: ignore[assignment]
            return made

        losses[f"dpo {name}"] = with_gradient(pairs, t.new)
    text = source(checkout, "trl/trainer/kto_trainer.py")
    heads = ("chosen_logps.shape[0] != 0", "rejected_logps.shape[0] != 0")
    sides = [statement(text, f"{head} or", ast.If) for head in heads]

    def verdicts(x: torch.Tensor) -> torch.Tensor:
        right = t.right > 0
        policy, reference = (x * t.mask).sum(1), (t.reference * t.mask).sum(1)
        own = types.SimpleNamespace(loss_type="kto", beta=0.3)
        space = {
            "self": own, "torch": torch, "F": F, "kl": torch.tensor(0.2, dtype=torch.double),
            "chosen_logps": policy[right], "ref_chosen_logps": reference[right],
            "rejected_logps": policy[~right], "ref_rejected_logps": reference[~right],
        }  # fmt: skip
        for side in sides:
            exec(side, space)
        return torch.cat([1.2 * space["chosen_losses"], 0.7 * space["rejected_losses"]]).mean()

    losses["kto"] = with_gradient(verdicts, t.new)
    orpo = named(
        source(checkout, "trl/experimental/orpo/orpo_trainer.py"),
        ("odds_ratio_loss",),
        {"torch": torch, "F": F, "log1mexp": lambda x: torch.log1p(-torch.exp(x))},
    )["odds_ratio_loss"]
    cpo = named(
        source(checkout, "trl/experimental/cpo/cpo_trainer.py"), ("cpo_loss",),
        {"torch": torch, "F": F},
    )["cpo_loss"]  # fmt: skip
    here = types.SimpleNamespace(device="cpu")

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x * t.mask).sum(1) / t.mask.sum(1)

    odds = types.SimpleNamespace(beta=0.3, accelerator=here)
    losses["orpo odds"] = with_gradient(
        lambda x: -orpo(odds, mean(x)[::2], mean(x)[1::2])[0].mean(), t.new
    )
    simple = types.SimpleNamespace(
        beta=2.0, alpha=0.0, simpo_gamma=1.0, loss_type="simpo", label_smoothing=0.0,
        accelerator=here,
    )  # fmt: skip
    losses["simpo"] = with_gradient(
        lambda x: cpo(simple, mean(x)[::2], mean(x)[1::2])[0].mean(), t.new
    )
    jsd = named(
        source(checkout, "trl/experimental/gkd/gkd_trainer.py"), ("generalized_jsd_loss",),
        {"torch": torch, "F": F},
    )["generalized_jsd_loss"]  # fmt: skip
    labels = torch.where(t.mask > 0, 0, -100)
    for beta in (0.0, 0.3, 1.0):
        losses[f"jsd {beta}"] = with_gradient(
            lambda x, beta=beta: jsd(x, t.teacher, labels, beta=beta), t.student
        )
    return {"losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("trl", "verl", "prime"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    args = parser.parse_args()
    given = inputs()
    t = tensors(given)

    def commit(checkout: pathlib.Path) -> str:
        show = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()

    made = {
        "inputs": {name: x.tolist() for name, x in given.items()},
        "verl": {"commit": commit(args.verl), **of_verl(args.verl, args.prime.read_text(), t)},
        "trl": {"commit": commit(args.trl), **of_trl(args.trl, t)},
    }
    text = json.dumps(made).replace("}, \"", "},\n\"")
    (HERE / "peer_values.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
