"""The pages "I use ..." print what they say."""

import pytest

from tests.test_docs import run_page

PAGES = ["huggingface.md", "lightning.md", "accelerate.md", "loaders.md"]


@pytest.mark.filterwarnings("ignore:.*set_vital.*is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_says(page):
    blocks = run_page(page)
    assert any(written for _, written in blocks)
    for printed, written in blocks:
        assert printed == written
