"""Tests of the reader: SPDK's images are what SPDK says that they are, and each kind of damage is found."""

import contextlib
import copy
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import tempfile
import unittest

import built
import read_store
from blobstore import Image, Store
from built import BLOB, EXTENT_RLE, EXTENT_TABLE, EXTERNAL, FLAGS, MIB, THIN, TABLE, Built
from built import attribute, descriptor, extents, page
from crc32c import crc32c

GOLDEN = os.path.join(os.path.dirname(__file__), "../../services/blobstore/tests/golden")


def run(*arguments):
    """-> the exit status, standard output and standard error of the command."""
    output, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = read_store.main([str(argument) for argument in arguments])
    output.flush()
    return status, output.buffer.getvalue(), errors.getvalue()


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "store.img")


class Golden(unittest.TestCase):
    """SPDK's images, and its own words about them."""

    @classmethod
    def setUpClass(cls):
        if not shutil.which("zstd"):
            raise unittest.SkipTest("zstd is not installed")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.images = {}
        for name in sorted(os.listdir(GOLDEN)):
            if name.endswith(".img.zst"):
                image = os.path.join(folder.name, name.removesuffix(".zst"))
                subprocess.run(["zstd", "-q", "-d", os.path.join(GOLDEN, name), "-o", image], check=True)
                cls.images[name.removesuffix(".img.zst")] = image
        cls.esnap = cls.images.pop("esnap")

    def expected(self, name):
        with open(os.path.join(GOLDEN, f"{name}.json"), encoding="utf-8") as file:
            return json.load(file)

    def test_every_image_is_sound_and_is_what_spdk_said(self):
        self.assertGreaterEqual(len(self.images), 13)
        for name, image in self.images.items():
            with self.subTest(name):
                self.assertEqual(run("check", image)[:2], (0, b""))
                expected = os.path.join(GOLDEN, f"{name}.json")
                self.assertEqual(run("compare", image, expected, "--esnap", self.esnap)[:2], (0, b""))

    def test_a_clone_whose_external_snapshot_is_missing_is_degraded(self):
        expected = os.path.join(GOLDEN, "lvs-degraded.json")
        self.assertEqual(run("compare", self.images["lvs-512"], expected)[:2], (0, b""))
        self.assertEqual(run("compare", self.images["lvs-512"], expected, "--esnap", self.esnap)[0], 1)
        status, _, errors = run("read", self.images["lvs-512"], "lvs/esclone")
        self.assertEqual(status, 1)
        self.assertIn("external snapshot", errors)

    def test_comparing_finds_each_difference(self):
        def change(*path, value):
            expected = copy.deepcopy(original)
            at = expected
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = value
            return blobstore_compare(expected)

        def blobstore_compare(expected):
            with Image(self.images["lvs-512"]) as image, Image(self.esnap) as esnap:
                return read_store.compare(Store(image), expected, esnap)

        original = self.expected("lvs-512")
        self.assertEqual(blobstore_compare(original), [])
        lvol = ["bdevs", 1, "driver_specific", "lvol"]
        for path, value, word in (
            (["lvstores", 0, "free_clusters"], 70, "free_clusters"),
            (["lvstores", 0, "max_growable_size"], 70, "max_growable_size"),
            (["lvols", 2, "is_snapshot"], False, "is_snapshot"),
            (["lvols", 2, "num_allocated_clusters"], 4, "num_allocated_clusters"),
            (["lvols", 0, "uuid"], "0", "volumes"),
            (["bdevs", 0, "num_blocks"], 4096, "size"),
            ([*lvol, "base_snapshot"], "snap1", "snapshot"),
            (["bdevs", 2, "driver_specific", "lvol", "clones"], [], "clones"),
            (["sha256", "lvs/ro"], "0", "the sum of lvs/ro"),
            (["sha256", "lvs/lost"], "0", "there is no blob lvs/lost"),
        ):
            with self.subTest(word):
                self.assertIn(word, "\n".join(change(*path, value=value)))

    def test_what_was_under_way_is_finished_or_undone(self):
        notes = []
        for name in ("lvs-dirty", *(f"lvs-race{number}" for number in range(6))):
            with Image(self.images[name]) as image:
                notes += Store(image).notes
        self.assertTrue(any("its creation was finished" in note for note in notes))
        self.assertTrue(any("its creation was undone" in note for note in notes))

    def test_a_flipped_bit_in_any_page_of_metadata_is_found(self):
        path = self.images["lvs-512"]
        with Image(path) as image:
            used = sorted(Store(image).page_owners)
        self.assertGreater(len(used), 20)
        expected = os.path.join(GOLDEN, "lvs-512.json")
        for index in used:
            offset = (4 + index) * 4096 + 100
            with open(path, "r+b", buffering=0) as file:
                byte = os.pread(file.fileno(), 1, offset)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 8]), offset)
                status, problems, _ = run("check", path)
                if index == used[-1]:
                    self.assertEqual(run("compare", path, expected, "--esnap", self.esnap)[0], 1)
                os.pwrite(file.fileno(), bytes([byte]), offset)
            self.assertEqual(status, 1)
            self.assertIn(f"page {index}: the CRC is".encode(), problems)


