"""A base model that many trained models share, and the compiled programs of each kind of model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.data.tokenizer import Tokenizer
from hjax.data.tokenizer_files import holds_tokenizer
from hjax.errors import ConfigError
from hjax.files import StrPath
from hjax.kernels.verdict import local_forms
from hjax.models.compute import Compute
from hjax.models.forward import sequence_states, token_log_probs
from hjax.models.lora import Lora
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import Network, Params, decoder_network
from hjax.models.remat import POLICIES
from hjax.models.weights import load_params, model_directory, read_config, read_eos_ids
from hjax.rollout.language_model import check_local_devices
from hjax.sharding.global_arrays import place
from hjax.sharding.layout import fit_layout, make_layouts
from hjax.training_service.adamw import AdamState, adamw_step
from hjax.training_service.datum import TARGETS
from hjax.training_service.device_turns import DeviceTurns
from hjax.training_service.snapshot_sampler import SampledWeights, SnapshotSampler
from hjax.training_service.token_losses import LOSSES
from hjax.workers.parameter_worker import AdapterMerge, abstract

# Kinds of models (ranks and matrices of adapters) over one base at most.
KINDS = 16
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class SharedBase:
    """A model's weights on its devices, once for all ``Learner`` objects over it.

    Args:
      path: a Hugging Face directory or name, or an hjax workdir.
      dtype: of compute and of the frozen weights, ``float32`` or ``bfloat16``; what is trained is
        float32.
      data, fsdp, tensor: the mesh of the first local devices. Rows of a batch are split over
        ``data`` and ``fsdp``, parameters over ``fsdp``, heads, MLPs and vocabulary over ``tensor``.
      generate_tensor: devices over which a model's heads are split while it samples, a divisor of
        ``tensor``; 0: ``tensor``. The others have copies, which share the requests.
      micro_batch_tokens: of a forward and backward pass at most, padding included, for each part
        of the rows; a single longer row is a pass of its own.
      remat: which activations the backward pass computes again (docs/config.md,
        ``actor.remat``): ``none`` keeps all.
      slots: sequences that are sampled at a time, of each kind of model; 0: 16.

    Raises:
      ConfigError: nothing there, an unsupported model, an argument out of its range, or one of
        several processes.

    Attributes:
      config: the model's shapes.
      tokenizer: None without one.
      eos_ids: tokens that end a response.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        dtype: str = "float32",
        data: int = 1,
        fsdp: int = 1,
        tensor: int = 1,
        generate_tensor: int = 0,
        micro_batch_tokens: int = 4096,
        remat: str = "none",
        slots: int = 0,
    ):
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}; allowed: {', '.join(DTYPES)}")
        if remat not in POLICIES:
            raise ConfigError(f"remat={remat!r}; allowed: {', '.join(POLICIES)}")
        if micro_batch_tokens < 1:
            raise ConfigError(f"micro_batch_tokens={micro_batch_tokens}: 1 or more")
        if jax.process_count() > 1:
            raise ConfigError(
                f"this is one of {jax.process_count()} processes; a training service is one, with "
                "the devices of one host, and does not run on Ray or several hosts: a run does "
                "(docs/cluster.md)"
            )
        self.path, self.micro_batch_tokens, self.slots = str(path), micro_batch_tokens, slots
        directory = model_directory(path)
        self.config: ModelConfig = read_config(path)
        axes = {"data": data, "fsdp": fsdp, "tensor": tensor}
        check_local_devices(axes)
        devices = jax.local_devices()[: data * fsdp * tensor]
        layouts = make_layouts(devices, axes, {"tensor": generate_tensor or tensor})
        self.layout, self.generate_layout = (
            fit_layout(layout, self.config.dimensions, f"data={data}, fsdp={fsdp}, tensor={tensor}")
            for layout in (layouts.train, layouts.generate)
        )
        several = self.layout.mesh.size > 1
        self.turn = DeviceTurns().turn if several else contextlib.nullcontext
        forms = local_forms(self.layout.mesh.devices.flat[0])
        compute = Compute(dtype=DTYPES[dtype], remat=remat, forms=forms)
        self.generate_compute = compute.for_layout(self.generate_layout)
        compute = compute.for_layout(self.layout)
        self.compute = dataclasses.replace(compute, layout=self.layout if several else None)
        self.tokenizer: Tokenizer | None = None
        if holds_tokenizer(directory):
            self.tokenizer = Tokenizer.load(directory)
            self.tokenizer.check_fits(self.config.vocab_size, directory)
        eos = read_eos_ids(directory) if self.tokenizer is None else self.tokenizer.eos_ids
        self.eos_ids = tuple(i for i in eos if i < self.config.vocab_size)
        plain = decoder_network(self.config)
        read = plain.with_shapes(plain.compute_shapes(self.compute.dtype))
        self.frozen: Params = load_params(path, read, self.layout)
        # Arrays of a mesh that generation splits otherwise are copied for it once.
        self.generate_frozen = read.place(self.frozen, self.generate_layout)
        self._programs: dict[Lora | None, ModelPrograms] = {None: ModelPrograms(self, None)}
        self._lock = threading.Lock()

    def programs(self, lora: Lora | None) -> ModelPrograms:
        """The programs of all models with these adapters; None: of models without adapters.

        Raises:
          ConfigError: ``KINDS`` others are in use. Each has programs of its own, and in bfloat16 a
            sampler with a cache.
        """
        with self._lock:
            if lora not in self._programs:
                if len(self._programs) > KINDS:
                    ranks = sorted({x.rank for x in self._programs if x is not None})
                    raise ConfigError(
                        f"{KINDS} kinds of models (ranks and matrices of adapters) are in use, as "
                        f"many as may; ranks so far: {', '.join(map(str, ranks))}"
                    )
                self._programs[lora] = ModelPrograms(self, lora)
            return self._programs[lora]

    def initial(self, lora: Lora | None, seed: int) -> Params:
        """New trained parameters, float32: adapters drawn from a seed, or the model's own."""
        if lora is not None:
            return self.programs(lora).network.create_learned(seed, self.layout)
        if self.compute.dtype == jnp.float32:
            return self.frozen  # a step makes new arrays
        return load_params(self.path, decoder_network(self.config), self.layout)

    def close(self) -> None:
        """Stop sampling; requests that have not finished fail."""
        for programs in self._programs.values():
            programs.close()


