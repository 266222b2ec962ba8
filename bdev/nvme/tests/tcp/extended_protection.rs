//! Namespaces with protection information whose guards have 32 and 64 bits, and with storage tags.

use std::time::Duration;

use bdev::Registry;
use bdev_nvme::{PassthroughCommand, QueueKind};
use block_io::Status;
use nvme::AdminData;
use wire_nvme::Sqe;
use wire_nvme::io::{Prinfo, ReadWrite, set_block_tags};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::protection::{self, GuardFormat, Tags};

use crate::sides::{HostSide, TargetSide};

const CHECKS: Prinfo = Prinfo::CHECK_GUARD.union(Prinfo::CHECK_REFERENCE_TAG);

/// A medium of 4096 blocks of 512 bytes, with 16 bytes of interleaved protection information of type 1.
fn wide_medium(dif_pi_format: u32) -> Registry {
    let registry = Registry::new();
    add_malloc(&registry, dif_pi_format);
    registry
}

fn add_malloc(registry: &Registry, dif_pi_format: u32) {
    let metadata = bdev::MetadataConfig {
        md_size: 16,
        md_interleave: true,
        dif_type: 1,
        dif_is_head_of_md: false,
        dif_pi_format,
    };
    let config =
        bdev::malloc::MallocConfig { metadata, ..bdev::malloc::MallocConfig::new("Malloc0", 4096, 512) };
    bdev::malloc::create(registry, config).unwrap();
}

/// Executes a read or write of blocks 9 and 10 with tags that name the block `reference`.
fn command(
    host: &HostSide,
    opcode: NvmOpcode,
    (prinfo, storage_tag_check): (Prinfo, bool),
    tags: (u64, u64),
    data: AdminData,
) -> bdev_nvme::PassthroughReply {
    let view = ReadWrite {
        lba: 9,
        blocks: 2,
        prinfo,
        storage_tag_check,
        application_tag: 0x1234,
        application_tag_mask: 0xffff,
        ..ReadWrite::default()
    };
    let mut sqe = Sqe { nsid: 1, ..view.to_sqe(opcode) };
    let (guard, storage_tag) = (GuardFormat::Crc32, tags.0);
    // The space of both tags is the widest with this guard; that of the others is its low bits.
    let kind = protection::ProtectionType::Type1;
    set_block_tags(
        &mut sqe,
        &protection::Protection::new(kind, false).with_guard(guard),
        storage_tag,
        tags.1,
    );
    let metadata = AdminData::None;
    let command = PassthroughCommand { queue: QueueKind::Io, sqe, data, metadata, timeout: None };
    host.initiator.pass_through("Nvme0", command).unwrap()
}

/// Writes a pattern and reads it back through the bdev, which transfers no metadata.
fn round_trip(host: &HostSide) {
    let done = host.with_io(|core, io| async move {
        let mut buffer = core.pool().take(64 << 10).unwrap();
        buffer.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 512 + at) as u8);
        let expected = buffer.as_slice().to_vec();
        io.write(9, buffer).await.map_err(|(status, _)| status)?;
        let mut buffer = core.pool().take(64 << 10).unwrap();
        buffer.clear();
        let buffer = io.read(9, buffer).await.map_err(|(status, _)| status)?;
        assert!(buffer.as_slice() == expected);
        Ok::<(), Status>(())
    });
    done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
}

