"""Run every ```python block of README.md and docs/*.md, so that they stay true.

A block whose first line is ``# ranks: 2`` runs on two ranks, others in one process. Each has a namespace of its own. A
```text block that follows one directly is what it prints, rank by rank. All blocks of one world size share one launch::

    python -m distdl run -n 2 tests/test_docs.py            # the blocks for two ranks
    python -m distdl run -n 2 tests/test_docs.py tour.md    # of one page
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import traceback
import types
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIRST = [ROOT / "README.md", ROOT / "docs" / "index.md"]
PAGES = [*FIRST, *sorted(set((ROOT / "docs").glob("*.md")) - set(FIRST))]
TIMEOUT = 240  # seconds for the blocks of one world size
FROM_TORCH = (
    "`torch.jit",
    "Attempted to insert a get_attr",
    "Converting a tensor with requires_grad",
    "You are using a Backend",
    "Warning: Profiler clears events",
)  # warnings by jvp, linearize, rpc, and torch 2.11's profiler


@dataclass(frozen=True)
class Block:
    """Some code of a page; ``line`` is that of its first line, ``printed`` what it should print (``None``: the page is
    silent)."""

    path: str
    line: int
    code: str
    ranks: int
    printed: str | None


def blocks_of(page: Path) -> list[Block]:
    """All ```python blocks of a page, in order."""
    found, text = [], page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$\n*(?:^```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL):
        ranks = re.match(r"# ranks: (\d+)", match[1])
        line = text.count("\n", 0, match.start(1)) + 1
        found.append(Block(str(page.relative_to(ROOT)), line, match[1], int(ranks[1]) if ranks else 1, match[2]))
    return found


def by_ranks(pages=PAGES) -> dict[int, list[Block]]:
    """The blocks of these pages for each world size."""
    found = defaultdict(list)
    for page in pages:
        for block in blocks_of(page):
            found[block.ranks].append(block)
    return dict(sorted(found.items()))


PARTS = {"first pages": FIRST, "other pages": PAGES[len(FIRST) :]}


def run(program, **variables):
    """Run a Python program that finds this checkout, whether or not it is installed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [variables.pop("PYTHONPATH", os.environ.get("PYTHONPATH"))])])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, *program]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=TIMEOUT + 30)


@pytest.mark.parametrize("part, n", [(part, n) for part, pages in PARTS.items() for n in by_ranks(pages)])
def test_blocks_run(part, n):
    """Every block for this number of ranks runs, and prints what its page says."""
    pages = PARTS[part]
    names = [page.name for page in pages]
    done = run(["-m", "distdl", "run", "-n", str(n), "--timeout", str(TIMEOUT), __file__, *names])
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert f"{len(by_ranks(pages)[n])} blocks" in done.stdout


def test_only_runnable_fences():
    """Code is python, which is run, or text and sh, which are read: no other kind could slip past."""
    for page in PAGES:
        kinds = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        assert set(kinds) <= {"python", "text", "sh"}, (page.name, set(kinds))


def test_links_between_pages():
    """Relative links lead to files, and their fragments to headings."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]*)\)", page.read_text(encoding="utf-8")):
            name, _, fragment = target.partition("#")
            path = (page.parent / name) if name else page
            assert path.exists(), (page.name, target)
            if fragment:
                headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in headings}
                assert fragment in slugs, (page.name, target, sorted(slugs))


