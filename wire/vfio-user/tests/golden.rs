//! Messages as libvfio-user and QEMU encode them: `include/vfio-user.h`, `test/py/libvfio_user.py`,
//! `<linux/vfio.h>`.
#![allow(clippy::unwrap_used)]

use wire_vfio_user::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(pair).collect()
}

/// `struct.pack("HHIII", msg_id, cmd, SIZEOF_VFIO_USER_HEADER + size, flags, error)` of
/// libvfio-user's Python client.
#[test]
fn headers_match_libvfio_user() {
    let request = Header::request(0x0102, VfioUserCommand::RegionRead, 16);
    assert_eq!(request.to_bytes().to_vec(), hex("0201 0900 20000000 00000000 00000000"));
    let reply = request.reply(20);
    assert_eq!(reply.to_bytes().to_vec(), hex("0201 0900 24000000 01000000 00000000"));
    // VFIO_USER_F_TYPE_REPLY | VFIO_USER_F_ERROR, EINVAL.
    let failure = request.failure(22);
    assert_eq!(failure.to_bytes().to_vec(), hex("0201 0900 10000000 21000000 16000000"));
    let silent = Header { no_reply: true, ..request };
    assert_eq!(silent.to_bytes()[8..12], 0x10u32.to_le_bytes());
    for header in [request, reply, failure, silent] {
        assert_eq!(Header::decode(&header.to_bytes()), Ok(header));
    }
}

#[test]
fn invalid_headers_are_rejected() {
    let good = Header::request(1, VfioUserCommand::Version, 0).to_bytes();
    let mut bad = good;
    bad[8] = 2;
    assert_eq!(Header::decode(&bad), Err(DecodeError::value("message type", 8, 2)));
    let mut bad = good;
    bad[4] = 15;
    assert_eq!(Header::decode(&bad), Err(DecodeError::value("message size", 4, 15)));
}

#[test]
fn command_numbers_match_the_protocol() {
    let numbers: Vec<u16> = VfioUserCommand::ALL.iter().map(|command| command.to_wire()).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18]);
    assert_eq!(VfioUserCommand::from_wire(14), None);
    assert_eq!(VfioUserCommand::from_wire(0), None);
    assert_eq!(VfioUserCommand::from_wire(19), None);
}

/// `struct vfio_user_dma_map` and `struct vfio_user_dma_unmap`.
#[test]
fn dma_map_and_unmap_match_libvfio_user() {
    let map = DmaMap::new(0x1_0000_0000, 0x20_0000, 0x1000, true);
    let bytes = hex("20000000 03000000 0010000000000000 0000000001000000 0000200000000000");
    assert_eq!(map.to_bytes().to_vec(), bytes);
    assert_eq!(DmaMap::decode(&bytes), Ok(map));
    let unmap = DmaUnmap::new(0x1_0000_0000, 0x20_0000);
    let bytes = hex("18000000 00000000 0000000001000000 0000200000000000");
    assert_eq!(unmap.to_bytes().to_vec(), bytes);
    assert_eq!(DmaUnmap::decode(&bytes), Ok(unmap));
    let access = DmaAccess { address: 0x1000, count: 0x200 };
    assert_eq!(access.to_bytes().to_vec(), hex("0010000000000000 0002000000000000"));
}

/// `struct vfio_user_device_info`, `struct vfio_irq_info` and `struct vfio_irq_set`.
#[test]
fn device_and_interrupt_info_match_the_kernel() {
    let info = DeviceInfo { argsz: 16, flags: device_flags::PCI | device_flags::RESET, regions: 9, irqs: 5 };
    assert_eq!(info.to_bytes().to_vec(), hex("10000000 03000000 09000000 05000000"));
    let info = IrqInfo { argsz: 16, flags: irq_flags::EVENTFD, index: irq::MSIX, count: 512 };
    assert_eq!(info.to_bytes().to_vec(), hex("10000000 01000000 02000000 00020000"));
    let flags = irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER;
    let set = SetIrqs { argsz: 20, flags, index: irq::MSIX, start: 1, count: 2 };
    assert_eq!(set.to_bytes().to_vec(), hex("14000000 24000000 02000000 01000000 02000000"));
    assert_eq!(SetIrqs::decode(&set.to_bytes()), Ok(set));
}

