"""Every part of a spec that the documents show is one that the server reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from holdfast_service.job_model.job_spec import read

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): blocks
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if (blocks := re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
}
SENT = {"code": "sha256:" + "0" * 64}
"""What the command makes of a folder."""


@pytest.mark.parametrize("page", PAGES)
def test_a_documented_spec_is_read_without_a_fault(page: str) -> None:
    assert PAGES[page]
    for block in PAGES[page]:
        document = {"name": "shown", **yaml.safe_load(block)}
        document |= {name: digest for name, digest in SENT.items() if name in document}
        faults = [f"{fault.path}: {fault.message}" for fault in read(document).faults]
        assert faults == [], block
