"""CRC32 of each piece of a tensor's bytes in the file, which several ranks write; and of the header.

With registers that start at zero, CRC32 is linear: a piece's checksum is the sum (XOR) of what each of its parts gives,
shifted by the bytes that follow it. So every rank takes the checksums of what it writes, once, and no byte is read
back.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["MARK", "PIECE", "parts", "pieces", "sealed", "whole"]
PIECE = 2**20  # bytes
# a header that begins so was written by us: no other writer puts that space there
MARK = b'{ "__metadata__":{"distdl.header":"'
_ONES, _POLYNOMIAL = 0xFFFFFFFF, 0xEDB88320


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC32; the highest bit is x⁰."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a, b = a << 1 & _ONES, b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(4096)
def _tables(n: int) -> tuple[list[int], ...]:
    """What ``n`` more bytes make of each byte of a register."""
    factor, square = 1 << 31, 1 << 23  # 1 and x⁸
    while n:
        factor, square, n = _times(square, factor) if n & 1 else factor, _times(square, square), n >> 1
    tables: tuple[list[int], ...] = ([0], [0], [0], [0])
    for bit in range(32):
        image, table = _times(factor, 1 << bit), tables[bit // 8]
        table += [value ^ image for value in table]
    return tables


def _shifted(register: int, n: int) -> int:
    """The register after ``n`` zeros."""
    if not register or not n:
        return register
    a, b, c, d = _tables(n)
    return a[register & 255] ^ b[register >> 8 & 255] ^ c[register >> 16 & 255] ^ d[register >> 24]


@lru_cache(64)
def _of_zeros(n: int) -> int:
    return zlib.crc32(bytes(n))


def pieces(size: int) -> int:
    """How many pieces ``size`` bytes have."""
    return -(-size // PIECE)


def parts(data: memoryview, size: int, offsets: Iterable[int], total: int) -> dict[int, int]:
    """{piece: what these bytes add to its checksum}: runs of ``size`` bytes at rising ``offsets`` of a tensor of
    ``total``."""
    added: dict[int, int] = {}
    piece, register, position = -1, 0, 0
    for i, at in enumerate(offsets):
        run = data[i * size : (i + 1) * size]
        while run:
            if at // PIECE != piece:
                if piece >= 0:
                    added[piece] = _shifted(register, (piece + 1) * PIECE - position)
                piece, register, position = at // PIECE, 0, at
            n = min(len(run), (piece + 1) * PIECE - at)
            register = zlib.crc32(run[:n], _shifted(register, at - position) ^ _ONES) ^ _ONES
            run, at, position = run[n:], at + n, at + n
    if piece >= 0:
        added[piece] = _shifted(register, min((piece + 1) * PIECE, total) - position)
    return added


def whole(reports: Iterable[dict[int, int]], total: int) -> str:
    """The checksums of all pieces of a tensor of ``total`` bytes, in hexadecimal, from the ranks' :func:`parts`."""
    sums = [_of_zeros(min(PIECE, total - start)) for start in range(0, total, PIECE)]
    for table in reports:
        for piece, part in table.items():
            sums[piece] ^= part
    return "".join(f"{value:08x}" for value in sums)


def sealed(head: bytes) -> bytes:
    """The header with its own checksum, taken with zeros in the checksum's place."""
    at = 8 + len(MARK)
    blank = head[:at] + b"0" * 8 + head[at + 8 :]
    return blank[:at] + b"%08x" % zlib.crc32(blank) + blank[at + 8 :]
