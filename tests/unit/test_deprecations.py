"""Old names of public things: they work, they warn at the caller's line, and type checkers do not see them."""

import asyncio
import copy
import dataclasses
import importlib
import inspect
import pickle
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest

import repl_rl
from repl_rl.deprecations import (
    REMOVED_IN,
    OldNameWarning,
    bind_old_methods,
    bind_protocol_methods,
    deprecated_keywords,
    deprecated_members,
    read_old_keys,
    rename_keys,
)
from repl_rl.deprecations.old_names import OLD_EXPORTS, OLD_KEYWORDS, OLD_MEMBERS, OLD_MODULES
from repl_rl.errors import ConfigError
from repl_rl.sandbox.base import SupportsHostFunctions
from repl_rl.settings.component_registry import import_attribute


def line() -> int:
    """Return the line that calls this."""
    return sys._getframe(1).f_lineno


@contextmanager
def warned(*messages: str) -> Iterator[list[int]]:
    """Expect one warning per message, in order; fill in the lines of this file that they point at."""
    at: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield at
    assert [str(each.message) for each in caught] == list(messages)
    assert {each.category for each in caught} <= {OldNameWarning}
    assert {each.filename for each in caught} <= {__file__}
    at += [each.lineno for each in caught]


def old(name: str, new: str) -> str:
    return f"{name} is deprecated and is removed in repl_rl {REMOVED_IN}; use {new}"


get: Callable[[object, str], object] = getattr
method: Callable[[object, str], Callable[..., object]] = getattr
put: Callable[[object, str, object], None] = setattr
"""For names that type checkers do not see. They have no frame of their own."""


def test_the_warning_is_a_deprecation_warning() -> None:
    assert issubclass(OldNameWarning, DeprecationWarning)


# Names of modules.

PACKAGE = {
    "__init__.py": "from repl_rl.deprecations import module_getattr\n"
    "def _load(name):\n"
    "    if name == 'Lazy': return 'loaded'\n"
    "    raise AttributeError(f'no {name}')\n"
    "__getattr__ = module_getattr(__name__, {'Early': 'Lazy', 'World': 'aged.config.Config'}, _load)\n",
    "config.py": "from repl_rl.deprecations import module_getattr\n"
    "class Config: pass\n"
    "globals()['__getattr__'] = module_getattr(__name__, {'World': 'Config'})\n",
}


