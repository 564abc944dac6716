"""What a run or a command needs to play with agents: their processes and the gateway."""

from __future__ import annotations

from typing import Any

from hjax.agents.agent_player import AgentPlayer
from hjax.agents.agent_pool import AgentPool
from hjax.agents.agent_settings import AgentSettings, RecordSettings
from hjax.agents.gateway import Gateway
from hjax.environments.episode import DrawTurns, EpisodeLimits
from hjax.environments.episode_text import ObservationEncoder
from hjax.serving.served_model import ServedModel


class AgentRunner:
    """Agents' processes, and the gateway that answers them.

    Args:
      settings: what runs.
      record: how sessions are recorded.
      encoder: of chats.
      limits: of each episode.
      served: the model, with a service that draws answers as they are asked for; None: a player's
        policy draws them.
      **drawn: ``drawing`` and ``seed`` of the ``Gateway``.
    """

    def __init__(
        self,
        settings: AgentSettings,
        record: RecordSettings,
        encoder: ObservationEncoder,
        limits: EpisodeLimits,
        served: ServedModel | None = None,
        **drawn: Any,
    ):
        settings.check()
        record.check()
        self._pool = AgentPool(settings)
        self._record, self._encoder, self._limits = record, encoder, limits
        if served is None:
            tokenizer = encoder.tokenizer
            size = tokenizer.vocab_size
            served = ServedModel("", None, tokenizer, size, tuple(tokenizer.eos_ids))
        self.gateway = Gateway(
            served, call_tokens=limits.turn_tokens, constrained=record.constrained, **drawn
        )

    def player(self, draw: DrawTurns | None, **options: Any) -> AgentPlayer:
        """A player of episodes.

        Args:
          draw: the policy; None: the model's service draws.
          **options: of ``AgentPlayer``.
        """
        return AgentPlayer(
            self._pool, self.gateway, self._encoder, self._limits, draw, self._record, **options
        )

    def close(self) -> None:
        """End the processes and the gateway."""
        self._pool.close()
        self.gateway.shut_down()
