"""neon's models of notebooks/, beside their sequential programs on any grid of ranks: used by test_neon and
test_neon_many."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as tf
from side_by_side import compare

import distdl as dd
import distdl.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))

import convnet_dist
import gb_dist
import mlp_dist
import neon


def _sides(module, kind, n, size, steps):
    """(layout, this rank's (x, y) of all steps, the whole (X, Y), parameters, places); ``None`` on a rank that takes no
    part."""
    L, chosen = module.layout(kind, n, size), range(size * steps)
    if not L.active:
        return None
    alone = dd.Layout(dd.Partition((1, 1, 1, 1), ranks=(dd.world().rank,)), L.shape)
    mine, whole = (module.load(some, chosen, torch.float64) for some in (L, alone))
    return L, mine, whole, neon.drawn(module.SHAPES, torch.float64), module.places(L)


def classifier(module, kind, n, size=8, steps=20, rate=0.05):
    """Cross-entropy training of a module's ``model`` against its ``sequential``."""
    sides = _sides(module, kind, n, size, steps)
    if sides is None:
        return
    L, (x, y), (X, Y), params, places = sides

    def dist(p, step):
        logits, out = module.model(p, x[step], L)
        return F.dist_cross_entropy(logits, y[step], out)

    compare(
        dist,
        lambda p, step: tf.cross_entropy(module.sequential(p, X[step]), Y[step]),
        params,
        places,
        steps=steps,
        rate=rate,
        ranks=range(n),
    )


def pretraining(kind, n, stage, tied, size=8, steps=20, rate=0.02):
    """J of a stage of GBDist, its W (and V, where it is not tied) normalised after each update."""
    sides = _sides(gb_dist, kind, n, size, steps)
    if sides is None:
        return
    L, (x, _), (X, _), params, places = sides
    W, V = f"W{stage}", f"W{stage}" if tied else f"V{stage}"
    start = {name: gb_dist.normalised(w) for name, w in params.items() if name.startswith("W")}
    norms = start[W].flatten(3).square().sum(3)  # of every filter at every pixel
    dd.testing.collective_assert(torch.allclose(norms, torch.ones_like(norms)), "rows of W have norm 1", range(n))
    mine = {name: places[name](w) for name, w in start.items()}
    M = gb_dist.layout_of(L, stage)
    inputs = [gb_dist.features(mine, t, L, stage)[0] for t in x]
    whole = [gb_dist.sequential_features(start, T, stage) for T in X]
    trained = {W: start[W], V: start[W] if tied else start[W].flip(0)}
    compare(
        lambda p, step: gb_dist.objective(p[W], p[V], inputs[step], M, stage),
        lambda p, step: gb_dist.sequential_objective(p[W], p[V], whole[step], stage),
        trained,
        places,
        steps=steps,
        rate=rate,
        after=lambda p: {**p, W: gb_dist.normalised(p[W])},
        ranks=range(n),
    )


__all__ = ["classifier", "convnet_dist", "gb_dist", "mlp_dist", "neon", "pretraining"]
