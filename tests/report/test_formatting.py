"""Numbers formatted for people."""

import math

import pytest

from qarl.report.formatting import MISSING, bytes_, gib, interval, number, percent, seconds


@pytest.mark.parametrize("show", [number, seconds, gib, bytes_, percent])
@pytest.mark.parametrize("value", [None, math.nan])
def test_a_missing_value_is_a_dash(show, value):
    assert show(value) == MISSING == interval(value, 0.0, 1.0)


NUMBERS = {0.0: "0", 1.23456: "1.23", 12.0: "12", 123456.7: "123,457", 1234567: "1,234,567", -0.00123: "-0.00123"}
SECONDS = {0.0123: "12.3 ms", 1.5: "1.5 s", 59.99: "1 min 00 s", 3599.7: "1 h 00 min", 172_799: "47 h 59 min"}
PERCENT = {0.0: "0%", 1.0: "100%", 0.5: "50.0%", 0.99999: ">99.9%", 7.7e-5: "0.0077%", 0.1234: "12.3%"}


@pytest.mark.parametrize(
    ("show", "texts"),
    [
        (number, NUMBERS | {1e-7: "1.00e-07", math.inf: "∞"}),
        (seconds, SECONDS | {172_800: "2 d 0 h"}),
        (percent, PERCENT),  # never rounded to nothing or everything
        (bytes_, {512: "512 B", 123456789: "118 MiB"}),
        (gib, {4.5678: "4.57 GiB"}),
    ],
)
def test_formats(show, texts):
    assert {value: show(value) for value in texts} == texts


def test_an_interval_has_the_digits_that_its_width_justifies():
    assert interval(0.4213, 0.38, 0.46) == "0.42 [0.38, 0.46]"
    assert interval(0.4213, 0.4203, 0.4223) == "0.421 [0.420, 0.422]"
    assert interval(0.5, None, None) == "0.5"
