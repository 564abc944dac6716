"""`python -m hjax.launch` and its sisters: configs, the trainer, the workdir, what a person sees."""
