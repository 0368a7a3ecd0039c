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
from cspd.serving.gallery import Gallery

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
        expect(page.get_by_label("Picture of")).to_have_value("three")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors


def fill(page, label="seven", methods=("ar",), **settings):
    """Fills the form: with one method, one picture in the first tab; with two, in the second one."""
    page.get_by_role("link", name="Compare methods" if len(methods) == 2 else "Make pictures").click()
    if not page.locator("#more").is_visible():
        page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Picture of").fill(label)
    for name, value in {**QUICK, **settings}.items():
        page.locator(f"#more [name={name}]").fill(value)
    if len(methods) == 1:
        page.locator("#count").fill("1")
    for choice, method in zip(page.get_by_label("method").and_(page.locator(":visible")).all(), methods):
        choice.select_option(method)


def button(page):
    return page.locator("#start")


def generate(page):
    """The images that are shown when all of them are finished."""
    button(page).click()
    return images(page)


def images(page):
    """The finished images of this tab."""
    expect(button(page)).to_be_enabled(timeout=60_000)
    tiles = page.locator("#panels .tile" if page.url.endswith("#compare") else "#grid .tile")
    for tile in tiles.all():
        expect(tile.locator(".open")).to_be_enabled()
    return [pixels(image.get_attribute("src")) for image in tiles.locator("img").all()]


def view(page, index=0):
    """Opens a picture of the first tab in the viewer."""
    page.locator("#grid .open").nth(index).click()
    expect(page.get_by_role("dialog")).to_be_visible()


def test_the_api_key(browser, engines, tmp_path):
    """It is in the address, from which it is removed, or asked for; the browser keeps it, also for the gallery."""
    with served(engines, key="the-key+/=", gallery=Gallery(tmp_path)) as site:
        for address, typed in (("#key=the-key%2B%2F%3D", []), ("", ["\u00e9", "wrong", " the-key+/= "])):
            context = browser.new_context()
            page = context.new_page()
            page.on("dialog", lambda dialog, typed=typed: dialog.accept(typed.pop(0)))
            page.goto(f"{site.address}/{address}")
            expect(page.get_by_label("Picture of")).to_have_value("three")
            assert not typed and page.url == f"{site.address}/"
            fill(page, "two")
            assert len(generate(page)) == 1
            page.reload()
            expect(page.locator("#saved img").first).to_have_js_property("naturalWidth", 32)
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
    for page in (ann, bea):
        page.get_by_label("Seed").fill("0")
    button(ann).click()
    expect(ann.locator("#panels img").first).to_be_visible()  # still growing
    shown = [*generate(bea), *images(ann)]
    sample = functools.partial(engines["digits32"].sample, seed=0, num_iter=4, cfg=3.0)
    made = [sample("two", method="ar", num_sampling_steps=25)]
    made += [sample("seven", method=method, num_sampling_steps=200) for method in ("ar", "dpm-solver++")]
    for image, output in zip(shown, made):
        assert np.abs(image.astype(int) - np.asarray(output.pil())).max() <= 1
    expect(ann.locator("#panels .tag")).to_have_text(["exact", "heuristic"])
    ann.get_by_text("How it was made").first.click()
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
    """The reason of the server is shown, also at the picture that had begun."""
    with served(engines, most=3) as site:
        long = {"num_iter": 64, "num_sampling_steps": 300}
        others = site.make("bea", model="digits32", methods=["ar", "ar"], settings=long)
        page = browser.new_page()
        requests = []
        page.route("**/api/images", lambda route: requests.append(route))  # which wait until they go on
        page.goto(site.address)
        fill(page, num_iter="64", num_sampling_steps="300")
        page.locator("#count").fill("2")
        button(page).click()
        while len(requests) < 2:
            page.wait_for_timeout(10)
        requests[0].continue_()
        expect(page.locator("#grid img").first).to_be_visible()
        requests[1].continue_()
        expect(page.locator("#grid .error")).to_contain_text("3 images are unfinished")
        expect(page.locator("#error")).to_contain_text("3 images are unfinished")
        expect(page.locator("#grid .tile")).to_have_count(1)
        page.close()
        others.close()


