"""Stores built by hand for the tests, byte by byte: with what SPDK's images lack, and with damage."""

import struct

MIB = 1 << 20
NO_PAGE = 0xFFFFFFFF
THIN, INTERNAL, TABLE, EXTERNAL = 1, 2, 4, 8
EXTENT_RLE, XATTR, FLAGS, XATTR_INTERNAL, EXTENT_TABLE, EXTENT_PAGE = range(1, 7)
BLOB = 1 << 32  # of a blob's id, beside the index of its root page


def step(crc):
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


STEPS = [step(byte) for byte in range(256)]


def crc32c(data):
    """Byte by byte, as the reader does not compute it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = STEPS[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def sealed(data):
    """With the CRC that 4092 bytes have."""
    return data + struct.pack("<I", crc32c(data))


def descriptor(kind, body):
    return struct.pack("<BI", kind, len(body)) + body


def attribute(name, value, internal=False):
    body = struct.pack("<HH", len(name), len(value)) + name.encode() + value
    return descriptor(XATTR_INTERNAL if internal else XATTR, body)


def extents(first, clusters):
    return descriptor(EXTENT_PAGE, struct.pack(f"<I{len(clusters)}I", first, *clusters))


def page(blob, descriptors, sequence=0, following=NO_PAGE):
    body = struct.pack("<QII", blob, sequence, 0) + b"".join(descriptors)
    return sealed(body.ljust(4088, b"\0") + struct.pack("<I", following))


class Built:
    """A store in memory. The sets `used_pages`, `used_clusters` and `roots` become its masks. Its metadata takes
    the first cluster; each other used one is filled with its number."""

    def __init__(self, clusters=32, cluster_size=256 * 1024, md_pages=48):
        self.clusters, self.cluster_size, self.md_pages = clusters, cluster_size, md_pages
        self.size = clusters * cluster_size
        self.pages, self.roots, self.used_clusters, self.used_pages = {}, set(), {0}, set()
        self.clean, self.version, self.type, self.super_blob = 1, 3, b"LVOLSTORE", BLOB
        self.reserved, self.lengths = b"", {}  # of the super block; of masks with a wrong length
        self.regions = {"pages": (1, 1), "clusters": (2, 1), "ids": (3, 1), "metadata": (4, md_pages)}
        self.blob(0, "lvs", uuid=100, descriptors=[descriptor(EXTENT_TABLE, struct.pack("<Q", 0))])

    def blob(self, root, name, flags=TABLE, read_only=False, uuid=None, internal=(), descriptors=()):
        """A blob of one page."""
        self.put(root, page(BLOB | root, [
            descriptor(FLAGS, struct.pack("<QQQ", flags | (INTERNAL if internal else 0), int(read_only), 0)),
            attribute("name", name.encode() + b"\0"),
            attribute("uuid", f"00000000-0000-4000-8000-{uuid or root:012}".encode() + b"\0"),
            *(attribute(key, value if isinstance(value, bytes) else struct.pack("<Q", BLOB | value), True)
              for key, value in dict(internal).items()),
            *descriptors,
        ]))
        self.roots.add(root)

    def volume(self, root, name, clusters, flags=TABLE, **options):
        """A blob whose single extent page follows its root page; a cluster 0 is none."""
        table = struct.pack("<QII", len(clusters), root + 1, 1)
        self.blob(root, name, flags, descriptors=[descriptor(EXTENT_TABLE, table)], **options)
        self.put(root + 1, page(BLOB | root, [extents(0, clusters)]))
        self.used_clusters.update(filter(None, clusters))

    def put(self, index, data):
        self.pages[index] = data
        self.used_pages.add(index)

    def edit(self, index, offset, data):
        """Changes bytes of a metadata page, and its CRC."""
        old = self.pages[index]
        self.pages[index] = sealed((old[:offset] + data + old[offset + len(data):])[:4092])

    def super_block(self):
        (pages, clusters, ids, metadata) = (self.regions[key] for key in ("pages", "clusters", "ids", "metadata"))
        fields = struct.pack(
            "<8sIIIQIIIIIII16sIIQII", b"SPDKBLOB", self.version, 4096, self.clean, self.super_blob, self.cluster_size,
            *pages, *clusters, *metadata, self.type, *ids, self.size, 512, 4096,
        )
        return sealed((fields + self.reserved).ljust(4092, b"\0"))

    def write(self, path):
        with open(path, "wb") as file:
            file.truncate(self.size)
            file.write(self.super_block())
            for kind, (name, bits, length) in enumerate((
                ("pages", self.used_pages, self.md_pages),
                ("clusters", self.used_clusters, self.clusters),
                ("ids", self.roots, self.md_pages),
            )):
                mask = sum(1 << bit for bit in bits).to_bytes(4096 - 5, "little")
                file.seek(self.regions[name][0] * 4096)
                file.write(struct.pack("<BI", kind, self.lengths.get(name, length)) + mask)
            for index, data in self.pages.items():
                file.seek((self.regions["metadata"][0] + index) * 4096)
                file.write(data)
            for cluster in self.used_clusters - {0}:
                file.seek(cluster * self.cluster_size)
                file.write(bytes([cluster]) * self.cluster_size)
