"""What users of TRL, verl, SkyRL, OpenRLHF, Tunix and others type, and what hjax has instead.

Each name is answered with the key that does it here, or with what is not built. Where a name means
different things in different libraries, the answer says what hjax counts.
"""

from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError

_PROMPTS = "config.rollout.prompts, prompts per step, each answered config.rollout.samples times"
_MINIBATCH = "config.algorithm.minibatch, sequences per optimizer update (not prompts)"
_LENGTH = "config.rollout.max_response_length, in tokens"
_PROMPT_LENGTH = "config.rollout.max_prompt_length; config.data.overlong says what longer ones do"
_KL = "config.algorithm.kl_coef (0 needs no reference)"
_REWARD = "config.reward.function=FILE.py:NAME (docs/rewards.md)"
_QUANTIZED = "config.actor.lora.base: int8 or fp8 keep the frozen matrices beside adapters so"
_ENVIRONMENT = "config.environment.function=FILE.py:CLASS (docs/agents.md)"
_FSDP = "config.layout.actor.train.fsdp: parameters and optimizer state split over devices"


def _by_name(said: Mapping[str, str]) -> dict[str, str]:
    """What is said of several names, by each of them."""
    return {name: text for names, text in said.items() for name in names.split()}


# Names as they are typed, the last part of a dotted key or all of it -> what to say.
WISHES: Mapping[str, str] = _by_name({
    # Batches.
    "batch_size train_batch_size global_batch_size": f"{_PROMPTS}; {_MINIBATCH}",
    "data.train_batch_size rollout_batch_size gen_batch_size generation_batch_size "
    "num_prompts_per_step": _PROMPTS,
    "val_kwargs.n eval.rollouts_per_example eval_n_samples_per_prompt n_samples_per_eval_prompt "
    "num_eval_samples":
        "config.eval.samples, sampled answers per held-out prompt",
    "val_batch_size per_device_eval_batch_size num_examples":
        "config.eval.prompts, held-out prompts per evaluation",
    "mini_batch_size minibatch_size ppo_mini_batch_size num_mini_batches steps_per_generation":
        _MINIBATCH,
    "micro_batch_size per_device_train_batch_size gradient_accumulation_steps "
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size "
    "train_micro_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
    "compute_logps_micro_batch_size":
        "config.actor.micro_batch, sequences per pass over all devices (not per device); gradients "
        "are accumulated over the mini-batch",
    "micro_rollout_batch_size rollout_micro_batch_size max_num_seqs max_num_batched_tokens":
        "config.rollout.slots, sequences generated at a time",
    "use_dynamic_bsz ppo_max_token_len_per_gpu packing_samples use_remove_padding "
    "group_by_length": "config.data.packing, tokens of a pack; auto packs where that is worth it",
    "data.length_buckets": "packs do that now, config.data.packing",
    # Steps.
    "num_epochs num_train_epochs total_epochs num_episodes total_episodes max_steps "
    "num_steps num_batches total_training_steps":
        "config.steps, one rollout of config.rollout.prompts and its updates each; an epoch is as "
        "many steps as the data has prompts over that (docs/data.md)",
    "max_epochs ppo_epochs num_ppo_epochs num_iterations":
        "config.algorithm.epochs, passes over a step's batch",
    # Responses.
    "n num_generations num_return_sequences n_samples_per_prompt num_samples group_size "
    "rollouts_per_example":
        "config.rollout.samples, responses per prompt",
    "max_tokens max_new_tokens max_completion_length max_completion_tokens max_tokens_to_generate "
    "response_length "
    "generate_max_len": _LENGTH,
    "prompt_max_len prompt_length max_prompt_tokens": _PROMPT_LENGTH,
    "max_model_len max_len":
        "config.model.max_length of a model from scratch; else the model's own",
    "max_generate_length": f"{_LENGTH}; of one turn config.environment.turn_tokens",
    "max_length max_seq_length seq_len": f"{_LENGTH}, and {_PROMPT_LENGTH}",
    "kv_cache_size": "the cache is as large as prompts and responses need",
    "min_p": "config.rollout.min_p",
    "repetition_penalty": "config.rollout.repetition_penalty",
    "presence_penalty": "config.rollout.presence_penalty",
    "stop_strings stop_token": "config.rollout.stop, a tuple of strings",
    "do_sample": "config.rollout.temperature; evaluation is greedy",
    "oversampling_factor over_sample_rate": "config.rollout.extra_samples, of single responses",
    "async_train async_training max_async_level max_off_policy_steps max_staleness_steps":
        "config.rollout.max_staleness with config.placement=disaggregate",
    # Episodes of many turns.
    "environment_factory env_class env_name env multi_turn multi_turn.enable "
    "orchestrator.env orchestrator.eval.env orchestrator.train.env orchestrator.train.source":
        f"{_ENVIRONMENT}, played once for each sample of a row of config.data.path",
    "tools tool_config_path":
        "config.environment.tools=FILE.py:NAME,..., what the policy may call (docs/agents.md)",
    "env.seed": "config.seed, from which each episode's seed follows",
    "interaction_config_path completion_callback":
        f"what the user says is an environment's observation: {_ENVIRONMENT}",
    "agent_loop_config_path default_agent_loop agent_func_path rollout_func agent_framework "
    "workflow custom_generate_function_path":
        "config.agent.function=FILE.py:NAME, a program that calls the policy by OpenAI's API; or "
        f"an environment that answers its turns: {_ENVIRONMENT}",
    "session_timeout agent_timeout rollout_timeout": "config.agent.seconds, deadline of a session",
    "max_concurrent max_concurrent_rollouts max_concurrent_sessions max_inflight_rollouts":
        "config.agent.concurrent; all episodes of an environment are open at once",
    "max_turns max_user_turns max_assistant_turns max_tool_calling_iterations max_rollout_turns "
    "agent_max_steps agent.max_steps env.max_steps":
        "config.environment.max_turns, turns of the policy in an episode",
    "max_input_length":
        f"{_LENGTH}: in an episode all that follows the first observation, turns and observations",
    "max_tool_response_length tool_response_truncate_side":
        "an environment cuts its observations itself; they count in "
        "config.rollout.max_response_length",
    "max_parallel_calls multi_turn.format":
        "a turn is text, and an environment reads from it as many calls as it likes, in any form",
    "use_conversation_multi_turn":
        "config.data.chat=True: an observation is a user's message; False: it follows the turn as "
        "it is",
    "use_inference_chat_template tokenization_sanity_check_mode":
        "nothing to set: tokens that were drawn are never decoded and encoded again",
    "trajectory_strategy step_wise_trajectories env.history_length":
        "nothing to set: an episode is one row as long as observations follow its turns, and "
        "several where one replaces the history, Step(fresh=True) (docs/agents.md)",
    "append_eos_token_after_stop_str_in_multi_turn":
        "nothing to set: an end of turn that was not drawn is written behind it and not learned",
    "zero_reward_on_non_stop apply_overlong_filtering mask_truncated_samples":
        "config.algorithm.mask_truncated leaves out what max_turns or a full row has ended",
    "tool_call_parser enable_auto_tool_choice":
        "nothing to set: calls are read in the form that the chat template writes, with "
        "config.environment.tools",
    "sandbox_fusion.url sandbox_fusion_url sandbox_url code_executor":
        "config.sandbox.function, a class that runs programs elsewhere (docs/security.md)",
    "max_env_workers agent.num_workers": "config.environment.processes",
    "episode_timeout trajectory_timeout":
        "config.environment.step_seconds, deadline of each call of an environment",
    "gae_timestep_unit": "config.algorithm.credit of PPO: token, turn or bilevel",
    "high_level_gamma":
        "config.algorithm.turn_gamma of PPO, with config.algorithm.credit=bilevel",
    "turn_discount rllm.stepwise_advantage":
        "config.algorithm.turn_discount of GRPO: turns compared with turns; without it all turns "
        "have the advantage of the episode's return",
    "step_advantage_w": "config.algorithm.step_weight of GiGPO",
    "gigpo.mode": "config.algorithm.normalise of GiGPO: std or none",
    "similarity_thresh enable_similarity":
        "nothing to set: states are equal where Observation.anchor is, by value",
    "use_invalid_action_penalty invalid_action_penalty_coef":
        "config.algorithm.invalid_penalty of GiGPO",
    # Optimizer.
    "lr learning_rate actor_lr actor_learning_rate":
        "config.actor.learning_rate; roles that learn have one each",
    "critic_learning_rate critic_lr": "config.critic.learning_rate",
    "optim optimizer actor_optimizer":
        "config.actor.optimizer (adamw, …); roles that learn have one each",
    "lr_scheduler_type lr_scheduler warmup_style":
        "config.actor.schedule: constant, cosine or linear",
    "lr_warmup_steps": "config.actor.warmup_updates, in optimizer updates",
    "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio":
        "config.actor.warmup_ratio, a share of all optimizer updates",
    "min_lr_ratio min_lr_rate cosine_min_lr_ratio":
        "config.actor.min_lr_ratio, the learning rate at the schedule's end over its peak",
    "min_lr": "config.actor.min_lr_ratio, a share of the peak learning rate",
    "critic_warmup freezing_actor_steps": "config.actor.frozen_updates: the critic learns alone",
    "adam_beta1": "config.actor.beta1",
    "adam_beta2": "config.actor.beta2",
    "adam_betas betas": "config.actor.beta1 and config.actor.beta2",
    "l2": "config.actor.weight_decay",
    "grad_clip max_norm": "config.actor.max_grad_norm",
    # The algorithm.
    "adv_estimator advantage_estimator algorithm.type":
        "config.algorithm.name: PPO, GRPO, RLOO, ReMax, … (docs/losses.md)",
    "beta": f"{_KL}; of DPO and its kin config.algorithm.beta",
    "kl_beta init_kl_coef": _KL,
    "kl_loss_coef": f"{_KL} with config.algorithm.kl_in=loss",
    "use_kl_loss": "config.algorithm.kl_in=loss",
    "use_kl_in_reward": "config.algorithm.kl_in=reward",
    "kl_penalty kl_loss_type":
        "config.algorithm.kl_estimator of a KL in the loss; in the reward it is k1",
    "use_bias_correction_kl unbiased_kl":
        "config.algorithm.kl_importance=True, with kl_estimator=k3 and kl_in=loss",
    "kl_ctrl": f"{_KL}, config.algorithm.kl_target and kl_horizon",
    "target_kl": "config.algorithm.kl_target",
    "horizon": "config.algorithm.kl_horizon, in sequences",
    "clip_range cliprange clip_eps eps_clip clip_ratio epsilon":
        "config.algorithm.clip_low and config.algorithm.clip_high",
    "epsilon_low clip_ratio_low eps_clip_low": "config.algorithm.clip_low",
    "epsilon_high clip_ratio_high eps_clip_high": "config.algorithm.clip_high",
    "clip_ratio_c delta": "config.algorithm.dual_clip",
    "cliprange_value value_clip_range": "config.algorithm.value_clip of PPO",
    "vf_coef": "the critic has its own optimizer: config.critic.learning_rate weighs its loss",
    "gae_lambda lambd": "config.algorithm.lam of PPO",
    "entropy_coeff entropy_loss_coef ent_coef": "config.algorithm.entropy_coef",
    "loss_type": "config.algorithm.aggregation, or a class by config.algorithm.name",
    "loss_agg_mode": "config.algorithm.aggregation",
    "policy_loss_type": "config.algorithm.ratio and config.algorithm.surrogate",
    "importance_sampling_level": "config.algorithm.ratio of GRPO: token, sequence (GSPO), …",
    "loss_mode": "config.algorithm.ratio and config.algorithm.surrogate of GRPO",
    "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm":
        "config.algorithm.normalise of GRPO: std, mean or none",
    "whiten_rewards normalize_reward": "config.algorithm.whiten",
    "mask_truncated_completions": "config.algorithm.mask_truncated",
    "zero_variance_filter": "config.algorithm.filter of GRPO",
    "online_difficulty_filtering easy_threshold hard_threshold":
        "config.algorithm.difficulty, two bounds of a prompt's average reward",
    "filter_groups": "config.algorithm.resample of GRPO draws such groups anew; filter leaves them",
    "dynamic_filtering dynamic_sampling":
        "config.algorithm.resample of GRPO draws such groups anew",
    "overlong_buffer soft_overlong":
        "config.algorithm.overlong_buffer and config.algorithm.overlong_penalty",
    "reward_clip_range": "config.algorithm.reward_clip",
    "tis_imp_ratio_cap": "config.algorithm.correction=truncated and correction_cap",
    "vllm_importance_sampling_correction": "config.algorithm.correction=truncated",
    "rollout_correction": "config.algorithm.correction",
    # Models.
    "model_name_or_path model_name model_id pretrain policy_model model.path":
        "config.actor.path, a Hugging Face directory or owner/name",
    "ref_model ref_pretrain":
        "config.reference.path; empty: the actor's weights as training starts",
    "sync_ref_model ref_model_sync_steps": "a reference that follows the actor is not built",
    "critic_pretrain value_model": "config.critic.path; empty: the actor's weights",
    "reward_model reward_pretrain reward_model_path":
        f"config.reward.path, weights of a reward model; or {_REWARD}",
    "reward_funcs reward_fn reward_fns custom_reward_function": _REWARD,
    "remote_rm_url": f"a function may ask a server: {_REWARD}",
    "reward_weights":
        "a function may return several rewards by name; config.algorithm.weights of GDPO weighs "
        "them",
    "tokenizer_name processing_class": "config.tokenizer.path; empty: the actor's",
    "lora use_lora use_peft peft_config": "config.actor.lora.rank above 0 trains adapters (LoRA)",
    "lora_r lora_rank": "config.actor.lora.rank",
    "lora_alpha": "config.actor.lora.alpha",
    "lora_dropout": "config.actor.lora.dropout",
    "lora_target_modules target_modules":
        "config.actor.lora.targets: all, or some of q, k, v, o, gate, up, down",
    "reference.lora": "a reference learns nothing: it is the actor with its adapters left off",
    "reward.lora cost.lora":
        "what judges learns nothing here; a run of reward_model.py, cost_model.py or "
        "process_reward_model.py trains one, with config.actor.lora.rank above 0 by adapters",
    "load_in_8bit quantization": _QUANTIZED,
    "load_in_4bit": f"4 bits are not built; {_QUANTIZED}",
    "gradient_checkpointing enable_gradient_checkpointing enable_activation_offload "
    "remat_policy": "config.model.remat: none, products, attention, full, offload or auto",
    "bf16 fp16 torch_dtype mixed_precision param_dtype":
        "config.model.dtype: auto, float32 or bfloat16; parameters stay float32",
    "fp8_kv_cache kv_cache_dtype": "config.rollout.cache_dtype: auto or int8",
    "attn_implementation flash_attn flash_attention":
        "config.model.attention: auto, by device and length, or cudnn (docs/models.md)",
    "use_liger_kernel": "nothing to set: log-probs never hold all logits",
    "torch_compile use_torch_compile": "nothing to set: every program is compiled by XLA",
    "disable_dropout": "models have no dropout but config.actor.lora.dropout",
    # Where it runs.
    "vllm use_vllm vllm_mode rollout.mode async_engine vllm_num_engines sglang "
    "rollout_engine rollout.name enforce_eager":
        "there is no second engine: the model's own forward generates, on the actor's devices or "
        "by config.placement=disaggregate on others",
    "gpu_memory_utilization": "config.rollout.slots=-1: as many sequences as memory has room for",
    "vllm_gpu_memory_utilization": "config.rollout.slots=-1: as many as memory has room for",
    "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size":
        "config.layout.actor.train.tensor while it learns and config.layout.actor.generate.tensor "
        "while it generates",
    "pipeline_model_parallel_size": "config.layout.actor.train.pipe",
    "ulysses_sequence_parallel_size ring_attn_size": "config.layout.actor.train.context",
    "expert_model_parallel_size": "config.layout.actor.train.expert",
    "mesh": "config.layout.<role>.train and .generate: data, fsdp, pipe, tensor, context, expert",
    "role_to_mesh cluster_config":
        "config.placement and config.layout.<role> say where roles stand",
    "fsdp fsdp_config deepspeed zero_stage": _FSDP,
    "strategy": f"config.placement and {_FSDP}",
    "param_offload optimizer_offload adam_offload offload_to_cpu":
        "config.actor.offload: none, optimizer or all",
    "colocate_all_models": "config.placement=colocate, the default",
    "colocate_actor_ref": "config.placement=split",
    "n_gpus_per_node nnodes num_processes actor_num_gpus_per_node":
        "all devices that JAX finds; config.cluster.processes adds hosts (docs/cluster.md)",
    "use_cpu": "JAX_PLATFORMS=cpu in the environment",
    "device": "JAX_PLATFORMS=cpu in the environment chooses the CPU",
    # Data.
    "train_files train_dataset train_data dataset dataset_name dataset_path prompt_data":
        "config.data.path: jsonl, json, csv, parquet or txt files, or a data set of Hugging Face's",
    "val_files eval_dataset val_data":
        "config.data.eval_path, or a share of the data by config.data.eval_fraction",
    "dataset_split": "a data set of Hugging Face's is named with its split: owner/name:split",
    "prompt_data_probs dataset_mixer dataset_mixture interleave_probs mix_strategy "
    "env_ratios":
        "config.data.mixture=NAME=FILE*WEIGHT,..., or config.data.weights by the column "
        "`data_source`",
    "prompt_key input_key dataset_text_field": "config.data.columns, such as question=prompt",
    "label_key reward_fn_key":
        "a reward function gets every column by its name; config.data.columns renames",
    "return_raw_chat apply_chat_template chat_template_kwargs apply_chat_template_kwargs "
    "input_template":
        "chats in the column `prompt` are rendered by the tokenizer's template with "
        "config.data.template_arguments; config.data.chat=True makes chats of texts",
    "chat_template": "a chat_template.jinja beside the tokenizer's tokenizer.json",
    "system_prompt": "config.data.system, for chats and with config.data.chat=True for texts",
    "truncation truncation_side": "config.data.overlong: error, filter or truncate_left",
    "filter_overlong_prompts": "config.data.overlong=filter",
    "shuffle shuffle_dataset": "prompts are shuffled anew in each epoch, by config.seed",
    "data_seed": "config.seed",
    "max_samples train_max_samples": "the file's rows all count; cut the file",
    # What is written.
    "output_dir save_path ckpt_path default_local_dir checkpoint_root_directory run_name "
    "experiment_name project_name resume_from_checkpoint resume_mode load_checkpoint "
    "logging_dir": "--workdir=DIR, where the run is kept; the same command goes on from there",
    "overwrite_output_dir": "--overwrite starts a run anew where one is",
    "save_steps save_freq save_interval_steps save_strategy ckpt_interval":
        "config.checkpoint.every, in steps",
    "save_total_limit max_to_keep max_ckpt_num": "config.checkpoint.keep",
    "load_best_model_at_end metric_for_best_model best_metric_key":
        "config.checkpoint.best=METRIC keeps the best checkpoint too, WORKDIR/checkpoints/best",
    "sync_ref_model ref_model_sync_steps reset_reference ref_update_steps":
        "config.reference.sync_every, in steps",
    "ref_model_mixup_alpha ref_ema":
        "config.reference.sync_share, with config.reference.sync_every",
    "ema ema_beta use_ema beta_ema ema_rate ema_update_after_step":
        "config.actor.ema_decay, the share of the average that stays at an update",
    "rope_scaling override_config.rope_scaling hf_overrides.rope_scaling rope_type yarn_factor":
        "config.model.rope_scaling, a JSON object with the keys of transformers' rope_scaling",
    "greater_is_better": "config.checkpoint.best_mode, max or min",
    "push_to_hub": "python -m hjax.launch.export writes a Hugging Face directory to push",
    "eval_steps eval_strategy eval_every_n_steps evaluation_strategy test_freq eval_interval "
    "eval.interval":
        "config.eval.every, in steps",
    "logging_steps": "every step is a row of metrics.jsonl",
    "logger report_to":
        "metrics go to metrics.jsonl and TensorBoard; config.display.wandb=PROJECT and "
        "config.display.logger=FILE.py:CLASS send them elsewhere (docs/logging.md)",
    "wandb use_wandb wandb_project": "config.display.wandb=PROJECT (docs/logging.md)",
    "use_tensorboard": "config.display.tensorboard, on by default",
    "log_completions": "config.display.samples; samples.jsonl has some of every step",
    "num_completions_to_print": "config.display.samples",
    "disable_tqdm": "config.display.enabled=False",
    "callbacks": "a loop of your own: trainer.step() returns a step's metrics",
})  # fmt: skip
# Keys that had another name -> their name; `*` is any section. A config.json of before is read so.
RENAMED: Mapping[str, str] = {
    "*.frozen_steps": "frozen_updates",
    "*.warmup_steps": "warmup_updates",
    "algorithm.gate_negative": "tau_negative",
    "algorithm.gate_positive": "tau_positive",
    "algorithm.overlong": "overlong_buffer",
    "cluster.together": "colocation_label",
    "reward.steps": "step_separator",
    "rollout.lookup": "speculative_tokens",
    "rollout.surplus": "extra_samples",
}
# The same of arguments of `model.generate`, and of names that are looked for in `hjax`.
ARGUMENTS: Mapping[str, str] = _by_name({
    "max_tokens max_length max_completion_length": "max_new_tokens",
    "n num_return_sequences": "give a prompt as often as it is to be answered: prompts * n",
    "do_sample": "temperature=0 is greedy",
    "stop_strings stop_token_ids eos_token_id": "stop",
    "sampling_params generation_config":
        "its fields are arguments: temperature, top_p, min_p, seed, stop, ...",
    "logprobs": "each answer has logprobs",
    "input_ids": "prompts, which may be lists of token ids",
    "messages": "prompts, which may be lists of chat messages",
    "echo": "log_probs(texts) scores a prompt",
    "num_beams": "beam search is not built",
    "bad_words_ids": "logit_bias={ID: -100}",
})  # fmt: skip
NAMES: Mapping[str, str] = _by_name({
    "GRPOTrainer PPOTrainer DPOTrainer RLOOTrainer SFTTrainer RLCluster":
        "hjax.Trainer(hjax.get_config(NAME)), with the algorithm in the config",
    "GRPOConfig PPOConfig DPOConfig SFTConfig TrainingArguments Config":
        "hjax.get_config(NAME, {KEY: VALUE, ...})",
    "train": "hjax.Trainer(config).run()",
    "LLM AutoModelForCausalLM": "hjax.load_model(PATH)",
    "LoraConfig": "config.actor.lora",
    "SamplingParams": "arguments of model.generate",
    "Env BaseTextEnv BaseTaskEnv MultiTurnEnv ToolEnv BaseInteraction AgentLoopBase":
        "hjax.Environment (docs/agents.md)",
})  # fmt: skip


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


def current_name(key: str) -> str:
    """A dotted key by the name that it has now."""
    section, _, last = key.rpartition(".")
    new = RENAMED.get(key) or (section and RENAMED.get(f"*.{last}"))
    return f"{section}.{new}" if new else key


def with_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a run's config.json, with the names that its keys have now."""
    return {
        name: {
            current_name(f"{name}.{key}").rpartition(".")[2]: value for key, value in held.items()
        }
        if isinstance(held, Mapping)
        else held
        for name, held in config.items()
    }


def wish(name: str) -> str | None:
    """What hjax has for a name of another library's; None: the name is not known.

    Args:
      name: as it was typed, with or without dashes and dots.
    """
    name = name.strip("-").replace("-", "_").removeprefix("config.")
    if (current := current_name(name)) != name:
        return f"its name is config.{current} now"
    parts = name.lower().split(".")
    # The longest end of the name that is known, else a beginning (a section of theirs).
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    starts = [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
    found = next((WISHES[part] for part in (*ends, *starts) if part in WISHES), "")
    if parts[0] in _LEARNING:
        found = found.replace("config.actor.", f"config.{parts[0]}.")
    return found or None
