"""What crosses between the pool and its workers, mutated and cut."""

import struct

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qarl.rewards.frames import REPLY_BYTES, BadFrame, Frames, frame, pack, unpack

NUMBERS = st.integers() | st.sampled_from([2**63, 10**30, -0.0, 1e308, 5e-324]) | st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "%", "tuple", "\ud800", "\0", "ö", "x" * 50])
KEYS = st.sampled_from(["a", "%", "items", 1, 2.5, None, (1, "a")])
VALUES = st.deferred(
    lambda: (
        SCALARS
        | st.lists(VALUES, max_size=3)
        | st.lists(VALUES, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "%", "items"]), VALUES, max_size=3)
        | st.dictionaries(KEYS, VALUES, max_size=3)
    )
)
many = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@many
@given(VALUES)
@example({"%": "tuple"})
@example({"%": "dict", "items": [[1, 2]]})
@example([(1, [()]), {"%": {1: (2,)}}, {"a": -0.0}])
def test_values_of_rows_cross_as_they_are(value):
    frames = Frames()
    frames.feed(frame({"v": pack(value)}))
    assert repr(unpack(frames.next())["v"]) == repr(value)  # types, order and the sign of zero too


@many
@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_frames_come_whole_however_the_bytes_are_cut(values, draw):
    data = b"".join(frame(pack(value)) for value in values)
    frames, texts = Frames(REPLY_BYTES), []
    while data:
        cut = draw.draw(st.integers(1, len(data)))
        frames.feed(data[:cut])
        data = data[cut:]
        while (text := frames.next()) is not None:
            texts.append(text)
    assert [repr(unpack(text)) for text in texts] == [repr(value) for value in values]


def test_a_header_over_the_limit_is_refused_before_the_rest_comes():
    frames = Frames(REPLY_BYTES)
    frames.feed(struct.pack(">Q", REPLY_BYTES + 1))
    with pytest.raises(BadFrame, match="16,777,217 bytes"):
        frames.next()
