"""Names that SGLang's vendors know."""

from __future__ import annotations

from sgl_aspects.platforms.cuda import CudaPlatform, CudaSRTPlatform
from sgl_aspects.platforms.rocm import RocmPlatform, RocmSRTPlatform


def test_sglangs_names_for_the_same_platforms_exist() -> None:
    assert CudaSRTPlatform is CudaPlatform
    assert RocmSRTPlatform is RocmPlatform
    assert CudaPlatform().support_device_graph() is CudaPlatform().support_cuda_graph()
