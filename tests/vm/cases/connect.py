"""Discovery, connection and plain reads and writes, with and without digests."""

import json

from harness.case import case
from harness.targets import MIB, Namespace, Subsystem


def discovered(bench, options="", family=4):
    """The discovery log's records, as nvme-cli shows them."""
    text = bench.guest.check(f"nvme discover {bench.target.address(family)} -o json {options}")
    return json.loads(text[text.index("{") :])["records"]


def exchange(bench, options):
    """Connects with `options`; data goes out and comes back, and is what the target stored."""
    subsystem = Subsystem("connect", [Namespace(mib=32)])
    target = bench.serve(subsystem)
    record = next(r for r in discovered(bench, options) if r["subnqn"] == subsystem.nqn)
    assert record["trtype"] == "tcp" and str(record["trsvcid"]).strip() == str(target.port), record
    assert record["subtype"] == "nvme subsystem", record
    bench.connect(subsystem, options)
    device = bench.block(subsystem)
    assert bench.blocks_seen(device) == 32 * MIB // 512
    for name, offset, length, block in (
        ("small", 0, MIB, "4k"),  # in the command capsule
        ("middle", 4 * MIB, 2 * MIB, "64k"),  # fetched with R2T
        ("large", 16 * MIB, 4 * MIB, "1M"),  # of several data PDUs
    ):
        bench.write_random(device, name, offset, length, block)
        bench.compare(device, name, offset, length, block)
        bench.compare(device, name, offset, length, "4k" if block == "1M" else "128k")
        sent = bench.guest.check(f"sha256sum < /tmp/{name}").split()[0]
        assert target.digest(subsystem.namespaces[0], offset, length) == sent, f"{name} was stored otherwise"
    bench.disconnect(subsystem)


@case("connect")
def plain(bench):
    """Discover, connect, write, read and compare, without digests."""
    exchange(bench, "")


@case("connect-hdr-digest")
def header_digest(bench):
    """The same with header digests."""
    exchange(bench, "--hdr-digest")


@case("connect-data-digest")
def data_digest(bench):
    """The same with data digests."""
    exchange(bench, "--data-digest")


@case("connect-both-digests")
def both_digests(bench):
    """The same with both."""
    exchange(bench, "--hdr-digest --data-digest")