#[test]
fn the_target_generates_checks_and_strips_wide_guards() {
    for (dif_pi_format, guard) in [(1, GuardFormat::Crc32), (2, GuardFormat::Crc64)] {
        let medium = wide_medium(dif_pi_format);
        let format = medium.find("Malloc0").unwrap().geometry().metadata;
        let side = TargetSide::start(&medium, &["0".into()]);
        let host = HostSide::start();
        host.attach(&side.ports()[0]);
        assert_eq!(host.registry.find("Nvme0n1").unwrap().geometry().block_size, 512);
        round_trip(&host);

        // The same blocks by commands that transfer the protection information.
        let read = command(&host, NvmOpcode::Read, (CHECKS, false), (0, 9), AdminData::In(1056));
        assert_eq!(read.status, Status::SUCCESS);
        let tags = Tags { reference: 9, ..Tags::default() };
        assert_eq!(protection::check_extended(&format, 512, &read.data, &tags), Ok(()));
        let guard_bytes = if guard == GuardFormat::Crc32 { 4 } else { 8 };
        let behind_guard = &read.data[512 + guard_bytes..528];
        assert!(
            behind_guard.ends_with(&[0, 9])
                && behind_guard[..behind_guard.len() - 1].iter().all(|it| *it == 0)
        );
        let unchanged = AdminData::Out(read.data.clone());
        assert!(command(&host, NvmOpcode::Write, (CHECKS, false), (0, 9), unchanged).status.is_success());
        let wrong = command(&host, NvmOpcode::Read, (CHECKS, false), (0, 10), AdminData::In(1056)).status;
        assert!(wrong.same_code(Status::INVALID_PROTECTION_INFORMATION), "{wrong}");

        // Each corruption fails its check, of a write, and of a read where it was written without one.
        let all = CHECKS | Prinfo::CHECK_APPLICATION_TAG;
        for (at, prinfo, expected) in [
            (528 + 7, CHECKS, Status::GUARD_CHECK_ERROR),
            (528 + 512, CHECKS, Status::GUARD_CHECK_ERROR),
            (528 + 512 + guard_bytes, all, Status::APPLICATION_TAG_CHECK_ERROR),
            (528 + 527, CHECKS, Status::REFERENCE_TAG_CHECK_ERROR),
        ] {
            let mut bad = read.data.clone();
            // The application tag that commands name.
            for block in bad.chunks_mut(528) {
                block[512 + guard_bytes..514 + guard_bytes].copy_from_slice(&[0x12, 0x34]);
            }
            bad[at] ^= 1;
            let refused =
                command(&host, NvmOpcode::Write, (prinfo, false), (0, 9), AdminData::Out(bad.clone())).status;
            assert!(refused.same_code(expected), "{guard:?}, byte {at}: {refused}");
            let stored =
                command(&host, NvmOpcode::Write, (Prinfo::empty(), false), (0, 0), AdminData::Out(bad));
            assert!(stored.status.is_success());
            let failed = command(&host, NvmOpcode::Read, (prinfo, false), (0, 9), AdminData::In(1056)).status;
            assert!(failed.same_code(expected), "{guard:?}, byte {at}: {failed}");
        }
    }
}

#[test]
fn storage_tags_are_inserted_and_checked() {
    let medium = wide_medium(1);
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    let inserted = AdminData::Out(vec![7; 1024]);
    let written = command(&host, NvmOpcode::Write, (Prinfo::ACTION, false), (0xbeef, 9), inserted);
    assert_eq!(written.status, Status::SUCCESS);
    let read = command(&host, NvmOpcode::Read, (CHECKS, true), (0xbeef, 9), AdminData::In(1056));
    assert_eq!(read.status, Status::SUCCESS);
    assert_eq!(read.data[516..528], [0x12, 0x34, 0xbe, 0xef, 0, 0, 0, 0, 0, 0, 0, 9]);
    let other =
        |check| command(&host, NvmOpcode::Read, (CHECKS, check), (0xbeee, 9), AdminData::In(1056)).status;
    assert!(other(true).same_code(Status::STORAGE_TAG_CHECK_ERROR), "{}", other(true));
    assert_eq!(other(false), Status::SUCCESS);
}

#[test]
fn wide_guards_can_be_hidden() {
    for dif_pi_format in [1, 2] {
        let medium = wide_medium(dif_pi_format);
        let side = TargetSide::hiding(&medium, &["0".into()]);
        let host = HostSide::start();
        host.attach(&side.ports()[0]);
        let geometry = host.registry.find("Nvme0n1").unwrap().geometry();
        assert_eq!((geometry.block_size, geometry.metadata.bytes), (512, 0));
        round_trip(&host);
    }
}
