"""A GPU that is none: tensors on it hold their numbers on the CPU, and refuse what tensors on a GPU would refuse.

PyTorch's own fake tensors hold no numbers, so nothing that looks at one, as a trainer does at every step, runs on them;
and where PyTorch was built without CUDA, no gradient flows through a fake CUDA device. Here every operation is carried
out, and its numbers can be held against the CPU's. What turns red is what would there: a tensor that was left on the
CPU, a generator of another device, NumPy on a tensor that is not on the CPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_aten = torch.ops.aten
_MOVES = frozenset({_aten._to_copy.default, _aten.copy_.default})
"""What takes numbers from one device to another."""
_CHOOSING = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
        _aten._unsafe_index.Tensor,
    }
)
"""What a GPU takes indices on the CPU for."""
_CPU = torch.device("cpu")


class _Module:
    """What PyTorch asks a kind of device for, as it asks `torch.cuda`. Random numbers are those of the CPU."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """`torch.manual_seed` has done it."""

    def get_rng_state(self, _: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, _: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def device() -> torch.device:
    """The device; PyTorch knows it from the first call on."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    return torch.device(NAME, 0)


class Generator(torch.Generator):
    """A stream of the CPU's numbers that knows for which device it was made."""

    on: torch.device

    def __new__(cls, on: torch.device | str = _CPU) -> "Generator":
        made: Generator = super().__new__(cls)
        made.on = torch.device(on)
        return made


class Pretended(Tensor):
    """A tensor on that device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        made: Pretended = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device(),
        )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Pretended({self.held!r})"

    def tolist(self) -> list[object]:
        """As any tensor's; PyTorch has none for its subclasses."""
        numbers: list[object] = self.held.tolist()
        return numbers

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raises TypeError, as of a tensor on a GPU."""
        raise TypeError(f"a tensor on {self.device} has no numpy(); use .cpu() first")

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied._is_param = getattr(self, "_is_param", False)
            memo[id(self)] = copied
        return memo[id(self)]

    def untyped_storage(self) -> torch.UntypedStorage:
        """Where its numbers are: what writes weights looks for those that share some."""
        return self.held.untyped_storage()

    def storage(self) -> torch.TypedStorage:
        """See `untyped_storage`."""
        shared: torch.TypedStorage = self.held.storage()  # type: ignore[no-untyped-call]
        return shared

    def data_ptr(self) -> int:
        """See `untyped_storage`."""
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return _carried_out(func, args, kwargs or {})


class _Making(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whatever is made on the device is made here."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return _carried_out(func, args, kwargs or {})


class _Drawing(TorchFunctionMode):
    """Whoever draws is seen here, while generators are still the objects that were made."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = tree_leaves((tuple(args), dict(kwargs or {})))
        there = any(isinstance(one, Pretended) or (isinstance(one, torch.device) and one.type == NAME) for one in given)
        for one in given:
            if isinstance(one, Generator) and there != (one.on.type == NAME):
                where = "" if there else "not "
                raise RuntimeError(f"{func}: a generator of {one.on} for a tensor that is {where}on {device()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def pretending() -> Iterator[torch.device]:
    """While this is on, tensors and generators can be made on the device."""
    there, before, plain = device(), torch._C._only_lift_cpu_tensors(), torch.Generator
    torch._C._set_only_lift_cpu_tensors(True)  # else `torch.tensor` goes to kernels that the device does not have
    torch.Generator = Generator  # type: ignore[misc, assignment]  # one of such a device can be had from C++ alone
    try:
        # A thread for the way back, as a GPU has one, would die of an error, and this process with it.
        with _Drawing(), _Making(), torch.autograd.set_multithreading_enabled(False):  # type: ignore[no-untyped-call]
            yield there
    finally:
        torch.Generator = plain  # type: ignore[misc]
        torch._C._set_only_lift_cpu_tensors(before)


def _carried_out(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """An operation of the device, or of the CPU.

    Raises:
        RuntimeError: tensors of both meet in it.
    """
    given = tree_leaves((args, kwargs))
    away = [one for one in given if isinstance(one, Pretended)]
    asked = [one for one in given if isinstance(one, torch.device)]
    moved = isinstance(args[0], Pretended) if func in _MOVES else bool(away)
    there = asked[0].type == NAME if asked else moved
    _refuse_strangers(func, args, given, bool(away))
    plain_args, plain_kwargs = tree_map(_held, (tuple(args), dict(kwargs)))
    result = func(*plain_args, **plain_kwargs)
    known = {id(one.held): one for one in away}

    def placed(one: object) -> object:
        if not isinstance(one, Tensor) or not there:
            return one
        return known[id(one)] if id(one) in known else Pretended(one)

    return tree_map(placed, result)


def _refuse_strangers(func: Callable[..., object], args: Sequence[object], given: Sequence[object], away: bool) -> None:
    """Tensors of one number may be anywhere, as for a GPU."""
    here = [one for one in given if isinstance(one, Tensor) and not isinstance(one, Pretended) and one.dim()]
    chosen = func in _CHOOSING and isinstance(args[0], Pretended)
    if away and here and func not in _MOVES and not chosen:
        shapes = ", ".join(str(tuple(one.shape)) for one in here)
        raise RuntimeError(f"{func}: all tensors must be on {device()}; on the CPU are those of shape {shapes}")


def _held(one: object) -> object:
    """As the CPU is given it."""
    if isinstance(one, torch.device):
        return _CPU if one.type == NAME else one
    return one.held if isinstance(one, Pretended) else one
