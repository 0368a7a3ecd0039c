"""The API of OpenAI's shape, by the official client; request ids, the log, metrics and health."""

from __future__ import annotations

import base64
import io
import json
import logging
import socket
import threading

import numpy as np
import openai
import pytest
from launching import wait_until
from openai.types import ImageEditCompletedEvent, ImageGenCompletedEvent, ImageGenPartialImageEvent
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from serving import link_of, message_of, pixels, served

import cspd
from cspd.cli import _parse
from cspd.pixels import png_of
from cspd.serving import app, loop
from cspd.serving.v1 import MOST_IMAGES

KEY = "a-key.of_16~bytes"
STEPS = {"num_iter": 3, "num_sampling_steps": 5, "cfg": 3.0}
QUICK = STEPS | {"method": "ar", "first_timestep": 950}
LONG = {"method": "ar", "num_iter": 64, "num_sampling_steps": 100}  # many seconds


@pytest.fixture(scope="module")
def site(engines):
    """A site that reports every round."""
    with pytest.MonkeyPatch.context() as patch, served(engines, most=6, most_each=6, key=KEY) as site:
        patch.setattr(loop, "PERIOD", 0.0)
        patch.setattr(loop, "SHARE", 1e9)
        yield site


@pytest.fixture
def client(site):
    with openai.OpenAI(base_url=f"{site.address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def image_of(answer) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.b64_json))))


def assert_same(image, output):
    """Batches round differently, so a pixel may differ by 1."""
    assert np.abs(image.astype(int) - np.asarray(output.pil())).max() <= 1


@pytest.mark.parametrize("prompt, label", [("three", "three"), ("7", 7), ("none", None)])
def test_images_are_the_engines(prompt, label, client, engines):
    """A class by name or number, or none; settings and the method are further fields."""
    settings = {name: value for name, value in STEPS.items() if label is not None or name != "cfg"}
    more = {"seed": 5, "method": "dpm-solver++:head_calls=4", **settings}
    answer = client.images.generate(model="mar", prompt=prompt, n=2, size="32x32", extra_body=more)
    outputs = engines["mar"].sample([label, label], seed=5, method="dpm-solver++", head_calls=4, **settings)
    assert answer.size == "32x32" and answer.output_format == "png" and answer.created > 1e9
    assert answer.usage.output_tokens == answer.usage.total_tokens == 2 * 64
    for data, output in zip(answer.data, outputs, strict=True):
        assert_same(image_of(data), output)
        assert data.seed == output.request.seed and data.guarantee == output.stats.guarantee
        assert data.ran == repr(output.request) and data.url is None


def test_a_prompt_and_a_link(client, engines):
    fields = {"seed": 5, "method": "ar", "negative_prompt": "blue"}
    answer = client.images.generate(model="texts", prompt="a red fox", response_format="url", extra_body=fields)
    (output,) = engines["texts"].generate([cspd.Request(prompt="a red fox", **fields)])
    assert_same(pixels(answer.data[0].url), output)
    assert answer.data[0].b64_json is None


def test_a_random_seed_is_told(client, engines):
    """The seed of the answer gives the same image again. The first model is the default."""
    first, second = (client.images.generate(prompt="three", extra_body=QUICK) for _ in range(2))
    assert first.data[0].seed != second.data[0].seed
    output = engines["mar"].sample("three", seed=first.data[0].seed, **QUICK)
    assert_same(image_of(first.data[0]), output)


def test_partial_images(client, engines):
    more = QUICK | {"seed": 5, "num_iter": 16}
    stream = client.images.generate(prompt="three", n=2, stream=True, partial_images=3, extra_body=more)
    *told, last = list(stream)
    (output, _) = engines["mar"].sample(["three"] * 2, **more)
    finished = {event.seed: event for event in [*told, last] if isinstance(event, ImageGenCompletedEvent)}
    assert sorted(finished) == [5, 6] and isinstance(last, ImageGenCompletedEvent)
    assert_same(image_of(finished[5]), output)
    assert finished[5].usage.output_tokens == 64 and finished[5].type == "image_generation.completed"
    for seed in (5, 6):
        partial = [event for event in told if isinstance(event, ImageGenPartialImageEvent) and event.seed == seed]
        assert [event.partial_image_index for event in partial] == [0, 1, 2]
        assert all(event.type == "image_generation.partial_image" and event.size == "32x32" for event in partial)
        difference = [np.abs(image_of(event).astype(int) - image_of(finished[seed])).mean() for event in partial]
        assert difference == sorted(difference, reverse=True) and difference[-1] > 0


def test_a_stream_without_partial_images(client):
    (event,) = client.images.generate(prompt="three", stream=True, extra_body=QUICK)
    assert event.type == "image_generation.completed" and image_of(event).shape == (32, 32, 3)


def white_mask():
    mask = np.zeros((32, 32), np.uint8)
    mask[16:] = 255
    return Image.fromarray(mask)


def transparent(image):
    """The image, transparent where the mask is white."""
    image = image.convert("RGBA")
    image.putalpha(Image.fromarray(255 - np.asarray(white_mask())))
    return image


@pytest.mark.parametrize("kind", ["white", "transparent", "of the image"])
def test_a_part_is_regenerated(kind, client, engines):
    image = Image.new("RGB", (32, 32), "navy")
    files = {
        "white": {"image": image, "mask": white_mask()},
        "transparent": {"image": image, "mask": transparent(Image.new("RGB", (32, 32)))},
        "of the image": {"image": transparent(image)},
    }[kind]
    files = {name: ("\u0444\u043e\u0442\u043e.png", png_of(each)) for name, each in files.items()}
    more = QUICK | {"seed": 5}
    answer = client.images.edit(model="mar", prompt="three", **files, extra_body=more)
    request = cspd.Request("three", 5, image=image, mask=white_mask(), **QUICK)
    (output,) = engines["mar"].generate([request])
    assert_same(image_of(answer.data[0]), output)
    if kind == "white":
        events = list(client.images.edit(prompt="three", **files, extra_body=more, stream=True, partial_images=1))
        assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
        assert isinstance(events[-1], ImageEditCompletedEvent)
        assert_same(image_of(events[-1]), output)


def test_images_as_data_links(site, client):
    """As a field of the form, here of more than 1 MiB, or as the content of a file."""
    noise = np.random.default_rng(0).integers(0, 256, (600, 600, 4), np.uint8)
    image, link = Image.fromarray(noise), link_of(Image.fromarray(noise))
    more = QUICK | {"seed": 5}
    by_file = client.images.edit(prompt="three", image=png_of(image), extra_body=more)
    by_link = client.images.edit(prompt="three", image=link.encode(), extra_body=more)
    fields = {"prompt": "three", "image": link, **more}
    parts = [f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{fields[name]}\r\n' for name in fields]
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Authorization": f"Bearer {KEY}"}
    answer = site.ask("/v1/images/edits", "".join([*parts, "--x--\r\n"]), **headers)
    assert answer.status == 200
    assert json.load(answer)["data"][0]["b64_json"] == by_link.data[0].b64_json == by_file.data[0].b64_json


def form(client, **fields):
    """The error that a form of an edit leads to."""
    with pytest.raises(openai.BadRequestError) as error:
        client.images.edit(**fields)
    return error.value


def test_bad_forms(client):
    image = png_of(Image.new("RGB", (32, 32)))
    assert "mask" in form(client, prompt="three", image=image).message
    assert form(client, prompt="three", image=b"not an image", mask=image).type == "invalid_request_error"
    assert "image" in form(client, prompt="three", image=[image, image], mask=image).message
    large = png_of(Image.new("1", (5000, 5000)))
    assert "5000" in form(client, prompt="three", image=large, mask=large).message
    assert form(client, prompt="three", image=image, mask=image, n=0).param == "n"


@pytest.mark.parametrize(
    "body", [b"", b"--x", b"--x--", b"--x\r\n\r\n--x--", b"--x\r\n" * 10_000, b"\r\n--x" * 200 + b"--", b"\xff" * 999]
)
@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "multipart/form-data"])
def test_damaged_forms(body, kind, site):
    headers = {"Content-Type": kind, "Authorization": f"Bearer {KEY}"}
    answer = site.ask("/v1/images/edits", body, **headers)
    assert answer.status == 400 and json.load(answer)["error"]["message"]
    assert site.ask("/v1/images/edits", body, Origin="http://evil.example", **headers).status == 403


