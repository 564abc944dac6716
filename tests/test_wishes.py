"""What users of TRL, verl, SkyRL, OpenRLHF, Tunix and others type first, and what they are told."""

import re

import pytest

import hjax
from hjax.algorithms import ALGORITHMS
from hjax.config import flatten
from hjax.config_aliases import RENAMED, WISHES, current_name, wish, with_current_names
from hjax.errors import ConfigError
from hjax.settings.config_loading import load_config

# As it is typed (after the command), and the key or the words that the one line has to have.
# TRL's arguments and habits, then verl's, OpenRLHF's, Tunix's and slips of anybody's.
TYPED = [
    ("--config.lora=True", "config.actor.lora.rank"),
    ("--config.use_peft=True", "config.actor.lora.rank"),
    ("--config.lora_r=16", "config.actor.lora.rank"),
    ("--config.actor.lora_alpha=32", "config.actor.lora.alpha"),
    ("--config.lora_target_modules=q_proj", "config.actor.lora.targets"),
    ("--config.reward.lora.rank=8", "a run of reward_model.py, cost_model.py or"),
    ("--config.cost.lora.targets=q", "config.actor.lora.rank above 0"),
    ("--config.reference.lora.rank=8", "it is the actor with its adapters left off"),
    ("--config.load_in_4bit=True", "4 bits are not built"),
    ("--config.wandb=True", "config.display.wandb"),
    ("--config.report_to=wandb", "metrics.jsonl"),
    ("--report_to=wandb", "metrics.jsonl"),
    ("--config.logging_steps=1", "every step is a row of metrics.jsonl"),
    ("--config.use_vllm=True", "the model's own forward generates"),
    ("--config.vllm=True", "config.placement=disaggregate"),
    ("--config.vllm_gpu_memory_utilization=0.3", "config.rollout.slots=-1"),
    ("--config.lr=1e-5", "config.actor.learning_rate"),
    ("--config.learning_rate=1e-5", "config.actor.learning_rate"),
    ("--learning_rate=1e-5", "config.actor.learning_rate"),
    ("--config.critic.lr=1e-5", "config.critic.learning_rate"),
    ("--config.lr_scheduler_type=cosine", "config.actor.schedule"),
    ("--config.warmup_ratio=0.1", "config.actor.warmup_ratio"),
    ("--config.optim=adamw", "config.actor.optimizer"),
    ("--config.batch_size=8", "config.rollout.prompts"),
    ("--config.per_device_train_batch_size=8", "config.actor.micro_batch"),
    ("--config.gradient_accumulation_steps=4", "config.actor.micro_batch"),
    ("--config.gradient_checkpointing=True", "config.model.remat"),
    ("--config.num_train_epochs=3", "config.steps"),
    ("--config.num_epochs=3", "config.steps"),
    ("--config.max_steps=100", "config.steps"),
    ("--config.num_generations=8", "config.rollout.samples"),
    ("--config.num_iterations=2", "config.algorithm.epochs"),
    ("--config.max_completion_length=256", "config.rollout.max_response_length"),
    ("--config.max_new_tokens=256", "config.rollout.max_response_length"),
    ("--config.max_tokens=256", "config.rollout.max_response_length"),
    ("--config.max_prompt_length=512", "config.rollout.max_prompt_length"),
    ("--config.temperature=0.7", "config.rollout.temperature"),
    ("--config.beta=0.04", "config.algorithm.kl_coef"),
    ("--config.epsilon=0.2", "config.algorithm.clip_low and config.algorithm.clip_high"),
    ("--config.epsilon_high=0.28", "config.algorithm.clip_high"),
    ("--config.loss_type=dr_grpo", "config.algorithm.aggregation"),
    ("--config.scale_rewards=False", "config.algorithm.normalise"),
    ("--config.mask_truncated_completions=True", "config.algorithm.mask_truncated"),
    ("--config.reward_funcs=mine.py", "config.reward.function=FILE.py:NAME"),
    ("--config.model_name_or_path=gpt2", "config.actor.path"),
    ("--model_name_or_path=gpt2", "config.actor.path"),
    ("--config.dataset_name=gsm8k", "config.data.path"),
    ("--config.output_dir=out", "--workdir=DIR"),
    ("--output_dir=out", "--workdir=DIR"),
    ("--config.save_steps=50", "config.checkpoint.every"),
    ("--config.save_total_limit=2", "config.checkpoint.keep"),
    ("--config.eval_steps=50", "config.eval.every"),
    ("--config.bf16=True", "config.model.dtype"),
    ("--config.attn_implementation=flash_attention_2", "config.model.attention: auto"),
    ("--config.fsdp=full_shard", "config.layout.actor.train.fsdp"),
    ("--config.deepspeed=zero3.json", "config.layout.actor.train.fsdp"),
    ("--config.model.remat=True", "must be one of auto, none, products, attention, full, offload"),
    ("--config.algorithm.name=ppo2", "PPO"),
    # verl
    ("actor_rollout_ref.rollout.n=8", "config.rollout.samples"),
    ("--config.rollout.n=8", "config.rollout.samples"),
    ("actor_rollout_ref.actor.optim.lr=1e-6", "config.actor.learning_rate"),
    ("critic.optim.lr=1e-5", "config.critic.learning_rate"),
    ("data.train_batch_size=1024", "config.rollout.prompts"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=256", "config.algorithm.minibatch"),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "config.actor.micro_batch"),
    ("actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "config.actor.path"),
    ("actor_rollout_ref.model.enable_gradient_checkpointing=True", "config.model.remat"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "layout.actor.generate.tensor"),
    ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4", "config.rollout.slots=-1"),
    ("actor_rollout_ref.rollout.name=vllm", "there is no second engine"),
    ("actor_rollout_ref.actor.use_kl_loss=True", "config.algorithm.kl_in=loss"),
    ("actor_rollout_ref.actor.kl_loss_coef=0.001", "config.algorithm.kl_coef"),
    ("actor_rollout_ref.actor.clip_ratio=0.2", "config.algorithm.clip_low"),
    ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "config.actor.offload"),
    ("algorithm.adv_estimator=grpo", "config.algorithm.name"),
    ("data.train_files=train.parquet", "config.data.path"),
    ("data.val_files=test.parquet", "config.data.eval_path"),
    ("data.truncation=left", "config.data.overlong"),
    ("data.max_response_length=1024", "config.rollout.max_response_length"),
    ("trainer.total_epochs=15", "config.steps"),
    ("trainer.n_gpus_per_node=8", "all devices that JAX finds"),
    ("trainer.logger=['console','wandb']", "TensorBoard"),
    ("trainer.experiment_name=first", "--workdir=DIR"),
    ("trainer.test_freq=5", "config.eval.every"),
    ("custom_reward_function.path=mine.py", "config.reward.function"),
    ("actor_rollout_ref.rollout.multi_turn.enable=True", "config.environment.function"),
    ("actor_rollout_ref.rollout.multi_turn.max_user_turns=4", "config.environment.max_turns"),
    ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5", "config.environment.max_turns"),
    ("actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml", "environment.tools=FILE"),
    ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=i.yaml", "observation"),
    ("actor_rollout_ref.rollout.multi_turn.max_tool_response_length=256", "cuts its observations"),
    ("actor_rollout_ref.rollout.multi_turn.format=hermes", "in any form"),
    ("actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=strict", "never decoded"),
    ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "config.agent.function"),
    ("actor_rollout_ref.rollout.agent.num_workers=8", "config.environment.processes"),
    # Episodes in TRL, SkyRL, NeMo-RL, prime-rl, OpenRLHF, Tunix, verl-agent, VAGEN and AReaL.
    ("--config.environment_factory=Game", "config.environment.function=FILE.py:CLASS"),
    ("--config.tools=[search]", "config.environment.tools=FILE.py:NAME"),
    ("--config.max_tool_calling_iterations=8", "config.environment.max_turns"),
    ("environment.env_class=gsm8k", "config.environment.function=FILE.py:CLASS"),
    ("environment.max_env_workers=10", "config.environment.processes"),
    ("generator.max_turns=4", "config.environment.max_turns"),
    ("generator.use_conversation_multi_turn=true", "config.data.chat=True"),
    ("generator.max_input_length=4096", "turns and observations"),
    ("grpo.max_rollout_turns=50", "config.environment.max_turns"),
    ("env.sliding_puzzle_game.cfg.max_moves=50", "config.environment.function"),
    ("--orchestrator.train.env.name=alphabet-sort", "config.environment.function"),
    ("--agent_func_path=agent.py", "config.agent.function"),
    ("--config.episode_timeout=1800", "config.environment.step_seconds"),
    ("env.max_steps=50", "config.environment.max_turns"),
    ("rllm.agent.max_steps=20", "config.environment.max_turns"),
    ("rllm.agent.trajectory_timeout=600", "config.environment.step_seconds"),
    ("rllm.stepwise_advantage.enable=True", "config.algorithm.turn_discount"),
    ("env.seed=1", "config.seed"),
    ("algorithm.gigpo.step_advantage_w=1.0", "config.algorithm.step_weight"),
    ("algorithm.gigpo.mode=mean_norm", "config.algorithm.normalise of GiGPO"),
    ("actor_rollout_ref.actor.invalid_action_penalty_coef=0.1", "config.algorithm.invalid_penalty"),
    ("generator.step_wise_trajectories=true", "several where one replaces the history"),
    ("generator.zero_reward_on_non_stop=true", "config.algorithm.mask_truncated"),
    ("generator.sampling_params.max_generate_length=512", "config.environment.turn_tokens"),
    ("trainer.fully_async.max_staleness_steps=4", "config.rollout.max_staleness"),
    ("orchestrator.env.id=alphabet-sort", "config.environment.function"),
    ("--orchestrator.rollouts-per-example=8", "config.rollout.samples"),
    ("orchestrator.eval.rollouts_per_example=4", "config.eval.samples"),
    ("orchestrator.max_off_policy_steps=8", "config.rollout.max_staleness"),
    ("orchestrator.trajectory_strategy=branching", "several where one replaces the history"),
    ("algorithm.high_level_gamma=0.95", "config.algorithm.turn_gamma"),
    ("actor.gae_timestep_unit=turn", "config.algorithm.credit of PPO"),
    ("--config.turn_discount=0.9", "config.algorithm.turn_discount of GRPO"),
    # OpenRLHF
    ("--pretrain=meta-llama/Llama-3.2-1B", "config.actor.path"),
    ("--n_samples_per_prompt=8", "config.rollout.samples"),
    ("--rollout_batch_size=128", "config.rollout.prompts"),
    ("--micro_train_batch_size=4", "config.actor.micro_batch"),
    ("--init_kl_coef=0.01", "config.algorithm.kl_coef"),
    ("--eps_clip=0.2", "config.algorithm.clip_low"),
    ("--lambd=0.95", "config.algorithm.lam"),
    ("--advantage_estimator=rloo", "config.algorithm.name"),
    ("--remote_rm_url=http://localhost", "a function may ask a server"),
    ("--prompt_data=owner/name", "config.data.path"),
    ("--input_key=question", "config.data.columns"),
    ("--apply_chat_template", "config.data.chat"),
    ("--zero_stage=3", "config.layout.actor.train.fsdp"),
    ("--freezing_actor_steps=20", "config.actor.frozen_updates"),
    ("--colocate_all_models", "config.placement=colocate"),
    ("--use_wandb=KEY", "config.display.wandb"),
    # Tunix
    ("--config.max_tokens_to_generate=768", "config.rollout.max_response_length"),
    ("--config.kv_cache_size=1024", "the cache is as large as"),
    ("--config.actor_optimizer=adamw", "config.actor.optimizer"),
    ("--config.eval_every_n_steps=10", "config.eval.every"),
    ("--config.train_micro_batch_size=4", "config.actor.micro_batch"),
    ("--config.role_to_mesh=x", "config.placement"),
    ("--config.checkpoint_root_directory=out", "--workdir=DIR"),
    # Slips.
    ("--config.stepss=3", "did you mean config.steps?"),
    ("--config.rollout.promts=3", "did you mean config.rollout.prompts?"),
    ("--config.steps=1.5", "expected a whole number"),
    ("--config.rollout=8", "config.rollout is a section"),
    ("--config.seed=-1", "must be from 0 to 4294967295"),
]


