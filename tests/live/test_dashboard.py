"""The dashboard in a real browser: headless Chromium controlled by chromedriver, with a simulated cluster."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvroute.report.dashboard_page import dashboard_page

CHROMIUM, CHROMEDRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FEED = Path(__file__).with_name("dashboard_feed.py")
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
SIZES = {"16": ("2", "2", "2", "8"), "512": ("8", "8", "4", "40")}
CLUSTER = [*SIZES["16"], HOSTILE]
TWO = {"16": ("two", "4", "3", "9", "8"), "512": ("two", "120", "80", "312", "40")}
pytestmark = pytest.mark.live


class Browser:
    """One browser window, over the W3C WebDriver protocol."""

    def __init__(self, driver: str, profile: Path) -> None:
        self._driver = driver
        arguments = ["headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"]
        arguments += ["disable-component-update", "disable-sync", f"user-data-dir={profile}", "window-size=1400,1000"]
        options = {"binary": CHROMIUM, "args": [f"--{argument}" for argument in arguments]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        self._session = (
            "/session/" + self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        )

    def open(self, url: str) -> None:
        """Load a page and wait until it is live."""
        self.visit(url)
        self.until(
            "document.getElementById('link').textContent === 'live' && document.querySelector('#decisions button')"
        )

    def visit(self, url: str) -> None:
        """Load a page."""
        self._call("POST", "/url", {"url": url})

    def leave(self) -> None:
        """Go to a page without any connection."""
        self.visit("about:blank")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self._call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def until(self, condition: str, timeout_s: float = 60.0) -> Any:
        """Evaluate an expression until it is true; return its value."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.run(condition)):
            assert time.monotonic() < end_s, f"never true: {condition}"
        return value

    def key(self, key: str) -> None:
        """Press a key at the focused element."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def click(self, selector: str) -> None:
        """Move to an element and click it."""
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(element.values()))}/click", {})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Run a Chromium command beyond WebDriver."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def console_errors(self) -> list[str]:
        """Return the console messages: errors of scripts, of the content policy, and of the network."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self) -> bytes:
        """Return a PNG image of the window."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def close(self) -> None:
        """Close the browser."""
        self._call("DELETE", "")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + self._session + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


def _require_chromium() -> None:
    missing = [program for program in (CHROMIUM, CHROMEDRIVER) if shutil.which(program) is None]
    if missing:
        message = f"{' and '.join(missing)} missing; install Debian's chromium and chromium-driver"
        if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
            pytest.fail(message)
        pytest.skip(message)


@contextmanager
def _program(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program and end it, by its process ID, when the block ends."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            yield program
        finally:
            program.terminate()
            program.wait(30)


@contextmanager
def _feed(browser: Browser, *arguments: str) -> Iterator[Callable[[str], None]]:
    """Open the dashboard of a simulated cluster in the browser, and leave the page before the cluster ends.

    Yield a function that sends a line of the script to the cluster.
    """
    with _program(sys.executable, str(FEED), *arguments) as program:
        script = program.stdin
        assert program.stdout
        assert script
        browser.console_errors()
        browser.open(f"http://127.0.0.1:{program.stdout.readline().strip()}/")
        yield lambda line: print(line, file=script, flush=True)
        browser.leave()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests of this file."""
    _require_chromium()
    with _program(CHROMEDRIVER, "--port=0") as driver:
        assert driver.stdout
        started = next(line for line in driver.stdout if "successfully on port" in line)
        opened = Browser(
            f"http://127.0.0.1:{started.rstrip().rstrip('.').split()[-1]}", tmp_path_factory.mktemp("profile")
        )
        try:
            yield opened
        finally:
            opened.close()