BAD = [
    ({"prompt": "dragon"}, "prompt"),
    ({"prompt": "a." * 300}, "prompt"),
    ({"prompt": "1,2"}, None),
    ({"n": 11}, "n"),
    ({"size": "1024x1024"}, "size"),
    ({"response_format": "gif"}, "response_format"),
    ({"partial_images": 4}, "partial_images"),
    ({"output_format": "webp"}, "output_format"),
    ({"seed": -1}, "seed"),
    ({"seed": "one"}, "seed"),
    ({"method": "eagle2"}, "method"),
    ({"num_iter": 65}, "num_iter"),
    ({"cfg": "1" * 401}, "cfg"),
    ({"image": "/etc/passwd", "mask": "/etc/passwd"}, None),
    ({"model": "texts", "num_iter": 3}, "num_iter"),
]


@pytest.mark.parametrize("fields, param", BAD, ids=range(len(BAD)))
def test_bad_input(fields, param, client, site):
    with pytest.raises(openai.BadRequestError) as error:
        client.images.generate(prompt="three", extra_body={"model": "mar", **fields})
    assert error.value.type == "invalid_request_error" and error.value.param == param and error.value.code is None
    assert len(error.value.message) < 600 and not site.loop.jobs


def test_other_errors(client, site):
    with pytest.raises(openai.NotFoundError) as error:
        client.images.generate(prompt="three", model="gan")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key="wrong").models.list()
    assert error.value.code == "invalid_api_key"
    for path in ("/v1/none", "/v1/models/none", "/none"):
        answer = site.ask(path, Authorization=f"Bearer {KEY}")
        assert answer.status == 404 and json.load(answer)["error"]["type"] == "invalid_request_error"
    running = client.images.generate(prompt="three", n=6, stream=True, extra_body=LONG)
    wait_until(lambda: len(site.loop.jobs) == 6)
    with pytest.raises(openai.RateLimitError) as error:
        client.images.generate(prompt="three", extra_body=QUICK)
    assert error.value.code == "rate_limit_exceeded" and error.value.response.headers["retry-after"]
    running.close()
    wait_until(lambda: not site.loop.jobs)


