"""Tests of the harness that need neither QEMU nor a network."""

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
    """Parses a newc archive like the kernel; -> {path: (mode, contents)}."""
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
    def test_entries_round_trip_with_parents_first(self):
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


    def test_files_are_appended_to_an_initramfs(self):
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
            # A medium that is plugged in again has two users.
            port = machine.Machine(nvme=(machine.Nvme(mib=1, port="port0"),)).arguments(folder)
            self.assertTrue(any("nvme-ns" in word and "share-rw=on" in word for word in port), port)
        self.assertIn("nvme,id=nvme1,serial=RBPCI1,bus=port0", arguments)
        self.assertIn("nvme-ns,bus=nvme0,drive=disk0n1,nsid=1,logical_block_size=4096,physical_block_size=4096", arguments)
        self.assertEqual(machine.Machine().arguments("/nonexistent"), [])


class RebuiltModules(unittest.TestCase):
    def test_packages_match_the_kernel_version(self):
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

    def test_a_file_that_is_not_elf_is_rejected(self):
        with self.assertRaises(ValueError):
            elf.needed(b"#!/bin/sh\n" + bytes(100))

    def test_module_info_is_read_from_its_section(self):
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

    def test_dependencies_come_first_and_once(self):
        needs = {"top": {"depends": ["left,right"]}, "left": {"depends": ["base"]}, "right": {"depends": ["base"]}}
        needs["base"] = {"softdep": ["pre: soft absent post: later"]}
        needs["soft"] = {"depends": [""]}
        self.assertEqual(self.order([("top", True)], needs), ["soft", "base", "left", "right", "top"])

    def test_built_in_modules_are_not_loaded(self):
        self.assertEqual(self.order([("a-b", True)], {"a_b": {"depends": ["c-d"]}}, ["c_d"]), ["a_b"])

    def test_a_missing_module_is_an_error_unless_optional(self):
        self.assertEqual(self.order([("none", False)], {}), [])
        with self.assertRaisesRegex(Unavailable, "no module none"):
            self.order([("none", True)], {})


class Scheduling(unittest.TestCase):
    @staticmethod
    def case(name, kind=None, seconds=5):
        return types.SimpleNamespace(name=name, machine=kind, seconds=seconds)

    def order(self, *cases):
        """-> the names in the order in which one worker runs them."""
        schedule, last, names = parallel.Schedule(cases), None, []
        while last := schedule.take(last):
            names.append(last.name)
        return names

    def test_a_guest_runs_all_cases_of_its_machine_with_the_longest_first(self):
        plain = machine.Machine()
        cases = [self.case("a"), self.case("b", plain), self.case("c"), self.case("d", plain), self.case("e", None, 9)]
        self.assertEqual(self.order(*cases), ["e", "a", "c", "b", "d"])

    def test_cases_with_rebuilt_modules_form_one_group_with_one_boot_for_each_machine(self):
        one, other = machine.Machine(vfio=True), machine.Machine(vfio=True, hugepages=1)
        cases = [self.case("a", one), self.case("b", other, 9), self.case("c", one, 6)]
        self.assertEqual(self.order(*cases), ["c", "a", "b"])
        schedule = parallel.Schedule(cases)
        schedule.take()
        self.assertEqual(schedule.take().name, "a", "20 seconds are left, which is more than a boot")

    def test_another_worker_helps_only_if_more_than_a_boot_is_left(self):
        plain = machine.Machine()
        cases = [self.case("a"), self.case("b"), self.case("c"), self.case("d"), self.case("e", plain)]
        schedule = parallel.Schedule(cases)
        first, second = schedule.take(), schedule.take()
        self.assertEqual((first.name, second.name), ("a", "e"))
        second = schedule.take(second)
        self.assertEqual(second.name, "b", "15 seconds were left")
        self.assertEqual(schedule.take(first).name, "c")
        self.assertIsNone(parallel.Schedule([]).take())
        # 5 seconds are left: for a worker that has this guest, and not for a new one.
        self.assertIsNone(schedule.take())
        self.assertEqual(schedule.take(first).name, "d")
        self.assertIsNone(schedule.take(first))


