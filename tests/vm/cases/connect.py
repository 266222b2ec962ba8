"""Discovery, connection, reads and writes, with and without digests."""

import json

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem


def discovered(bench, options="", family=4):
    """The records of the discovery log, as nvme-cli prints them."""
    text = bench.guest.check(f"nvme discover {bench.target.address(family)} -o json {options}")
    return json.loads(text[text.index("{") :])["records"]


def write_and_verify(bench, options):
    """Connects with `options`; writes data, reads it back, and compares it with the target's storage."""
    subsystem = Subsystem("connect", [Namespace(mib=32)])
    target = bench.serve(subsystem)
    record = next(r for r in discovered(bench, options) if r["subnqn"] == subsystem.nqn)
    assert record["trtype"] == "tcp" and str(record["trsvcid"]).strip() == str(target.port), record
    assert record["subtype"] == "nvme subsystem", record
    bench.connect(subsystem, options)
    device = bench.block(subsystem)
    assert bench.blocks_seen(device) == 32 * MIB // 512
    for name, offset, length, block in (
        ("small", 0, MIB, "4k"),  # in-capsule data
        ("middle", 4 * MIB, 2 * MIB, "64k"),  # transferred with R2T
        ("large", 16 * MIB, 4 * MIB, "1M"),  # several data PDUs
    ):
        bench.write_random(device, name, offset, length, block)
        bench.compare(device, name, offset, length, block)
        bench.compare(device, name, offset, length, "4k" if block == "1M" else "128k")
        sent = bench.guest.check(f"sha256sum < /tmp/{name}").split()[0]
        assert target.digest(subsystem.namespaces[0], offset, length) == sent, f"{name} differs in the target's storage"
    bench.disconnect(subsystem)


@case("connect", seconds=10)
def no_digests(bench):
    """Discover, connect, write, read and compare, without digests."""
    write_and_verify(bench, "")


@case("connect-hdr-digest", seconds=10)
def header_digest(bench):
    """Discover, connect, write, read and compare, with header digests."""
    write_and_verify(bench, "--hdr-digest")


@case("connect-data-digest", seconds=10)
def data_digest(bench):
    """Discover, connect, write, read and compare, with data digests."""
    write_and_verify(bench, "--data-digest")


@case("connect-both-digests", seconds=10)
def both_digests(bench):
    """Discover, connect, write, read and compare, with header and data digests."""
    write_and_verify(bench, "--hdr-digest --data-digest")
