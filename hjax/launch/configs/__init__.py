"""Shipped configs, one `get_config()` per file; `--config=ppo.py` finds them by name."""
