"""A report of 500 steps, 24 layers of experts, is under 5 MB and opens in under 2 seconds, in a real browser, from disk."""

import pytest
import report as benchmark
from synthetic_run import write_run

from gspo.reporting.html import write_report


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(write_run(tmp_path_factory.mktemp("run"), 500, layers=24))


def test_a_report_of_500_steps_is_under_5_mb(page):
    assert page.stat().st_size < 5_000_000


@pytest.mark.skipif(not benchmark.CHROMIUM.exists(), reason="needs /usr/bin/chromium")
def test_a_report_of_500_steps_opens_in_under_2_seconds(page):
    assert min(benchmark.opened_ms(page)[1] for _ in range(2)) < 2000  # the least: other programs run beside the tests
