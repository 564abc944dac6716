"""The common config keys: default, description and allowed values of each.

`default_config` builds the config from this table, `check_config` takes types and ranges from it,
and docs/config.md is generated from it (docs/generate/config_page.py). An algorithm defines its own
keys in its `keys` (under `config.algorithm`), a task its options (`config.data.task_options`).

Batch sizes count sequences (one sequence = one prompt with one response) over the whole run, never
per device; only `rollout.prompts` counts prompts.
"""

from collections.abc import Mapping
from typing import Any

from hjax.config import SWITCH, Config
from hjax.data.invalid_rows import INVALID
from hjax.data.read_options import OVERLONG
from hjax.data.row_formats import COLUMNS, FORMATS
from hjax.machine import MAX_DEVICES
from hjax.roles import OPTIMIZERS, ROLES
from hjax.rollout.sampling_params import OPTIONS
from hjax.rules import (
    Key,
    Rule,
    above,
    at_least,
    below_one,
    between,
    deadline,
    number_or_auto,
    one_of,
)
from hjax.settings.agent_keys import AGENT_KEYS

# Upper limits of dimensions and batch sizes, and of lengths in tokens. They are far above any real
# run, and keep absurd values from exhausting memory before memory is checked.
MAX_SIZE = 2**20
MAX_LENGTH = 2**24

# Sections whose keys are defined by the algorithm or the task that another key selects.
OWNED_SECTIONS = {"algorithm": "algorithm.name", "data.task_options": "data.task"}


def _offload(trained: bool) -> Key:
    if trained:
        return Key(
            "none",
            "idle state that is offloaded to pinned host memory: none; optimizer (optimizer state, "
            "except during updates); all (parameters too, except during the role's own calls)",
            one_of("none", "optimizer", "all"),
        )
    return Key(
        "none",
        "all: parameters are offloaded to pinned host memory except during the role's own calls; "
        "or none",
        one_of("none", "all"),
    )


# Layers of the deepest model that model.unroll_layers=auto unrolls.
MAX_UNROLLED_LAYERS = 8

# Response length where neither the config nor a built-in task gives one.
DEFAULT_RESPONSE_LENGTH = 256

PLACEMENTS = ("colocate", "split", "standalone", "disaggregate", "auto")


def _schedule() -> dict[str, Key]:
    return {
        "schedule": Key(
            "constant",
            "learning rate after warm-up: constant, or cosine or linear decay over `steps`, to "
            "`min_lr_ratio` of the peak",
            one_of("constant", "cosine", "linear"),
        ),
        "min_lr_ratio": Key(
            0.0,
            "learning rate at the end of a cosine or linear schedule, over its peak",
            between(0, 1),
        ),
        "frozen_updates": Key(
            0,
            "first optimizer updates, which leave the weights unchanged (VAPO: the actor's, while "
            "the critic learns); warm-up follows",
            at_least(0),
        ),
        "warmup_updates": Key(
            0, "optimizer updates over which the learning rate rises from 0", at_least(0)
        ),
        "warmup_ratio": Key(
            0.0,
            "warm-up as a share of all optimizer updates, rounded up, in place of warmup_updates",
            between(0, 1),
        ),
    }


