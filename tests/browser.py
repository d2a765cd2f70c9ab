"""Chromium without a window, where there is one: what a page becomes once its scripts have run."""

from __future__ import annotations

import html
import re
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--allow-file-access-from-files",  # a page of a test looks into those of the site
]
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"  # whatever a page asks of another host fails


def browse(url, folder, width=1200, height=1000, budget=60_000):
    """The page's text once its scripts have run: of ``<pre id="found">`` where it has one, or all of its markup.
    ``budget``: ms of the page's own clock."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)}")
    options = [
        *OPTIONS,
        OFFLINE,
        f"--user-data-dir={folder}",
        f"--window-size={width},{height}",
        f"--virtual-time-budget={budget}",
    ]
    done = subprocess.run([found, *options, "--dump-dom", url], capture_output=True, text=True, timeout=200, check=True)
    result = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return html.unescape(result[1]) if result else done.stdout
