#!/usr/bin/env python3
"""Prints the table of golden.rs: responses of DH-HMAC-CHAP by another implementation (hashlib, hmac, pow).

    python3 drivers/nvme-auth/src/tests/golden.py
"""

import base64
import hashlib
import hmac
import zlib

HASHES = {"sha256": hashlib.sha256, "sha384": hashlib.sha384, "sha512": hashlib.sha512}
HOST = b"nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
SUBSYSTEM = b"nqn.2026-11.io.ringbolt:a"
# Bits of the prime, and of an exponent; the constant X of RFC 7919, appendix A.
GROUPS = {0: (0, 0), 2048: (256, 560316), 3072: (320, 2625351), 4096: (384, 5736041),
          6144: (384, 15705020), 8192: (448, 10965728)}
TRANSACTION = 0x1234


def prime(bits):
    """By the formula of RFC 7919, from the digits of e."""
    term, total, count, places = 1 << bits, 0, 1, bits
    while term:
        total, term, count = total + term, term // count, count + 1
    return (1 << bits) - (1 << bits - 64) + (((total >> places - (bits - 130)) + GROUPS[bits][1]) << 64) - 1


def fill(first, count):
    return bytes((first + index) % 256 for index in range(count))


def text(kind, key):
    return f"DHHC-1:{kind:02}:{base64.b64encode(key + zlib.crc32(key).to_bytes(4, 'little')).decode()}:"


def transformed(kind, key, nqn):
    return hmac.new(key, nqn + b"NVMe-over-Fabrics", [None, *HASHES.values()][kind]).digest() if kind else key


def response(function, key, challenge, sequence, label, one, other, shared):
    if shared is not None:
        challenge = hmac.new(function(shared).digest(), challenge, function).digest()
    numbers = sequence.to_bytes(4, "little") + TRANSACTION.to_bytes(2, "little") + b"\0"
    return hmac.new(key, challenge + numbers + label + one + b"\0" + other, function).digest()


for name, function in HASHES.items():
    for kind in range(4):
        length, size = [32, 32, 48, 64][kind], function().digest_size
        key, controller_key = fill(7, length), fill(99, length)
        for bits, (exponent_bits, _) in GROUPS.items():
            if bits > 2048 and kind != 1:
                continue
            # In the order in which an exchange takes them: C1, both exponents, C2.
            c1, *exponents, c2 = fill(1, size), fill(2, exponent_bits // 8), fill(3, exponent_bits // 8), fill(4, size)
            shared = None
            if bits:
                x, y = (int.from_bytes(e, "big") | 1 << exponent_bits - 1 for e in exponents)
                shared = pow(pow(2, x, prime(bits)), y, prime(bits)).to_bytes(bits // 8, "big")
            key1, key2 = transformed(kind, key, HOST), transformed(kind, controller_key, SUBSYSTEM)
            r1 = response(function, key1, c1, 1, b"HostHost", HOST, SUBSYSTEM, shared)
            r2 = response(function, key2, c2, 2, b"Controller", SUBSYSTEM, HOST, shared)
            group = f"Ffdhe{bits}" if bits else "Null"
            both = hashlib.sha256(r1 + r2).hexdigest()
            print(f'    (AuthHash::{name.capitalize()}, {kind}, DhGroup::{group}, "{both}"),')
for kind, length in ((1, 32), (0, 48), (3, 64)):
    print(text(kind, fill(7, length)))
