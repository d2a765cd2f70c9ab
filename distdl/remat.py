"""Activation checkpointing of distributed functions: less memory for the same movements, twice."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from . import _torch
from .autograd import refuse_older_vmap
from .calls import public
from .compiled import traced_as
from .engine import transport
from .errors import DistdlError
from .ties import is_smooth, nothing, tie

__all__ = ["remat"]
Function = TypeVar("Function", bound=Callable[..., Any])
Tensors = Sequence[torch.Tensor]


class Regions:
    """How many functions of :func:`remat` run now, and may be run again: random layers remember what they drew."""

    under_way = 0


def _smooth(tree: Any) -> list[torch.Tensor]:
    """The differentiable tensors among the leaves of a pytree."""
    return [t for t in _torch.flatten(tree)[0] if is_smooth(t)]


def _empty(*tensors: torch.Tensor) -> torch.Tensor:
    """Of real numbers, and dependent on the tensors."""
    hooks = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return nothing((0,), *hooks).float()


def _asking(anchor: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """``exp`` of ``empty`` that saves nothing in the region: where backward comes to it, it asks for what ``anchor``
    saved."""
    node: Any = anchor.grad_fn
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: (node._saved_result, saved)[1]):
        return empty.exp()


def _anchored(f: Callable[..., Any], begin: Callable[..., Any] | None) -> Callable[..., Any]:
    """``f(*begin(*args))``, its outputs tied to an anchor, ``exp`` of an empty tensor, so that every rank recomputes.

    torch recomputes a checkpointed region when a tensor that it saved is asked for, up to the last one that it saved. A
    rank whose part saves nothing (an empty block, a linear function) would never recompute, while its peers do and wait
    for its messages. So something is saved after the last message: right after ``begin`` where f moves nothing, else
    behind f. Backward asks for it behind f in either case: hooks on tensors inside f (a GradientSync's) may send
    messages too.
    """
    moves: bool | None = None  # whether f does: the first run shows it

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal moves
        smooth = _smooth((args, kwargs))
        if begin is not None:
            args = begin(*args)
        empty = _empty(*smooth) if any(t.requires_grad for t in smooth) else None
        anchor = None if empty is None else empty.exp()
        before = transport.begun
        leaves, tree = _torch.flatten(f(*args, **kwargs))
        if moves is None:
            moves = transport.begun != before
        if made := _smooth(leaves):
            anchor = _empty(*made, *smooth).exp() if moves or anchor is None else _asking(anchor, empty)
        return _torch.unflatten([tie(y, anchor) if is_smooth(y) else y for y in leaves], tree)

    return run


# ---------------------------------------------------------------- under torch.func, which has no hooks for what is
# saved


@dataclass(frozen=True)
class _Region:
    """A function of tensors alone, run again wherever it is differentiated. What its derivatives need is more such
    functions.

    The last result is a tie, as of any movement (linear_map.py): an empty tensor, that derivatives take as one more
    argument. A rank whose cotangent is a constant then still comes to the region again in the next derivative, as its
    peers do.

    Attributes:
        run: from tensors to a tuple of tensors.
        buffers: how many of its arguments, the first ones, may have been changed in place when it is run again.
    """

    run: Callable[..., Any]
    buffers: int

    def batched(self, dims: Sequence[int | None], size: int, randomness: str) -> _Region:
        """vmap; a batch also where nothing has one on this rank."""

        def run(*args: torch.Tensor) -> Any:
            every = torch.vmap(lambda _, *args: self.run(*args), in_dims=(0, *dims), randomness=randomness)
            return every(torch.empty(size, 0), *args)

        return _Region(run, self.buffers)

    def pushed(self, moving: Sequence[int]) -> _Region:
        """(results, their tangents), of the arguments and the tangents of those at ``moving``."""

        def run(*given: torch.Tensor) -> Any:
            args, tangents = given[: -len(moving)], given[-len(moving) :]
            return sum(torch.func.jvp(_of(self.run, args, moving), tuple(args[i] for i in moving), tangents), ())

        return _Region(run, self.buffers)

    def pulled(self, count: int, wanted: Sequence[int]) -> _Region:
        """The gradients of the arguments at ``wanted``, of ``count`` arguments, the smooth results' cotangents, and the
        tie."""

        def run(*given: torch.Tensor) -> Any:
            args, cotangents = given[:count], given[count:-1]
            of = _of(self.run, args, wanted)
            pull = torch.func.vjp(lambda *xs: tuple(_smooth(list(of(*xs)))), *(args[i] for i in wanted))[1]
            again = any("tracked" in _torch.levels_of(t).values() for t in given)
            return (*pull(cotangents, retain_graph=again, create_graph=again), _new_tie(args))

        return _Region(run, self.buffers)


def _new_tie(args: Tensors) -> torch.Tensor:
    return args[0].new_empty(0, dtype=torch.float32) if args else torch.empty(0)


def _of(run: Callable[..., Any], args: Tensors, places: Sequence[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``run`` as a function of the arguments at ``places``."""

    def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(places, xs))
        return tuple(run(*(given.get(i, t) for i, t in enumerate(args))))

    return partial


