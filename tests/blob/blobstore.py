"""The on-disk format of a blobstore (SPDK's, versions 1 to 3), read from a file or a block device.

`Image` reads bytes, `Store` loads what a store has and checks it, `Blob` is one blob. Nothing is ever written.

    with Image("disk.img") as image:
        store = Store(image)
        problems = store.check()
        contents = b"".join(store.read(store.find("lvs/volume")))

It is written from the format's description alone and shares no code with the stores that it judges.
"""

import errno
import hashlib
import os
import re
import struct
import uuid

from crc32c import crc32c

SIGNATURE = b"SPDKBLOB"
VERSION_MAX = 3
# A metadata page says everything in this many bytes, its CRC included, whatever its size is.
PAGE_BYTES = 4096
NO_PAGE = 0xFFFFFFFF
NO_BLOB = 0xFFFFFFFFFFFFFFFF
BLOB_ID_HIGH = 1 << 32
LENGTH_MAX = 1 << 20  # of a piece that is read at once

SUPER = struct.Struct("<8sIIIQIIIIIII16sIIQII")
SUPER_FIELDS = (
    "signature version length clean super_blob cluster_size page_mask_start page_mask_len cluster_mask_start "
    "cluster_mask_len md_start md_len bstype blobid_mask_start blobid_mask_len size io_unit_size md_page_size"
).split()
PAGE = struct.Struct("<QII")  # blob id, sequence number, reserved; the descriptors follow
DESCRIPTORS_END = PAGE_BYTES - 8  # then the next page's index and the CRC

PADDING, EXTENT_RLE, XATTR, FLAGS, XATTR_INTERNAL, EXTENT_TABLE, EXTENT_PAGE = range(7)
CLUSTERS_PER_EXTENT_PAGE = 512

THIN, HAS_INTERNAL_XATTR, HAS_EXTENT_TABLE, HAS_EXTERNAL_SNAPSHOT = 1, 2, 4, 8
INVALID_FLAGS = THIN | HAS_INTERNAL_XATTR | HAS_EXTENT_TABLE | HAS_EXTERNAL_SNAPSHOT
READ_ONLY = 1
CLEAR_METHOD = 3

MASK_PAGES, MASK_CLUSTERS, MASK_BLOB_IDS = range(3)
MASK_NAMES = ("used metadata pages", "used clusters", "used blob ids")
CHECKSUMS_MARK = b"\xb1RbMark1"
MASK_HEADER = 5

# Internal attributes. The values of all but the last are blob ids.
SNAPSHOT, SNAPSHOT_IN_PROGRESS, SNAPSHOT_PENDING_REMOVAL, EXTERNAL_SNAPSHOT = (
    "SNAP", "SNAPTMP", "SNAPRM", "EXTSNAP")


class NotAStore(Exception):
    """The image has no super block."""


class Damaged(Exception):
    """What was asked for cannot be read."""