TEXTS = "[...document.querySelectorAll({})].map(x => x.textContent)"
NAMED = "document.querySelector('#inspector b')?.textContent"
PIXELS = (
    "new Set(new Uint32Array(document.querySelector('#map').getContext('2d')"
    ".getImageData(0, 0, 2000, 1200).data.buffer)).size"
)
PRICED = (
    "[...document.querySelectorAll('#decisions button')]"
    ".find(x => x.textContent.includes('→') && /\\s(ms|µs|s)$/.test(x.textContent))"
)
LEARNED_NOTE = "document.querySelector('#learned-note').textContent"
NEWEST = f"Math.max(...{TEXTS.format(repr('#decisions .request'))}.map(text => Number(text.slice(1))))"
WIDTHS = (
    "[...document.querySelectorAll('#why .bar')].map("
    "bar => [...bar.children].reduce((sum, x) => sum + x.offsetWidth, 0) / bar.offsetWidth)"
)
COUNT = (
    "(window.frames_seen = window.ticks_seen = 0,"
    " window.plain ??= {frame: requestAnimationFrame, parse: JSON.parse},"
    " window.requestAnimationFrame = call => { frames_seen += 1; return plain.frame.call(window, call); },"
    " JSON.parse = text => { ticks_seen += 1; return plain.parse(text); }, true)"
)


TIERS = ["same node", "same rack", "same pod", "same datacenter"]
"""Tiers of a cluster with one datacenter."""
CROSSED = """import('./routes.js').then(({gapRoute, pointsOf}) => {
    const size = 40, gap = 8, tiles = [];
    for (let k = 0; k < 32; k += 1) tiles.push({x: (k % 8) * (size + gap), y: Math.floor(k / 8) * (size + 13 + gap)});
    const within = (x, from) => x > from + 1 && x < from + size - 1;
    const covered = (at) => tiles.some((tile) => within(at.x, tile.x) && within(at.y, tile.y));
    let lines = 0, crossed = 0;
    tiles.forEach((source, from) => tiles.forEach((target, to) => {
      if (from === to) return;
      const line = gapRoute(source, target, size, gap, from);
      lines += 1;
      crossed += Array.from({length: 401}, (_, k) => line.at(k / 400)).filter(covered).length;
      crossed += pointsOf(line, 0, 1).length < 2;
    }));
    return [lines, crossed];
})"""
"""Number of lines between all pairs of 32 tiles, and of their points that lie on a tile."""


def _texts(selector: str) -> str:
    return TEXTS.format(json.dumps(selector))


@pytest.mark.parametrize("size", list(SIZES))
def test_the_map_shows_every_instance(browser: Browser, size: str) -> None:
    """At either size all instances are in the table, the map is drawn, and the console is empty."""
    with _feed(browser, *SIZES[size]):
        assert browser.run("document.querySelector('#map-note').textContent") == f"{size} instances, 2 out of service"
        browser.click("#table-box summary")
        assert browser.until("document.querySelectorAll('#instances tbody tr').length") == int(size)
        assert browser.run("document.querySelectorAll('#instances tr.down').length") == 2
        assert browser.until(PIXELS) > 50
        assert browser.screenshot().startswith(b"\x89PNG")
        assert browser.console_errors() == []


def test_the_last_minutes_are_lines_with_texts(browser: Browser) -> None:
    """Three small charts grow by a point every 5 s; a screen reader gets the newest value and the range."""
    points = "document.querySelector('#history-panel path').getAttribute('d').split('L').length"
    with _feed(browser, *CLUSTER):
        assert browser.run("document.querySelector('#history-panel').hidden") is False
        assert browser.run(_texts("#history-panel .name")) == [
            f"{name}, last 2\u00a0min" for name in ("requests / s", "TTFT", "KV transferred")
        ]
        text = browser.run(
            "[...document.querySelectorAll('#history-panel svg')].map(x => x.getAttribute('aria-label'))"
        )
        assert re.fullmatch(r"requests / s, last 2\smin: now [0-9.]+, lowest [0-9.]+, highest [0-9.]+", text[0])
        assert re.search(r": p50 now .+, lowest .+, highest .+; p95 now ", text[1])
        assert re.search(r": now [0-9.]+\s[KMGT]?B/s, lowest ", text[2])
        assert browser.run("document.querySelectorAll('#history-panel path').length") == 4
        before = browser.run(points)
        browser.until(f"{points} === {before} + 1")


