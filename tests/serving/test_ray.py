"""`cspd serve` by Ray Serve: two engines on this machine share the load, and one of them dies."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import ray
from launching import environment, free_port, wait_until
from PIL import Image
from ray import serve

import cspd
from cspd.serving.ray_serve import Settings, app

pytestmark = pytest.mark.slow  # starts Ray
KEY = "a-key.of_16~bytes"
SETTINGS = {"method": "ar", "num_iter": 64, "num_sampling_steps": 50, "cfg": 3.0}  # seconds


@pytest.fixture(scope="module")
def client():
    with pytest.MonkeyPatch.context() as patch:
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "CSPD_API_KEY": KEY}
        for name, value in environment(**settings).items():
            patch.setenv(name, value)  # the processes of Ray have it too
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(Settings(checkpoint="digits32", max_batch=2, device="cpu", min_replicas=2, max_replicas=2)))
        try:
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
                yield client
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture(scope="module")
def outputs():
    return cspd.load("digits32", max_batch=4, device="cpu").sample(["three"] * 4, seed=5, **SETTINGS)


def engines():
    """The processes of the engines."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [ray.get_actor(name, namespace="serve") for name in names if "#Replica#" in name]


def num_ongoing(engine) -> int:
    return ray.get(engine.get_num_ongoing_requests.remote())


def generate(client, seed, **more):
    return client.images.generate(prompt="three", extra_body=SETTINGS | {"seed": seed}, **more)


def assert_same(encoded, output):
    """Batches round differently, so a pixel may differ by 1."""
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    assert np.abs(image.astype(int) - np.asarray(output.pil())).max() <= 1


def test_the_api(client):
    answer = client.models.with_raw_response.list()
    assert [model.id for model in answer.parse()] == ["digits32"]
    assert len(set(answer.headers.get_list("x-request-id"))) == 1  # Ray's proxy gives one too
    with pytest.raises(openai.BadRequestError, match="num_iter") as error:
        client.images.generate(prompt="three", extra_body={"num_iter": 65})
    assert error.value.param == "num_iter"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    *partial, last = client.images.generate(prompt="three", stream=True, partial_images=1, extra_body=SETTINGS)
    assert len(partial) == 1 and last.type == "image_generation.completed"


def test_a_dead_engine_loses_no_image(client, outputs):
    """The load is on both engines. One is killed in the middle; all images come, and are those of their seeds."""
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(generate, client, seed) for seed in (5, 6, 7)]
        stream = generate(client, 8, stream=True, partial_images=3)
        wait_until(lambda: all(map(num_ongoing, engines())), 20)
        victim, _ = engines()
        ray.kill(victim)
        for answer, output in zip(answers, outputs):
            assert_same(answer.result().data[0].b64_json, output)
        *partial, last = stream
        assert [event.partial_image_index for event in partial] == list(range(len(partial)))
        assert_same(last.b64_json, outputs[3])