class _Recompute(_torch.SingleLevelFunction):
    """A region, for one grad or vjp, or for autograd outside of them all. It saves the arguments; its backward is a
    region too, so that nothing that is worked out again is kept for further derivatives either."""

    @staticmethod
    def forward(call: Any, *args: torch.Tensor) -> Any:
        region, transform, depth = call
        return tuple(_run(region, args, depth) if transform is None else _further_out(transform, region, args, depth))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (ctx.region, _, _), *args = inputs
        ctx.buffers = args[: ctx.region.buffers]
        ctx.save_for_backward(*args[ctx.region.buffers :], output[-1])
        ctx.smooth = [is_smooth(y) for y in output]
        ctx.mark_non_differentiable(*(y for y in output if not is_smooth(y)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        refuse_older_vmap("remat", grads)
        *args, tie = (_torch.unwrap_if_dead(t) for t in (*ctx.buffers, *ctx.saved_tensors))
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        cotangents = [g for g, smooth in zip(grads, ctx.smooth) if smooth]
        pulled = _apply(ctx.region.pulled(len(args), wanted), (*args, *cotangents, tie), _torch.transform_depth())
        gradients = dict(zip(wanted, pulled))
        return None, *(gradients.get(i) for i in range(len(args)))


_record = _Recompute.apply  # type: ignore[attr-defined]


def _apply(region: _Region, args: Tensors, depth: int) -> Tensors:
    """The results of a region that was called inside ``depth`` transforms: what the innermost one that is left makes of
    it."""
    if not _torch.transforms_active():
        if torch.is_grad_enabled() and any(t.requires_grad for t in args):
            return _record((region, None, depth), *args)
        return _run(region, args, depth)
    transform = _torch.Transform()
    if transform.batch_size is not None:
        pairs = [transform.unbatch(t) for t in args]
        size, randomness = _torch.randomness()[transform.level]
        with transform.outside():
            ys = _apply(region.batched([d for _, d in pairs], size, randomness.lower()), [t for t, _ in pairs], depth)
        return [transform.batch(y) for y in ys]
    args = [transform.lift(t) for t in args]
    if not transform.differentiates(args):
        return _further_out(transform, region, args, depth)
    if not transform.forward_mode:
        return transform.record(_record, (region, transform, depth), *args)
    moving = [i for i, t in enumerate(args) if is_smooth(t)]
    if not moving:
        return _further_out(transform, region, args, depth)
    values, tangents = zip(*map(transform.unpack, args))
    with transform.outside():
        moved = [torch.zeros_like(values[i]) if tangents[i] is None else tangents[i] for i in moving]
        ys = _apply(region.pushed(moving), (*values, *moved), depth)
    half = len(ys) // 2
    return [transform.dual(y, t) if is_smooth(y) else transform.wrap(y) for y, t in zip(ys[:half], ys[half:])]


def _further_out(transform: Any, region: _Region, args: Tensors, depth: int) -> Tensors:
    """A region outside of a transform that follows none of its arguments, or whose node stands around this call."""
    inner = [transform.unwrap(t) for t in args]
    with transform.outside():
        ys = _apply(region, inner, depth)
    return [transform.wrap(y) for y in ys]


def _run(region: _Region, args: Tensors, depth: int) -> Tensors:
    """A region itself, of plain tensors."""
    try:
        results, followed = _torch.apart(depth, region.run, args)
    except _torch.Escaped as error:
        raise _reached("an example of a vmap outside of it") from error
    if any(followed):
        raise _reached(f"one on which {sum(followed)} of {len(followed)} results depend")
    return results


def _reached(what: str) -> DistdlError:
    return DistdlError(
        "the function reaches a tensor that is differentiated or batched, otherwise than by its arguments; its "
        "derivative would be lost",
        op="remat",
        actual=what,
        expected="such tensors as arguments, in closures (also in lists, dicts and tuples), or in modules",
        next_step="pass it as an argument, or detach it before the call",
    )


class Reach:
    """What functions reach otherwise than by their arguments: the parameters and buffers of modules, and tensors in
    closures. A region takes them as arguments: they have derivatives, and when it runs again they may be gone or
    replaced (functional_call)."""

    def __init__(self, *functions: Any) -> None:
        self.modules: list[torch.nn.Module] = []
        self.cells: list[types.CellType] = []
        self._seen: set[int] = set()
        for f in functions:
            self._look(f)

    def _look(self, thing: Any) -> None:
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            self.modules.append(thing)
        elif isinstance(thing, functools.partial):
            for leaf in (thing.func, *_torch.flatten((thing.args, thing.keywords))[0]):
                self._look(leaf)
        elif isinstance(thing, types.MethodType):
            self._look(thing.__self__)
            self._look(thing.__func__)
        elif isinstance(thing, types.FunctionType):
            for cell in thing.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    leaves, _ = _torch.flatten(cell.cell_contents)
                    if any(isinstance(t, torch.Tensor) for t in leaves):
                        self.cells.append(cell)
                    for leaf in leaves:
                        self._look(leaf)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of the modules."""
        return [t for m in self.modules for _, t in m.named_buffers(remove_duplicate=False)]

    def others(self) -> list[torch.Tensor]:
        """Their parameters, and the tensors in closures."""
        return [
            *(t for m in self.modules for _, t in m.named_parameters(remove_duplicate=False)),
            *(t for c in self.cells for t in _torch.flatten(c.cell_contents)[0] if isinstance(t, torch.Tensor)),
        ]

    @contextlib.contextmanager
    def replaced(self, buffers: Iterator[torch.Tensor], others: Iterator[torch.Tensor]) -> Iterator[None]:
        """A context in which the functions reach these tensors instead of their own; they are iterators, and others has
        more."""
        with contextlib.ExitStack() as stack:
            for m in self.modules:
                theirs = {name: next(buffers) for name, _ in m.named_buffers(remove_duplicate=False)}
                theirs |= {name: next(others) for name, _ in m.named_parameters(remove_duplicate=False)}
                stack.enter_context(_torch.with_tensors(m, theirs))
            for cell in self.cells:
                old = cell.cell_contents
                leaves, tree = _torch.flatten(old)
                new = _torch.unflatten([next(others) if isinstance(t, torch.Tensor) else t for t in leaves], tree)
                cell.cell_contents = new
                stack.callback(_put_back, cell, new, old)
            yield


def _put_back(cell: types.CellType, new: Any, old: Any) -> None:
    if cell.cell_contents is new:  # else the function has put something there itself
        cell.cell_contents = old


class _AsAtFirst:
    """A function whose later runs have the random state and the autocast of the first, as torch's checkpoint gives
    them."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f, self.first = f, True

    def __call__(self, *args: torch.Tensor) -> Any:
        if self.first:
            self.first = False
            self.cpu, (self.devices, self.states) = torch.get_rng_state(), get_device_states(*args)
            self.kinds = {"cpu", *(t.device.type for t in args if t.device.type != "meta")}
            self.casts: list[dict[str, Any]] = [
                dict(
                    device_type=kind,
                    dtype=torch.get_autocast_dtype(kind),
                    enabled=torch.is_autocast_enabled(kind),
                    cache_enabled=torch.is_autocast_cache_enabled(),
                )
                for kind in sorted(self.kinds)
            ]
            Regions.under_way += 1
            try:
                return self.f(*args)
            finally:
                Regions.under_way -= 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                torch.random.fork_rng(self.devices, device_type=max(self.kinds - {"cpu"}, default="cuda"))
            )
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            for cast in self.casts:
                stack.enter_context(torch.autocast(**cast))
            return self.f(*args)


def _recomputed(
    f: Callable[..., Any], begin: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """:func:`remat` inside torch.func."""
    leaves, tree = _torch.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    reach = Reach(f, begin)
    buffers, others = reach.buffers(), reach.others()
    shape: dict[str, Any] = {}  # of the results: their pytree, and which leaves are tensors

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(given[len(buffers) :])
        with reach.replaced(iter(given[: len(buffers)]), rest):
            again = list(leaves)
            for i in places:
                again[i] = next(rest)
            args, kwargs = _torch.unflatten(again, tree)
            results, shape["tree"] = _torch.flatten(f(*(args if begin is None else begin(*args)), **kwargs))
        shape["leaves"] = [None if isinstance(y, torch.Tensor) else y for y in results]
        shape["places"] = [i for i, y in enumerate(results) if isinstance(y, torch.Tensor)]
        return (*(results[i] for i in shape["places"]), _new_tie(given))

    region = _Region(_AsAtFirst(run), len(buffers))
    ys = _apply(region, (*buffers, *others, *(leaves[i] for i in places)), _torch.transform_depth())
    for i, y in zip(shape["places"], ys):
        shape["leaves"][i] = y
    return _torch.unflatten(shape["leaves"], shape["tree"])


def remat(f: Function, *, begin: Callable[..., Any] | None = None) -> Function:
    """``f``, whose intermediate results are not kept but worked out again in backward, movements included.

    As ``torch.utils.checkpoint`` with ``use_reentrant=False``, made safe for functions that send messages: all of them
    are sent again, by every rank, at the same point of backward, also where a rank's part saves nothing. Where f sends
    none (all are sent in ``begin``), local work of which backward needs nothing is left out. The random state is kept.

    Under torch.func (grad, vjp, jvp, vmap, nested in any way) too: there the parameters and buffers of modules, and
    tensors in closures, that f reaches are arguments of f like the others, and all of f is run again.

    Args:
        f: a function of tensors (any pytrees) or a module. Every rank of its movements calls it.
        begin: work that belongs to f, and is run again with it: f gets the tuple that it makes of the positional
            arguments. Where all messages are sent in there (parameters gathered, say), local work at the end of f need
            not be done again.

    Returns:
        A function of the same arguments. Its results are f's (a copy of each); backward, of any order, sends f's
        forward messages once more before its backward ones. Where no gradient is recorded it is f.

    Raises:
        DistdlError: inside a torch.func transform, where f reaches a tensor that is differentiated or batched in
            another way.

    Example:
        >>> f = dd.remat(lambda x: x.sin().sin())
        >>> torch.func.grad(f)(torch.tensor(0.0))
        tensor(1.)
    """

    kept = _kept(f, begin=begin)

    @functools.wraps(f, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if _torch.dispatch_modes() and _torch.compiling():
            return kept(*args, **kwargs)
        if _torch.transforms_active():
            return _recomputed(f, begin, args, kwargs)
        if not torch.is_grad_enabled():
            return f(*(args if begin is None else begin(*args)), **kwargs)
        return checkpoint(_anchored(f, begin), *args, use_reentrant=False, **kwargs)

    return cast(Function, traced_as(call, kept))


def _kept(f: Callable[..., Any], *, begin: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """In a graph AOTAutograd decides what is worked out again: never a movement."""
    if begin is None:
        return f
    start = begin
    return lambda *args, **kwargs: f(*start(*args), **kwargs)


traced_as(remat, _kept)

public({"remat": remat}, alike=False)
