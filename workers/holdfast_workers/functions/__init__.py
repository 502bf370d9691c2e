"""A user's own training function: called with a :class:`Context`, held like a built-in recipe.

The function owns its loop. What holds it is the same as for a recipe: each step commits through the
world's agreement, its state goes to every tier, and after a fault the survivors form a new world.
To leave the old one, an exception goes through the function (at the next call of its context, or
out of the collective it is blocked in); then it is called again, in the same process, with the
state restored when it first asks for a step.
"""

from holdfast_workers.functions.context import Context
from holdfast_workers.functions.function_errors import FunctionError

__all__ = ["Context", "FunctionError"]