def test_large_seeds(open_page):
    """Numbers of a browser are exact up to 2**53."""
    page = open_page()
    fill(page)
    page.get_by_label("Seed").fill(str(2**53 + 1))
    page.locator("#count").fill("2")
    generate(page)
    for index, seed in enumerate((2**53 + 1, 2**53 + 2)):
        view(page, index)
        expect(page.locator("#again")).to_have_attribute("href", re.compile(f"seed={seed}&"))
        page.keyboard.press("Escape")


def test_seeds_are_random_unless_given(open_page):
    page = open_page()
    fill(page)
    (first,), (second,) = generate(page), generate(page)
    assert not np.array_equal(first, second)
    expect(page.get_by_label("Seed")).to_have_value("")


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


def test_the_gallery_of_the_folder(browser, engines, tmp_path):
    """It has the pictures of all visits, the newest one first, and each of them once; a link makes it again."""
    with served(engines, gallery=Gallery(tmp_path)) as site:
        page = browser.new_page()
        page.goto(site.address)
        fill(page, "two", ("dpm-solver++",), temperature="0.9")
        page.get_by_label("Seed").fill("4")
        page.locator("#count").fill("3")
        made = generate(page)
        expect(page.locator("#gallery")).to_be_hidden()  # all are in the grid
        assert len(generate(page)) == 3  # the same ones
        page.reload()
        entries = page.locator("#saved button")
        expect(entries).to_have_count(3)
        assert {entry.get_attribute("title") for entry in entries.all()} == {f"two, seed {4 + i}" for i in range(3)}
        page.get_by_role("button", name="two, seed 5").click()
        expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("two")
        expect(page.locator("#by")).to_have_text("seed 5, by dpm-solver++, digits32")
        shown = pixels(page.locator("#viewer img").get_attribute("src"))
        assert np.array_equal(shown, made[1])
        page.get_by_role("link", name="Use its settings").click()
        expect(page.get_by_label("Picture of")).to_have_value("two")
        (again,) = generate(page)
        assert np.array_equal(again, shown)
        expect(entries).to_have_count(2)  # the third one is in the grid
        page.close()
    assert len([*tmp_path.glob("*.png")]) == 3


def test_four_pictures_fit_a_phone(open_page):
    page = open_page(viewport={"width": 390, "height": 844})
    page.get_by_label("Model").select_option("small")
    assert len(generate(page)) == 4
    expect(page.get_by_text("4 pictures in")).to_be_visible()
    box = page.locator("#grid").bounding_box()
    assert box["y"] + box["height"] < 844
    view(page)
    box = page.locator("#facts").bounding_box()
    assert box["y"] + box["height"] < 844
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width == 390


def test_equal_pictures_are_shown_once(open_page):
    """As of a method that gives the image of `ar`, where nothing is drafted: the statistics say so."""
    page = open_page()
    page.get_by_label("Model").select_option("digits32_vq")
    page.get_by_role("link", name="Compare methods").click()
    page.get_by_label("First method").select_option("sjd")
    page.get_by_label("Second method").select_option("ar")
    page.locator("#both .own summary").first.click()
    page.locator("#both [name=window]").fill("2")
    generate(page)
    expect(page.locator("#panels .tile").nth(0)).to_be_visible()
    expect(page.locator("#panels .tile").nth(1)).to_be_hidden()
    expect(page.get_by_text("The same picture, pixel by pixel.")).to_have_count(2)
    expect(page.locator("#panels .same").nth(1)).to_be_visible()
    expect(page.locator("#panels .legend").nth(1)).to_contain_text("nothing was drafted")


