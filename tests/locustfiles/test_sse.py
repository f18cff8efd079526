"""The event reader, against the grammar of the standard and any split of the bytes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locustfiles.sse import Event, EventTooLarge, SseReader


def read(*pieces: bytes, max_event_bytes: int = 1 << 20) -> list[Event]:
    reader = SseReader(max_event_bytes)
    return [event for piece in pieces for event in reader.feed(piece)]


def data(*pieces: bytes) -> list[bytes]:
    return [event.data for event in read(*pieces)]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_line_ends(end):
    assert data(b"data: a" + end + end + b"data: b" + end + end) == [b"a", b"b"]


def test_crlf_split_between_two_reads_is_one_line_end():
    assert data(b"data: a\r", b"\n\r", b"\ndata: b\r\n\r\n") == [b"a", b"b"]


def test_one_space_behind_the_colon_is_optional_and_only_one_is_dropped():
    assert data(b"data:a\n\ndata: a\n\ndata:  a\n\n") == [b"a", b"a", b" a"]


def test_several_data_lines_are_joined_by_lf():
    assert data(b"data: a\ndata\ndata: b\n\n") == [b"a\n\nb"]


def test_comments_and_unknown_fields_are_no_events():
    assert data(b": keep-alive\n\nid: 7\nretry: 10\nfoo: bar\n\n: x\ndata: a\n\n") == [b"a"]


def test_event_type_belongs_to_its_event_only():
    assert read(b"event: error\ndata: a\n\ndata: b\n\n") == [Event(b"error", b"a"), Event(b"", b"b")]


def test_an_event_line_without_data_is_dropped_with_its_type():
    assert read(b"event: ping\n\ndata: a\n\n") == [Event(b"", b"a")]


def test_bom_is_dropped_wherever_it_is_split():
    assert data(b"\xef", b"\xbb", b"\xbfdata: a\n\n") == [b"a"]
    assert data(b"data: \xef\xbb\xbf\n\n") == [b"\xef\xbb\xbf"]


def test_an_event_without_its_blank_line_comes_out_at_the_end_only():
    reader = SseReader()
    assert reader.feed(b"data: a\ndata: b") == []
    assert reader.finish() == [Event(b"", b"a\nb")]
    assert reader.finish() == []


def test_a_line_that_never_ends_is_bounded():
    reader = SseReader(max_event_bytes=1000)
    reader.feed(b"data: " + b"x" * 900)
    with pytest.raises(EventTooLarge):
        reader.feed(b"x" * 100)


def test_data_lines_that_never_end_are_bounded():
    reader = SseReader(max_event_bytes=1000)
    for _ in range(166):  # each counts 6 bytes: the value and the LF that joins them
        reader.feed(b"data: 12345\n")
    with pytest.raises(EventTooLarge):
        reader.feed(b"data: 12345\n")


def test_a_megabyte_event_in_small_reads():
    payload = b"x" * (1 << 20)
    stream = b"data: " + payload + b"\n\n"
    pieces = [stream[i : i + 1448] for i in range(0, len(stream), 1448)]
    reader = SseReader()
    assert [e.data for piece in pieces for e in reader.feed(piece)] == [payload]


_lines = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b": c",
        b"event: e",
        b"id: 1",
        b"retry: 5",
        b"",
        "data: é€😀".encode(),
        b"d",
    ]
)


@given(
    st.booleans(),
    st.lists(st.tuples(_lines, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=30),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_any_split_yields_the_same_events(bom, lines, cuts):
    stream = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + end for line, end in lines)
    whole_reader = SseReader()
    whole = whole_reader.feed(stream) + whole_reader.finish()
    edges = sorted({0, len(stream), *(c for c in cuts if c < len(stream))})
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    reader = SseReader()
    assert [e for piece in pieces for e in reader.feed(piece)] + reader.finish() == whole
    by_byte = SseReader()
    assert [
        e for i in range(len(stream)) for e in by_byte.feed(stream[i : i + 1])
    ] + by_byte.finish() == whole
