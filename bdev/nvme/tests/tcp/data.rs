//! Data, metadata and arbitrary commands.

use std::time::Duration;

use bdev::Registry;
use bdev_nvme::{Attach, PassthroughCommand, QueueKind};
use block_io::{Op, Status};
use control::JobHandle;
use nvme::AdminData;
use wire_nvme::Sqe;
use wire_nvme::io::{Prinfo, ReadWrite};
use wire_nvme::opcode::NvmOpcode;

use crate::passthrough::check_passthrough;
use crate::sides::{HostSide, NQN, TargetSide, medium, wait_for};

#[test]
fn a_namespace_is_a_bdev_and_long_requests_are_split() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    assert_eq!(host.attach(&side.ports()[0]), ["Nvme0n1"]);
    let device = host.registry.find("Nvme0n1").unwrap();
    assert_eq!((device.geometry().blocks, device.geometry().block_size), (32768, 512));
    assert_eq!(device.bdev().product_name(), "NVMe disk");
    assert_eq!(Some(device.uuid()), medium.find("Malloc0").map(|medium| medium.uuid()));
    let done = host.with_io(|core, io| async move {
        // Longer than the target's maximum transfer, and not a multiple of it.
        let bytes = (1 << 20) - 512;
        let mut buffer = core.pool().take(bytes).unwrap();
        for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
            *byte = (at / 512 + at) as u8;
        }
        let expected = buffer.as_slice().to_vec();
        io.write(7, buffer).await.map_err(|(status, _)| status)?;
        io.flush().await?;
        io.unmap(0, 4).await?;
        let mut buffer = core.pool().take(bytes).unwrap();
        buffer.clear();
        let buffer = io.read(7, buffer).await.map_err(|(status, _)| status)?;
        assert!(buffer.as_slice() == expected, "the data that was read differs from the data written");
        let mut buffer = core.pool().take(512).unwrap();
        buffer.clear();
        let beyond = io.read(40000, buffer).await.map_err(|(status, _)| status);
        assert!(beyond.unwrap_err().same_code(Status::LBA_OUT_OF_RANGE));
        Ok::<(), Status>(())
    });
    done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    let refused = host.initiator.attach(Attach::new("Nvme1", HostSide::path(&side.ports()[0])));
    assert!(refused.unwrap_err().to_string().contains("is attached already, as Nvme0"));
    host.initiator.detach("Nvme0", |_| true, &JobHandle::standalone()).unwrap();
    assert!(host.registry.find("Nvme0n1").is_none() && host.initiator.controllers().is_empty());
    wait_for("the target's controller to end", || side.target.controllers(NQN).unwrap().is_empty());
}

/// A medium with protection information of type 1, interleaved or separate.
fn protected_medium(md_interleave: bool) -> Registry {
    let registry = Registry::new();
    let mut config = bdev::malloc::MallocConfig::new("Malloc0", 4096, 512);
    config.metadata = bdev::MetadataConfig {
        md_size: 8,
        md_interleave,
        dif_type: 1,
        dif_is_head_of_md: false,
        dif_pi_format: 0,
    };
    bdev::malloc::create(&registry, config).unwrap();
    registry
}

