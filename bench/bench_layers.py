"""Layers, forward + backward, against serial layers on the ranks' shares ("share"); some against one serial run
("whole") too."""

import torch
import torch.nn.functional as local

from distdl.programs.bench import cases
from distdl.programs.bench.table import Result

from .choose import SIZE, choose

LAYOUTS = ("root", "replicated", "invariant", "sharded")


def whole(case, call, *leaves):
    """Add the serial layer on the whole input, on one rank alone."""
    rank = cases.dd.world().rank
    case.calls["whole"] = cases.backward(call, *leaves) if rank == 0 else lambda: None
    return case


@choose("name", ["3 x 3", "ResNet stem", "3-D"])
def bench_conv(timed, name):
    """Space split over its first dim."""
    shape, out, kernel, stride, padding = {
        "3 x 3": ((1, 64, 256, 256), 64, 3, 1, 1),
        "ResNet stem": ((4, 3, 224, 224), 64, 7, 2, 3),
        "3-D": ((1, 16, 48, 48, 48), 16, 3, 1, 1),
    }[name]
    case = cases.conv(shape, (1, 1, SIZE, *(1,) * (len(shape) - 3)), out, kernel, stride=stride, padding=padding)
    serial = local.conv2d if len(shape) == 4 else local.conv3d
    x, w, b = cases.leaf(shape), cases.leaf((out, shape[1], *(kernel,) * (len(shape) - 2))), cases.leaf((out,))
    timed(whole(case, lambda: serial(x, w, b, stride, padding), x, w, b))


OVERLAPPED = {
    "2-D": ((1, 64, 256, 256), 3),
    "2-D, large": ((1, 16, 1024, 1024), 3),
    "1-D": ((1, 16, 2**17), 9),
    "3-D": ((1, 8, 48, 48, 48), 3),
    "small": ((4, 16, 32, 32), 3),
}


@choose("name", ["2-D", "small"], ["2-D, large", "1-D", "3-D"])
@choose("both", [True, False])
def bench_conv_overlap(timed, name, both):
    """The block convolved while strips travel, against the same with the window first; forward + backward, and forward
    alone."""
    shape, k = OVERLAPPED[name]
    L = cases.dd.Layout(cases.dd.Partition((1, 1, SIZE, *(1,) * (len(shape) - 3))), shape)
    x, w = cases.leaf(L.local_shape()), cases.leaf((shape[1], shape[1], *(k,) * (len(shape) - 2)), seed=1)
    serial = (local.conv1d, local.conv2d, local.conv3d)[len(shape) - 3]
    calls = {
        "distdl": lambda: cases.F.dist_conv(x, w, L, padding=k // 2, overlap=True),
        "window first": lambda: cases.F.dist_conv(x, w, L, padding=k // 2, overlap=False),
        "share": lambda: serial(x, w, padding=k // 2),
    }
    what = f"{name}, {cases.size(shape)}, {k} wide, {'forward + backward' if both else 'forward'}"
    calls = {c: cases.backward(call, x, w) if both else torch.no_grad()(call) for c, call in calls.items()}
    timed(cases.Case(Result("conv, overlap", what, SIZE, limit="share"), calls))


@choose("dtype", [], [torch.bfloat16, torch.complex64])
def bench_conv_dtypes(timed, dtype):
    """Other numbers."""
    timed(cases.conv((1, 64, 256, 256), (1, 1, SIZE, 1), 64, 3, padding=1, dtype=dtype))


@choose(
    "x_layout, y_layout",
    [("invariant", "invariant"), ("root", "root")],
    [(x, y) for x in LAYOUTS for y in LAYOUTS if (x, y) not in (("invariant", "invariant"), ("root", "root"))],
)
@choose("axis", ["out", "in"])
def bench_linear_layouts(timed, axis, x_layout, y_layout):
    """Weights split over one of their dims, every layout of x and y."""
    grid = (1, SIZE, 1) if axis == "out" else (1, 1, SIZE)
    timed(cases.linear(1024, 1024, 1024, grid, x_layout, y_layout))


@choose(
    "shape",
    [(256, 256, 256), (1024, 1024, 1024), (64, 4096, 256)],
    [(512, 512, 512), (2048, 2048, 2048), (4096, 4096, 4096), (4096, 64, 64), (16, 4096, 4096)],
)
def bench_linear_sizes(timed, shape):
    """Square and skinny: tokens, out, in; split over *out*."""
    tokens, out, features = shape
    case = cases.linear(tokens, out, features, (1, SIZE, 1))
    x, w, b = cases.leaf((tokens, features)), cases.leaf((out, features)), cases.leaf((out,))
    timed(whole(case, lambda: local.linear(x, w, b), x, w, b))


@choose("dtype", [], [torch.bfloat16, torch.complex64])
def bench_linear_dtypes(timed, dtype):
    """Other numbers."""
    timed(cases.linear(1024, 1024, 1024, (1, SIZE, 1), dtype=dtype))


@choose(
    "kind, across, dtype",
    [
        *((kind, True, torch.float32) for kind in cases.NORMS),
        *((kind, False, torch.float32) for kind in ("group_norm", "instance_norm", "layer_norm")),
    ],
    [(kind, True, torch.bfloat16) for kind in cases.NORMS],
)
def bench_norm(timed, kind, across, dtype):
    """Statistics across ranks (space split, or the normalised dim itself), or within them (the batch split)."""
    last = kind in ("layer_norm", "rms_norm")
    shape, split = ((2048, 1024), 1) if last else ((4, 32, 128, 128), 2)
    grid = [1] * len(shape)
    grid[split if across else 0] = SIZE
    timed(cases.norm(kind, shape, grid, dtype=dtype))
