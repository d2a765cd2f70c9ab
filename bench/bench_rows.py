"""Rows by their numbers: against one Alltoallv by hand, and, where own rows stay, against that of remote rows alone."""

import torch

import distdl as dd
import distdl.functional as F
from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose

SETS = [(4096, 64), (65536, 16)], [(65536, 128), (1048576, 1), (1048576, 8)]


def operands(rows, width, of):
    """Each rank has ``rows`` rows, and wants as many of them all, drawn by ``of``; some of them several times."""
    L = dd.Layout(dd.Partition((SIZE,)), (SIZE * rows,))
    generator = torch.Generator().manual_seed(dd.world().rank)
    x = cases.drawn((rows, width), torch.float32)
    return {"x": x, "layout": L, "wanted": of(L, rows, generator), "distinct": False}


def anywhere(L, count, generator):
    """Numbers of any rows."""
    return torch.randint(L.shape[0], (count,), generator=generator)


def mostly_own(L, count, generator):
    """One of twenty is anywhere, the others are this rank's: a graph that is cut well."""
    own = torch.randint(*L.box()[0], (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.05, anywhere(L, count, generator), own)


@choose("rows, width", *SETS)
def bench_gather_rows(timed, rows, width):
    """As many rows as a rank has, of all ranks'."""
    given = operands(rows, width, anywhere)
    index, x = dd.Index(given["layout"], given["wanted"]), given["x"]
    calls = {"distdl": lambda: F.gather_rows(x, index), "memcpy": cases.copy_of(F.gather_rows(x, index))}
    what = f"{rows} x {width}, any"
    timed(cases.Case(Result("gather_rows", what, SIZE, "float32", x.nbytes), calls, given))


@choose("rows, width", *SETS)
def bench_own_first(timed, rows, width):
    """Of a graph that is cut well: only ghosts move. By hand: the same Alltoallv, of rows of others alone. ``all``: the
    wanted own rows too, which F.gather_rows copies."""
    given = operands(rows, width, mostly_own)
    index, x = dd.Index(given["layout"], given["wanted"]), given["x"]
    ghosts, _ = index.own_first
    calls = {
        "distdl": lambda: F.gather_rows(x, ghosts),
        "memcpy": cases.copy_of(F.gather_rows(x, ghosts)),
        "all": lambda: F.gather_rows(x, index),
    }
    given |= {"wanted": index.ghosts, "distinct": True}
    what = f"{rows} x {width}, ghosts"
    nbytes = 4 * width * len(index.ghosts)
    result = Result("gather_rows", what, SIZE, "float32", nbytes, subjects=("distdl", "all"))
    timed(cases.Case(result, calls, given))
