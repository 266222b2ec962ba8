#!/usr/bin/python3 -B
"""The NBD target of `ringbolt serve` against clients of other projects, and against hostile ones.

    RINGBOLT=target/debug/ringbolt tests/interop/nbd_clients.py [CASE...]

Each case prints one line. A case whose program is missing is SKIPPED, with the reason. Random data comes from a seed,
which is printed (INTEROP_SEED=N repeats it).
"""

import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

import serving
from serving import MIB, SEED, Moves, Skipped, program, random_bytes, run


def libnbd():
    try:
        import nbd
    except ImportError:
        raise Skipped("python3-libnbd is not installed") from None
    return nbd


class Server(serving.Server):
    def export(self, bdev, **params):
        if not params.keys() & {"path", "port"}:
            params["path"] = f"{self.folder}/nbd.sock"
        return self.rpc("nbd_export_create", bdev_name=bdev, **params)


def connect(uri, **options):
    nbd = libnbd()
    handle = nbd.NBD()
    if options.get("contexts", True):
        handle.add_meta_context("base:allocation")
    if not options.get("structured", True):
        handle.set_request_structured_replies(False)
    handle.set_strict_mode(0)
    handle.connect_uri(uri)
    return handle


def fails(errno_name, call, *arguments):
    nbd = libnbd()
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errno == errno_name, f"{error} instead of {errno_name}"
        return
    raise AssertionError(f"{call.__name__}{arguments} succeeded instead of {errno_name}")


# Cases.


def case_nbdinfo(server):
    """nbdinfo lists exports, sizes, abilities and the map."""
    nbdinfo = program("nbdinfo")
    server.malloc()
    server.malloc("Malloc1", 8, 4096)
    uri = server.export("Malloc0", name="disk", description="the first disk")
    server.export("Malloc1", name="other", read_only=True)
    info = json.loads(run(nbdinfo, "--json", uri))["exports"][0]
    assert info["export-size"] == 64 * MIB and info["description"] == "the first disk", info
    for flag in ["can_cache", "can_df", "can_fast_zero", "can_flush", "can_fua", "can_multi_conn", "can_trim",
                 "can_zero"]:
        assert info[flag], f"{flag}: {info}"
    assert not info["is_read_only"] and info["block_size_minimum"] == 1, info
    assert info["contexts"] == ["base:allocation"], info
    base = uri.replace("/disk?", "/?")
    names = [one["export-name"] for one in json.loads(run(nbdinfo, "--json", "--list", base))["exports"]]
    assert names == ["disk", "other"], names
    other = json.loads(run(nbdinfo, "--json", uri.replace("/disk", "/other")))["exports"][0]
    assert other["is_read_only"] and not other["can_trim"] and not other["can_zero"], other
    extents = json.loads(run(nbdinfo, "--map", "--json", uri))
    assert sum(one["length"] for one in extents) == 64 * MIB, extents
    # Two exports share the listener, so there is no default one.
    assert subprocess.run([nbdinfo, base], capture_output=True).returncode != 0
    server.rpc("nbd_export_delete", name="other")
    assert run(nbdinfo, "--size", base).strip() == str(64 * MIB)


