"""Launch parameters of the tuned lowering, from shapes alone, with what was measured.

Tiles change no bits, and nothing is tried out at run time.
"""


def recur_tile(
    HV: int, K: int, V: int, batch: int, kda: bool, ragged: bool = False, safe: bool = False
) -> tuple[int, int]:
    """(BV, warps) of verify and decode, by heads in flight.

    H200, CUDA graph, cold L2, us, verify with D = 8; GDN: 30 layers of 16/32 heads, but
    48 of 16/48 for 192 and 384; KDA: 20 layers of 32/32; safe: 69 of 12/12:

    heads     32    64    128   192   256   384   1024  4096
    GDN
    (16, 2)   141   178   246   559   419   905   1283  4776
    (32, 2)   156   176   246   512   390   869   1099  3866
    (64, 2)         230   264   591   407   1035  1255  4141
    (64, 4)         179   247   511   386   916   1107  3963
    (32, 4)   140   174   242   577   416   925   1287  4803
    KDA
    (16, 2)   120         284   325   444   599   1429  5354
    (32, 2)   140         176   311   320   468   1163  4327
    (64, 2)               189   254   288   475   919   3208
    (64, 4)               176   312   322   470   1177  4377
    (32, 4)   119         285   324   445   605   1446  5414

    heads     12    96    192   384
    safe
    (16, 2)   354   610   1048  1807
    (32, 2)   434   562   798   1402
    (64, 2)         627   875   1630
    (64, 4)         569   767   1389

    decode, at 32, 256, 1024 and 4096 heads: GDN (16, 2) 102, 346; (32, 2) 113, 323,
    1115, 4220; (64, 2) 125, 334, 1170, 4320; (64, 4) 117, 355, 1142, 4281. KDA (16, 2)
    103, 375; (32, 2) 108, 317, 966, 3323; (64, 2) 131, 266, 866, 2945; (64, 4) 113, 325,
    1011, 3518. Safe at 12, 96 and 384: (16, 2) 267, 543; (32, 2) 286, 470, 1302; (64, 2)
    367, 517, 1343.

    Ragged, where later blocks of tokens may follow, full rows; KDA at 12, 96 and 384 heads
    is safe. GDN's (64, 2) spills with triton 3.9:

    heads     32    128   192   256   384   576   1024  4096
    GDN
    (16, 2)   161   249   584   419   924   1306  1354  5058
    (32, 2)   162   254   520   471   891   1228  1219  4266
    (64, 2)   226   271   590   408   1046  1359  1264  4234
    heads     12    32    96    256   384   1024
    KDA
    (16, 2)   377   142   618   452   1983  1464
    (32, 2)   470   150   619   325   1598  1180
    (64, 2)   623   191   646   298   1654  960

    30 layers, K = 64 at 128, 1024 and 4096 heads: (16, 2) 151, 496, 1643; (32, 2) 142, 433,
    1315; (64, 2) 173, 427, 1233. K = 256 at 8, 64 and 256: (16, 2) 163, 443, 1225; (16, 4)
    153, 587, 1876; (32, 2) 206, 381, 1152, but triton 3.8 spills it.
    """
    heads = batch * HV
    if kda and K > 224:  # (16, 2) spills with triton 3.6
        tile = (16, 4)
    elif kda and ragged:
        tile = (16 if heads < 64 else 32 if heads < 192 else 64, 2)
    elif kda:  # 198 heads are one round of (32, 2), 264 of (64, 2)
        wide = (198 if safe else 191) < heads < 320 or heads >= 512
        tile = (16 if heads < 64 else 64 if wide else 32, 2)
    elif ragged:
        tile = (16 if heads < 160 or 198 < heads <= 264 else 32, 2)
    elif K <= 64 and heads >= 512:
        tile = (64, 2)
    else:
        tile = (16 if heads < 128 else 32, 2)
    return _fit(K, V, *tile, 128 if K <= 128 else 64)


