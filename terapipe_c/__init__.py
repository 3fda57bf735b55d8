"""Plans and runs token-pipelined GPT training."""
from . import _core
from ._core import Error, InfeasibleError, ScheduleError
