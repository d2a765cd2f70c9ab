"""What a training run must remember: parameters, buffers, optimizer state, random numbers. As flat names, blocks and
layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._arguments import checked
from .._types import Place
from ..errors import ShapeError
from ..init import parameter_layout
from ..nn import Dropout
from ..nn import layouts as layouts_of
from ..partition import Layout, Partition, partition_of
from ..world import world
from .choice import check_layouts
from .group import Group, Path
from .reading import read

__all__ = ["State", "restore", "state"]
_OPTIMIZER, _RNG = "optimizer.", "rng."


class State(NamedTuple):
    """The arguments of :func:`save` after the path.

    Attributes:
        tensors: {name: this rank's block}.
        layouts: {name: Layout}.
        metadata: what JSON can write.

    Example:
        >>> w = {"w": torch.ones(2)}
        >>> dd.checkpoint.save("run.safetensors", *dd.checkpoint.State(w, {}, {"step": 7}))
        >>> dd.checkpoint.load("run.safetensors")
        ({'w': tensor([1., 1.])}, {'step': 7})
    """

    tensors: dict[str, torch.Tensor]
    layouts: dict[str, Layout]
    metadata: dict[str, Any]


@checked
def state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rng: bool = False,
    layouts: Mapping[str, Layout] | None = None,
    P: Place | None = None,
    **metadata: Any,
) -> State:
    """What :func:`save` needs to save a training run: ``save(path, *state(model, optimizer, rng=True, step=step))``.

    No message; the tensors are the live ones, not copies.

    Args:
        model: a module. Its tensors keep the names of ``model.state_dict()``, so the file is also the serial model's.
        optimizer: a torch optimizer whose state has the parameters' shapes, or none (SGD, Adam, AdamW, RMSprop, ...).
            Its state is named ``optimizer.<parameter>.<key>``; hyperparameters (learning rates) go to the metadata.
        rng: also torch's generators, one row for each rank (``rng.cpu``, and ``rng.cuda`` where CUDA is in use), and
            the counters of the model's dropouts.
        layouts: {name: Layout} of parameters and buffers that :func:`distdl.nn.layouts` does not know: your own
            modules'.
        P: the ranks that will save; default: all ranks of the default world.
        metadata: anything else to remember, as JSON: ``step=step, scheduler=scheduler.state_dict()``.

    Raises:
        ShapeError: a state that is no tensor, a parameter that is not the model's, optimizer state of another shape
            than its parameter, or a module named ``optimizer`` or ``rng``.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> found = dd.checkpoint.state(model, torch.optim.Adam(model.parameters()), step=7)
        >>> list(found.tensors), found.metadata["step"]
        (['weight'], 7)
    """
    known: dict[str, Layout | None] = {**layouts_of(model), **(layouts or {})}
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or name.startswith((_OPTIMIZER, _RNG)):
            raise ShapeError(
                f"{name!r} cannot be saved under its name",
                actual=type(value).__name__,
                expected="a tensor, not in a module named 'optimizer' or 'rng'",
                next_step="keep it out of state_dict(), and hand it over as metadata",
            )
    if optimizer is not None:
        metadata["optimizer"] = [
            {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        for p, name in _named(model, optimizer).items():
            for key, value in optimizer.state.get(p, {}).items():
                if value is not None:
                    full = f"{_OPTIMIZER}{name}.{key}"
                    tensors[full], known[full] = value, _beside(known.get(name), p, value, full)
    if rng:
        numbers = _dropouts(model)
        ranks = tuple(range(world().size)) if P is None else Group("checkpoint.state", "", P).ranks
        name = "default" if P is None else partition_of(P).world
        for kind, row in _generators().items():
            numbers[kind] = row[None], Layout(Partition((len(ranks), 1), ranks, name), (len(ranks), len(row)))
        tensors |= {name: value for name, (value, _) in numbers.items()}
        known |= {name: layout for name, (_, layout) in numbers.items()}
    return State(tensors, {name: L for name in tensors if (L := known.get(name)) is not None}, metadata)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """{parameter: name} of the optimizer's parameters, in its order."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        if p not in names:
            raise ShapeError(
                "the optimizer has a parameter that is not the model's",
                actual=f"a tensor of shape {tuple(p.shape)}",
                expected=f"one of {sorted(names.values())}",
                next_step="give the model that holds it",
            )
    return {p: names[p] for p in params}


def _beside(layout: Layout | None, p: torch.Tensor, value: Any, name: str) -> Layout | None:
    """The layout of optimizer state ``value`` of a parameter ``p`` of ``layout``: the same, or each rank's where it is
    a scalar."""
    if not isinstance(value, torch.Tensor) or value.shape not in (p.shape, ()):
        raise ShapeError(
            f"the state {name!r} has another shape than its parameter",
            actual=getattr(value, "shape", type(value).__name__),
            expected=f"a tensor of shape {tuple(p.shape)} or ()",
            next_step="save such an optimizer's state yourself: dd.checkpoint.save takes any tensors and layouts",
            partitions=layout,
        )
    if layout is None or value.shape == p.shape:
        return layout
    P = layout.partition
    return Layout(Partition((), (world(P.world).rank if layout.active else P.ranks[0],), P.world), ())


def _dropouts(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, Layout]]:
    return {
        f"{_RNG}dropout.{name}": (torch.tensor([m.seed, m.calls]), parameter_layout(m.P, (2,), (None,)))
        for name, m in model.named_modules()
        if isinstance(m, Dropout)
    }


