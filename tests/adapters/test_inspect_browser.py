"""The page in a real browser: what a reader sees and does, by mouse and by keyboard.

Needs Debian's chromium and chromium-driver.
"""

import threading

import pytest
from helpers.browser import Browser
from helpers.inspect_store import COLLECTION, EVIL, LONG, TOOLS, make_inspect_store

from kalos_ctx import demo_data
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.inspecting.server import InspectServer
from kalos_ctx.store import SessionStore

READY = "return document.getElementById('result').getAttribute('aria-busy') === 'false'"
CARD = """
    const card = [...document.querySelectorAll('.card')].find(
        (one) => one.querySelector('dt').textContent === arguments[0]);
    return card && card.querySelector('strong').textContent;
"""
CLICK_SESSION = """
    const found = [...document.querySelectorAll('#session-list button')].find(
        (one) => one.querySelector('bdi').textContent === arguments[0]);
    if (found) found.click();
    return Boolean(found);
"""
# Contrast of text on the colours behind it, by the formula of WCAG 2.
CONTRAST = """
    const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const over = (layers) => {
        paint.clearRect(0, 0, 1, 1);
        for (const one of layers) { paint.fillStyle = one; paint.fillRect(0, 0, 1, 1); }
        return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = ([r, g, b]) =>
        0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const worst = {};
    for (const name of arguments[0]) {
        for (const one of [...document.querySelectorAll(name)].slice(0, 80)) {
            const behind = [];
            for (let at = one; at; at = at.parentElement) {
                behind.unshift(getComputedStyle(at).backgroundColor);
            }
            const ground = over(['white', ...behind]);
            const ink = over([`rgb(${ground})`, getComputedStyle(one).color]);
            const [low, high] = [light(ground), light(ink)].sort((a, b) => a - b);
            const ratio = (high + 0.05) / (low + 0.05);
            worst[name] = Math.min(worst[name] ?? 99, ratio);
        }
    }
    return worst;
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "chats.kalos"
    make_inspect_store(path)
    with SessionStore.open(path, "r", tokenizer=str(demo_data.tokenizer_dir())) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(store):
    with InspectServer(store) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def chromium():
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(chromium, server):
    """Return the browser at a fresh page; in the end it must have complained of nothing."""
    chromium.open("about:blank")
    chromium.open(server.url)
    chromium.until("return document.querySelectorAll('#session-list button').length > 3")
    chromium.log()
    yield chromium
    chromium.dark(False)
    assert chromium.log() == []


def choose_session(page, name):
    page.until(CLICK_SESSION, name)
    page.until("return document.getElementById('session-name').textContent === arguments[0]", name)
    page.until("return document.querySelector('.part')")
    page.until(READY)


def test_page_shows_the_window_that_the_assembler_builds(page, store):
    choose_session(page, LONG)
    page.fill("[name=max_tokens]", "3000")
    with (
        ContextAssembler(store, device="cpu") as assembler,
        assembler.assemble(LONG, max_tokens=3000, reserve=256) as window,
    ):
        wanted = window.token_ids.tolist()
    page.until(f"return ({_body(CARD)})('Tokens') === arguments[0]", f"{len(wanted):,}")
    shown = page.run(
        "return [...document.querySelectorAll('.token')]"
        ".flatMap((one) => one.dataset.ids.split(' ').map(Number))"
    )
    assert shown == wanted


def _body(script):
    return f"function() {{ {script} }}".replace("\n", " ")


def test_tiles_of_the_bar_are_to_scale_and_named(page):
    choose_session(page, LONG)
    tiles = page.run(
        "const bar = document.querySelector('.bar').getBoundingClientRect().width;"
        "return [...document.querySelectorAll('a.tile')].map((one) => "
        "[one.getBoundingClientRect().width / bar, one.getAttribute('aria-label')])"
    )
    for share, label in tiles:
        tokens = int(label.split(", ")[-1].split()[0].replace(",", ""))
        assert share == pytest.approx(tokens / 2048, abs=0.002)
    assert {label.split(", ")[1] for _, label in tiles} >= {"Head", "User", "Assistant"}


def test_recall_by_a_passage_shows_hits_with_scores_and_follows_one(page):
    choose_session(page, LONG)
    page.choose("[name=query]", "passage")
    page.until("return document.querySelectorAll('.hits li').length === 5")
    first = "return document.querySelector('.hits .what').textContent"
    assert page.run(first) == f"{COLLECTION} 0"
    page.run("document.querySelectorAll('.hits button')[1].click()")
    page.until(f"return ({_body(first)})() !== arguments[0]", f"{COLLECTION} 0")
    scores = page.run(
        "return [...document.querySelectorAll('.hits .tokens')].map((one) => +one.textContent)"
    )
    assert scores[0] == pytest.approx(1, abs=1e-3)
    assert scores == sorted(scores, reverse=True)


def test_hover_shows_a_tokens_id(page, store):
    choose_session(page, TOOLS)
    token = store.turns(TOOLS)[0].token_ids.tolist()[3]
    page.hover("#part-0 .token:nth-child(4)")
    page.until("return !document.getElementById('tip').hidden")
    assert page.run("return document.getElementById('tip').textContent").startswith(f"ID {token}")


def test_keyboard_goes_from_token_to_token_and_says_each(page, store):
    choose_session(page, TOOLS)
    ids = store.turns(TOOLS)[0].token_ids.tolist()
    page.run("document.querySelector('#part-0 .text').focus()")
    page.press("right", "right", "right", "left")
    said = page.run("return document.getElementById('spoken').textContent")
    assert said.endswith(f"ID {ids[1]}")
    assert page.run("return document.querySelector('.token.on').dataset.ids") == str(ids[1])
    page.press("escape")
    assert page.run("return document.getElementById('tip').hidden")


def test_keyboard_alone_reaches_a_session_and_its_window(page):
    focused = "return document.activeElement.dataset.id ?? document.activeElement.id"
    reached = []
    for _ in range(6):
        page.press("tab")
        reached.append(page.run(focused))
    assert reached[1:3] == ["tenant", "search"]
    page.press("enter")
    page.until("return document.querySelector('.part')")
    assert page.run("return document.activeElement.getAttribute('aria-current')") == "true"


def test_address_brings_back_session_and_settings(page, server):
    choose_session(page, TOOLS)
    page.choose("[name=cut]", "sliding")
    page.until("return location.hash.includes('cut=sliding')")
    address = page.run("return location.href")
    page.open("about:blank")
    page.open(address)
    page.until("return document.querySelector('.part')")
    assert page.run("return document.getElementById('session-name').textContent") == TOOLS
    assert page.run("return document.querySelector('[name=cut]').value") == "sliding"


def test_search_narrows_the_list(page):
    page.fill("#search", "booking")
    page.until("return document.querySelectorAll('#session-list button').length === 1")
    page.fill("#search", "no such name")
    page.until("return !document.getElementById('no-session').hidden")


def test_problem_is_told_in_a_sentence_and_goes_away(page):
    choose_session(page, LONG)
    page.fill("[name=reserve]", "0")
    page.fill("[name=max_tokens]", "9")
    page.until("return document.getElementById('problem').textContent.includes('persona')")
    page.fill("[name=max_tokens]", "900")
    page.until("return document.getElementById('problem').hidden")
    # The browser's own note of a refused request is no complaint about the page.
    assert all("400 (Bad Request)" in one for one in page.log())


def test_text_of_a_chat_is_never_markup(page):
    page.choose("#tenant", b"acme".hex())
    page.until("return document.querySelectorAll('#session-list button').length === 2")
    page.click("#session-list button")
    page.until("return document.querySelector('.part')")
    shown = page.run("return document.querySelector('.text').textContent")
    assert "<img src=x onerror=alert(1)>" in shown
    assert EVIL[0] not in shown
    assert "\u202e" not in page.run("return document.body.textContent")
    assert page.run("return document.querySelectorAll('main img').length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_readable_in_light_and_dark(page, dark):
    page.dark(dark)
    choose_session(page, LONG)
    page.choose("[name=query]", "passage")
    page.until("return document.querySelector('.hits')")
    page.until(READY)
    names = [
        ".token", ".line-end", ".badge", "a.tile", ".facts", ".card span", ".mark", ".what",
        ".preview", ".quiet", ".legend li", ".tokens", ".settings label", ".budget th",
    ]  # fmt: skip
    worst = page.run(CONTRAST, names)
    assert set(worst) == set(names)
    assert {name: ratio for name, ratio in worst.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("width", [360, 800, 1440])
def test_page_never_scrolls_sideways(page, width):
    page.devtools(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
        mobile=False,
    )  # fmt: skip
    try:
        choose_session(page, LONG)
        assert page.run("return document.documentElement.scrollWidth") <= width
    finally:
        page.devtools("Emulation.clearDeviceMetricsOverride")


def test_page_asks_nobody_but_its_server(page, server):
    choose_session(page, LONG)
    asked = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert asked
    assert all(one.startswith(server.url) for one in asked)
