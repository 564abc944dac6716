"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306): unpaired responses labelled good or bad."""

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.prediction_calibration import Predictions
from hjax.algorithms.unpaired_loss import UnpairedLoss
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, above, at_least


class KTO(Algorithm):
    """Kahneman-Tversky optimisation: a value function of each log-ratio minus a KL baseline."""

    roles = ("actor", "reference")
    generates = False
    source = "verdicts"
    fewest_examples = 2  # the baseline is of each response after another's prompt
    needed_data = "verdicts"
    data_hint = "give it the columns `response` and `label`"
    # ``warm_start.batch`` sets the sequences per update.
    shared_keys = ("max_skipped",)

    keys = {
        "beta": Key(0.1, "how strongly the policy is held to the reference", above(0)),
        "desirable": Key(1.0, "weight of responses with a true label", at_least(0)),
        "undesirable": Key(1.0, "weight of responses with a false label", at_least(0)),
    }

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse weights that are both 0."""
        super().check(config)
        if not config.desirable and not config.undesirable:
            raise ConfigError(
                "config.algorithm.desirable=0 and undesirable=0 leave nothing to learn from: set "
                "one of them above 0"
            )

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The unpaired loss."""
        names = ("beta", "desirable", "undesirable")
        return {"actor": UnpairedLoss(**{name: config[name] for name in names})}

    def learn(self, batch: Any) -> Batch:
        """One update, with mismatched pairs for the KL baseline."""
        batch = self.with_reference(batch)
        self.log(self.actor.update_actor(batch))
        return batch

    def predictions(self, batch: Batch) -> Predictions:
        """Whether a response is right, by its implicit reward less the baseline (``answer_``)."""
        scored = join(self.with_reference(batch), self.actor.compute_log_prob(batch))
        mask = np.asarray(batch["response_mask"], bool)
        ratios = np.where(mask, scored["old_logprobs"] - scored["ref_logprobs"], 0.0).sum(axis=1)
        logits = self.config.beta * (ratios - scored["kl_baseline"])
        return {"answer_": (logits, np.asarray(batch["positive"]).max(axis=1))}

    def with_reference(self, batch: Batch) -> Batch:
        """Adds the reference's log-probs and ``kl_baseline``."""
        others = mismatched(batch)
        reference = self.reference.compute_ref_log_prob(batch)
        others_ref = self.reference.compute_ref_log_prob(others)
        others = join(others, self.actor.compute_log_prob(others), others_ref)
        return self.with_baseline(join(batch, reference, others=others))

    def with_baseline(self, batch: Batch) -> Batch:
        """Adds ``kl_baseline``: the mean log-ratio of mismatched responses, at least 0.

        Args:
          batch: with ``others``, the log-probs of ``mismatched`` under policy and reference.
        """
        others = batch.pop("others")
        mask = np.asarray(others["response_mask"], bool)
        ratios = np.where(mask, others["old_logprobs"] - others["ref_logprobs"], 0.0).sum(axis=1)
        return batch | {"kl_baseline": np.asarray(max(ratios.mean(), 0.0), np.float32)}


def mismatched(batch: Batch) -> Batch:
    """Pair each response with the next row's prompt, the last with the first (as in TRL)."""
    moved = {key: np.roll(batch[key], 1, axis=0) for key in ("responses", "response_mask")}
    return {key: batch[key] for key in ("prompts", "prompt_mask")} | moved
