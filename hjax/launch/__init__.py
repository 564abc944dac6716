"""Commands: `python -m hjax.launch` (training), `.generate`, `.evaluate`, `.serve`, `.plan`, ..."""
