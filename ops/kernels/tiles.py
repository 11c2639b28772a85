"""Launch parameters of the tuned lowering, from shapes alone, with what was measured.

Tiles change no bits, and nothing is tried out at run time.
"""


def recur_tile(
    HV: int, K: int, V: int, batch: int, kda: bool, ragged: bool = False
) -> tuple[int, int]:
    """(BV, warps) of verify and decode, by heads in flight.

    H200, CUDA graph, cold L2, us, D = 8; GDN: 30 layers of 16/32 heads, KDA: 20 layers
    of 32/32; verify (decode):

    heads     32         256        1024         4096
    GDN
    (16, 2)   163 (102)  488 (346)  1504         5607
    (32, 2)   183 (113)  440 (323)  1254 (1115)  4459 (4220)
    (64, 2)   239 (125)  440 (334)  1388 (1170)  4596 (4320)
    (64, 4)   184 (117)  447 (355)  1275 (1142)  4539 (4281)
    KDA
    (16, 2)   136 (103)  513 (375)  1623         6086
    (32, 2)   145 (108)  396 (317)  1291 (966)   4671 (3323)
    (64, 2)   200 (131)  334 (266)  1060 (866)   3614 (2945)
    (64, 4)   150 (113)  400 (325)  1308 (1011)  4760 (3518)

    KDA, 69 layers of 12/12, 12, 96 and 384 heads: (16, 2): 405 (267), 819 (543), 2082;
    (32, 2): 446 (286), 690 (470), 1673 (1302); (64, 2): 605 (367), 691 (517), 1832
    (1343). Four programs of (64, 2) fit on a multiprocessor: 264 heads are one round of
    them, 384 one and a half.

    Ragged, where later blocks of tokens may follow, full rows (half of the tokens, as
    compact has them); GDN at 192, 384, 576, 768 and 1536 heads: 48 layers of 16/48; KDA at
    12, 96 and 384: 69 layers of 12/12:

    heads     32         128        192        256        384         576    1024   4096
    GDN
    (16, 2)   166 (123)  250 (209)  628 (479)  418 (327)  1012 (765)  1454   1515   5713
    (32, 2)   168 (122)  311 (242)  513 (433)  500 (352)  907 (693)   1268   1316   4668
    (64, 2)   219 (152)  316 (226)  628 (507)  415 (349)  1080 (757)  1441   1380   4635
    heads     12         32         96         256        384          1024   4096
    KDA
    (16, 2)   366 (289)  154 (119)  623 (535)  456 (360)  2158 (1694)  2050   7806
    (32, 2)   408 (309)  139 (107)  589 (493)  347 (286)  1672 (1294)  1252   4610
    (64, 2)   583 (433)  181 (137)  623 (533)  292 (246)  1683 (1204)  975    3468

    K = 64, 30 layers of 64/128 heads, at 512, 1024 and 16384 heads: (32, 2) 295 (211), 501
    (335), 5788 (4305); (64, 2) 287 (215), 463 (328), 4956 (4397).
    """
    heads = batch * HV
    if kda and K > 224:  # (16, 2) spills with triton 3.6
        tile = (16, 4)
    elif kda and ragged:
        tile = (16 if heads < 24 else 32 if heads < 192 else 64, 2)
    elif kda:
        wide = 192 <= heads < 320 or heads >= 512
        tile = (16 if heads < 64 else 64 if wide else 32, 2)
    elif ragged:  # 198 heads are one round of (32, 2), 264 of (64, 2)
        small = heads < 160 or 198 < heads <= 264
        tile = (16 if small else 64 if heads >= 2048 else 32, 2)
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


def fold_tile(HV: int, K: int, V: int, batch: int) -> tuple[int, int]:
    """(BV, warps) of fold.

    H200, shapes as above, 8 rows, us at B = 1 / 8 / 32 / 128: (32, 2): 47 / 275 / 1042
    / 4178, KDA 37 / 199 / 729 / 2905; (16, 2): 44 / 270 / 1046 / 4171, KDA 41 / 260 /
    1001 / 3984; (64, 2): 54 / 315 / 1186 / 4763. Reading and writing the state once
    takes 957 / 3821 at B = 32 / 128; four rows take 1033 / 4140.
    """
    return _fit(K, V, 32, 2, 128)


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
