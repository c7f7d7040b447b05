"""A headless Chromium, driven over the WebDriver protocol without a package for it."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"right": "\ue014", "left": "\ue012", "tab": "\ue004", "enter": "\ue007", "escape": "\ue00c"}
WAIT_S = 20.0


class Browser:
    """One window of Chromium; a context manager."""

    def __init__(self, width=1440, height=1000):
        program = shutil.which("chromedriver")
        assert program is not None, "install chromium and chromium-driver"
        self._driver = subprocess.Popen(
            [program, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        self._base = f"http://127.0.0.1:{found[1]}/session"
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", f"--window-size={width},{height}",
        ]  # fmt: skip
        asked = {
            "goog:chromeOptions": {"args": options},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._ask("POST", "", {"capabilities": {"alwaysMatch": asked}})
        self._base += f"/{made['sessionId']}"

    def _ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url):
        self._ask("POST", "/url", {"url": url})

    def run(self, script, *args):
        """Run a function body in the page and return its value."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def until(self, script, *args):
        """Wait until a function body gives something true; return it.

        The page itself is asked again and again, at its own pace.
        """
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if found := self.run(script, *args):
                return found
        raise AssertionError(f"it did not come to pass: {script}")

    def click(self, selector):
        self._ask("POST", f"/element/{self._find(selector)}/click", {})

    def fill(self, selector, text):
        element = self._find(selector)
        self._ask("POST", f"/element/{element}/clear", {})
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def choose(self, selector, value):
        """Choose an option of a list, with the events that a reader's choice has."""
        script = """
            const list = document.querySelector(arguments[0]);
            list.value = arguments[1];
            list.dispatchEvent(new Event("input", {bubbles: true}));
            list.dispatchEvent(new Event("change", {bubbles: true}));
            return list.value === arguments[1];
        """
        assert self.run(script, selector, value), value

    def press(self, *names):
        """Press keys in whatever has the focus."""
        actions = []
        for name in names:
            key = KEYS.get(name, name)
            actions += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def _find(self, selector):
        return self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def hover(self, selector):
        origin = {ELEMENT: self._find(selector)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        pointer = {"type": "pointer", "id": "m", "actions": [move]}
        self._ask("POST", "/actions", {"actions": [pointer]})

    def devtools(self, command, **params):
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def dark(self, on):
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def log(self):
        """Return what the browser complained of since it was asked last."""
        return [one["message"] for one in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self):
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def close(self):
        self._ask("DELETE", "")
        self._driver.terminate()
        self._driver.wait()
        self._driver.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()
