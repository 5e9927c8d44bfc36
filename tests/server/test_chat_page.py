"""The chat page in a real browser (selenium with Chromium): streaming, figures, settings, stop, several turns."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxserve.server.settings import ServerSettings
from live import Live, engine_command, serving, wait_for

selenium = pytest.importorskip("selenium", reason="the browser test needs selenium (pip install selenium)")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = pytest.mark.slow

HTML = '<img src=x onerror="document.title=1"> <b>bold</b>'


def find_browser() -> tuple[str, str]:
    browser = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("the browser test needs chromium and chromedriver (apt install chromium chromium-driver)")
    return browser, driver


@pytest.fixture(scope="module")
def page_server(toy_tokenizer: Path) -> Iterator[Live]:
    with serving(ServerSettings(engine_command=engine_command(toy_tokenizer, step=0.02))) as live:
        yield live.wait_ready()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    binary, driver = find_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1100,800",
        f"--user-data-dir={tmp_path}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield window
        errors = [entry for entry in window.get_log("browser") if entry["level"] == "SEVERE"]
        assert not errors, errors
    finally:
        window.quit()


class Page:
    def __init__(self, browser: Any, live: Live) -> None:
        self.browser = browser
        browser.get(live.url + "/")
        wait_for(lambda: self.text("status").startswith("ready"), 20)

    def element(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self.element(name).text

    def answers(self) -> list[str]:
        return [e.text for e in self.browser.find_elements(By.CSS_SELECTOR, ".message.assistant .body")]

    def facts(self) -> list[str]:
        return [e.text for e in self.browser.find_elements(By.CSS_SELECTOR, ".facts")]

    def is_busy(self) -> bool:
        return self.element("stop").is_displayed()

    def ask(self, text: str, *, wait: bool = True) -> None:
        self.element("input").send_keys(text + Keys.ENTER)
        if wait:
            wait_for(lambda: not self.is_busy(), 30)

    def screenshot(self, name: str) -> None:
        """Kept for eyes, if JAXSERVE_SCREENSHOTS names a folder."""
        folder = os.environ.get("JAXSERVE_SCREENSHOTS")
        if folder:
            self.browser.save_screenshot(str(Path(folder) / f"{name}.png"))

    def set(self, name: str, value: object) -> None:
        """As if dragged or typed: sets the value and tells the page."""
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}))"
        self.browser.execute_script(script, self.element(name), str(value))


def sent_bodies(browser: Any) -> None:
    """Let the page note what it sends."""
    browser.execute_script(
        "window.sent = []; const real = window.fetch;"
        "window.fetch = (url, options) => { if (options && options.body) window.sent.push(JSON.parse(options.body));"
        " return real(url, options); }"
    )


def test_a_conversation(browser: Any, page_server: Live) -> None:
    page = Page(browser, page_server)
    assert page.text("model") == "toy-model" and "512 tokens" in page.text("status")
    page.screenshot("empty")
    sent_bodies(browser)
    page.element("toggle-settings").click()
    page.set("temperature", 0)
    page.set("max-tokens", 60)
    page.set("system", "You are a harbour.")
    page.screenshot("settings")
    page.element("toggle-settings").click()

    page.ask("Tell me about boats", wait=False)
    seen = set()
    while page.is_busy():
        seen.add(len(page.answers()[-1]))
        time.sleep(0.05)
    assert len(seen) > 3, "the text grew while it came"
    messages = [{"role": "system", "content": "You are a harbour."}, {"role": "user", "content": "Tell me about boats"}]
    plain = page_server.chat(messages=messages, temperature=0, top_p=0.95, max_tokens=60)
    said = plain["choices"][0]["message"]["content"]
    assert page.answers()[0].split() == said.split()
    facts = page.facts()[0]
    assert f"{plain['usage']['completion_tokens']} tokens" in facts and "tokens/s" in facts and "cached" in facts

    page.ask("And then?")
    bodies = browser.execute_script("return window.sent")
    assert [turn["role"] for turn in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert bodies[1]["messages"][2]["content"] == said, "the history is sent as it was said"
    assert bodies[0]["temperature"] == 0 and bodies[0]["max_tokens"] == 60 and bodies[0]["stream"] is True
    cached = int(page.facts()[1].split(" of ")[0].split()[-1])
    assert cached >= 16, "the second turn reuses the first"
    page.screenshot("conversation")
    page.element("theme").click()
    page.element("theme").click()
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    page.screenshot("dark")

    browser.refresh()
    wait_for(lambda: len(page.answers()) == 2)
    assert page.answers()[0].split() == said.split(), "a reload keeps the conversation"
    page.element("new-chat").click()
    assert page.answers() == [] and page.element("welcome").is_displayed()


def test_stop(browser: Any, page_server: Live) -> None:
    page = Page(browser, page_server)
    page.set("max-tokens", 450)
    page.ask("Go on and on", wait=False)
    wait_for(lambda: page.answers() and page.answers()[-1])
    page.element("stop").click()
    wait_for(lambda: not page.is_busy(), 3)
    wait_for(lambda: page_server.state.client.num_in_flight == 0, 3)
    assert "stopped" in page.facts()[0] and page.answers()[0]
    page.set("max-tokens", 5)
    page.ask("Again")
    assert len(page.answers()) == 2 and "5 tokens" in page.facts()[1]


def test_text_is_never_markup(browser: Any, page_server: Live) -> None:
    page = Page(browser, page_server)
    title = browser.title
    said = f"{HTML}\n```html\n{HTML}\n```\nand `<i>`"
    text = browser.execute_script("return addMessage('assistant', arguments[0]).body.textContent", said)
    assert text.count(HTML) == 2 and "<i>" in text
    assert browser.find_elements(By.CSS_SELECTOR, ".message img, .message b, .message i") == []
    assert len(browser.find_elements(By.CSS_SELECTOR, ".message pre code")) == 1
    page.screenshot("markup")
    time.sleep(0.2)
    assert browser.title == title


def test_errors_are_shown(browser: Any, page_server: Live) -> None:
    page = Page(browser, page_server)
    page.set("max-tokens", 5000)
    page.element("input").send_keys("Too much" + Keys.ENTER)
    wait_for(lambda: page.facts() and "max_tokens" in page.facts()[0])
    assert page.element("input").get_attribute("value") == "Too much", "the question is not lost"
    page.screenshot("error")
    page.set("max-tokens", 5)
    page.ask("")
    assert len(page.answers()) == 1 and page.answers()[0] and "max_tokens" not in page.facts()[0]
    browser.get_log("browser")  # the refusal itself is in the log


def test_with_a_key(browser: Any, toy_tokenizer: Path) -> None:
    with serving(ServerSettings(engine_command=engine_command(toy_tokenizer), api_keys=("secret",))) as live:
        live.http.headers["Authorization"] = "Bearer secret"
        live.wait_ready()
        browser.get(live.url + "/")
        wait_for(lambda: "API key" in browser.find_element(By.ID, "status").text)
        browser.get_log("browser")
        browser.find_element(By.ID, "toggle-settings").click()
        browser.find_element(By.ID, "api-key").send_keys("secret" + Keys.TAB)
        wait_for(lambda: browser.find_element(By.ID, "status").text.startswith("ready"))
        browser.find_element(By.ID, "input").send_keys("hi" + Keys.ENTER)
        wait_for(lambda: "tokens" in "".join(e.text for e in browser.find_elements(By.CSS_SELECTOR, ".facts")))
