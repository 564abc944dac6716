"""`python -m hjax.launch` and its sisters: configs, trainer, workdir, what a person sees."""
