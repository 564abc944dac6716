"""Environments: episodes of many turns that a policy plays (docs/agents.md)."""

from hjax.environments.environment import Environment, Observation, Step, anchor_digest

__all__ = ["Environment", "Observation", "Step", "anchor_digest"]
