"""Every key that all algorithms' configs share: its default, its meaning and what it may be.

This table is the one source: `default_config` builds the config from it, `check_config` takes
types and ranges from it, and docs/config.md is its printout (docs/generate/config_page.py).
An algorithm's own keys live under `config.algorithm` and come from its `keys`, a task's under
`config.data.task_options`.

Batch sizes are always counted in sequences (one sequence = one prompt with one response) over the
whole run, never per device; `rollout.prompts` alone counts prompts.
"""

from collections.abc import Mapping
from typing import Any

from hjax.config import SWITCH, Config
from hjax.data.read_options import OVERLONG
from hjax.machine import MAX_DEVICES
from hjax.roles import OPTIMIZERS, ROLES
from hjax.rollout.sampling_params import OPTIONS
from hjax.rules import Key, Rule, above, at_least, below_one, between, number_or_auto, one_of

# Sizes that sums and lists are made of before memory is asked: of a model's dimension or a batch's,
# and in tokens. Far above any that is run.
MOST = 2**20
LONGEST = 2**24

# Sections whose keys belong to what another key names: to the algorithm's class, to the task.
OWNED_SECTIONS = {"algorithm": "algorithm.name", "data.task_options": "data.task"}


def _offload(trained: bool) -> Key:
    if trained:
        return Key(
            "none",
            "what waits in pinned host memory while it is idle: none; optimizer (its state, but "
            "while updating); all (the parameters too, but in the role's own calls)",
            one_of("none", "optimizer", "all"),
        )
    return Key(
        "none",
        "all: the parameters wait in pinned host memory but in the role's own calls; or none",
        one_of("none", "all"),
    )


# Layers of the deepest model that model.unroll_layers=auto unrolls.
SHALLOW = 8

# Of a response, where neither the config nor a built-in task says how many.
RESPONSE_TOKENS = 256

PLACEMENTS = ("colocate", "split", "standalone", "disaggregate", "auto")


def _optimizer(role: str, learning_rate: float) -> dict[str, Key]:
    return {
        "optimizer": Key(
            "adamw",
            "adamw, adam, sgd (without momentum), lion, adafactor (its rate is relative to each "
            "parameter's root mean square), muon (of matrices, with updates as large as AdamW's; "
            "Adam of all else), or `path.py:function` of yours, which makes an optax "
            "transformation of the learning rate (docs/extending.md)",
            Rule(
                f"one of {', '.join(OPTIMIZERS)}, or path.py:function of yours",
                lambda x: x in OPTIMIZERS or ".py:" in x,
            ),
        ),
        "learning_rate": Key(learning_rate, f"peak learning rate of the {role}", at_least(0)),
        "schedule": Key(
            "constant",
            "learning rate after warm-up: constant, or cosine or linear decay to 0 over `steps`",
            one_of("constant", "cosine", "linear"),
        ),
        "frozen_updates": Key(
            0,
            "optimizer updates at the beginning that leave the weights as they are (VAPO: the "
            "actor's, while the critic learns); warm-up follows",
            at_least(0),
        ),
        "warmup_updates": Key(
            0, "optimizer updates over which the learning rate rises from 0", at_least(0)
        ),
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
            "sequences (with data.packing packs) per pass: gradients are accumulated over the "
            "mini-batch, with the same result (but for router_loss, which is each pass's own), and "
            "scores made one part after another (by roles that are not trained in the actor's). 0: "
            "all at once",
            at_least(0),
        ),
        "offload": _offload(trained=True),
    }


def _router_loss(role: str) -> Key:
    return Key(
        0.0,
        f"weight, in all updates of the {role}, of the loss that balances its experts, where its "
        "model has such (docs/models.md): 0: it is left out; -1: the weight in the model's "
        "config.json, router_aux_loss_coef",
        Rule("0 or more, or -1", lambda x: x == -1 or at_least(0).holds(x)),
    )


