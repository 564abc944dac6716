"""HTTP serving: OpenAI's wire forms over the rollout engine's service."""
