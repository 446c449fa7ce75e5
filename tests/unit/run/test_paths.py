from __future__ import annotations

from pathlib import Path

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.run.paths import ensure_writable_dir, local_path


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3:/bucket/run", "gs://b", "file:///tmp/x"])
def test_urls_are_refused_not_mangled(url):
    with pytest.raises(ConfigurationError, match=f"log_path={url} is a URL"):
        local_path(url)
    with pytest.raises(ConfigurationError, match=r"is a URL"):
        local_path(Path(url))


def test_unwritable_folder_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match=r"log_path=.*/file/run cannot be written: Not"):
        ensure_writable_dir(tmp_path / "file" / "run")
    # Read-only for root as well.
    with pytest.raises(ConfigurationError, match=r"log_path=/proc/self cannot be written"):
        ensure_writable_dir("/proc/self")