def case_map(server):
    """nbdinfo --map tells data from holes, in memory and in a sparse file; a sparse copy keeps the holes."""
    nbdinfo, nbdcopy = program("nbdinfo"), program("nbdcopy")
    disk = f"{server.folder}/disk"
    server.malloc()
    with open(disk, "wb") as file:
        file.truncate(64 * MIB)
    server.rpc("bdev_uring_create", name="File0", filename=disk)
    for bdev in ["Malloc0", "File0"]:
        uri = server.export(bdev, name=bdev)

        def extents():
            found = json.loads(run(nbdinfo, "--map", "--json", uri))
            return [(one["offset"] // MIB, one["length"] // MIB, one["description"]) for one in found]

        assert extents() == [(0, 64, "hole,zero")], extents()
        handle = connect(uri)
        handle.pwrite(b"x" * MIB, 5 * MIB)
        handle.pwrite(b"y" * 2 * MIB, 40 * MIB)
        expected = [(0, 5, "hole,zero"), (5, 1, "data"), (6, 34, "hole,zero"), (40, 2, "data"), (42, 22, "hole,zero")]
        assert extents() == expected, f"{bdev}: {extents()}"
        copy = f"{server.folder}/copy"
        run(nbdcopy, uri, copy)
        assert os.stat(copy).st_blocks * 512 < 8 * MIB, "the copy is not sparse"
        handle.trim(2 * MIB, 40 * MIB)
        handle.flush()
        assert extents() == [(0, 5, "hole,zero"), (5, 1, "data"), (6, 58, "hole,zero")], f"{bdev}: {extents()}"
        handle.shutdown()
        server.rpc("nbd_export_delete", name=bdev)


def case_extended_headers(server):
    """libnbd 1.18 and later map more than 4 GiB at once, with extended headers, and copy with several connections."""
    nbdinfo, nbdcopy = program("nbdinfo"), program("nbdcopy")
    source, disk = f"{server.folder}/source", f"{server.folder}/disk"
    for path, gib in [(source, 5), (disk, 6)]:
        with open(path, "wb") as file:
            file.truncate(gib << 30)
    server.rpc("bdev_uring_create", name="File0", filename=disk, block_size=512)
    uri = server.export("File0", name="disk")
    if not json.loads(run(nbdinfo, "--json", uri)).get("extended"):
        raise Skipped("this libnbd has no extended headers (1.18 and later)")

    def extents():
        found = json.loads(run(nbdinfo, "--map", "--json", uri))
        return [(one["offset"] // MIB, one["length"] // MIB, one["description"]) for one in found]

    # One extent, whose length has more than 32 bits.
    assert extents() == [(0, 6144, "hole,zero")], extents()
    with open(source, "r+b") as file:
        file.write(random_bytes(4 * MIB))
        file.seek(4500 * MIB)
        file.write(random_bytes(MIB))
    run(nbdcopy, "--connections=4", source, uri)
    expected = [(0, 4, "data"), (4, 4496, "hole,zero"), (4500, 1, "data"), (4501, 1643, "hole,zero")]
    assert extents() == expected, extents()
    with open(source, "rb") as one, open(disk, "rb") as other:
        for at in (0, 4500 * MIB):
            one.seek(at)
            other.seek(at)
            assert one.read(4 * MIB) == other.read(4 * MIB), f"blocks at {at} differ"


def case_tcp_and_configuration(server):
    """Exports on TCP, and a configuration that is saved and loaded."""
    nbdinfo = program("nbdinfo")
    server.malloc()
    uri = server.export("Malloc0", name="a b", port=0)
    assert uri.startswith("nbd://127.0.0.1:") and uri.endswith("/a%20b"), uri
    assert run(nbdinfo, "--size", uri).strip() == str(64 * MIB)
    saved = server.rpc("save_config")
    calls = [call for one in saved["subsystems"] if one["subsystem"] == "nbd" for call in one["config"]]
    assert [call["method"] for call in calls] == ["nbd_export_create"], saved
    server.rpc("nbd_export_delete", name="a b")
    assert server.rpc("nbd_export_get") == []
    server.rpc("nbd_export_create", **calls[0]["params"])
    assert run(nbdinfo, "--size", uri).strip() == str(64 * MIB)
    assert server.rpc("nbd_export_get")[0]["uri"] == uri


def case_libnbd(server):
    """Every command and error of libnbd, with and without structured replies."""
    nbd = libnbd()
    server.malloc(mib=40)
    server.malloc("Malloc4", 4, 4096)
    for bdev, size in [("Malloc0", 40 * MIB), ("Malloc4", 4 * MIB)]:
        uri = server.export(bdev, name=bdev, path=f"{server.folder}/{bdev}.sock")
        for structured in [True, False]:
            handle = connect(uri, structured=structured, contexts=structured)
            commands(nbd, handle, size, structured)
            handle.shutdown()
    uri = server.export("Malloc0", name="locked", read_only=True)
    handle = connect(uri)
    assert handle.is_read_only()
    for call in [lambda: handle.pwrite(b"x" * 512, 0), lambda: handle.zero(512, 0), lambda: handle.trim(512, 0)]:
        fails("EPERM", call)
    handle.pread(512, 0)
    handle.shutdown()


def commands(nbd, handle, size, structured):
    image = bytearray(size)
    source = random.Random(SEED)
    handle.zero(size, 0)

    def write(offset, data, flags=0):
        handle.pwrite(data, offset, flags)
        image[offset:offset + len(data)] = data

    def check(offset, count, flags=0):
        assert handle.pread(count, offset, flags) == image[offset:offset + count], f"{count} bytes at {offset}"

    for offset, count in [(0, 512), (4096, 65536), (1, 1), (511, 2), (513, 4095), (100, 9000), (size - 7, 7),
                          (MIB - 3, 2 * MIB + 5), (3 * MIB, 512 * 1024 + 1)]:
        write(offset, source.randbytes(min(count, size - offset)), nbd.CMD_FLAG_FUA if count < 600 else 0)
        check(max(0, offset - 600), min(count + 1200, size - max(0, offset - 600)))
    for _ in range(60):
        offset = source.randrange(size - 70000)
        write(offset, source.randbytes(source.randrange(1, 5000)))
        offset = source.randrange(size - 70000)
        count = source.randrange(1, 6000)
        flags = source.choice([0, nbd.CMD_FLAG_NO_HOLE, nbd.CMD_FLAG_FAST_ZERO, nbd.CMD_FLAG_FUA])
        handle.zero(count, offset, flags)
        image[offset:offset + count] = bytes(count)
    handle.flush()
    for offset in range(0, size, 4 * MIB):
        check(offset, min(4 * MIB, size - offset))
    if size > 32 * MIB:
        check(5, 32 * MIB)
        write(3, source.randbytes(32 * MIB))
        check(3, 32 * MIB)
    if structured:
        check(1, 2 * MIB + 1, nbd.CMD_FLAG_DF)
        extents = []
        handle.block_status(size, 0, lambda context, offset, entries, error: extents.append((context, list(entries))))
        assert extents[0][0] == "base:allocation", extents
        one = []
        handle.block_status(5000, 77, lambda *entry: one.append(list(entry[2])), nbd.CMD_FLAG_REQ_ONE)
        assert len(one[0]) == 2 and one[0][0] <= 5000, one
    # TRIM is advice: it changes nothing outside of its range.
    handle.trim(8192, 4096)
    check(0, 4096)
    check(12288, 4096)
    handle.cache(size, 0)
    fails("EINVAL", handle.pread, 512, size)
    fails("EINVAL", handle.pread, 513, size - 512)
    fails("ENOSPC", handle.pwrite, b"x" * 513, size - 512)
    fails("ENOSPC", handle.zero, 513, size - 512)
    fails("EINVAL", handle.trim, 513, size - 512)
    fails("EINVAL", handle.cache, 513, size - 512)
    if not structured:
        fails("EINVAL", handle.pread, 512, 0, nbd.CMD_FLAG_DF)
    # The connection is as good as before.
    check(0, 4096)


def case_nbdcopy(server):
    """nbdcopy in and out with four connections."""
    nbdcopy = program("nbdcopy")
    server.malloc()
    uri = server.export("Malloc0")
    source, result = f"{server.folder}/source", f"{server.folder}/result"
    with open(source, "wb") as file:
        file.write(random_bytes(64 * MIB))
    for connections in [1, 4]:
        run(nbdcopy, "--flush", f"--connections={connections}", source, uri)
        run(nbdcopy, f"--connections={connections}", uri, result)
        run("cmp", source, result)


def case_qemu(server):
    """qemu-img converts and compares, qemu-io writes patterns within blocks."""
    qemu_img, qemu_io = program("qemu-img"), program("qemu-io")
    server.malloc(block_size=4096)
    uri = server.export("Malloc0", port=0, name="disk")
    source = f"{server.folder}/source.qcow2"
    run(qemu_img, "create", "-q", "-f", "qcow2", source, "64M")
    run(qemu_io, "-c", "write -P 7 1M 3M", "-c", "write -P 9 40M 512", source)
    run(qemu_img, "convert", "-n", "-W", "-O", "raw", source, uri)
    run(qemu_img, "compare", "-F", "raw", source, uri)
    output = run(qemu_io, "-f", "raw", "-c", "write -P 5 1000 3000", "-c", "read -P 5 1000 3000", "-c", "read -P 0 512 488",
                 "-c", "write -z -u 2M 64k", "-c", "read -P 0 2M 64k", "-c", "discard 3M 64k", "-c", "flush",
                 "-c", "write -f -P 3 63M 1M", "-c", "read -P 3 63M 1M", uri)
    assert "failed" not in output and "error" not in output, output


PSK = "0f" * 32


def keys(server, name, secret=PSK):
    """A folder with a key as NBD's clients have it, and its file."""
    folder = f"{server.folder}/{name}-keys"
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/keys.psk"
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(f"{name}:{secret}\n")
    return folder, path


def case_tls_keys(server):
    """libnbd and QEMU with a key write and read; with another key, another name or none they do not."""
    nbd = libnbd()
    if not nbd.NBD().supports_tls():
        raise Skipped("this libnbd has no TLS")
    folder, path = keys(server, "alice")
    server.malloc(block_size=4096)
    assert server.rpc("nbd_set_tls", psk_file=path) is True
    uri = server.export("Malloc0", name="disk", port=0, require_tls=True)
    assert uri.startswith("nbds://127.0.0.1:"), uri
    port = int(uri.split(":")[2].split("/")[0])

    def begin(tls=None, name="alice", file=path):
        handle = nbd.NBD()
        handle.set_tls(nbd.TLS_DISABLE if tls is None else tls)
        handle.set_tls_username(name)
        handle.set_tls_psk_file(file)
        handle.set_export_name("disk")
        handle.connect_tcp("127.0.0.1", str(port))
        return handle

    handle = begin(nbd.TLS_REQUIRE)
    assert handle.get_tls_negotiated()
    data = random_bytes(3 * MIB + 777)
    handle.pwrite(data, 1000)
    handle.flush()
    assert handle.pread(len(data), 1000) == data
    refused = [(None, "alice", path), (nbd.TLS_REQUIRE, "alice", keys(server, "other", "0e" * 32)[1])]
    bob = keys(server, "bob")[1]
    for tls, name, file in refused + [(nbd.TLS_REQUIRE, "bob", bob)]:
        try:
            begin(tls, name, file)
        except nbd.Error:
            continue
        raise AssertionError(f"{name} with {file} was served")
    qemu_io = program("qemu-io")
    image = f"driver=nbd,host=127.0.0.1,port={port},export=disk,tls-creds=tls0"
    credentials = f"tls-creds-psk,id=tls0,dir={folder},endpoint=client,username=alice"
    output = run(qemu_io, "--object", credentials, "--image-opts", "-c", "write -P 5 1000 300000",
                 "-c", "read -P 5 1000 300000", "-c", "flush", image)
    assert "failed" not in output and "error" not in output, output


def certificate(folder, name, signer=None):
    """A certificate of a signer, or of itself; with its key."""
    cert, key = f"{folder}/{name}-cert.pem", f"{folder}/{name}-key.pem"
    signed = ["-CA", f"{folder}/{signer}-cert.pem", "-CAkey", f"{folder}/{signer}-key.pem"] if signer else []
    use = ["-addext", "basicConstraints=critical,CA:TRUE"] if not signer else [
        "-addext", "basicConstraints=CA:FALSE", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    run(program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-subj", f"/CN={name}", "-days", "2", "-keyout", key, "-out", cert, *signed, *use)
    os.chmod(key, 0o600)
    return cert, key


def client_folder(folder, authority, name=None):
    """A folder as libnbd's and QEMU's certificates are."""
    path = f"{folder}/client-{authority}-{name}"
    os.makedirs(path)
    shutil.copy(f"{folder}/{authority}-cert.pem", f"{path}/ca-cert.pem")
    if name:
        shutil.copy(f"{folder}/{name}-cert.pem", f"{path}/client-cert.pem")
        shutil.copy(f"{folder}/{name}-key.pem", f"{path}/client-key.pem")
    return path


def case_tls_certificates(server):
    """Clients verify the server's certificate, and it theirs, where it knows their authority; keys serve beside it."""
    nbd = libnbd()
    if not nbd.NBD().supports_tls():
        raise Skipped("this libnbd has no TLS")
    folder = f"{server.folder}/certificates"
    os.makedirs(folder)
    certificate(folder, "ca")
    certificate(folder, "stranger")
    cert, key = certificate(folder, "server", "ca")
    certificate(folder, "client", "ca")
    certificate(folder, "intruder", "stranger")
    server.malloc()
    server.rpc("nbd_set_tls", certificate_file=cert, private_key_file=key)
    port = int(server.export("Malloc0", name="disk", port=0, require_tls=True).split(":")[2].split("/")[0])

    def writes(path):
        handle = nbd.NBD()
        handle.set_tls(nbd.TLS_REQUIRE)
        handle.set_tls_certificates(path)
        handle.set_export_name("disk")
        try:
            handle.connect_tcp("127.0.0.1", str(port))
            handle.pwrite(random_bytes(MIB), 512)
            handle.flush()
        except nbd.Error:
            return False
        return True

    anyone = client_folder(folder, "ca")
    assert writes(anyone) and not writes(client_folder(folder, "stranger"))
    # Only with certificates of the authority of clients.
    server.rpc("nbd_set_tls", certificate_file=cert, private_key_file=key, client_ca_file=f"{folder}/ca-cert.pem",
               psk_file=keys(server, "alice")[1])
    ours, intruders = client_folder(folder, "ca", "client"), client_folder(folder, "ca", "intruder")
    assert not writes(anyone) and not writes(intruders) and writes(ours)
    by_key = nbd.NBD()
    by_key.set_tls(nbd.TLS_REQUIRE)
    by_key.set_tls_username("alice")
    by_key.set_tls_psk_file(keys(server, "alice")[1])
    by_key.set_export_name("disk")
    by_key.connect_tcp("127.0.0.1", str(port))
    qemu_img = program("qemu-img")
    credentials = f"tls-creds-x509,id=tls0,dir={ours},endpoint=client,verify-peer=yes"
    image = f"driver=nbd,host=127.0.0.1,port={port},export=disk,tls-creds=tls0"
    assert "64 MiB" in run(qemu_img, "info", "--object", credentials, "--image-opts", image)
    for params, reason in [({"certificate_file": cert, "private_key_file": f"{folder}/client-key.pem"}, "not the private key"),
                           ({"certificate_file": key, "private_key_file": key}, "no certificate in PEM"),
                           ({"certificate_file": cert}, "both or none"), ({}, "delete it first")]:
        try:
            server.rpc("nbd_set_tls", **params)
            raise AssertionError("it was accepted")
        except AssertionError as error:
            assert reason in str(error), f"{params}: {error}"


def case_fio(server):
    """fio's nbd engine verifies random writes of several jobs."""
    fio = program("fio")
    if "\tnbd" not in run(fio, "--enghelp"):
        raise Skipped("this fio has no nbd engine")
    server.malloc()
    uri = server.export("Malloc0")
    run(fio, "--name=verify", "--ioengine=nbd", f"--uri={uri}", "--rw=randwrite", "--bsrange=512-128k",
        "--bs_unaligned", "--iodepth=32", "--size=16m", "--numjobs=4", "--offset_increment=16m", "--verify=crc32c",
        "--verify_fatal=1", "--randrepeat=0", f"--randseed={SEED}", "--verify_state_save=0")


def case_moves(server):
    """nbdcopy and QEMU do not notice that their connections move between cores."""
    nbdcopy, qemu_img, qemu_io = program("nbdcopy"), program("qemu-img"), program("qemu-io")
    server.malloc()
    uri, tcp = server.export("Malloc0"), server.export("Malloc0", port=0, name="disk")
    source, result = f"{server.folder}/source", f"{server.folder}/result"
    with open(source, "wb") as file:
        file.write(random_bytes(64 * MIB))
    with Moves(server, at_least=20):
        for connections, where in [(4, uri), (1, tcp), (4, tcp)]:
            run(nbdcopy, "--flush", f"--connections={connections}", source, where)
            run(nbdcopy, f"--connections={connections}", where, result)
            run("cmp", source, result)
        for where in [uri, tcp]:
            run(qemu_io, "-f", "raw", "-c", "write -P 7 1000 3M", where)
            run(qemu_img, "convert", "-n", "-W", "-f", "raw", "-O", "raw", source, where)
            run(qemu_img, "compare", "-f", "raw", "-F", "raw", source, where)


def case_unaligned_writers(server):
    """Clients that write neighbouring bytes of the same blocks lose none."""
    libnbd()
    server.malloc(mib=1, block_size=4096)
    uri = server.export("Malloc0")
    count, rounds, stride = 4, 60, 8

    def write(index):
        handle = connect(uri)
        for step in range(rounds):
            handle.pwrite(bytes([index + 1]) * 2, step * stride + 2 * index)
        handle.shutdown()

    threads = [threading.Thread(target=write, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle = connect(uri)
    assert handle.pread(rounds * stride, 0) == b"".join(bytes([i + 1]) * 2 for i in range(count)) * rounds


def greeted(server):
    """A connection after the greeting and client flags."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(20)
    peer.connect(f"{server.folder}/nbd.sock")
    assert peer.recv(18, socket.MSG_WAITALL)[:8] == b"NBDMAGIC"
    peer.sendall(struct.pack(">I", 3))
    return peer


def option(peer, number, data=b""):
    peer.sendall(b"IHAVEOPT" + struct.pack(">II", number, len(data)) + data)
    return option_reply(peer)


def option_reply(peer):
    magic, _, kind, length = struct.unpack(">QIII", peer.recv(20, socket.MSG_WAITALL))
    assert magic == 0x3E889045565A9
    return kind, peer.recv(length, socket.MSG_WAITALL) if length else b""


def begun(server):
    """A connection in the transmission phase, with simple replies."""
    peer = greeted(server)
    peer.sendall(b"IHAVEOPT" + struct.pack(">II", 1, 0))
    peer.recv(10, socket.MSG_WAITALL)
    return peer


def request(command, cookie, offset, length, flags=0):
    return struct.pack(">IHHQQI", 0x25609513, flags, command, cookie, offset, length)


def reply(peer):
    magic, error, cookie = struct.unpack(">IIQ", peer.recv(16, socket.MSG_WAITALL))
    assert magic == 0x67446698
    return error, cookie


def is_closed(peer):
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def case_hostile_handshakes(server):
    """Unknown, giant and malformed options get the specified answers, or close their connection only."""
    server.malloc()
    server.export("Malloc0", name="disk")
    error = 1 << 31
    peer = greeted(server)
    table = [
        (99, b"", error | 1), (99, b"x" * 100, error | 1), (5, b"", error | 2), (3, b"x", error | 3), (8, b"x", error | 3),
        (7, b"\0\0", error | 3), (7, struct.pack(">I", 4) + b"none" + b"\0\0", error | 6),
        (10, struct.pack(">I", 4) + b"disk" + struct.pack(">I", 0), error | 3), (8, b"", 1),
        (10, struct.pack(">I", 4) + b"disk" + struct.pack(">II", 1 << 30, 5), error | 3),
        (6, b"x" * 20000, error | 9), (99, b"x" * 200000, error | 1), (7, struct.pack(">I", 4) + b"di\0k" + b"\0\0", error | 3),
        (11, b"", 1), (8, b"", error | 3),
    ]
    for number, data, expected in table:
        kind, _ = option(peer, number, data)
        assert kind == expected, f"option {number} with {data[:20]}: {kind:#x} instead of {expected:#x}"
    assert option(peer, 2)[0] == 1 and is_closed(peer)
    for bad in [b"IHAVEOPT" + struct.pack(">II", 6, 0xFFFFFFFF), b"GET / HTTP/1.1\r\n\r\n",
                b"IHAVEOPT" + struct.pack(">II", 1, 5) + b"other"]:
        peer = greeted(server)
        peer.sendall(bad)
        assert is_closed(peer)
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(20)
    peer.connect(f"{server.folder}/nbd.sock")
    peer.sendall(b"\xff\xff\xff\xff")
    assert is_closed(peer)
    # Byte by byte it works as well.
    peer = greeted(server)
    for byte in b"IHAVEOPT" + struct.pack(">II", 1, 4) + b"disk":
        peer.sendall(bytes([byte]))
    assert struct.unpack(">QH", peer.recv(10, socket.MSG_WAITALL))[0] == 64 * MIB


def case_hostile_requests(server):
    """Unknown commands, flags and lengths fail alone; a wrong magic number closes the connection."""
    server.malloc()
    server.export("Malloc0")
    peer = begun(server)
    for command, offset, length, flags, expected in [
        (77, 0, 0, 0, 22), (0, 0, 512, 1 << 15, 22), (0, 2**64 - 1, 512, 0, 22), (0, 0, 2**32 - 1, 0, 22), (3, 0, 0, 0, 0),
        (7, 0, 512, 0, 22), (4, 2**63, 512, 0, 22), (6, 2**64 - 512, 512, 0, 28), (0, 5, 0, 0, 0), (5, 0, 512, 0, 0),
    ]:
        peer.sendall(request(command, 5, offset, length, flags))
        assert reply(peer) == (expected, 5), f"command {command}"
    # The payload of a rejected write is skipped.
    peer.sendall(request(1, 6, 2**63, 1000) + bytes(1000) + request(1, 7, 0, 512, 1 << 14) + bytes(512) + request(3, 8, 0, 0))
    assert [reply(peer) for _ in range(3)] == [(28, 6), (22, 7), (0, 8)]
    peer.sendall(request(1, 9, 0, 2**32 - 1))
    assert is_closed(peer)
    peer = begun(server)
    peer.sendall(bytes(28))
    assert is_closed(peer)


def case_hostile_peers(server):
    """Silent peers, half payloads and peers that never read keep no one else out."""
    nbdinfo = program("nbdinfo")
    server.malloc()
    uri = server.export("Malloc0")
    peers = []
    for index in range(16):
        peer = begun(server) if index % 4 else socket.socket(socket.AF_UNIX)
        if index % 4 == 0:
            peer.connect(f"{server.folder}/nbd.sock")
        elif index % 4 == 1:
            peer.sendall(request(1, 1, 0, 32 * MIB) + bytes(1000))
        elif index % 4 == 2:
            peer.sendall(request(0, 1, 0, 16 * MIB)[:20])
        else:
            peer.settimeout(1)
            try:
                for cookie in range(4096):
                    peer.sendall(request(0, cookie, 0, MIB))
            except TimeoutError:
                pass
        peers.append(peer)
    assert run(nbdinfo, "--size", uri).strip() == str(64 * MIB)
    if shutil.which("nbdcopy"):
        run("nbdcopy", uri, "null:")
    # Those that end within a request leave nothing behind.
    for peer in peers:
        peer.close()
    deadline = time.monotonic() + 10
    while server.rpc("nbd_export_get")[0]["connections"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.rpc("nbd_export_get")[0]["connections"] == 0


def load(uri, ended):
    """Reads and writes at depth until the connection ends."""
    nbd = libnbd()
    handle = connect(uri)
    try:
        for step in range(10**9):
            pending = [handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(4096)), 4096 * (step % 64)) for _ in range(16)]
            pending += [handle.aio_pread(nbd.Buffer(65536), 65536 * (step % 64)) for _ in range(16)]
            while not all(handle.aio_command_completed(one) for one in pending):
                handle.poll(1000)
    except nbd.Error as error:
        ended.append(error.errno)


def under_load(server, end):
    uri = server.export("Malloc0")
    ended = []
    threads = [threading.Thread(target=load, args=(uri, ended)) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert not ended, ended
    end()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a client hangs"
    assert len(ended) == 3, ended
    assert server.rpc("nbd_export_get") == []


def case_export_deleted_under_load(server):
    """An export that is deleted under load ends its connections, and can be created again."""
    libnbd()
    server.malloc()
    for _ in range(2):
        under_load(server, lambda: server.rpc("nbd_export_delete", name="Malloc0"))


def case_bdev_removed_under_load(server):
    """A bdev that is removed under load ends its exports' connections."""
    libnbd()
    for _ in range(2):
        server.malloc()
        under_load(server, lambda: server.rpc("bdev_malloc_delete", name="Malloc0"))


def case_killed(server):
    """What was flushed, or written with FUA, is there after SIGKILL."""
    nbd = libnbd()
    disk = f"{server.folder}/disk"
    with open(disk, "wb") as file:
        file.truncate(16 * MIB)

    def serve():
        try:
            server.rpc("bdev_uring_create", name="File0", filename=disk, block_size=4096)
        except AssertionError as error:
            if "io_uring" in str(error):
                raise Skipped("this kernel has no io_uring") from None
            raise
        return server.export("File0")

    data = random_bytes(MIB)
    handle = connect(serve())
    handle.pwrite(data, 0)
    handle.flush()
    handle.pwrite(data, 5 * MIB + 3, nbd.CMD_FLAG_FUA)
    server.kill()
    server.__init__(server.folder)
    handle = connect(serve())
    assert handle.pread(MIB, 0) == data and handle.pread(MIB, 5 * MIB + 3) == data
    extents = []
    handle.block_status(16 * MIB, 0, lambda context, offset, entries, error: extents.extend(entries))
    assert sum(extents[::2]) == 16 * MIB, extents


def main():
    cases = {name[5:]: case for name, case in globals().items() if name.startswith("case_")}
    return serving.run_cases(cases, Server)


if __name__ == "__main__":
    sys.exit(main())
