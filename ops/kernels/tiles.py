"""Launch parameters of the tuned lowering, from shapes alone.

Tiles change no bits, and nothing is tried out at run time. A tile is (BV, warps): the value
rows of a program, and its warps. What counts is how many heads are in flight, B * HV, for
that is how many programs the multiprocessors share. The figures behind every number are in
docs/performance.md, "Launch parameters"; they are an H200's, which has 132 multiprocessors.
"""

# With fewer heads than this a multiprocessor gets less than one program of 64 rows of 128
# (two to a head); more and smaller programs then fill it.
_LESS_THAN_ONE = 64
# Programs of 16 rows hide a load's way better while fewer heads than this are in flight.
_FEW = 128
# One round of all multiprocessors, 6 programs of 32 rows on each or 4 of 64: one head more
# starts a second round, which a wider tile avoids.
_ROUND_OF_32, _ROUND_OF_64 = 198, 264
# KDA's: the registers of its decays leave room for a few programs less.
_KDA_ROUND_OF_32, _KDA_TWO_ROUNDS = 191, 320
_KDA_RAGGED_WIDE = 192
_RAGGED_FEW = 160
# From here on the state's traffic counts and not how long one program takes.
_MANY = 512
# Heads whose states the caches could hold between two layers: below, they are streamed.
_CACHED, _CACHED_KDA_DECODE = 256, 1024

# Numbers of the state that a thread keeps without spilling, at K <= 128 and above.
_THREAD, _THREAD_WIDE = 128, 64
# And a program of effective queries, in shared memory; for long windows of wide heads.
_SHARED, _SHARED_LONG = 16384, 8192


def recur_tile(
    HV: int, K: int, V: int, batch: int, kda: bool, ragged: bool = False, safe: bool = False
) -> tuple[int, int]:
    """(BV, warps) of verify and decode, by heads in flight."""
    heads = batch * HV
    if kda and K > 224:  # (16, 2) spills with triton 3.6
        tile = (16, 4)
    elif kda and ragged:
        few, wide = heads < _LESS_THAN_ONE, heads >= _KDA_RAGGED_WIDE
        tile = (16 if few else 64 if wide else 32, 2)
    elif kda:
        one_round = _ROUND_OF_32 if safe else _KDA_ROUND_OF_32
        wide = one_round < heads < _KDA_TWO_ROUNDS or heads >= _MANY
        tile = (16 if heads < _LESS_THAN_ONE else 64 if wide else 32, 2)
    elif ragged:
        narrow = heads < _RAGGED_FEW or _ROUND_OF_32 < heads <= _ROUND_OF_64
        tile = (16 if narrow else 32, 2)
    elif K <= 64 and heads >= _MANY:
        tile = (64, 2)
    else:
        tile = (16 if heads < _FEW else 32, 2)
    return _fit(K, V, *tile, _THREAD if K <= 128 else _THREAD_WIDE)


def effective_tile(HV: int, K: int, V: int, batch: int, tokens: int) -> tuple[int, int]:
    """(BV, warps) of verify with exact=False, by heads in flight and by shared memory: at
    most 100 KB a program, which every card from sm_80 on has."""
    heads = batch * HV
    numbers = _SHARED_LONG if K > 128 and tokens > 8 else _SHARED
    BV = 64 if heads <= _LESS_THAN_ONE or K <= 64 else 128
    while V % BV or numbers < BV * K:
        BV //= 2
    return BV, 2 if K <= 64 and heads >= _MANY else 4


def fold_tile(HV: int, K: int, V: int, batch: int, kda: bool) -> tuple[int, int]:
    """(BV, warps) of fold, by heads in flight."""
    BV = 16 if batch * HV < _LESS_THAN_ONE and not kda else 32
    return _fit(K, V, BV, 2, _THREAD)


def streams(heads: int, kda: bool, decode: bool) -> bool:
    """Whether verify and decode read the state as the first to leave the caches.

    Nothing reads it again before the next step has been through all layers.
    """
    return heads <= _CACHED_KDA_DECODE if kda and decode else heads < _CACHED


def _fit(K: int, V: int, BV: int, warps: int, numbers: int) -> tuple[int, int]:
    """The largest tile up to BV that divides V and leaves a thread at most so many
    numbers of the state: more would spill."""
    a_row = (K + 31) // 32 * 4
    while BV > 16 and (V % BV or BV // (4 * warps) * a_row > numbers):
        BV //= 2
    return BV, warps
