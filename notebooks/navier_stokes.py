"""What the notebook on Fourier neural operators and its tests share: a pseudo-spectral solver, the operator, training."""

import torch

import distdl as dd
import distdl.functional as F

DIMS = (2, 3)


def layout(P, examples, n):
    """(examples, 1, n, n) over ``P``."""
    return dd.Layout(P, (examples, 1, n, n))


class Flow:
    """Vorticity on a periodic square, ω_t + u·∇ω = ν Δω + f with Δψ = -ω, u = (ψ_y, -ψ_x), by Fourier's method.

    The state is the spectrum of ω without its upper third (Orszag's rule: products of what is left alias into that third
    only), so the rest never travels. ν Δ is taken exactly (its exponential is an integrating factor), the rest by Heun's
    method.
    """

    def __init__(self, L, viscosity=1e-2, step=1e-2):
        self.L, self.n, self.step = L, L.shape[3], step
        m = (self.n - 1) // 3
        self.keep = ((m + 1, m), m + 1)  # wave numbers -m .. m
        self.M = F.fft_layout(L, DIMS, real=True, keep=self.keep)
        kx = F.dist_fftfreq(self.M, 2, self.n, 1 / self.n, keep=self.keep[0], dtype=torch.float64)[:, None]
        ky = F.dist_rfftfreq(self.M, 3, self.n, 1 / self.n, keep=self.keep[1], dtype=torch.float64)[None]
        self.square = kx**2 + ky**2
        self.inverse = torch.where(self.square == 0, 0, 1 / torch.where(self.square == 0, 1, self.square))
        # from ω to u, v, ω_x and ω_y: one transform for all four
        self.to_fields = torch.stack(
            [1j * ky * self.inverse, -1j * kx * self.inverse, 1j * kx + 0 * ky, 1j * ky + 0 * kx]
        )
        self.decay = torch.exp(-step * viscosity * self.square)
        x = 2 * torch.pi * torch.arange(self.n, dtype=torch.float64) / self.n
        f = 0.1 * (torch.sin(x[:, None] + x[None]) + torch.cos(x[:, None] + x[None]))
        self.force = self.spectrum(L.shard(f.expand(L.shape)))

    def spectrum(self, w):
        """Of this rank's block of a field."""
        return F.dist_rfftn(w, self._with(w), DIMS, keep=self.keep, norm="forward", P_out=self.M.partition)

    def field(self, s):
        """The fields of spectra, back over the ranks of ``L``."""
        M = self.M.with_shape((self.M.shape[0], s.shape[1], *self.M.shape[2:]))
        return F.dist_irfftn(s, M, DIMS, s=(self.n, self.n), keep=self.keep, norm="forward", P_out=self.L.partition)

    def _with(self, w):
        return self.L.with_shape((self.L.shape[0], w.shape[1], self.n, self.n))

    def change(self, s):
        """-u·∇ω + f, from and to the spectrum of ω."""
        u, v, wx, wy = self.field(self.to_fields * s).chunk(4, 1)
        return self.force - self.spectrum(u * wx + v * wy)

    def advance(self, s, steps):
        """The spectrum ``steps`` steps later."""
        for _ in range(steps):
            first = self.change(s)
            guess = self.decay * (s + self.step * first)
            s = self.decay * (s + 0.5 * self.step * first) + 0.5 * self.step * self.change(guess)
        return s

    def smooth(self, seed):
        """The spectrum of random vorticity, the same on any number of ranks: white noise, filtered."""
        noise = self.spectrum(F.normal(self.L, seed, dtype=torch.float64))
        return noise * self.n * 7**1.5 * (self.square > 0) / (self.square + 49) ** 1.25


class Operator(torch.nn.Module):
    """A Fourier neural operator: from the field now to the field later, one matrix for each kept wave number. Of a bare
    partition its layers ask for sizes, so it takes fields of any size."""

    def __init__(self, P, width=8, modes=4, depth=2, dtype=torch.float64):
        super().__init__()
        blocks = [
            dd.nn.FNOBlock(
                P, width, width, (modes, modes), torch.nn.functional.gelu if i < depth - 1 else None, dtype=dtype
            )
            for i in range(depth)
        ]
        self.lift = dd.nn.Conv2d(P, 1, width, 1, dtype=dtype)
        self.blocks = torch.nn.Sequential(*blocks)
        self.project = dd.nn.Conv2d(P, width, 1, 1, dtype=dtype)

    def forward(self, w):
        """The change of the field is learnt."""
        return w + self.project(self.blocks(self.lift(w)))


def data(P, examples, n, steps, seed=0):
    """(this rank's blocks of fields, of the same ones ``steps`` steps later, their layout)."""
    L = layout(P, examples, n)
    flow = Flow(L)
    s = flow.smooth(seed)
    return flow.field(s), flow.field(flow.advance(s, steps)), L


def train(P, steps, examples=4, n=16, later=20, rate=1e-2, **options):
    """(losses of ``steps`` steps of Adam, the model): the same numbers on any grid ``P``."""
    x, y, L = data(P, examples, n, later)
    torch.manual_seed(0)
    model = Operator(P, **options)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.dist_mse_loss(model(x), y, L)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model
