"""The training service: models that are trained and sampled by calls, and the Tinker API."""