@pytest.mark.parametrize(("typed", "says"), TYPED, ids=[typed for typed, _ in TYPED])
def test_what_is_typed_is_answered_in_one_line(typed, says):
    with pytest.raises(ConfigError) as caught:
        load_config("grpo.py", [typed])
    message = str(caught.value)
    assert says in message and "\n" not in message and len(message) < 600, message


def test_there_are_eighty_and_more():
    assert len(TYPED) >= 80


def test_every_key_that_is_named_exists():
    known = set(flatten(hjax.default_config()))
    for algorithm in ALGORITHMS.values():
        known |= {f"algorithm.{key}" for key in algorithm.default_config()}
    parts = [key.split(".") for key in known]
    sections = {".".join(names[:i]) for names in parts for i in range(1, len(names))}
    for name, text in WISHES.items():
        assert "\n" not in text
        for key in re.findall(r"config\.([a-z_.]*[a-z_]\d?)", text.replace("<role>", "actor")):
            assert key in known | sections, (name, key)
        # A name that is a key is no wish.
        assert name not in known, name


def test_renamed_keys_answer_with_their_names():
    known = set(flatten(hjax.default_config()))
    for algorithm in ALGORITHMS.values():
        known |= {f"algorithm.{key}" for key in algorithm.default_config()}
    for old in RENAMED:
        old = old.replace("*", "critic")
        new = current_name(old)
        assert old not in known and new in known
        with pytest.raises(ConfigError, match=f"config.{old}.*its name is config.{new} now$"):
            load_config("ppo.py", {old: 1})
        section, _, key = old.rpartition(".")
        assert with_current_names({section: {key: 3, "x": 1}, "steps": 2}) == {
            section: {new.rpartition(".")[2]: 3, "x": 1}, "steps": 2,
        }  # fmt: skip