def test_lines_pass_between_the_tiles(browser: Browser) -> None:
    """The line of a transfer touches no instance except its two ends."""
    with _feed(browser, *CLUSTER):
        assert browser.run(CROSSED) == [32 * 31, 0]


def test_the_table_of_instances_scrolls_in_one_direction(browser: Browser) -> None:
    """In a window of 1,400 pixels all columns are visible."""
    with _feed(browser, *SIZES["512"]):
        browser.click("#table-box summary")
        browser.until("document.querySelectorAll('#instances tbody tr').length === 512")
        assert browser.run("(x => x.scrollWidth - x.clientWidth)(document.querySelector('#table-box .scroll'))") == 0


def test_values_are_updated(browser: Browser) -> None:
    """The panels fill, and the page receives new ticks."""
    with _feed(browser, *CLUSTER):
        assert sorted(browser.run(_texts("#ttft .name"))) == ["netkv", "round-robin"]
        assert browser.run("document.querySelectorAll('#tiers .bar').length") == 4
        assert browser.run(_texts("#oracle td:first-child")) == TIERS
        assert not any("across" in text for text in browser.run(_texts("#legend .key, #tiers .key")))
        assert browser.run("document.querySelectorAll('.kpi').length") == 8
        before = json.dumps(browser.run("document.querySelector('#uptime').textContent"))
        browser.until(f"document.querySelector('#uptime').textContent !== {before}")
        browser.until("document.querySelectorAll('#decisions button').length === 14")


def test_a_decision_shows_its_terms(browser: Browser) -> None:
    """A click shows the candidates' terms, with the chosen one marked and seconds as bars; it stays while other
    decisions arrive."""
    with _feed(browser, *CLUSTER):
        browser.until(f"{PRICED} && ({PRICED}.click(), true)")
        head = browser.until(_texts("#why th"))
        assert head[:3] == ["candidate", "", "cost"]
        assert {"transfer", "queue", "decode", "tier", "congestion"} <= set(head)
        assert browser.run("document.querySelectorAll('#why tbody tr').length") == 8
        assert browser.run("document.querySelectorAll('#why tr.chosen').length") == 1
        keys = browser.run(_texts("#why .keys .key"))
        assert {"transfer", "decode"} <= set(keys) <= {"transfer", "queue", "decode"}, "those that are not always 0"
        assert browser.run(
            f"[...document.querySelectorAll('#why .bar')].every(bar => bar.children.length === {len(keys)})"
        )
        widths = browser.run(WIDTHS)
        assert all(0 < width <= 1.02 for width in widths)
        assert max(widths) > 0.9
        note = browser.run("document.querySelector('#why-note').textContent")
        browser.until(f"{NEWEST} > {browser.run(NEWEST)}")
        assert browser.run("document.querySelector('#why-note').textContent") == note


def test_the_shadow_policy_is_shown(browser: Browser) -> None:
    """The page shows how often the shadow policy differs, and for a decision what it would have chosen."""
    with _feed(browser, *CLUSTER):
        chip = browser.until("/foresight, differs [0-9.]+\\s%/.test(document.querySelector('#shadow').textContent)")
        assert chip
        assert browser.run(LEARNED_NOTE) == "from own transfers, by the shadow policy foresight"
        assert "decode decisions differ" in browser.run("document.querySelector('#shadow').title")
        browser.until(f"{PRICED} && ({PRICED}.click(), true)")
        text = browser.until("document.querySelector('#why .keys').textContent")
        assert "foresight would have chosen" in text


def test_learned_values_of_foresight_are_shown(browser: Browser) -> None:
    """Shown are the cluster's tiers of the network: transfers over the link took longer than the topology predicts."""
    with _feed(browser, "foresight", *TWO["16"]):
        assert browser.run(LEARNED_NOTE) == "from own transfers"
        assert browser.run(_texts("#learned td:first-child")) == ["same rack", "across datacenters"]
        far = "#learned tbody tr:last-child"
        both = f"[{_texts(far + ' td')}, document.querySelector('{far}').title]"
        row, tip = browser.until(f"/^[0-9]+$/.test({_texts(far + ' td')}[3]) && {both}")
        factor = float(row[1].removeprefix("× "))
        assert 0.5 < factor < 0.95
        assert float(row[2].split("\u00a0")[0]) == pytest.approx(12.5 * factor, abs=0.13)
        transfers = int(row[3])
        assert f"Learned from {transfers} transfers" in tip
        counted = re.search(r"total weight of ([0-9]+\.[0-9])", tip)
        assert counted is not None
        believed = float(counted[1])
        assert 0 < believed <= min(transfers, 10)
        assert re.fullmatch(r"just now|\d+\ss ago", row[4])