#[test]
fn hosts_do_not_see_hidden_protection_and_the_target_checks_it() {
    for md_interleave in [true, false] {
        let medium = protected_medium(md_interleave);
        let side = TargetSide::hiding(&medium, &["0".into()]);
        let host = HostSide::start();
        host.attach(&side.ports()[0]);
        let geometry = host.registry.find("Nvme0n1").unwrap().geometry();
        assert_eq!((geometry.block_size, geometry.metadata.bytes), (512, 0));
        let done = host.with_io(|core, io| async move {
            let fill = |bytes: usize, fill: u8| {
                let mut buffer = core.pool().take(bytes).unwrap();
                buffer.as_mut_slice().fill(fill);
                buffer
            };
            io.write(8, fill(8192, 7)).await.map_err(|(status, _)| status)?;
            io.write_zeroes(16, 4).await?;
            let buffer = io.read(8, fill(8192, 1)).await.map_err(|(status, _)| status)?;
            let expected: Vec<u8> =
                (0..16).flat_map(|block| [if (8..12).contains(&block) { 0 } else { 7 }; 512]).collect();
            assert!(buffer.as_slice() == expected);
            // Never written: nothing is checked.
            io.read(100, fill(512, 1)).await.map_err(|(status, _)| status)?;
            Ok::<(), Status>(())
        });
        done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
        if !md_interleave {
            continue;
        }
        // The medium has it: blocks of 520 bytes with valid guards and reference tags. One is damaged behind
        // the target.
        side.target.remove_namespace(NQN, 1).unwrap();
        wait_for("the end of the bdev", || host.registry.find("Nvme0n1").is_none());
        // A core may have a channel for a moment longer, here and below.
        wait_for("the end of the claim", || medium.open("Malloc0", bdev::Access::ReadWrite).is_ok());
        let done = host.with_device(&medium, "Malloc0", bdev::Access::ReadWrite, |core, io| async move {
            let read = core.pool().take(520 * 8).unwrap();
            let mut blocks = io.read(8, read).await.map_err(|(status, _)| status)?;
            let format = io.device().geometry().metadata;
            let tags = wire_nvme::protection::Tags { reference: 8, ..Default::default() };
            let valid = wire_nvme::protection::check_extended(&format, 512, blocks.as_slice(), &tags);
            assert_eq!(valid, Ok(()));
            blocks.as_mut_slice()[520 * 3 + 5] ^= 1;
            io.write(8, blocks).await.map_err(|(status, _)| status)?;
            Ok::<(), Status>(())
        });
        done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
        wait_for("the end of the writer", || {
            side.target.add_namespace(NQN, TargetSide::hidden("Malloc0")).is_ok()
        });
        wait_for("the namespace", || host.registry.find("Nvme0n1").is_some());
        let done = host.with_io(|core, io| async move {
            let status = |lba| {
                let buffer = core.pool().take(512).unwrap();
                let read = io.read(lba, buffer);
                async move { read.await.map_or_else(|(status, _)| status, |_| Status::SUCCESS) }
            };
            (status(10).await, status(11).await)
        });
        let (whole, damaged) = done.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(whole, Status::SUCCESS);
        assert!(damaged.same_code(Status::GUARD_CHECK_ERROR), "{damaged:?}");
    }
}

#[test]
fn only_protection_that_is_all_of_the_metadata_can_be_hidden() {
    let registry = Registry::new();
    for (name, md_size, dif_type) in [("Wide", 16, 1), ("Plain", 8, 0), ("None", 0, 0)] {
        let mut config = bdev::malloc::MallocConfig::new(name, 4096, 512);
        config.metadata = bdev::MetadataConfig {
            md_size,
            md_interleave: true,
            dif_type,
            dif_is_head_of_md: false,
            dif_pi_format: 0,
        };
        bdev::malloc::create(&registry, config).unwrap();
    }
    let side = TargetSide::exporting(&registry, "None", &[]);
    for name in ["Wide", "Plain"] {
        let error = side.target.add_namespace(NQN, TargetSide::hidden(name)).unwrap_err().to_string();
        assert!(error.contains("only metadata that is protection information"), "{name}: {error}");
    }
    side.target.remove_namespace(NQN, 1).unwrap();
    side.target.add_namespace(NQN, TargetSide::hidden("None")).unwrap();
}

#[test]
fn data_of_several_slices_is_sent_and_received_in_place() {
    for digests in [false, true] {
        let medium = medium();
        let side = TargetSide::start(&medium, &["0".into()]);
        let host = HostSide::start();
        let mut path = HostSide::path(&side.ports()[0]);
        if let nvme::Uri::Tcp(uri) = &mut path.id.0 {
            (uri.header_digest, uri.data_digest) = (digests, digests);
        }
        host.initiator.attach(Attach::new("Nvme0", path)).unwrap();
        let before = medium.find("Malloc0").unwrap().stats();
        let done = host.with_io(|core, io| async move {
            // In the capsule, after an R2T, and in many parts; at any address.
            let many = vec![3000; 40];
            for (round, lengths) in
                [&[100, 412][..], &[3000, 5000, 192], &many, &[1, 65536, 511]].iter().enumerate()
            {
                let data = || {
                    let slice = |length: &usize| core.pool().take(length + 1).unwrap().split_off(1);
                    dma::Data::gather(lengths.iter().map(slice).collect()).unwrap()
                };
                let bytes: usize = lengths.iter().sum::<usize>() / 512 * 512;
                let mut write = data();
                if bytes < write.len() {
                    write.split_off(bytes);
                }
                let expected: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 512 + round) as u8).collect();
                write.copy_from(0, &expected);
                let (lba, blocks) = (round as u64 * 300, (bytes / 512) as u32);
                let written = io.submit(bdev::Request::write(block_io::Tag(0), lba, blocks, write)).await;
                if !written.status().is_success() {
                    return Err(written.status());
                }
                let mut read = data();
                read.clear();
                if bytes < read.len() {
                    read.split_off(bytes);
                }
                let read = io.submit(bdev::Request::read(block_io::Tag(0), lba, blocks, read)).await;
                let mut received = vec![0; bytes];
                read.into_request().take_data().unwrap().copy_to(0, &mut received);
                assert!(received == expected, "slices {lengths:?}");
            }
            Ok::<(), Status>(())
        });
        done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
        let after = medium.find("Malloc0").unwrap().stats();
        let commands = |op| after.op(op).ops - before.op(op).ops;
        assert_eq!((commands(Op::Write), commands(Op::Read)), (4, 4), "each request is one command");
    }
}