def test_a_client_that_leaves_is_cancelled(site, client):
    """Also one that waits for an answer without a stream."""
    made = site.loop.made
    with pytest.raises(openai.APITimeoutError):
        client.images.generate(prompt="three", extra_body=LONG, timeout=0.5)
    wait_until(lambda: not site.loop.jobs)
    assert not site.loop.num_running()  # its slot is free
    assert site.loop.made == made


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_round(stream, site, client, monkeypatch, capsys):
    def generate():
        return list(client.images.generate(prompt="three", stream=stream, extra_body=QUICK))

    with monkeypatch.context() as patch:
        patch.setattr(site.engine.runners["mar"], "admit", lambda given: 1 / 0)
        with pytest.raises(openai.APIError, match="division by zero") as error:
            generate()
    assert error.value.type == "server_error"
    assert generate() and "division by zero" in capsys.readouterr().err


def test_the_models(client):
    assert [model.id for model in client.models.list()] == ["mar", "vq", "texts"]
    model = client.models.retrieve("vq")
    assert model.id == "vq" and model.object == "model" and model.created > 1e9


def test_request_ids_and_the_log(client, site, caplog):
    """An id of the client is kept if it is harmless. The log has it; it has no key and no prompt."""
    with caplog.at_level(logging.INFO, "cspd.serving"):
        answer = client.images.with_raw_response.generate(
            prompt="three", extra_body=QUICK, extra_headers={"X-Request-ID": "from-the-client"}
        )
        assert answer.headers["x-request-id"] == "from-the-client"
        ids = {
            site.ask("/health", **{"X-Request-ID": given}).headers["x-request-id"] for given in ("", "a b", "x" * 129)
        }
        assert len(ids) == 3 and all(len(each) == 32 for each in ids)
        assert site.ask("/api/status", **{"X-Request-ID": "refused"}).status == 401
    first, second = map(json.loads, caplog.messages)
    assert first["request_id"] == "from-the-client" and first["path"] == "/v1/images/generations"
    assert first["status"] == 200 and first["client"] == "127.0.0.1" and first["seconds"] > 0
    assert second["request_id"] == "refused" and second["status"] == 401
    assert KEY not in caplog.text and "three" not in caplog.text


