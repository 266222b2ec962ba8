"""The parts of the harness that need neither QEMU nor a network."""

import io
import json
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import types
import unittest
import unittest.mock
from contextlib import redirect_stdout

import run
from harness import Unavailable, apt, elf, guest, image, machine, modules, parallel, rpc
from harness.targets import Namespace, Ringbolt, Subsystem


def read_cpio(data):
    """{path: (mode, contents)} of a newc archive, read as the kernel reads it."""
    entries, at = {}, 0
    while True:
        assert data[at : at + 6] == b"070701", f"no header at {at}"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + name_size - 1].decode()
        at += 110 + name_size
        at += -at % 4
        if name == "TRAILER!!!":
            return entries
        entries[name] = (mode, data[at : at + size])
        at += size
        at += -at % 4


class Cpio(unittest.TestCase):
    def test_what_goes_in_comes_out_with_parents_first(self):
        file = io.BytesIO()
        archive = image.Cpio(file)
        archive.add("a/b/c", b"12345", 0o755)
        archive.link("a/b/d", "c")
        archive.character_device("dev/null", 1, 3)
        archive.close()
        entries = read_cpio(file.getvalue())
        self.assertEqual(list(entries), ["a", "a/b", "a/b/c", "a/b/d", "dev", "dev/null"])
        self.assertEqual(entries["a/b/c"], (stat.S_IFREG | 0o755, b"12345"))
        self.assertEqual(entries["a/b/d"], (stat.S_IFLNK | 0o777, b"c"))
        self.assertTrue(stat.S_ISCHR(entries["dev/null"][0]))


    def test_files_are_added_behind_an_initramfs(self):
        with tempfile.TemporaryDirectory() as folder:
            first = io.BytesIO()
            archive = image.Cpio(first)
            archive.add("init", b"odd", 0o755)
            archive.close()
            for name, data in {"first": first.getvalue(), "program": b"\x7fELF"}.items():
                with open(f"{folder}/{name}", "wb") as file:
                    file.write(data)
            image.with_files(f"{folder}/first", {"usr/bin/program": f"{folder}/program"}, f"{folder}/both")
            both = image.read(f"{folder}/both")
        self.assertEqual(both[: len(first.getvalue())], first.getvalue())
        second = both[len(first.getvalue()) :].lstrip(b"\0")
        self.assertEqual((len(both) - len(second)) % 4, 0)
        self.assertEqual(read_cpio(second)["usr/bin/program"], (stat.S_IFREG | 0o755, b"\x7fELF"))


class Machines(unittest.TestCase):
    def test_hardware_becomes_arguments_and_backing_files(self):
        hardware = machine.Machine(
            nvme=(machine.Nvme(mib=2, block_size=4096), machine.Nvme(mib=0, port="port0")), iommu=True, hugepages=3
        )
        self.assertEqual(hardware.command_line(), "intel_iommu=on hugepages=3")
        with tempfile.TemporaryDirectory() as folder:
            arguments = hardware.arguments(folder)
            self.assertEqual(os.path.getsize(f"{folder}/nvme0.raw"), 2 << 20)
            self.assertEqual(os.listdir(folder), ["nvme0.raw"])
        self.assertIn("nvme,id=nvme1,serial=RBPCI1,bus=port0", arguments)
        self.assertIn("nvme-ns,bus=nvme0,drive=disk0n1,nsid=1,logical_block_size=4096,physical_block_size=4096", arguments)
        self.assertEqual(machine.Machine().arguments("/nonexistent"), [])


class RebuiltModules(unittest.TestCase):
    def test_packages_are_those_of_the_very_kernel(self):
        self.assertEqual(
            modules.packages("6.12.117+deb12-amd64"),
            [
                "linux-headers-6.12.117+deb12-amd64",
                "linux-headers-6.12.117+deb12-common",
                "linux-kbuild-6.12.117+deb12",
                "linux-source-6.12",
            ],
        )
        with self.assertRaises(Unavailable):
            modules.packages("6.8.0-45-generic")