class ModelPrograms:
    """What models of the same adapters share: programs, and the sampler.

    In float32 adapters are merged into their matrices to be sampled, so that a token costs what one
    of the base does, and all models over a base share its sampler. In bfloat16 small additions
    would be rounded away, so they stay beside the matrices, and each kind has its own.

    Args:
      base: the model's weights.
      lora: settings of the adapters; None: all parameters are trained.
    """

    def __init__(self, base: SharedBase, lora: Lora | None):
        config = dataclasses.replace(base.config, lora=lora)
        self.base = base
        self.network: Network = decoder_network(config).with_frozen_dtype(base.compute.dtype)
        self.shardings, _ = self.network.partition.split(self.network.shardings(base.layout))
        self.shapes, _ = self.network.partition.split(self.network.shapes)
        self.abstract = abstract(self.shapes, self.shardings)
        self._passes: dict[tuple[str, bool], Any] = {}
        moments = AdamState(self.shardings, self.shardings)
        self._step = jax.jit(
            adamw_step,
            # The parameters are not donated: snapshots refer to them.
            donate_argnums=(1, 2),
            out_shardings=(self.shardings, moments, self.shardings, base.layout.replicated),
        )
        merges = lora is not None and base.compute.dtype == jnp.float32
        self._merge = AdapterMerge(self.network, base.generate_layout) if merges else None
        self._sampler: SnapshotSampler | None = None
        self._lock = threading.Lock()

    @property
    def frozen(self) -> Params:
        """The parameters that are not trained."""
        return {} if self.network.config.lora is None else self.base.frozen

    @functools.cached_property
    def zeros(self) -> Any:
        """A function that makes a nested dict of zeros like the trained parameters."""
        shapes = self.shapes

        def make() -> Params:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)

        return jax.jit(make, out_shardings=self.shardings)

    def sampled(self, learned: Params) -> SampledWeights:
        """Trained parameters as the sampler takes them."""
        return SampledWeights(learned, functools.partial(self._whole, learned))

    def _whole(self, learned: Params) -> Params:
        base = self.base
        if learned is base.frozen:
            return base.generate_frozen
        frozen = {} if self.network.config.lora is None else base.generate_frozen
        params = self.network.partition.join(learned, frozen)
        if self._merge is None:
            return params
        with base.turn():
            return self._merge(self.network.place(params, base.generate_layout))

    def sampler(self) -> SnapshotSampler:
        """The sampler of these models; it starts with its first use."""
        base, lora = self.base, self.network.config.lora
        if self._merge is not None:
            return base.programs(None).sampler()
        with self._lock:
            if self._sampler is None:
                first = base.frozen if lora is None else base.initial(lora, seed=0)
                with base.turn():
                    self._sampler = SnapshotSampler(
                        self.network,
                        base.generate_layout,
                        dataclasses.replace(base.generate_compute, layout=None, remat="none"),
                        tokenizer=base.tokenizer,
                        eos_ids=base.eos_ids,
                        first=self.sampled(first),
                        slots=base.slots,
                        turn=base.turn,
                    )
            return self._sampler

    def close(self) -> None:
        """Stop sampling."""
        with self._lock:
            if self._sampler is not None:
                self._sampler.close()

    def run(
        self,
        loss: str,
        learned: Params,
        sums: Params | None,
        arrays: Mapping[str, np.ndarray],
        settings: Mapping[str, float],
    ) -> tuple[jax.Array, jax.Array, Params | None]:
        """Forward, and backward if there are sums, of one micro-batch.

        Args:
          loss: its name.
          learned: the trained parameters.
          sums: gradients so far, which are donated; None: forward alone.
          arrays: of a ``DatumBatch``.
          settings: of the loss.

        Returns:
          (the loss, float32 scalar; log-probs of the targets, float32 in their shape; the sums with
          this micro-batch's gradients added).
        """
        key = loss, sums is not None
        if key not in self._passes:
            self._passes[key] = self._make_pass(loss, backward=sums is not None)
        split = self.base.layout.sharding("batch")
        scalars = {name: np.float32(value) for name, value in settings.items()}
        run = self._passes[key]
        with self.base.turn():
            placed = {name: place(x, split) for name, x in arrays.items()}
            if sums is None:
                total, logprobs = run(learned, self.frozen, placed, scalars)
                return total, logprobs, None
            made: tuple[jax.Array, jax.Array, Params] = run(
                learned, self.frozen, sums, placed, scalars
            )
            return made

    def _make_pass(self, name: str, backward: bool) -> Any:
        network, compute, loss = self.network, self.base.compute, LOSSES[name]

        def objective(learned: Params, frozen: Params, batch: Any, settings: Any) -> Any:
            model = network.bind(network.partition.join(learned, frozen))
            mask = batch["mask"]
            hidden = sequence_states(model, batch["tokens"], mask, compute)
            logprobs, _ = token_log_probs(
                model, hidden, batch[TARGETS], with_entropy=False, layout=compute.layout
            )
            there = mask if logprobs.ndim == 2 else mask[..., None]
            token_losses = loss.function(jnp.where(there, logprobs, 0.0), batch, settings)
            return jnp.sum(jnp.where(there, token_losses, 0.0)), logprobs

        def add(learned: Params, frozen: Params, sums: Params, batch: Any, settings: Any) -> Any:
            slopes = jax.value_and_grad(objective, has_aux=True)
            (total, logprobs), gradients = slopes(learned, frozen, batch, settings)
            return total, logprobs, jax.tree.map(jnp.add, sums, gradients)

        whole = self.base.layout.replicated
        options = self.base.layout.compiler_options
        if not backward:
            return jax.jit(objective, out_shardings=(whole, whole), compiler_options=options)
        placed = (whole, whole, self.shardings)
        return jax.jit(add, donate_argnums=2, out_shardings=placed, compiler_options=options)

    def step(
        self, learned: Params, state: AdamState, sums: Params, scalars: Mapping[str, float]
    ) -> tuple[Params, AdamState, Params, dict[str, jax.Array]]:
        """``adamw_step``; moments and sums are donated."""
        given = {name: np.float32(value) for name, value in scalars.items()}
        with self.base.turn():
            made: tuple[Params, AdamState, Params, dict[str, jax.Array]] = self._step(
                learned, state, sums, given
            )
            return made