class HandMade(Folder):
    """A thick volume, a snapshot with a clone, and one without an extent table in a chain of three pages."""

    def setUp(self):
        super().setUp()
        self.store = store = Built()
        store.volume(1, "thick", [1, 2, 3])
        store.volume(3, "snap", [4, 0, 5], THIN | TABLE, read_only=True)
        store.volume(5, "clone", [0, 6, 0, 7], THIN | TABLE, internal={"SNAP": 3})
        store.put(7, page(BLOB | 7, [
            descriptor(FLAGS, struct.pack("<QQQ", THIN, 0, 1)), attribute("name", b"old\0"),
        ], following=9))
        store.put(9, page(BLOB | 7, [
            attribute("uuid", b"00000000-0000-4000-8000-000000000007\0"),
            descriptor(EXTENT_RLE, struct.pack("<IIII", 8, 2, 0, 3)),
        ], sequence=1, following=8))
        store.put(8, page(BLOB | 7, [descriptor(EXTENT_RLE, struct.pack("<II", 11, 1))], sequence=2))
        store.roots.add(7)
        store.used_clusters |= {8, 9, 11}

    def problems(self):
        self.store.write(self.path)
        status, output, _ = run("check", self.path)
        lines = output.decode().splitlines()
        self.assertEqual(status, 1 if lines else 0)
        return lines

    def assertFinds(self, *words):
        """Some problem has all the words."""
        problems = self.problems()
        self.assertTrue(any(all(word in problem for word in words) for problem in problems), problems)

    def contents(self, name, *options):
        status, output, errors = run("read", self.path, name, *options)
        self.assertEqual((status, errors), (0, ""))
        return output

    def test_a_sound_store_has_no_problems(self):
        self.assertEqual(self.problems(), [])

    def test_contents_come_from_clone_snapshot_and_zeros(self):
        self.store.write(self.path)
        size = self.store.cluster_size
        filled = lambda *clusters: b"".join(bytes([cluster]) * size for cluster in clusters)  # noqa: E731
        self.assertEqual(self.contents("thick"), filled(1, 2, 3))
        self.assertEqual(self.contents("snap"), filled(4, 0, 5))
        self.assertEqual(self.contents("0x100000005"), filled(4, 6, 5, 7))
        self.assertEqual(self.contents("lvs/old"), filled(8, 9, 0, 0, 0, 11))
        offset = size + size // 2
        self.assertEqual(self.contents("clone", "--offset", offset, "--length", size),
                         filled(4, 6, 5, 7)[offset : offset + size])
        self.assertEqual(run("read", self.path, "clone", "--offset", 4 * size + 1)[0], 1)
        self.assertEqual(run("read", self.path, "nothing")[0], 1)
        status, output, _ = run("list", self.path, "--json", "--sums")
        found = json.loads(output)
        self.assertEqual(status, 0)
        self.assertEqual([volume["name"] for volume in found["volumes"]], ["thick", "snap", "clone", "old"])
        self.assertEqual(found["free_clusters"], 32 - 11)
        self.assertEqual(found["volumes"][2]["sha256"], hashlib.sha256(filled(4, 6, 5, 7)).hexdigest())

    def test_what_a_smaller_snapshot_hides_is_zeros(self):
        self.store.volume(20, "first", [12, 13, 14], THIN | TABLE, read_only=True)
        self.store.volume(22, "second", [15], THIN | TABLE, read_only=True, internal={"SNAP": 20})
        self.store.volume(24, "top", [0, 0, 16], THIN | TABLE, internal={"SNAP": 22})
        self.assertEqual(self.problems(), [])
        size = self.store.cluster_size
        self.assertEqual(self.contents("top"), bytes([15]) * size + bytes(size) + bytes([16]) * size)

    def test_an_external_snapshot_ends_in_zeros(self):
        self.store.volume(20, "external", [0, 12, 0], THIN | TABLE | EXTERNAL, internal={"EXTSNAP": b"elsewhere"})
        self.assertEqual(self.problems(), [])
        esnap = self.path + ".esnap"
        with open(esnap, "wb") as file:
            file.write(b"e" * 1000)
        size = self.store.cluster_size
        self.assertEqual(self.contents("external", "--esnap", esnap),
                         b"e" * 1000 + bytes(size - 1000) + bytes([12]) * size + bytes(size))

    # Damage.

    def test_a_file_without_a_signature_is_no_store(self):
        for contents in (b"", b"SPDK", bytes(8192)):
            with open(self.path, "wb") as file:
                file.write(contents)
            for command in ("check", "list"):
                self.assertEqual(run(command, self.path)[0], 2)

    def test_a_flipped_bit_in_the_super_block_is_found(self):
        self.store.write(self.path)
        for offset in (8, 30, 80, 2000, 4095):
            with open(self.path, "r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 16]))
                file.flush()
                status, output, _ = run("check", self.path)
                self.assertEqual(status, 1)
                self.assertIn(b"super block: the CRC", output)
                self.assertEqual(run("list", self.path)[0], 1)
                file.seek(offset)
                file.write(bytes([byte]))

    def test_reserved_bytes_that_are_used_are_found(self):
        self.store.edit(9, 12, b"\1")
        self.assertFinds("metadata page 9: the reserved bytes are 0x1")
        self.store.edit(9, 12, b"\0")
        self.store.edit(2, 12, b"\1")
        self.assertFinds("extent page 2: the reserved bytes are 0x1")
        self.store.edit(2, 12, b"\0")
        self.store.reserved = b"\1"
        self.assertFinds("super block: the reserved bytes")

    def test_an_unknown_version_is_found(self):
        self.store.version = 4
        self.assertFinds("super block: version 4")

    def test_a_truncated_file_is_found(self):
        self.store.write(self.path)
        os.truncate(self.path, self.store.size - 512)
        status, output, _ = run("check", self.path)
        self.assertEqual(status, 1)
        self.assertIn(b"less than the store's", output)

    def test_regions_that_overlap_or_are_too_small_are_found(self):
        self.store.regions["clusters"] = (1, 1)
        self.assertFinds("the mask of used clusters", "inside the mask of used metadata pages")
        self.store.regions["clusters"] = (2, 0)
        self.assertFinds("the mask of used clusters has 0 pages, too few")

    def test_a_cluster_with_two_owners_is_found(self):
        self.store.put(6, page(BLOB | 5, [extents(0, [0, 3, 0, 7])]))
        self.assertFinds("cluster 3 has two owners", "(thick)", "(clone)")

    def test_a_cluster_twice_in_a_blob_is_found(self):
        self.store.put(6, page(BLOB | 5, [extents(0, [0, 7, 0, 7])]))
        self.assertFinds("cluster 7 has two owners")

    def test_clusters_that_cannot_be_used_are_found(self):
        self.store.put(2, page(BLOB | 1, [extents(0, [1, 32, 3])]))
        self.assertFinds("(thick)", "cluster 32 of the store, which has 32")
        self.store.put(2, page(BLOB | 1, [extents(0, [1, 0, 3])]))
        self.assertFinds("(thick)", "unallocated clusters in a blob that is not thin")
        self.store.put(2, page(BLOB | 1, [extents(0, [1, 2])]))
        self.assertFinds("(thick)", "extent table has 3 clusters, its extent pages 2")
        self.store.put(2, page(BLOB | 1, [extents(512, [1, 2, 3])]))
        self.assertFinds("extent page 2 starts at cluster 512")
        self.store.put(2, page(1, [extents(0, [1, 2, 3])]))
        self.assertFinds("extent page 2 is one of blob 0x1, which is no blob id")

    def test_a_metadata_page_with_two_owners_is_found(self):
        table = descriptor(EXTENT_TABLE, struct.pack("<QII", 3, 2, 1))
        self.store.blob(20, "second", descriptors=[table])
        self.assertFinds("metadata page 2 has two owners", "(thick)", "(second)")

    def test_extent_tables_that_contradict_the_size_are_found(self):
        for words, table in (
            ("extent page 48 is not one of the 48", struct.pack("<QII", 3, 48, 1)),
            ("has 2 entries, not the 1", struct.pack("<QIIII", 3, 2, 1, 30, 1)),
            ("repeats page 2", struct.pack("<QII", 600, 2, 2)),
            ("an entry for no page", struct.pack("<QIIII", 3, 2, 1, 0, 0)),
            ("gaps in a blob that is not thin", struct.pack("<QIIII", 600, 2, 1, 0, 1)),
        ):
            with self.subTest(words):
                self.store.blob(1, "thick", descriptors=[descriptor(EXTENT_TABLE, table)])
                self.assertFinds("(thick)", words)

    def test_leaks_in_the_masks_are_found(self):
        self.store.used_clusters |= {17, 18}
        problem = "cluster 17 to 18 is set in the mask of used clusters, but has no owner: it leaked"
        self.assertEqual(self.problems(), [problem])
        self.store.used_clusters -= {17, 18}
        self.store.used_pages.add(30)
        self.assertFinds("metadata page 30 is set", "leaked")

    def test_what_the_masks_lack_is_found(self):
        self.store.used_clusters.remove(6)
        self.assertFinds("cluster 6 is in use, but not set")
        self.store.used_clusters.add(6)
        self.store.used_pages.remove(9)
        self.assertFinds("metadata page 9 is in use, but not set")
        self.store.used_pages.add(9)
        self.store.roots.remove(3)
        self.assertFinds("metadata page 3 is the root of a blob that the mask of used blob ids lacks")

    def test_masks_of_another_length_are_found(self):
        for name, words in (
            ("pages", "the mask of used metadata pages has 49 bits, not 48"),
            ("ids", "the mask of used blob ids has 49 bits, not 48"),
        ):
            self.store.lengths = {name: 49}
            self.assertFinds(words)
        # One of clusters may be longer, after a growth that failed, but not longer than its pages.
        self.store.lengths = {"clusters": 4091 * 8}
        self.assertEqual(self.problems(), [])
        self.store.lengths = {"clusters": 4091 * 8 + 1}
        self.assertFinds("the mask of used clusters has 32729 bits, more than its pages")
        self.store.lengths = {"clusters": 31}
        self.assertFinds("the mask of used clusters has 31 bits, not 32")

    def test_bits_beyond_a_mask_are_found(self):
        self.store.used_clusters.add(32)
        self.assertFinds("bit 32 is set", "beyond its 32")

    def test_a_blob_id_without_a_root_page_is_found(self):
        self.store.roots.add(40)
        self.assertFinds("blob 0x100000028", "metadata page 40")

    def test_broken_chains_are_found(self):
        self.store.edit(8, 4088, struct.pack("<I", 9))
        self.assertFinds("(old)", "has a loop: page 9 follows page 8")
        self.store.edit(8, 4088, struct.pack("<I", 7))
        self.assertFinds("(old)", "has a loop: page 7 follows page 8")
        self.store.edit(8, 4088, struct.pack("<I", 48))
        self.assertFinds("(old)", "goes to metadata page 48 of 48")
        self.store.edit(8, 4088, b"\xff" * 4)
        self.store.edit(8, 8, struct.pack("<I", 5))
        self.assertFinds("metadata page 8 has sequence number 5, not 2")
        self.store.edit(8, 0, struct.pack("<QI", BLOB | 1, 2))
        self.assertFinds("metadata page 8 is one of blob 0x100000001")

    def test_a_flipped_bit_in_a_page_of_a_chain_is_found(self):
        data = bytearray(self.store.pages[9])
        data[3000] ^= 1
        self.store.pages[9] = bytes(data)
        self.assertFinds("(old)", "metadata page 9: the CRC is")

    def test_broken_descriptors_are_found(self):
        flags = self.store.pages[1]
        for offset, data, word in (
            (16 + 1, struct.pack("<I", 25), "flags of 25 bytes"),
            (16 + 1, struct.pack("<I", 5000), "more than the page has"),
            (16 + 5, struct.pack("<Q", TABLE | 16), "unknown flags 0x10"),
            (16 + 5, struct.pack("<Q", 0), "differ on whether it has an extent table"),
            (16, b"\x09", "unknown type 9"),
            (16 + 29 + 5, b"\x07", "an attribute of"),
        ):
            with self.subTest(word):
                self.store.pages[1] = flags
                self.store.edit(1, offset, data)
                self.assertFinds("blob 0x100000001", word)

    def test_a_missing_snapshot_is_found(self):
        for index in (3, 4):
            del self.store.pages[index]
            self.store.used_pages.remove(index)
        self.store.roots.remove(3)
        self.store.used_clusters -= {4, 5}
        self.assertEqual(self.problems(), ["blob 0x100000005 (clone): its snapshot 0x100000003 does not exist"])
        self.assertEqual(run("read", self.path, "clone")[0], 1)

    def test_snapshots_that_form_a_cycle_are_found(self):
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE, read_only=True, internal={"SNAP": 5})
        self.assertFinds("(snap): its snapshots form a cycle")
        self.assertEqual(run("read", self.path, "clone")[0], 1)
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE, read_only=True, internal={"SNAP": 3})
        self.assertFinds("(snap): its snapshots form a cycle")

    def test_relations_that_contradict_the_flags_are_found(self):
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE)
        self.assertFinds("(clone)", "(snap), is not read-only")
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE, read_only=True)
        self.store.volume(1, "thick", [1, 2, 3], TABLE | EXTERNAL, internal={"EXTSNAP": b"elsewhere"})
        self.assertFinds("(thick)", "a clone of an external snapshot, but not thin")
        self.store.volume(1, "thick", [1, 2, 3], TABLE | EXTERNAL)
        self.assertFinds("(thick)", "has an external snapshot")

    def test_a_stale_reference_to_a_snapshot_has_no_effect(self):
        # As SPDK leaves it: an esnap clone whose snapshot was deleted, and the same after it was inflated.
        self.store.volume(5, "clone", [0, 6], THIN | TABLE | EXTERNAL, internal={"SNAP": 30, "EXTSNAP": b"elsewhere"})
        self.store.volume(1, "thick", [1, 2, 3], TABLE, internal={"SNAP": 3})
        self.store.used_clusters.discard(7)
        self.assertEqual(self.problems(), [])
        notes = run("check", self.path)[2]
        self.assertIn("(clone): the attribute SNAP is stale", notes)
        self.assertIn("(thick): the attribute SNAP is stale", notes)
        self.assertEqual(self.contents("thick")[:1], b"\1")
        with Image(self.path) as image:
            self.assertEqual(Store(image).clones(), {})

    def test_names_and_uuids_that_repeat_or_lack_are_found(self):
        self.store.volume(20, "thick", [12], uuid=5)
        problems = self.problems()
        self.assertTrue(any("have the same name" in problem for problem in problems), problems)
        self.assertTrue(any("have the same UUID" in problem for problem in problems), problems)
        self.store.volume(20, "", [12])
        self.assertFinds("it has no proper name")

    def test_a_missing_super_blob_is_found(self):
        self.store.super_blob = BLOB | 40
        self.assertFinds("the super blob 0x100000028 does not exist")

    # Stores that were not closed.

    def recovered(self):
        self.store.clean = 0
        self.store.used_clusters.add(20)  # the masks are stale
        self.store.roots.discard(3)
        self.assertEqual(self.problems(), [])
        with Image(self.path) as image:
            return Store(image)

    def test_a_store_that_was_not_closed_is_read_from_its_pages(self):
        store = self.recovered()
        self.assertEqual(store.free_clusters, 32 - 11)
        self.assertEqual(len(store.blobs), 5)

    def test_a_root_page_with_a_wrong_crc_is_found_in_recovery(self):
        self.store.clean = 0
        data = bytearray(self.store.pages[1])
        data[3000] ^= 1
        self.store.pages[1] = bytes(data)
        self.assertFinds("metadata page 1 looks like the root of blob 0x100000001")

    def test_a_snapshot_under_way_is_undone_if_the_volume_does_not_use_it(self):
        # It already has the volume's extent page, as the volume itself has.
        table = descriptor(EXTENT_TABLE, struct.pack("<QII", 3, 2, 1))
        self.store.blob(20, "early", THIN | TABLE, internal={"SNAPTMP": 1}, descriptors=[table])
        store = self.recovered()
        self.assertNotIn(BLOB | 20, store.blobs)
        self.assertIn("its creation was undone", store.notes[0])
        self.assertEqual(store.free_clusters, 32 - 11)

    def test_a_snapshot_under_way_is_finished_if_the_volume_uses_it(self):
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE, internal={"SNAPTMP": 5})
        store = self.recovered()
        self.assertTrue(store.find("snap").read_only)
        self.assertEqual(store.find("snap").internal, {})
        self.assertIn("its creation was finished", store.notes[0])

    def test_a_deletion_under_way_is_finished_if_the_clone_no_longer_uses_the_snapshot(self):
        # The clone has its own cluster 0, and the snapshot's extent page no more.
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE, read_only=True, internal={"SNAPRM": 5})
        self.store.volume(5, "clone", [6, 7, 5], THIN | TABLE)
        store = self.recovered()
        self.assertNotIn(BLOB | 3, store.blobs)
        self.assertIn("its deletion was finished", store.notes[0])
        self.assertEqual(store.free_clusters, 32 - 10)

    def test_a_deletion_under_way_is_undone_if_the_clone_still_uses_the_snapshot(self):
        # The snapshot's clusters are in the clone's extent page already.
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE, read_only=True, internal={"SNAPRM": 5})
        self.store.volume(5, "clone", [4, 6, 5, 7], THIN | TABLE, internal={"SNAP": 3})
        store = self.recovered()
        self.assertIn("its deletion was undone", store.notes[0])
        self.assertEqual(store.find("clone").parent, BLOB | 3)

    def test_an_operation_whose_clone_is_missing_is_found(self):
        self.store.volume(3, "snap", [4, 0, 5], THIN | TABLE, read_only=True, internal={"SNAPRM": 30})
        self.assertFinds("(snap): SNAPRM names a clone that does not exist")

    def test_a_change_of_size_under_way_is_what_the_extent_pages_have(self):
        self.store.put(2, page(BLOB | 1, [extents(0, [1, 2, 3, 12])]))
        store = self.recovered()
        self.assertEqual(store.find("thick").num_clusters, 4)
        self.assertIn("as a change of size under way leaves it", store.notes[0])

    def test_a_clean_store_may_have_what_its_next_load_finishes(self):
        table = descriptor(EXTENT_TABLE, struct.pack("<QII", 3, 2, 1))
        self.store.blob(20, "early", THIN | TABLE, internal={"SNAPTMP": 1}, descriptors=[table])
        self.assertEqual(self.problems(), [])


