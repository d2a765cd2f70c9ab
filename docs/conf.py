"""The site: ``python -m sphinx -W -c docs . site``.

Its source is the whole checkout, so that links between README.md, docs/, notebooks/ and files of the package are the
same here, on a forge and in an editor. Nothing is fetched: fonts are the system's, and formulas are MathML.
"""

from __future__ import annotations

import builtins
import re
import sys
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.domains.python import PythonDomain
from sphinx.util.nodes import find_pending_xref_condition, make_refnode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import gen_api  # noqa: E402

project, author, copyright = "distdl", "The distdl authors", "The distdl authors"
root_doc = "README"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "docs/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "site", "build", "tests", "distdl"]  # not walked through
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
suppress_warnings = ["config.cache"]

# In the order in which they are read. A page that stands nowhere is a warning, and so an error; one that is not
# written yet may stand here.
NAV = {
    "Start": [
        "docs/why",
        "Two commands <self>",
        "docs/tour",
        "docs/index",
        "docs/operators",
        "docs/layers",
        "docs/sharp-bits",
    ],
    "Recipes": [
        "docs/recipe_transformer",
        "docs/recipe_fourier",
        "docs/recipe_inversion",
        "docs/recipe_graph",
        "docs/recipe_volume",
    ],
    "Topics": [
        "docs/training",
        "docs/attention",
        "docs/scans",
        "docs/grids",
        "docs/fft",
        "docs/solve",
        "docs/index_maps",
        "docs/checkpoint",
        "docs/neon",
    ],
    "Running": [
        "docs/tools",
        "docs/transforms",
        "docs/compile",
        "docs/trace",
        "docs/jobs",
        "docs/cuda",
        "docs/beside",
        "docs/looking",
    ],
    "Notebooks": ["docs/gallery"]
    + [
        f"notebooks/{path.stem}"
        for path in sorted(
            ROOT.glob("notebooks/*.ipynb"), key=lambda path: (path.stem != "operators_and_adjoints", path.stem)
        )
    ],
    "Coming from": [
        "docs/from_distdl",
        "docs/from_torch",
        "docs/from_megatron",
        "docs/from_jax",
        "docs/from_shardtensor",
        "docs/from_mpi4py",
        "docs/interop",
    ],
    "Reference": ["docs/api"],
    "Design": ["docs/design", "docs/reliability", "bench/README", "CONTRIBUTING", "CHANGELOG"],
}

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"  # `make docs` runs them, and tests compare them with their scripts
nb_render_markdown_format = "myst"
nb_mime_priority_overrides = [("html", "image/svg+xml", 5)]

html_theme = "furo"
html_title = "distdl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["play.html"]
html_copy_source = html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "tango", "monokai"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"


def entry(page):
    """A page's line in a toctree; "" while there is no such page."""
    if page.endswith("<self>"):
        return page
    return f"/{page}" if any((ROOT / f"{page}{suffix}").exists() for suffix in source_suffix) else ""


def source_read(app, docname, source):
    """The reference from docstrings; and below the first page the order of all."""
    if docname == "docs/api":
        source[0] = gen_api.expand(source[0])
    if docname == root_doc:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n"
            + "\n".join(filter(None, map(entry, pages)))
            + "\n```\n"
            for title, pages in NAV.items()
        )


EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(?=\w)[^*]*(?<=\w)\1(?![\w*])|[*|]")


def docstring(app, what, name, obj, options, lines):
    """The paragraph on messages has a head, as sections have; (*batch, n) and |x| are no markup."""
    code = False
    for i, line in enumerate(lines):
        code = code and (not line or line.startswith(" "))
        if not code:
            line = (
                f"**Messages**{line.removeprefix('Messages')}" if line.startswith(("Messages:", "Messages,")) else line
            )
            parts = line.split("``")
            parts[::2] = [EMPHASIS.sub(lambda m: m[0] if len(m[0]) > 1 else "\\" + m[0], part) for part in parts[::2]]
            lines[i] = "``".join(parts)
        code = code or line.endswith("::")


def settle(app, doctree):
    """In a signature a bare name is Python's own, or one of the entry's module, before it is anybody else's."""
    objects = app.env.get_domain("py").objects
    for node in list(doctree.findall(addnodes.pending_xref)):
        name = node.get("reftarget", "")
        here = f"{node.get('py:module')}.{name}"
        if node.get("refdomain") != "py":
            continue
        if hasattr(builtins, name):
            node.replace_self((find_pending_xref_condition(node, "*") or node).children)
        elif here in objects:
            node["reftarget"] = here
        elif node.hasattr("refspecific") and sum(full.endswith(f".{name}") for full in objects) > 1:
            node.replace_self((find_pending_xref_condition(node, "*") or node).children)  # nobody knows whose


def resolve(app, env, node, contnode):
    """A docstring calls a function by its bare name, or by the module that it was written in; it stands in the
    reference under its public one."""
    if node.get("refdomain") != "py":
        return None
    domain, target = env.get_domain("py"), node["reftarget"]
    assert isinstance(domain, PythonDomain)
    name = target.rpartition(".")[2] if target.startswith("distdl.") else target
    found = sorted((len(full), full) for full in domain.objects if full.endswith(f".{name}"))
    if not found:
        return None
    entry = domain.objects[found[0][1]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)


def formula(translator, node):
    """A formula as MathML: browsers draw it, no script does."""
    translator.body.append(str(tex2mathml(node.astext(), as_block=node.tagname == "math_block")))
    raise nodes.SkipNode


PICTURE = '<div class="picture" role="img" aria-label="{alt}">{svg}</div>'


def inline(app, doctree, docname):
    """Pictures stand in their page, whose colours they take; a page that stands by itself is opened, not downloaded."""
    for node in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir, node["uri"])
        if path.parent == ROOT / "docs" / "pictures":
            svg = path.read_text(encoding="utf-8")
            node.replace_self(nodes.raw("", PICTURE.format(alt=escape(node["alt"]), svg=svg), format="html"))
    for node in list(doctree.findall(addnodes.download_reference)):
        if node.get("reftarget", "").endswith(".html"):
            up = "../" * docname.count("/")
            node.replace_self(nodes.reference("", "", *node.children, refuri=up + Path(node["reftarget"]).name))


FIRST = """<!DOCTYPE html>
<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={page}"><title>distdl</title>
<a href="{page}">distdl</a>
"""


def first_page(app, error):
    """index.html leads to the first page, which on a forge is README."""
    if error is None and app.builder.format == "html":
        Path(app.outdir, "index.html").write_text(FIRST.format(page=f"{root_doc}.html"), encoding="utf-8")


def setup(app):
    """The hooks."""
    app.connect("source-read", source_read)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("doctree-read", settle)
    app.connect("missing-reference", resolve)
    app.connect("doctree-resolved", inline)
    app.connect("build-finished", first_page)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