#[test]
fn protection_information_is_generated_checked_and_stripped_by_the_target() {
    let medium = Registry::new();
    let metadata = bdev::MetadataConfig {
        md_size: 8,
        md_interleave: true,
        dif_type: 1,
        dif_is_head_of_md: false,
        dif_pi_format: 0,
    };
    let config =
        bdev::malloc::MallocConfig { metadata, ..bdev::malloc::MallocConfig::new("Malloc0", 4096, 512) };
    bdev::malloc::create(&medium, config).unwrap();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    assert_eq!(host.registry.find("Nvme0n1").unwrap().geometry().block_size, 512);
    let written = host.with_io(|core, io| async move {
        let mut buffer = core.pool().take(64 << 10).unwrap();
        buffer.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 512 + at) as u8);
        let expected = buffer.as_slice().to_vec();
        io.write(9, buffer).await.map_err(|(status, _)| status)?;
        let mut buffer = core.pool().take(64 << 10).unwrap();
        buffer.clear();
        let buffer = io.read(9, buffer).await.map_err(|(status, _)| status)?;
        assert!(buffer.as_slice() == expected);
        io.write_zeroes(20, 2).await?;
        let buffer = core.pool().take(1024).unwrap();
        let buffer = io.read(20, buffer).await.map_err(|(status, _)| status)?;
        assert_eq!(buffer.as_slice(), [0; 1024]);
        Ok::<(), Status>(())
    });
    written.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    // The same blocks by commands that transfer the protection information.
    let command = |opcode: NvmOpcode, prinfo, reference_tag, data| {
        let command = ReadWrite { lba: 9, blocks: 2, prinfo, reference_tag, ..ReadWrite::default() };
        let sqe = Sqe { nsid: 1, ..command.to_sqe(opcode) };
        let queue = QueueKind::Io;
        let command = PassthroughCommand { queue, sqe, data, metadata: AdminData::None, timeout: None };
        host.initiator.pass_through("Nvme0", command).unwrap()
    };
    let checks = Prinfo::CHECK_GUARD | Prinfo::CHECK_REFERENCE_TAG;
    let read = command(NvmOpcode::Read, checks, 9, AdminData::In(1040));
    assert_eq!(read.status, Status::SUCCESS);
    for (index, block) in read.data.chunks(520).enumerate() {
        let guard = nvme::protection::crc16(0, &block[..512]).to_be_bytes();
        assert_eq!(block[512..], [guard[0], guard[1], 0, 0, 0, 0, 0, 9 + index as u8]);
    }
    assert!(command(NvmOpcode::Write, checks, 9, AdminData::Out(read.data.clone())).status.is_success());
    let mut bad = read.data;
    bad[600] ^= 1;
    let refused = command(NvmOpcode::Write, checks, 9, AdminData::Out(bad.clone())).status;
    assert!(refused.same_code(Status::GUARD_CHECK_ERROR), "{refused}");
    let wrong = command(NvmOpcode::Read, checks, 10, AdminData::In(1040)).status;
    assert!(wrong.same_code(Status::INVALID_PROTECTION_INFORMATION), "{wrong}");
    // Stored without a check, it fails the checks of a read.
    assert!(command(NvmOpcode::Write, Prinfo::empty(), 0, AdminData::Out(bad)).status.is_success());
    let failed = host.with_io(|core, io| async move {
        let buffer = core.pool().take(1024).unwrap();
        io.read(9, buffer).await.map_err(|(status, _)| status).unwrap_err()
    });
    let failed = failed.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(failed.same_code(Status::GUARD_CHECK_ERROR), "{failed}");
}