def _optimizer(role: str, learning_rate: float) -> dict[str, Key]:
    return {
        "optimizer": Key(
            "adamw",
            "adamw, adam, sgd (without momentum), lion, adafactor (learning rate relative to each "
            "parameter's root mean square), muon (for matrices, with updates as large as AdamW's; "
            "Adam for the rest), or your own `path.py:function`, which makes an optax "
            "transformation from the learning rate (docs/extending.md)",
            Rule(
                f"one of {', '.join(OPTIMIZERS)}, or path.py:function of yours",
                lambda x: x in OPTIMIZERS or ".py:" in x,
            ),
        ),
        "learning_rate": Key(learning_rate, f"peak learning rate of the {role}", at_least(0)),
        **_schedule(),
        "weight_decay": Key(
            0.0,
            "decoupled weight decay of matrices and embeddings; adam and an optimizer of yours "
            "have none",
            at_least(0),
        ),
        "beta1": Key(0.9, "decay of the gradient's mean: AdamW's, Adam's, Lion's", below_one()),
        "beta2": Key(
            0.99,
            "decay of AdamW's and Adam's mean square of the gradient, and of Lion's mean",
            below_one(),
        ),
        "max_grad_norm": Key(
            1.0, "clip the gradient's global L2 norm to this; 0: no clipping", at_least(0)
        ),
        "micro_batch": Key(
            0,
            "sequences (with data.packing: packs) per forward and backward pass: gradients are "
            "accumulated over the mini-batch (gradient accumulation), with the same result except "
            "for router_loss, which each pass computes alone. Log-probs and scores are computed in "
            "micro-batches too; roles that are not trained use the actor's. 0: no micro-batches",
            at_least(0),
        ),
        "offload": _offload(trained=True),
    }


def _router_loss(role: str) -> Key:
    return Key(
        0.0,
        f"weight of the load-balancing loss in all updates of the {role}, if its model has experts "
        "(docs/models.md); 0: none; -1: router_aux_loss_coef of the model's config.json",
        Rule("0 or more, or -1", lambda x: x == -1 or at_least(0).holds(x)),
    )


def _lora(role: str) -> dict[str, Key]:
    return {
        "rank": Key(
            0,
            f"rank of LoRA adapters, which are trained while the {role}'s weights are frozen; 0: "
            "no adapters, all weights are trained",
            at_least(0),
        ),
        "alpha": Key(32.0, "adapters are scaled by alpha / rank", above(0)),
        "rslora": Key(False, "scale adapters by alpha / sqrt(rank) instead (rsLoRA)"),
        "targets": Key(
            ("all",),
            "matrices with an adapter: all, or some of q, k, v, o, gate, up, down",
        ),
        "dropout": Key(0.0, "dropout of each adapter's inputs in updates, as in PEFT", below_one()),
        "dora": Key(
            False,
            "scale each output's weights, adapter included, to a trained norm (DoRA); needs a path",
        ),
        "base": Key(
            "float",
            "dtype of the layers' frozen matrices: float, that of compute; int8 or fp8, a byte "
            "each with a scale per output",
            one_of("float", "int8", "fp8"),
        ),
    }


def _train_axes() -> dict[str, Key]:
    return {
        "data": Key(-1, "data parallelism: copies of the model, each with a share of the batch"),
        "fsdp": Key(1, "FSDP (ZeRO-3): splits parameters, optimizer state and the batch"),
        "pipe": Key(1, "pipeline parallelism: stages that split the layers; divides layers"),
        "tensor": Key(1, "tensor parallelism: splits heads, MLP and vocabulary"),
        "context": Key(1, "context parallelism: splits the sequence; keys and values are gathered"),
        "expert": Key(1, "expert parallelism: splits experts; data parallelism for all else"),
    }


def _layout(generates: bool) -> dict[str, Any]:
    axes: dict[str, Any] = {"train": _train_axes()}
    if generates:
        axes["generate"] = {
            "data": Key(-1, "follows from the other axes"),
            "pipe": Key(
                1,
                "pipeline stages in generation; divides the training size, and the quotient adds "
                "to data parallelism",
            ),
            "tensor": Key(
                1,
                "tensor parallelism in generation; divides the training size, and the quotient "
                "adds to data parallelism",
            ),
        }
    return axes


