#!/usr/bin/env python3
"""Reads a blobstore (SPDK's format, versions 1 to 3) from a file or a block device, and judges it.

    read_store.py list IMAGE [--json] [--sums] [--esnap FILE]
    read_store.py check IMAGE
    read_store.py read IMAGE BLOB [--offset N] [--length N] [--esnap FILE]
    read_store.py compare IMAGE EXPECTED.json [--esnap FILE]

It never writes. A store that was not closed is recovered in memory: the blobs are found by their root pages, and
a snapshot or a deletion that was under way is finished or undone. BLOB is an id, a name or a UUID.

Exit status: 0, or 1 if there are problems (each is printed on a line), or 2 if IMAGE holds no blobstore.
"""

import argparse
import json
import sys

from blobstore import MASK_HEADER, NO_BLOB, Damaged, Image, NotAStore, Store, text


def describe(store, esnap=None, sums=False):
    """The store as `list --json` prints it."""
    volumes, all_clones = [], store.clones()
    for blob in store.volumes():
        clones = all_clones.get(blob.id, ())
        volume = {
            "blob_id": f"{blob.id:#x}",
            "name": text(blob.xattrs.get("name", b"")) or None,
            "uuid": text(blob.xattrs.get("uuid", b"")) or None,
            "thin": blob.thin,
            "read_only": blob.read_only,
            "clusters": blob.num_clusters,
            "allocated_clusters": len(blob.clusters),
            "size": blob.num_clusters * store.cluster_size,
            "snapshot": bool(clones),
            "parent": f"{blob.parent:#x}" if blob.parent is not None else None,
            "clones": [f"{clone.id:#x}" for clone in clones],
            "external_snapshot": text(blob.esnap) if blob.esnap is not None else None,
        }
        if sums:
            try:
                volume["sha256"] = store.sum(blob, esnap)
            except Damaged as error:
                volume["sha256"] = None
                store.problems.append(f"{error}")
        volumes.append(volume)
    super_blob = store.blobs.get(store.super_blob)
    attributes = super_blob.xattrs if super_blob and store.is_lvolstore else {}
    return {
        "type": text(store.bstype),
        "name": text(attributes.get("name", b"")) or None,
        "uuid": text(attributes.get("uuid", b"")) or None,
        "version": store.version,
        "clean": bool(store.clean),
        "size": store.size,
        "block_size": store.io_unit_size,
        "cluster_size": store.cluster_size,
        "md_page_size": store.md_page_size,
        "md_pages": store.md_len,
        "super_blob": None if store.super_blob == NO_BLOB else f"{store.super_blob:#x}",
        "total_data_clusters": store.total_data_clusters,
        "free_clusters": store.free_clusters,
        "volumes": volumes,
        "notes": store.notes,
        "problems": store.problems,
    }


def print_list(found):
    print(f"{found['type'] or 'untyped'} blobstore, version {found['version']}, "
          f"{'clean' if found['clean'] else 'not closed'}: {found['size']} bytes, clusters of {found['cluster_size']}, "
          f"{found['free_clusters']} of {found['total_data_clusters']} free, blocks of {found['block_size']}, "
          f"{found['md_pages']} metadata pages of {found['md_page_size']}, super blob {found['super_blob']}")
    if found["name"]:
        print(f"lvolstore {found['name']} {found['uuid']}")
    for volume in found["volumes"]:
        words = [volume["blob_id"], volume["name"] or "-", volume["uuid"] or "-", "thin" if volume["thin"] else "thick",
                 f"{volume['allocated_clusters']}/{volume['clusters']}"]
        words += ["read-only"] * volume["read_only"]
        if volume["parent"]:
            words.append(f"clone of {volume['parent']}")
        if volume["external_snapshot"]:
            words.append(f"clone of external {volume['external_snapshot']}")
        if volume["clones"]:
            words.append(f"snapshot of {','.join(volume['clones'])}")
        if volume.get("sha256"):
            words.append(volume["sha256"])
        print(" ".join(words))


