"""Plans and runs token-pipelined GPT training."""

from ._core import Error, InfeasibleError, ScheduleError

__version__ = "0.1.0"
__all__ = ["Error", "InfeasibleError", "ScheduleError", "__version__"]