def test_terms_of_foresight_are_shown_by_name(browser: Browser) -> None:
    """Five times add up to the cost; another column shows whether the transfer was simulated."""
    with _feed(browser, "foresight", *CLUSTER):
        browser.until(f"{PRICED} && ({PRICED}.click(), true)")
        head = browser.until(_texts("#why th"))
        assert head[3:] == [
            "transfer", "imposed on others", "slot wait", "first step", "cost of using a slot", "pace", "simulated",
            "tier"
        ]  # fmt: skip
        widths = browser.run(WIDTHS)
        assert max(widths) > 0.9
        assert all(0 < width <= 1.02 for width in widths)
        simulated = browser.run(_texts("#why td:nth-child(10)"))
        assert {"yes", "no"} == set(simulated)
        assert browser.run(LEARNED_NOTE) == "from own transfers"


def test_a_number_and_its_unit_are_on_one_line(browser: Browser) -> None:
    """No text has a breakable space between a number and its unit."""
    with _feed(browser, *TWO["16"]):
        browser.until(f"{PRICED} && ({PRICED}.click(), true)")
        text = browser.until("document.querySelector('#sites .note').textContent && document.body.textContent")
        assert re.search(r"\d\u00a0%", text)
        assert re.findall(r"\d (?:%|ms|µs|s|min|[KMGT]?B)(?!\w)", text) == []


def test_the_list_does_not_change_under_the_pointer(browser: Browser) -> None:
    """A click hits the row under the pointer: while the list has the focus, no row changes."""
    with _feed(browser, *CLUSTER):
        browser.until("document.querySelectorAll('#decisions button').length === 14")
        browser.run("document.querySelector('#decisions button').focus()")
        rows = browser.run(_texts("#decisions button"))
        clock = json.dumps(browser.run("document.querySelector('#uptime').textContent"))
        browser.until(f"document.querySelector('#uptime').textContent !== {clock}")
        assert browser.run(_texts("#decisions button")) == rows
        browser.run("document.activeElement.blur()")
        browser.until(f"JSON.stringify({_texts('#decisions button')}) !== {json.dumps(json.dumps(rows))}")


def test_names_are_rendered_as_text_and_not_as_markup(browser: Browser) -> None:
    """An instance with the name of a script is shown by its name: in the table, the decisions and the inspector."""
    hostile = json.dumps(HOSTILE)
    with _feed(browser, *CLUSTER):
        browser.click("#table-box summary")
        names = _texts("#instances td:first-child")
        assert HOSTILE in browser.until(f"{names}.length === 16 && {names}")
        browser.until(f"{_texts('#decisions .path')}.some(text => text.includes({hostile}))")
        browser.run("document.querySelector('#map').focus()")
        left = "document.querySelector('#map').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
        up = left.replace("Left", "Up")
        browser.until(f"{NAMED} === {hostile} || ({left}, {up}, false)")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.title") == "kvroute · 16 instances"
        assert browser.console_errors() == []


def test_arrow_keys_navigate_the_map(browser: Browser) -> None:
    """With the focus on the map, arrow keys move: the inspector shows the position, and a screen reader reads it."""
    with _feed(browser, *CLUSTER):
        browser.run("document.querySelector('#map').focus()")
        first = browser.until(NAMED)
        right, left = "\ue014", "\ue012"
        browser.key(left)
        browser.key(right)
        second = browser.until(f"{NAMED} !== {json.dumps(first)} && {NAMED}")
        assert second in browser.run("document.querySelector('#map-announcement').textContent")
        browser.key(left)
        browser.until(f"{NAMED} !== {json.dumps(second)}")