def compare(store, expected, esnap=None):
    """-> how the store differs from what SPDK's methods printed (a decoded .json beside a golden image)."""
    differences = []

    def same(what, found, wanted):
        if found != wanted:
            differences.append(f"{what}: {found!r} instead of {wanted!r}")

    found = describe(store)
    names = {volume["blob_id"]: volume["name"] for volume in found["volumes"]}
    volumes = {volume["uuid"]: volume for volume in found["volumes"]}
    mask_pages = -(-(MASK_HEADER + (store.md_len + 7) // 8) // store.md_page_size)
    growable = (mask_pages * store.md_page_size - MASK_HEADER) * 8 * store.cluster_size
    for lvolstore in expected.get("lvstores", ()):
        for key in ("name", "uuid", "block_size", "cluster_size", "free_clusters", "total_data_clusters"):
            same(f"the store's {key}", found[key], lvolstore[key])
        same("the store's max_growable_size", growable, lvolstore["max_growable_size"])
    if "lvols" in expected:
        same("volumes", sorted(volumes), sorted(lvol["uuid"] for lvol in expected["lvols"]))
    for lvol in expected.get("lvols", ()):
        volume = volumes.get(lvol["uuid"])
        if volume is None:
            continue
        external = volume["external_snapshot"] is not None
        for key, value in (
            ("name", volume["name"]),
            ("alias", f"{found['name']}/{volume['name']}"),
            ("lvs", {"name": found["name"], "uuid": found["uuid"]}),
            ("is_thin_provisioned", volume["thin"]),
            ("is_snapshot", volume["snapshot"]),
            ("is_clone", volume["parent"] is not None),
            ("is_esnap_clone", external),
            ("is_degraded", external and esnap is None),
            ("num_allocated_clusters", volume["allocated_clusters"]),
        ):
            same(f"{lvol['name']}'s {key}", value, lvol[key])
    for bdev in expected.get("bdevs", ()):
        volume = volumes.get(bdev["uuid"])
        if volume is None:
            continue
        lvol = bdev["driver_specific"]["lvol"]
        for key, value, wanted in (
            ("alias", [f"{found['name']}/{volume['name']}"], bdev["aliases"]),
            ("block size", found["block_size"], bdev["block_size"]),
            ("size", volume["size"], bdev["num_blocks"] * bdev["block_size"]),
            ("snapshot", names.get(volume["parent"]), lvol.get("base_snapshot")),
            ("clones", sorted(names[clone] for clone in volume["clones"]), sorted(lvol.get("clones", ()))),
            ("external snapshot", volume["external_snapshot"], lvol.get("external_snapshot_name")),
            ("thin provisioning", volume["thin"], lvol["thin_provision"]),
            ("allocated clusters", volume["allocated_clusters"], lvol["num_allocated_clusters"]),
        ):
            same(f"{bdev['aliases'][0]}'s {key}", value, wanted)
    for key, wanted in expected.get("sha256", {}).items():
        # "lvs/name", or "0x100000002 whole", or "0x100000002 first 1228800 bytes".
        name, *part = key.split(" ")
        length = int(part[1]) if len(part) > 2 else None
        try:
            same(f"the sum of {key}", store.sum(store.find(name), esnap, length), wanted)
        except Damaged as error:
            differences.append(f"the sum of {key}: {error}")
    for name, attributes in expected.get("xattrs", {}).items():
        blob = store.find(name)
        same(f"{blob}'s attributes", {key: value.decode("latin1") for key, value in blob.xattrs.items()}, attributes)
    return differences


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    number = lambda word: int(word, 0)  # noqa: E731
    for name in ("list", "check", "read", "compare"):
        command = commands.add_parser(name)
        command.add_argument("image")
        if name != "check":
            command.add_argument("--esnap", metavar="FILE", help="the external snapshot's contents")
        if name == "list":
            command.add_argument("--json", action="store_true")
            command.add_argument("--sums", action="store_true", help="with the SHA-256 of each volume's contents")
        if name == "read":
            command.add_argument("blob")
            command.add_argument("--offset", type=number, default=0)
            command.add_argument("--length", type=number)
        if name == "compare":
            command.add_argument("expected")
    options = parser.parse_args(arguments)
    esnap = Image(options.esnap) if getattr(options, "esnap", None) else None
    try:
        with Image(options.image) as image:
            store = Store(image)
            failed = command_of(options, store, esnap)
    except NotAStore as error:
        print(f"{options.image}: {error}", file=sys.stderr)
        return 2
    except Damaged as error:
        print(f"{options.image}: {error}", file=sys.stderr)
        return 1
    finally:
        if esnap:
            esnap.file.close()
    return 1 if failed else 0


def command_of(options, store, esnap):
    if options.command == "check":
        store.check()
        print("".join(f"{problem}\n" for problem in store.problems), end="")
        print("".join(f"note: {note}\n" for note in store.notes), end="", file=sys.stderr)
        return store.problems
    if store.problems and not store.blobs:
        raise Damaged("; ".join(store.problems))
    differences = []
    if options.command == "list":
        found = describe(store, esnap, options.sums)
        print(json.dumps(found, indent=1)) if options.json else print_list(found)
    elif options.command == "read":
        for piece in store.read(store.find(options.blob), options.offset, options.length, esnap):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return None
    else:
        with open(options.expected, encoding="utf-8") as file:
            differences = compare(store, json.load(file), esnap)
        print("".join(f"{difference}\n" for difference in differences), end="")
    for problem in store.problems:
        print(problem, file=sys.stderr)
    return differences + store.problems


if __name__ == "__main__":
    sys.exit(main())
