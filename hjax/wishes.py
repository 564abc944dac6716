"""What users of TRL, verl, OpenRLHF and Tunix type, and what hjax has instead.

Each name is answered with the key that does it here, or with what is not built. Where a name means
different things in different libraries, the answer says what hjax counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from hjax.errors import ConfigError

_OPTIMIZER = "config.actor.optimizer (adamw, …); roles that learn have one each"
_RATE = "config.actor.learning_rate; roles that learn have one each"
_PROMPTS = "config.rollout.prompts, prompts per step, each answered config.rollout.samples times"
_MINIBATCH = "config.algorithm.minibatch, sequences per optimizer update (not prompts)"
_MICRO = (
    "config.actor.micro_batch, sequences per pass over all devices (not per device); gradients are "
    "accumulated over the mini-batch"
)
_SAMPLES = "config.rollout.samples, responses per prompt"
_LENGTH = "config.rollout.max_response_length, in tokens"
_PROMPT_LENGTH = "config.rollout.max_prompt_length; config.data.overlong says what longer ones do"
_STEPS = (
    "config.steps, one rollout of config.rollout.prompts and its updates each; an epoch is as many "
    "steps as the data has prompts over that (docs/data.md)"
)
_EPOCHS = "config.algorithm.epochs, passes over a step's batch"
_ACTOR = "config.actor.path, a Hugging Face directory or owner/name"
_REWARD = "config.reward.function=FILE.py:NAME (docs/rewards.md)"
_DATA = "config.data.path: jsonl, parquet or txt files, or a data set of Hugging Face's"
_EVAL_DATA = "config.data.eval_path, or a share of the data by config.data.eval_fraction"
_PROMPT_COLUMN = "config.data.columns, such as question=prompt"
_TEMPLATE = (
    "chats in the column `prompt` are rendered by the tokenizer's template with "
    "config.data.template_arguments; config.data.chat=True makes chats of texts"
)
_WORKDIR = "--workdir=DIR, where the run is kept; the same command goes on from there"
_LORA = "config.actor.lora.rank above 0 trains adapters (LoRA)"
_JUDGES_LORA = (
    "what judges learns nothing here; a run of reward_model.py, cost_model.py or "
    "process_reward_model.py trains one, with config.actor.lora.rank above 0 by adapters"
)
_CLIP = "config.algorithm.clip_low and config.algorithm.clip_high"
_KL = "config.algorithm.kl_coef (0 needs no reference)"
_ENTROPY = "config.algorithm.entropy_coef"
_TENSOR = (
    "config.layout.actor.train.tensor while it learns and config.layout.actor.generate.tensor "
    "while it generates"
)
_FSDP = "config.layout.actor.train.fsdp: parameters and optimizer state split over devices"
_REMAT = "config.model.remat: none, products, attention, full, offload or auto"
_ATTENTION = "config.model.attention: auto, by device and length, or cudnn (docs/models.md)"
_ENGINE = (
    "there is no second engine: the model's own forward generates, on the actor's devices or by "
    "config.placement=disaggregate on others"
)
_LOGGERS = (
    "metrics go to metrics.jsonl and TensorBoard; config.display.wandb=PROJECT and "
    "config.display.logger=FILE.py:CLASS send them elsewhere (docs/logging.md)"
)
_WANDB = "config.display.wandb=PROJECT (docs/logging.md)"
_DTYPE = "config.model.dtype: auto, float32 or bfloat16; parameters stay float32"
_DEVICES = "all devices that JAX finds; config.cluster.processes adds hosts (docs/cluster.md)"
_OFFLOAD = "config.actor.offload: none, optimizer or all"
_QUANTIZED = "config.actor.lora.base: int8 or fp8 keep the frozen matrices beside adapters so"
_PACKING = "config.data.packing, tokens of a pack; auto packs where that is worth it"
_SAVE = "config.checkpoint.every, in steps"
_EVAL = "config.eval.every, in steps"

# Name as it is typed, the last part of a dotted key or all of it -> what to say.
WISHES: Mapping[str, str] = {
    # Batches.
    "batch_size": f"{_PROMPTS}; {_MINIBATCH}",
    "train_batch_size": f"{_PROMPTS}; {_MINIBATCH}",
    "global_batch_size": f"{_PROMPTS}; {_MINIBATCH}",
    "data.train_batch_size": _PROMPTS,
    "rollout_batch_size": _PROMPTS,
    "gen_batch_size": _PROMPTS,
    "generation_batch_size": _PROMPTS,
    "num_prompts_per_step": _PROMPTS,
    "val_batch_size": "config.eval.prompts, held-out prompts per evaluation",
    "per_device_eval_batch_size": "config.eval.prompts, held-out prompts per evaluation",
    "mini_batch_size": _MINIBATCH,
    "minibatch_size": _MINIBATCH,
    "ppo_mini_batch_size": _MINIBATCH,
    "num_mini_batches": _MINIBATCH,
    "steps_per_generation": _MINIBATCH,
    "micro_batch_size": _MICRO,
    "per_device_train_batch_size": _MICRO,
    "gradient_accumulation_steps": _MICRO,
    "ppo_micro_batch_size": _MICRO,
    "ppo_micro_batch_size_per_gpu": _MICRO,
    "micro_train_batch_size": _MICRO,
    "train_micro_batch_size": _MICRO,
    "log_prob_micro_batch_size": _MICRO,
    "log_prob_micro_batch_size_per_gpu": _MICRO,
    "compute_logps_micro_batch_size": _MICRO,
    "micro_rollout_batch_size": "config.rollout.slots, sequences generated at a time",
    "rollout_micro_batch_size": "config.rollout.slots, sequences generated at a time",
    "max_num_seqs": "config.rollout.slots, sequences generated at a time",
    "max_num_batched_tokens": "config.rollout.slots, sequences generated at a time",
    "use_dynamic_bsz": _PACKING,
    "ppo_max_token_len_per_gpu": _PACKING,
    "packing_samples": _PACKING,
    "use_remove_padding": _PACKING,
    "group_by_length": _PACKING,
    "data.length_buckets": "packs do that now, config.data.packing",
    # Steps.
    "num_epochs": _STEPS,
    "num_train_epochs": _STEPS,
    "total_epochs": _STEPS,
    "num_episodes": _STEPS,
    "total_episodes": _STEPS,
    "max_steps": _STEPS,
    "num_steps": _STEPS,
    "num_batches": _STEPS,
    "total_training_steps": _STEPS,
    "max_epochs": _EPOCHS,
    "ppo_epochs": _EPOCHS,
    "num_ppo_epochs": _EPOCHS,
    "num_iterations": _EPOCHS,
    # Responses.
    "n": _SAMPLES,
    "num_generations": _SAMPLES,
    "num_return_sequences": _SAMPLES,
    "n_samples_per_prompt": _SAMPLES,
    "num_samples": _SAMPLES,
    "group_size": _SAMPLES,
    "max_tokens": _LENGTH,
    "max_new_tokens": _LENGTH,
    "max_completion_length": _LENGTH,
    "max_tokens_to_generate": _LENGTH,
    "response_length": _LENGTH,
    "generate_max_len": _LENGTH,
    "prompt_max_len": _PROMPT_LENGTH,
    "prompt_length": _PROMPT_LENGTH,
    "max_model_len": "config.model.max_length of a model from scratch; else the model's own",
    "max_len": "config.model.max_length of a model from scratch; else the model's own",
    "max_length": f"{_LENGTH}, and {_PROMPT_LENGTH}",
    "max_seq_length": f"{_LENGTH}, and {_PROMPT_LENGTH}",
    "kv_cache_size": "the cache is as large as prompts and responses need",
    "min_p": "config.rollout.min_p",
    "repetition_penalty": "config.rollout.repetition_penalty",
    "presence_penalty": "config.rollout.presence_penalty",
    "stop_strings": "config.rollout.stop, a tuple of strings",
    "stop_token": "config.rollout.stop, a tuple of strings",
    "do_sample": "config.rollout.temperature; evaluation is greedy",
    "async_train": "config.rollout.max_staleness with config.placement=disaggregate",
    "async_training": "config.rollout.max_staleness with config.placement=disaggregate",
    # Optimizer.
    "lr": _RATE,
    "learning_rate": _RATE,
    "actor_lr": _RATE,
    "actor_learning_rate": _RATE,
    "critic_learning_rate": "config.critic.learning_rate",
    "critic_lr": "config.critic.learning_rate",
    "optim": _OPTIMIZER,
    "optimizer": _OPTIMIZER,
    "actor_optimizer": _OPTIMIZER,
    "lr_scheduler_type": "config.actor.schedule: constant, cosine or linear",
    "lr_scheduler": "config.actor.schedule: constant, cosine or linear",
    "warmup_style": "config.actor.schedule: constant, cosine or linear",
    "warmup_ratio": "config.actor.warmup_steps, in optimizer updates",
    "lr_warmup_steps": "config.actor.warmup_steps, in optimizer updates",
    "lr_warmup_steps_ratio": "config.actor.warmup_steps, in optimizer updates",
    "lr_warmup_ratio": "config.actor.warmup_steps, in optimizer updates",
    "critic_warmup": "config.actor.frozen_steps: the critic learns alone",
    "freezing_actor_steps": "config.actor.frozen_steps: the critic learns alone",
    "adam_beta1": "config.actor.beta1",
    "adam_beta2": "config.actor.beta2",
    "adam_betas": "config.actor.beta1 and config.actor.beta2",
    "betas": "config.actor.beta1 and config.actor.beta2",
    "l2": "config.actor.weight_decay",
    "grad_clip": "config.actor.max_grad_norm",
    "max_norm": "config.actor.max_grad_norm",
    # The algorithm.
    "adv_estimator": "config.algorithm.name: PPO, GRPO, RLOO, ReMax, … (docs/losses.md)",
    "advantage_estimator": "config.algorithm.name: PPO, GRPO, RLOO, ReMax, … (docs/losses.md)",
    "algorithm.type": "config.algorithm.name: PPO, GRPO, RLOO, ReMax, … (docs/losses.md)",
    "beta": f"{_KL}; of DPO and its kin config.algorithm.beta",
    "kl_beta": _KL,
    "init_kl_coef": _KL,
    "kl_loss_coef": f"{_KL} with config.algorithm.kl_in=loss",
    "use_kl_loss": "config.algorithm.kl_in=loss",
    "use_kl_in_reward": "config.algorithm.kl_in=reward",
    "kl_penalty": "config.algorithm.kl_estimator of a KL in the loss; in the reward it is k1",
    "kl_loss_type": "config.algorithm.kl_estimator of a KL in the loss; in the reward it is k1",
    "kl_ctrl": f"{_KL}, config.algorithm.kl_target and kl_horizon",
    "target_kl": "config.algorithm.kl_target",
    "horizon": "config.algorithm.kl_horizon, in sequences",
    "clip_range": _CLIP,
    "cliprange": _CLIP,
    "clip_eps": _CLIP,
    "eps_clip": _CLIP,
    "clip_ratio": _CLIP,
    "epsilon": _CLIP,
    "epsilon_low": "config.algorithm.clip_low",
    "clip_ratio_low": "config.algorithm.clip_low",
    "eps_clip_low": "config.algorithm.clip_low",
    "epsilon_high": "config.algorithm.clip_high",
    "clip_ratio_high": "config.algorithm.clip_high",
    "eps_clip_high": "config.algorithm.clip_high",
    "clip_ratio_c": "config.algorithm.dual_clip",
    "delta": "config.algorithm.dual_clip",
    "cliprange_value": "config.algorithm.value_clip of PPO",
    "value_clip_range": "config.algorithm.value_clip of PPO",
    "vf_coef": "the critic has its own optimizer: config.critic.learning_rate weighs its loss",
    "gae_lambda": "config.algorithm.lam of PPO",
    "lambd": "config.algorithm.lam of PPO",
    "entropy_coeff": _ENTROPY,
    "entropy_loss_coef": _ENTROPY,
    "ent_coef": _ENTROPY,
    "loss_type": "config.algorithm.aggregation, or a class by config.algorithm.name",
    "loss_agg_mode": "config.algorithm.aggregation",
    "policy_loss_type": "config.algorithm.ratio and config.algorithm.surrogate",
    "importance_sampling_level": "config.algorithm.ratio of GRPO: token, sequence (GSPO), …",
    "loss_mode": "config.algorithm.ratio and config.algorithm.surrogate of GRPO",
    "scale_rewards": "config.algorithm.normalise of GRPO: std, mean or none",
    "norm_adv_by_std_in_grpo": "config.algorithm.normalise of GRPO: std, mean or none",
    "no_advantage_std_norm": "config.algorithm.normalise of GRPO: std, mean or none",
    "whiten_rewards": "config.algorithm.whiten",
    "normalize_reward": "config.algorithm.whiten",
    "mask_truncated_completions": "config.algorithm.mask_truncated",
    "filter_groups": "config.algorithm.resample of GRPO draws such groups anew; filter leaves them",
    "dynamic_filtering": "config.algorithm.resample of GRPO draws such groups anew",
    "dynamic_sampling": "config.algorithm.resample of GRPO draws such groups anew",
    "overlong_buffer": "config.algorithm.overlong and config.algorithm.overlong_penalty",
    "soft_overlong": "config.algorithm.overlong and config.algorithm.overlong_penalty",
    "reward_clip_range": "config.algorithm.reward_clip",
    "tis_imp_ratio_cap": "config.algorithm.correction=truncated and correction_cap",
    "vllm_importance_sampling_correction": "config.algorithm.correction=truncated",
    "rollout_correction": "config.algorithm.correction",
    # Models.
    "model_name_or_path": _ACTOR,
    "model_name": _ACTOR,
    "model_id": _ACTOR,
    "pretrain": _ACTOR,
    "policy_model": _ACTOR,
    "model.path": _ACTOR,
    "ref_model": "config.reference.path; empty: the actor's weights as training starts",
    "ref_pretrain": "config.reference.path; empty: the actor's weights as training starts",
    "sync_ref_model": "a reference that follows the actor is not built",
    "ref_model_sync_steps": "a reference that follows the actor is not built",
    "critic_pretrain": "config.critic.path; empty: the actor's weights",
    "value_model": "config.critic.path; empty: the actor's weights",
    "reward_model": f"config.reward.path, weights of a reward model; or {_REWARD}",
    "reward_pretrain": f"config.reward.path, weights of a reward model; or {_REWARD}",
    "reward_model_path": f"config.reward.path, weights of a reward model; or {_REWARD}",
    "reward_funcs": _REWARD,
    "reward_fn": _REWARD,
    "reward_fns": _REWARD,
    "custom_reward_function": _REWARD,
    "remote_rm_url": f"a function may ask a server: {_REWARD}",
    "reward_weights": "a function may return several rewards by name; config.algorithm.weights "
    "of GDPO weighs them",
    "tokenizer_name": "config.tokenizer.path; empty: the actor's",
    "processing_class": "config.tokenizer.path; empty: the actor's",
    "lora": _LORA,
    "use_lora": _LORA,
    "use_peft": _LORA,
    "peft_config": _LORA,
    "lora_r": "config.actor.lora.rank",
    "lora_rank": "config.actor.lora.rank",
    "lora_alpha": "config.actor.lora.alpha",
    "lora_dropout": "config.actor.lora.dropout",
    "lora_target_modules": "config.actor.lora.targets: all, or some of q, k, v, o, gate, up, down",
    "target_modules": "config.actor.lora.targets: all, or some of q, k, v, o, gate, up, down",
    "reference.lora": "a reference learns nothing: it is the actor with its adapters left off",
    "reward.lora": _JUDGES_LORA,
    "cost.lora": _JUDGES_LORA,
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": f"4 bits are not built; {_QUANTIZED}",
    "quantization": _QUANTIZED,
    "gradient_checkpointing": _REMAT,
    "enable_gradient_checkpointing": _REMAT,
    "enable_activation_offload": _REMAT,
    "remat_policy": _REMAT,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "torch_dtype": _DTYPE,
    "mixed_precision": _DTYPE,
    "param_dtype": _DTYPE,
    "fp8_kv_cache": "config.rollout.cache_dtype: auto or int8",
    "kv_cache_dtype": "config.rollout.cache_dtype: auto or int8",
    "attn_implementation": _ATTENTION,
    "flash_attn": _ATTENTION,
    "flash_attention": _ATTENTION,
    "use_liger_kernel": "nothing to set: log-probs never hold all logits",
    "torch_compile": "nothing to set: every program is compiled by XLA",
    "use_torch_compile": "nothing to set: every program is compiled by XLA",
    "disable_dropout": "models have no dropout but config.actor.lora.dropout",
    # Where it runs.
    "vllm": _ENGINE,
    "use_vllm": _ENGINE,
    "vllm_mode": _ENGINE,
    "vllm_num_engines": _ENGINE,
    "sglang": _ENGINE,
    "rollout_engine": _ENGINE,
    "rollout.name": _ENGINE,
    "enforce_eager": _ENGINE,
    "gpu_memory_utilization": "config.rollout.slots=-1: as many sequences as memory has room for",
    "vllm_gpu_memory_utilization": "config.rollout.slots=-1: as many as memory has room for",
    "tensor_parallel_size": _TENSOR,
    "tensor_model_parallel_size": _TENSOR,
    "vllm_tensor_parallel_size": _TENSOR,
    "pipeline_model_parallel_size": "config.layout.actor.train.pipe",
    "ulysses_sequence_parallel_size": "config.layout.actor.train.context",
    "ring_attn_size": "config.layout.actor.train.context",
    "expert_model_parallel_size": "config.layout.actor.train.expert",
    "mesh": "config.layout.<role>.train and .generate: data, fsdp, pipe, tensor, context, expert",
    "role_to_mesh": "config.placement and config.layout.<role> say where roles stand",
    "cluster_config": "config.placement and config.layout.<role> say where roles stand",
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "strategy": f"config.placement and {_FSDP}",
    "deepspeed": _FSDP,
    "zero_stage": _FSDP,
    "param_offload": _OFFLOAD,
    "optimizer_offload": _OFFLOAD,
    "adam_offload": _OFFLOAD,
    "offload_to_cpu": _OFFLOAD,
    "colocate_all_models": "config.placement=colocate, the default",
    "colocate_actor_ref": "config.placement=split",
    "n_gpus_per_node": _DEVICES,
    "nnodes": _DEVICES,
    "num_processes": _DEVICES,
    "actor_num_gpus_per_node": _DEVICES,
    "use_cpu": "JAX_PLATFORMS=cpu in the environment",
    "device": "JAX_PLATFORMS=cpu in the environment chooses the CPU",
    # Data.
    "train_files": _DATA,
    "train_dataset": _DATA,
    "train_data": _DATA,
    "dataset": _DATA,
    "dataset_name": _DATA,
    "dataset_path": _DATA,
    "prompt_data": _DATA,
    "val_files": _EVAL_DATA,
    "eval_dataset": _EVAL_DATA,
    "val_data": _EVAL_DATA,
    "dataset_split": "a data set of Hugging Face's is named with its split: owner/name:split",
    "prompt_data_probs": "config.data.weights, by `data_source`",
    "prompt_key": _PROMPT_COLUMN,
    "input_key": _PROMPT_COLUMN,
    "dataset_text_field": _PROMPT_COLUMN,
    "label_key": "a reward function gets every column by its name; config.data.columns renames",
    "reward_fn_key": "a reward function gets every column by its name; config.data.columns renames",
    "apply_chat_template": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "apply_chat_template_kwargs": _TEMPLATE,
    "input_template": _TEMPLATE,
    "chat_template": "a chat_template.jinja beside the tokenizer's tokenizer.json",
    "system_prompt": "config.data.system with config.data.chat=True",
    "truncation": "config.data.overlong: error, filter or truncate_left",
    "truncation_side": "config.data.overlong: error, filter or truncate_left",
    "filter_overlong_prompts": "config.data.overlong=filter",
    "max_prompt_tokens": _PROMPT_LENGTH,
    "shuffle": "prompts are shuffled anew in each epoch, by config.seed",
    "shuffle_dataset": "prompts are shuffled anew in each epoch, by config.seed",
    "data_seed": "config.seed",
    "max_samples": "the file's rows all count; cut the file",
    "train_max_samples": "the file's rows all count; cut the file",
    # What is written.
    "output_dir": _WORKDIR,
    "save_path": _WORKDIR,
    "ckpt_path": _WORKDIR,
    "default_local_dir": _WORKDIR,
    "checkpoint_root_directory": _WORKDIR,
    "run_name": _WORKDIR,
    "experiment_name": _WORKDIR,
    "project_name": _WORKDIR,
    "resume_from_checkpoint": _WORKDIR,
    "resume_mode": _WORKDIR,
    "load_checkpoint": _WORKDIR,
    "overwrite_output_dir": "--overwrite starts a run anew where one is",
    "save_steps": _SAVE,
    "save_freq": _SAVE,
    "save_interval_steps": _SAVE,
    "save_total_limit": "config.checkpoint.keep",
    "max_to_keep": "config.checkpoint.keep",
    "max_ckpt_num": "config.checkpoint.keep",
    "save_strategy": _SAVE,
    "load_best_model_at_end": "the newest checkpoints stay; one chosen by a metric is not built",
    "push_to_hub": "python -m hjax.launch.export writes a Hugging Face directory to push",
    "eval_steps": _EVAL,
    "eval_strategy": _EVAL,
    "eval_every_n_steps": _EVAL,
    "evaluation_strategy": _EVAL,
    "test_freq": _EVAL,
    "logging_steps": "every step is a row of metrics.jsonl",
    "logging_dir": _WORKDIR,
    "logger": _LOGGERS,
    "report_to": _LOGGERS,
    "wandb": _WANDB,
    "use_wandb": _WANDB,
    "wandb_project": _WANDB,
    "use_tensorboard": "config.display.tensorboard, on by default",
    "log_completions": "config.display.samples; samples.jsonl has some of every step",
    "num_completions_to_print": "config.display.samples",
    "disable_tqdm": "config.display.enabled=False",
    "callbacks": "a loop of your own: trainer.step() returns a step's metrics",
}
# The same of arguments of `model.generate`, and of names that are looked for in `hjax`.
ARGUMENTS: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "n": "give a prompt as often as it is to be answered: prompts * n",
    "num_return_sequences": "give a prompt as often as it is to be answered: prompts * n",
    "do_sample": "temperature=0 is greedy",
    "stop_strings": "stop",
    "stop_token_ids": "stop",
    "eos_token_id": "stop",
    "sampling_params": "its fields are arguments: temperature, top_p, min_p, seed, stop, ...",
    "generation_config": "its fields are arguments: temperature, top_p, min_p, seed, stop, ...",
    "logprobs": "each answer has logprobs",
    "input_ids": "prompts, which may be lists of token ids",
    "messages": "prompts, which may be lists of chat messages",
    "echo": "log_probs(texts) scores a prompt",
    "num_beams": "beam search is not built",
    "bad_words_ids": "logit_bias={ID: -100}",
}
NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("GRPOTrainer", "PPOTrainer", "DPOTrainer", "RLOOTrainer", "SFTTrainer", "RLCluster"),
        "hjax.Trainer(hjax.get_config(NAME)), with the algorithm in the config",
    ),
    **dict.fromkeys(
        ("GRPOConfig", "PPOConfig", "DPOConfig", "SFTConfig", "TrainingArguments", "Config"),
        "hjax.get_config(NAME, {KEY: VALUE, ...})",
    ),
    "train": "hjax.Trainer(config).run()",
    "LLM": "hjax.load_model(PATH)",
    "AutoModelForCausalLM": "hjax.load_model(PATH)",
    "LoraConfig": "config.actor.lora",
    "SamplingParams": "arguments of model.generate",
}


def refuse_arguments(function: str, unknown: Mapping[str, object]) -> None:
    """Say what there is for arguments that a function does not take.

    Raises:
      ConfigError: there are some.
    """
    for name in unknown:
        said = ARGUMENTS.get(name, f"help(model.{function}) lists what there is")
        raise ConfigError(f"{function} has no argument {name!r}: {said}")


# Roles whose keys are called as the actor's.
_LEARNING = ("critic",)


def wish(name: str) -> str | None:
    """What hjax has for a name of another library's; None: the name is not known.

    Args:
      name: as it was typed, with or without dashes and dots.
    """
    name = name.strip("-").replace("-", "_").removeprefix("config.")
    parts = name.lower().split(".")
    # The longest end of the name that is known, else a beginning (a section of theirs).
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    starts = [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
    found = next((WISHES[part] for part in (*ends, *starts) if part in WISHES), "")
    if parts[0] in _LEARNING:
        found = found.replace("config.actor.", f"config.{parts[0]}.")
    return found or None
