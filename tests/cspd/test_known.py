"""What a request is given of an image: pictures and masks of every kind, what is refused, and how they are compared."""

from __future__ import annotations

import io
import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from cspd import Request
from cspd.request import Known, Resized, placed

PICTURE = torch.rand(3, 12, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.zeros(12, 8, dtype=torch.bool)
MASK[2:5, 1:3] = True


def as_pil():
    pixels = (PICTURE * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels), Image.fromarray(MASK.numpy()), torch.from_numpy(pixels).permute(2, 0, 1) / 255


def test_files_pictures_and_tensors_are_the_same(tmp_path):
    image, mask, pixels = as_pil()
    image.save(tmp_path / "image.png")
    mask.convert("RGB").save(tmp_path / "mask.png")
    images = [image, tmp_path / "image.png", str(tmp_path / "image.png"), pixels, pixels.numpy(), pixels.double()]
    masks = [mask, tmp_path / "mask.png", MASK, MASK.numpy(), MASK.float(), MASK.int()]
    knowns = {Known.of(image, mask) for image in images for mask in masks}
    assert len(knowns) == 1
    (known,) = knowns
    assert torch.equal(known.mask, MASK) and torch.allclose(known.image, pixels) and len(repr(known)) < 60
    assert known != Known.of(image, 0.5) != Known.of(image, 0.25) and known != Known.of(1 - pixels, mask)


def test_requests_compare_and_are_written_down():
    request = Request(3, image=PICTURE, mask=MASK)
    same = Request(3, image=PICTURE.clone(), mask=MASK.clone())
    assert request == same and hash(request) == hash(same) and len(repr(request)) < 100
    assert request != Request(3) and request != request.but(mask=~MASK)
    assert request.but(seed=1).known is request.known and pickle.loads(pickle.dumps(request)) == request
    assert json.loads(json.dumps(request.to_dict()))["known"] == request.known.digest
    assert Request(**Request(3).to_dict()) == Request(3)


def test_numbers_of_every_kind_are_read():
    """Also those that PyTorch does not compute with."""
    small, mask = torch.full((3, 12, 8), 0.25), MASK.numpy()
    wanted = Known.of(small, MASK)
    images = [small.to(kind) for kind in (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64)]
    images += [small.numpy().astype(kind) for kind in (np.longdouble, ">f4", np.float16)]
    masks = [MASK.to(kind) for kind in (torch.uint16, torch.uint64, torch.bfloat16)]
    masks += [mask.astype(kind) for kind in (np.uint16, ">i8", np.longdouble)]
    assert {Known.of(image, MASK) for image in images} == {Known.of(small, each) for each in masks} == {wanted}


@pytest.mark.parametrize("image, mask", [(PICTURE.double(), MASK), (PICTURE, MASK.int()), (PICTURE, 1), (None, MASK)])
def test_what_rounds_take_as_it_is_has_the_right_kinds(image, mask):
    with pytest.raises(ValueError, match=r"Known\.of"):
        Known(image, mask)
    with pytest.raises(TypeError, match="known"):
        Request(3, known="x")


def test_tensors_are_copied():
    picture, mask = PICTURE.clone(), MASK.clone()
    known = Known.of(picture, mask)
    picture.zero_(), mask.fill_(True)
    assert known == Known.of(PICTURE, MASK)


@pytest.mark.parametrize(
    "image, mask, advice",
    [
        (PICTURE, None, "mask"),
        (None, MASK, "image"),
        (PICTURE, MASK.T, "mask"),
        (PICTURE, MASK.flatten(), "mask"),
        (PICTURE * 2, MASK, "image"),
        (PICTURE * torch.nan, MASK, "image"),
        (PICTURE[:1], MASK, "image"),
        (torch.full((4, 3), torch.inf), 0.5, "image"),
        (7, MASK, "image"),
        ([[1]], MASK, "image"),
        (PICTURE, MASK.float() * 2, "mask"),
        (PICTURE, 1.5, "mask"),
        (PICTURE, True, "mask"),
        (PICTURE, float("nan"), "mask"),
        (PICTURE, np.array(["a"]), "mask"),
        (PICTURE.to_sparse(), MASK, "image"),
        (PICTURE, MASK.float().to_sparse(), "mask"),
        (PICTURE, MASK.float().to_sparse_csr(), "mask"),
        (torch.nested.nested_tensor([PICTURE]), MASK, "image"),
        (PICTURE.to("meta"), MASK, "image"),
        (PICTURE, MASK.to("meta"), "mask"),
        (PICTURE.to(torch.complex64), MASK, "image"),
        (torch.full((4, 3), 1e300, dtype=torch.float64), 0.5, "image"),  # infinite as float32
        (io.BytesIO(), MASK, "image"),
        (PICTURE, object(), "mask"),
    ],
)
def test_what_is_refused(image, mask, advice):
    with pytest.raises(ValueError, match=advice):
        Request(3, image=image, mask=mask)


def test_a_picture_is_cropped_to_its_middle_and_resized():
    known = Known.of(PICTURE, MASK)
    fitted = known.fitted(4)
    middle = PICTURE[:, 2:10]
    assert (
        fitted.image.shape == (3, 4, 4)
        and (fitted.image - middle.unflatten(1, (4, 2)).unflatten(3, (4, 2)).mean((2, 4))).abs().max() < 0.3
    )
    assert fitted.mask.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]], "made anew where any pixel is"
    assert fitted.name == known.digest and fitted.fitted(4) is fitted
    with pytest.warns(Resized):
        assert known.to_encode(4).shape == (1, 3, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted.to_encode(4).min() >= -1


def test_a_picture_in_a_box():
    """All around it is made, as its border goes on."""
    known = placed(PICTURE, (2, 4, 8, 12), 16)
    assert torch.allclose(known.image[:, 4:, 2:10], PICTURE, atol=1e-6)
    assert not known.mask[4:, 2:10].any() and known.mask.sum() == 256 - 96
    assert torch.equal(known.image[:, :, 0], known.image[:, :, 2])
    for box in ((-1, 0, 4, 4), (0, 0, 0, 4), (9, 0, 8, 4), (0, 16, 4, 1)):
        with pytest.raises(ValueError):
            placed(PICTURE, box, 16)


def test_pasting_leaves_what_is_far_from_the_mask():
    picture = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[0, 0] = True
    made = torch.zeros(4, 4, dtype=torch.bool)
    made[0, 0] = True
    pasted = Known.of(picture, mask).pasted(torch.ones(3, 16, 16), made.flatten())
    assert torch.equal(pasted[:, 6:], picture[:, 6:]) and torch.equal(pasted[:, :, 6:], picture[:, :, 6:])
    assert (pasted[:, 0, 0] == 1).all() and (pasted[:, :2, :2] == 1).all()
    assert (pasted[:, 3:5, 0] - picture[:, 3:5, 0]).min() > 0, "they blend"
