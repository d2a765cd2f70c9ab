"""Pictures: what they show is what plans do, they stand by themselves, and those of the pages are today's."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import distdl as dd
from distdl import viz

DOCS = Path(__file__).resolve().parent.parent / "docs"
SVG = "{http://www.w3.org/2000/svg}"
THREE = dd.Partition((3,))
LINE = dd.Layout(THREE, (7,))


@pytest.fixture(scope="module")
def pages():
    """docs/pictures.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        import pictures

        yield pictures


def titles(picture):
    """What a reader who hovers over its parts is told."""
    return [t.text for t in ET.fromstring(picture.svg).iter(f"{SVG}title")][1:]


def equations(picture, heading):
    """{(rank, index): {(rank, index): factor}} of a movement's wanted elements, as its picture says them."""
    part = next(g for g in ET.fromstring(picture.svg).findall(f"{SVG}g") if g.find(f"{SVG}text").text == heading)
    found = {}
    for told in (t.text for t in part.iter(f"{SVG}title")):
        if " = " in told:
            left, right = told.split(" = ")
            terms = [] if right == "0" else right.split(" + ")
            found[place(left)] = {place(t): float(re.match(r"(?:(\S+) · )?", t)[1] or 1) for t in terms}
    return found


def place(words):
    rank, index = re.search(r"rank (\d+) \[([\d, ]*)\]", words).groups()
    return int(rank), tuple(map(int, filter(None, index.split(", "))))


def told(picture, heading, shapes, shards):
    """What the picture says that each rank gets, from these blocks by rank."""
    results = {r: torch.zeros(shape, dtype=torch.float64) for r, shape in shapes.items()}
    for (rank, index), terms in equations(picture, heading).items():
        results[rank][index] = sum(v * shards[r][i] for (r, i), v in terms.items())
    return results


def test_elements_come_from_where_the_picture_says(pages):
    """For every movement and its adjoint: the sums that a reader reads off are what the plan's simulation gives."""
    generator = torch.Generator().manual_seed(0)
    for name, A in pages.movements().items():
        picture = viz.show(A, titles=[name])
        for heading, B in ((name, A), (f"adjoint of {name}", A.T)):
            ranks, results = B.plan.held.partition.ranks, B.plan.wanted.partition.ranks
            shards = [torch.rand(s, generator=generator, dtype=torch.float64) for s in viz._held(B)]
            right = dict(zip(results, B.simulate(shards)))
            found = told(picture, heading, {r: y.shape for r, y in right.items()}, dict(zip(ranks, shards)))
            for r, y in right.items():
                assert torch.allclose(found[r], y), f"{heading}, rank {r}"


def test_arrows_are_the_messages(pages):
    for name, A in pages.movements().items():
        picture = viz.show(A, adjoint=False)
        words = [f"rank {a} keeps {n}" if a == b else f"rank {a} sends {n} to rank {b}" for a, b, n in viz.messages(A)]
        assert sorted(t for t in titles(picture) if "keeps" in t or "sends" in t) == sorted(words), name


def test_every_movement_has_a_picture(pages):
    """All of dd.maps but the general forms, and halos' strips, which a convolution takes apart."""
    assert set(pages.movements()) == set(dd.maps.__all__) - {"gathering", "keyed", "transposed", "halo_strips"}


def test_pictures_of_the_pages_are_todays(pages):
    """As ``python docs/pictures.py`` writes them, all of them on some page, with words for who does not see them."""
    files = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    made = {name: picture.svg + "\n" for name, picture in pages.pictures().items()}
    assert files.keys() == made.keys()
    assert [name for name in made if made[name] != files[name]] == [], "python docs/pictures.py"
    shown = [
        found
        for page in DOCS.glob("*.md")
        for found in re.findall(r"!\[(.*?)\]\(pictures/(\w+).svg\)", page.read_text())
    ]
    assert {name for _, name in shown} == set(made)
    assert all(len(alt) > 30 for alt, _ in shown)


def test_halos_show_corners_and_owners():
    """On a grid of 2 x 2 the window's last element is a corner, of the rank opposite."""
    spec = dd.HaloSpec(dd.Layout(dd.Partition((2, 2)), (4, 4)), 1, boundary="zeros")
    found = equations(viz.show(spec, titles=["halo"]), "halo")
    assert found[0, (3, 3)] == {(3, (0, 0)): 1.0} and found[0, (0, 0)] == {}
    assert "12 messages, 20 elements" in viz.show(spec).svg


def test_layouts_and_large_things():
    assert titles(viz.show(dd.Layout(dd.Partition((2,), ranks=(5, 3)), (3,)))) == ["rank 5: [0:2]", "rank 3: [2:3]"]
    assert "empty: 1" in viz.show(dd.Layout(dd.Partition((2,)), (1,))).svg
    assert len(titles(viz.show(dd.Layout(dd.Partition((2, 1, 2)), (4, 4, 4))))) == 4
    assert "((0, 2), (0, 1), (0, 1), (0, 1))" in viz.show(dd.Layout(dd.Partition((1,) * 4), (2, 1, 1, 1))).svg
    large = viz.show(
        dd.maps.repartition(dd.Layout(dd.Partition((2, 1)), (512, 64)), dd.Layout(dd.Partition((1, 2)), (512, 64)))
    )
    assert "(256, 64)" in large.svg and "rank 0 sends 8192 to rank 1" in large.svg and len(large.svg) < 10_000
    assert "no elements" in viz.show(dd.maps.roll(dd.Layout(THREE, (2,)), dim=0, by=1)).svg
    nothing = dd.Layout(THREE, (0,))
    assert ET.fromstring(viz.show(nothing, dd.maps.repartition(nothing, nothing)).svg) is not None


def test_in_a_notebook_and_in_a_terminal(tmp_path):
    A = dd.maps.all_gather(LINE)
    picture = viz.show(A, titles=["a < b"], adjoint=False)
    assert picture._repr_html_() == picture.svg and "a &lt; b" in picture.svg
    assert repr(picture) == f"a < b\n{viz.text(A)}"
    picture.save(tmp_path / "a.svg")
    assert ET.parse(tmp_path / "a.svg").getroot().tag == f"{SVG}svg"
    assert "http" not in picture.svg.replace("http://www.w3.org/2000/svg", "")


def test_a_row_ends_where_a_page_does():
    """Many things stand in rows, each as wide as it is."""
    root = ET.fromstring(viz.show(*[LINE] * 9).svg)
    places = [g.get("transform")[len("translate(") : -1].split() for g in root.findall(f"{SVG}g")]
    assert len(places) == len({tuple(place) for place in places}) == 9 and len({y for _, y in places}) == 2
    assert all(float(x) + 126 <= 800 for x, _ in places) and int(root.get("width")) <= 804


def test_schedules():
    from distdl.parallel import schedule, simulate

    found = simulate(schedule("1f1b", 2, 3))
    words = titles(found.picture())
    assert len(words) == len(found.spans) and "B0 on device 1: 2 to 4" in words
    assert repr(found.picture()) == str(found) and found._repr_html_() == found.picture().svg


@pytest.mark.parametrize(("things", "options"), [((), {}), ((LINE, 3), {}), ((LINE,), {"titles": ["a", "b"]})])
def test_what_has_no_picture(things, options):
    with pytest.raises(dd.errors.PartitionError, match="show: "):
        viz.show(*things, **options)
