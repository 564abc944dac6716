"""Shipped configs of several stages, one `get_stages()` per file."""
