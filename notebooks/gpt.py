# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A language model on tensor × sequence × data ranks
#
# A GPT splits in three ways at once: *data* ranks have other examples, *sequence* ranks other rows of each example, *tensor* ranks
# other heads, other columns of the MLP and another part of the vocabulary. Only attention has rows meet other rows. Here:
# who needs whose keys, what each rank has, and twenty lines that train it, on one rank and on four, with the losses of plain torch.
# `gpt_model.py` has the model and its serial twin.

# %%
import os
import tempfile

import gpt_model as gpt
import torch
from matplotlib import pyplot as plt

import distdl as dd
import distdl.functional as F
from distdl import viz

# %% [markdown]
# ## Who needs whose keys
#
# A rank's queries stay where they are, and the keys that they see come, straight from their owners. Which those are is a *plan*:
# `F.attention_needs(L_q, L_kv, ...)`. It is pure, so one process can look at eight ranks' messages. 200 rows, 4 heads of 16 features in
# float32; of keys and values together, in KiB:

# %%
ranks, rows = 8, 200
L = dd.Layout(dd.Partition((1, 1, ranks, 1)), (1, 4, rows, 16))


def bytes_between(plan):
    """(to, from): bytes of keys and values that a rank has of another, and of its own."""
    table = torch.zeros(ranks, ranks)
    for source, to, elements in viz.messages(plan):
        table[to, source] = 2 * 4 * elements
    return table


def show(ax, table, title, unit):
    """A table with its numbers; what stays on a rank is grey."""
    moved = table.clone().fill_diagonal_(0)
    ax.imshow(moved, cmap="Blues", vmin=0, vmax=max(1.0, 1.5 * float(moved.max())))
    for i in range(ranks):
        for j in range(ranks):
            if table[i, j]:
                ax.text(
                    j, i, unit(table[i, j]), ha="center", va="center", fontsize=7, color="grey" if i == j else "black"
                )
    ax.set(title=title, xlabel="keys of rank", ylabel="queries of rank")


patterns = {
    "every key": {},
    "causal": {"causal": True},
    "causal, window of 30": {"causal": True, "window": 30},
    "causal, documents": {"causal": True, "documents": (0, 40, 110, 200)},
}
figure, axes = plt.subplots(1, 4, figsize=(15, 4.7), layout="constrained")
for ax, (title, options) in zip(axes, patterns.items()):
    needed = bytes_between(F.attention_needs(L, L, **options).plan())
    sent = int(needed.sum() - needed.trace())
    show(ax, needed, f"{title}\n{sent // 1024} KiB move", lambda n: f"{float(n) / 1024:.1f}")

# %% [markdown]
# Messages follow the pattern: a window has one neighbour's, or two; a document its own rows'. What they cost to send is one thing, what
# there is to *work out* another: causal, the last rank has most pairs of a query and a key. In **zigzag** order each rank has rows of
# both ends, and all have about as much. All keys come then, since every rank has late rows. Pairs in hundreds:

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
for ax, order in zip(axes, (None, "zigzag")):
    places = [F.positions(L, 2, order, rank=r) for r in range(ranks)]
    pairs = torch.tensor([[float((i[:, None] >= j).sum()) for j in places] for i in places])
    most = float(pairs.sum(1).max() / pairs.sum(1).mean())
    show(ax, pairs, f"{order or 'in blocks'}: most / mean = {most:.2f}", lambda n: f"{float(n) / 100:.1f}")

# %% [markdown]
# Keys' gradients go back by the transpose of the same plan: the same bytes, the other way.

# %% [markdown]
# ## The model
#
# | | tensor ranks | sequence and data ranks |
# |---|---|---|
# | embedding = output projection | rows of the table | one copy, its gradient summed over them |
# | the stream (batch, seq, width) | one value | their own rows |
# | queries, keys, values | their own heads | their own rows; keys come |
# | MLP | columns of the first weight, rows of the second | one copy of each |
# | loss | a part of the vocabulary: no rank has all logits | their own tokens |
#
# Nothing need divide. Of 6 heads of queries, 3 of keys, over 2 × 2 × 2 ranks:

