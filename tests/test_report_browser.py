"""The bench's page in a real browser, headless: it renders, says nothing on its console, and every plot is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report import PLOTS, REPORT

from specjax import report_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What the browser itself measures, written where the page's text can be read again.
PROBE = """<script>
const seen = [...document.querySelectorAll("figure")].map(figure => {
  const box = figure.querySelector("svg").getBoundingClientRect(), paths = figure.querySelectorAll("svg path").length;
  return `${figure.id}:${Math.round(box.width)}x${Math.round(box.height)}:${paths}`;
});
const table = document.querySelector("table").getBoundingClientRect();
seen.push(`table:${Math.round(table.width)}x${Math.round(table.height)}:0`);
document.body.setAttribute("data-seen", seen.join(" "));
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return ``browser(*arguments, page)``: what it says on standard output and on standard error."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(BROWSERS)} is on PATH")
    home = tmp_path_factory.mktemp("browser")

    def run(*arguments: str, page: Path) -> tuple[str, str]:
        call = [found, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={home}", "--no-first-run",
                "--disable-dev-shm-usage", "--enable-logging=stderr", *arguments, page.as_uri()]  # fmt: skip
        done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, done.stderr

    return run


def consoled(said: str) -> list[str]:
    """Return what a page wrote on its console, from the browser's log."""
    return [line for line in said.splitlines() if "CONSOLE" in line]


def test_the_page_renders_with_every_plot_and_a_silent_console(browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report_page.to_html(REPORT).replace("</body>", PROBE + "</body>"))
    text, said = browser("--dump-dom", page=page)
    assert consoled(said) == []
    (seen,) = re.findall(r'data-seen="([^"]*)"', text)
    sizes = dict(part.split(":", 1) for part in seen.split())
    assert set(sizes) == {*PLOTS, "table"}
    for name in PLOTS:
        width, height, paths = map(int, re.split("[x:]", sizes[name]))
        assert width > 400, name
        assert height > 200, name
        assert paths > 10, name


def test_an_error_on_the_console_would_be_seen(browser, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><body><script>nothing.here()</script></body>")
    assert any("nothing is not defined" in line for line in consoled(browser("--dump-dom", page=page)[1]))


def test_the_picture_of_the_page_is_not_blank(browser, tmp_path):
    import matplotlib.image

    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(report_page.to_html(REPORT))
    browser(f"--screenshot={picture}", "--window-size=1100,3600", page=page)
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[:2] == (3600, 1100)
    thirds = [pixels[i * 1200 : (i + 1) * 1200] for i in range(3)]
    assert all((third < 0.9).any(axis=-1).mean() > 0.01 for third in thirds)
