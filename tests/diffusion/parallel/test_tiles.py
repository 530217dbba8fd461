"""Tiles of a decoder on two ranks: cut and blended as stock does, each decoded once."""

from accel.diffusion.parallel.tiles import shared_out
from support.parallel import diffusion_ranks as told_to


def test_tiles_are_decoded_once_and_blended_as_stock_does(ranks):
    first, second = ranks.run(told_to.tiles)
    for found in (first, second):
        assert "are not the same on ranks 0 and 1" in found["refused"] and found["restored"]
    for name in ("odd", "batch", "row", "overlap"):
        counts = [found[name][2] for found in (first, second)]
        for off, same, _, every, told in (first[name], second[name]):
            assert off <= 2e-5 and same and not told, name
            assert every > 2 and sum(counts) == every and max(counts) - min(counts) <= every // 2, (name, counts)
    for off, same, own, every, told in (first["small"], second["small"]):  # no larger than a tile: stock cuts nothing
        assert off <= 2e-5 and same and own == every == 1 and not told


def test_tiles_are_shared_out_by_their_size():
    for ranks in (1, 2, 3, 4):
        work = [9, 9, 3, 9, 9, 3, 3, 3, 1]
        shares = shared_out(work, ranks)
        assert sorted(place for share in shares for place in share) == list(range(9))
        loads = [sum(work[place] for place in share) for share in shares]
        assert max(loads) - min(loads) <= max(work)
        assert all(share == sorted(share) for share in shares)
