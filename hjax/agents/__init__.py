"""Agents: programs that speak OpenAI's API, whose calls a run answers, records and learns from."""