# %%
tokens, letters = gpt.text()
sizes = gpt.Sizes(len(letters), width=48, heads=6, kv_heads=3, hidden=128)
cube = dd.Partition((2, 2, 2))
for r in (0, 7):
    parts = [dd.Layout(cube, (5, 33, n)).local_shape(r) for n in (sizes.heads, sizes.kv_heads, len(letters))]
    (b, n, queries), (_, _, keys), (_, _, known) = parts
    print(
        f"rank {r}: {b} examples x {n} tokens, {queries} heads of queries, {keys} of keys, {known} of {len(letters)} letters"
    )

# %% [markdown]
# ## Training
#
# The text is this project's own pages, letter by letter. A step is that of any torch program: the layers' adjoints sum what is to be summed,
# `dd.parallel.clip_grad_norm_` takes one norm of blocks and copies alike, and AdamW steps on each rank's own.

# %%
reduced = "DISTDL_REDUCED" in os.environ
examples, length, count = (3, 11, 3) if reduced else (8, 64, 60)
torch.manual_seed(0)
serial = gpt.SerialGPT(sizes)
first = {name: p.detach().clone() for name, p in serial.named_parameters()}


def training(grid, order, path, last):
    """Losses on a grid, from the serial model's parameters; what is learnt goes to a file."""
    places = gpt.Places(dd.Partition(grid), examples, length, order)
    model = gpt.GPT(places, sizes).load(first)
    optimizer = gpt.optimizer_of(model)
    losses, _ = gpt.steps(model, optimizer, tokens, 0, last, examples, length)
    dd.checkpoint.save(path, *dd.checkpoint.state(model, optimizer, step=last))
    return losses, sum(p.numel() for p in model.parameters())


# %%
if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    expected, _ = gpt.steps(serial, gpt.optimizer_of(serial), tokens, 0, count, examples, length)
    whole = sum(p.numel() for p in serial.parameters())
    print(f"plain torch: loss {expected[0]:.4f} -> {expected[-1]:.4f}, {whole} parameters")
    runs = {(1, 2, 2): None, (1, 4, 1): "zigzag", (2, 1, 2): None}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    left.plot(expected, color="black", lw=4, alpha=0.3, label="plain torch")
    for grid, order in runs.items():
        name = f"{' x '.join(map(str, grid))}{', zigzag' if order else ''}"
        losses, own = dd.launch(training, 4)(grid, order, f"{folder}/{name}.safetensors", count)[0]
        apart = [abs(a - b) / b for a, b in zip(losses, expected)]
        print(f"data x sequence x tensor = {name}: at most {max(apart):.1e} apart; rank 0 has {own} parameters")
        assert max(apart) < 1e-10
        left.plot(losses, "--", lw=1, label=name)
        right.semilogy([a + 1e-17 for a in apart], lw=1, label=name)
    left.set(xlabel="step", title="loss")
    left.legend()
    right.set(xlabel="step", title="relative difference to plain torch", ylim=(1e-17, 1e-10))

# %% [markdown]
# The file that four ranks wrote is the serial model's, name by name. So plain torch goes on with it, or writes a few letters:

# %%
if __name__ == "__main__":
    reader = gpt.SerialGPT(sizes)
    optimizer = gpt.optimizer_of(reader)
    step = dd.checkpoint.restore(f"{folder}/1 x 2 x 2.safetensors", reader, optimizer)["step"]
    gpt.steps(reader, optimizer, tokens, step, step + (1 if reduced else 200), examples, length)
    draw = torch.Generator().manual_seed(0)
    said = torch.tensor([[letters.index(c) for c in "The "]])
    with torch.no_grad():
        for _ in range(4 if reduced else 120):
            likely = reader(said[:, -length:])[:, -1].softmax(-1)
            said = torch.cat([said, torch.multinomial(likely, 1, generator=draw)], 1)
    print("".join(letters[i] for i in said[0]))
