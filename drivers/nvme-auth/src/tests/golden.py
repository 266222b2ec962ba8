#!/usr/bin/env python3
"""Prints the tables of golden.rs and concatenation.rs: responses and generated keys
of DH-HMAC-CHAP by another implementation (hashlib, hmac, pow).

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


def response(function, key, challenge, sequence, label, one, other, shared, concatenation=0):
    if shared is not None:
        challenge = hmac.new(function(shared).digest(), challenge, function).digest()
    numbers = sequence.to_bytes(4, "little") + TRANSACTION.to_bytes(2, "little") + bytes([concatenation])
    return hmac.new(key, challenge + numbers + label + one + b"\0" + other, function).digest()


def shared_value(bits, exponents):
    x, y = (int.from_bytes(e, "big") | 1 << GROUPS[bits][0] - 1 for e in exponents)
    return pow(pow(2, x, prime(bits)), y, prime(bits)).to_bytes(bits // 8, "big")


def generated(name, shared, c1, c2):
    """-> the identity and the key of TLS (Base 2.1, section 8.3.4.5.9; TCP 1.1, section 3.6.1.3)."""
    size, number = HASHES[name]().digest_size, list(HASHES).index(name) + 1
    psk = hmac.digest(hashlib.new(name, shared).digest(), c1 + c2, name)
    digest = base64.b64encode(hmac.digest(psk, HOST + b" " + SUBSYSTEM + b" NVMe-over-Fabrics", name))
    label, context = b"tls13 nvme-tls-psk", b"%02d " % number + digest
    info = size.to_bytes(2, "big") + bytes([len(label)]) + label + bytes([len(context)]) + context
    key = hmac.digest(hmac.digest(bytes(size), psk, name), info + b"\1", name)
    return b"NVMe1G%02d %s %s %s" % (number, HOST, SUBSYSTEM, digest), key


for name, function in HASHES.items():
    for kind in range(4):
        length, size = [32, 32, 48, 64][kind], function().digest_size
        key, controller_key = fill(7, length), fill(99, length)
        for bits, (exponent_bits, _) in GROUPS.items():
            if bits > 2048 and kind != 1:
                continue
            # In the order in which an exchange takes them: C1, both exponents, C2.
            c1, *exponents, c2 = fill(1, size), fill(2, exponent_bits // 8), fill(3, exponent_bits // 8), fill(4, size)
            shared = shared_value(bits, exponents) if bits else None
            key1, key2 = transformed(kind, key, HOST), transformed(kind, controller_key, SUBSYSTEM)
            r1 = response(function, key1, c1, 1, b"HostHost", HOST, SUBSYSTEM, shared)
            r2 = response(function, key2, c2, 2, b"Controller", SUBSYSTEM, HOST, shared)
            group = f"Ffdhe{bits}" if bits else "Null"
            both = hashlib.sha256(r1 + r2).hexdigest()
            print(f'    (AuthHash::{name.capitalize()}, {kind}, DhGroup::{group}, "{both}"),')
for kind, length in ((1, 32), (0, 48), (3, 64)):
    print(text(kind, fill(7, length)))
for name in ("sha256", "sha384"):
    function, size = HASHES[name], HASHES[name]().digest_size
    for bits in (2048, 3072):
        for concatenation in (2, 3):
            for mutual in (False, True):
                exponents = [fill(first, GROUPS[bits][0] // 8) for first in (2, 3)]
                c1, c2, shared = fill(1, size), fill(4, size), shared_value(bits, exponents)
                key1, key2 = transformed(1, fill(7, 32), HOST), transformed(1, fill(99, 32), SUBSYSTEM)
                r1 = response(function, key1, c1, 1, b"HostHost", HOST, SUBSYSTEM, shared, concatenation)
                r2 = response(function, key2, c2, 2, b"Controller", SUBSYSTEM, HOST, shared, concatenation)
                identity, key = generated(name, shared, c1, c2)
                all_of_it = hashlib.sha256(r1 + r2 * mutual + identity + key).hexdigest()
                row = f"AuthHash::{name.capitalize()}, DhGroup::Ffdhe{bits}, {concatenation}, {str(mutual).lower()}"
                print(f'    ({row}, "{all_of_it}"),')
