"""These marks skip tests of what older releases lack (docs/support.md)."""

import pytest
from packaging.version import Version

from swift_grpo_ext.upstream.contract import TRIED, tried_packages

IS_NEWEST_SWIFT = tried_packages()["ms-swift"].startswith(TRIED["ms-swift"][-1])
"""Pages describe the newest ms-swift that was tried."""

IS_BEFORE_0_28 = Version(tried_packages()["vllm"]) < Version("0.28")

needs_rates_of_videos = pytest.mark.skipif(
    IS_BEFORE_0_28, reason="vLLM gives Qwen2.5-VL's videos 24 frames a second, whatever they have"
)
