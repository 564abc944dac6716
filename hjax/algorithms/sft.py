"""Supervised training on demonstrations: the warm start, as an algorithm of its own."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms.base import Algorithm, Batch
from hjax.algorithms.losses import SupervisedLoss
from hjax.errors import ConfigError
from hjax.rules import Key


class SFT(Algorithm):
    """Minimise the negative log-likelihood of demonstrations."""

    roles = ("actor",)
    generates = False
    source = "demonstrations"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.demonstrations is None:
            raise ConfigError(
                "SFT needs demonstrations; this data has none: give it a column `response`, or "
                "conversations in `messages`"
            )

    @classmethod
    def all_keys(cls) -> dict[str, Key]:
        """Of the keys that all algorithms share only those that supervised training reads.

        Sequences per update are ``warm_start.batch``.
        """
        read = ("aggregation", "max_skipped")
        shared = Algorithm.keys.keys() - read
        return {name: key for name, key in super().all_keys().items() if name not in shared}

    @classmethod
    def needed_roles(cls, config: ConfigDict) -> tuple[str, ...]:
        """The actor alone."""
        return (*cls.roles, *cls.workers)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """Negative log-likelihood per response token."""
        limit = max_response_length if config.aggregation == "constant" else None
        return {"actor": SupervisedLoss(aggregation=config.aggregation, max_length=limit)}

    def collect(self, prompts: Batch) -> Any:
        """The next demonstrations; the prompts are not used."""
        assert self.demonstrations is not None
        return self.demonstrations()

    def learn(self, batch: Any) -> Batch:
        """One update."""
        self.log(self.actor.update_actor(batch))
        return batch
