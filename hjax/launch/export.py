"""usage: python -m hjax.launch.export --model=DIR|WORKDIR --output=DIR [--adapter] [--json]

Write a model as a Hugging Face directory that transformers loads: config.json, safetensors in the
dtype of the weights that the run started from (of a directory each tensor in its own), and the
tokenizer's files with its chat templates.

  --model=DIR|WORKDIR   a workdir (its actor's newest checkpoint), a Hugging Face directory or name
  --family=PATH.py:NAME a class of yours that reads the model's family (docs/families.md)
  --output=DIR          the directory to write; it must be new or empty
  --adapter             of a workdir that trained adapters (LoRA) these alone, as a directory that
                        PEFT loads; without it they are added to the weights
  --json                print one line of JSON as the last line of the output
  --help                print this

Exit status: 0 written; 1 failed; 2 wrong input, nothing written.
"""

from collections.abc import Sequence

from hjax.errors import ConfigError
from hjax.files import json_line
from hjax.launch.command import check_model_flags, define_flags, parse_flags, run_or_help
from hjax.launch.process_exit import run_and_exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_or_help(arguments, lambda: str(__doc__), _run)


def _run(arguments: Sequence[str]) -> int:
    args = define_flags(model="", family="", output="", adapter=False, json=False)
    parse_flags(args, arguments)
    check_model_flags(args, {})
    if not args.output:
        raise ConfigError("--output is missing; see --help")

    from hjax.machine import pin_platform
    from hjax.models import parameter_counts
    from hjax.models.export import export_model

    pin_platform()
    config, dtypes = export_model(args.model, args.output, args.adapter)
    count, dtype = parameter_counts.learned_parameters(config), " and ".join(sorted(dtypes))
    what = f"adapters of a {config.family} model" if args.adapter else config.family
    print(f"{args.output}: {what}, {count:,} parameters in {dtype}")
    if args.json:
        result = {"output": args.output, "family": config.family, "parameters": count}
        print(json_line({**result, "dtype": dtype, "adapter": args.adapter}))
    return 0


if __name__ == "__main__":
    run_and_exit(main)
