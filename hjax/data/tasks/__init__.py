"""Built-in tasks: generated prompts with verifiers and demonstrations, nothing to download.

`get_task("sorting", length=4)` makes one; `TASKS` maps names to classes. Tasks of other packages
are `reasoning_gym:NAME` and `gymnasium:NAME`.
"""

from hjax.data.tasks.arithmetic import Addition, Multiplication
from hjax.data.tasks.calculator_task import CalculatorTask
from hjax.data.tasks.code_sums_task import CodeSumsTask
from hjax.data.tasks.countdown import Countdown
from hjax.data.tasks.environment_task import EnvironmentTask
from hjax.data.tasks.fee_schedule import FeeSchedule
from hjax.data.tasks.harvest import Harvest
from hjax.data.tasks.maze_task import MazeTask
from hjax.data.tasks.sokoban_task import SokobanTask
from hjax.data.tasks.strings import MixedReversal, Parity, Reversal, Sorting
from hjax.data.tasks.task import TASKS, Task, get_task, register
from hjax.data.tasks.twenty_questions_task import TwentyQuestionsTask

__all__ = [
    "TASKS",
    "Addition",
    "CalculatorTask",
    "CodeSumsTask",
    "Countdown",
    "EnvironmentTask",
    "FeeSchedule",
    "Harvest",
    "MazeTask",
    "MixedReversal",
    "Multiplication",
    "Parity",
    "Reversal",
    "SokobanTask",
    "Sorting",
    "Task",
    "TwentyQuestionsTask",
    "get_task",
    "register",
]
