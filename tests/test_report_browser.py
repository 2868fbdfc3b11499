"""The report in a real browser: quiet console, no requests, working controls, foreign text as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import examples
import numpy as np
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from mia_audit.report.html import write_report, write_study_report

pytestmark = pytest.mark.browser
HOSTILE = "<script>document.title='owned'</script>\" onerror=\"document.title='owned'\" \u202egnp.exe 😀 & <b>'"
QUIET = ("disable-background-networking", "disable-component-update", "disable-sync", "disable-quic", "no-first-run")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = Options()
    options.binary_location = "/usr/bin/chromium"
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", f"user-data-dir={profile}", *QUIET):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    records = examples.digits(500)
    write_report(examples.target_audit(records), folder / "target", records=records)
    write_report(examples.pool_audit(records), folder / "pool", records=records)
    write_study_report(examples.study(), folder / "study")
    ids = np.array([f"{HOSTILE}{i}" for i in range(len(records))], dtype=object)
    ids[np.argmax(examples.target_audit(records).records["lira-online"])] = "long " * 2000
    hostile = replace(records, id=ids, classes=tuple(f"{HOSTILE}{i}" for i in range(10)))
    result = replace(examples.target_audit(hostile), warnings=(HOSTILE,))
    write_report(result, folder / "hostile", records=hostile, spec={HOSTILE: HOSTILE})
    return folder


def opened(browser: Chrome, folder: Path, name: str) -> Chrome:
    browser.get((folder / name / "report.html").as_uri())
    return browser


def cards(browser: Chrome) -> list[dict[str, str]]:
    """The data of the cards that are seen, in their order."""
    script = "return [...document.querySelectorAll('#gallery > li')].filter(c => !c.hidden).map(c => ({...c.dataset}))"
    return list(browser.execute_script(script))


@pytest.mark.parametrize("name", ["target", "pool", "study", "hostile"])
def test_the_console_is_quiet_and_nothing_is_requested(browser: Chrome, folder: Path, name: str) -> None:
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get_log("browser")
    opened(browser, folder, name)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith("data:")] == [(folder / name / "report.html").as_uri()]


def test_filters_and_sorting_work(browser: Chrome, folder: Path) -> None:
    opened(browser, folder, "target")
    assert len(cards(browser)) == 30
    subset = Select(browser.find_element(By.ID, "gallery-subset"))
    subset.select_by_value("mislabeled")
    seen = cards(browser)
    assert seen
    assert {card["subset"] for card in seen} == {"mislabeled"}
    assert browser.find_element(By.ID, "gallery-count").text == f"{len(seen)} of {len(seen)} shown"
    subset.select_by_value("")
    Select(browser.find_element(By.ID, "gallery-class")).select_by_value("3")
    assert {card["label"] for card in cards(browser)} == {"3"}
    Select(browser.find_element(By.ID, "gallery-class")).select_by_value("")
    order = Select(browser.find_element(By.ID, "gallery-sort"))
    for value, key, sign in (("score", "score", -1), ("rate", "rate", 1), ("label", "label", 1)):
        order.select_by_value(value)
        numbers = [sign * float(card[key]) for card in cards(browser)]
        assert numbers == sorted(numbers)
        assert len(set(numbers)) > 1


def test_show_more_shows_the_rest(browser: Chrome, folder: Path) -> None:
    opened(browser, folder, "target")
    total = len(browser.find_elements(By.CSS_SELECTOR, "#gallery > li"))
    more = browser.find_element(By.ID, "gallery-more")
    while more.is_displayed():
        before = len(cards(browser))
        more.send_keys(Keys.ENTER)
        assert len(cards(browser)) > before
    assert len(cards(browser)) == total > 30


def test_without_script_everything_is_there(browser: Chrome, folder: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened(browser, folder, "target")
        shown = [card for card in browser.find_elements(By.CSS_SELECTOR, "#gallery > li") if card.is_displayed()]
        assert len(shown) > 30
        assert not browser.find_element(By.ID, "gallery-controls").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_hostile_text_is_text(browser: Chrome, folder: Path) -> None:
    opened(browser, folder, "hostile")
    assert browser.title.startswith("This model leaks")
    assert browser.execute_script("return document.scripts.length") == 1
    assert browser.execute_script("return document.querySelectorAll('[onerror], b').length") == 0
    text = browser.find_element(By.ID, "gallery").text
    assert "<script>document.title='owned'</script>" in text
    assert "(10,000 characters)" in text
    options = Select(browser.find_element(By.ID, "gallery-class")).options
    assert any(HOSTILE[:40] in option.text for option in options)


def test_the_keyboard_reaches_links_tables_and_controls(browser: Chrome, folder: Path) -> None:
    opened(browser, folder, "target")
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    reached = []
    for _ in range(60):
        at = browser.switch_to.active_element
        reached.append(at.get_attribute("id") or at.get_attribute("class") or at.tag_name)
        at.send_keys(Keys.TAB)
    assert reached[0] == "skip"
    assert {"scroll", "summary", "gallery-sort", "gallery-subset", "gallery-class", "gallery-more"} <= set(reached)


@pytest.mark.parametrize("width", [390, 800, 1440])
@pytest.mark.parametrize("name", ["target", "pool", "study", "hostile"])
def test_the_page_never_scrolls_sideways(browser: Chrome, folder: Path, name: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    opened(browser, folder, name)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_contrasts_with_its_ground(browser: Chrome, folder: Path, theme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    opened(browser, folder, "target")
    script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()"
    colour = {
        name: browser.execute_script(script, f"--{name}")
        for name in ("paper", "ink", "muted", "blue", "orange", "green", "purple")
    }
    for name in ("ink", "muted", "blue", "orange", "green", "purple"):
        assert contrast(colour[name], colour["paper"]) >= 4.5, name


def contrast(one: str, two: str) -> float:
    """WCAG's contrast ratio of two #rrggbb colours."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