class Parallel(unittest.TestCase):
    CHILD = """
import sys
for line in sys.stdin:
    name = line.strip()
    if name == "dies":
        print("last words", flush=True)
        sys.exit(3)
    word = "FAIL" if name == "bad" else "PASS"
    print(f"{word:7} {name}: 1 s")
    print(f"    of {name}")
    print("\\x1e" + word, flush=True)
"""

    def run_cases(self, *names, jobs=2):
        shown = []
        cases = [Scheduling.case(name, machine.Machine(hugepages=at)) for at, name in enumerate(names)]
        return parallel.run([sys.executable, "-c", self.CHILD], cases, jobs, shown.append), shown

    def test_output_of_several_processes_is_merged_and_counted(self):
        count, shown = self.run_cases("a", "bad", "c")
        self.assertEqual(count, {"PASS": 2, "FAIL": 1, "SKIPPED": 0})
        self.assertIn("FAIL    bad: 1 s\n    of bad\n", shown)

    def test_a_case_whose_process_dies_fails_and_the_others_run(self):
        for jobs in (1, 2):
            count, shown = self.run_cases("a", "dies", "c", jobs=jobs)
            self.assertEqual(count, {"PASS": 2, "FAIL": 1, "SKIPPED": 0})
            self.assertIn("last words\nFAIL    dies: its process exited with status 3\n", shown)

    def test_a_process_that_never_answers_fails_every_case(self):
        cases = [Scheduling.case(name) for name in "abc"]
        count = parallel.run([sys.executable, "-c", ""], cases, 2, lambda text: None)
        self.assertEqual(count, {"PASS": 0, "FAIL": 3, "SKIPPED": 0})


class Boots(unittest.TestCase):
    def booted(self, failures):
        """-> the guest and the number of boot attempts, if the first `failures` fail."""
        outcomes = [guest.GuestError("panic\nmuch text")] * failures + ["guest"]
        with unittest.mock.patch.object(run, "Guest", side_effect=outcomes) as made, redirect_stdout(io.StringIO()):
            return run.Runner(None).boot("image", None), made.call_count

    def test_a_failed_boot_is_retried(self):
        self.assertEqual(self.booted(0), ("guest", 1))
        self.assertEqual(self.booted(2), ("guest", 3))
        with self.assertRaisesRegex(guest.GuestError, "panic"):
            self.booted(3)


class Preparation(unittest.TestCase):
    def program(self, **newer):
        """-> the guests' QEMU if the search for a newer one has this result."""
        runner = run.Runner(None)
        with (
            unittest.mock.patch.object(run.shutil, "which", return_value="/usr/bin/qemu"),
            unittest.mock.patch.object(run.Runner, "make_image"),
            unittest.mock.patch.object(run.qemu, "with_vfio_user", **newer),
            redirect_stdout(io.StringIO()) as out,
        ):
            runner.prepare()
        return runner.program, out.getvalue()

    def test_guests_run_in_the_newer_qemu_or_else_in_this_machines(self):
        self.assertEqual(self.program(return_value="/cache/qemu"), ("/cache/qemu", ""))
        program, out = self.program(side_effect=Unavailable("no network"))
        self.assertEqual(program, "qemu-system-x86_64")
        self.assertIn("no network", out)

    def test_the_cpu_time_of_a_process_is_read(self):
        booted = guest.Guest.__new__(guest.Guest)
        booted.process = types.SimpleNamespace(pid=os.getpid(), returncode=None)
        used = sum(os.times()[:2])
        self.assertAlmostEqual(booted.cpu_seconds(), used, delta=0.2)
        booted.process.returncode = 0
        self.assertEqual(booted.cpu_seconds(), 0)


class Apt(unittest.TestCase):
    @staticmethod
    def stanza(**fields):
        return "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in fields.items())

    def test_only_entries_of_the_distribution_are_kept_and_the_release_can_be_changed(self):
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

    def test_one_line_entries_are_parsed(self):
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

    def test_a_fragmented_response_is_reassembled(self):
        client = rpc.Rpc(self.serve([b'{"jsonrpc":"2.0","id":1,', b'"result":[1]}\n'], [b'{"id":2,"result":{}}']))
        self.assertEqual(client("first"), [1])
        self.assertEqual(client("second", a=1), {})
        client.close()

    def test_an_error_response_has_its_code(self):
        client = rpc.Rpc(self.serve([b'{"id":1,"error":{"code":-32601,"message":"Method not found"}}']))
        with self.assertRaises(rpc.RpcError) as caught:
            client("none")
        self.assertEqual(caught.exception.code, -32601)
        client.close()

    def test_a_connection_closed_early_is_an_error(self):
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

    def test_a_job_ends_at_its_own_marker_even_if_fragmented(self):
        class Port:
            job, buffer = None, b""

        job = guest.Job(Port, "4.1.99", "true")
        for piece in (b"out\n\x1e4.1.98 0\nmore", b"\n\x1e4.1", b".99 ", b"17\n"):
            self.assertIsNone(job.rc)
            job.feed(piece)
        self.assertEqual((job.rc, job.out), (17, "out\n\x1e4.1.98 0\nmore"))


class Configuration(unittest.TestCase):
    def test_the_configuration_has_the_format_of_spdk(self):
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
