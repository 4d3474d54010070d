"""Checks a reader's extensions and puts them among the parts of an engine."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import Any

import torch

from nanovllm.engine.block_manager import PrefixCache
from nanovllm.engine.interfaces import LogitsProcessor, Observer, Parts
from nanovllm.engine.scheduler import Admission, SchedulingPolicy, Verdict
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.attention import AttentionBackend
from nanovllm.utils.validation import shown

# Of these an engine has any number; and of these one, in whose place the extension stands.
SEVERAL = {Observer: "observers", LogitsProcessor: "logits_processors", Admission: "admissions"}
ONE = {
    PrefixCache: "prefix_cache",
    SchedulingPolicy: "policy",
    AttentionBackend: "make_backend",
    CacheLayout: "layout",
}
INTERFACES = (*SEVERAL, *ONE)
REQUIRED = {LogitsProcessor: "wants", Admission: "admits"}


class ExtensionError(RuntimeError):
    """An extension has raised an error; the message names it and its method."""


def add_extensions(parts: Parts, extensions: Iterable[Any], num_ranks: int) -> Parts:
    """
    The parts with these objects, or those that strings "package.module:Name" name, applied in order. Raises
    TypeError for what is no extension and ValueError for two that cannot stand together, naming them.
    """
    replaced: dict[type, str] = {}
    for given in extensions:
        if num_ranks > 1 and not isinstance(given, str):  # each rank makes its own
            raise ValueError(
                f"with several ranks extensions must be 'package.module:Name', got {shown(given)}"
            )
        extension = load(given)
        name = type(extension).__name__
        check(extension, name)
        guard(extension, name)
        for interface in INTERFACES:
            if not isinstance(extension, interface):
                continue
            if (field := SEVERAL.get(interface)) is not None:
                setattr(parts, field, (*getattr(parts, field), extension))
                continue
            if interface in replaced:
                pair = f"{replaced[interface]} and {name}"
                raise ValueError(f"{pair} cannot stand together: an engine has one {interface.__name__}")
            replaced[interface] = name
            part = functools.partial(with_layout, extension) if interface is AttentionBackend else extension
            setattr(parts, ONE[interface], part)
    parts.__post_init__()  # sorts the logits processors
    names = [processor.name for processor in parts.logits_processors]
    for processor in parts.logits_processors:
        if names.count(processor.name) > 1 or not processor.name:
            raise ValueError(f"{type(processor).__name__} needs a name of its own, not {processor.name!r}")
    return parts


def load(given: Any) -> Any:
    """The object itself, or what "package.module:Name" names; of a class a new object."""
    if isinstance(given, str):
        try:
            given = resolve_name(given)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"extensions: {given!r} cannot be imported: {error}") from error
    return given() if isinstance(given, type) else given


def with_layout(backend: AttentionBackend, config: Any, device: Any, layers: Any, layout: Any) -> Any:
    """A back-end that is there already, for caches of this layout."""
    backend.layout = layout
    return backend


def hooks_of(interfaces: Iterable[type]) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for interface in interfaces
        for name, method in vars(interface).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def check(extension: Any, name: str) -> None:
    """Raise TypeError unless its methods are those of its interfaces, with their arguments."""
    interfaces = [interface for interface in INTERFACES if isinstance(extension, interface)]
    if not interfaces:
        known = ", ".join(interface.__name__ for interface in INTERFACES)
        raise TypeError(f"{name} is no extension: its class must derive from one of {known}")
    hooks = hooks_of(interfaces)
    for interface, method in REQUIRED.items():
        if isinstance(extension, interface) and getattr(type(extension), method) is getattr(
            interface, method
        ):
            raise TypeError(
                f"{name} has no method {method!r}, without which a {interface.__name__} does nothing"
            )
    own = [
        cls
        for cls in type(extension).__mro__
        if not cls.__module__.startswith("nanovllm.") and cls is not object
    ]
    for method in {key for cls in own for key, value in vars(cls).items() if inspect.isfunction(value)}:
        if method.startswith("_"):
            continue
        if method not in hooks:
            if near := difflib.get_close_matches(method, hooks, 1, 0.75):
                raise TypeError(f"{name} has a method {method!r}, which nobody calls; is {near[0]!r} meant?")
            continue
        wanted = inspect.signature(hooks[method])
        try:
            inspect.signature(getattr(type(extension), method)).bind(*wanted.parameters)
        except TypeError as error:
            raise TypeError(f"{name}.{method} must take {wanted}: {error}") from error


# What else than an error may come from a method, and would break the engine later: the arguments and the
# result -> whether it is good.
RESULTS: dict[str, Callable[..., bool]] = {
    "admits": lambda result, *_: isinstance(result, Verdict),
    "apply": lambda result, logits, _: is_like(result, logits),
    "prefill": lambda result, q, *_: is_like(result, q),
    "decode": lambda result, q, *_: is_like(result, q),
    "order": lambda result, waiting: len({*result} & {*waiting}) == len([*result]),
    "chunk": lambda result, _, num_tokens: result in range(1, num_tokens + 1),
    "victim": lambda result, running: result in running,
}


def is_like(result: Any, given: torch.Tensor) -> bool:
    return isinstance(result, torch.Tensor) and result.shape == given.shape and result.device == given.device


def guard(extension: Any, name: str) -> None:
    """What its methods raise names it, and so does a result that cannot be."""
    for method, hook in hooks_of(cls for cls in INTERFACES if isinstance(extension, cls)).items():
        if getattr(type(extension), method) is not hook:
            setattr(extension, method, guarded(getattr(extension, method), name, method))


# The method of an extension that is being called, if there is one. Every thread has its own.
_inside = ContextVar("inside", default="")


def guarded(call: Callable[..., Any], name: str, method: str) -> Callable[..., Any]:
    where = f"{name}.{method}"

    @functools.wraps(call)
    def call_named(*args: Any, **options: Any) -> Any:
        if method == "started":
            [engine] = args
            for first in ("check_usable", "clear"):  # one of which every call of an engine begins with
                own = getattr(engine.__class__, first)
                setattr(engine, first, functools.partial(call_outside, own, engine))
        before = _inside.set(where)
        try:
            result = call(*args, **options)
            if inspect.isgenerator(result):  # which the check below would use up
                result = [*result]
            if method in RESULTS and not RESULTS[method](result, *args):
                raise ValueError(f"it must not return {shown(result)}")
            return result
        except Exception as error:
            # Of `read` a ValueError is about the request.
            if isinstance(error, ExtensionError) or (method == "read" and isinstance(error, ValueError)):
                raise
            named = ExtensionError(f"{where} raised {type(error).__name__}: {error}")
            if hasattr(error, "sequence"):
                named.sequence = error.sequence
            raise named from error
        finally:
            _inside.reset(before)

    return call_named


def call_outside(method: Callable[[Any], None], engine: Any) -> None:
    """A method of the engine, but not for an extension, which is called in the middle of one."""
    if where := _inside.get():
        raise RuntimeError(f"{where} must not call the engine, which is in the middle of a call")
    method(engine)
