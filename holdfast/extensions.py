"""Methods, backbones and data sets by name. A name is looked up in this order: what is built in, what a script has
registered, `module:Class`, and the entry points of installed packages."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from holdfast.errors import HoldfastError, complain, nearest

T = TypeVar("T")

_WORD = r"[A-Za-z_]\w*"
PLACE = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*")  # module:Class
_allowed: set[str] = set()


def allow(name: str) -> None:
    """From here on, this process may import `name`, if it is of the form `module:Class`.

    Whoever reads a name from the user's own config, flag or run folder calls this, and the pool's workers for what
    their own run has sent them. A name that comes with a message from elsewhere is never allowed by the message."""
    _allowed.add(name)


class Table(Generic[T]):
    """All things of one kind. `check` takes a name and what was found under it; it returns what is used, or raises
    HoldfastError with one sentence about the first mistake."""

    def __init__(self, kind: str, group: str, builtin: Mapping[str, T], check: Callable[[str, Any], T]) -> None:
        self.kind, self.group, self.builtin, self.check = kind, group, builtin, check
        self.registered: dict[str, tuple[Any, T]] = {}  # name -> what was given, what is used
        self._loaded: dict[str, T] = {}  # of entry points
        self._broken: set[str] = set()

    def register(self, name: str, thing: Any) -> None:
        """Makes `thing` known in this process. The same class may be registered again, as a notebook does."""
        if not re.fullmatch(r"[\w.-]+", name):
            raise HoldfastError(f"{name!r} is no name for a {self.kind}; use letters, digits, '_', '-' and '.'")
        before = self.registered.get(name, (None,))[0]
        if name in self.builtin or (before is not None and _where(before) != _where(thing)):
            raise HoldfastError(f"there is a {self.kind} {name!r} already; choose another name")
        self.registered[name] = thing, self.check(name, thing)
        allow(_place(thing))

    def find(self, name: str) -> T:
        """What this name stands for."""
        if name in self.builtin:
            return self.builtin[name]
        if name in self.registered:
            return self.registered[name][1]
        if PLACE.fullmatch(name):
            return self.check(name, _imported(self.kind, name))
        if name not in self._loaded:
            self._loaded[name] = self._load(self._offer(name))
        return self._loaded[name]

    def stored_name(self, name: str) -> str:
        """The name to write into a config, so that other processes find the same: of something registered, its
        `module:Class` if they can import that."""
        if name not in self.registered:
            return name
        thing = self.registered[name][0]
        return _place(thing) if _importable(thing) else name

    def only_here(self, name: str) -> bool:
        """Is this known in this process alone, because a script or a notebook has registered it?"""
        return name in self.registered and not _importable(self.registered[name][0])

    def knows(self, name: str) -> bool:
        """Could this name be found? Nothing is imported to tell."""
        known = name in self.builtin or name in self.registered
        return known or PLACE.fullmatch(name) is not None or name in entry_points(group=self.group).names

    def all(self) -> dict[str, T]:
        """Everything but what only a `module:Class` would reach. A broken entry point is left out with a warning."""
        found = {**self.builtin, **{name: used for name, (_, used) in self.registered.items()}}
        for entry in entry_points(group=self.group):
            if entry.name in found or entry.name in self._broken:
                continue
            try:
                found[entry.name] = self.find(entry.name)
            except HoldfastError as error:
                self._broken.add(entry.name)  # one warning per process
                complain(str(error))
        return found

    def unknown(self, name: object) -> HoldfastError:
        names = [*self.builtin, *self.registered, *entry_points(group=self.group).names]
        return HoldfastError(
            f"unknown {self.kind} {name!r}; {nearest(str(name), names)} (your own is named module:Class)"
        )

    def _offer(self, name: str) -> EntryPoint:
        offers = {entry.value: entry for entry in entry_points(group=self.group, name=name)}
        if not offers:
            raise self.unknown(name)
        if len(offers) > 1:
            raise HoldfastError(f"several packages offer a {self.kind} {name!r}; name one of {', '.join(offers)}")
        return next(iter(offers.values()))

    def _load(self, entry: EntryPoint) -> T:
        try:
            thing = entry.load()
        except (Exception, SystemExit) as error:
            raise HoldfastError(
                f"the {self.kind} {entry.name!r} of an installed package cannot be used: importing {entry.value} fails "
                f"({type(error).__name__}: {error}); repair or remove the package"
            ) from error
        return self.check(entry.name, thing)


def _imported(kind: str, name: str) -> Any:
    """The object that a `module:Class` names; modules of the current folder are found as well."""
    if name not in _allowed:
        raise HoldfastError(
            f"the {kind} {name!r} may not be imported here; only what this machine's own settings name may be"
        )
    module_name, _, path = name.partition(":")
    _add_current_folder()
    try:
        found: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise HoldfastError(
                f"there is no module {error.name!r} for the {kind} {name!r}, neither installed nor in {os.getcwd()}; "
                "install it, or run where it is"
            ) from error
        raise HoldfastError(
            f"importing {module_name} for the {kind} {name!r} fails ({type(error).__name__}: {error}); correct it"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            where = getattr(sys.modules[module_name], "__file__", None)
            hint = nearest(part, _public(found)) if _public(found) else "it is empty"
            raise HoldfastError(f"the module {module_name} ({where}) has no {part!r}; {hint}")
        found = getattr(found, part)
    return found


def _add_current_folder() -> None:
    """Behind everything else, so that no file of the current folder replaces a module of Python or of a package."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _public(thing: Any) -> list[str]:
    return [word for word in vars(thing) if not word.startswith("_")]


def _where(thing: Any) -> tuple[str, str]:
    """The module and the name of a class or function; of another object, its identity."""
    name = getattr(thing, "__qualname__", None)
    return (thing.__module__, name) if name else ("", str(id(thing)))


def _place(thing: Any) -> str:
    return ":".join(_where(thing))


def _importable(thing: Any) -> bool:
    """Would another process find this under its module and name?"""
    module, path = _where(thing)
    found: Any = sys.modules.get(module)
    if module in ("", "__main__") or getattr(found, "__spec__", None) is None:
        return False
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is thing


def import_paths() -> Iterator[str]:
    """Where this process looks for modules, for a process that it starts."""
    return (path or os.getcwd() for path in sys.path)