def _lora(role: str) -> dict[str, Key]:
    return {
        "rank": Key(
            0,
            f"of low-rank adapters (LoRA) that learn while the {role}'s weights are frozen; 0: no "
            "adapters, all weights learn",
            at_least(0),
        ),
        "alpha": Key(32.0, "adapters are scaled by alpha / rank", above(0)),
        "rslora": Key(False, "scale them by alpha / sqrt(rank) instead"),
        "targets": Key(
            ("all",),
            "matrices with an adapter: all, or some of q, k, v, o, gate, up, down",
        ),
        "dropout": Key(
            0.0, "share of each adapter's inputs that updates drop, as PEFT does", below_one()
        ),
        "dora": Key(
            False,
            "scale each output's weights, adapter included, to a norm that learns (DoRA); needs a "
            "path",
        ),
        "base": Key(
            "float",
            "what the layers' frozen matrices are kept in: float, that of compute; int8 or fp8, a "
            "byte each with a scale per output",
            one_of("float", "int8", "fp8"),
        ),
    }


def _train_axes() -> dict[str, Key]:
    return {
        "data": Key(-1, "copies of the model, each with its share of the batch"),
        "fsdp": Key(1, "parameters and optimizer state split; the batch split too"),
        "pipe": Key(1, "pipeline stages: layers split, micro-batches passed along; divides layers"),
        "tensor": Key(1, "heads, MLP and vocabulary split"),
        "context": Key(1, "sequence length split, keys and values gathered"),
        "expert": Key(1, "experts split; more data parallelism for everything else"),
    }


def _layout(generates: bool) -> dict[str, Any]:
    axes: dict[str, Any] = {"train": _train_axes()}
    if generates:
        axes["generate"] = {
            "data": Key(-1, "follows from the other axes"),
            "pipe": Key(
                1,
                "pipeline stages while generating; divides the training size, the quotient "
                "becomes more data parallelism",
            ),
            "tensor": Key(
                1,
                "heads, MLP and vocabulary split while generating; divides the training size, "
                "the quotient becomes more data parallelism",
            ),
        }
    return axes


