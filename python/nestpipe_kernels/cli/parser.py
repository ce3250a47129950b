"""Argument parsers of the command: one line on bad arguments, and options that a module adds when they are needed."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, NoReturn

__all__ = ["USAGE", "LazyParser", "OneLineParser"]

USAGE = 2


class OneLineParser(argparse.ArgumentParser):
    """One line on bad arguments instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


class LazyParser(OneLineParser):
    """Takes its options from `add_options` of a module, imported once this parser is the one that is asked."""

    def __init__(self, *arguments: Any, module: str | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with the module's options."""
        module, self._module = self._module, None
        if module is not None:
            try:
                case = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name not in (module, module.rpartition(".")[0]):
                    raise
                self.error(f"{module} is not installed; install the wheel (make build, or pip install .)")
            case.add_options(self)
        return super().parse_known_args(args, namespace)
