"""Shipped multi-stage configs, one `get_stages()` per file."""
