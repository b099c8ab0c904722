"""Tables from a name in a config file to its factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

FactoryT = TypeVar("FactoryT", bound=Callable[..., Any])


class Registry(Generic[FactoryT]):
    """Factories of one kind; filled at import, read-only afterwards.

    Args:
        kind: Kind of the factories, as errors name it ("compressor").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, FactoryT] = {}

    def register(self, name: str) -> Callable[[FactoryT], FactoryT]:
        """Register the decorated factory under ``name`` and return it unchanged.

        Raises:
            ValueError: ``name`` is taken; import order must not decide the result.
        """

        def record(factory: FactoryT) -> FactoryT:
            if name in self._factories:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._factories[name] = factory
            return factory

        return record

    def __getitem__(self, name: str) -> FactoryT:
        """Return the factory of ``name``.

        Raises:
            LookupError: ``name`` is not registered; the message lists known names.
        """
        if name not in self._factories:
            known = ", ".join(self.names()) or "none"
            raise LookupError(f"unknown {self.kind} {name!r}; known: {known}")
        return self._factories[name]

    def __contains__(self, name: object) -> bool:
        return name in self._factories

    def names(self) -> tuple[str, ...]:
        """Return the registered names, sorted, for ``--help`` and tests."""
        return tuple(sorted(self._factories))
