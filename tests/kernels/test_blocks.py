"""The head and the norms by kernels, and the steps after a head call, agree with PyTorch."""

import pytest
import torch
from conftest import relative_error

from cspd.heads.calibrated import Segment, _sources, weighted
from cspd.heads.net import guided
from cspd.kernels import head as kernels_head
from cspd.kernels.backbone import join
from mar.head import Head
from mar.model import Norm

BF16 = torch.bfloat16
SIZES = [  # rows, classes, channels, width, depth
    (2, 2, 5, 33, 2),
    (1, 1, 5, 33, 1),
    (3, 2, 16, 48, 3),
    (2, 2, 64, 40, 2),
    (33, 2, 16, 48, 2),
    (1, 2, 16, 1536, 2),
]


def random_head(channels, width, depth):
    head = Head(channels, width, depth, 8)
    for parameter in head.parameters():
        parameter.normal_(std=0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    return head


def random_layers(head, classes, rows):
    return head.modulations(torch.randn(rows, head.width), head.cond_embed(torch.randn(classes, rows, 8)))


@pytest.mark.parametrize("rows,classes,channels,width,depth", SIZES)
def test_head_agrees(rows, classes, channels, width, depth):
    head = random_head(channels, width, depth)
    x, layers = torch.randn(rows, channels), random_layers(head, classes, rows)
    expected = head.denoise(x, head.split(layers))
    assert relative_error(kernels_head.denoise(head, x, head.split(layers)), expected) < 2e-6
    head.fused = kernels_head.denoise
    assert relative_error(head.denoise(x, head.split(layers)), expected) < 2e-6


def test_head_in_bfloat16_is_as_near_to_float32_as_pytorchs():
    head = random_head(16, 48, 3)
    x, layers = torch.randn(3, 16), random_layers(head, 2, 3)
    exact = head.denoise(x, head.split(layers))
    low, low_layers = head.to(BF16), [layer.to(BF16) for layer in layers]
    by_kernels = kernels_head.denoise(low, x, low.split(low_layers))
    assert by_kernels.dtype == torch.float32
    plain = low.denoise(x.to(BF16), low.split(low_layers)).float()
    assert relative_error(by_kernels, exact) < max(relative_error(plain, exact), 0.02)


def test_modulations_are_read_where_they_are():
    """Rows of a table are read by index, some twice and some never, instead of gathered."""
    head = random_head(5, 33, 2)
    layers = random_layers(head, 2, 7)
    at = torch.tensor([6, 0, 6])
    x = torch.randn(3, 5)
    expected = head.denoise(x, head.split([layer[:, at] for layer in layers]))
    assert relative_error(kernels_head.denoise(head, x, head.split(layers), at), expected) < 2e-6


def test_inputs_may_have_any_strides():
    head = random_head(5, 33, 2)
    x, noise, layers = torch.randn(3, 5), torch.randn(3, 5), head.split(random_layers(head, 2, 3))
    out, scale = head.denoise(x, layers), torch.rand(1, 1).expand(3, 1)
    expected = kernels_head.ancestral_step_kernel(x, out, noise, scale.clone(), 0.9, -0.3, 0.4)
    strided = [values.mT.contiguous().mT for values in (x, out, noise)]
    assert not any(values.is_contiguous() for values in strided)
    assert torch.equal(kernels_head.ancestral_step_kernel(*strided, scale, 0.9, -0.3, 0.4), expected)
    by_head = kernels_head.ancestral_step(head, strided[0], layers, strided[2], scale, 0.9, -0.3, 0.4)
    assert relative_error(by_head, expected) < 2e-6
    assert relative_error(kernels_head.denoise(head, strided[0], layers), out) < 2e-6


@pytest.mark.parametrize("update", [None, torch.float32, BF16])
@pytest.mark.parametrize("width", [8, 33, 1280])
def test_joined_norms_agree(width, update):
    norm = Norm(width)
    for parameter in norm.parameters():
        parameter.normal_()
    x, more = torch.randn(2, 3, width), torch.randn(2, 3, width).to(update or BF16)
    more = None if update is None else more.mT.contiguous().mT  # of any strides
    for dtype, error in ((torch.float32, 1e-6), (BF16, 8e-3)):  # the interpreter rounds towards zero
        stream, normed = norm.joined(x, more, dtype)
        by_kernel, own_normed = join(norm, x, more, dtype)
        assert torch.equal(by_kernel, stream)
        assert own_normed.dtype == dtype
        assert relative_error(own_normed.float(), normed.float()) < error


BAD = {
    "columns": lambda x, layers: (x, [tuple(p.mT.contiguous().mT for p in layer) for layer in layers]),
    "strides": lambda x, layers: (x, [(s.contiguous(), *rest) for s, *rest in layers]),
    "rows": lambda x, layers: (x, [tuple(p[:, [0, 1, 2, 2]] for p in layer) for layer in layers]),
}


@pytest.mark.parametrize("bad", BAD)
def test_strides_that_no_kernel_reads_are_an_error(bad):
    change = BAD[bad]
    head = random_head(5, 33, 2)
    x, layers = change(torch.randn(3, 5), head.split(random_layers(head, 2, 3)))
    with pytest.raises(ValueError):
        kernels_head.denoise(head, x, layers)


@pytest.mark.parametrize("rows,classes,channels", [(33, 2, 16), (1, 1, 5), (3, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_ancestral_step_agrees(rows, classes, channels, dtype):
    x, noise = torch.randn(2, rows, channels)
    out = torch.randn(classes, rows, 2 * channels).to(dtype)
    scale = torch.rand(rows, 1) * 3  # torch.lerp changes its formula at 0.5
    eps, v = guided(out, scale)
    expected = torch.addcmul(torch.add(x * 0.9, eps, alpha=-0.3), torch.exp(v * 0.4), noise)
    assert relative_error(kernels_head.ancestral_step_kernel(x, out, noise, scale, 0.9, -0.3, 0.4), expected) < 1e-6


@pytest.mark.parametrize("rows,classes,channels", [(1, 2, 5), (1, 1, 5), (3, 2, 64)])
def test_head_with_its_step_agrees(rows, classes, channels):
    head = random_head(channels, 48, 2)
    layers = head.split(random_layers(head, classes, rows))
    x, noise = torch.randn(2, rows, channels)
    scale = torch.rand(rows, 1) * 3
    expected = kernels_head.ancestral_step_kernel(x, head.denoise(x, layers), noise, scale, 0.9, -0.3, 0.4)
    assert relative_error(kernels_head.ancestral_step(head, x, layers, noise, scale, 0.9, -0.3, 0.4), expected) < 2e-6


@pytest.mark.parametrize("rows,channels,num_steps", [(33, 16, 1), (3, 5, 9)])
@pytest.mark.parametrize("guided", [True, False])
def test_windows_agree(rows, channels, num_steps, guided):
    base, slope, mix = (
        torch.randn(num_steps, 1, 1),
        torch.randn(num_steps, 1, 1),
        torch.randn(num_steps + 1, 2 + num_steps),
    )
    segment = Segment(0, 9, torch.arange(num_steps), base, slope, mix, guided)
    scale, temperature = 3 * torch.rand(rows, 1), torch.rand(rows, 1)
    x, noise = torch.randn(rows, channels), torch.randn(num_steps, rows, channels)
    difference = None
    for classes in (2, 1) if guided else (1, 1):  # the second call has the difference of the first
        out = torch.randn(classes, rows, 2 * channels)
        after, kept = kernels_head.segment_step(x, out, noise, scale, temperature, difference, base, slope, mix[-1])
        eps, v = out.chunk(2, dim=-1)
        difference = (scale - 1) * (eps[0] - eps[1]) if classes == 2 else difference
        eps = eps[0] if difference is None else eps[0] + difference
        assert relative_error(after, weighted(mix[-1], _sources(segment, x, eps, v[0], temperature, noise))) < 2e-6
        assert (kept is None) == (difference is None)
        if guided:
            assert relative_error(kept, difference) < 1e-6
        difference, x = kept, after
