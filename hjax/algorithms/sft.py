"""Supervised training on demonstrations: the warm start, as an algorithm of its own."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms.base import Algorithm, Batch
from hjax.algorithms.losses import SupervisedLoss
from hjax.errors import ConfigError


class SFT(Algorithm):
    """Minimise the negative log-likelihood of demonstrations."""

    roles = ("actor",)
    generates = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.demonstrations is None:
            raise ConfigError(
                "SFT needs demonstrations; this data has none: give it a `response` column"
            )

    @classmethod
    def default_config(cls) -> ConfigDict:
        """SFT's keys; sequences per update are ``warm_start.batch``."""
        config = ConfigDict()
        # How token losses are added up: "token", "sequence" or "constant" (docs/losses.md).
        config.aggregation = "token"
        # Optimizer updates in a row that may be skipped for not being finite; then the run stops.
        config.max_skipped = 5
        return config

    @classmethod
    def needed_roles(cls, config: ConfigDict) -> tuple[str, ...]:
        """The actor alone."""
        return (*cls.roles, *cls.workers)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """Negative log-likelihood per response token."""
        limit = max_response_length if config.aggregation == "constant" else None
        return {"actor": SupervisedLoss(aggregation=config.aggregation, max_length=limit)}

    def step(self, prompts: Batch) -> Batch:
        """One update on the next demonstrations; the prompts are not used."""
        assert self.demonstrations is not None
        batch = self.demonstrations()
        self.log(self.actor.update_actor(batch))
        return batch