def _generators() -> dict[str, torch.Tensor]:
    rows = {f"{_RNG}cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        rows[f"{_RNG}cuda"] = torch.cuda.get_rng_state()
    return rows


@checked
def restore(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rng: bool = False,
    layouts: Mapping[str, Layout] | None = None,
    P: Place | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Read what ``save(path, *state(...))`` wrote, by any number of ranks, into a model and an optimizer; collective.

    The model may be partitioned in another way, or be the serial one in a single process; the file may also be a serial
    model's, written by safetensors. Everything is read and compared first: a failure leaves model and optimizer as they
    were.

    Args:
        path, layouts, P, verify: as for :func:`load`; layouts of ``dd.nn`` modules are known.
        model, optimizer: changed in place. Values are cast to the model's dtype, as ``load_state_dict`` does.
        rng: set the generators that the file has, too. Where they were equal on all ranks, every rank gets that state;
            where they differed, the number of ranks must be the same.

    Returns:
        The metadata that was given to :func:`state`.

    Messages: two small all-gathers.

    Raises:
        CheckpointError: as for :func:`load`; or tensors in the file that no rank's model has, an optimizer with other
            groups, a file without optimizer state, generators that differed on another number of ranks.

    Example:
        >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> dd.checkpoint.save("run.safetensors", *dd.checkpoint.state(model, step=7))
        >>> dd.checkpoint.restore("run.safetensors", other), torch.equal(model.weight, other.weight)
        ({'step': 7}, True)
    """
    group = Group("checkpoint.restore", path, P)
    own, known = model.state_dict(), layouts_of(model)
    named = {} if optimizer is None else _named(model, optimizer)
    drops = _dropouts(model) if rng else {}
    optimized = set(named.values())
    kinds: list[str] = []
    rows: dict[str, torch.Tensor] = {}

    def choose(names: list[str]) -> list[str]:
        check_layouts(layouts)
        known.update(layouts or {})
        chosen = [*own, *drops]
        chosen += [
            n for n in names if n.startswith(_OPTIMIZER) and n[len(_OPTIMIZER) :].rpartition(".")[0] in optimized
        ]
        if rng:  # a device's generator where the file has one, whether or not something has run there yet
            kinds.extend([f"{_RNG}cpu", *[f"{_RNG}cuda"] * (f"{_RNG}cuda" in names and torch.cuda.is_available())])
        return [*chosen, *kinds]

    def layout_of(name: str, shape: tuple[int, ...]) -> Layout | None:
        if name.startswith(_OPTIMIZER):
            return known.get(name[len(_OPTIMIZER) :].rpartition(".")[0]) if shape else None
        return known.get(name)

    tensors, metadata, left = read(group, layout_of, choose, verify=verify)
    skipped = () if optimizer is not None else (_OPTIMIZER,)
    unknown = sorted(n for n in left if not n.startswith((*skipped, _RNG)))
    if unknown:
        raise group.error(
            f"no model has {unknown}", "build the model that was saved, or read parts with dd.checkpoint.load"
        )
    held = {name for name in own if known.get(name) is None or known[name].active}
    groups = metadata.pop("optimizer", None)

    def check() -> None:
        for name in held:
            if own[name].shape != tensors[name].shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(own[name].shape)}, and {tuple(tensors[name].shape)} in the file"
                )
        if optimizer is not None and (groups is None or len(groups) != len(optimizer.param_groups)):
            raise ValueError(
                f"the optimizer has {len(optimizer.param_groups)} groups, the file {groups and len(groups)}"
            )
        rows.update({kind: _row(tensors[kind], group) for kind in kinds})

    group.step(check)
    with torch.no_grad():
        for name in held:
            own[name].copy_(tensors[name])
    if optimizer is not None:
        _restore_optimizer(optimizer, groups, named, known, tensors)
    for name, m in model.named_modules():
        if isinstance(m, Dropout) and f"{_RNG}dropout.{name}" in drops:
            m.seed, m.calls = tensors[f"{_RNG}dropout.{name}"].tolist()
    for kind, row in rows.items():
        (torch.set_rng_state if kind == f"{_RNG}cpu" else torch.cuda.set_rng_state)(row)
    return metadata


def _row(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's row of the generators' states."""
    if bool((rows == rows[0]).all()):
        return rows[0]
    if len(rows) != len(group.ranks):
        raise ValueError(
            f"the generators of {len(rows)} ranks differed, and now there are {len(group.ranks)}: pass rng=False, and "
            "seed them anew; or draw from dd.functional.random, which does not depend on the number of ranks"
        )
    return rows[group.ranks.index(group.world.rank)].clone()


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    named: Mapping[torch.Tensor, str],
    layouts: Mapping[str, Layout],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """By the optimizer's own ``load_state_dict``, which puts everything on the right device."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(_OPTIMIZER):
            p, _, key = name[len(_OPTIMIZER) :].rpartition(".")
            states.setdefault(p, {})[key] = value
    held = {
        i: states[name]
        for i, name in enumerate(named.values())
        if name in states and (layouts.get(name) is None or layouts[name].active)
    }
    old = optimizer.state_dict()["param_groups"]
    new = [{**a, **{k: _like(v, a.get(k)) for k, v in b.items()}} for a, b in zip(old, groups)]
    optimizer.load_state_dict({"state": held, "param_groups": new})


def _like(value: Any, old: Any) -> Any:
    """What JSON made of a hyperparameter, as it was."""
    if isinstance(old, torch.Tensor):
        return torch.as_tensor(value, dtype=old.dtype, device=old.device)
    return tuple(value) if isinstance(old, tuple) else value