def numbers(site) -> dict[str, float]:
    """The metrics, those of models for `mar`, and the number of answers 200."""
    answer = site.ask("/metrics", Authorization=f"Bearer {KEY}")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    wanted = {"model": "mar", "status": "200"}
    own = [
        sample for sample in samples if all(sample.labels.get(name, value) == value for name, value in wanted.items())
    ]
    return {sample.name: sample.value for sample in own}


def test_metrics(site, client, engines):
    settings = STEPS | {"num_iter": 8, "window": 3}
    client.images.generate(prompt="three", extra_body=QUICK)
    before = numbers(site)
    client.images.generate(prompt="three", extra_body={"seed": 5, "method": "speculative", **settings})
    after = numbers(site)
    output = engines["mar"].sample("three", seed=5, method="speculative", **settings)
    verified, accepted = map(sum, output.stats.by_lag)
    assert verified > accepted > 0

    def change(name):
        return after[name] - before[name]

    assert change("cspd_head_calls_total") == output.stats.head_calls
    assert change("cspd_drafts_verified_total") == verified and change("cspd_drafts_accepted_total") == accepted
    assert change("cspd_image_seconds_count") == 1 and change("cspd_image_seconds_sum") > 0
    assert change("cspd_round_seconds_count") >= 8
    assert change("cspd_answers_total") >= 1
    client.images.generate(model="vq", prompt="three", extra_body={"method": "ar"})
    assert numbers(site)["cspd_round_seconds_count"] == after["cspd_round_seconds_count"]
    assert after["cspd_images_running"] == after["cspd_images_waiting"] == 0 and after["cspd_images_per_second"] > 0
    stream = client.images.generate(prompt="three", n=6, stream=True, extra_body=LONG)
    wait_until(lambda: numbers(site)["cspd_images_running"] == 4)
    assert numbers(site)["cspd_images_waiting"] == 2
    stream.close()
    wait_until(lambda: not site.loop.jobs)
    assert site.ask("/metrics").status == 401


def test_the_description(site):
    """OpenAPI's, and the page that shows it, need no key."""
    described = json.load(site.ask("/openapi.json"))["paths"]
    bodies = {
        path: described[path]["post"]["requestBody"]["content"] for path in described if "post" in described[path]
    }
    assert {path: list(kinds) for path, kinds in bodies.items()} == {
        "/v1/images/generations": ["application/json"],
        "/v1/images/edits": ["multipart/form-data"],
        "/api/images": ["application/json"],
    }
    schema = bodies["/v1/images/generations"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"] and "partial_images" in schema["properties"]
    assert site.ask("/docs").status == 200


def test_under_a_prefix(engines):
    """Of a proxy or of Ray Serve: the description is found and names its own place; the APIs still need the key."""
    with served(engines, prefix="/cspd", key=KEY) as site:
        assert b"'openapi.json'" in site.ask("/docs").read()
        described = json.load(site.ask("/openapi.json"))
        assert described["info"]["version"] == cspd.__version__
        assert {"url": "."} in described["servers"]
        for path in ("/api/models", "/v1/models", "/metrics"):
            assert site.ask(path).status == 401
        assert "'/models'" in message_of(site.ask("/models"))


def test_probes_by_head(site):
    for path, status in (("/health", 200), ("/ready", 200), ("/v1/models", 200), ("/none", 404)):
        answer = site.ask(path, method="HEAD", Authorization=f"Bearer {KEY}")
        assert answer.status == status and answer.read() == b""


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x", None])
@pytest.mark.parametrize(
    "path, said",
    [
        ("/images/generations", "/v1"),
        ("/models", "/v1"),
        ("/v1/images/variations", "/docs"),
        ("/v1/chat/completions", "/docs"),
    ],
)
def test_unknown_routes(path, said, kind, site):
    answer = site.ask(path, b"{}", Authorization=f"Bearer {KEY}", **{"Content-Type": kind})
    assert answer.status == 404
    message = message_of(answer)
    assert path in message and said in message.removeprefix(f"POST '{path}'")


def test_health(engines):
    """A server that finishes its last images takes no new ones."""
    with served(engines) as site:
        assert site.ask("/health").status == site.ask("/ready").status == 200
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(site.make(settings=STEPS | {"num_iter": 32}).read()))
        waiting.start()
        wait_until(lambda: site.loop.jobs)
        site.loop.drain()
        assert site.ask("/health").status == 200 and site.ask("/ready").status == 503
        assert site.make("bea").status == 503
        waiting.join()
        assert b'"finished"' in answers[0]
        wait_until(lambda: site.ask("/health").status == 503)


