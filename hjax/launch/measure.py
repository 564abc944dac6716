"""`--config.steps=0`: held-out prompts are answered, and nothing is trained or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.errors import ConfigError
from hjax.run.workdir import Workdir


def measure(config: ConfigDict, workdir: Path | None, display: Any) -> dict[str, float]:
    """The evaluation of a config's actor, or of the newest checkpoint of a workdir's run.

    Args:
      config: of the run, complete.
      workdir: where one may be; it is only read.
      display: shows progress.

    Returns:
      ``eval/reward`` and, where there is right and wrong, ``eval/accuracy``.

    Raises:
      ConfigError: there are no held-out prompts.
    """
    from hjax.planning.auto import plan_run
    from hjax.run.trainer import Trainer

    if workdir is not None and Workdir(workdir).stepped():
        config = ConfigDict(config).copy_and_resolve_references()
        config.actor.path = str(workdir)
    trainer = Trainer(config, display=display, plan=plan_run(config, None))
    try:
        found = trainer.evaluate()
    finally:
        trainer.close()
    if not found:
        raise ConfigError(
            "config.steps=0 only evaluates, and there are no held-out prompts; set data.eval_path, "
            "or data.eval_fraction and eval.every above 0"
        )
    return found
