"""Bad input: an error on every rank that could see it, saying operator, expected, actual and what to do; messages stay
matched."""

import pytest
import torch
from registry import here, needs, raises_everywhere

import distdl as dd
import distdl.functional as F
from distdl.errors import AgreementError, DistdlError, PartitionError, ShapeError
from distdl.testing import count_messages


def world():
    n = dd.world().size
    return n, dd.Partition((n, 1)), dd.Partition((1, n)), dd.Layout(dd.Partition((n, 1)), (2 * n, 3))


BLOCK = torch.ones(2, 3)


def _escaped():
    """One example of a vmap that has ended; moved where there is a partner."""
    box = []
    torch.func.vmap(lambda x: box.append(x) or x)(torch.ones(2, 2, 3))
    return box[0]


BAD = {
    "wrong local shape": (ShapeError, lambda n, P, Q, L: F.repartition(torch.ones(2, 4), L, Q)),
    "wrong local shape, shape=": (ShapeError, lambda n, P, Q, L: F.gather(torch.ones(1, 1), P, shape=(2 * n, 3))),
    "wrong ndim": (DistdlError, lambda n, P, Q, L: F.repartition(torch.ones(2), P, Q)),
    "partitions of different ndim": (PartitionError, lambda n, P, Q, L: F.repartition(BLOCK, L, dd.Partition((n,)))),
    "bare partitions of different ndim": (
        PartitionError,
        lambda n, P, Q, L: F.repartition(BLOCK, P, dd.Partition((n,))),
    ),
    "layouts of different shapes": (
        PartitionError,
        lambda n, P, Q, L: F.repartition(BLOCK, L, dd.Layout(Q, (2 * n, 4))),
    ),
    "more ranks than the world": (
        PartitionError,
        lambda n, P, Q, L: F.all_sum_reduce(torch.ones(1), dd.Partition((n + 1,))),
    ),
    "more ranks, negotiated": (
        PartitionError,
        lambda n, P, Q, L: F.repartition(torch.ones(2, 3), P, dd.Partition((1, n + 1))),
    ),
    "rank out of the world": (
        PartitionError,
        lambda n, P, Q, L: F.shift(torch.ones(1), dd.Partition((1,), (n + 3,)), 0),
    ),
    "root out of the world": (PartitionError, lambda n, P, Q, L: F.scatter(torch.ones(2, 3), L, root=n)),
    "partitions do not broadcast": (
        PartitionError,
        lambda n, P, Q, L: F.broadcast(torch.ones(1), P, dd.Partition((n,))),
    ),
    "no such partition dim": (PartitionError, lambda n, P, Q, L: F.all_sum_reduce(torch.ones(1), P, dims=2)),
    "no such gather dim": (PartitionError, lambda n, P, Q, L: F.all_gather(torch.ones(1, 1), P, dims={5: 0})),
    "permute to a rank outside": (PartitionError, lambda n, P, Q, L: F.permute(torch.ones(1), P, [(0, n)])),
    "permute twice to one rank": (PartitionError, lambda n, P, Q, L: F.permute(torch.ones(1), P, [(0, 0), (n - 1, 0)])),
    "sum of uneven blocks": (
        PartitionError,
        lambda n, P, Q, L: F.all_sum_reduce(torch.ones(2), dd.Layout(P, (2 * n + 1, 1)), 0),
    ),
    "leaf of another shape": (ShapeError, lambda n, P, Q, L: F.repartition([torch.ones(2, 3), torch.ones(1, 3)], L, Q)),
    "shape against the layout": (ShapeError, lambda n, P, Q, L: F.repartition(torch.ones(2, 3), L, Q, shape=(1, 1))),
    "halo input": (ShapeError, lambda n, P, Q, L: F.halo_exchange(torch.ones(5, 5), dd.HaloSpec(L, 1))),
    "more ranks, pytree": (PartitionError, lambda n, P, Q, L: F.shift([BLOCK] * 2, dd.Partition((n + 1,)), 0)),
    "more ranks, start": (
        PartitionError,
        lambda n, P, Q, L: F.start(dd.maps.shift(dd.Partition((n + 1,)), 0, shape=(1,)), BLOCK),
    ),
    "two worlds": (PartitionError, lambda n, P, Q, L: F.repartition(BLOCK, L, dd.Partition((1, n), world="another"))),
    "two devices": (ShapeError, lambda n, P, Q, L: F.invariant_sum([BLOCK, BLOCK.to("meta")], dd.Partition((n, 1, 1)))),
    "a tensor dim named twice": (PartitionError, lambda n, P, Q, L: F.all_gather(BLOCK, P, {0: 0, -2: 1})),
    "dims of a sum as a dict": (PartitionError, lambda n, P, Q, L: F.all_sum_reduce(BLOCK, P, {0: 0})),
    "pairs of no ranks": (PartitionError, lambda n, P, Q, L: F.permute(BLOCK, P, [([0], 0)])),
    "no partition": (PartitionError, lambda n, P, Q, L: F.repartition(BLOCK, L, (1, n))),
    "no partition, bare": (PartitionError, lambda n, P, Q, L: F.all_gather(BLOCK, None)),
    "no tensor in a pytree": (ShapeError, lambda n, P, Q, L: F.repartition([BLOCK, 3], L, Q)),
    "layout of a layout": (PartitionError, lambda n, P, Q, L: dd.Layout(L, (2 * n, 3))),
    "windows of other ranks": (
        PartitionError,
        lambda n, P, Q, L: F.halo_exchange(
            BLOCK, dd.HaloSpec.needs(L, None, dd.Layout(dd.Partition((n + 1, 1)), (2 * n, 3)), lambda d, a, b: (a, b))
        ),
    ),
    "windows of another number of dims": (
        PartitionError,
        lambda n, P, Q, L: dd.HaloSpec.needs(L, None, dd.Layout(dd.Partition((n,)), (3,)), lambda d, a, b: (a, b)),
    ),
    "window against the layout": (ShapeError, lambda n, P, Q, L: dd.HaloSpec.window(L, (2 * n, 4), (3,))),
    "inner product of two shapes": (ShapeError, lambda n, P, Q, L: dd.func.inner(BLOCK, torch.ones(1, 3), P)),
    "too many maps": (PartitionError, lambda n, P, Q, L: F.start((dd.maps.repartition(L, Q),) * 2, (BLOCK,))),
    "a batch that escaped": (ShapeError, lambda n, P, Q, L: F.shift(_escaped(), L, 0)),
    "start": (ShapeError, lambda n, P, Q, L: F.wait(F.start(dd.maps.repartition(L, Q), torch.ones(7, 7)))),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    n, P, Q, L = world()
    kind, call = BAD[what]
    if what in ("sum of uneven blocks", "two devices", "a batch that escaped") and n < 2:
        pytest.skip("needs 2 ranks")
    with count_messages() as sent, pytest.raises(kind) as caught:
        call(n, P, Q, L)
    assert not sent.of("send") and not sent.of("all_reduce"), "an error before any tensor is sent"
    error = caught.value
    assert error.op and error.op in str(error)
    assert error.expected is not None or error.actual is not None or error.next_step or error.partitions
    assert F.all_sum_reduce(torch.ones(1), P).item() == n, "the next call is matched"


@needs(2)
def test_device_kinds_differ():
    """A CPU tensor where another rank has a CUDA one; here the meta device stands in for it."""
    n, P, Q, L = world()
    x = torch.ones(2, 3, device="meta" if dd.world().rank == 0 else "cpu")
    with pytest.raises(DistdlError, match="device"):
        F.repartition(x, P, Q)


def test_offsets_are_integers():
    _, _, P = here()
    with pytest.raises(PartitionError, match="integer"):
        F.shift(torch.ones(2), P, 0, 1.5)


def test_what_is_no_tensor_or_partition():
    n, _, P = here()
    L = dd.Layout(P, (n,))
    for call in (
        lambda: F.all_sum_reduce(1.0, P),
        lambda: F.repartition(None, L, L),
        lambda: F.halo_exchange(3, dd.HaloSpec(L, 1)),
        lambda: dd.maps.all_gather(L)(None),
    ):
        with pytest.raises(ShapeError, match="not a tensor"):
            call()
    for call in (lambda: F.all_sum_reduce(torch.ones(1), (n,)), lambda: F.mark_varying(torch.ones(1), 3)):
        with pytest.raises(PartitionError, match="not a partition"):
            call()


def test_what_is_of_another_type():
    """Each says so, on every rank."""
    n, _, P = here()
    L, x, M = dd.Layout(P, (n,)), torch.ones(1), dd.Layout(dd.Partition((n, 1)), (2 * n, 1))
    for call, text in (
        (lambda: F.all_gather(x, P, "a"), "no dim a"),
        (lambda: F.permute(x, P, [0, 1]), "not pairs of ranks"),
        (lambda: F.halo_exchange(x, L), "not a HaloSpec"),
        (lambda: dd.HaloSpec(P, None, 1), "not a global shape"),
        (lambda: F.start(3, x), "not a linear map"),
        (lambda: F.wait(3), "not a movement under way"),
        (lambda: F.dist_batch_norm(torch.ones(2, 1), M, torch.ones(1), None), "belong together"),
        (lambda: F.dist_mse_loss(x, 3.0, L), "target is not a tensor"),
        (lambda: F.dist_sum(3.0, L), "not a tensor"),
        (lambda: F.dist_dropout(x, L, 0.5, None), "a seed is one integer"),
        (lambda: F.dist_dropout(x, L, 0.5, 1.5), "a seed is one integer"),
        (lambda: dd.linear_map(torch.neg, torch.neg, (3,), (3,))(5), "got int"),
    ):
        with pytest.raises(DistdlError, match=text):
            call()
    if n > 1:
        with pytest.raises(ShapeError, match="only dense"):
            F.all_sum_reduce(torch.eye(3).to_sparse(), P)
        with pytest.raises(DistdlError, match="no memory"):
            F.all_sum_reduce(torch.ones(3, device="meta"), P)


# Calls that negotiate, and of which a rank could mean its own block's sizes, or its own number. Without the comparison
# some hang, some give each rank another result, and some end in an error about other things.
DIFFERING = {
    "size": lambda x, P, r: F.dist_interpolate(x, P, (5 + r, 3), mode="bilinear"),
    "scale_factor": lambda x, P, r: F.dist_interpolate(x, P, scale_factor=1.0 + r),
    "mode": lambda x, P, r: F.dist_interpolate(x, P, (5, 3), mode=("bilinear", "nearest")[r]),
    "output_size": lambda x, P, r: F.dist_adaptive_avg_pool(x, P, (2, 2 + r)),
    "padding": lambda x, P, r: F.dist_conv(x, torch.ones(1, 1, 3, 3), P, padding=r),
    "kernel_size": lambda x, P, r: F.dist_max_pool(x, P, 2 + r),
    "pad": lambda x, P, r: F.dist_pad(x, P, (0, 0, 0, r)),
    "num_groups": lambda x, P, r: F.dist_group_norm(x, P, 1 + r),
    "by": lambda x, P, r: F.roll(x, P, 2, by=1 + r),
    "dims": lambda x, P, r: F.all_gather(x, P, 2 + r),
}


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", DIFFERING)
def test_ranks_that_pass_other_arguments(name):
    """A bare partition is negotiated, and plain arguments with it: an error on every rank, and all go on."""
    n, r = dd.world().size, dd.world().rank % 2
    P, x = dd.Partition((1, 1, n, 1)), torch.ones(1, 1, 3 - r, 4)
    raises_everywhere(AgreementError, lambda: DIFFERING[name](x, P, r), "disagree in the arguments", f"{name}=")
    assert F.dist_sum(x, P).item() == 4 * sum(3 - k % 2 for k in range(n))
