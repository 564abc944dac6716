"""Built-in tasks: generated prompts with verifiers and demonstrations, nothing to download.

`get_task("sorting", length=4)` makes one; `TASKS` maps names to classes.
"""

from hjax.data.tasks.arithmetic import Addition, Multiplication
from hjax.data.tasks.countdown import Countdown
from hjax.data.tasks.harvest import Harvest
from hjax.data.tasks.strings import Parity, Reversal, Sorting
from hjax.data.tasks.task import TASKS, Task, get_task, register

__all__ = [
    "TASKS",
    "Addition",
    "Countdown",
    "Harvest",
    "Multiplication",
    "Parity",
    "Reversal",
    "Sorting",
    "Task",
    "get_task",
    "register",
]
