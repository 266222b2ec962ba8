"""Reads ELF files: libraries of a binary, dependencies of a kernel module, boot notes of a kernel."""

import struct

PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE = 1, 2, 3, 4
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5


def _segments(data):
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    offset, entry_size, count = struct.unpack_from("<Q14xHH", data, 32)[0:3]
    for at in range(offset, offset + entry_size * count, entry_size):
        kind, _flags, file_offset, address, _physical, file_size = struct.unpack_from("<IIQQQQ", data, at)
        yield kind, file_offset, address, file_size


def _string(data, at):
    return data[at : data.index(b"\0", at)].decode()


def needed(data):
    """-> (interpreter or None, [sonames]) of an executable or a shared library."""
    segments = list(_segments(data))
    interpreter, names, strings = None, [], None
    for kind, offset, _address, size in segments:
        if kind == PT_INTERP:
            interpreter = _string(data, offset)
        if kind == PT_DYNAMIC:
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == DT_NULL:
                    break
                if tag == DT_NEEDED:
                    names.append(value)
                if tag == DT_STRTAB:
                    strings = value
    if not names:
        return interpreter, []
    for kind, offset, address, size in segments:
        if kind == PT_LOAD and address <= strings < address + size:
            return interpreter, [_string(data, offset + strings - address + name) for name in names]
    raise ValueError("the dynamic string table is in no segment")


def has_note(data, owner, wanted):
    """Whether an executable has a note of this owner and type."""
    for kind, at, _address, size in _segments(data):
        end = at + size if kind == PT_NOTE else at
        while at < end:
            name_size, described, note = struct.unpack_from("<III", data, at)
            if note == wanted and data[at + 12 : at + 12 + name_size] == owner:
                return True
            at += 12 + (name_size + 3 & ~3) + (described + 3 & ~3)
    return False


def module_info(data):
    """-> {key: [values]} of a kernel module's .modinfo section."""
    (sections,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)

    def section(index):
        name, _kind, _flags, _address, offset, size = struct.unpack_from("<IIQQQQ", data, sections + index * entry_size)
        return name, offset, size

    names = section(names_index)[1]
    info = {}
    for index in range(count):
        name, offset, size = section(index)
        if _string(data, names + name) == ".modinfo":
            for item in data[offset : offset + size].split(b"\0"):
                key, equals, value = item.decode("utf-8", "replace").partition("=")
                if equals:
                    info.setdefault(key, []).append(value)
    return info
