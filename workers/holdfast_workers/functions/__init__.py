"""Runs a user's training function with a :class:`Context`, with the protection of a recipe.

The function owns its loop. As for a recipe, each step commits through the world's agreement, the
state goes to every tier, and after a fault the survivors form a new world. To leave the old world,
an exception passes through the function (at the next call of its context, or out of the collective
that blocks it). Then the function is called again, in the same process; the state is restored when
it first asks for a step.
"""

from holdfast_workers.functions.context import Context
from holdfast_workers.functions.function_errors import FunctionError

__all__ = ["Context", "FunctionError"]