def test_a_bug_is_answered_and_logged(site, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "cspd.serving"), monkeypatch.context() as patch:
        patch.setattr(site.loop, "status", lambda: 1 / 0)
        answer = site.ask("/api/status", Authorization=f"Bearer {KEY}", **{"X-Request-ID": "mine"})
        wait_until(lambda: caplog.messages)  # the client has its answer first
    assert answer.status == 500 and answer.headers["x-request-id"] == "mine"
    (entry,) = map(json.loads, caplog.messages)
    assert entry["request_id"] == "mine" and "ZeroDivisionError" in entry["error"] and entry["status"] == 500


def test_more_images_than_the_limit(engines):
    """An answer 429 would make the client ask again for ever."""
    with served(engines, most_each=4) as site, openai.OpenAI(base_url=f"{site.address}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError):
            client.images.generate(prompt="three", n=5, extra_body=QUICK)


def test_the_default_limits(engines):
    """The largest n, and as many requests of one client at once."""
    assert _parse(["serve"]).max_per_visitor == MOST_IMAGES
    with served(engines) as site:
        with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as client:
            assert len(client.images.generate(prompt="three", n=MOST_IMAGES, extra_body=QUICK).data) == MOST_IMAGES
            for _ in range(MOST_IMAGES):
                client.images.generate(prompt="three", stream=True, extra_body=LONG)
            assert len(site.loop.jobs) == MOST_IMAGES


def test_retry_after_comes_from_the_queue(client, site):
    """It is as long again as the image whose place is needed has taken, if the last ones took less."""

    def seconds(n):
        with pytest.raises(openai.RateLimitError) as error:
            client.images.generate(prompt="three", n=n, extra_body=QUICK)
        return int(error.value.response.headers["retry-after"])

    for _ in range(2):
        client.images.generate(prompt="three", n=5, extra_body=QUICK)
    running = client.images.generate(prompt="three", n=6, stream=True, extra_body=LONG)
    wait_until(lambda: len(site.loop.jobs) == 6)
    oldest, second, *_ = site.loop.jobs
    oldest.began -= 30
    second.began -= 20
    assert 30 <= seconds(1) <= 40 and 20 <= seconds(2) <= 29 and seconds(3) < 15
    oldest.began -= 1000
    assert seconds(1) == 60
    running.close()
    wait_until(lambda: not site.loop.jobs)


def test_a_server_that_ends_is_unavailable(engines, monkeypatch):
    """For a client whose image is running, and for one whose request is arriving."""
    monkeypatch.setattr(app, "GRACE", 0.2)
    statuses = []

    def ask(client):
        with pytest.raises(openai.InternalServerError) as error:
            client.images.generate(prompt="three", extra_body=LONG)
        statuses.append(error.value.status_code)

    with served(engines) as site:
        arriving = socket.create_connection(("127.0.0.1", site.port), timeout=10)
        lines = ("POST /v1/images/generations HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        arriving.sendall("\r\n".join([*lines, "Content-Length: 9", "", "{"]).encode())
        with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as client:
            waiting = threading.Thread(target=ask, args=[client])
            waiting.start()
            wait_until(lambda: site.loop.num_running())
            site.loop.close()
            waiting.join()
    assert statuses == [503]
    with arriving:
        assert arriving.recv(100).startswith(b"HTTP/1.1 503 ")
