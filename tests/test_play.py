"""The interactive page: what it works out is what HaloSpec and its plan say, and its buttons go through it."""

import json
import random
from pathlib import Path

import pytest
import torch
from browser import browse

import distdl as dd
from distdl import viz

PAGE = Path(__file__).resolve().parent.parent / "docs" / "play.html"

RANGES = {"p0": (1, 4), "p1": (1, 3), "n0": (0, 9), "n1": (0, 12)}
RANGES |= {"kernel": (1, 5), "stride": (1, 3), "padding": (0, 4), "dilation": (1, 2)}
WINDOWS = "For its outputs each rank needs a window; what lies beyond the edge is made of what lies inside, or zero."
FRAME = """<!DOCTYPE html><meta charset="utf-8"><body>
<pre id="found"></pre><iframe width="1000" height="800" src="{page}"></iframe>
<script>
const frame = document.querySelector("iframe");
const $ = id => frame.contentDocument.getElementById(id);
function set(name, value) {
  const field = $("form").elements[name];
  if (field.type === "checkbox") field.checked = value; else field.value = value;
  field.dispatchEvent(new frame.contentWindow.Event("input", {bubbles: true}));
}
frame.onload = () => {
  let result;
  try { result = (() => { {script} })(); } catch (error) { result = String(error.stack); }
  document.getElementById("found").textContent = JSON.stringify(result);
};
</script>"""


def ask(tmp_path, script, address=""):
    """What a script says that has the page in a frame."""
    assert "http" not in PAGE.read_text(encoding="utf-8")  # it asks nothing of another host
    text = FRAME.replace("{page}", PAGE.as_uri() + address).replace("{script}", script)
    (tmp_path / "frame.html").write_text(text, encoding="utf-8")
    return json.loads(browse((tmp_path / "frame.html").as_uri(), tmp_path / "browser"))


def configurations(n):
    """Drawn ones: uneven, empty and tiny blocks, halos wider than a block, every boundary; some are refused."""
    draw = random.Random(0)
    for _ in range(n):
        boundary = draw.choice(("zeros", "circular", "reflect", "replicate"))
        yield {**{name: draw.randint(*ends) for name, ends in RANGES.items()}, "boundary": boundary, "bytes": 8}


def right(c):
    """What the library says: (windows of all ranks, messages), or ``None`` where it refuses."""
    P, shape = dd.Partition((c["p0"], c["p1"])), (c["n0"], c["n1"])
    try:
        kernel, boundary = (c["kernel"],) * 2, c["boundary"]
        spec = dd.HaloSpec.window(P, shape, kernel, c["stride"], c["padding"], c["dilation"], boundary)
    except dd.errors.PartitionError:
        return None
    boxes = [spec.window_box(r) for r in P.ranks]
    boxes = [[list(d) for d in box] if all(a < b for a, b in box) else None for box in boxes]
    return {"windows": boxes, "messages": [list(m) for m in viz.messages(spec.plan()) if m[0] != m[1]]}


def test_it_says_what_the_library_says(tmp_path):
    cases = list(configurations(400))
    script = """return CASES.map(c => { try {
      const found = frame.contentWindow.plan(c);
      return {windows: found.ranks.map(r => r.cells.length ? r.window : null), messages: found.messages};
    } catch (error) { return null; } });""".replace("CASES", json.dumps(cases))
    found, expected = ask(tmp_path, script), [right(c) for c in cases]
    assert sum(e is not None and bool(e["messages"]) for e in expected) > 100
    assert sum(e is None for e in expected) > 20
    for c, mine, library in zip(cases, found, expected):
        assert mine == library, c


def test_steps_forward_and_back(tmp_path):
    script = """const said = [], marks = () => $("picture").querySelectorAll(".now").length;
    const say = () => said.push([$("say").textContent, marks()]);
    say();
    for (let i = 0; i < 3; i++) { $("on").click(); say(); }
    $("back").click(); say();
    frame.contentDocument.dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", {key: "ArrowRight"})); say();
    for (let i = 0; i < 30; i++) $("on").click();
    say();
    set("kernel", 9); set("padding", 0); say();
    return said;"""
    said = ask(tmp_path, script, "#p0=1&p1=2&n0=2&n1=4&kernel=3&padding=1&bytes=4")
    words = [
        ["Every rank holds a block.", 0],
        [
            "For its outputs each rank needs a window; what lies beyond the edge is made of what lies inside, or zero.",
            0,
        ],
        ["Its own elements are there already.", 0],
        ["Message 1 of 2: rank 0 sends 2 of its elements to rank 1: 8 bytes.", 4],
        ["Its own elements are there already.", 0],
        ["Message 1 of 2: rank 0 sends 2 of its elements to rank 1: 8 bytes.", 4],
        ["2 messages, 4 elements, 16 bytes in all; the busiest rank sends 8 bytes.", 0],
        ["the kernel reaches over 9, more than the padded 2", 0],
    ]
    assert said == words


@pytest.mark.parametrize("boundary", ["zeros", "circular", "replicate"])
def test_adjoint_counts_what_the_transpose_adds(tmp_path, boundary):
    """At the end each element shows how many cotangents came: the transposed map of ones."""
    script = """const cells = [...$("picture").querySelectorAll("rect.cell + text")].slice(0, 5 * 6);
    return cells.map(text => Number(text.textContent));"""
    address = f"#p0=2&p1=2&n0=5&n1=6&kernel=5&padding=2&boundary={boundary}&adjoint=on&at=99"
    found = ask(tmp_path, script, address)
    spec = dd.HaloSpec.window(dd.Partition((2, 2)), (5, 6), (5, 5), 1, 2, 1, boundary)
    ones = [torch.ones([b - a for a, b in spec.window_box(r)]) for r in range(4)]
    assert found == [int(v) for block in spec.plan().T.simulate(ones) for v in block.flatten()]
