"""When the GPU kernels are chosen, and what is refused at start-up."""

from __future__ import annotations

import pytest
from jaxserve.pallas_kernels import backend
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, page_array_shape, page_bytes, writes_in_place


def test_auto_takes_them_on_a_card_that_runs_them(monkeypatch):
    monkeypatch.setattr(backend, "mosaic_available", lambda interpret=False: (True, ""))
    assert backend.resolve_attention_backend("auto", "gpu") == "mosaic"
    assert backend.resolve_matmul_backend("auto", "gpu") == "mosaic"
    assert backend.resolve_attention_backend("xla", "gpu") == "xla"
    assert backend.resolve_attention_backend("auto", "tpu") == "xla"
    monkeypatch.setattr(backend, "mosaic_available", lambda interpret=False: (False, "an old card"))
    assert backend.resolve_attention_backend("auto", "gpu") == "xla"
    with pytest.raises(ValueError, match="attention_backend: got 'mosaic', which cannot run here \\(an old card\\)"):
        backend.resolve_attention_backend("mosaic", "gpu")


def test_a_cpu_has_the_interpreter_only():
    with pytest.raises(ValueError, match="attention_backend: got 'mosaic' on platform 'cpu'; allowed there: auto, xla"):
        backend.resolve_attention_backend("mosaic", "cpu")
    with pytest.raises(ValueError, match="got 'interpret' on platform 'gpu'"):
        backend.resolve_attention_backend("interpret", "gpu")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (backend.mosaic_reason(512, 64), "head_dim 512 is over 256"),
        (backend.mosaic_reason(128, 4), "page_size 4 is not in 8 to 1024"),
        (backend.mosaic_reason(128, 64, "float32"), "pages of float32 are none of bfloat16, float16, int8, fp8"),
        (backend.mosaic_reason(256, 64, "fp8"), "head_dim 256 is over 128, the most for pages of fp8"),
        (backend.mosaic_reason(128, 16, "int8"), "page_size 16 is under 32, the least for pages of int8"),
        (backend.mosaic_latent_reason(96, 64, 64), "latent vectors of 96 \\+ 64"),
    ],
)
def test_shapes_without_a_kernel(reason, text):
    with pytest.raises(ValueError, match=f"attention_backend: got 'mosaic', but {text}"):
        backend.check_attention_shape("mosaic", "mosaic", reason)
    assert backend.check_attention_shape("auto", "mosaic", reason) == "xla"
    assert backend.check_attention_shape("auto", "cpu_ffi", reason) == "cpu_ffi"


def test_shapes_with_one():
    for head_dim in (64, 80, 96, 128, 256):
        for page_size in (16, 32, 64, 128):
            assert (
                backend.check_attention_shape("mosaic", "mosaic", backend.mosaic_reason(head_dim, page_size))
                == "mosaic"
            )
    assert not backend.mosaic_latent_reason(512, 64, 64)


def test_pages_are_padded_to_what_copies_want():
    spec = AttentionSpec(8, 2, 80, 0.1)
    assert page_array_shape(spec, 5, 16, "mosaic") == (5, 2, 2, 16, 128)
    assert page_bytes(spec, 16, "bfloat16", "mosaic") == 2 * 2 * 16 * 128 * 2
    assert writes_in_place(spec, 16, "bfloat16", "mosaic", "gpu")
    with pytest.raises(ValueError, match="attention backend: got 'mosaic', but head_dim 512 is over 256"):
        page_array_shape(AttentionSpec(8, 2, 512, 0.1), 5, 16, "mosaic")