def test_tests_that_prove():
    """Every test file and page that a page names exists."""
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]:
        for name in re.findall(
            r"`((?:tests|bench|docs|distdl|notebooks)/[\w/]+(?:\.\w+)?)`", page.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists(), (page.name, name)


def test_reference_renders(monkeypatch):
    """docs/api.md names modules that exist, and every public name of distdl.functional and distdl.maps has a documented
    entry."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import gen_api

    import distdl as dd
    import distdl.functional as F

    source = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert gen_api.summarised(source) == source, "python docs/gen_api.py --summaries"
    assert source.count("\n> ") == source.count("\n::: ")
    page = gen_api.expand(source)
    assert "\n> " not in page
    missing = [name for name in F.__all__ if f":: distdl.functional.{name}\n" not in page]
    missing += [f"::: distdl.maps.{name}" for name in dd.maps.__all__ if f"::: distdl.maps.{name}\n" not in source]
    assert not missing, f"give them a line in docs/api.md, then python docs/gen_api.py --summaries: {missing}"


def test_names_that_pages_use():
    """`F.name` and `dd.part.name` of the pages are there: in tables, which nothing runs, too."""
    import distdl as dd
    import distdl.functional as F

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not [name for name in re.findall(r"(?<![\w.])F\.(\w+)", text) if not hasattr(F, name)], page.name
        for name in re.findall(r"(?<![\w./])dd\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)?)", text):
            first, _, second = name.partition(".")
            assert hasattr(dd, first), (page.name, name)
            if isinstance(getattr(dd, first), types.ModuleType) and second:
                assert hasattr(getattr(dd, first), second), (page.name, name)


RECIPES = sorted((ROOT / "docs").glob("recipe_*.md"))


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_recipes_are_whole_programs(page):
    """One program of at most 60 lines, on several ranks, which compares itself with serial torch."""
    (block,) = blocks_of(page)
    assert len(block.code.splitlines()) <= 60 and block.ranks > 1 and block.printed
    assert "serial" in block.code and "assert torch.allclose(" in block.code


REFUSED = """
import json, test_sweep
print(json.dumps([list(test_sweep.PROPERTIES), test_sweep.REFUSED]))
"""


def test_table_of_transforms():
    """docs/transforms.md says of every property of the sweep what it refuses, and why."""
    folders = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "tests/mpi/functional"))
    path = os.pathsep.join(filter(None, [folders, os.environ.get("PYTHONPATH")]))
    done = run(["-c", REFUSED], PYTHONPATH=path, DISTDL_ALONE="1")
    assert done.returncode == 0, done.stderr
    properties, refused = json.loads(done.stdout)
    text = (ROOT / "docs" / "transforms.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text[: text.index("complex numbers are")], re.MULTILINE))
    assert found == {name: "the next table" if refused.get(name) else "nothing" for name in properties}
    assert set(properties) & set(refused) == {"complex"}
    for why, names in refused["complex"].items():
        functions = sorted({name.partition("/")[0] for name in names.split("; ")})
        shown = [name for name in functions if not name.startswith("nn.") and not name.endswith("_layout")]
        line = f"| {why} | {', '.join(f'`{name}`' for name in shown)} |"
        assert line in text, f"docs/transforms.md: {line}"


# Classes of distdl/distdl and microsoft/distdl: every public name of their distdl.nn. {n}: 1, 2 and 3.
OF_DISTDL = """
AllGather AllSumReduce Broadcast HaloExchange Interpolate Module ReduceScatter Repartition SumReduce
DistributedTranspose DistributedUpsample DistributedBatchNorm DistributedEmbedding DistributedEmbeddingZero
DistributedLayerNorm DistributedLayerNormZero DistributedRMSNormZero
DistributedLinear DistributedLinearAllGather DistributedLinearAllGatherZero DistributedLinearReduceScatter
DistributedLinearReduceScatterZero DistributedExpertAllGather DistributedExpertReduceScatter
DistributedL1Loss DistributedMSELoss DistributedPoissonNLLLoss DistributedBCELoss DistributedBCEWithLogitsLoss
DistributedKLDivLoss DistributedAvgPool{n}d DistributedMaxPool{n}d
DistributedConv{n}d DistributedChannelConv{n}d DistributedFeatureConv{n}d DistributedFeatureConvTranspose{n}d
DistributedGeneralConv{n}d DistributedChannelAllGatherConv{n}d DistributedChannelAllGatherConvTranspose{n}d
DistributedChannelReduceScatterConv{n}d DistributedChannelReduceScatterConvTranspose{n}d
"""


def test_every_class_of_distdl_has_its_line():
    text = (ROOT / "docs" / "from_distdl.md").read_text(encoding="utf-8")
    table = text[text.index("## Every class") : text.index("## ZeRO")]
    names = {name.format(n=n) for name in OF_DISTDL.split() for n in (1, 2, 3)}
    assert [name for name in sorted(names) if f"`{name}`" not in table] == []


NOTEBOOKS = [
    path for path in sorted((ROOT / "notebooks").glob("*.py")) if path.read_text(encoding="utf-8").startswith("# ---")
]


def test_every_notebook_has_its_script():
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_holds_its_script(script):
    """Its script's cells and their outputs, without an error."""
    cells = [
        c
        for c in json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
        if c["cell_type"] == "code"
    ]
    assert all(o["output_type"] != "error" for c in cells for o in c["outputs"])
    assert all(c["execution_count"] for c in cells)
    parts = re.split(r"^# %%(.*)\n", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    code = [text.strip() for kind, text in zip(parts[1::2], parts[2::2]) if not kind]
    assert ["".join(c["source"]).strip() for c in cells] == code


def test_gallery(monkeypatch):
    """It shows every notebook, with a picture of it and a sentence."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import gallery

    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(\.\./notebooks/(\w+)\.ipynb\)", text)) == {path.stem for path in NOTEBOOKS}
    entries = re.findall(
        r"^### \[.*\]\(\.\./notebooks/(\w+)\.ipynb\)\n\n.*\n\n!\[.+\]\(gallery/(\w+)\.png\)$", text, re.M
    )
    assert [name for name, _ in entries] == [shown for _, shown in entries] and len(entries) == text.count("\n### ")
    assert {name for name, _ in entries} == set(gallery.CHOSEN)
    for name, which in gallery.CHOSEN.items():
        shown = gallery.pictures(ROOT / "notebooks" / f"{name}.ipynb")[which]
        assert (gallery.FOLDER / f"{name}.png").read_bytes() == shown, "python docs/gallery.py"


# In the second tier; the others train whole models: `make test-all`
QUICK = ("operators_and_adjoints", "derivatives", "grid_training", "lenet", "unet")


@pytest.mark.parametrize(
    "script", [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.slow) for p in NOTEBOOKS]
)
def test_notebook_runs(script):
    """Its script, with less training."""
    pytest.importorskip("matplotlib")
    done = run([str(script)], MPLBACKEND="Agg", OMP_NUM_THREADS="1", DISTDL_REDUCED="1")
    assert done.returncode == 0, done.stderr[-3000:]


# ---------------------------------------------------------------- on the ranks


def run_block(block: Block, world) -> str | None:
    """Run a block; returns what is wrong with it. An exception is reported with the page's own line and ends the
    job."""
    from distdl.testing import gather_objects

    printed, where = io.StringIO(), f"{block.path}:{block.line}"
    code = "\n" * (block.line - 1) + block.code
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in FROM_TORCH:
                warnings.filterwarnings("ignore", text)
            module = sys.modules["__docs__"] = types.ModuleType(
                "__docs__"
            )  # as a script's: its functions can be pickled
            exec(compile(code, str(ROOT / block.path), "exec"), module.__dict__)
    except BaseException:
        sys.stderr.write(f"{where}: the block failed on rank {world.rank}\n{traceback.format_exc()}")
        raise
    together = "".join(gather_objects(printed.getvalue())) if world.size > 1 else printed.getvalue()
    if block.printed is not None and together.split() != block.printed.split():
        return f"{where}: printed\n{together}instead of\n{block.printed}"
    return None


def main() -> int:
    """Run the blocks for this job's number of ranks, of all pages or of those named on the command line."""
    import torch

    import distdl as dd

    torch.set_num_threads(1)
    world = dd.world()
    worlds = sys.modules["distdl.world"]._worlds
    mine = [b for b in by_ranks().get(world.size, []) if not sys.argv[1:] or Path(b.path).name in sys.argv[1:]]
    wrong = []
    for block in mine:
        if world.rank == 0:
            sys.stderr.write(f"{block.path}:{block.line}\n")
        torch.manual_seed(0)
        wrong.append(run_block(block, world))
        worlds["default"] = world  # a block may have made a world of its own
    if world.rank == 0:
        print("\n".join([*filter(None, wrong), f"{len(mine)} blocks"]), flush=True)
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
