"""What a release says of itself, and what its files hold."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import distdl as dd

ROOT = Path(__file__).parent.parent


def test_one_version():
    """Of the package, of the newest part of the changelog, and of what one cites; with one day."""
    heading = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = dict(
        re.findall(r"^(version|date-released): \"?([^\"\n]+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    )
    assert heading is not None and heading[1] == cited["version"] == dd.__version__
    assert heading[2] == cited["date-released"]


def test_versions_of_the_changelog_fall():
    """Each once, the newest first, with days that do not rise."""
    found = re.findall(
        r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )
    numbers = [tuple(map(int, version.split("."))) for version, _ in found]
    days = [day for _, day in found]
    assert len(found) == (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count("\n## ") > 1
    assert numbers == sorted(set(numbers), reverse=True) and days == sorted(days, reverse=True)


def test_authors_are_one():
    """As the package's metadata has them."""
    assert 'authors = [{ name = "The distdl authors" }]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    own = (ROOT / "CITATION.cff").read_text(encoding="utf-8").partition("references:")[0]
    assert re.findall(r"name: (.*)", own) == ["The distdl authors"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """(names in the wheel, names in the sdist), of a copy of this checkout."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("release")
    leave = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site")
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=leave)
    if (ROOT / ".ci").is_dir():
        shutil.copytree(ROOT / ".ci", copy / ".ci")
    build = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"
    done = subprocess.run([sys.executable, "-c", build, folder], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    return inside, names


def test_the_wheel_is_the_package(packed):
    """Every module, the sources of kernels and the mark of a typed package; neither tests nor documentation."""
    wheel, _ = packed
    files = (path for kind in ("*.py", "*.cu") for path in (ROOT / "distdl").rglob(kind))
    own = {str(path.relative_to(ROOT)) for path in files} | {"distdl/py.typed"}
    assert {name for name in wheel if "dist-info" not in name} == own
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_sdist_is_a_checkout(packed):
    """Tests, frozen files, pages, pictures and notebooks too: all that is tracked."""
    _, sdist = packed
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    lacking = [name for name in tracked.stdout.split() if name not in sdist and not name.startswith(".git")]
    assert [name for name in lacking if (ROOT / name).exists()] == []