KEYS: dict[str, Any] = {
    "seed": Key(0, "every random draw follows from it", between(0, 2**32 - 1)),
    "steps": Key(
        100,
        "training steps: one rollout and its updates each; may change on resume. 0: the held-out "
        "prompts are answered, and nothing is trained or written",
        at_least(0),
    ),
    "algorithm": {
        "name": Key(
            "PPO",
            "class that is run: PPO, GRPO, dr_grpo, … (docs/algorithms), or one of yours as "
            "`path.py:Class`. Its own keys stand beside this one",
        ),
    },
    "model": {
        "hidden_size": Key(
            128, "width of a model from scratch (used where a path is empty)", between(1, MOST)
        ),
        "layers": Key(2, "decoder layers", between(1, MOST)),
        "heads": Key(4, "attention heads; divides hidden_size", between(1, MOST)),
        "kv_heads": Key(4, "key and value heads; divides heads", between(1, MOST)),
        "mlp_size": Key(512, "width of the gated MLP", between(1, MOST)),
        "vocab_size": Key(0, "tokens; 0: the tokenizer's", between(0, MOST)),
        "family": Key(
            "",
            "family of yours as `path.py:Class` (docs/families.md): models whose config.json has "
            "its model_type are read with it, and those from scratch have its parts; empty: "
            "hjax's own, from scratch Llama's",
        ),
        "tie_embeddings": Key(True, "output head shares the embedding"),
        "max_length": Key(
            0, "positions, prompt and response together; 0: as long as the run needs", at_least(0)
        ),
        "unroll_layers": Key(
            "auto",
            "true: each layer is compiled by itself, faster for shallow models on a CPU, longer to "
            "compile; false: a loop over them is. auto: by role, true on CPUs for a model of at "
            f"most {SHALLOW} layers; may change on resume",
            one_of(*SWITCH),
        ),
        "dtype": Key(
            "auto",
            "of compute and generation: auto is bfloat16 on an accelerator, float32 on a CPU; "
            "parameters and optimizer stay float32",
            one_of("auto", "float32", "bfloat16"),
        ),
        "remat": Key(
            "auto",
            "activations that the backward pass computes again: none, all but what products with "
            "weights and attention give (products), all but attention's outputs (attention), all "
            "(full), or all with each layer's input kept in the host's memory (offload): less "
            "memory, up to a third more time; on a CPU of scanned layers only, because XLA undoes "
            "it for unrolled ones. auto: by role the first of these whose update fits into 0.9 of "
            "a device's memory by an estimate, which the dry run shows; none on CPUs, which do not "
            "say how much they have",
            one_of("auto", "none", "products", "attention", "full", "offload"),
        ),
        "attention": Key(
            "auto",
            "who computes attention over sequences of more than 512 tokens: blocks, hjax's own on "
            "CPUs and GPUs; cudnn, NVIDIA's library on its GPUs, in bfloat16 (what it does not "
            "take is refused: docs/models.md). auto: the platform's; on NVIDIA GPUs cudnn for "
            "roles that it takes, once it has computed there what it should, else blocks",
            one_of("auto", "blocks", "cudnn"),
        ),
    },
    "data": {
        "task": Key(
            "sorting",
            "built-in task: prompts, verifier and demonstrations; empty: none, data.path is needed",
        ),
        "task_options": {},
        "path": Key(
            "",
            "your own prompts: a file, a pattern, a folder, or owner/name:split of Hugging Face's "
            "data sets, several with commas between (docs/data.md); replaces data.task if not "
            "empty",
        ),
        "eval_path": Key("", "held-out prompts, likewise; empty: a seeded share of data.path"),
        "columns": Key(
            "",
            "names of the files' columns and what they are called here, such as "
            "`question=prompt, answer=solution`; empty: as they are",
        ),
        "chat": Key(
            False, "a prompt that is text is the user's message of a chat, made by the template"
        ),
        "system": Key("", "with data.chat the system's message; empty: none"),
        "template_arguments": Key(
            "",
            "further variables of the chat template, a JSON object such as "
            '`{"enable_thinking": false}`',
        ),
        "overlong": Key(
            "error",
            "what a file's prompt above rollout.max_prompt_length does: error, filter (it is left "
            "out) or truncate_left (its beginning is); the run says how many",
            one_of(*OVERLONG),
        ),
        "weights": Key(
            "",
            "shares of the training prompts by the column data_source, such as `gsm8k=2, math=1`; "
            "empty: every row comes as often as any other",
        ),
        "eval_fraction": Key(
            0.1, "share of data.path held out where data.eval_path is empty", between(0, 0.9)
        ),
        "eval_size": Key(128, "at most this many held-out prompts are kept; 0: all", at_least(0)),
        "packing": Key(
            "auto",
            "tokens of a pack: in updates and scores sequences stand one after another in rows of "
            "so many, at least as many as the longest prompt and response together, of pairs "
            "twice that (docs/models.md); micro_batch then counts packs. 0: every sequence has a "
            "row, padded. auto: of each batch packs as long as its longest sequence where these "
            "are fewer tokens by a third, else padded rows; the same metrics to 1e-5. Always "
            "padded is what a number would be refused beside (pipe, context, cuDNN's attention of "
            "more than 512 tokens, rotary positions that follow a row's length), a role with "
            "router_loss, and demonstrations beside PPO (pretraining_coef)",
            number_or_auto(),
        ),
    },
    "tokenizer": {
        "path": Key("", "directory or tokenizer.json; empty: the actor's, or the task's letters"),
    },
    "actor": {
        "path": Key("", "weights (Hugging Face directory); empty: from scratch, see model"),
        "lora": _lora("actor"),
        "router_loss": _router_loss("actor"),
        **_optimizer("actor", 1e-3),
    },
    "critic": {
        "path": Key("", "weights; empty: the actor's. A cost critic takes these keys too"),
        "lora": _lora("critic"),
        "router_loss": _router_loss("critic"),
        **_optimizer("critic", 1e-3),
    },
    "reference": {
        "path": Key("", "weights; empty: the actor's as training starts"),
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
            "text behind which a step of a response ends, for a process reward model: its score of "
            "each step stands at the step's last token (rewards by token); `token`: every token is "
            "a step. Empty: one score, at the response's end",
        ),
        "offload": _offload(trained=False),
        "function": Key("", "`path.py:name`; empty: the task's or dataset's verifier"),
        "max_unscored": Key(
            0.05,
            "share of a step's sequences without a score above which the run stops",
            between(0, 1),
        ),
        "timeout_seconds": Key(
            60.0, "a step's reward call is given up after so many seconds", above(0)
        ),
        "runs_in": Key(
            "process",
            "where a function runs: in a process of its own, which is ended when a call is late, "
            "or in a thread of the run",
            one_of("process", "thread"),
        ),
        "while_generating": Key(
            False,
            "a function judges a prompt's answers as soon as all of them have ended, while others "
            "are generated: it is called several times a step, each with those that have ended "
            "meanwhile",
        ),
    },
    "cost": {
        "path": Key("", "weights of a cost model; empty: the function"),
        "offload": _offload(trained=False),
        "function": Key("", "`path.py:name` for the cost (Safe-RLHF); empty: the task's"),
    },
    "rollout": {
        "prompts": Key(
            16, "prompts per step (each answered `samples` times)", between(1, MOST)
        ),
        "samples": Key(
            4,
            "responses per prompt; prompts * samples sequences make the step's batch",
            between(1, MOST),
        ),
        "max_prompt_length": Key(0, "tokens; 0: the longest in the data", between(0, LONGEST)),
        "max_response_length": Key(
            0,
            "tokens, the end-of-sequence token included; 0: those of a built-in task's longest "
            f"answer, {RESPONSE_TOKENS} with data of your own",
            between(0, LONGEST),
        ),
        **OPTIONS,
        "temperature": Key(1.0, "of sampling; evaluation is greedy", above(0)),
        "slots": Key(
            0,
            "sequences that are generated at a time, others following as these end, so that less "
            "memory is needed for keys and values; 0: all of a step's; -1: as many as memory has "
            "room for",
            at_least(-1),
        ),
        "extra_samples": Key(
            0,
            "further responses to each prompt: when `samples` of them have ended the others are "
            "given up, so that none waits for the longest ones (the shortest are what is learned "
            "from, which is a bias); 0: none",
            at_least(0),
        ),
        "speculative_tokens": Key(
            0,
            "tokens that are guessed at a time from what a text said before, and looked at in one "
            "pass: the responses are the same, and come sooner where they repeat themselves or "
            "their prompt; 0: none",
            at_least(0),
        ),
        "cache_dtype": Key(
            "auto",
            "what keys and values are kept in while responses are generated: auto, the dtype of "
            "compute; int8, a byte each with a scale per token and head: half of bfloat16's memory "
            "and of what is read of it for a token. Responses are then those of a model that "
            "rounds keys and values, and so are their log-probs; learning's are not "
            "(rollout/token_prob_error, algorithm.correction)",
            one_of("auto", "int8"),
        ),
        "warn_prob_error": Key(
            1.1,
            "rollout/token_prob_error above which a run says once that the sampler's log-probs are "
            "not learning's; 0: never. Not looked at where older weights sample, or learning drops "
            "features of adapters",
            Rule("above 1, or 0 for never", lambda x: x == 0 or x > 1),
        ),
        "max_prob_error": Key(
            2.0,
            "rollout/token_prob_error above which a run stops; 0: never",
            Rule("above 1, or 0 for never", lambda x: x == 0 or x > 1),
        ),
        "max_staleness": Key(
            0,
            "versions of the weights by which a batch may lag behind those that learn from it: "
            "generation runs ahead of learning by so many steps. 0: it does not; above 0 "
            "generation needs devices apart (placement=disaggregate)",
            at_least(0),
        ),
        "deterministic": Key(
            False,
            "with max_staleness: which weights generate which batch is fixed beforehand, so that "
            "two runs are equal; otherwise the newest there are",
        ),
        "partial_tokens": Key(
            0,
            "with max_staleness: responses are generated in parts of so many tokens, each under "
            "the newest weights. 0: whole",
            at_least(0),
        ),
        "stop": Key(
            (),
            "texts that end a response, besides the end-of-sequence token. One of several tokens "
            "is looked for between dispatches where responses are drawn by slots; in one program, "
            "or in parts, they are drawn to their end and then cut behind it",
        ),
        "transition_bucket_bytes": Key(
            2**24,
            "parameters that go to the generate layout at a time, bytes per device (at least one "
            "array; one stacked over layers goes in slices): smaller needs less memory beside them",
            at_least(1),
        ),
    },
    "warm_start": {
        "steps": Key(
            0,
            "supervised updates on demonstrations before the first step; "
            "0, or a non-empty actor.path: none",
            at_least(0),
        ),
        "batch": Key(64, "demonstrations per update (sequences), also in SFT", at_least(1)),
        "learning_rate": Key(1e-3, "AdamW learning rate of the warm start", at_least(0)),
    },
    "eval": {
        "every": Key(
            20,
            "steps between evaluations; one stands before the first step and one after the "
            "last (of one step only the first stands in the metrics). 0: none",
            at_least(0),
        ),
        "prompts": Key(128, "held-out prompts per evaluation; 0: all", at_least(0)),
    },
    "checkpoint": {
        "every": Key(20, "steps between checkpoints; 0: only at the end", at_least(0)),
        "keep": Key(2, "newest checkpoints that stay", at_least(1)),
    },
    "placement": Key(
        "colocate",
        "which roles share devices: colocate (all on all), split (actor and reference on one "
        "half, critic and reward on the other), standalone (each its own), disaggregate "
        "(generation on one half, all else on the other), auto (the best by the cost model, "
        "docs/auto_mapping.md), or a plan.json; in it the role `rollout` generates apart",
    ),
    "layout": {name: _layout(role.generates and role.trained) for name, role in ROLES.items()},
    "cluster": {
        "address": Key(
            "",
            "Ray cluster to run on: auto, HOST:PORT, or local for one on this machine alone; empty "
            "with one process: no cluster, with several: local",
        ),
        "processes": Key(1, "host processes with devices, over all pools", at_least(1)),
        "devices_per_process": Key(
            0,
            "devices a process uses; 0: all, on a CPU one simulated per core, shared out over the "
            "processes",
            between(0, MAX_DEVICES),
        ),
        "reward_processes": Key(
            1, "processes of a cluster that share the calls of reward functions", at_least(1)
        ),
        "colocation_label": Key(
            "auto",
            "label of Ray's nodes whose value is the same for all hosts of a pool; auto: the slice "
            "on TPUs (ray.io/tpu-slice-name), none elsewhere; none: any hosts, on TPUs of one "
            "slice",
        ),
        "heartbeat_seconds": Key(
            30.0, "a process that gives no sign of life for so long counts as lost", above(0)
        ),
        "call_seconds": Key(
            7200.0,
            "a call of a model that takes longer counts as hanging, and its processes as lost",
            above(0),
        ),
        "max_restarts": Key(
            3, "lost processes are replaced so many times; then the run stops", at_least(0)
        ),
    },
    "display": {
        "enabled": Key(True, "progress on the terminal; errors are shown anyway"),
        "samples": Key(2, "sample responses shown at a time; 0: none", at_least(0)),
        "samples_every": Key(5, "steps between the samples shown", at_least(1)),
        "tensorboard": Key(True, "write TensorBoard events into the workdir"),
        "wandb": Key(
            "",
            "project of Weights & Biases that the run is logged to; WANDB_MODE=offline keeps it on "
            "this machine (pip install 'hjax[wandb]')",
        ),
        "logger": Key(
            "", "a class of your own that receives what is logged: path.py:Class (docs/logging.md)"
        ),
        "report": Key(True, "write report.html at the end"),
    },
}


def default_config() -> Config:
    """A new Config with every common key at its default.

    It is locked, so that a mistyped key fails at once, but for `config.algorithm` and
    `config.data.task_options`, whose keys belong to the algorithm and the task.
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
