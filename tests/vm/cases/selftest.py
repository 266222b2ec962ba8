"""A test of the harness itself, against the kernel's own target."""

from harness.case import case
from harness.guest import CommandFailed, GuestError
from harness.targets import MIB, Namespace, Subsystem


@case("harness", on=("nvmet",), provokes=r"reconnect|failed")
def harness(bench):
    """The guest, its command channel and the helpers of the cases, against the kernel's own target."""
    guest = bench.guest
    assert guest.run("echo out; echo err >&2; exit 7").rc == 7
    assert guest.check("echo out; echo err >&2") == "out\nerr\n"
    assert guest.check("printf 'no newline'") == "no newline"
    long = "x" * 5000
    assert guest.check(f"printf %s {long} | tee /dev/null") == long
    guest.check("mkfifo /tmp/fifo")
    job = guest.spawn("for i in 1 2 3; do echo step $i; done; read -r word < /tmp/fifo; echo got $word")
    job.expect("^step 3$")
    assert job.rc is None
    guest.check("echo this > /tmp/fifo")
    assert job.check().endswith("got this\n")
    try:
        guest.run("sleep 60", timeout=0.2)
        raise AssertionError("a missed deadline was not detected")
    except GuestError:
        guest.check("killall sleep")
    try:
        guest.check("false")
        raise AssertionError("a failed command was not detected")
    except CommandFailed:
        pass

    subsystem = Subsystem("harness", [Namespace(mib=32)])
    target = bench.serve(subsystem)
    bench.connect(subsystem)
    device = bench.block(subsystem)
    assert bench.blocks_seen(device) == 32 * MIB // 512
    bench.write_random(device, "data", MIB, 2 * MIB, "64k")
    bench.compare(device, "data", MIB, 2 * MIB, "64k")
    sent = guest.check("sha256sum < /tmp/data").split()[0]
    assert target.digest(subsystem.namespaces[0], MIB, 2 * MIB) == sent
    bench.fio("verify", device, "--rw=randwrite", "--bs=4k", "--iodepth=8", "--size=4m", "--verify=crc32c")
    guest.check(f"printf x | dd of={device} conv=notrunc bs=1 seek={MIB + 5000} status=none && sync")
    try:
        bench.compare(device, "data", MIB, 2 * MIB, "64k")
        raise AssertionError("a changed byte was not detected")
    except CommandFailed:
        pass