def test_a_link_to_the_form(open_page):
    page = open_page()
    page.get_by_label("Model").select_option("digits32_vq")
    page.get_by_role("link", name="Compare methods").click()
    page.get_by_label("First method").select_option("sjd")
    page.get_by_text("Options of sjd").click()
    page.locator("#both [name=window]").fill("8")
    page.locator("#both [name=continuation]").select_option("true")
    (first, second) = generate(page)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_role("link", name="Link to these settings").click()
    expect(page.locator("#panels .panel")).to_have_count(0)
    expect(page.get_by_label("Model")).to_have_value("digits32_vq")
    expect(page.get_by_role("link", name="Compare methods")).to_have_attribute("aria-current", "page")
    assert np.array_equal(generate(page), [first, second])
    expect(page.locator(".ran code").first).to_contain_text("continuation=True")


def test_options_are_fields_with_ranges(open_page):
    page = open_page()
    fill(page)
    own = page.locator("#one")
    method = own.get_by_label("Method")
    expect(page.locator("#more [name=num_sampling_steps]")).to_have_attribute("max", "1000")
    method.select_option("calibrated")
    own.get_by_text("Options of calibrated").click()
    calls = own.locator("[name=head_calls]")
    expect(calls).to_have_attribute("min", "2")
    calls.fill("5")
    fill(page, methods=("calibrated",))
    expect(calls).to_have_value("")  # the method was chosen again
    method.select_option("lazymar")
    expect(own.locator("[name=refresh]")).to_be_visible()  # the options stay open
    expect(own.locator("[name=reconstruction]")).to_be_hidden()
    own.locator("[name=order]").select_option("checkerboard")
    expect(own.locator("[name=reconstruction]")).to_be_visible()
    own.locator("[name=reconstruction]").fill("1")
    generate(page)
    view(page)
    expect(page.locator("#facts code")).to_contain_text("reconstruction=1")


def test_no_tile_of_an_earlier_image(open_page):
    """Earlier pictures are in the gallery, also without a folder."""
    page = open_page()
    fill(page)
    generate(page)
    fill(page, cfg="-1")
    button(page).click()
    expect(page.get_by_role("alert")).to_contain_text("cfg=-1")
    expect(page.locator("#grid .tile")).to_have_count(0)
    expect(page.locator("#saved li")).to_have_count(1)
    expect(page.locator("#gallery h2")).to_have_text("Pictures of this visit")


def test_a_map_of_costs_has_several_colours_or_is_left_out(open_page):
    page = open_page()
    fill(page, methods=("ar", "speculative"), num_sampling_steps="50")
    page.get_by_text("Options of speculative").and_(page.locator(":visible")).click()
    page.locator("#both [name=window]").fill("3")
    generate(page)
    for summary in page.locator("#panels .facts > summary").all():
        summary.click()
    expect(page.locator("#panels .heat").nth(0)).to_be_hidden()
    heat = page.locator("#panels .heat").nth(1)
    expect(heat).to_be_visible()
    script = "map => [...map.getContext('2d').getImageData(0, 0, map.width, map.height).data]"
    assert len({*map(tuple, np.reshape(heat.evaluate(script), (-1, 4)).tolist())}) > 1


def test_the_place_in_the_queue(open_page):
    ann, bea = open_page(), open_page()
    fill(ann, num_iter="64", num_sampling_steps="300")
    ann.locator("#count").fill("4")  # as many as there are slots
    button(ann).click()
    expect(ann.locator("#grid img:visible")).to_have_count(4, timeout=30_000)
    fill(bea, methods=("ar", "ddim"))
    button(bea).click()
    expect(bea.locator("#panels figcaption")).to_have_text(["1 in the queue", "2 in the queue"])
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
    view(page)
    expect(page.locator("#again")).to_be_hidden()