/// `struct vfio_region_info` with a `struct vfio_region_info_cap_sparse_mmap`, as libvfio-user's
/// `dev_get_caps` encodes it.
#[test]
fn region_info_matches_libvfio_user() {
    let flags = region_flags::READ | region_flags::WRITE | region_flags::MMAP;
    let info = RegionInfo { flags, index: 0, size: 0x2000, ..RegionInfo::default() };
    let areas = vec![SparseArea { offset: 0x1000, size: 0x1000 }];
    let reply = RegionReply { info, areas };
    let bytes = hex("40000000 0f000000 00000000 20000000 0020000000000000 0000000000000000
         0100 0100 00000000 01000000 00000000 0010000000000000 0010000000000000");
    assert_eq!(reply.to_bytes(64), bytes);
    let decoded = RegionReply::decode(&bytes).unwrap();
    assert_eq!(decoded.areas, reply.areas);
    assert_eq!((decoded.info.size, decoded.info.cap_offset), (0x2000, 32));
    // If the capabilities do not fit, argsz is the size that is needed.
    let short = reply.to_bytes(63);
    assert_eq!(short, hex("40000000 07000000 00000000 00000000 0020000000000000 0000000000000000"));
    assert!(RegionReply::decode(&short).unwrap().areas.is_empty());
}

#[test]
fn invalid_capability_lists_are_rejected() {
    let mut bytes = hex("40000000 0f000000 00000000 20000000 0020000000000000 0000000000000000
         0200 0100 20000000 00000000 00000000 00000000 00000000 00000000 00000000");
    // A loop.
    assert!(RegionReply::decode(&bytes).is_err());
    // Beyond the end.
    bytes[12] = 60;
    assert!(RegionReply::decode(&bytes).is_err());
    // More areas than bytes.
    (bytes[12], bytes[32], bytes[40]) = (32, 1, 200);
    assert!(RegionReply::decode(&bytes).is_err());
}

#[test]
fn region_accesses_match_the_protocol() {
    let access = RegionAccess { offset: 0x1008, region: 0, count: 4 };
    assert_eq!(access.to_bytes().to_vec(), hex("0810000000000000 00000000 04000000"));
    let write = MultiWrite { access, data: [1, 2, 3, 4, 0, 0, 0, 0] };
    let all =
        MultiWrites(vec![write, MultiWrite { access: RegionAccess { offset: 0x1010, ..access }, ..write }]);
    let bytes = all.to_bytes();
    assert_eq!(
        bytes,
        hex("0200000000000000 0810000000000000 00000000 04000000 0102030400000000
             1010000000000000 00000000 04000000 0102030400000000")
    );
    assert_eq!(MultiWrites::decode(&bytes), Ok(all));
    assert_eq!(write.bytes(), [1, 2, 3, 4]);
    assert!(MultiWrites::decode(&bytes[..55]).is_err());
    assert!(MultiWrites::decode(&u64::MAX.to_le_bytes()).is_err());
    let mut nine = bytes;
    nine[20] = 9;
    assert!(MultiWrites::decode(&nine).is_err());
}

/// The request of QEMU 10.1, and the reply of libvfio-user.
#[test]
fn version_messages_of_qemu_and_libvfio_user_are_decoded() {
    let qemu = b"\0\0\x01\0{\"capabilities\": {\"max_msg_fds\": 8, \"max_data_xfer_size\": 1048576, \
        \"pgsizes\": 4096, \"max_dma_maps\": 65535, \"migration\": {\"pgsize\": 4096, \
        \"max_bitmap_size\": 268435456}, \"write_multiple\": true}}\0";
    let version = VersionMessage::decode(qemu).unwrap();
    assert_eq!((version.major, version.minor), (0, 1));
    let expected =
        ProtocolCapabilities { max_msg_fds: 8, write_multiple: true, ..ProtocolCapabilities::default() };
    assert_eq!(version.capabilities, expected);
    let server = b"\0\0\x01\0{ \"capabilities\": { \"max_msg_fds\": 8, \"max_data_xfer_size\": 1048576, \
        \"twin_socket\": { \"supported\": true, \"fd_index\": 0 } } }\0";
    let version = VersionMessage::decode(server).unwrap();
    assert!(version.capabilities.twin_socket);
    assert_eq!(VersionMessage::decode(&version.to_bytes()), Ok(version));
    // Capabilities are optional.
    for bare in [&b"\0\0\x01\0"[..], b"\0\0\x01\0{}\0", b"\0\0\x01\0{\"capabilities\":{}}\0"] {
        assert_eq!(VersionMessage::decode(bare).unwrap().capabilities, ProtocolCapabilities::default());
    }
    for bad in [
        &b"\0\0\x01"[..],
        b"\0\0\x01\0{}",
        b"\0\0\x01\0{\0",
        b"\0\0\x01\0[]\0",
        b"\0\0\x01\0{\"capabilities\":3}\0",
        b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":\"8\"}}\0",
        b"\0\0\x01\0{\"capabilities\":{\"twin_socket\":true}}\0",
        b"\0\0\x01\0{\"capabilities\":{\"write_multiple\":1}}\0",
    ] {
        assert!(VersionMessage::decode(bad).is_err(), "{:?}", String::from_utf8_lossy(bad));
    }
    assert!(VersionMessage::decode(&[0; VersionMessage::BYTES_MAX + 1]).is_err());
}