@pytest.mark.parametrize(
    "feed",
    [SIZES["512"], TWO["16"], TWO["512"], ("foresight", *TWO["16"])],
    ids=["one", "two-16", "two-512", "foresight"],
)
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_does_not_scroll_sideways(browser: Browser, width: int, feed: tuple[str, ...]) -> None:
    """At the width of a phone and of a laptop the page does not scroll sideways, and neither do foresight's values."""
    browser.devtools(
        "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500
    )
    try:
        with _feed(browser, *feed):
            browser.until(f"{PRICED} && ({PRICED}.click(), true)")
            assert browser.run("innerWidth") == width
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert (
                browser.run("(x => x.scrollWidth - x.clientWidth)(document.querySelector('#learned-panel .scroll'))")
                == 0
            )
    finally:
        browser.devtools("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize(("theme", "colour"), [("dark", "rgb(14, 20, 32)"), ("light", "rgb(243, 245, 249)")])
def test_the_page_follows_the_systems_colour_scheme(browser: Browser, theme: str, colour: str) -> None:
    """There is no switch: the page follows the system."""
    with _feed(browser, *CLUSTER):
        browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        assert browser.run("getComputedStyle(document.body).backgroundColor") == colour
        browser.devtools("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion_is_respected(browser: Browser, motion: str) -> None:
    """With reduced motion the map is drawn once per tick; otherwise transfers move between two ticks."""
    browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": motion}])
    with _feed(browser, *SIZES["512"]):
        browser.run(COUNT)
        ticks, frames = browser.until("ticks_seen >= 8 && [ticks_seen, frames_seen]")
        assert (frames <= ticks + 1) if motion == "reduce" else (frames > ticks + 1)
    browser.devtools("Emulation.setEmulatedMedia", features=[])


def test_decisions_show_the_parts_of_their_cost(browser: Browser) -> None:
    """The row of a decision shows the times that add up to the cost of the chosen candidate, within its width."""
    with _feed(browser, *CLUSTER):
        browser.until(f"{_texts('#decisions .terms')}.some(text => /transfer [0-9.]+\\s(ms|µs|s) \\+ /.test(text))")
        inside = "x => x.getBoundingClientRect().right <= x.parentElement.getBoundingClientRect().right + 1"
        assert browser.run(f"[...document.querySelectorAll('#decisions span')].every({inside})")


@pytest.mark.parametrize("feed", [tuple(CLUSTER), TWO["16"]], ids=["one", "two"])
def test_a_saved_page_is_self_contained(browser: Browser, tmp_path: Path, feed: tuple[str, ...]) -> None:
    """A saved file has the same map and panels, is marked as saved, explains one decision, and keeps transfers
    moving."""
    with _program(sys.executable, str(FEED), *feed) as program:
        assert program.stdout
        state = f"http://127.0.0.1:{program.stdout.readline().strip()}/state"
        while not (snapshot := _json(state))["tick"]["transfers"] or not _explained(snapshot):
            assert program.poll() is None
        if feed[0] != "two":
            snapshot["tick"]["load"]["foresight"] = None
        page = tmp_path / "dashboard.html"
        page.write_text(dashboard_page(json.dumps(snapshot).encode()), encoding="utf-8")
    browser.console_errors()
    browser.visit(page.as_uri())
    browser.until("document.getElementById('link').textContent === 'saved'")
    assert browser.run("document.querySelectorAll('#decisions button').length === 14")
    assert browser.run("document.querySelectorAll('#why tr.chosen').length") == 1
    assert browser.run("document.querySelector('#sites-panel').hidden") == (feed[0] != "two")
    assert browser.run("document.querySelector('#learned-panel').hidden") == (feed[0] != "two")
    tiles = "[...document.querySelectorAll('.kpi')].find(x => x.textContent.endsWith('transfers'))"
    assert browser.run(f"{tiles}.querySelector('b').textContent") == str(len(snapshot["tick"]["transfers"]))
    assert browser.until(PIXELS) > 50
    browser.run(COUNT)
    browser.until("frames_seen > 120")  # two seconds and more: longer than any of these transfers is shown
    assert browser.console_errors() == []
    browser.leave()


def _json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def _explained(snapshot: Any) -> bool:
    decisions = snapshot["tick"]["decisions"]
    return len(decisions) >= 14 and any(d["kind"] == "decode" and len(d["candidates"]) > 1 for d in decisions[-14:])


def test_a_lost_gateway_is_reported(browser: Browser) -> None:
    """When the gateway ends, the page says so instead of showing old values as new."""
    with _program(sys.executable, str(FEED), *CLUSTER) as program:
        assert program.stdout
        browser.open(f"http://127.0.0.1:{program.stdout.readline().strip()}/")
    browser.until("document.querySelector('#link').className.includes('bad')")
    browser.leave()


STATES = TEXTS.format(json.dumps("#sites td:last-child"))
NOTE = "document.querySelector('#map-note').textContent"
ROLE = (
    "[...document.querySelectorAll('#instances tbody tr')]"
    ".find(x => x.cells[0].textContent === {})?.cells[1].textContent"
)
"""Role of an instance in the table."""
ALARMED = (
    "new Uint32Array(document.querySelector('#map').getContext('2d').getImageData(0, 0, 2000, 1200).data.buffer)"
    ".reduce((count, pixel) => count + (pixel === 0xff7a8aff), 0)"
)
"""Number of map pixels in the dark theme's colour of alarms."""


@pytest.mark.parametrize("size", list(TWO))
def test_two_datacenters_show_link_threshold_and_shares(browser: Browser, size: str) -> None:
    """At either size: both directions of the link, the threshold with its base, the shares, and the last review as
    text."""
    with _feed(browser, *TWO[size]):
        assert browser.run(NOTE) == f"{size} instances, 2 out of service"
        assert browser.run("document.querySelector('#sites-panel').hidden") is False
        links = browser.run(_texts("#sites td:first-child"))
        assert links == ["prefill-site → local-site", "local-site → prefill-site"]
        assert browser.run(STATES) == ["in use", "in use"]
        threshold, share = browser.run(_texts("#sites .figures"))
        assert threshold == "2K tokens, base 2K"
        assert re.fullmatch(r"\d+\s% offloaded, \d+\s% at home", share)
        text = browser.run("document.querySelector('#sites .note').textContent")
        assert "serve 9.5/s (λ max), limited by the WAN path; the best split 11/s, gain 14\u00a0%" in text
        browser.until("document.querySelector('#sites .area').getAttribute('d').length > 9")
        assert browser.until(f"{_texts('#sites td:nth-child(3)')}[0].slice(0, 1) !== '0'")
        assert browser.console_errors() == []


def test_a_panic_is_shown_in_the_header(browser: Browser) -> None:
    """The header shows what is ignored and for which role, only while the panic lasts."""
    hidden = "document.querySelector('#panic').hidden"
    with _feed(browser, *CLUSTER) as tell:
        assert browser.until(hidden)
        tell("panic")
        browser.until(f"!{hidden}")
        text = browser.run("document.querySelector('#panic').textContent")
        assert text == "panic: health checks and breakers ignored: decode (3 of 12 available)"
        box = browser.run(
            "(r => [r.width, r.left >= 0, r.right <= innerWidth])("
            "document.querySelector('#panic').getBoundingClientRect())"
        )
        assert box[0] > 0
        assert box[1:] == [True, True]
        tell("calm")
        browser.until(hidden)


def test_one_datacenter_shows_no_offload_panel(browser: Browser) -> None:
    """There is no panel and no WAN path in the legend."""
    with _feed(browser, *CLUSTER):
        assert browser.run("document.querySelector('#sites-panel').hidden") is True
        assert not any("WAN path" in text for text in browser.run(_texts("#legend .key")))


@pytest.mark.parametrize(("line", "state"), [("cut", "closed, no KV arrives"), ("try", "closed, one request probes")])
def test_a_cut_link_is_shown(browser: Browser, line: str, state: str) -> None:
    """The map, the text and the curve of the threshold show it, and nothing arrives, until the link is repaired."""
    browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    with _feed(browser, *TWO["16"]) as tell:
        sound = browser.until(ALARMED)
        assert browser.run("document.querySelector('#sites .shut').getAttribute('d')") == ""
        tell(line)
        browser.until(f"{STATES}.every(text => text === {json.dumps(state)})")
        assert browser.until(f"{NOTE}.includes('WAN path of prefill-site closed')")
        assert browser.run("document.querySelector('#map').getAttribute('aria-label')").endswith("prefill-site closed")
        assert browser.run(_texts("#sites .figures"))[0] == "2.42K tokens, base 2K"
        browser.until("document.querySelector('#sites .shut').getAttribute('d').length > 0")
        browser.until("Number(document.querySelector('#sites td:nth-child(4)').textContent.split(',')[0]) > 3")
        assert browser.until(f"{ALARMED} > {sound + 200}")
        tell("restore")
        browser.until(f"{STATES}.every(text => text === 'in use')")
        browser.until(f"!{NOTE}.includes('closed')")
        browser.until(f"{ALARMED} < {sound + 100}")
    browser.devtools("Emulation.setEmulatedMedia", features=[])


def test_an_offloaded_prefill_shows_its_reason(browser: Browser) -> None:
    """The page shows the reason, the length with the threshold, and the times at each datacenter, with the chosen one
    marked."""
    with _feed(browser, *TWO["16"]):
        prefill = (
            "[...document.querySelectorAll('#decisions button')].find(x => x.children[2].textContent === 'prefill'"
            " && x.children[3].textContent.startsWith('prefill-site'))"
        )
        browser.until(f"{prefill} && ({prefill}.click(), true)")
        text = browser.run("document.querySelector('#why p').textContent")
        assert text.startswith("prefilled at prefill-site: more uncached tokens than the threshold; ")
        head = browser.run(
            "[...document.querySelectorAll('#why table')[0].querySelectorAll('th')].map(x => x.textContent)"
        )
        assert {"datacenter", "finish", "prefill", "transfer"} <= set(head)
        chosen = "[...document.querySelectorAll('#why table')[0].querySelectorAll('tr.chosen')]"
        assert browser.run(f"{chosen}.map(x => x.cells[0].textContent)") == ["prefill-site"]


def test_current_roles_are_shown(browser: Browser) -> None:
    """A role switch is shown while it is in progress and when it is complete; then the instance has its new role
    everywhere."""
    name = "local-site-decode11"
    role = ROLE.format(json.dumps(name))
    texts = _texts("#sites li")
    with _feed(browser, *TWO["16"]) as tell:
        browser.click("#table-box summary")
        assert browser.until(role) == "decode"
        browser.until("document.querySelectorAll('#decisions button').length === 14")
        tell("switch_role")
        browser.until(f"{texts}[0] === '⇄ {name} becomes prefill: draining'")
        changes = (
            f"[...document.querySelectorAll('#decisions button')].find(x => x.textContent.includes('{name} → prefill'))"
        )
        browser.until(f"{changes} && ({changes}.click(), true)")
        assert browser.run("document.querySelector('#why-note').textContent").startswith("review of roles, ")
        assert "will serve prefill" in browser.run("document.querySelector('#why').textContent")
        tell("switched")
        browser.until(f"{role} === 'prefill'")
        assert browser.run(texts)[0].startswith(f"{name} serves prefill since ")
        assert browser.run(texts)[1] == f"Different from the cluster file: {name} serves prefill"


def test_a_prefill_instance_elsewhere_is_not_called_full(browser: Browser) -> None:
    """A prefill instance of the other datacenter is not a candidate, even if it has room."""
    kind = "x.querySelector('.kind').textContent"
    prefill = f"[...document.querySelectorAll('#decisions button')].find(x => {kind} === 'prefill')"
    with _feed(browser, *TWO["16"]):
        browser.until(f"{prefill} && ({prefill}.click(), true)")
        rows = browser.until(_texts("#why tr.infeasible td:first-child"))
        assert rows
        assert all(text.endswith(" (not considered)") for text in rows)
