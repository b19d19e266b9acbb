"""A headless Chromium that opens a page as a reader would, and says what it did meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

#: Accessibility rules of axe-core (MPL 2.0, its licence lies beside it).
AXE = Path(__file__).with_name("axe") / "axe.min.js"
#: Width and height: a desk, and a phone.
DESK, PHONE = (1280, 900), (390, 844)
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def needed() -> tuple[str, str]:
    """Browser and driver; without them the tests are skipped, and say so."""
    browser = next((found for name in _NAMES if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium with its driver on this machine: apt-get install chromium chromium-driver")
    return browser, driver


@contextmanager
def started() -> Iterator[Browser]:
    """Ended with the block."""
    binary, driver = needed()
    options = Options()
    options.binary_location = binary
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to start as root with it
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(found)
    finally:
        found.quit()


class Browser:
    """What tests ask of it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        """Load a page anew; forgets what was logged before."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 10) -> None:
        """Until a script says true.

        Raises:
            TimeoutException: it does not.
        """
        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda driver: driver.execute_script(script))

    def complaints(self) -> list[str]:
        """Of the console: errors, warnings, and what the page's policy refused."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Everything that was asked of a network or a disk, since the page was opened."""
        found = []
        for one in self.driver.get_log("performance"):
            message = json.loads(one["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                url = message["params"].get("request", message["params"])["url"]
                if not url.startswith("data:"):
                    found.append(url)
        return found

    def violations(self) -> list[str]:
        """What axe-core finds wrong, with the elements."""
        self.driver.execute_script(AXE.read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']}).then(done, (error) => done({failed: String(error)}));"
        )
        assert "failed" not in found, found
        return [
            f"{one['id']}: {one['help']}: {[' '.join(node['target']) for node in one['nodes'][:3]]}"
            for one in found["violations"]
        ]
