"""Assignment of chunks to lanes: whatever breaks and in whatever order blocks are computed, all arrive and none too
early."""

from __future__ import annotations

from itertools import chain, cycle

from hypothesis import given
from hypothesis import strategies as st

from kvroute_engine.connector.transfer.chunk_scheduler import Chunk, ChunkScheduler

LANES = 3


def covered(pieces: list[Chunk]) -> list[tuple[int, int]]:
    """Return region and position of every block, in order."""
    return sorted((piece.region, place) for piece in pieces for place in range(piece.first, piece.end))


@given(
    region_bytes=st.lists(st.sampled_from([1, 3, 10, 100]), min_size=1, max_size=4),
    first=st.integers(0, 5),
    count=st.integers(1, 20),
    piece_bytes=st.sampled_from([1, 10, 45]),
    data=st.data(),
)
def test_every_block_arrives_once_whenever_lanes_break(
    region_bytes: list[int], first: int, count: int, piece_bytes: int, data: st.DataObject
) -> None:
    """A broken lane has delivered a prefix of its chunks; the others are assigned again to any lane."""
    stripe = ChunkScheduler(region_bytes, first, count, least=1, most=piece_bytes)
    ready = [0] * len(region_bytes)
    in_flight: dict[int, list[Chunk]] = {lane: [] for lane in range(LANES)}
    after = dict.fromkeys(in_flight, -1)
    arrived: list[Chunk] = []
    for lane in in_flight:
        assert stripe.begin(lane) == 1

    def settle(lane: int, delivered: int) -> None:
        arrived.extend(in_flight[lane][:delivered])
        if delivered:
            after[lane] = in_flight[lane][delivered - 1].number
        in_flight[lane] = []

    def take(lane: int, ready: list[int] | None) -> bool:
        piece = stripe.take(lane, ready)
        if piece:
            assert piece.number > max([after[lane], *(sent.number for sent in in_flight[lane])])
            assert piece.count == 1 or piece.count * region_bytes[piece.region] <= piece_bytes
            assert ready is None or piece.end <= ready[piece.region]
            in_flight[lane].append(piece)
        return piece is not None

    for action, lane in data.draw(
        st.lists(st.tuples(st.sampled_from(["take", "break", "compute"]), st.integers(0, LANES - 1)), max_size=60)
    ):
        match action:
            case "take":
                take(lane, ready)
            case "break":
                turn = stripe.turn(lane)
                settle(lane, data.draw(st.integers(0, len(in_flight[lane]))))
                assert stripe.begin(lane, after[lane]) == stripe.turn(lane) > turn
            case "compute":
                region = data.draw(st.integers(0, len(ready) - 1))
                ready[region] = data.draw(st.integers(ready[region], first + count))
    while not stripe.dealt:
        assert take(data.draw(st.integers(0, LANES - 1)), None)
    assert stripe.dealt
    for lane in in_flight:
        settle(lane, len(in_flight[lane]))
    assert covered(arrived) == [(region, first + place) for region in range(len(ready)) for place in range(count)]


def test_chunks_shrink_towards_the_end() -> None:
    """A lane gets its share of half of the rest: 4 lanes and 100 blocks of 1 byte, between 3 and 10 bytes per chunk."""
    stripe = ChunkScheduler([1], 0, 100, least=3, most=10)
    for lane in range(4):
        stripe.begin(lane)
    sizes = []
    while piece := stripe.take(0):
        sizes.append(piece.count)
    assert sizes == [10, 10, 10, 8, 7, 6, 6, 5, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]


def test_two_lanes_and_two_regions_by_hand() -> None:
    """Two regions of three blocks, two blocks per chunk; the second region is computed later, and lane 0 breaks."""
    stripe = ChunkScheduler([10, 10], 4, 3, least=20, most=20)
    stripe.begin(0)
    stripe.begin(1)
    ready = [7, 0]
    assert stripe.take(0, ready) == Chunk(region=0, first=4, count=2, number=0)
    assert stripe.take(0, ready) == Chunk(region=0, first=6, count=1, number=1)
    assert stripe.take(1, ready) is None
    assert not stripe.dealt
    ready[1] = 5
    assert stripe.take(1, ready) == Chunk(region=1, first=4, count=1, number=0)
    assert stripe.take(1, ready) is None  # its other blocks are not computed yet
    assert stripe.begin(0, after=0) == 2
    assert stripe.take(1, ready) == Chunk(region=0, first=6, count=1, number=1)
    assert stripe.take(0) == Chunk(region=1, first=5, count=2, number=2)
    assert stripe.dealt
    stripe.begin(0)
    assert not stripe.dealt  # lane 0 has lost this chunk a second time
    assert stripe.take(1, ready) == Chunk(region=1, first=5, count=2, number=2)
    assert stripe.dealt


@given(
    region_bytes=st.lists(st.sampled_from([1, 3, 10]), min_size=1, max_size=5),
    count=st.integers(1, 12),
    most=st.sampled_from([2, 15, 1000]),
    turns=st.lists(st.tuples(st.integers(0, LANES - 1), st.booleans(), st.booleans()), max_size=30),
)
def test_chunks_of_several_regions_are_taken_together(
    region_bytes: list[int], count: int, most: int, turns: list[tuple[int, bool, bool]]
) -> None:
    """Lanes that take one chunk and lanes that take several share the blocks. Lost chunks are cut to the size of the
    lane that takes them."""
    stripe = ChunkScheduler(region_bytes, 0, count, most=4, least=1)
    arrived: list[Chunk] = []
    for lane in range(LANES):
        stripe.begin(lane)
    for lane, together, lost in chain(turns, cycle([(0, True, False)])):
        if stripe.dealt:
            break
        if together:
            pieces = stripe.take_together(lane, None, most=most, least=2)
        else:
            piece = stripe.take(lane)
            assert piece is not None
            pieces = [piece]
        nbytes = sum(piece.count * region_bytes[piece.region] for piece in pieces)
        assert nbytes <= (most if together else 4) or (len(pieces), pieces[0].count) == (1, 1)
        if lost:
            stripe.begin(lane, pieces[0].number - 1)
        else:
            arrived += pieces
            stripe.begin(lane, pieces[-1].number)
    assert covered(arrived) == [(region, place) for region in range(len(region_bytes)) for place in range(count)]


def test_a_message_has_room_for_the_chunks_taken_together() -> None:
    """Lost chunks may be many small ones."""
    stripe = ChunkScheduler([1] * 1500, 0, 1, most=1)
    stripe.begin(0)
    assert [len(stripe.take_together(0, None, most=10_000, least=10_000)) for _ in range(3)] == [1024, 476, 0]


def test_regions_taken_together_by_hand() -> None:
    """Three regions of four blocks of 10 bytes; 100 bytes together are two regions and half of the third."""
    stripe = ChunkScheduler([10, 10, 10], 0, 4, most=20)
    stripe.begin(0)
    ready = [4, 4, 3]
    first = stripe.take_together(0, ready, most=100, least=100)
    assert first == [Chunk(0, 0, 4, 0), Chunk(1, 0, 4, 1), Chunk(2, 0, 2, 2)]
    assert stripe.take_together(0, ready, most=100, least=100) == [Chunk(2, 2, 1, 3)]
    assert stripe.take_together(0, ready, most=100, least=100) == []
    stripe.begin(0, after=0)
    assert stripe.take(0) == Chunk(1, 0, 2, 4), "a lane that takes one chunk gets 20 bytes of a lost one"
    assert stripe.take_together(0, None, most=45, least=45) == [Chunk(1, 2, 2, 5), Chunk(2, 0, 2, 6)]