@pytest.fixture
def aged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A package with old names: `aged.World`, `aged.Early` and `aged.config.World`."""
    (tmp_path / "aged").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "aged" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("aged")
    for name in [name for name in sys.modules if name.partition(".")[0] == "aged"]:
        del sys.modules[name]


def test_an_old_name_of_a_module_is_the_object_of_the_new_one(aged: object) -> None:
    config = importlib.import_module("aged.config")
    with warned(old("aged.config.World", "aged.config.Config"), old("aged.World", "aged.config.Config")) as at:
        here, first, second = line(), get(config, "World"), get(aged, "World")
    assert at == [here, here]
    assert first is second is get(config, "Config")


def test_an_old_name_of_a_module_may_stand_for_a_name_that_the_module_imports_late(aged: object) -> None:
    with warned(old("aged.Early", "aged.Lazy")):
        assert get(aged, "Early") == "loaded"
    with warned():
        assert get(aged, "Lazy") == "loaded"


def test_a_from_import_of_an_old_name_warns_at_that_line_and_once(aged: object, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        exec(compile("\n\nfrom aged import World\n", "mine.py", "exec"), {"__name__": "mine"})
    assert [(each.filename, each.lineno, str(each.message)) for each in caught] == [
        ("mine.py", 3, old("aged.World", "aged.config.Config"))
    ]


def test_other_names_of_a_module_are_attribute_errors_without_a_warning(aged: object) -> None:
    config = importlib.import_module("aged.config")
    with warned():
        with pytest.raises(AttributeError, match=r"^module 'aged\.config' has no attribute 'Nothing'$"):
            get(config, "Nothing")
        with pytest.raises(AttributeError, match="no Nothing"):
            get(aged, "Nothing")


def test_what_was_pickled_under_an_old_class_name_is_read_and_is_an_instance(aged: object) -> None:
    config = importlib.import_module("aged.config")
    stored = pickle.dumps(config.Config(), protocol=0).replace(b"aged.config\nConfig", b"aged.config\nWorld")
    with warned(*2 * [old("aged.config.World", "aged.config.Config")]):
        read = pickle.loads(stored)
        assert isinstance(read, config.World)
    assert type(read) is config.Config


# Attributes and methods.


@deprecated_keywords(cut="truncated")
@deprecated_members(cut="truncated", short="as_text")
@dataclass(frozen=True, slots=True)
class Observed:
    """Frozen, with slots."""

    text: str
    truncated: bool = False

    def as_text(self, end: str = "") -> str:
        return self.text + end


@deprecated_members(last="newest", memory="state_dict", of="from_name", told="summary")
class Store:
    """A plain class with an attribute, a method, a class method and a property."""

    def __init__(self, newest: int) -> None:
        self.newest = newest

    def state_dict(self) -> dict[str, object]:
        return {"newest": self.newest}

    @classmethod
    def from_name(cls, name: str) -> "Store":
        return cls(len(name))

    @property
    def summary(self) -> str:
        return f"{self.newest} stored"


def test_an_old_attribute_is_read_and_set_as_the_new_one() -> None:
    store = Store(1)
    with warned(*3 * [old("Store.last", "Store.newest")]) as at:
        first = line()
        assert get(store, "last") == 1
        put(store, "last", 2)
        assert get(store, "last") == 2
    assert at == [first + 1, first + 2, first + 3]
    assert vars(store) == {"newest": 2}


def test_an_old_method_is_called_as_the_new_one() -> None:
    with warned(old("Store.memory", "Store.state_dict")) as at:
        here, state = line(), method(Store(3), "memory")()
    assert (at, state) == ([here], {"newest": 3})
    with warned(old("Observed.short", "Observed.as_text")):
        assert method(Observed("a"), "short")("!") == "a!"


def test_an_old_class_method_and_an_old_property_work() -> None:
    with warned(*2 * [old("Store.of", "Store.from_name")], old("Store.told", "Store.summary")):
        made = method(Store, "of")("four")
        assert isinstance(made, Store)
        assert isinstance(method(made, "of")("six"), Store)
        assert get(made, "told") == "4 stored"


def test_what_the_new_name_refuses_the_old_one_refuses() -> None:
    with warned(old("Store.told", "Store.summary")), pytest.raises(AttributeError):
        put(Store(1), "told", "other")
    with warned(), pytest.raises((FrozenInstanceError, TypeError)):  # Python 3.11 raises TypeError
        put(Observed("a"), "cut", True)


def test_a_member_of_an_enumeration_has_an_old_name() -> None:
    @deprecated_members(DOOMED="EARLY_STOPPED")
    class Stop(StrEnum):
        EARLY_STOPPED = "early_stopped"

    with warned(old(f"{Stop.__qualname__}.DOOMED", f"{Stop.__qualname__}.EARLY_STOPPED")):
        assert get(Stop, "DOOMED") is Stop.EARLY_STOPPED
    assert list(Stop) == [Stop.EARLY_STOPPED]


def test_a_frozen_dataclass_with_slots_is_what_it_was() -> None:
    one = Observed("a", truncated=True)
    with warned(old("Observed.cut", "Observed.truncated")):
        assert get(one, "cut") is True
    with warned():
        assert [field.name for field in dataclasses.fields(one)] == ["text", "truncated"]
        assert dataclasses.asdict(one) == {"text": "a", "truncated": True}
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == replace(one, text="a") == one
        assert repr(one) == "Observed(text='a', truncated=True)"
        assert (hash(one), one.__slots__) == (hash(Observed("a", True)), ("text", "truncated"))
        assert not hasattr(one, "__dict__")
        assert Observed.__module__ == __name__


def test_match_reads_an_old_attribute() -> None:
    with warned(old("Observed.cut", "Observed.truncated")):
        match Observed("a", True):
            case Observed(cut=True):  # type: ignore[misc]
                found = True
            case _:
                found = False
    assert found


def test_an_old_name_of_a_subclass_reads_what_the_subclass_overrides() -> None:
    class Newest(Store):
        def state_dict(self) -> dict[str, object]:
            return {"mine": True}

    with warned(old("Store.memory", "Store.state_dict")):
        assert method(Newest(1), "memory")() == {"mine": True}


def test_an_alias_that_would_hide_a_member_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Store\.summary is a member of the class"):
        deprecated_members(summary="newest")(Store)

    class Derived(Store):
        pass

    with pytest.raises(TypeError, match="summary is a member of the class"):
        deprecated_members(summary="newest")(Derived)
    deprecated_members(told="newest")(Derived)
    with warned(old(f"{Derived.__qualname__}.told", f"{Derived.__qualname__}.newest")):
        assert get(Derived(1), "told") == 1


# Methods that users override.


@deprecated_members(opened="open_resources", elsewhere="is_remote", doctor="describe", kind_of="classify")
class Sampler(ABC):
    """A base class of users."""

    is_remote = False

    @abstractmethod
    def open_resources(self) -> str: ...

    def describe(self) -> list[str]:
        return ["base"]

    @property
    def status(self) -> str:
        return "idle"

    @classmethod
    def classify(cls) -> str:
        return "sampler"

    def run(self) -> tuple[str, bool, list[str], str]:
        """Call everything by its new name, as the package does."""
        return self.open_resources(), self.is_remote, self.describe(), self.classify()


class Ours(Sampler):
    """Another class of the package, between the base class and those of users."""

    def open_resources(self) -> str:
        return "ours"

    def describe(self) -> list[str]:
        return [*super().describe(), "ours"]


def defines(cls: str, name: str, new: str) -> str:
    return old(f"{name!r}, which {__name__}.{cls} defines,", repr(new))


def qualified(function: Callable[[], None], cls: str) -> str:
    return f"{function.__name__}.<locals>.{cls}"


def test_an_override_of_an_old_method_is_called_under_the_new_name() -> None:
    name = qualified(test_an_override_of_an_old_method_is_called_under_the_new_name, "Mine")
    with warned(defines(name, "opened", "open_resources"), defines(name, "elsewhere", "is_remote")) as at:
        here = line() + 1

        class Mine(Sampler):
            elsewhere = True

            def opened(self) -> str:
                return "mine"

    assert set(at) <= {here, here + 1}
    with warned():
        assert Mine().run() == ("mine", True, ["base"], "sampler")  # type: ignore[abstract]
        assert method(Mine(), "opened")() == "mine"  # type: ignore[abstract]


def test_an_override_may_be_a_class_method_or_a_property() -> None:
    with warned(
        defines(qualified(test_an_override_may_be_a_class_method_or_a_property, "Mine"), "kind_of", "classify")
    ):

        class Mine(Ours):
            @classmethod
            def kind_of(cls) -> str:
                return cls.__name__

    assert Mine().run()[3] == "Mine"

    @deprecated_members(told="summary")
    class Base:
        summary = "base"

    with warned(defines(qualified(test_an_override_may_be_a_class_method_or_a_property, "Derived"), "told", "summary")):

        class Derived(Base):
            @property
            def told(self) -> str:
                return "derived"

    assert Derived().summary == "derived"


def test_an_override_reaches_the_one_above_it_through_super() -> None:
    """Both through the class that has the alias, and through a class in between that overrides the new name."""
    test = test_an_override_reaches_the_one_above_it_through_super
    names = [qualified(test, "First"), qualified(test, "Second")]
    with warned(*(defines(name, "doctor", "describe") for name in names)):

        class First(Ours):
            def doctor(self) -> list[str]:
                return [*super().doctor(), "first"]  # type: ignore[misc]

        class Second(First):
            def doctor(self) -> list[str]:
                return [*super().doctor(), "second"]

    with warned(old("Sampler.doctor", "Sampler.describe")):
        assert Second().describe() == ["base", "ours", "first", "second"]

    with warned():

        class Third(Second):
            def describe(self) -> list[str]:
                return [*super().describe(), "third"]

    with warned(old("Sampler.doctor", "Sampler.describe")):
        assert Third().describe() == ["base", "ours", "first", "second", "third"]


def test_an_override_of_a_class_method_reaches_the_one_above_it() -> None:
    test = test_an_override_of_a_class_method_reaches_the_one_above_it
    with warned(defines(qualified(test, "Mine"), "kind_of", "classify")):

        class Mine(Ours):
            @classmethod
            def kind_of(cls) -> str:
                found: str = super().kind_of()  # type: ignore[misc]
                return f"{cls.__name__} {found}"

    with warned(old("Sampler.kind_of", "Sampler.classify")):
        assert Mine.classify() == "Mine sampler"


def test_an_override_in_a_mixin_counts() -> None:
    class Mixin:
        def doctor(self) -> list[str]:
            return ["mixin"]

    with warned(defines(qualified(test_an_override_in_a_mixin_counts, "Mine"), "doctor", "describe")):

        class Mine(Mixin, Ours):
            pass

    assert Mine().describe() == ["mixin"]
    with warned():

        class Behind(Ours, Mixin):  # what the package defines comes first
            pass

    assert Behind().describe() == ["base", "ours"]


def test_a_class_that_overrides_both_names_is_left_alone() -> None:
    with warned():

        class Mine(Ours):
            def describe(self) -> list[str]:
                return [*super().describe(), "new"]

            def doctor(self) -> list[str]:
                return [*super().doctor(), "old"]  # type: ignore[misc]

    with warned(old("Sampler.doctor", "Sampler.describe")):
        assert (Mine().describe(), Mine().doctor()) == (["base", "ours", "new"], ["base", "ours", "old"])


def test_an_old_override_makes_an_abstract_method_concrete_and_no_override_does_not() -> None:
    class Mine(Sampler):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Mine()  # type: ignore[abstract]


def test_a_dataclass_with_slots_that_overrides_an_old_method_is_warned_once() -> None:
    test = test_a_dataclass_with_slots_that_overrides_an_old_method_is_warned_once
    with warned(defines(qualified(test, "Mine"), "doctor", "describe")) as at:
        first = line()

        @dataclass(frozen=True, slots=True)  # it makes the class a second time
        class Mine(Ours):
            size: int = 3

            def doctor(self) -> list[str]:
                return [str(self.size)]

    assert first < at[0] < first + 5
    assert Mine(4).describe() == ["4"]


def test_the_hook_of_a_class_for_its_subclasses_is_called_as_before() -> None:
    seen: list[tuple[str, object]] = []

    class Root:
        def __init_subclass__(cls, size: int = 0) -> None:
            seen.append((cls.__name__, size))

    @deprecated_members(told="text")
    class Base(Root, size=1):
        text = "base"

    @deprecated_members(told="text")
    class Hooked(Base, size=2):
        def __init_subclass__(cls, colour: str = "", size: int = 0) -> None:
            super().__init_subclass__(size=size)
            seen.append((cls.__name__, colour))

    class Leaf(Hooked, colour="red", size=3):
        pass

    assert seen == [("Base", 1), ("Hooked", 2), ("Leaf", 3), ("Leaf", "red")]


# Protocols.


@deprecated_members(offer="offer_functions")
@runtime_checkable
class SupportsOffers(Protocol):
    """Found by `isinstance`."""

    def offer_functions(self, names: Sequence[str]) -> str: ...


class Structural:
    """Satisfies the protocol without naming it."""

    def offer_functions(self, names: Sequence[str]) -> str:
        return "new"


@deprecated_members(offer="offer_functions")
class Aliased:
    """Satisfies the protocol, and keeps the old name itself."""

    def offer_functions(self, names: Sequence[str]) -> str:
        return "aliased"


def test_a_protocol_does_not_ask_for_the_old_name() -> None:
    with warned():
        assert isinstance(Structural(), SupportsOffers)
        assert issubclass(Structural, SupportsOffers)
        assert isinstance(Aliased(), SupportsOffers)
        assert not isinstance(3, SupportsOffers)
    with warned(old("Aliased.offer", "Aliased.offer_functions")):
        assert method(Aliased(), "offer")([]) == "aliased"


def test_a_subclass_of_a_protocol_that_has_the_old_method_is_bound() -> None:
    test = test_a_subclass_of_a_protocol_that_has_the_old_method_is_bound
    with warned(defines(qualified(test, "Named"), "offer", "offer_functions")) as at:
        here = line() + 1

        class Named(SupportsOffers):
            def offer(self, names: Sequence[str]) -> str:
                return "named"

    assert at == [here + 1]
    assert Named().offer_functions([]) == "named"  # type: ignore[abstract]


def test_another_implementation_that_has_the_old_method_is_bound_on_request_and_warned_once() -> None:
    class Root:
        def offer(self, names: Sequence[str]) -> str:
            return "root"

    class Foreign(Root):
        pass

    assert not isinstance(Foreign(), SupportsOffers)
    test = test_another_implementation_that_has_the_old_method_is_bound_on_request_and_warned_once
    with warned(defines(qualified(test, "Foreign"), "offer", "offer_functions")) as at:
        here = line() + 1
        bind_old_methods(Foreign, {"offer": "offer_functions"})
        bind_old_methods(Foreign, {"offer": "offer_functions"})
    assert at == [here]
    thing: object = Foreign()
    assert isinstance(thing, SupportsOffers)
    assert thing.offer_functions([]) == "root"


# Keyword arguments.


@deprecated_keywords(tell="warn", most="max_size")
def save(path: str, *, warn: str = "", max_size: int = 0) -> tuple[str, str, int]:
    """A function."""
    return path, warn, max_size


@deprecated_keywords(opener="open_rollouts")
class Client:
    """A class with a constructor of its own."""

    def __init__(self, open_rollouts: str, size: int = 0) -> None:
        self.made = (open_rollouts, size)


class Derived(Client):
    """Passes an old name on."""

    def __init__(self) -> None:
        super().__init__(opener="derived")  # type: ignore[call-arg]


def untyped(target: Callable[..., object]) -> Callable[..., object]:
    """Return `target`, whose old keywords type checkers do not see."""
    return target


def argument(name: str, of: str, new: str) -> str:
    return old(f"the argument {name!r} of {of}()", repr(new))


def test_a_function_takes_old_keywords() -> None:
    with warned(argument("tell", "save", "warn"), argument("most", "save", "max_size")) as at:
        here, result = line(), untyped(save)("a", most=3, tell="b")
    assert (at, result) == ([here, here], ("a", "b", 3))
    with warned():
        assert save("a", warn="b", max_size=3) == result


def test_an_argument_under_both_names_is_refused() -> None:
    with warned(), pytest.raises(TypeError, match=r"^save\(\) got 'tell' and 'warn', which is its new name; leave"):
        untyped(save)("a", warn="b", tell="c")
    with warned(argument("opener", "Client", "open_rollouts")), pytest.raises(TypeError, match="multiple values"):
        untyped(Client)("a", opener="b")


def test_a_constructor_takes_old_keywords() -> None:
    with warned(argument("opener", "Client", "open_rollouts")):
        client = untyped(Client)(opener="a", size=2)
    assert isinstance(client, Client)
    assert client.made == ("a", 2)
    with warned(argument("opener", "Client", "open_rollouts")):
        assert Derived().made == ("derived", 0)


def test_a_dataclass_takes_old_keywords_and_so_does_replace() -> None:
    with warned(*2 * [argument("cut", "Observed", "truncated")]) as at:
        first, one = line(), untyped(Observed)("a", cut=True)
        second, other = line(), replace(Observed("b", True), cut=False)  # type: ignore[call-arg]
    assert one == Observed("a", True)
    assert other == Observed("b", False)
    assert at == [first, second]


def test_a_decorated_function_or_class_is_what_it_was() -> None:
    assert str(inspect.signature(save)) == "(path: str, *, warn: str = '', max_size: int = 0) -> tuple[str, str, int]"
    assert str(inspect.signature(Observed)) == "(text: str, truncated: bool = False) -> None"
    assert (save.__doc__, save.__name__) == ("A function.", "save")
    assert pickle.loads(pickle.dumps(save)) is save
    assert pickle.loads(pickle.dumps(Client)) is Client


def test_a_coroutine_function_takes_old_keywords() -> None:
    @deprecated_keywords(seconds="timeout_s")
    async def wait(timeout_s: float) -> float:
        return timeout_s

    with warned(argument("seconds", wait.__qualname__, "timeout_s")):
        waiting = untyped(wait)(seconds=2.0)
    assert inspect.isawaitable(waiting)

    async def main() -> object:
        return await waiting

    assert asyncio.run(main()) == 2.0


# Settings.

SETTINGS = {
    "states": "checkpoint",
    "chat": "chat_template_kwargs",
    "fleet": "workers",
    "fleet.nodes": "workers.max_workers",
    "trainer.updates": "trainer.num_iterations",
    "trainer.tables.old": "moved.new",
}


def key(name: str, new: str) -> str:
    return old(f"{name!r} in mine.toml", repr(new))


def test_old_keys_of_nested_tables_are_renamed() -> None:
    given = {
        "model": "m",
        "states": "never",
        "chat": {"thinking": True, "depth": {"most": 2}},
        "fleet": {"name": "ray", "nodes": 2},
        "trainer": {"updates": 3, "steps": 4, "tables": {"old": [1], "other": {}}},
    }
    before = copy.deepcopy(given)
    with warned(
        key("states", "checkpoint"),
        key("chat", "chat_template_kwargs"),
        key("fleet", "workers"),
        key("fleet.nodes", "workers.max_workers"),
        key("trainer.updates", "trainer.num_iterations"),
        key("trainer.tables.old", "moved.new"),
    ) as at:
        here, renamed = line(), rename_keys(given, SETTINGS, "mine.toml")
    assert set(at) == {here}
    assert given == before
    assert renamed == {
        "model": "m",
        "checkpoint": "never",
        "chat_template_kwargs": {"thinking": True, "depth": {"most": 2}},
        "workers": {"name": "ray", "max_workers": 2},
        "trainer": {"num_iterations": 3, "steps": 4, "tables": {"other": {}}},
        "moved": {"new": [1]},
    }


def test_old_dotted_keys_are_renamed_and_stay_dotted() -> None:
    given = {"fleet": "ray", "fleet.nodes": 2, "chat.thinking": True, "trainer.updates": 3, "trainer.steps": 4}
    with warned(
        key("fleet", "workers"),
        key("fleet.nodes", "workers.max_workers"),
        key("chat", "chat_template_kwargs"),
        key("trainer.updates", "trainer.num_iterations"),
    ):
        renamed = rename_keys(given, SETTINGS, "mine.toml")
    assert renamed == {
        "workers": "ray",
        "workers.max_workers": 2,
        "chat_template_kwargs.thinking": True,
        "trainer.num_iterations": 3,
        "trainer.steps": 4,
    }


def test_new_keys_are_left_as_they_are_without_a_warning() -> None:
    given = {"checkpoint": "never", "trainer": {"num_iterations": 1}, "fleets": 1, "statesman": {"updates": 1}}
    with warned():
        assert rename_keys(given, SETTINGS, "mine.toml") == given


def test_the_result_shares_no_table_with_what_was_given() -> None:
    given: dict[str, object] = {"trainer": {}, "moved": {}}
    with warned(key("trainer.updates", "trainer.num_iterations")):
        rename_keys({**given, "trainer.updates": 3}, SETTINGS, "mine.toml")
    with warned(key("trainer.tables.old", "moved.new")):
        renamed = rename_keys({**given, "trainer": {"tables": {"old": 1}}}, SETTINGS, "mine.toml")
    assert renamed == {"moved": {"new": 1}}
    assert given == {"trainer": {}, "moved": {}}


@pytest.mark.parametrize(
    ("given", "old_key", "new_key"),
    [
        ({"states": "never", "checkpoint": "never"}, "states", "checkpoint"),
        ({"trainer": {"num_iterations": 1, "updates": 2}}, "trainer.updates", "trainer.num_iterations"),
        ({"trainer.updates": 2, "trainer.num_iterations": 2}, "trainer.updates", "trainer.num_iterations"),
        ({"workers": "ray", "fleet": {"nodes": 2}}, "fleet.nodes", "workers.max_workers"),
        ({"chat": {"a": 1}, "chat_template_kwargs": {"a": 2}}, "chat", "chat_template_kwargs"),
    ],
)
def test_a_setting_under_both_keys_is_refused(given: dict[str, object], old_key: str, new_key: str) -> None:
    with warned(), pytest.raises(ConfigError) as refused:
        rename_keys(given, SETTINGS, "mine.toml")
    error = refused.value
    assert (error.thing, error.value) == ("key in mine.toml", old_key)
    assert error.remedy == f"it is the old name of {new_key!r}, which is there too; leave {old_key!r} out"


# Stored rows.

METRICS = {
    "reward_mean": "reward",
    "outcome/*": "rewards/*/mean",
    "reward/*": "line_rewards/*",
    "tool/*/calls": "tools/*/call_frequency",
}


def test_old_keys_of_a_row_are_read_in_order_and_without_a_warning() -> None:
    row = {"step": 1, "reward_mean": 0.5, "outcome/task": 1.0, "reward/a/b": 0.1, "tool/add/calls": 2, "solve_rate": 1}
    with warned():
        read = read_old_keys(row, METRICS)
    assert list(read.items()) == [
        ("step", 1),
        ("reward", 0.5),
        ("rewards/task/mean", 1.0),
        ("line_rewards/a/b", 0.1),
        ("tools/add/call_frequency", 2),
        ("solve_rate", 1),
    ]


def test_keys_that_only_look_like_a_pattern_stay() -> None:
    row = {
        "reward": 1,
        "reward/": 2,
        "rewards/task/mean": 3,
        "tool/calls": 4,
        "tool//calls": 5,
        "tool/add/times": 6,
        "a/outcome/b": 7,
    }
    with warned():
        assert read_old_keys(row, METRICS) == row


def test_a_row_with_both_keys_keeps_the_value_of_the_new_one() -> None:
    for row in ({"reward_mean": 1, "reward": 2}, {"reward": 2, "reward_mean": 1}):
        assert read_old_keys(row, METRICS) == {"reward": 2}
    assert read_old_keys({"reward/a": 1, "line_rewards/a": 2}, METRICS) == {"line_rewards/a": 2}


# Type checkers.


@pytest.mark.parametrize(
    ("name", "new"),
    [
        (
            "repl_rl.credit.advantage_estimators:first_of_streak",
            "repl_rl.credit.advantage_estimators:penalize_first_error",
        ),
        ("repl_rl.credit.rewards:broken", "repl_rl.credit.rewards:compute_error_potential"),
    ],
)
def test_old_functions_in_settings_work_and_warn(name: str, new: str) -> None:
    with pytest.warns(OldNameWarning, match=f"{name} is deprecated .*; use {new}"):
        found = import_attribute("estimator", name)
    assert found is import_attribute("estimator", new)


@pytest.mark.parametrize(("old", "new"), sorted(OLD_MODULES.items()))
def test_old_paths_of_modules_work_and_warn(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(OldNameWarning, match=f"{old} is deprecated .*; use {new}") as caught:
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__spec__ is not None
    assert found.__spec__.name == new
    assert {Path(warning.filename) for warning in caught} == {Path(__file__)}


def test_an_old_function_of_an_old_module_works_in_settings() -> None:
    with pytest.warns(OldNameWarning, match="use repl_rl.credit.advantage_estimators:penalize_first_error"):
        found = import_attribute("rewards", "repl_rl.credit.errors:first_of_streak")
    assert found is import_attribute("rewards", "repl_rl.credit.advantage_estimators:penalize_first_error")


@pytest.mark.parametrize(("name", "new"), sorted(OLD_EXPORTS.items()))
def test_old_exports_work_and_warn(name: str, new: str) -> None:
    with pytest.warns(OldNameWarning, match=rf"repl_rl\.{name} is deprecated .*; use repl_rl\.{new}$"):
        found = getattr(repl_rl, name)
    assert found is getattr(repl_rl, new)
    assert name not in dir(repl_rl)


@pytest.mark.parametrize("place", sorted({*OLD_MEMBERS, *OLD_KEYWORDS}))
def test_old_names_of_classes_lead_to_members_that_are_there(place: str) -> None:
    kind: type = import_attribute("class", place)  # type: ignore[assignment]
    keywords = OLD_KEYWORDS.get(place, {})
    assert {new.partition(".")[0] for new in keywords.values()} <= set(inspect.signature(kind).parameters)
    if not getattr(kind, "_is_protocol", False):
        assert all(inspect.getattr_static(kind, old, None) is not None for old in OLD_MEMBERS.get(place, {}))


def test_a_console_with_the_old_name_of_a_method_can_be_offered_functions() -> None:
    class Session:
        host: object = None

        def offer(self, host: object) -> None:
            self.host = host

    session = Session()
    with pytest.warns(OldNameWarning, match="'offer'"):
        bind_protocol_methods(session, SupportsHostFunctions)
    assert isinstance(session, SupportsHostFunctions)
    session.offer_functions(None)  # type: ignore[arg-type]
