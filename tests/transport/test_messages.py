"""What travels with a fragment's rows: nothing is lost, and nothing else is taken for it."""

from __future__ import annotations

import math
import pickle

import pytest

from clusterenv.data.fragment import Cut
from clusterenv.transport.messages import FragmentMeta

PLAIN = FragmentMeta(7, 9, 0.25, [1.5, -2.0], [3, 200], 4, 5, 6, [])
CUTS = PLAIN._replace(cuts=[Cut(3, -1, "it raised “ü”"), Cut(4, 12, "")])


@pytest.mark.parametrize(
    "meta",
    [
        PLAIN,
        CUTS,
        PLAIN._replace(divergence=None, returns=[], lengths=[]),
        PLAIN._replace(divergence=0.0, returns=[math.inf, 1e-300]),
    ],
)
def test_the_description_of_a_fragment_is_unpacked_as_it_was_packed(meta: FragmentMeta) -> None:
    assert FragmentMeta.unpack(meta.pack()) == meta


def test_a_return_that_is_no_number_stays_one() -> None:
    (value,) = FragmentMeta.unpack(PLAIN._replace(returns=[math.nan], lengths=[1]).pack()).returns
    assert math.isnan(value)


@pytest.mark.parametrize("meta", [PLAIN, CUTS])
def test_a_description_that_was_cut_or_altered_is_refused_or_of_the_right_kinds(
    meta: FragmentMeta,
) -> None:
    raw = meta.pack()
    whole = len(PLAIN.pack())
    for size in range(len(raw)):
        if size != whole:  # without the cuts, it is whole
            with pytest.raises(ValueError, match=r"."):
                FragmentMeta.unpack(raw[:size])
    for at in range(len(raw)):
        for flip in (0x01, 0x80, 0xFF):
            altered = bytearray(raw)
            altered[at] ^= flip
            try:
                found = FragmentMeta.unpack(bytes(altered))
            except ValueError:
                continue
            assert len(found.returns) == len(found.lengths)
            assert all(type(length) is int and length > 0 for length in found.lengths)
            assert all(type(count) is int and count >= 0 for count in (*found[:2], *found[5:8]))
            assert all(isinstance(cut, Cut) and type(cut.env) is int for cut in found.cuts)


@pytest.mark.parametrize(
    "tail", [b"{", b"7", b"[7]", b"[[1, 2]]", b"[[1, 2, 3]]", b'[[true, 2, "x"]]', b'{"a": 1}']
)
def test_cuts_that_are_none_are_refused(tail: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        FragmentMeta.unpack(PLAIN.pack() + tail)


def test_a_pickle_is_no_description() -> None:
    for value in (tuple(PLAIN), [0] * 100, "x" * 500):
        with pytest.raises(ValueError, match=r"."):
            FragmentMeta.unpack(pickle.dumps(value))
