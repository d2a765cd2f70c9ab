"""The site: it builds without a warning, asks nothing of another host, its links lead somewhere, and no page is wider
than a phone.

``make docs`` builds it first and names it in DISTDL_SITE; elsewhere the tests build their own, or are skipped where
Sphinx is not installed.
"""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import browse

import distdl as dd
import distdl.functional as F

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (400, 1200)
ELSEWHERE = {"Move", "Timeline.trace", "copy.deepcopy()"}  # what docstrings name and the reference leaves out


class Page(HTMLParser):
    """What a page loads, links to, and can be linked to at."""

    def __init__(self, path):
        super().__init__()
        self.path, self.loads, self.links, self.ids = path, [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("index", "search", "next", "prev", "author"):
            self.loads.append(found["href"])
        self.loads += [v for k, v in attributes if k in ("src", "srcset", "poster", "data", "xlink:href") and v]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built pages: {path inside the site: Page}, and their folder."""
    folder = Path(os.environ.get("DISTDL_SITE", ""))
    if not os.environ.get("DISTDL_SITE"):
        for package in ("sphinx", "furo", "myst_nb"):
            pytest.importorskip(package, reason=f"{package} is not installed: pip install -r requirements/docs.txt")
        folder = tmp_path_factory.mktemp("site")
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "-c", "docs", ".", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-6000:]
    pages = {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}
    assert len(pages) > 30
    return folder.resolve(), pages


def test_every_page_is_there(site):
    names = {path.relative_to(ROOT).with_suffix(".html").as_posix() for path in ROOT.glob("docs/*.md")}
    names |= {f"notebooks/{path.stem}.html" for path in ROOT.glob("notebooks/*.ipynb")}
    assert names | {"README.html", "index.html"} <= set(site[1])


def test_nothing_from_another_host(site):
    """Fonts, styles, scripts and pictures: all are the site's own."""
    folder, pages = site
    for name, page in pages.items():
        assert not [url for url in page.loads if urlsplit(url).netloc], name
    for path in folder.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\s]*", path.read_text(encoding="utf-8")), (
            path
        )
    comments = re.compile(r"/\*.*?\*/|^\s*//.*?$", re.DOTALL | re.MULTILINE)
    for path in folder.rglob("*.js"):
        urls = re.findall(r"[\"'`](?:https?:)?//\w[^\"'`]*", comments.sub("", path.read_text(encoding="utf-8")))
        assert all("www.w3.org/" in url for url in urls) or path.name == "searchindex.js", (path, urls)


def test_links_lead_somewhere(site):
    """Files that exist, and places in them."""
    folder, pages = site
    for name, page in pages.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert parts.scheme in ("http", "https", "data"), (name, link)
                continue
            target = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            assert target.exists(), (name, link)
            other = pages.get(os.path.relpath(target.resolve(), folder))
            if parts.fragment and other:
                assert unquote(parts.fragment) in other.ids, (name, link)


def test_reference_has_every_name(site):
    """Each name that users import has its place, with a signature."""
    ids = site[1]["docs/api.html"].ids
    public = {"distdl.functional": F, "distdl.maps": dd.maps, "distdl.nn": dd.nn, "distdl.solve": dd.solve}
    public |= {"distdl.func": dd.func, "distdl.checkpoint": dd.checkpoint, "distdl.testing": dd.testing}
    missing = [f"{module}.{name}" for module, found in public.items() for name in found.__all__]
    assert not [name for name in missing if name not in ids]


def test_cross_references(site):
    """A docstring's `dist_conv` is a link, also where it is a bare name."""
    text = site[1]["docs/api.html"].path.read_text(encoding="utf-8")
    assert re.search(r'reference internal" href="#distdl.functional.dist_conv"[^>]*><code class="xref', text)
    text = re.sub(r"<a [^>]*>.*?</a>", "", text)
    unresolved = set(re.findall(r'class="xref py py-(?!mod)[^"]*"><span class="pre">([^<]*)', text))
    assert {name for name in unresolved if not name.startswith("torch.")} == ELSEWHERE


def test_search_works_from_files(site, tmp_path):
    """No server is needed: a word finds its pages and its entries of the reference."""
    text = browse((site[0] / "search.html").as_uri() + "?q=halo_exchange", tmp_path / "browser")
    results = text[text.index('id="search-results"') :]
    assert "docs/api.html#distdl.functional.halo_exchange" in results and "docs/tour.html" in results


MEASURE = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0"><pre id="found"></pre><script>
const pages = {pages}, widths = {widths}, found = [];
async function measured(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const parts = frame.contentDocument.querySelectorAll("html, body, .main, .content, .article-container, article");
  const wide = Math.max(...[...parts].map(e => e.getBoundingClientRect().left + e.scrollWidth));
  if (frame.contentWindow.innerWidth !== width || wide > width) found.push([page, width, wide]);
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await measured(page, width);
  document.getElementById("found").textContent = JSON.stringify({measured: pages.length * widths.length, found});
})();
</script>"""


def test_no_page_scrolls_sideways(site, tmp_path):
    """On a phone and on a desk."""
    folder, pages = site
    names = [name for name in sorted(pages) if not name.startswith("_") and name not in ("index.html", "genindex.html")]
    text = MEASURE.replace("{pages}", json.dumps([(folder / name).as_uri() for name in names]))
    (tmp_path / "measure.html").write_text(text.replace("{widths}", json.dumps(WIDTHS)), encoding="utf-8")
    result = json.loads(browse((tmp_path / "measure.html").as_uri(), tmp_path / "browser"))
    assert result == {"measured": len(names) * len(WIDTHS), "found": []}