class Image:
    """A file or block device that is only read. Beyond its end it reads as zeros."""

    def __init__(self, path):
        self.file = open(path, "rb")
        self.size = self.file.seek(0, os.SEEK_END)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def read(self, offset, length):
        pieces = []
        while length:
            piece = os.pread(self.file.fileno(), length, offset)
            if not piece:
                pieces.append(bytes(length))
                break
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)

    def data(self, offset, length):
        """-> the (start, end) between `offset` and its end that are not holes."""
        end = min(offset + length, self.size)
        while offset < end:
            try:
                start = os.lseek(self.file.fileno(), offset, os.SEEK_DATA)
                stop = os.lseek(self.file.fileno(), start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                start, stop = offset, end
            if start < end:
                yield start, min(stop, end)
            offset = stop


class Mask:
    """One of the three bit masks of a clean store."""

    def __init__(self, data):
        self.type, self.length = struct.unpack_from("<BI", data)
        # Ringbolt's mark of the checksums that follow the store is no bit of it.
        if self.type == MASK_PAGES and data[-len(CHECKSUMS_MARK) - 24:].startswith(CHECKSUMS_MARK):
            data = data[:-len(CHECKSUMS_MARK) - 24] + bytes(len(CHECKSUMS_MARK) + 24)
        self.bits = data[MASK_HEADER:]

    def __contains__(self, index):
        return index // 8 < len(self.bits) and self.bits[index // 8] >> index % 8 & 1 == 1

    def __iter__(self):
        return bits_set(self.bits)


def bits_set(data):
    for run in re.finditer(rb"[^\0]+", data):
        for at, byte in enumerate(run.group(), run.start()):
            yield from (at * 8 + bit for bit in range(8) if byte >> bit & 1)


def bits_of(indices, length):
    data = bytearray((length + 7) // 8)
    for index in indices:
        data[index // 8] |= 1 << index % 8
    return data


def ranges(indices):
    """'7', '7 to 9' for each run of `indices`, which ascend."""
    runs = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return [f"{first}" if first == last else f"{first} to {last}" for first, last in runs]


class Page:
    def __init__(self, data):
        self.id, self.sequence, self.reserved = PAGE.unpack_from(data)
        self.next, self.crc = struct.unpack_from("<II", data, DESCRIPTORS_END)
        # In two parts, because the first one mostly ends in zeros.
        self.computed_crc = crc32c(data[DESCRIPTORS_END:-4], crc32c(data[:DESCRIPTORS_END]))
        self.data = data

    def descriptors(self):
        """-> (type, body) of each; raises Damaged at one that leaves the page."""
        at = PAGE.size
        while at + 5 <= DESCRIPTORS_END:
            kind, length = struct.unpack_from("<BI", self.data, at)
            if kind == PADDING and length == 0:
                return
            if at + 5 + length > DESCRIPTORS_END:
                raise Damaged(f"a descriptor of type {kind} at byte {at} has {length} bytes, more than the page has")
            yield kind, self.data[at + 5 : at + 5 + length]
            at += 5 + length


class Blob:
    def __init__(self, root):
        self.id = BLOB_ID_HIGH | root
        self.root = root
        self.pages = []  # of the chain
        self.extent_pages = {}  # indices of metadata pages, for the entries of the extent table that have one
        self.table_entries = 0
        self.flags = None  # (invalid, data read-only, metadata read-only)
        self.xattrs = {}
        self.internal = {}
        self.num_clusters = 0
        self.table_clusters = None  # the size in the extent table
        self.clusters = {}  # of those that are allocated
        self.rle = False
        self.unreadable = False  # what it has is not all known
        self.pending = False  # an operation was under way, and was finished
        self.shared = set()  # indices of clusters that a deletion under way left to the snapshot as well

    def __str__(self):
        name = text(self.xattrs.get("name", b""))
        return f"blob {self.id:#x}" + (f" ({name})" if name else "")

    @property
    def thin(self):
        return self.flags is not None and bool(self.flags[0] & THIN)

    @property
    def read_only(self):
        return self.flags is not None and bool(self.flags[1])

    def reference(self, name):
        value = self.internal.get(name)
        return int.from_bytes(value, "little") if value is not None and len(value) == 8 else None

    @property
    def parent(self):
        return self.reference(SNAPSHOT) if self.thin and self.esnap is None else None

    @property
    def esnap(self):
        if self.flags is None or not self.flags[0] & HAS_EXTERNAL_SNAPSHOT:
            return None
        return self.internal.get(EXTERNAL_SNAPSHOT)


def text(value):
    """A string up to its NUL, or hexadecimal digits where it isn't one."""
    try:
        return value.split(b"\0")[0].decode()
    except UnicodeDecodeError:
        return value.hex()


class Store:
    """A loaded store. `problems` are what breaks the format's promises, `notes` what recovery did."""

    def __init__(self, image):
        self.image = image
        self.problems, self.notes = [], []
        self.blobs, self.dropped = {}, []  # by id; those that recovery deleted
        self.masks = {}
        self.cluster_owners, self.page_owners = {}, {}
        self.load_super()
        if not self.problems:
            self.load()

    # Loading.

    def load_super(self):
        data = self.image.read(0, PAGE_BYTES)
        if data[: len(SIGNATURE)] != SIGNATURE:
            raise NotAStore("there is no blobstore: the signature is missing")
        self.__dict__.update(zip(SUPER_FIELDS, SUPER.unpack_from(data)))
        crc, computed = struct.unpack_from("<I", data, PAGE_BYTES - 4)[0], crc32c(data[:-4])
        if crc != computed:
            self.problems.append(f"super block: the CRC is {crc:#010x}, but its contents have {computed:#010x}")
        if not 1 <= self.version <= VERSION_MAX:
            self.problems.append(f"super block: version {self.version} is not one of 1 to {VERSION_MAX}")
        if self.problems:
            return
        self.size = self.size or self.image.size
        self.io_unit_size = self.io_unit_size or PAGE_BYTES
        self.md_page_size = self.md_page_size or PAGE_BYTES
        self.recovered = self.clean == 0 or self.blobid_mask_len == 0
        bad = self.problems.append
        if self.size > self.image.size:
            bad(f"the image has {self.image.size} bytes, less than the store's {self.size}")
        if self.md_page_size % PAGE_BYTES or self.md_page_size & self.md_page_size - 1:
            bad(f"super block: metadata pages of {self.md_page_size} bytes")
        elif not self.cluster_size or self.cluster_size % self.md_page_size:
            bad(f"super block: clusters of {self.cluster_size} bytes are not of whole metadata pages")
        elif self.cluster_size % self.io_unit_size:
            bad(f"super block: clusters of {self.cluster_size} bytes are not of whole blocks of {self.io_unit_size}")
        if self.problems:
            return
        self.total_clusters = self.size // self.cluster_size
        self.md_clusters = -(-(self.md_start + self.md_len) * self.md_page_size // self.cluster_size)
        self.total_data_clusters = self.total_clusters - self.md_clusters
        self.reserved = data[SUPER.size : -4]
        at, before = 1, "the super block"
        regions = [
            ("the mask of used metadata pages", self.page_mask_start, self.page_mask_len, self.md_len),
            ("the mask of used clusters", self.cluster_mask_start, self.cluster_mask_len, self.total_clusters),
            ("the mask of used blob ids", self.blobid_mask_start, self.blobid_mask_len, self.md_len),
            ("the metadata", self.md_start, self.md_len, None),
        ]
        if self.version < 3 and self.blobid_mask_len == 0:
            del regions[2]
        for name, start, length, bits in regions:
            if start < at:
                bad(f"super block: {name} starts at page {start}, inside {before}")
            if bits is not None and MASK_HEADER + (bits + 7) // 8 > length * self.md_page_size:
                bad(f"super block: {name} has {length} pages, too few for {bits} bits")
            at, before = start + length, name
        if self.total_data_clusters < 0 or self.md_len == 0:
            bad(f"super block: {self.md_len} pages of metadata in {self.total_clusters} clusters")

    def load(self):
        if self.recovered:
            roots = self.find_roots()
        else:
            for kind, start, length in (
                (MASK_PAGES, self.page_mask_start, self.page_mask_len),
                (MASK_CLUSTERS, self.cluster_mask_start, self.cluster_mask_len),
                (MASK_BLOB_IDS, self.blobid_mask_start, self.blobid_mask_len),
            ):
                self.masks[kind] = Mask(self.image.read(start * self.md_page_size, length * self.md_page_size))
            roots = [root for root in self.masks[MASK_BLOB_IDS] if root < self.md_len]
        for root in roots:
            blob = Blob(root)
            self.blobs[blob.id] = blob
            try:
                self.load_chain(blob)
                self.load_extents(blob)
            except Damaged as error:
                self.problems.append(f"{blob}: {error}")
                blob.unreadable = True
        self.finish_operations()
        self.claim()

    def page(self, index):
        return Page(self.image.read((self.md_start + index) * self.md_page_size, PAGE_BYTES))

    def find_roots(self):
        """-> the indices of the pages that start a blob. Holes are not read."""
        start, size = self.md_start * self.md_page_size, self.md_page_size
        roots, done = [], 0
        for first, end in self.image.data(start, self.md_len * size):
            at = max((first - start) // size, done)
            done = -(-(end - start) // size)
            while at < done:
                pages = min(done - at, max(LENGTH_MAX // size, 1))
                data = self.image.read(start + at * size, pages * size)
                for index in range(pages):
                    blob_id, sequence, _ = PAGE.unpack_from(data, index * size)
                    if blob_id != BLOB_ID_HIGH | at + index or sequence != 0:
                        continue
                    page = Page(data[index * size : index * size + PAGE_BYTES])
                    if page.crc == page.computed_crc:
                        roots.append(at + index)
                    else:
                        self.problems.append(
                            f"metadata page {at + index} looks like the root of blob {blob_id:#x}, but its CRC is "
                            f"{page.crc:#010x} and its contents have {page.computed_crc:#010x}"
                        )
                at += pages
        return roots

    def load_chain(self, blob):
        index = blob.root
        while index != NO_PAGE:
            if index >= self.md_len:
                raise Damaged(f"its chain goes to metadata page {index} of {self.md_len}")
            if index in blob.pages:
                raise Damaged(f"its chain of metadata pages has a loop: page {index} follows page {blob.pages[-1]}")
            page = self.page(index)
            where = f"metadata page {index}"
            if page.crc != page.computed_crc:
                raise Damaged(f"{where}: the CRC is {page.crc:#010x}, but its contents have {page.computed_crc:#010x}")
            if page.id != blob.id:
                raise Damaged(f"{where} is one of blob {page.id:#x}")
            if page.reserved:
                raise Damaged(f"{where}: the reserved bytes are {page.reserved:#x}, not 0")
            if page.sequence != len(blob.pages):
                raise Damaged(f"{where} has sequence number {page.sequence}, not {len(blob.pages)}")
            blob.pages.append(index)
            try:
                for kind, body in page.descriptors():
                    self.load_descriptor(blob, kind, body)
            except Damaged as error:
                raise Damaged(f"{where}: {error}") from None
            index = page.next
        if blob.flags is None:
            raise Damaged("it has no flags")
        if bool(blob.flags[0] & HAS_EXTENT_TABLE) != (blob.table_clusters is not None):
            raise Damaged("its flags and its descriptors differ on whether it has an extent table")

    def load_descriptor(self, blob, kind, body):
        if kind == FLAGS:
            if len(body) != 24:
                raise Damaged(f"flags of {len(body)} bytes")
            if blob.flags is not None:
                raise Damaged("flags for the second time")
            blob.flags = struct.unpack("<QQQ", body)
            for name, known, flags in zip(
                ("flags", "data read-only flags", "metadata read-only flags"),
                (INVALID_FLAGS, READ_ONLY, CLEAR_METHOD), blob.flags,
            ):
                if flags & ~known:
                    raise Damaged(f"unknown {name} {flags & ~known:#x}")
        elif kind in (XATTR, XATTR_INTERNAL):
            if len(body) < 4:
                raise Damaged(f"an attribute of {len(body)} bytes")
            name_length, value_length = struct.unpack_from("<HH", body)
            if 4 + name_length + value_length != len(body):
                raise Damaged(f"an attribute of {len(body)} bytes, {name_length} of name and {value_length} of value")
            name, value = text(body[4 : 4 + name_length]), body[4 + name_length :]
            attributes = blob.xattrs if kind == XATTR else blob.internal
            if name in attributes:
                raise Damaged(f"the attribute {name} for the second time")
            attributes[name] = value
        elif kind == EXTENT_RLE:
            if not body or len(body) % 8:
                raise Damaged(f"extents of {len(body)} bytes")
            if blob.table_clusters is not None:
                raise Damaged("extents beside an extent table")
            blob.rle = True
            for cluster, count in struct.iter_unpack("<II", body):
                if not count:
                    raise Damaged("an extent of no cluster")
                self.add_clusters(blob, range(cluster, cluster + count) if cluster else None, count)
        elif kind == EXTENT_TABLE:
            if len(body) < 8 or len(body) % 8:
                raise Damaged(f"an extent table of {len(body)} bytes")
            if blob.rle:
                raise Damaged("an extent table beside extents")
            (clusters,) = struct.unpack_from("<Q", body)
            if blob.table_clusters not in (None, clusters):
                raise Damaged(f"an extent table for {clusters} clusters after one for {blob.table_clusters}")
            blob.table_clusters = clusters
            for page, count in struct.iter_unpack("<II", body[8:]):
                if not count:
                    raise Damaged("an extent table with an entry for no page")
                if page and count != 1:
                    raise Damaged(f"an extent table that repeats page {page} {count} times")
                if page >= self.md_len:
                    raise Damaged(f"extent page {page} is not one of the {self.md_len} metadata pages")
                if not page and not blob.thin:
                    raise Damaged("an extent table with gaps in a blob that is not thin")
                if page:
                    blob.extent_pages[blob.table_entries] = page
                blob.table_entries += count
        elif kind == EXTENT_PAGE:
            raise Damaged("an extent page in the chain")
        elif kind != PADDING:
            raise Damaged(f"a descriptor of the unknown type {kind}")

    def add_clusters(self, blob, clusters, count):
        """Appends clusters to a blob; None for those that are not allocated."""
        if clusters is None:
            if not blob.thin:
                raise Damaged("unallocated clusters in a blob that is not thin")
        else:
            for index, cluster in enumerate(clusters, blob.num_clusters):
                where = f"cluster {index} is at cluster {cluster} of the store"
                if cluster >= self.total_clusters:
                    raise Damaged(f"{where}, which has {self.total_clusters}")
                if cluster < self.md_clusters:
                    raise Damaged(f"{where}, which has metadata")
                blob.clusters[index] = cluster
        blob.num_clusters += count

    def load_extents(self, blob):
        if blob.table_clusters is None:
            return
        wanted = -(-blob.table_clusters // CLUSTERS_PER_EXTENT_PAGE)
        if blob.table_entries != wanted:
            raise Damaged(f"its extent table has {blob.table_entries} entries, not the {wanted} that "
                          f"{blob.table_clusters} clusters need")
        at = 0
        for entry, index in blob.extent_pages.items():
            if at < entry:
                self.add_clusters(blob, None, (entry - at) * CLUSTERS_PER_EXTENT_PAGE)
            at = entry + 1
            where = f"extent page {index}"
            page = self.page(index)
            if page.crc != page.computed_crc:
                raise Damaged(f"{where}: the CRC is {page.crc:#010x}, but its contents have {page.computed_crc:#010x}")
            # A snapshot has the pages of the blob that it was made of, with that blob's id, which may be gone.
            if page.id >> 32 != BLOB_ID_HIGH >> 32 or page.id & 0xFFFFFFFF >= self.md_len:
                raise Damaged(f"{where} is one of blob {page.id:#x}, which is no blob id")
            if page.reserved:
                raise Damaged(f"{where}: the reserved bytes are {page.reserved:#x}, not 0")
            if page.sequence != 0 or page.next != NO_PAGE:
                raise Damaged(f"{where} is part of a chain")
            try:
                descriptors = list(page.descriptors())
            except Damaged as error:
                raise Damaged(f"{where}: {error}") from None
            if [kind for kind, _ in descriptors] != [EXTENT_PAGE]:
                raise Damaged(f"{where} has other descriptors than one of extents")
            body = descriptors[0][1]
            if len(body) <= 4 or len(body) % 4 or len(body) > 4 + 4 * CLUSTERS_PER_EXTENT_PAGE:
                raise Damaged(f"{where} has {len(body)} bytes of extents")
            start, *clusters = struct.unpack(f"<{len(body) // 4}I", body)
            if start != blob.num_clusters:
                raise Damaged(f"{where} starts at cluster {start} instead of {blob.num_clusters}")
            for cluster in clusters:
                self.add_clusters(blob, (cluster,) if cluster else None, 1)
        if at < wanted:
            self.add_clusters(blob, None, blob.table_clusters - at * CLUSTERS_PER_EXTENT_PAGE)
        if blob.num_clusters != blob.table_clusters:
            # A change of size writes the last extent page first: what it has is the size.
            words = f"its extent table has {blob.table_clusters} clusters, its extent pages {blob.num_clusters}"
            if not self.recovered:
                raise Damaged(words)
            self.notes.append(f"{blob}: {words}, as a change of size under way leaves it")

    # Recovery.

    def finish_operations(self):
        """If the clone uses the snapshot, its creation is finished or its deletion undone; else it is deleted."""
        for blob in list(self.blobs.values()):
            name = SNAPSHOT_PENDING_REMOVAL if SNAPSHOT_PENDING_REMOVAL in blob.internal else SNAPSHOT_IN_PROGRESS
            if name not in blob.internal:
                continue
            clone = self.blobs.get(blob.reference(name))
            if clone is None:
                self.problems.append(f"{blob}: {name} names a clone that does not exist")
                continue
            if clone.parent != blob.id:
                what = "deletion was finished" if name == SNAPSHOT_PENDING_REMOVAL else "creation was undone"
                self.notes.append(f"{blob}: {name} was set and {clone} does not use it: its {what}")
                self.dropped.append(self.blobs.pop(blob.id))
                continue
            what = "deletion was undone" if name == SNAPSHOT_PENDING_REMOVAL else "creation was finished"
            self.notes.append(f"{blob}: {name} was set and {clone} uses it: its {what}")
            del blob.internal[name]
            blob.internal.pop(SNAPSHOT_IN_PROGRESS, None)
            blob.pending = True
            if blob.flags is not None:
                blob.flags = (blob.flags[0], blob.flags[1] | READ_ONLY, blob.flags[2])
            if name == SNAPSHOT_PENDING_REMOVAL:
                # A deletion enters the snapshot's clusters in the clone's extent pages before it changes the clone.
                clone.shared = {
                    index for index, cluster in clone.clusters.items() if blob.clusters.get(index) == cluster
                }

    def claim(self):
        """Enters the owner of each metadata page and cluster."""
        for index in range(self.md_clusters):
            self.cluster_owners[index] = "the metadata"
        for blob in self.blobs.values():
            for index in blob.pages:
                self.claim_page(index, f"the chain of {blob}")
            for index in blob.extent_pages.values():
                self.claim_page(index, f"the extents of {blob}")
            owners = self.cluster_owners
            for index, cluster in blob.clusters.items():
                if cluster not in owners:
                    owners[cluster] = blob
                elif index not in blob.shared:
                    self.problems.append(f"cluster {cluster} has two owners: {owners[cluster]} and {blob}")

    def claim_page(self, index, owner):
        if index in self.page_owners:
            self.problems.append(f"metadata page {index} has two owners: {self.page_owners[index]} and {owner}")
        else:
            self.page_owners[index] = owner

    # Checks.

    def check(self):
        """Adds all further problems; -> all."""
        if self.problems and not self.blobs:
            return self.problems
        if self.length != PAGE_BYTES:
            self.problems.append(f"super block: its length is {self.length}, not {PAGE_BYTES}")
        if self.clean > 1:
            self.problems.append(f"super block: clean is {self.clean}, neither 0 nor 1")
        if any(self.reserved):
            self.problems.append("super block: the reserved bytes are not 0")
        if not self.recovered:
            self.check_masks()
        for blob in self.blobs.values():
            if not blob.unreadable:
                self.check_attributes(blob)
                self.check_ancestors(blob)
        self.check_super_blob()
        return self.problems

    def check_masks(self):
        # What recovery would delete is still in a clean store's masks.
        blobs = [*self.blobs.values(), *self.dropped]
        pages, clusters = set(self.page_owners), set(self.cluster_owners)
        for blob in self.dropped:
            pages.update(blob.pages, blob.extent_pages.values())
            clusters.update(blob.clusters.values())
        roots, known = {blob.root for blob in blobs}, not any(blob.unreadable for blob in blobs)
        for kind, name, length, used in (
            (MASK_PAGES, "metadata page", self.md_len, pages),
            (MASK_BLOB_IDS, "blob id", self.md_len, roots),
            (MASK_CLUSTERS, "cluster", self.total_clusters, clusters),
        ):
            mask, where = self.masks[kind], f"the mask of {MASK_NAMES[kind]}"
            if mask.type != kind:
                self.problems.append(f"{where} has type {mask.type}, not {kind}")
            # A growth that failed may leave a mask of clusters that is longer than the store.
            if mask.length < length or mask.length > length and kind != MASK_CLUSTERS:
                self.problems.append(f"{where} has {mask.length} bits, not {length}")
            elif mask.length > len(mask.bits) * 8:
                self.problems.append(f"{where} has {mask.length} bits, more than its pages")
            wanted = bits_of(used, len(mask.bits) * 8)
            if mask.bits == wanted:
                continue
            either = int.from_bytes(mask.bits, "little") ^ int.from_bytes(wanted, "little")
            extra, missing, beyond = [], [], []
            for index in bits_set(either.to_bytes(len(wanted), "little")):
                (beyond if index >= length else extra if index in mask else missing).append(index)
            for run in ranges(extra if known or kind == MASK_BLOB_IDS else []):
                self.problems.append(f"{name} {run} is set in {where}, but has no owner: it leaked")
            for run in ranges(missing):
                self.problems.append(f"{name} {run} is in use, but not set in {where}")
            for run in ranges(beyond):
                self.problems.append(f"bit {run} is set in {where}, beyond its {length}")
        for root in self.find_roots():
            if root not in roots:
                self.problems.append(f"metadata page {root} is the root of a blob that the mask of used blob ids lacks")

    def check_attributes(self, blob):
        bad = lambda problem: self.problems.append(f"{blob}: {problem}")  # noqa: E731
        for name, value in blob.internal.items():
            if name in (SNAPSHOT, SNAPSHOT_IN_PROGRESS, SNAPSHOT_PENDING_REMOVAL):
                if len(value) != 8:
                    bad(f"{name} has {len(value)} bytes, not the 8 of a blob id")
            elif name != EXTERNAL_SNAPSHOT:
                bad(f"the internal attribute {name} is unknown")
            elif not value:
                bad(f"{name} is empty")
        # SPDK leaves the attribute when it deletes a snapshot between a clone and an external snapshot, and also
        # when it inflates that clone later. It has no effect.
        if SNAPSHOT in blob.internal and blob.parent is None:
            self.notes.append(f"{blob}: the attribute {SNAPSHOT} is stale")
        if EXTERNAL_SNAPSHOT in blob.internal and not blob.thin:
            bad("it is a clone of an external snapshot, but not thin")
        if (EXTERNAL_SNAPSHOT in blob.internal) != bool(blob.flags[0] & HAS_EXTERNAL_SNAPSHOT):
            bad("its flags and its attributes differ on whether it has an external snapshot")
        if bool(blob.internal) != bool(blob.flags[0] & HAS_INTERNAL_XATTR) and not blob.pending:
            bad("its flags and its attributes differ on whether it has internal attributes")

    def check_ancestors(self, blob):
        if blob.parent is None:
            return
        parent = self.blobs.get(blob.parent)
        if parent is None:
            self.problems.append(f"{blob}: its snapshot {blob.parent:#x} does not exist")
        elif not parent.unreadable and not parent.read_only:
            self.problems.append(f"{blob}: its snapshot, {parent}, is not read-only")
        line = {blob.id}
        while parent is not None and parent.id not in line:
            line.add(parent.id)
            parent = self.blobs.get(parent.parent)
        # Each cycle once.
        if parent is blob and blob.id == min(line):
            self.problems.append(f"{blob}: its snapshots form a cycle")

    def check_super_blob(self):
        if self.super_blob == NO_BLOB:
            if self.is_lvolstore:
                self.problems.append("the store is an lvolstore without a super blob")
            return
        blob = self.blobs.get(self.super_blob)
        if blob is None:
            self.problems.append(f"the super blob {self.super_blob:#x} does not exist")
        elif self.is_lvolstore:
            seen = {}
            list(self.check_name(blob))
            for volume in (volume for volume in self.volumes() if not volume.unreadable):
                for key in self.check_name(volume):
                    if key in seen:
                        self.problems.append(f"{volume} and {seen[key]} have the same {key[0]}")
                    seen[key] = volume

    def check_name(self, blob):
        """Checks the attributes of a volume or of the lvolstore; -> (attribute, value) of the unique ones."""
        name, identity = blob.xattrs.get("name"), blob.xattrs.get("uuid")
        if name is None or len(name) > 64 or b"\0" not in name or not text(name):
            self.problems.append(f"{blob}: it has no proper name")
        else:
            yield "name", text(name)
        if identity is None or not re.fullmatch(rb"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}\0", identity, re.I):
            self.problems.append(f"{blob}: it has no proper UUID")
        else:
            yield "UUID", uuid.UUID(text(identity))

    # What the store has.

    @property
    def is_lvolstore(self):
        return text(self.bstype) == "LVOLSTORE"

    @property
    def free_clusters(self):
        return self.total_clusters - len(self.cluster_owners)

    def volumes(self):
        """-> the blobs, in an lvolstore without the super blob."""
        hidden = self.super_blob if self.is_lvolstore else None
        return [blob for blob in self.blobs.values() if blob.id != hidden]

    def clones(self):
        """-> the clones of each snapshot, by its id."""
        clones = {}
        for blob in self.blobs.values():
            if blob.parent is not None:
                clones.setdefault(blob.parent, []).append(blob)
        return clones

    def find(self, name):
        """-> the blob with an id, name (of which the lvolstore's name may be a part) or UUID."""
        for blob in self.blobs.values():
            names = {text(blob.xattrs.get(key, b"")) for key in ("name", "uuid")}
            if name and name.lower() == f"{blob.id:#x}" or name in names or name.split("/")[-1] in names:
                return blob
        raise Damaged(f"there is no blob {name}")

    # Contents.

    def ancestry(self, blob):
        """-> the blob, its snapshot, that one's snapshot and so on."""
        line, seen = [blob], {blob.id}
        while (parent := line[-1].parent) is not None:
            if parent not in self.blobs:
                raise Damaged(f"{line[-1]}: its snapshot {parent:#x} does not exist")
            if parent in seen:
                raise Damaged(f"{blob}: its snapshots form a cycle")
            seen.add(parent)
            line.append(self.blobs[parent])
        return line

    def layout(self, blob):
        """-> for each run of clusters: its first, the one after its last, and the store's cluster that has the
        first; or "esnap" in its place, or None for zeros."""
        line = self.ancestry(blob)
        # A cluster beyond the end of any blob on the way is zeros, even where a farther snapshot has it.
        limits, limit = [], blob.num_clusters
        for ancestor in line:
            limit = min(limit, ancestor.num_clusters)
            limits.append(limit)
        found = {}
        for ancestor, limit in zip(reversed(line), reversed(limits)):
            found.update((index, cluster) for index, cluster in ancestor.clusters.items() if index < limit)
        backed = limits[-1] if line[-1].esnap is not None else 0
        runs, at = [], 0

        def gap(end):
            if at < min(end, backed):
                runs.append((at, min(end, backed), "esnap"))
            if max(at, backed) < end:
                runs.append((max(at, backed), end, None))

        for index in sorted(found):
            gap(index)
            if runs and isinstance(runs[-1][2], int) and runs[-1][1] == index and (
                    runs[-1][2] + index - runs[-1][0] == found[index]):
                runs[-1] = (runs[-1][0], index + 1, runs[-1][2])
            else:
                runs.append((index, index + 1, found[index]))
            at = index + 1
        gap(blob.num_clusters)
        return runs

    def read(self, blob, offset=0, length=None, esnap=None):
        """-> the pieces of a range of the contents. Holes of the image are not read."""
        size = blob.num_clusters * self.cluster_size
        end = size if length is None else offset + length
        if offset > size or end > size:
            raise Damaged(f"{blob} has {size} bytes")
        for first, last, source in self.layout(blob):
            start, stop = max(first * self.cluster_size, offset), min(last * self.cluster_size, end)
            if start >= stop:
                continue
            if source is None:
                yield from zeros(stop - start)
            elif source == "esnap":
                if esnap is None:
                    raise Damaged(f"{blob}: its external snapshot is needed (--esnap)")
                yield from pieces(esnap, start, stop - start)
            else:
                at = source * self.cluster_size + start - first * self.cluster_size
                yield from pieces(self.image, at, stop - start)

    def sum(self, blob, esnap=None, length=None):
        digest = hashlib.sha256()
        for piece in self.read(blob, 0, length, esnap):
            digest.update(piece)
        return digest.hexdigest()


_ZEROS = memoryview(bytes(LENGTH_MAX))


def zeros(length):
    while length > 0:
        yield _ZEROS[: min(length, LENGTH_MAX)]
        length -= LENGTH_MAX


def pieces(image, offset, length):
    end = offset + length
    for start, stop in image.data(offset, length):
        yield from zeros(start - offset)
        for at in range(start, stop, LENGTH_MAX):
            yield image.read(at, min(LENGTH_MAX, stop - at))
        offset = stop
    yield from zeros(end - offset)
