"""What the notebook on waveform inversion and its tests share: acoustic waves, shots, receivers, and the misfit."""

import torch

import distdl as dd
import distdl.functional as F

STENCIL = (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12)  # the second derivative, of fourth order


def ricker(steps, dt, frequency):
    """The wavelet of most seismic modelling, the second derivative of a bell, at the times of all steps."""
    a = (torch.pi * frequency * (torch.arange(steps, dtype=torch.float64) * dt - 1.2 / frequency)) ** 2
    return (1 - 2 * a) * torch.exp(-a)


def sponge(shape, width, strength):
    """A global tensor of damping rates that grow towards all sides but the top (dim 1 is depth), in so many cells."""
    x, z = (torch.arange(n, dtype=torch.float64) for n in shape)
    inside = torch.minimum(torch.minimum(x, shape[0] - 1 - x)[:, None], (shape[1] - 1 - z)[None])
    return strength * ((width - inside).clamp(min=0) / width) ** 2


class Survey:
    """Pressures of shots in a velocity model c: p_tt + 2 s p_t = c² (Δp + wavelet × point), by central differences, on
    a grid of spacing 1 with pressure zero around.

    Args:
        L: the layout of pressures, (shots, x, z). Ranks that split shots have the model of their part of space alike.
        sources: (shots, 2): where each shot is, the same on every rank.
        receivers: (k, 2): where this rank listens, anywhere; the receivers of a shot are those of all ranks that have it.
        damping: this rank's block of the rates s.
        wavelet: one number for each step.
        block: of how many steps the intermediate results are worked out again in backward. None: all are kept.
    """

    def __init__(self, L, sources, receivers, damping, wavelet, dt=0.4, block=8):
        self.L, self.dt, self.wavelet, self.block = L, dt, wavelet, block
        self.halo = dd.HaloSpec(L, (0, 2, 2), boundary="zeros", corners=False)
        self.receivers, self.index = receivers, F.sample_index(L, receivers)
        mine = torch.eye(len(sources), dtype=torch.float64)[L.slices()[0]]  # each shot has a source of its own
        of = sources if self._first() else sources[:0]
        self.points = F.dist_deposit(mine[:, : len(of)], of, L)
        self.gain, self.loss = 1 / (1 + dt * damping), 1 - dt * damping

    def _first(self):
        """Whether this rank is the one of its shots that says where the sources are."""
        return not any(self.L.partition.index()[1:])

    def laplacian(self, p):
        """Of this rank's block: one star-shaped halo of two cells."""
        w, n = F.halo_exchange(p, self.halo), p.shape
        return sum(
            a * (w[:, i : i + n[1], 2 : 2 + n[2]] + w[:, 2 : 2 + n[1], i : i + n[2]]) for i, a in enumerate(STENCIL)
        )

    def steps(self, p, before, c, wavelet):
        """(pressures, those a step before, what the receivers heard) some steps later."""
        heard = []
        for w in wavelet:
            after = self.gain * (
                2 * p - self.loss * before + (self.dt * c) ** 2 * (self.laplacian(p) + w * self.points)
            )
            p, before = after, p
            heard.append(F.dist_sample(p, self.L, self.receivers, index=self.index))
        return p, before, torch.stack(heard, -1)

    def record(self, c):
        """(this rank's shots, its receivers, steps) in the model c, this rank's block of (x, z)."""
        run = self.steps if self.block is None else dd.remat(self.steps)
        c = F.mark_varying(c, self.L.partition, dims=0)  # one model for all shots: its gradients are summed over them
        p = before = torch.zeros(self.L.local_shape(), dtype=c.dtype)
        heard = []
        for wavelet in self.wavelet.split(self.block or len(self.wavelet)):
            p, before, h = run(p, before, c, wavelet)
            heard.append(h)
        return torch.cat(heard, -1)

    def misfit(self, c, observed):
        """Half the squares of the residuals of all shots and receivers."""
        return F.invariant_sum(((self.record(c) - observed) ** 2).sum() / 2, self.L.partition)

    def gauss_newton(self, c, v):
        """Jᵀ J v, J the Jacobian of the records: forwards along v, and back. v is laid out as c."""
        _, along = torch.func.jvp(self.record, (c,), (v,))
        return torch.func.vjp(self.record, c)[1](along)[0]


def share(points, L):
    """This rank's part of points that the ranks of a shot listen at, in equal numbers."""
    space = L.partition.take(0, L.partition.index()[0])
    return points.tensor_split(space.size)[space.ranks.index(dd.world().rank)]


def model(L):
    """The layout of velocities, of the ranks of the first shots."""
    return dd.Layout(L.partition.take(0, 0), L.shape[1:], L.splits and L.splits[1:])


def block_of(L, x):
    """This rank's block of a global tensor (x, z), also on ranks of other shots."""
    return x[L.slices()[1:]].clone()


def held(run):
    """(the result of run, bytes of the tensors made meanwhile that are still alive behind it)."""
    made = Made()
    with made:
        result = run()
    return result, made.bytes()


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the memory that operators allocate."""

    def __init__(self):
        super().__init__()
        self.noted = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                memory = t.untyped_storage()
                ref = torch.multiprocessing.reductions.StorageWeakRef(memory)
                self.noted[ref.cdata] = (ref, memory.nbytes())
        return result

    def bytes(self):
        """Of what is alive now."""
        return sum(size for ref, size in self.noted.values() if not ref.expired())
