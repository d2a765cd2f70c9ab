"""What an operator may be given, and what it must leave alone."""

import torch
from registry import each_case, integers, needs, randn
from torch.testing._internal.two_tensor import TwoTensor

import distdl as dd
import distdl.functional as F
from distdl.testing import gather_objects


def memory(x):
    return x.untyped_storage().data_ptr()


def twisted(x):
    """The same values in other memory layouts."""
    yield "every second element", torch.stack([x, x + 1], -1)[..., 0]
    order = tuple(range(x.dim()))[::-1]
    yield "transposed", x.permute(order).contiguous().permute(order)
    yield "offset", torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[min(1, x.numel()) :].reshape(x.shape)
    yield "lazily negated", torch._neg_view(-x)


@each_case(thin=True)
def test_strided(case):
    X = integers(case.shape)
    wanted = case.map(case.local(X))
    for what, x in twisted(case.local(X)):
        assert torch.equal(case.map(x), wanted), what


@each_case()
def test_stride_zero(case):
    """Case 13: an expanded input, and the cotangent of ``.sum().backward()``."""
    x = torch.full((), 3.0, dtype=torch.float64).expand(case.local(integers(case.shape)).shape)
    assert torch.equal(case.map(x), case.map(x.contiguous()))
    z = x.clone().requires_grad_()
    y = case.map(z)
    y.sum().backward()
    back = case.map.T(torch.ones_like(y))
    assert torch.equal(z.grad, back if case.held else torch.zeros_like(z))


@each_case(thin=True)
def test_conjugate(case):
    X = randn(case.shape, 1, dtype=torch.complex128)
    x = case.local(X).conj()
    assert x.is_conj() and torch.allclose(case.map(x), case.map(case.local(X)).conj(), rtol=1e-15, atol=1e-15)
    assert torch.allclose(case.map(x.imag), -case.map(case.local(X).imag.clone()), rtol=1e-15, atol=1e-15)


@each_case(thin=True)
def test_nothing_is_mutated(case):
    """Case 15: neither the input, nor the cotangent, nor a tangent."""
    x = case.smooth(randn(case.shape, 1)).requires_grad_()
    y = case.map(x * 1)
    y_bar = randn((), 2).expand(y.shape)
    versions, copies = (x._version, y_bar._version), (x.detach().clone(), y_bar.clone())
    first = torch.autograd.grad(y, x, y_bar, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x, y_bar)[0])
    assert (x._version, y_bar._version) == versions
    assert torch.equal(x, copies[0]) and torch.equal(y_bar, copies[1])


@each_case()
def test_fresh_memory_or_identity(case):
    """Case 17, and: a map is the identity on all ranks, and then returns its input itself, or on none."""
    x = case.local(integers(case.shape))
    for spelling, call in {"map": case.map, **case.calls}.items():
        y = call(x)
        everyone = gather_objects((y is x, memory(y) == memory(x)) if x.numel() and y.numel() else None)
        assert len({(False, False), (True, True), *everyone} - {None}) == 2 and len(set(everyone) - {None}) <= 1, (
            spelling
        )
        if x.numel() and y.numel() and y is not x:
            before, kept = y.clone(), x.clone()
            x.fill_(7)
            assert torch.equal(y, before), "the result changed with the input"
            x.copy_(kept)
            y.fill_(7)
            assert torch.equal(x, kept) or bool(torch.isnan(kept).any()), "the input changed with the result"


@each_case(lambda name: name in ("repartition_identity", "mark_varying"))
def test_identity_returns_its_input(case):
    """Where neither the map nor its adjoint moves anything; mark_varying has an adjoint that does."""
    x = case.local(integers(case.shape))
    assert all((call(x) is x) == ("identity" in case.name or case.n == 1) for call in (case.map, *case.calls.values()))
    assert case.map.plans == ()


@each_case(lambda name: name.startswith("halo"))
def test_in_place_after_movement(case):
    """Case 16: an in-place ReLU on the result is no autograd error, and gives the right gradient."""
    X = randn(case.shape, 1)
    x, z = case.smooth(X).requires_grad_(), case.smooth(X).requires_grad_()
    y = case.map(x * 1)
    y.relu_()
    case.loss(y).backward()
    case.loss(case.map(z * 1).relu()).backward()
    assert torch.equal(x.grad, z.grad)


@needs(2)
def test_tensors_with_operators_of_their_own():
    """Wrapper classes have no memory of their own: each part is moved; and what a grad has left behind is an ordinary
    tensor."""
    P, r = dd.Partition((dd.world().size,)), dd.world().rank
    A = dd.maps.shift(P, 0, shape=(2,))
    x = torch.arange(2.0) + r
    parts = TwoTensor(x, -x).requires_grad_()
    y = A(parts)
    (y * (r + 1)).sum().backward()
    assert torch.equal(y.detach().b, A(-x)) and torch.equal(F.wait(F.start(A, TwoTensor(x, x))).b, A(x))
    assert torch.equal(parts.grad.a, A.T(torch.full((2,), r + 1.0)))
    box = []
    torch.func.grad(lambda x: box.append(x * 2) or x.sum())(x)
    assert torch.equal(A(box[0]), A(2 * x)) and torch.equal(F.wait(F.start(A, box[0])), A(2 * x))