class Elf(unittest.TestCase):
    def test_a_shell_needs_the_c_library(self):
        with open(os.path.realpath("/bin/sh"), "rb") as file:
            data = file.read()
        interpreter, names = elf.needed(data)
        self.assertTrue(interpreter is None or os.path.basename(interpreter).startswith("ld-"), interpreter)
        self.assertTrue(interpreter is None or any(name.startswith("libc.") for name in names), names)

    def test_what_is_no_elf_file_is_refused(self):
        with self.assertRaises(ValueError):
            elf.needed(b"#!/bin/sh\n" + bytes(100))

    def test_module_information_is_found_by_its_section(self):
        names, info = b"\0.modinfo\0", b"depends=one,two\0softdep=pre: three\0"
        at = 64
        sections = b"".join(
            struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 1, 0)
            for name, offset, size in ((0, 0, 0), (1, at, len(info)), (0, at + len(info), len(names)))
        )
        header = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", at + len(info) + len(names))
        header += bytes(10) + struct.pack("<HHH", 64, 3, 2)
        data = header + info + names + sections
        self.assertEqual(elf.module_info(data), {"depends": ["one,two"], "softdep": ["pre: three"]})


class Modules(unittest.TestCase):
    def order(self, wanted, needs, builtin=()):
        paths = {name: name for name in needs}
        return image.load_order(wanted, paths, set(builtin), needs.get)

    def test_needs_come_first_and_once(self):
        needs = {"top": {"depends": ["left,right"]}, "left": {"depends": ["base"]}, "right": {"depends": ["base"]}}
        needs["base"] = {"softdep": ["pre: soft absent post: later"]}
        needs["soft"] = {"depends": [""]}
        self.assertEqual(self.order([("top", True)], needs), ["soft", "base", "left", "right", "top"])

    def test_what_is_built_in_is_not_loaded(self):
        self.assertEqual(self.order([("a-b", True)], {"a_b": {"depends": ["c-d"]}}, ["c_d"]), ["a_b"])

    def test_a_missing_module_is_named_unless_optional(self):
        self.assertEqual(self.order([("none", False)], {}), [])
        with self.assertRaisesRegex(Unavailable, "no module none"):
            self.order([("none", True)], {})


class Parallel(unittest.TestCase):
    SAYS = """
import sys
for name in sys.argv[1:]:
    if name == "dies":
        sys.exit(3)
    word = "FAIL" if name == "bad" else "PASS"
    print(f"{word:7} {name}: 1 s")
    print(f"    of {name}")
print(f"{len(sys.argv) - 1} passed, 0 failed, 0 skipped")
"""

    def test_cases_with_one_machine_are_one_group(self):
        plain, vfio = machine.Machine(), machine.Machine(vfio=True)
        kinds = {"a": None, "b": None, "c": plain, "d": vfio, "e": machine.Machine(vfio=True, hugepages=1), "f": None}
        cases = [types.SimpleNamespace(name=name, machine=kind) for name, kind in kinds.items()]
        self.assertEqual(parallel.groups(cases), [["a", "b"], ["c"], ["d", "e"], ["f"]])

    def test_what_several_say_is_shown_in_pieces_and_counted(self):
        shown = []
        count = parallel.run([sys.executable, "-c", self.SAYS], [["a", "bad"], ["c"], ["dies"]], 2, shown.append)
        self.assertEqual(count, {"PASS": 3, "FAIL": 1, "SKIPPED": 0})
        self.assertIn("FAIL    bad: 1 s\n    of bad\n", shown)
        self.assertTrue(any("dies: their process ended with status 3" in text for text in shown), shown)


class Boots(unittest.TestCase):
    def booted(self, failures):
        """-> the guest, and how often one was started, where so many do not come up."""
        outcomes = [guest.GuestError("panic\nmuch text")] * failures + ["guest"]
        with unittest.mock.patch.object(run, "Guest", side_effect=outcomes) as made, redirect_stdout(io.StringIO()):
            return run.Runner(None).boot("image", None), made.call_count

    def test_a_guest_that_does_not_come_up_is_started_again(self):
        self.assertEqual(self.booted(0), ("guest", 1))
        self.assertEqual(self.booted(2), ("guest", 3))
        with self.assertRaisesRegex(guest.GuestError, "panic"):
            self.booted(3)


