"""The page of `cspd serve` in a browser, as users see it."""

from __future__ import annotations

import functools
import os
import re
import shutil

import numpy as np
import pytest
from launching import wait_until
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright
from serving import pixels, served
from stores import small_checkpoint
from texts import small_text_checkpoint

import cspd

pytestmark = pytest.mark.slow  # starts a browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUICK = {"cfg": "3", "num_iter": "4", "num_sampling_steps": "25"}


@pytest.fixture(scope="module")
def browser():
    program = os.environ.get("CSPD_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)}), and CSPD_BROWSER is not set")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    engines = {name: cspd.load(name, max_batch=4, device="cpu") for name in ("digits32", "digits32_vq")}
    with pytest.MonkeyPatch.context() as patch:
        folder = small_text_checkpoint(tmp_path_factory.mktemp("texts"), patch)
        small = {"texts": folder, "small": small_checkpoint()}
        yield engines | {name: cspd.load(each, max_batch=4, device="cpu") for name, each in small.items()}


@pytest.fixture(scope="module")
def site(engines):
    with served(engines) as site:
        yield site


@pytest.fixture
def open_page(browser, site):
    """A function that opens the page in a browser profile of its own; no script may fail."""
    contexts, errors = [], []

    def opened(**settings) -> Page:
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(site.address)
        expect(page.get_by_label("class")).to_have_value("three")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors


def fill(page, label="seven", methods=("ar", ""), **settings):
    page.get_by_label("class").fill(label)
    if not page.locator("#more").is_visible():
        page.get_by_text("More settings").click()
    for name, value in {**QUICK, **settings}.items():
        page.locator(f"[name={name}]").fill(value)
    for choice, method in zip(page.get_by_label("method").all(), methods):
        choice.select_option(method)


def button(page):
    return page.get_by_role("button", name="Generate", exact=True)


def generate(page):
    """The images that are shown when all of them are finished."""
    button(page).click()
    return images(page)


def images(page):
    expect(button(page)).to_be_enabled(timeout=60_000)
    for panel in page.locator(".panel").all():
        expect(panel.locator(".state")).to_contain_text("finished")
    return [pixels(image.get_attribute("src")) for image in page.locator(".panel .image").all()]


def test_the_api_key(browser, engines):
    """It is in the address, from which it is removed, or asked for; the browser keeps it."""
    with served(engines, key="the-key+/=") as site:
        for address, typed in (("#key=the-key%2B%2F%3D", []), ("", ["\u00e9", "wrong", " the-key+/= "])):
            context = browser.new_context()
            page = context.new_page()
            page.on("dialog", lambda dialog, typed=typed: dialog.accept(typed.pop(0)))
            page.goto(f"{site.address}/{address}")
            expect(page.get_by_label("class")).to_have_value("three")
            assert not typed and page.url == f"{site.address}/"
            page.reload()
            fill(page, "two")
            assert len(generate(page)) == 1
            context.close()
        context = browser.new_context()
        page = context.new_page()  # which dismisses dialogs
        page.goto(site.address)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        context.close()


def test_two_users_at_once(open_page, engines):
    """Each picks a class, and sees an image of it, the guarantee and what ran."""
    ann, bea = open_page(), open_page(viewport={"width": 390, "height": 844})
    fill(ann, "seven", ("ar", "dpm-solver++"), num_sampling_steps="200")
    fill(bea, "two")
    button(ann).click()
    expect(ann.locator(".panel").first.locator(".image")).to_be_visible()  # still growing
    shown = [*generate(bea), *images(ann)]
    sample = functools.partial(engines["digits32"].sample, seed=0, num_iter=4, cfg=3.0)
    made = [sample("two", method="ar", num_sampling_steps=25)]
    made += [sample("seven", method=method, num_sampling_steps=200) for method in ("ar", "dpm-solver++")]
    for image, output in zip(shown, made):
        assert np.abs(image.astype(int) - np.asarray(output.pil())).max() <= 1
    expect(ann.locator(".panel .tag")).to_have_text(["exact", "heuristic"])
    ann.get_by_text("What ran").first.click()
    expect(ann.locator(".ran code").first).to_contain_text("Request(label=7, seed=0, method='ar'")
    expect(ann.locator(".legend").first).to_have_text("200 head calls for each token")
    expect(ann.locator("#status")).to_contain_text("running")