def effective_tile(HV: int, K: int, V: int, batch: int, tokens: int) -> tuple[int, int]:
    """(BV, warps), by heads in flight and by shared memory: at most 100 KB a program.

    H200, CUDA graph, cold L2, us, D = 8, BV = 32 / 64 / 128. GDN, 30 layers of 16/32
    heads: 131 / 127 / 140 at 32 heads, 459 / 253 / 252 at 256, 1661 / 897 / 727 at
    1024, 6374 / 3359 / 2380 at 4096; D = 16: - / 160 / 188 and - / 4448 / 3157. KDA, 20
    layers of 32/32: 106 / 104 / 115, 336 / 227 / 196, 1143 / 631 / 535, 4317 / 2268 /
    1765. KDA, 69 layers of 12/12: 532 / 433 / 405 at 96 heads. Three programs of 128
    rows fit on a multiprocessor, where two take a third longer. 64 heads are one program
    of 64 rows to a multiprocessor: - / 153 / 163.

    Two warps (four) of 64 rows at K = 64, 30 layers of 64/128 heads: 138 (137) at 256
    heads, 196 (203) at 512, 274 (335) at 1024, 3390 (4294) at 16384.
    """
    heads = batch * HV
    numbers = 8192 if K > 128 and tokens > 8 else 16384  # of the state, a program
    BV = 64 if heads <= 64 or K <= 64 else 128
    while V % BV or numbers < BV * K:
        BV //= 2
    return BV, 2 if K <= 64 and heads >= 512 else 4


def fold_tile(HV: int, K: int, V: int, batch: int, kda: bool) -> tuple[int, int]:
    """(BV, warps) of fold.

    H200, shapes as above, 4 rows, us at B = 1 / 8 / 128: (32, 2): 39.7 / 260 / 4113, KDA
    30.9 / 179 / 2785; (16, 2): 38.1 / 260 / 4122, KDA 33.6 / 207 / 3139; (64, 4): 39.4 /
    261 / 4127, KDA 31.6 / 181 / 2786; (64, 2): 44 / 265 / 4145, KDA 34 / 183 / 2807. GDN's
    other heads at B = 1, (32, 2) and (16, 2): 8 of 256: 43.2, 39.3; 16: 31.0, 30.0; 48:
    83.3, 82.8; 128 of 64: 39.1, 42.8.
    """
    BV = 16 if batch * HV < 64 and not kda else 32
    return _fit(K, V, BV, 2, 128)


def streams(heads: int, kda: bool, decode: bool) -> bool:
    """Whether verify and decode read the state as the first to leave the caches.

    Nothing reads it again before the next step has been through all layers. H200, us
    without (with) it, a layer's kernel between a product, an addition and another:

    heads       32         96         192        256        512        1024         4096
    GDN verify  172 (154)  263 (243)  611 (582)  443 (438)  -          1247 (1259)  4472 (4494)
    GDN decode  146 (126)  237 (214)  540 (523)  385 (386)  660 (655)  1112 (1139)  4200 (4340)
    KDA verify  152 (143)  203 (189)  287 (286)  313 (318)
    KDA decode  128 (117)  191 (161)  274 (235)  304 (269)  533 (459)  870 (827)    2965 (3027)

    30 layers of 16/32 heads, 192: 48 of 16/48; KDA 20 of 32/32. GDN from 1024 on: 30
    layers one after another. KDA, 69 layers of 12/12, 384 heads: verify 1569 (1611),
    decode 1419 (1226); 1536 heads: decode 4340 (4341).
    """
    return heads <= 1024 if kda and decode else heads < 256


def _fit(K: int, V: int, BV: int, warps: int, numbers: int) -> tuple[int, int]:
    """The largest tile up to BV that divides V and leaves a thread at most so many
    numbers of the state: more would spill."""
    a_row = (K + 31) // 32 * 4
    while BV > 16 and (V % BV or BV // (4 * warps) * a_row > numbers):
        BV //= 2
    return BV, warps