class Apt(unittest.TestCase):
    @staticmethod
    def stanza(**fields):
        return "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in fields.items())

    def test_only_the_own_release_is_kept_and_can_be_exchanged(self):
        key = "\n -----BEGIN\n .\n -----END"
        suites = "bookworm bookworm-updates bookworm-backports"
        own = self.stanza(
            Types="deb", URIs="http://one.example/debian", Suites=suites, Components="main", Signed_By=key
        )
        third = self.stanza(Types="deb", URIs="http://third.example/", Suites="stable", Components="main")
        chosen = apt.select(apt._stanzas(f"{own}\n# a comment\n{third}"), "bookworm", "trixie")
        self.assertEqual([entry["Suites"] for entry in chosen], ["trixie trixie-updates"])
        self.assertEqual(chosen[0]["URIs"], "http://one.example/debian")
        self.assertEqual(chosen[0]["Signed-By"], key)

    def test_one_line_entries_are_read(self):
        text = "# no\ndeb [arch=amd64 signed-by=/k.gpg] http://a.example/ubuntu noble-security main universe # yes\n"
        text += "deb-src http://a.example/ubuntu noble main\n"
        chosen = apt.select(apt._one_line(text), "noble", "noble")
        self.assertEqual(len(chosen), 1)
        self.assertEqual(chosen[0]["Signed-By"], "/k.gpg")
        self.assertEqual(chosen[0]["Components"], "main universe")


class JsonRpc(unittest.TestCase):
    def serve(self, *replies):
        folder = tempfile.mkdtemp()
        path = f"{folder}/s"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()

        def answer():
            peer, _address = listener.accept()
            for reply in replies:
                peer.recv(1 << 16)
                for piece in reply:
                    peer.sendall(piece)
            peer.close()
            listener.close()

        thread = threading.Thread(target=answer)
        thread.start()
        self.addCleanup(thread.join)
        return path

    def test_an_answer_in_pieces_is_put_together(self):
        client = rpc.Rpc(self.serve([b'{"jsonrpc":"2.0","id":1,', b'"result":[1]}\n'], [b'{"id":2,"result":{}}']))
        self.assertEqual(client("first"), [1])
        self.assertEqual(client("second", a=1), {})
        client.close()

    def test_an_error_carries_its_code(self):
        client = rpc.Rpc(self.serve([b'{"id":1,"error":{"code":-32601,"message":"Method not found"}}']))
        with self.assertRaises(rpc.RpcError) as caught:
            client("none")
        self.assertEqual(caught.exception.code, -32601)
        client.close()

    def test_a_connection_that_ends_early_is_an_error(self):
        client = rpc.Rpc(self.serve([b'{"id":1']))
        with self.assertRaisesRegex(AssertionError, "closed"):
            client("any")
        client.close()


class Waiting(unittest.TestCase):
    def test_a_deadline_ends_a_wait(self):
        with self.assertRaisesRegex(guest.GuestError, "no rain within"):
            guest.Events().wait(lambda: False, 0.01, "rain")

    def test_an_event_ends_a_wait(self):
        events, (ours, theirs), seen = guest.Events(), socket.socketpair(), []
        with ours, theirs:
            events.add(ours, lambda: seen.append(ours.recv(10)))
            theirs.sendall(b"x")
            self.assertEqual(events.wait(lambda: seen, 5, "byte"), [b"x"])

    def test_a_job_ends_at_its_own_mark_even_in_pieces(self):
        class Port:
            job, buffer = None, b""

        job = guest.Job(Port, "4.1.99", "true")
        for piece in (b"out\n\x1e4.1.98 0\nmore", b"\n\x1e4.1", b".99 ", b"17\n"):
            self.assertIsNone(job.rc)
            job.feed(piece)
        self.assertEqual((job.rc, job.out), (17, "out\n\x1e4.1.98 0\nmore"))


class Configuration(unittest.TestCase):
    def test_it_is_what_spdk_would_read(self):
        with tempfile.TemporaryDirectory() as folder:
            target = Ringbolt(None, folder, "ringbolt")
            target.families, target.port = (4,), 4420
            target.subsystems = [Subsystem("a", [Namespace(mib=1), Namespace(mib=2, nsid=2, malloc=True)], hosts=["nqn.h"])]
            made = json.loads(json.dumps(target._configuration()))
        bdev, nvmf = made["subsystems"]
        self.assertEqual([c["method"] for c in bdev["config"]], ["bdev_uring_create", "bdev_malloc_create"])
        self.assertEqual(bdev["config"][1]["params"]["num_blocks"], 512)
        methods = ["nvmf_create_transport", "nvmf_create_subsystem", "nvmf_subsystem_add_host"]
        methods += ["nvmf_subsystem_add_ns"] * 2 + ["nvmf_subsystem_add_listener"]
        self.assertEqual([c["method"] for c in nvmf["config"]], methods)
        self.assertFalse(nvmf["config"][1]["params"]["allow_any_host"])


if __name__ == "__main__":
    unittest.main()
