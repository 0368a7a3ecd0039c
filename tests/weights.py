"""Random weights of the bundled models, files of them, and the error that reading a file raises."""

import pytest
import torch
from safetensors.torch import save_file

from mar.checkpoint import create_mar
from mar.tensors import CheckpointError

DRAFT, TARGET, VAE = "mar_digits32_draft", "mar_digits32", "kl_digits32"


def random_weights(model, seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=g) for name, t in model.state_dict().items()}


@pytest.fixture(scope="module", name="weights")
def draft_weights():
    return random_weights(create_mar(DRAFT), 0)


@pytest.fixture(name="save")
def file_writer(tmp_path):
    """Writes a file of this name: bytes, safetensors with metadata, or a torch pickle; returns its path."""

    def write(name, content, metadata=None, **options):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".safetensors":
            save_file(content, path, metadata)
        else:
            torch.save(content, path, **options)
        return path

    return write


def refusal(load, path, *args, **kwargs):
    """The message of the error that loading raises; it names the file and is free of torch's advice to run its code."""
    with pytest.raises(CheckpointError) as caught:
        load(path, *args, **kwargs)
    message = str(caught.value)
    assert str(path) in message
    assert not any(word in message for word in ("weights_only", "trust", "\x1b"))
    return message