class Large(Folder):
    def test_holes_of_a_store_of_terabytes_are_not_read(self):
        store = Built(clusters=8 << 20, cluster_size=MIB, md_pages=8 << 20)
        store.clean = 0
        masks = (5 + (1 << 20) + 4095) // 4096
        starts = [1 + masks * number for number in range(4)]
        store.regions = dict(zip(("pages", "clusters", "ids", "metadata"),
                                 zip(starts, (masks, masks, masks, store.md_pages))))
        # Thin, of 4 TiB, with a cluster in its last extent page; the table repeats gaps.
        last = (4 << 20) // 512 - 1
        table = struct.pack("<QIIII", 4 << 20, 0, last, 6_000_000, 1)
        store.blob(5_000_000, "thin", THIN | TABLE, descriptors=[descriptor(EXTENT_TABLE, table)])
        cluster = (8 << 20) - 2
        store.put(6_000_000, page(BLOB | 5_000_000, [extents(last * 512, [0] * 511 + [cluster])]))
        store.used_clusters = store.used_pages = store.roots = set()
        store.write(self.path)
        with open(self.path, "r+b") as file:
            file.seek(cluster * MIB)
            file.write(b"x" * 8192)
        with Image(self.path) as image:
            amount, read = 0, image.read

            def count(offset, length):
                nonlocal amount
                amount += length
                return read(offset, length)

            image.read = count
            found = Store(image)
            self.assertEqual(found.check(), [])
            thin = found.find("thin")
            self.assertEqual((thin.num_clusters, thin.clusters), (4 << 20, {(4 << 20) - 1: cluster}))
            end = (4 << 20) * MIB
            contents = b"".join(found.read(thin, end - 2 * MIB, 2 * MIB))
            self.assertEqual(contents, bytes(MIB) + b"x" * 8192 + bytes(MIB - 8192))
        self.assertLess(amount, MIB)


class Checksums(unittest.TestCase):
    def test_crc32c_is_that_of_iscsi(self):
        # RFC 3720, B.4.
        self.assertEqual(crc32c(bytes(32)), 0x8A9136AA)
        self.assertEqual(crc32c(b"\xff" * 32), 0x62A8AB43)
        self.assertEqual(crc32c(bytes(range(32))), 0x46DD794E)
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)
        self.assertEqual(crc32c(b"6789", crc32c(b"12345")), 0xE3069283)

    def test_zeros_at_the_end_count(self):
        for length in (*range(1, 20), 4092, 8000):
            zeros = b"7" + bytes(length)
            self.assertEqual(crc32c(zeros), built.crc32c(zeros), length)


if __name__ == "__main__":
    unittest.main()