def test_a_critic_is_told_of_its_own_keys():
    assert "config.critic.lora.rank" in wish("critic.lora_rank")
    assert wish("nothing_of_the_kind") is None


NOTEBOOK = [
    ("c.stepss = 3", "did you mean config.steps?"),
    ("c.rollout.n = 3", "config.rollout.samples"),
    ("c.actor.lr", "config.actor.learning_rate"),
    ("c['actor']['lr']", "config.actor.learning_rate"),
    ("c.steps = '3'", "expected a whole number (int)"),
    ("hjax.get_config('ppo.py', {'rollout': {'n': 8}})", "config.rollout.samples"),
    ("hjax.get_config('ppo.py', {'lr': 1e-5})", "config.actor.learning_rate"),
    ("hjax.get_config('pppo.py')", "or one of base.py"),
    ("hjax.Trainer(hjax.get_config('base.py'))", "there is no data: set config.data.path=FILE"),
    ("hjax.Trainer('ppo.py')", "not 'ppo.py': hjax.get_config(NAME, {KEY: VALUE, ...}) makes one"),
    ("hjax.plan(None)", "a config is expected here, not None"),
    ("hjax.get_config(None)", "it takes a config's name or file"),
    ("hjax.get_config('ppo.py', 3)", "they stand in a dict"),
    ("hjax.get_config('ppo.py', 'steps=3')", "they stand in a dict"),
    ("hjax.get_config('ppo.py', rollout=3)", 'as get_config("ppo.py", {"steps": 100})'),
    ("hjax.get_config('ppo.py', lr=1e-5)", "config.actor.learning_rate"),
]


