"""Cosine and sine transforms in one process, by dense matrices from the definitions of scipy.fft."""

import math

import torch


def matrix(name, type, n, norm):
    """A row for each wave number. "ortho" is told by what it is: the cosines or sines of unit length."""
    if name.startswith("i"):  # the definition of the inverse
        return torch.linalg.inv(matrix(name[1:], type, n, norm))
    j, k = torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)[:, None]
    period = 2 * (n + {"dctn1": -1, "dstn1": 1}.get(f"{name}{type}", 0))
    if name == "dctn":
        arg = {1: k * j / (n - 1) if n > 1 else k, 2: k * (2 * j + 1) / (2 * n), 3: (2 * k + 1) * j / (2 * n),
               4: (2 * k + 1) * (2 * j + 1) / (4 * n)}[type]  # fmt: skip
        A, once = 2 * torch.cos(math.pi * arg), {1: [0, n - 1], 3: [0]}.get(type, [])
    else:
        arg = {1: (k + 1) * (j + 1) / (n + 1), 2: (k + 1) * (2 * j + 1) / (2 * n),
               3: (2 * k + 1) * (j + 1) / (2 * n), 4: (2 * k + 1) * (2 * j + 1) / (4 * n)}[type]  # fmt: skip
        A, once = 2 * torch.sin(math.pi * arg), {3: [n - 1]}.get(type, [])
    if norm != "ortho":
        A[:, once] /= 2
        return A / (period if norm == "forward" else 1)
    if (name, type) == ("dctn", 1):
        A[:, once] /= math.sqrt(2)
        A[once] /= math.sqrt(2)
        return A / math.sqrt(period)
    by_rows = type == 2
    return A / A.norm(dim=1 if by_rows else 0, keepdim=True)


def transformed(name, x, dims, type=2, s=None, norm="backward"):
    """Dim by dim, by matrices in x's own dtype; x is cut, or continued by zeros. As torch.fft, of no memory format."""
    with torch.autocast("cpu", enabled=False):
        for i, d in enumerate(dims):
            n = x.shape[d] if s is None or s[i] is None else s[i]
            m = min(n, x.shape[d])
            A = matrix(name, type, n, norm)[:, :m].to(x.dtype)
            x = torch.tensordot(A, x.narrow(d, 0, m), ([1], [d])).movedim(0, d)
    return x