def test_the_page_shows_why_the_api_refuses(browser, site):
    """Here the name is not one of the server's, as behind a proxy that it does not know."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"http://demo.localhost:{site.port}")
    expect(page.get_by_role("alert")).to_contain_text("demo.localhost")
    expect(page.get_by_role("alert")).to_be_in_viewport()
    expect(page.locator("#status")).not_to_contain_text("connecting")
    page.close()


def test_an_error_that_ends_several_images(browser, engines):
    """All of them repeat the reason of the server."""
    with served(engines, most=3) as site:
        long = {"num_iter": 64, "num_sampling_steps": 300}
        others = site.make("bea", model="digits32", methods=["ar", "ar"], settings=long)
        page = browser.new_page()
        requests = []
        page.route("**/api/images", lambda route: requests.append(route))  # which wait until they go on
        page.goto(site.address)
        fill(page, num_iter="64", num_sampling_steps="300")
        page.get_by_label("images", exact=True).fill("2")
        button(page).click()
        while len(requests) < 2:
            page.wait_for_timeout(10)
        requests[0].continue_()
        expect(page.locator(".panel .image")).to_be_visible()
        requests[1].continue_()
        expect(page.locator(".panel .error")).to_contain_text("3 images are unfinished")
        expect(page.locator("#error")).to_contain_text("3 images are unfinished")
        page.close()
        others.close()


def test_large_seeds(open_page):
    """Numbers of a browser are exact up to 2**53."""
    page = open_page()
    fill(page)
    page.locator("#seed").fill(str(2**53 + 1))
    page.get_by_label("images", exact=True).fill("2")
    generate(page)
    entries = page.locator("#pictures li")
    expect(entries).to_have_count(2)
    for seed in (2**53 + 1, 2**53 + 2):
        expect(entries.get_by_text(f"seed {seed}")).to_have_attribute("href", re.compile(f"seed={seed}&"))


def test_bad_input_is_a_message(open_page):
    page = open_page()
    for changes, said in (({"label": "dragon"}, "label='dragon'"), ({"cfg": "-1"}, "cfg=-1")):
        fill(page, **changes)
        button(page).click()
        expect(page.get_by_role("alert")).to_contain_text(said)
        expect(button(page)).to_be_enabled()
    fill(page)
    generate(page)
    expect(page.locator("#error")).to_be_hidden()


def test_a_batch_in_the_gallery_whose_links_generate_each_image_again(open_page):
    page = open_page()
    fill(page, "two", ("speculative", "dpm-solver++"), temperature="0.9")
    page.get_by_label("images", exact=True).fill("3")
    made = generate(page)
    entries = page.locator("#pictures li")
    expect(entries).to_have_count(6)
    alts = [entry.get_attribute("alt") for entry in entries.locator("img").all()]
    assert {*alts} == {
        f"two, seed {seed}, by {method}" for seed in range(3) for method in ("speculative", "dpm-solver++")
    }
    for method in ("speculative", "dpm-solver++"):
        entry = entries.nth(alts.index(f"two, seed 1, by {method}"))
        before = pixels(entry.locator("img").get_attribute("src"))
        assert any(np.array_equal(before, each) for each in made)
        other = open_page()
        other.goto(page.url + entry.locator("a").get_attribute("href"))
        expect(other.get_by_label("class")).to_have_value("two")
        (again,) = generate(other)
        assert np.array_equal(again, before)


def test_a_link_to_the_form(open_page):
    page = open_page()
    page.get_by_label("model").select_option("digits32_vq")
    page.get_by_label("method").nth(0).select_option("sjd")
    page.get_by_text("Options of sjd").click()
    page.locator("[name=window]").fill("8")
    page.locator("[name=continuation]").select_option("true")
    page.locator("#seed").fill("5")
    (first, second) = generate(page)
    page.locator("#link").click()
    expect(page.locator(".panel")).to_have_count(0)
    expect(page.get_by_label("model")).to_have_value("digits32_vq")
    assert np.array_equal(generate(page), [first, second])
    expect(page.locator(".ran code").first).to_contain_text("continuation=True")


def test_options_are_fields_with_ranges(open_page):
    page = open_page()
    expect(page.locator("[name=num_sampling_steps]")).to_have_attribute("max", "1000")
    page.get_by_label("method").nth(0).select_option("calibrated")
    page.get_by_text("Options of calibrated").click()
    calls = page.locator("[name=head_calls]")
    expect(calls).to_have_attribute("min", "2")
    calls.fill("5")
    fill(page, methods=("calibrated", ""))
    expect(page.locator("[name=head_calls]")).to_have_value("")  # the method was chosen again
    page.get_by_label("method").nth(0).select_option("lazymar")
    expect(page.locator("[name=refresh]")).to_be_visible()  # the options stay open
    expect(page.locator("[name=reconstruction]")).to_be_hidden()
    page.locator("[name=order]").select_option("checkerboard")
    expect(page.locator("[name=reconstruction]")).to_be_visible()
    page.locator("[name=reconstruction]").fill("1")
    generate(page)
    expect(page.locator(".ran code")).to_contain_text("reconstruction=1")


def test_no_panel_of_an_earlier_image(open_page):
    page = open_page()
    fill(page)
    generate(page)
    fill(page, cfg="-1")
    button(page).click()
    expect(page.get_by_role("alert")).to_contain_text("cfg=-1")
    expect(page.locator(".panel")).to_have_count(0)
    fill(page)
    generate(page)
    page.get_by_label("model").select_option("digits32_vq")
    expect(page.locator(".panel")).to_have_count(0)
    expect(page.locator("#pictures li")).to_have_count(2)


def test_a_heat_map_has_several_colours_or_is_left_out(open_page):
    page = open_page()
    fill(page, methods=("ar", "speculative"), num_sampling_steps="50")
    page.get_by_text("Options of speculative").click()
    page.locator("[name=window]").fill("3")
    generate(page)
    expect(page.locator(".heat").nth(0)).to_be_hidden()
    heat = page.locator(".heat").nth(1)
    expect(heat).to_be_visible()
    script = "map => [...map.getContext('2d').getImageData(0, 0, map.width, map.height).data]"
    assert len({*map(tuple, np.reshape(heat.evaluate(script), (-1, 4)).tolist())}) > 1


def test_the_place_in_the_queue(open_page):
    ann, bea = open_page(), open_page()
    fill(ann, num_iter="64", num_sampling_steps="300")
    ann.get_by_label("images", exact=True).fill("4")  # as many as there are slots
    button(ann).click()
    expect(ann.locator(".panel .image").nth(3)).to_be_visible(timeout=30_000)
    fill(bea, methods=("ar", "ddim"))
    button(bea).click()
    expect(bea.locator(".panel .state")).to_have_text(["number 1 in the queue", "number 2 in the queue"])
    ann.get_by_role("button", name="Stop").click()
    assert len(images(bea)) == 2


def test_an_image_is_dropped_on_the_page(open_page):
    page = open_page()
    script = """async () => {
        const canvas = new OffscreenCanvas(90, 60);
        canvas.getContext("2d").fillRect(0, 0, 90, 60);
        const transfer = new DataTransfer();
        transfer.items.add(new File([await canvas.convertToBlob()], "own.png", { type: "image/png" }));
        return transfer;
    }"""
    page.locator("body").dispatch_event("drop", {"dataTransfer": page.evaluate_handle(script)})
    expect(page.locator("#picture")).to_be_visible()
    paint(page, across=False)
    fill(page)
    (image,) = generate(page)
    assert image[:, :12].mean() < 60
    expect(page.locator("#link")).to_be_hidden()
    expect(page.locator("#pictures a[href]")).to_have_count(0)


def test_a_prompt_in_place_of_a_class(open_page, engines):
    page = open_page()
    expect(page.get_by_label("prompt", exact=True)).to_be_hidden()
    page.get_by_label("model").select_option("texts")
    expect(page.get_by_label("class")).to_be_hidden()
    page.get_by_label("prompt", exact=True).fill("a red fox")
    page.get_by_text("More settings").click()
    page.get_by_label("negative prompt").fill("blue")
    image, _ = generate(page)
    output = engines["texts"].sample(prompts="a red fox", negative_prompt="blue", seed=0)
    assert np.array_equal(image, np.asarray(output.pil()))
    expect(page.locator(".panel .image").first).to_have_attribute("alt", "a red fox, by speculative")
    page.get_by_label("model").select_option("digits32")
    expect(page.get_by_label("class")).to_have_value("three")


def test_a_part_is_painted_over(open_page, tmp_path):
    """Only the painted part is regenerated, of a generated image and of one that was opened."""
    page = open_page()
    fill(page)
    (before,) = generate(page)
    page.get_by_role("button", name="Paint over it").click()
    paint(page, across=False)
    page.locator("#seed").fill("9")
    (after,) = generate(page)
    change = np.abs(after.astype(int) - before)
    assert change[:, :12].mean() < change[:, 20:].mean() / 2

    Image.new("RGB", (90, 60), "orange").save(tmp_path / "own.png")
    page.get_by_label("model").select_option("digits32_vq")
    page.locator("#file").set_input_files(tmp_path / "own.png")
    paint(page, across=True)
    page.get_by_label("method").nth(1).select_option("")
    (one,) = generate(page)
    page.get_by_role("button", name="another seed").click()
    (other,) = generate(page)
    change = np.abs(one.astype(int) - other)
    assert change[:16].mean() < change[26:].mean() / 2
    (tmp_path / "none.png").write_text("not an image")
    page.locator("#file").set_input_files(tmp_path / "none.png")
    expect(page.get_by_role("alert")).to_contain_text("none.png cannot be read as an image")


def paint(page, across):
    """Strokes over the right half, or along a line below the middle."""
    mask = page.locator("#mask")
    mask.scroll_into_view_if_needed()
    box = mask.bounding_box()
    rows = [0.75] if across else np.linspace(0, 1, 17)[1::2]
    for y in rows:
        page.mouse.move(box["x"] + (0.02 if across else 0.6) * box["width"], box["y"] + y * box["height"])
        page.mouse.down()
        page.mouse.move(box["x"] + 0.97 * box["width"], box["y"] + y * box["height"], steps=12)
        page.mouse.up()


def test_images_can_be_stopped(open_page, site):
    page = open_page()
    fill(page, num_iter="64", num_sampling_steps="300")
    button(page).click()
    expect(page.locator(".panel .image")).to_be_visible(timeout=30_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".panel .error")).to_have_text("stopped")
    wait_until(lambda: not site.loop.jobs)
    expect(page.locator("#status")).to_contain_text("0 running", timeout=15_000)


def test_the_budget_of_the_slider_is_what_runs(open_page):
    page = open_page()
    page.get_by_label("model").select_option("small")  # its plans are priced within seconds
    fill(page, label="3", methods=("budget", ""))
    slider = page.get_by_role("slider", name="budget")
    expect(slider).to_be_visible()
    expect(slider).to_have_attribute("aria-valuetext", "0.3 nats per token")
    slider.fill("1.5")
    slider.press("ArrowRight")
    expect(page.locator(".slider .value")).to_have_text("1.55 nats per token")
    with page.expect_request("**/api/images") as asked:
        generate(page)
    assert asked.value.post_data_json["methods"] == ["budget:budget=1.55"]
    expect(page.locator(".panel .tag")).to_have_text("measured")
    expect(page.locator(".ran code")).to_contain_text("budget=1.55")
    rows = page.locator(".numbers")
    numbers = dict(zip(rows.locator("dt").all_inner_texts(), rows.locator("dd").all_inner_texts()))
    assert numbers["budget, nats per token"] == "1.55"
    assert 0 < float(numbers["predicted, nats per token"]) <= 1.55
    page.locator("#link").click()
    expect(slider).to_have_value("1.55")
