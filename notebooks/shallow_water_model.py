"""What the notebook on shallow water and its tests share: one layer of water that rotates, on a staggered grid."""

import torch

import distdl as dd
import distdl.functional as F


def difference(window, dim):
    """Between neighbours along dim."""
    return window.diff(dim=dim)


def mean(window, dim):
    """Of neighbours along dim."""
    w = window.movedim(dim, 0)
    return ((w[1:] + w[:-1]) / 2).movedim(0, dim)


class Water:
    """Depth h in cells, velocities u and v on the faces across dims 0 and 1, h_t = -∇·(h u) and
    u_t = -q (h u)^⊥ - ∇(g h + |u|²/2), with the potential vorticity q = (v_x - u_y + f) / h at nodes.

    Means and differences are those of R. Sadourny, "The dynamics of finite-difference models of the shallow-water
    equations", J. Atmos. Sci. 32 (1975), the scheme that conserves energy: what flows through a face leaves one cell and
    enters another, so mass changes by rounding only. Nothing flows through walls, and along them there is no friction.
    Time steps are Runge and Kutta's of order three, as H. Wicker and W. Skamarock have them (Mon. Weather Rev. 130, 2002).

    Args:
        L: the layout of the cells, of two dims.
        periodic: the dims that close in themselves; the others end at walls.
    """

    def __init__(self, L, periodic=(), gravity=1.0, coriolis=0.5, step=0.25):
        self.L, self.g, self.f, self.step = L, gravity, coriolis, step
        h, u, v, q = (dd.Staggered(L, dims, periodic=periodic) for dims in ((), 0, 1, None))
        self.places, self.layouts = (h, u, v), (h.layout, u.layout, v.layout)
        # The windows of the three exchanges of a time derivative; walls mirror what lies beside them.
        self.of_state = tuple(a.to(b, "replicate") for a, b in ((h, u), (h, v), (h, q), (u, q), (v, q), (u, h), (v, h)))
        self.of_flow = tuple(a.to(b, "replicate") for a, b in ((u, h), (v, h), (h, u), (h, v), (u, q), (v, q)))
        self.of_turns = (q.to(u), q.to(v))
        # 0 on the faces in walls: there a difference sees the end of the cells
        ones = torch.ones(L.local_shape(), dtype=torch.float64)
        ends = F.halo_exchange((ones, ones), (h.to(u), h.to(v)))
        self.open = tuple(1 - difference(w, d).abs() for d, w in enumerate(ends))

    def change(self, state):
        """The time derivatives of (h, u, v), in three sets of messages."""
        h, u, v = state
        hu, hv, hq, uq, vq, uh, vh = F.halo_exchange((h, h, h, u, v, u * u, v * v), self.of_state)
        flow, across = mean(hu, 0) * u, mean(hv, 1) * v
        head = self.g * h + (mean(uh, 0) + mean(vh, 1)) / 2
        q = (self.f + difference(vq, 0) - difference(uq, 1)) / mean(mean(hq, 0), 1)
        out, beside, du, dv, fq, aq = F.halo_exchange((flow, across, head, head, flow, across), self.of_flow)
        turn, back = F.halo_exchange((q * mean(aq, 0), q * mean(fq, 1)), self.of_turns)
        return (
            -difference(out, 0) - difference(beside, 1),
            self.open[0] * (mean(turn, 1) - difference(du, 0)),
            self.open[1] * (-mean(back, 0) - difference(dv, 1)),
        )

    def advance(self, state, steps):
        """The state so many steps later."""
        for _ in range(steps):
            now = state
            for part in (3, 2, 1):
                state = tuple(a + self.step / part * b for a, b in zip(now, self.change(state)))
        return state

    def mass(self, h):
        """The sum over all cells."""
        return F.dist_sum(h, self.L)

    def energy(self, state):
        """Of motion and of height: Σ h |u|²/2 + g h²/2, velocities' squares averaged from faces to cells."""
        h, u, v = state
        uh, vh = F.halo_exchange((u * u, v * v), self.of_state[5:])
        return F.dist_sum(h * (mean(uh, 0) + mean(vh, 1)) / 2 + self.g * h * h / 2, self.L)

    def misfit(self, state, steps, observed):
        """Half the squares of what the depth after so many steps differs from an observed one."""
        return F.dist_sum((self.advance(state, steps)[0] - observed) ** 2, self.L) / 2


def whole_hill(shape, at=(0.35, 0.4), height=0.2, width=0.12):
    """A global tensor of depths: a round hill of water upon a depth of one; its place and width in parts of the grid."""
    x, y = ((torch.arange(n, dtype=torch.float64) + 0.5) / n - a for n, a in zip(shape, at))
    return 1 + height * torch.exp(-(x[:, None] ** 2 + y**2) / (2 * width**2))


def at_rest(water, h):
    """The state with this rank's block of depths, and no motion."""
    return (h, *(h.new_zeros(layout.local_shape()) for layout in water.layouts[1:]))
