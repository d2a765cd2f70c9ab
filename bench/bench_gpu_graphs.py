"""Training steps on devices as CUDA graphs: the host's time and the device's, eager, compiled and captured.

``python -m distdl run -n 2 -m bench.bench_gpu_graphs``, one rank for each device; columns as in ``bench_gpu``. A step
is a loss and its gradients. Compiled steps need triton.
"""

from __future__ import annotations

import argparse

import torch
from mpi4py import MPI

import distdl as dd
import distdl.functional as F
from distdl.programs.bench.table import report

from .bench_gpu import measure, rows_of

COMM = MPI.COMM_WORLD


def parameter(*shape):
    return torch.nn.Parameter(0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).cuda())


class Mlp(torch.nn.Module):
    """Blocks of a column parallel and a row parallel layer, with residuals: tokens x width -> 4 width -> width."""

    def __init__(self, tokens=256, width=256, blocks=4):
        super().__init__()
        p, inner = COMM.size, 4 * width
        self.column = dd.Layout(dd.Partition((1, p, 1)), (tokens, inner, width))
        self.row = dd.Layout(dd.Partition((1, 1, p)), (tokens, width, inner))
        self.up = torch.nn.ParameterList(parameter(inner // p, width) for _ in range(blocks))
        self.down = torch.nn.ParameterList(parameter(width, inner // p) for _ in range(blocks))
        self.x = torch.nn.Buffer(torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).cuda())

    def forward(self):
        x = self.x
        for up, down in zip(self.up, self.down):
            h = F.dist_linear(x, up, self.column, x_layout="invariant", y_layout="replicated")
            x = x + F.dist_linear(h.relu(), down, self.row, x_layout="replicated", y_layout="invariant")
            x = x / (1 + x.square().mean())
        return x.square().mean()


class UNet(torch.nn.Module):
    """Two levels with a skip connection, over rows: halos, and all-reduces of gradients."""

    def __init__(self, n=256, c=16):
        super().__init__()
        L = dd.Layout(dd.Partition((1, 1, COMM.size, 1)), (1, 1, n, n))
        self.at = {k: L.with_shape((1, k, n, n)) for k in (1, c, 2 * c)}
        self.low = {k: L.with_shape((1, k, n // 2, n // 2)) for k in (c, 2 * c)}
        self.c, self.x = c, torch.nn.Buffer(dd.init.normal(L, 0).cuda())
        shapes = (c, 1, 3, 3), (c, c, 3, 3), (2 * c, c, 3, 3), (2 * c, 2 * c, 3, 3), (2 * c, c, 2, 2), (1, 2 * c, 3, 3)
        self.w = torch.nn.ParameterList(parameter(*shape) for shape in shapes)

    def forward(self):
        c, w, how = self.c, list(self.w), {"padding": 1, "params": "invariant"}
        top = F.dist_conv(self.x, w[0], self.at[1], **how).relu()
        top = F.dist_conv(top, w[1], self.at[c], **how).relu()
        low = F.dist_conv(F.dist_max_pool(top, self.at[c], 2), w[2], self.low[c], **how).relu()
        low = F.dist_conv(low, w[3], self.low[2 * c], **how).relu()
        up = F.dist_conv_transpose(low, w[4], self.low[2 * c], stride=2, params="invariant")
        y = F.dist_conv(torch.cat([up, top], 1), w[5], self.at[2 * c], **how)
        return F.dist_mse_loss(y, self.x, self.at[1])


def stepping(model, loss):
    """A step: the loss, and gradients where parameters have them."""

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    return step


def captured(model):
    """A step as one CUDA graph of eager code, which is replayed."""
    step, side = stepping(model, model), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = step()
    gradients = [p.grad for p in model.parameters()]

    def replay():
        graph.replay()
        for p, g in zip(model.parameters(), gradients):
            p.grad = g
        return value

    return replay


def steps_of(make):
    """{name: step}, after one of each has given what eager code gives."""
    models = [make() for _ in range(4)]
    compiled = [
        torch.compile(m, fullgraph=True, **how) for m, how in zip(models[1:], ({}, {"mode": "reduce-overhead"}))
    ]
    steps = {
        "eager": stepping(models[0], models[0]),
        "compiled": stepping(models[1], compiled[0]),
        "compiled, reduce-overhead": stepping(models[2], compiled[1]),
        "captured": captured(models[3]),
    }
    for (name, step), model in zip(steps.items(), models):
        for _ in range(4):  # a warm-up, a recording, and replays
            value = step().clone()
        found = [value, *(p.grad for p in model.parameters())]
        wanted = [steps["eager"](), *(p.grad for p in models[0].parameters())]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    return steps


def main(argv=None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("bench_gpu_graphs")
    parser.add_argument("--json", default=None, help="a directory for the results")
    options = parser.parse_args(argv)
    torch.cuda.set_device(COMM.rank)
    rows = []
    for name, make in {"MLP, 4 blocks, 256 x 256": Mlp, "U-Net 256²": UNet}.items():
        rows += rows_of(name, 0, measure(steps_of(make)), ours="eager")
    if COMM.rank == 0:
        card = torch.cuda.get_device_name()
        path = f"{options.json}/gpu-graphs-{card.replace(' ', '-')}-n{COMM.size}.json" if options.json else None
        report(rows, f"graphs: {COMM.size} x {card}, microseconds", path, COMM.size)


if __name__ == "__main__":
    main()