KEYS: dict[str, Any] = {
    "seed": Key(0, "random seed of the whole run", between(0, 2**32 - 1)),
    "steps": Key(
        100,
        "training steps, each a rollout and its updates; may change on resume. 0: only evaluates "
        "on held-out prompts; nothing is trained or written",
        at_least(0),
    ),
    "algorithm": {
        "name": Key(
            "PPO",
            "algorithm class: PPO, GRPO, dr_grpo, … (docs/algorithms), or your own as "
            "`path.py:Class`. The algorithm's own keys are in this section too",
        ),
    },
    "model": {
        "hidden_size": Key(
            128, "width of a model from scratch (used if a path is empty)", between(1, MAX_SIZE)
        ),
        "layers": Key(2, "decoder layers", between(1, MAX_SIZE)),
        "heads": Key(4, "attention heads; divides hidden_size", between(1, MAX_SIZE)),
        "kv_heads": Key(4, "key and value heads; divides heads", between(1, MAX_SIZE)),
        "mlp_size": Key(512, "width of the gated MLP", between(1, MAX_SIZE)),
        "vocab_size": Key(0, "tokens; 0: the tokenizer's", between(0, MAX_SIZE)),
        "family": Key(
            "",
            "your own model family as `path.py:Class` (docs/families.md): it reads models whose "
            "config.json has its model_type, and defines models from scratch; empty: hjax's "
            "families, and Llama's architecture from scratch",
        ),
        "tie_embeddings": Key(True, "the output head shares the embedding matrix"),
        "max_length": Key(
            0, "positions, prompt and response together; 0: as long as the run needs", at_least(0)
        ),
        "rope_scaling": Key(
            "",
            "longer sequences than the model was trained with: a config.json's `rope_scaling` for "
            'actor, critic and reference, as `{"rope_type": "yarn", "factor": 4}`, or linear '
            "or dynamic; it multiplies the positions and stands in what is exported. Empty: as the "
            "model has it",
        ),
        "unroll_layers": Key(
            "auto",
            "true: layers are unrolled, which is faster for shallow models on a CPU and slower to "
            "compile; false: layers are scanned. auto: by role, true on CPUs for a model of at "
            f"most {MAX_UNROLLED_LAYERS} layers; may change on resume",
            one_of(*SWITCH),
        ),
        "dtype": Key(
            "auto",
            "dtype of compute and generation: auto is bfloat16 on accelerators, float32 on a CPU; "
            "parameters and optimizer state stay float32",
            one_of("auto", "float32", "bfloat16"),
        ),
        "remat": Key(
            "auto",
            "rematerialisation (activation checkpointing): activations that the backward pass "
            "recomputes: none, all but outputs of weight matrices and attention (products), all "
            "but attention's outputs (attention), all (full), or all with each layer's input "
            "offloaded to host memory (offload). It takes less memory and up to a third more time. "
            "On a CPU it needs scanned layers, because XLA undoes it for unrolled ones. auto: by "
            "role, the first of these whose update fits into 0.9 of a device's memory by estimate, "
            "which the dry run shows; none on CPUs, which do not report their memory",
            one_of("auto", "none", "products", "attention", "full", "offload"),
        ),
        "attention": Key(
            "auto",
            "attention kernel for sequences of more than 512 tokens: blocks, hjax's own on CPUs "
            "and GPUs; cudnn, NVIDIA's library on its GPUs, in bfloat16 (unsupported cases are "
            "refused: docs/models.md). auto: the platform's; on NVIDIA GPUs cudnn for roles that "
            "it supports, unless hjax.launch.check found it wrong there, else blocks",
            one_of("auto", "blocks", "cudnn"),
        ),
    },
    "data": {
        "task": Key(
            "sorting",
            "built-in task with prompts, verifier and demonstrations, or one of another package: "
            "reasoning_gym:NAME, gymnasium:NAME; empty: data.path is needed",
        ),
        "task_options": {},
        "path": Key(
            "",
            "your own prompts: a file, a glob pattern, a folder, or a Hugging Face dataset as "
            "owner/name:split; several are separated by commas (docs/data.md); replaces data.task "
            "if not empty",
        ),
        "mixture": Key(
            "",
            "several files with names and weights in place of data.path, such as "
            "`math=gsm8k.jsonl*2, code=mbpp.parquet` (a weight left out is 1): each step's "
            "prompts, or examples, come from them in these shares, metrics are also by name, and "
            "rows have it in the column `mixture`",
        ),
        "eval_path": Key(
            "",
            "held-out prompts, as data.path; several sets are named, as `math=a.jsonl, "
            "code=b.jsonl`, and evaluated each by itself too; empty: a seeded share of data.path, "
            "of each file of a mixture",
        ),
        "format": Key(
            COLUMNS,
            "whose columns the rows have: hjax's (prompt, messages, response and so on), Alpaca's "
            "(instruction, input, output) or ShareGPT's (conversations of from and value)",
            one_of(*FORMATS),
        ),
        "columns": Key(
            "",
            "renames columns of the files to hjax's names, such as "
            "`question=prompt, answer=solution`; empty: no renaming",
        ),
        "chat": Key(False, "render a text prompt by the chat template, as a user message"),
        "system": Key(
            "", "system message of chats that begin with none; with data.chat also of texts"
        ),
        "template_arguments": Key(
            "",
            "further variables of the chat template, a JSON object such as "
            '`{"enable_thinking": false}`',
        ),
        "overlong": Key(
            "error",
            "what happens to a file's prompts above rollout.max_prompt_length, and to answers it "
            "teaches above rollout.max_response_length: error, filter (drop their rows) or "
            "truncate_left (drop a prompt's first tokens; an answer is an error); the run reports "
            "how many",
            one_of(*OVERLONG),
        ),
        "invalid": Key(
            "error",
            "what happens to a file's bad rows (malformed, without a prompt or an answer, too "
            "long): error, or drop (leave them out); the run reports which and how many. A "
            "preference pair whose answers are equal is left out with either",
            one_of(*INVALID),
        ),
        "weights": Key(
            "",
            "mixing weights of data sources (column data_source), such as `gsm8k=2, math=1`; "
            "empty: all rows are equally frequent",
        ),
        "eval_fraction": Key(
            0.1, "share of data.path that is held out if data.eval_path is empty", between(0, 0.9)
        ),
        "eval_size": Key(128, "most held-out prompts; 0: no limit", at_least(0)),
        "packing": Key(
            "auto",
            "sequence packing: tokens per pack, a row that holds several sequences in updates and "
            "scores. At least the longest prompt and response together, for pairs twice that "
            "(docs/models.md); micro_batch then counts packs. 0: one padded row per sequence. "
            "auto: per batch, packs as long as its longest sequence if these save a third of the "
            "tokens, else padded rows; metrics are equal to 1e-5. auto never packs where a number "
            "is refused (pipe, context, cuDNN's attention of more than 512 tokens, rotary scaling "
            "by a row's length), for a role with router_loss, and for PPO's pretraining "
            "demonstrations (pretraining_coef)",
            number_or_auto(),
        ),
    },
    "tokenizer": {
        "path": Key("", "directory or tokenizer.json; empty: the actor's or the task's"),
    },
    "actor": {
        "path": Key("", "weights (Hugging Face directory); empty: from scratch, see model"),
        "lora": _lora("actor"),
        "router_loss": _router_loss("actor"),
        **_optimizer("actor", 1e-3),
        "ema_decay": Key(
            0.0,
            "above 0: a float32 moving average of the trained weights is kept, of which this share "
            "stays at each optimizer update. It is evaluated and exported, and read wherever the "
            "workdir is named as a model; training goes on with the weights themselves",
            Rule("at least 0, below 1", lambda x: 0 <= x < 1),
        ),
    },
    "critic": {
        "path": Key("", "weights; empty: the actor's. A cost critic uses this section too"),
        "lora": _lora("critic"),
        "router_loss": _router_loss("critic"),
        **_optimizer("critic", 1e-3),
    },
    "reference": {
        "path": Key("", "weights; empty: the actor's at the start of training"),
        "sync_every": Key(
            0,
            "steps after which the reference moves to the actor's weights; 0: it stays as it was "
            "at the start",
            at_least(0),
        ),
        "sync_share": Key(
            1.0,
            "how far it moves: 1 takes the actor's weights, less a share of the way to them (with "
            "sync_every=1 an exponential moving average); of adapters their two matrices move",
            Rule("above 0, at most 1", lambda x: 0 < x <= 1),
        ),
        "offload": _offload(trained=False),
    },
    "teacher": {
        "path": Key(
            "", "weights of any size with the actor's tokenizer; empty: from scratch, see model"
        ),
        "layers": Key(0, "layers of a teacher from scratch; 0: the actor's", at_least(0)),
        "lora": _lora("teacher"),
        "router_loss": _router_loss("teacher"),
        **_optimizer("teacher", 1e-3),
    },
    "reward": {
        "path": Key("", "weights of a reward model; empty: the function"),
        "step_separator": Key(
            "",
            "text that ends each step of a response, for a process reward model: it scores each "
            "step at the step's last token (rewards per token); `token`: every token is a step. "
            "Empty: one score, at the response's end",
        ),
        "offload": _offload(trained=False),
        "function": Key("", "`path.py:name`; empty: the task's or dataset's verifier"),
        "max_unscored": Key(
            0.05,
            "the run stops if a larger share of a step's sequences is unscored",
            between(0, 1),
        ),
        "timeout_seconds": Key(60.0, "deadline of a reward call, in seconds", deadline()),
        "runs_in": Key(
            "process",
            "where the function runs: in an isolated process, which is killed at the deadline, or "
            "in a thread of the run",
            one_of("process", "thread"),
        ),
        "while_generating": Key(
            False,
            "call the function as soon as all responses to a prompt are complete, while others are "
            "generated: it is called several times a step, each time with the prompts completed "
            "since",
        ),
    },
    "environment": {
        "function": Key(
            "",
            "`path.py:Class`, an environment that the policy plays, an episode for each sample of "
            "a prompt, or one of another package, such as `openenv:http://HOST:PORT` "
            "(docs/agents.md); empty: the task's, if it has one",
        ),
        "tools": Key(
            "",
            "`path.py:name,...`, functions that the policy may call in a conversation, `python` "
            "for an interpreter; a turn without calls is the answer, which the reward function "
            "scores (docs/agents.md)",
        ),
        "max_turns": Key(
            0,
            "turns of the policy in an episode; 0: what the task needs, 20 in an environment of "
            "your own",
            at_least(0),
        ),
        "turn_tokens": Key(
            0,
            "tokens of a turn; 0: what the task needs, and in an environment of your own what "
            "rollout.max_response_length leaves",
            at_least(0),
        ),
        "step_seconds": Key(
            60.0,
            "deadline of each call of an environment, in seconds; a late one ends its process and "
            "its episode, which is not learned from",
            deadline(),
        ),
        "processes": Key(
            0,
            "processes of environments, over which episodes are shared out; 0: one per core, at "
            "most 8",
            at_least(0),
        ),
        "memory_gib": Key(
            4.0, "memory of each of these processes, in GiB; 0: no limit", between(0, 2**20)
        ),
    },
    "agent": AGENT_KEYS,
    "sandbox": {
        "function": Key(
            "",
            "`path.py:Class` with the five calls of a sandbox, such as a hosted one "
            "(docs/security.md); empty: this machine's",
        ),
        "allow_network": Key(
            False,
            "run programs of a model also where neither namespaces nor seccomp keep them from the "
            "network",
        ),
    },
    "cost": {
        "path": Key("", "weights of a cost model; empty: the function"),
        "offload": _offload(trained=False),
        "function": Key("", "`path.py:name` for the cost (Safe-RLHF); empty: the task's"),
    },
    "rollout": {
        "prompts": Key(
            16, "prompts per step (each answered `samples` times)", between(1, MAX_SIZE)
        ),
        "samples": Key(
            4,
            "responses per prompt; prompts * samples sequences make the step's batch",
            between(1, MAX_SIZE),
        ),
        "max_prompt_length": Key(0, "tokens; 0: the longest in the data", between(0, MAX_LENGTH)),
        "max_response_length": Key(
            0,
            "tokens, the end-of-sequence token included; 0: those of a built-in task's longest "
            f"answer, {DEFAULT_RESPONSE_LENGTH} with data of your own",
            between(0, MAX_LENGTH),
        ),
        **OPTIONS,
        "temperature": Key(1.0, "of sampling; evaluation is greedy", between(0.01, 100.0)),
        "slots": Key(
            0,
            "sequences generated at a time (continuous batching): others start as these end, which "
            "limits the KV cache; 0: all of a step's; -1: as many as fit into memory",
            at_least(-1),
        ),
        "extra_samples": Key(
            0,
            "oversampling: further responses to each prompt. Once `samples` of them are complete "
            "the others are cancelled, so that nothing waits for the longest responses (a bias: "
            "the shortest ones are learned from); 0: none",
            at_least(0),
        ),
        "speculative_tokens": Key(
            0,
            "speculative decoding by prompt lookup: draft tokens per step, copied from earlier "
            "text and verified in one pass. The responses are the same, and faster where they "
            "repeat themselves or their prompt; 0: none",
            at_least(0),
        ),
        "cache_dtype": Key(
            "auto",
            "dtype of the KV cache in generation: auto, that of compute; int8, a byte per value "
            "with a scale per token and head: half of bfloat16's memory and bandwidth. The sampler "
            "and its log-probs then round keys and values, the trainer's do not "
            "(rollout/token_prob_error, algorithm.correction)",
            one_of("auto", "int8"),
        ),
        "warn_prob_error": Key(
            1.1,
            "rollout/token_prob_error above which a run warns once that the sampler's log-probs "
            "differ from the trainer's; 0: never. Ignored if older weights sample, or with dropout "
            "in adapters",
            Rule("above 1, or 0 for never", lambda x: x == 0 or x > 1),
        ),
        "max_prob_error": Key(
            2.0,
            "rollout/token_prob_error above which a run stops; 0: never",
            Rule("above 1, or 0 for never", lambda x: x == 0 or x > 1),
        ),
        "max_staleness": Key(
            0,
            "asynchronous rollout: most weight versions by which a batch may lag behind the "
            "weights that learn from it. 0: synchronous; above 0 generation needs devices of its "
            "own (placement=disaggregate)",
            at_least(0),
        ),
        "deterministic": Key(
            False,
            "with max_staleness: the weight version of each batch is fixed in advance, so that "
            "runs are reproducible; otherwise the newest weights generate",
        ),
        "partial_tokens": Key(
            0,
            "partial rollouts, with max_staleness: responses are generated in parts of so many "
            "tokens, each with the newest weights. 0: whole responses",
            at_least(0),
        ),
        "stop": Key(
            (),
            "stop strings that end a response, besides the end-of-sequence token. With slots, one "
            "of several tokens is detected between dispatches; otherwise, or with partial "
            "rollouts, responses are generated to their end and then truncated after it",
        ),
        "transition_bucket_bytes": Key(
            2**24,
            "bytes per device of parameters that move to the generate layout at a time (at least "
            "one array; arrays stacked over layers move in slices): smaller buckets take less "
            "memory",
            at_least(1),
        ),
    },
    "warm_start": {
        "steps": Key(
            0,
            "supervised updates on demonstrations (SFT) before the first step; 0, or a non-empty "
            "actor.path: none",
            at_least(0),
        ),
        "batch": Key(
            64,
            "sequences per update, also in SFT, in DPO and its kin, and of reward models (two of "
            "each pair)",
            at_least(1),
        ),
        "learning_rate": Key(1e-3, "AdamW learning rate of the warm start", at_least(0)),
    },
    "eval": {
        "every": Key(
            20,
            "steps between evaluations, with one before the first step and one after the last (a "
            "run of one step records only the first). 0: none",
            at_least(0),
        ),
        "prompts": Key(128, "held-out prompts per evaluation; 0: all", at_least(0)),
        "samples": Key(
            1,
            "above 1: further answers per held-out prompt, drawn as in training, beside the greedy "
            "one: mean and best reward, pass@k (docs/metrics.md)",
            between(1, MAX_SIZE),
        ),
        "by": Key(
            "",
            "column of the data by whose values evaluations have metrics too, such as "
            "`eval/easy/accuracy`; empty: by the name of a mixture's or an evaluation set's file",
        ),
    },
    "checkpoint": {
        "every": Key(20, "steps between checkpoints; 0: only at the end", at_least(0)),
        "keep": Key(2, "newest checkpoints to keep", at_least(1)),
        "best": Key(
            "",
            "metric, such as eval/reward, whose best checkpoint is kept beside the newest ones. "
            "WORKDIR/checkpoints/best names it wherever a model is named. Steps count that have "
            "both a checkpoint and the metric; empty: the newest ones alone",
        ),
        "best_mode": Key(
            "max", "whether the largest or the smallest is best", one_of("max", "min")
        ),
    },
    "placement": Key(
        "colocate",
        "which roles share devices: colocate (all on all), split (actor and reference on one "
        "half, critic and reward on the other), standalone (each its own), disaggregate "
        "(generation on one half, all else on the other), auto (the best by the cost model, "
        "docs/auto_mapping.md), or a plan.json, whose role `rollout` is a separate generator",
    ),
    "layout": {name: _layout(role.generates and role.trained) for name, role in ROLES.items()},
    "cluster": {
        "address": Key(
            "",
            "Ray cluster to run on: auto, HOST:PORT, or local for one on this machine; empty: no "
            "cluster with one process, local with several",
        ),
        "processes": Key(1, "processes with devices, over all resource pools", at_least(1)),
        "devices_per_process": Key(
            0,
            "devices per process; 0: all; on a CPU one simulated device per core, divided over the "
            "processes",
            between(0, MAX_DEVICES),
        ),
        "reward_processes": Key(
            1, "cluster processes that share the calls of reward functions", at_least(1)
        ),
        "colocation_label": Key(
            "auto",
            "Ray node label that all hosts of a pool must share; auto: the slice on TPUs "
            "(ray.io/tpu-slice-name), none elsewhere; none: any hosts, on TPUs of one slice",
        ),
        "heartbeat_seconds": Key(
            30.0, "a process without a heartbeat for so long counts as lost", deadline()
        ),
        "call_seconds": Key(
            7200.0,
            "deadline of a model's call: one that takes longer hangs, and its processes are lost",
            deadline(),
        ),
        "max_restarts": Key(3, "most restarts of lost processes before the run stops", at_least(0)),
    },
    "display": {
        "enabled": Key(True, "show progress on the terminal; errors are always shown"),
        "samples": Key(2, "sample responses shown at a time; 0: none", at_least(0)),
        "samples_every": Key(5, "steps between the samples shown", at_least(1)),
        "tensorboard": Key(True, "write TensorBoard events into the workdir"),
        "wandb": Key(
            "",
            "Weights & Biases project to log to; WANDB_MODE=offline keeps the run on this machine "
            "(pip install 'hjax[wandb]')",
        ),
        "logger": Key("", "your own logger class: path.py:Class (docs/logging.md)"),
        "report": Key(True, "write report.html at the end"),
    },
}


def default_config() -> Config:
    """A new Config with every common key at its default.

    It is locked, so that a mistyped key fails at once, except for `config.algorithm` and
    `config.data.task_options`, whose keys the algorithm and the task define.
    """

    def build(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v.default if isinstance(v, Key) else build(v) for k, v in tree.items()}

    config = Config(build(KEYS))
    config.lock()
    for section in OWNED_SECTIONS:
        holder = config
        for name in section.split("."):
            holder = holder[name]
        holder.unlock()
    return config
