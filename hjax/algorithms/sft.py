"""Supervised fine-tuning (SFT) on demonstrations; also what the warm start does."""

from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.losses import SupervisedLoss


class SFT(Algorithm):
    """Minimise the negative log-likelihood of demonstrations."""

    roles = ("actor",)
    generates = False
    source = "demonstrations"
    needed_data = "demonstrations"
    data_hint = "give it a column `response`, or conversations in `messages`"
    # ``warm_start.batch`` sets the sequences per update.
    shared_keys = ("aggregation", "max_skipped")

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """Negative log-likelihood per response token."""
        limit = max_response_length if config.aggregation == "constant" else None
        return {"actor": SupervisedLoss(aggregation=config.aggregation, max_length=limit)}

    def learn(self, batch: Any) -> Batch:
        """One update."""
        self.log(self.actor.update_actor(batch))
        return batch
