"""The pictures of the pages, from plans: ``python docs/pictures.py`` writes docs/pictures/, and a test compares."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import distdl as dd
import distdl.functional as F
from distdl import viz
from distdl.parallel import schedule, simulate

FOLDER = Path(__file__).resolve().parent / "pictures"
THREE, FOUR, GRID = dd.Partition((3,)), dd.Partition((4,)), dd.Partition((2, 2))
ROOT = dd.Partition((1,))


def movements():
    """{name of a movement: its map, small enough to be drawn}; uneven blocks, where there are blocks."""
    line, eight = dd.Layout(THREE, (7,)), dd.Layout(FOUR, (8,))
    rows, columns = dd.Layout(dd.Partition((3, 1)), (4, 3)), dd.Layout(dd.Partition((1, 2)), (4, 3))
    index = dd.Index.known(line, [torch.tensor([1, 6]), torch.tensor([0, 6, 6]), torch.tensor([3])])
    maps = dd.maps
    return {
        "repartition": maps.repartition(rows, columns),
        "scatter": maps.scatter(line),
        "gather": maps.gather(line),
        "roll": maps.roll(line, dim=0, by=2),
        "reorder": maps.reorder(eight, 0, "zigzag"),
        "halo_exchange": maps.halo_exchange(dd.HaloSpec(line, 1, 2, boundary="reflect")),
        "broadcast": maps.broadcast(ROOT, THREE, (2,)),
        "sum_reduce": maps.sum_reduce(THREE, ROOT, (2,)),
        "all_sum_reduce": maps.all_sum_reduce(THREE, (2,)),
        "mark_varying": maps.mark_varying(THREE, (2,)),
        "invariant_sum": maps.invariant_sum(THREE, (2,)),
        "all_gather": maps.all_gather(line),
        "reduce_scatter": maps.reduce_scatter(line),
        "shift": maps.shift(line, 0, 1),
        "permute": maps.permute(FOUR, ((0, 2), (1, 0), (3, 3)), (2,)),
        "gather_rows": maps.gather_rows(index),
        "scatter_add_rows": maps.scatter_add_rows(index),
    }


def pencils():
    """A transform over all three dims of a box: each stage has whole lines along the dims that it transforms."""
    L = dd.Layout(dd.Partition((2, 2, 1)), (4, 4, 4))
    found = F.fft_stages(L, (0, 1, 2), P_out=L)
    return viz.show(*(s.layout for s in found), titles=[_stage(s) for s in found])


def _stage(stage):
    dims = f"dim {', '.join(map(str, stage.dims))}" if stage.dims else "back"
    moves = 0 if stage.move is None else sum(n for a, b, n in viz.messages(stage.move) if a != b)
    return f"{dims}{f': {moves} moved' if moves else ''}"


def needs(**pattern):
    """Whose keys each rank's queries see."""
    L = dd.Layout(dd.Partition((1, 1, 4, 1)), (1, 1, 12, 1))
    return viz.show(F.attention_needs(L, L, **pattern), titles=["keys"], adjoint=False)


def linear(x_layout, y_layout):
    """What happens to x and to y over two ranks: before and after the local product."""
    P, two = dd.Partition((2,)), dd.Layout(dd.Partition((2,)), (4,))
    root = ROOT, P
    x = {"root": lambda: dd.maps.broadcast(*root, (4,)), "invariant": lambda: dd.maps.mark_varying(P, (4,)),
         "sharded": lambda: dd.maps.all_gather(two)}[x_layout]()  # fmt: skip
    y = {"root": lambda: dd.maps.sum_reduce(*root[::-1], (4,)), "invariant": lambda: dd.maps.invariant_sum(P, (4,)),
         "sharded": lambda: dd.maps.reduce_scatter(two)}[y_layout]()  # fmt: skip
    return viz.show(x, y, titles=[f"x along out: {x_layout}", f"y along in: {y_layout}"])


def pictures():
    """{name of the file: picture}."""
    found = {name: viz.show(A, titles=[name]) for name, A in movements().items()}
    corners = dd.Layout(GRID, (5, 5))
    found["halo_corners"] = viz.show(dd.HaloSpec(corners, 1, boundary="zeros"), titles=["halo_exchange"])
    found["halo_circular"] = viz.show(dd.HaloSpec(corners, 1, boundary="circular"), titles=["halo_exchange"])
    found["layouts"] = viz.show(
        dd.Layout(dd.Partition((2, 3)), (5, 7)),
        dd.Layout(dd.Partition((4, 1)), (5, 7), splits=((3, 0, 1, 1), None)),
        dd.Layout(dd.Partition((2, 2), ranks=(3, 1, 2, 0)), (4, 6)),
        titles=["balanced", "chosen sizes", "any ranks"],
    )
    found |= {f"linear_{how}": linear(how, how) for how in ("root", "invariant", "sharded")}
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        found[f"schedule_{kind}"] = simulate(schedule(kind, 4, 8, chunks)).picture()
    found["pencils"] = pencils()
    found["attention_causal"], found["attention_window"] = needs(causal=True), needs(causal=True, window=2)
    return found


def main():
    """Write them."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        picture.save(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    sys.exit(main())