@pytest.fixture(scope="module")
def shell():
    """IPython's, as a notebook has it."""
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = interactive.instance(colors="nocolor")
    shell.run_cell("import hjax; c = hjax.get_config('ppo.py')")
    yield shell
    interactive.clear_instance()


@pytest.mark.parametrize(("cell", "says"), NOTEBOOK)
def test_a_notebook_shows_one_line_and_no_frames(cell, says, shell, capsys):
    shell.run_cell(cell)
    shown = capsys.readouterr().out.strip()
    assert says in shown and "\n" not in shown and shown.startswith("hjax: error: "), shown


def test_the_form_with_a_dict_works():
    flat = hjax.get_config("ppo.py", {"rollout.prompts": 32, "algorithm.minibatch": 64})
    nested = hjax.get_config("ppo.py", {"rollout": {"prompts": 32}, "algorithm": {"minibatch": 64}})
    assert flat == nested and flat.rollout.prompts == 32


@pytest.mark.parametrize("name", ["GRPOTrainer", "GRPOConfig", "train", "LLM", "MultiTurnEnv"])
def test_names_that_are_looked_for(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': (hjax|config)"):
        getattr(hjax, name)


def test_prompts_of_ones_own_inherit_nothing_of_a_task(tmp_path):
    for name in ("ppo.py", "dapo.py", "grpo.py", "base.py"):
        config = hjax.get_config(name, {"data.path": str(tmp_path / "x.jsonl")})
        complete = hjax.get_config(name)
        assert config.rollout.max_response_length == 0 and config.warm_start.steps == 0
        assert config.data.task_options.get("partial", 0.0) == 0.0
        assert config.rollout.prompts == complete.rollout.prompts
