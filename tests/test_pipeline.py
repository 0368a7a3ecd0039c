"""`CspdPipeline`: diffusers' arguments, the engine's images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stores import small_checkpoint, small_vq_checkpoint
from texts import small_text_checkpoint

import cspd
from cspd import CspdPipeline

QUICK = {"num_inference_steps": 5, "num_iter": 2, "method": "ar"}


@pytest.fixture(scope="module")
def pipe():
    pipe = CspdPipeline.from_pretrained(small_checkpoint(), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_images_of_the_engine(pipe):
    result = pipe(class_labels=[3, 1], seed=[5, 9], guidance_scale=2.0, output_type="pt", **QUICK)
    outputs = pipe.engine.sample([3, 1], seed=[5, 9], cfg=2.0, num_sampling_steps=5, num_iter=2, method="ar")
    assert torch.equal(result.images, torch.stack([output.image for output in outputs]))
    assert [output.request for output in result.outputs] == [output.request for output in outputs]
    assert pipe(3, guidance_scale=2.0, seed=5, **QUICK).images[0].tobytes() == outputs[0].pil().tobytes()


def test_the_forms_of_images(pipe):
    results = {form: pipe([3, 1], seed=0, output_type=form, **QUICK).images for form in ("pil", "pt", "np")}
    assert results["pt"].shape == (2, 3, 32, 32) and results["np"].shape == (2, 32, 32, 3)
    assert np.array_equal(results["np"][1].transpose(2, 0, 1), results["pt"][1])
    assert np.array_equal(np.asarray(results["pil"][0]), np.round(results["np"][0] * 255).astype(np.uint8))
    (images,) = pipe([3, 1], seed=0, return_dict=False, **QUICK)
    assert [image.tobytes() for image in images] == [image.tobytes() for image in results["pil"]]


def test_generators_draw_the_seeds(pipe):
    def seeds(generator, num=2):
        return [
            output.request.seed for output in pipe([3], num_images_per_prompt=num, generator=generator, **QUICK).outputs
        ]

    generator = torch.Generator().manual_seed(0)
    first = seeds(generator)
    assert first[0] != first[1] and seeds(generator) != first  # it has moved on
    assert seeds(torch.Generator().manual_seed(0)) == first
    several = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert seeds(several) == [first[0]] * 2
    torch.manual_seed(3)
    usual = seeds(None)
    torch.manual_seed(3)
    assert seeds(None) == usual
    with pytest.raises(ValueError, match="generator"):
        seeds(several, 3)


def test_images_per_prompt(tmp_path, monkeypatch):
    pipe = CspdPipeline.from_pretrained(small_text_checkpoint(tmp_path, monkeypatch), device="cpu")
    given = {"prompt": ["a red fox", "blue"], "negative_prompt": "green", "guidance_scale": 2.0}
    outputs = pipe(**given, num_images_per_prompt=2, seed=4).outputs
    asked = [(output.request.prompt, output.request.seed, output.request.negative_prompt) for output in outputs]
    assert asked == [("a red fox", 4, "green"), ("a red fox", 5, "green"), ("blue", 6, "green"), ("blue", 7, "green")]
    assert {output.request.cfg for output in outputs} == {2.0}


def test_models_are_moved(pipe):
    before = pipe([3], seed=0, output_type="pt", **QUICK).images
    own = CspdPipeline.from_pretrained(small_checkpoint(), device="cpu", torch_dtype=torch.float32)
    assert own.to("cpu") is own and own.device == torch.device("cpu")
    assert torch.equal(own([3], seed=0, output_type="pt", **QUICK).images, before)
    with pytest.raises(ValueError, match="cuda:99"):
        own.to("cuda:99")
    assert torch.equal(own([3], seed=0, output_type="pt", **QUICK).images, before)


@pytest.mark.parametrize(
    "name, wrong, error",
    [
        ("output_type", {"output_type": "latent"}, ValueError),
        ("generator", {"generator": torch.Generator(), "seed": 1}, ValueError),
        ("cfg", {"guidance_scale": -1}, ValueError),
        ("eta", {"eta": 0.5}, TypeError),
    ],
)
def test_bad_arguments(name, wrong, error, pipe):
    with pytest.raises(error, match=name):
        pipe([3], **wrong)


def test_the_denoising_steps_of_vq_models():
    """They have none."""
    with pytest.raises(ValueError, match="num_sampling_steps"):
        CspdPipeline.from_pretrained(small_vq_checkpoint(), device="cpu")([3], num_inference_steps=20)
    with pytest.raises(ValueError, match="torch_dtype"):
        CspdPipeline.from_pretrained(small_vq_checkpoint(), torch_dtype=torch.float16)
    assert cspd.CspdPipeline is CspdPipeline
