"""What the notebook on a language model and its tests share: a small GPT on a grid of data x sequence x tensor ranks,
its serial twin in plain torch, text, and training."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as tf

import distdl as dd
import distdl.functional as F

# ---------------------------------------------------------------- sizes and text


@dataclass(frozen=True)
class Sizes:
    """Of a model: ``heads`` of queries share ``kv_heads`` of keys and values; ``hidden`` is the MLP's width."""

    vocabulary: int
    width: int = 24
    heads: int = 6
    kv_heads: int = 3
    hidden: int = 40
    depth: int = 2

    @property
    def head(self):
        """Features of a head."""
        return self.width // self.heads


def text():
    """(the characters of this project's pages as numbers, those characters)."""
    root = Path(__file__).resolve().parents[1]
    pages = "".join(p.read_text(encoding="utf-8") for p in (root / "README.md", *sorted((root / "docs").glob("*.md"))))
    letters = sorted(set(pages))
    number = {c: i for i, c in enumerate(letters)}
    return torch.tensor([number[c] for c in pages]), letters


def batch(tokens, step, examples, length):
    """(examples, length) tokens of step ``step``, and those that follow each: equal on every rank."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - length, (examples, 1), generator=draw)
    windows = tokens[starts + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


# ---------------------------------------------------------------- plain torch


class SerialAttention(torch.nn.Module):
    """Causal attention with rotary embeddings."""

    def __init__(self, sizes, dtype):
        super().__init__()
        self.sizes, features = sizes, sizes.kv_heads * sizes.head
        self.q = torch.nn.Linear(sizes.width, sizes.width, bias=False, dtype=dtype)
        self.k = torch.nn.Linear(sizes.width, features, bias=False, dtype=dtype)
        self.v = torch.nn.Linear(sizes.width, features, bias=False, dtype=dtype)
        self.out = torch.nn.Linear(sizes.width, sizes.width, bias=False, dtype=dtype)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.sizes.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        half = self.sizes.head // 2
        speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
        turn = torch.polar(torch.ones_like(angle), angle)  # a pair of features is a complex number
        q, k = (torch.view_as_real(torch.complex(*t.double().chunk(2, -1)) * turn).to(t.dtype) for t in (q, k))
        q, k = (t.transpose(-1, -2).flatten(-2) for t in (q, k))
        y = tf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SerialGPT(torch.nn.Module):
    """The model as one process has it; its output projection is its embedding table."""

    def __init__(self, sizes, dtype=torch.float64):
        super().__init__()
        norm = partial(torch.nn.RMSNorm, sizes.width, dtype=dtype)
        self.embed = torch.nn.Embedding(sizes.vocabulary, sizes.width, dtype=dtype)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "norm1": norm(),
                    "attention": SerialAttention(sizes, dtype),
                    "norm2": norm(),
                    "up": torch.nn.Linear(sizes.width, sizes.hidden, dtype=dtype),
                    "down": torch.nn.Linear(sizes.hidden, sizes.width, dtype=dtype),
                }
            )
            for _ in range(sizes.depth)
        )
        self.norm = norm()
        torch.nn.init.normal_(self.embed.weight, std=sizes.width**-0.5)

    def forward(self, tokens):
        """Logits (batch, seq, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block["attention"](block["norm1"](x))
            x = x + block["down"](tf.gelu(block["up"](block["norm2"](x))))
        return tf.linear(self.norm(x), self.embed.weight)

    def loss(self, tokens, following):
        """The mean over all tokens."""
        return tf.cross_entropy(self(tokens).flatten(0, 1), following.flatten())


# ---------------------------------------------------------------- on a grid of ranks


class Places:
    """Where the tensors of a batch lie over a grid ``P`` of (data, sequence, tensor) ranks.

    Args:
        order: how the rows of the sequence are dealt out; ``None``: in blocks, one after the other. "zigzag" gives all
            ranks as much causal attention to work out.
    """

    def __init__(self, P, examples, length, order=None):
        self.P, self.shape = P, (examples, length)
        self.tokens = dd.Layout(P.take(2, P.index()[2]), self.shape)  # as are the tokens of all tensor ranks
        self.positions = F.positions(self.tokens, 1, order)
        if order is not None:
            self.tokens = F.reorder_layout(self.tokens, 1, order)
        self.order = order
        self.columns = dd.Partition((*P.shape, 1), P.ranks)  # (batch, seq, out, in): a weight's rows are split
        self.rows = dd.Partition((*P.shape[:2], 1, P.shape[2]), P.ranks)  # its columns are

    def cut(self, x):
        """This rank's part of (batch, seq) tokens."""
        return x[self.tokens.slices()[0]][:, self.positions]

    def _with(self, P, *shape, splits=()):
        """A layout of (batch, seq, ...)."""
        seq = (self.tokens.sizes(0), self.tokens.sizes(1))
        return dd.Layout(P, (*self.shape, *shape), (*seq, *(splits or (None,) * len(shape))))

    def stream(self, width):
        """Of what every tensor rank has of (batch, seq, width): one value."""
        return self._with(self.P.along((0, 1)), width)

    def linear(self, P, outs, ins, unit=1):
        """Of a linear layer between so many features, of which each tensor rank has whole units."""
        units = dd.Layout(P, (*self.shape, outs // unit, ins // unit))
        return self._with(P, outs, ins, splits=[[unit * n for n in units.sizes(d)] for d in (2, 3)])

    def heads(self, n, features):
        """Of (batch, heads, seq, features), heads over tensor ranks."""
        return self._with(self.columns, n, features).permute((0, 2, 1, 3))

    def classes(self, n):
        """Of (batch, class, seq), classes over tensor ranks."""
        return self._with(self.P, n).permute((0, 2, 1))


class Attention(torch.nn.Module):
    """Causal attention: a tensor rank has some of the heads, a sequence rank some of the rows, and keys come."""

    def __init__(self, places, sizes, dtype, options):
        super().__init__()
        n, kv, d, w = sizes.heads, sizes.kv_heads, sizes.head, sizes.width
        same = {"bias": False, "dtype": dtype, "x_layout": "replicated", "y_layout": "replicated"}
        self.q = dd.nn.Linear(places.linear(places.columns, w, w, d), w, w, **same)
        self.k = dd.nn.Linear(places.linear(places.columns, kv * d, w, d), w, kv * d, **same)
        self.v = dd.nn.Linear(places.linear(places.columns, kv * d, w, d), w, kv * d, **same)
        self.out = dd.nn.Linear(places.linear(places.rows, w, w, d), w, w, **same | {"y_layout": "invariant"})
        self.head, self.places = d, places
        self.over, self.kv_over = places.heads(n, d), places.heads(kv, d)
        self.options = options | {"order": places.order}

    def forward(self, x):
        x = F.mark_varying(x, self.places.columns, 2)  # one value, of which each tensor rank takes its own heads
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (F.rotary_embedding(t, self.places.positions) for t in (q, k))
        y = F.dist_attention(q, k, v, self.over, kv_shape=self.kv_over, causal=True, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(torch.nn.Module):
    """The model on a grid: weights over tensor ranks, rows of the sequence over sequence ranks, examples over data
    ranks. Its parameters have the serial names, and are blocks of the serial ones.

    Args:
        options: of dist_attention (``method``).
    """

    def __init__(self, places, sizes, dtype=torch.float64, **options):
        super().__init__()
        self.places, w = places, sizes.width
        self.table = places.linear(places.columns, sizes.vocabulary, w)
        self.classes = places.classes(sizes.vocabulary)
        norm = partial(dd.nn.RMSNorm, places.stream(w), w, dtype=dtype)
        column = {"dtype": dtype, "x_layout": "invariant", "y_layout": "replicated"}
        row = {"dtype": dtype, "x_layout": "replicated", "y_layout": "invariant"}
        self.embed = dd.nn.Embedding(self.table, sizes.vocabulary, w, dtype=dtype)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "norm1": norm(),
                    "attention": Attention(places, sizes, dtype, options),
                    "norm2": norm(),
                    "up": dd.nn.Linear(places.linear(places.columns, sizes.hidden, w), w, sizes.hidden, **column),
                    "down": dd.nn.Linear(places.linear(places.rows, w, sizes.hidden), sizes.hidden, w, **row),
                }
            )
            for _ in range(sizes.depth)
        )
        self.norm = norm()
        with torch.no_grad():
            self.embed.weight.mul_(w**-0.5)

    def forward(self, tokens):
        """Logits of this rank's tokens, this tensor rank's part of the vocabulary."""
        # One table, used twice: it is marked here and not by each use, so that its gradients are added before they are
        # summed over ranks, by one all-reduce.
        table = F.mark_varying(self.embed.weight, self.places.columns, (0, 1))
        x = F.dist_embedding(tokens, table, self.table, y_layout="invariant")
        for block in self.blocks:
            x = x + block["attention"](block["norm1"](x))
            x = x + block["down"](tf.gelu(block["up"](block["norm2"](x))))
        return F.dist_linear(self.norm(x), table, self.table, x_layout="invariant", y_layout="replicated")

    def loss(self, tokens, following):
        """The mean over the tokens of all ranks; no rank has all logits of a token."""
        return F.dist_cross_entropy(self(tokens).transpose(1, 2), following, self.classes)

    def load(self, state):
        """Cut this rank's blocks out of the serial model's tensors."""
        layouts = dd.nn.layouts(self)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(state[name][layouts[name].slices()])
        return self


# ---------------------------------------------------------------- training


def optimizer_of(model, rate=1e-2, decay=0.1):
    """AdamW, which does not let norms and biases decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate)


def steps(model, optimizer, tokens, first, last, examples, length, clip=1.0):
    """Losses of steps ``first`` .. ``last`` - 1, and norms of their gradients, which are clipped; of a GPT or a
    SerialGPT."""
    losses, norms = [], []
    for step in range(first, last):
        x, y = batch(tokens, step, examples, length)
        places = getattr(model, "places", None)
        if places is not None:
            x, y = places.cut(x), places.cut(y)
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        if places is None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        else:
            norm = dd.parallel.clip_grad_norm_(model, clip, places.P)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return losses, norms