def test_a_prompt_in_place_of_a_class(open_page, engines):
    page = open_page()
    expect(page.get_by_label("Prompt", exact=True)).to_be_hidden()
    page.get_by_label("Model").select_option("texts")
    expect(page.get_by_label("Picture of")).to_be_hidden()
    page.get_by_label("Prompt", exact=True).fill("a red fox")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Negative prompt").fill("blue")
    page.locator("#count").fill("1")
    page.get_by_label("Seed").fill("0")
    (image,) = generate(page)
    output = engines["texts"].sample(prompts="a red fox", negative_prompt="blue", seed=0)
    assert np.array_equal(image, np.asarray(output.pil()))
    expect(page.locator("#grid img")).to_have_attribute("alt", "a red fox, seed 0")
    page.get_by_label("Model").select_option("digits32")
    expect(page.get_by_label("Picture of")).to_have_value("three")


def test_a_part_is_painted_over(open_page, tmp_path):
    """Only the painted part is regenerated, of a generated image and of one that was opened."""
    page = open_page()
    fill(page)
    (before,) = generate(page)
    view(page)
    page.get_by_role("button", name="Change a part").click()
    paint(page, across=False)
    (after,) = generate(page)
    change = np.abs(after.astype(int) - before)
    assert change[:, :12].mean() < change[:, 20:].mean() / 2

    Image.new("RGB", (90, 60), "orange").save(tmp_path / "own.png")
    page.get_by_label("Model").select_option("digits32_vq")
    page.locator("#file").set_input_files(tmp_path / "own.png")
    paint(page, across=True)
    (one,), (other,) = generate(page), generate(page)
    change = np.abs(one.astype(int) - other)
    assert change[:16].mean() < change[26:].mean() / 2
    (tmp_path / "none.png").write_text("not an image")
    page.locator("#file").set_input_files(tmp_path / "none.png")
    expect(page.get_by_role("alert")).to_contain_text("none.png cannot be read as an image")


def test_a_part_is_painted_over_by_the_keyboard(open_page):
    page = open_page()
    fill(page)
    (before,) = generate(page)
    page.locator("#grid .open").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Change a part").press("Enter")
    page.locator("#mask").focus()
    for key in [*["ArrowRight"] * 9, *["ArrowUp"] * 9, " "]:  # the corner
        page.keyboard.press(key)
    for _ in range(3):
        page.keyboard.press("ArrowDown")
        page.keyboard.press(" ")
    (after,) = generate(page)
    change = np.abs(after.astype(int) - before)
    assert change[20:, :12].mean() < change[:16, 24:].mean() / 2


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
    expect(page.locator("#grid img")).to_be_visible(timeout=30_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#grid .error")).to_have_text("stopped")
    wait_until(lambda: not site.loop.jobs)
    expect(page.locator("#status")).to_contain_text("0 running", timeout=15_000)


def test_the_budget_of_the_slider_is_what_runs(open_page):
    page = open_page()
    page.get_by_label("Model").select_option("small")  # its plans are priced within seconds
    fill(page, label="3", methods=("budget",))
    slider = page.locator("#one").get_by_role("slider", name="budget")
    expect(slider).to_be_visible()
    expect(slider).to_have_attribute("aria-valuetext", "0.3 nats per token")
    slider.fill("1.5")
    slider.press("ArrowRight")
    expect(page.locator("#one .slider .value")).to_have_text("1.55 nats per token")
    with page.expect_request("**/api/images") as asked:
        generate(page)
    assert asked.value.post_data_json["methods"] == ["budget:budget=1.55"]
    view(page)
    page.get_by_text("How it was made").and_(page.locator(":visible")).click()
    expect(page.locator("#facts code")).to_contain_text("budget=1.55")
    rows = page.locator("#facts .numbers")
    numbers = dict(zip(rows.locator("dt").all_inner_texts(), rows.locator("dd").all_inner_texts()))
    assert numbers["budget, nats per token"] == "1.55"
    assert 0 < float(numbers["predicted, nats per token"]) <= 1.55
    page.get_by_role("link", name="Use its settings").click()
    expect(slider).to_have_value("1.55")