#[test]
fn a_null_device_gives_valid_protection_information_and_checks_what_is_written() {
    let medium = Registry::new();
    let metadata = bdev::MetadataConfig {
        md_size: 8,
        md_interleave: true,
        dif_type: 1,
        dif_is_head_of_md: false,
        dif_pi_format: 0,
    };
    let config = bdev::null::NullConfig { metadata, ..bdev::null::NullConfig::new("Null0", 4096, 512) };
    bdev::null::create(&medium, config).unwrap();
    let side = TargetSide::exporting(&medium, "Null0", &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    assert_eq!(host.registry.find("Nvme0n1").unwrap().geometry().block_size, 512);
    // The driver lets the target insert and strip the protection information.
    let done = host.with_io(|core, io| async move {
        let buffer = || core.pool().take(4096).unwrap();
        io.write(9, buffer()).await.map_err(|(status, _)| status)?;
        io.read(9, buffer()).await.map(drop).map_err(|(status, _)| status)
    });
    done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    let command = |opcode: NvmOpcode, prinfo, reference_tag, data| {
        let command = ReadWrite { lba: 9, blocks: 2, prinfo, reference_tag, ..ReadWrite::default() };
        let sqe = Sqe { nsid: 1, ..command.to_sqe(opcode) };
        let queue = QueueKind::Io;
        let command = PassthroughCommand { queue, sqe, data, metadata: AdminData::None, timeout: None };
        host.initiator.pass_through("Nvme0", command).unwrap()
    };
    let checks = Prinfo::CHECK_GUARD | Prinfo::CHECK_REFERENCE_TAG;
    let read = command(NvmOpcode::Read, checks, 9, AdminData::In(1040));
    assert_eq!(read.status, Status::SUCCESS);
    for (index, block) in read.data.chunks(520).enumerate() {
        let guard = nvme::protection::crc16(0, &block[..512]).to_be_bytes();
        assert_eq!(block[512..], [guard[0], guard[1], 0, 0, 0, 0, 0, 9 + index as u8]);
    }
    assert!(command(NvmOpcode::Write, checks, 9, AdminData::Out(read.data.clone())).status.is_success());
    let changed = |at: usize| {
        let mut blocks = read.data.clone();
        blocks[at] ^= 1;
        command(NvmOpcode::Write, checks, 9, AdminData::Out(blocks)).status
    };
    let (data, reference_tag) = (changed(600), changed(519));
    assert!(data.same_code(Status::GUARD_CHECK_ERROR), "{data}");
    assert!(reference_tag.same_code(Status::REFERENCE_TAG_CHECK_ERROR), "{reference_tag}");
    let mut unchecked = read.data.clone();
    unchecked[600] ^= 1;
    assert!(command(NvmOpcode::Write, Prinfo::empty(), 0, AdminData::Out(unchecked)).status.is_success());
}

#[test]
fn uncorrectable_blocks_are_unreadable_until_rewritten() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    let done = host.with_io(|core, io| async move {
        let buffer = || core.pool().take(8 * 512).unwrap();
        let read = async |lba| io.read(lba, buffer()).await.map(drop).map_err(|(status, _)| status);
        io.write_uncorrectable(12, 2).await?;
        let unreadable = read(8).await.unwrap_err();
        assert!(unreadable.same_code(Status::UNRECOVERED_READ_ERROR), "{unreadable}");
        read(0).await?;
        read(14).await?;
        let mut new = buffer();
        new.clear();
        io.write(8, new).await.map_err(|(status, _)| status)?;
        read(8).await
    });
    done.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
}

#[test]
fn arbitrary_commands_can_be_passed_through() {
    let medium = medium();
    let side = TargetSide::start(&medium, &["0".into()]);
    let host = HostSide::start();
    host.attach(&side.ports()[0]);
    check_passthrough(&host.initiator, "Nvme0");
    let metadata = AdminData::Out(vec![0; 8]);
    let sqe = Sqe { nsid: 1, ..Sqe::new(0) };
    let flush =
        PassthroughCommand { queue: QueueKind::Io, sqe, data: AdminData::None, metadata, timeout: None };
    assert!(host.initiator.pass_through("Nvme0", flush).is_err(), "metadata is not supported over TCP");
}
