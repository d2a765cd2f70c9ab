"""The door of the engine: who hears of a movement, and what is under way between F.start and F.wait."""

import pytest
import torch
from one_process import every_rank, returned
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import distdl as dd
import distdl.functional as F
from distdl.engine import dispatch
from distdl.engine import transport as traffic

L, M = dd.Layout(dd.Partition((2,)), (5,)), dd.Layout(dd.Partition((2,)), (5,), splits=((1, 4),))


class Watcher:
    """An observer that notes whether a graph holds the adjoint."""

    timeout, tracing = None, False

    def __init__(self):
        self.recorded = []

    def movement(self, watch, engine, steps, xs, recorded):
        self.recorded.append(recorded)
        return engine


class Heard:
    """What an engine is told."""

    def __init__(self):
        self.told = []

    def of(self, what):
        return lambda *_: self.told.append(what)


def block(**others):
    return torch.arange(L.local_shape()[0], dtype=torch.float64, **others) + 10 * dd.world().rank


def test_an_engine_hears_of_the_end_only_while_somebody_looks(monkeypatch):
    heard, watcher = Heard(), Watcher()
    A = lambda: dd.maps.repartition(L, M)(block())

    def program():
        heard.told.clear()
        A()
        assert not heard.told
        with monkeypatch.context() as m:
            m.setattr(traffic, "observer", watcher)
            m.setattr(dispatch, "ranged", None)  # not called: nobody profiles
            A()
        assert heard.told == ["ended"]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            A()
        assert heard.told == ["ended", "ended"]
        return [event.key for event in seen.key_averages() if event.key.startswith("distdl::")]

    # Rank 0 has 3 rows, and keeps 1 of them.
    names = returned(every_rank(2, program, ended=heard.of("ended")))
    assert names == [["distdl::repartition (1 peer, 16 B)"], ["distdl::repartition (1 peer, 0 B)"]]


# Messages of two tensors have gaps between their parts, so those never settle: three rounds.
def test_what_is_begun_is_under_way_before_it_is_waited_for(monkeypatch):
    heard, watcher = Heard(), Watcher()

    def program():
        heard.told.clear()
        world, A = dd.world(), dd.maps.repartition(L, M)
        x, y = block(requires_grad=True), block()
        before = traffic.begun
        with monkeypatch.context() as m:
            m.setattr(traffic, "observer", watcher)
            watcher.recorded.clear()
            pending = F.start((A, A), (x, y))
            assert traffic.begun == before + 1 and heard.told == ["pause"] and watcher.recorded == [True]
            assert pending.moving is not None and pending.xs[0] is x  # the graph's node is made of x itself
            F.wait(pending)
            F.wait(F.start((A, A), (y, x)))
            F.wait(F.start(A, y))
            with torch.no_grad():
                F.wait(F.start(A, x))
            assert watcher.recorded == [True, True, False, False]
        return world.rank

    assert returned(every_rank(2, program, rounds=3, pause=heard.of("pause"))) == [0, 1]


def test_what_is_not_plain_moves_whole_in_wait():
    """One tensor of two suffices; both move as they would alone."""

    def program():
        A, y = dd.maps.repartition(L, M), block()
        pending = F.start((A, A), (TwoTensor(y, y + 50), y + 100))
        assert pending.moving is None
        one, two = F.wait(pending)
        return [part.tolist() for part in (one.a, one.b, two.a)]

    assert returned(every_rank(2, program, rounds=3)) == [
        [[0.0], [50.0], [100.0]],
        [[1.0, 2.0, 10.0, 11.0], [51.0, 52.0, 60.0, 61.0], [101.0, 102.0, 110.0, 111.0]],
    ]


def test_an_error_of_a_mode_is_its_own():
    """Only a tensor's class is to blame for a refusal, where there is one."""

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "distdl" in str(func):
                raise TypeError("mine")
            return func(*args, **(kwargs or {}))

    def program():
        y, A = block(), dd.maps.repartition(L, M)
        with Refuses(), pytest.raises(TypeError, match=r"^mine$"):
            A(y)
        return True

    assert returned(every_rank(2, program)) == [True, True]
