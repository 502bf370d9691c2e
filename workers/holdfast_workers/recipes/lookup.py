"""Finds training programs: built-in ones by name, a user's own as `package.module:attribute`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from holdfast_workers.spec import BUILT_IN_RECIPES, TrainingSpec
from holdfast_workers.training.recipe import Recipe

RecipeFactory = Callable[[TrainingSpec, Path], Recipe]


class UnknownRecipe(ValueError):
    """The name of a recipe does not lead to a factory of recipes."""


def make_recipe(spec: TrainingSpec, cache_dir: Path) -> Recipe:
    """The training program of `spec`, not prepared yet: its recipe, or one around its function or
    script. Raises the errors of `resolve`."""
    if spec.function_name is None:
        return resolve(spec.recipe)(spec, cache_dir)
    # Late: only a job with a function needs these.
    from holdfast_workers.functions.function_recipe import FunctionRecipe
    from holdfast_workers.programs.context_script import ContextScript

    if spec.function is not None:
        return FunctionRecipe(spec, cache_dir)
    return FunctionRecipe(spec, cache_dir, lambda: ContextScript(spec))


def resolve(name: str) -> RecipeFactory:
    """The factory behind `name`: called with (spec, cache_dir), it returns a Recipe.

    Imports the module, which may be slow and runs the user's module code. Raises UnknownRecipe
    with the reason if the recipe does not exist; errors that the user's module raises on import
    pass unchanged.
    """
    target = BUILT_IN_RECIPES.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        built_in = ", ".join(sorted(BUILT_IN_RECIPES))
        raise UnknownRecipe(
            f"{name!r} is no built-in recipe ({built_in}) and not of the form module:attribute"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise UnknownRecipe(f"recipe {name!r}: no module named {error.name!r}") from error
        raise
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UnknownRecipe(f"recipe {name!r}: {module_name} has no callable {attribute!r}")
    return factory  # type: ignore[no-any-return]
