//! Devices with metadata and protection information.
#![allow(clippy::unwrap_used)]

mod rig;

use bdev::{Access, BdevChannel, MetadataConfig, Request, delay, error, malloc, null, passthru, split};
use block_io::{Op, Payload, ProtectedData, ProtectionFlags, ProtectionTags, Status, Tag};
use dma::Data;
use rig::Rig;

const GUARD: ProtectionFlags = ProtectionFlags::CHECK_GUARD;
const REFERENCE: ProtectionFlags = ProtectionFlags::CHECK_REFERENCE_TAG;
const APPLICATION: ProtectionFlags = ProtectionFlags::CHECK_APPLICATION_TAG;
const NONE: ProtectionFlags = ProtectionFlags::empty();
const ACTION: ProtectionFlags = ProtectionFlags::ACTION;
const CHECKS: ProtectionFlags = GUARD.union(REFERENCE);

/// SPDK's `-m 8 -i -t 1`.
const TYPE1: MetadataConfig = MetadataConfig {
    md_size: 8,
    md_interleave: true,
    dif_type: 1,
    dif_is_head_of_md: false,
    dif_pi_format: 0,
};

struct ProtectedDevice {
    rig: Rig,
    channel: BdevChannel,
}

impl ProtectedDevice {
    fn malloc(metadata: MetadataConfig) -> ProtectedDevice {
        let rig = Rig::new();
        let config = malloc::MallocConfig { metadata, ..malloc::MallocConfig::new("M", 64, 512) };
        malloc::create(&rig.registry, config).unwrap();
        ProtectedDevice::open(rig, "M")
    }

    /// A memory device under a passthru, a delay and an error device, which forward metadata.
    fn stacked(metadata: MetadataConfig) -> ProtectedDevice {
        let ProtectedDevice { rig, channel } = ProtectedDevice::malloc(metadata);
        drop(channel);
        let passthru = passthru::PassthruConfig { base: "M".into(), name: "P".into(), uuid: None };
        passthru::create(&rig.registry, passthru).unwrap();
        delay::create(&rig.registry, delay::DelayConfig::new("P", "D", 1)).unwrap();
        error::create(&rig.registry, error::ErrorConfig::new("D")).unwrap();
        ProtectedDevice::open(rig, "EE_D")
    }

    fn open(rig: Rig, name: &str) -> ProtectedDevice {
        let channel = rig.registry.open(name, Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
        ProtectedDevice { rig, channel }
    }

    /// Bytes in slices that end in the middle of blocks.
    fn data(&self, bytes: &[u8]) -> Data {
        let slices = bytes.chunks(700).map(|chunk| {
            let mut buffer = self.rig.core.pool().take(chunk.len()).unwrap();
            buffer.as_mut_slice().copy_from_slice(chunk);
            buffer
        });
        Data::gather(slices.collect()).unwrap()
    }

    fn raw_write(&mut self, lba: u64, bytes: &[u8]) -> Status {
        let blocks = (bytes.len() / self.channel.block_size() as usize) as u32;
        let data = self.data(bytes);
        self.rig.one(&mut self.channel, Request::write(Tag(1), lba, blocks, data)).status()
    }

    fn protected(
        &mut self,
        op: Op,
        (lba, blocks): (u64, u32),
        (data, metadata): (&[u8], Option<&[u8]>),
        flags: ProtectionFlags,
        tags: ProtectionTags,
    ) -> (Status, Vec<u8>, Vec<u8>) {
        let (data, metadata) = (self.data(data), metadata.map(|bytes| self.data(bytes)));
        let payload = Payload::Protected(Box::new(ProtectedData { data, metadata, flags, tags }));
        let request = Request { payload, ..Request::new(Tag(1), op, lba, blocks) };
        let done = self.rig.one(&mut self.channel, request);
        let status = done.status();
        let Payload::Protected(protected) = done.into_request().payload else { panic!("another payload") };
        (status, bytes(&protected.data), protected.metadata.as_ref().map(bytes).unwrap_or_default())
    }

    fn write(&mut self, lba: u64, data: &[u8], flags: ProtectionFlags) -> Status {
        let bytes = if flags.contains(ACTION) { 512 } else { self.channel.block_size() as usize };
        let range = (lba, (data.len() / bytes) as u32);
        self.protected(Op::Write, range, (data, None), flags, reference(lba)).0
    }

    fn read(&mut self, lba: u64, blocks: u32, flags: ProtectionFlags) -> Result<Vec<u8>, Status> {
        let bytes = if flags.contains(ACTION) { 512 } else { self.channel.block_size() as usize };
        let empty = vec![0xcc; blocks as usize * bytes];
        let (status, data, _) =
            self.protected(Op::Read, (lba, blocks), (&empty, None), flags, reference(lba));
        if status.is_success() { Ok(data) } else { Err(status) }
    }

    fn raw_read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        self.rig.read(&mut self.channel, lba, blocks).unwrap()
    }
}

fn bytes(data: &Data) -> Vec<u8> {
    let mut out = vec![0; data.len()];
    data.copy_to(0, &mut out);
    out
}

fn reference(lba: u64) -> ProtectionTags {
    ProtectionTags { reference: lba, ..ProtectionTags::default() }
}

/// Four blocks of data, each with another content.
fn pattern() -> Vec<u8> {
    (0..4 * 512).map(|at| (at % 251 + at / 512) as u8).collect()
}

#[test]
fn generated_protection_is_stored_and_checked() {
    let mut device = ProtectedDevice::malloc(TYPE1);
    let geometry = device.channel.device().geometry();
    assert_eq!((geometry.block_size, geometry.data_block_size(), geometry.blocks), (520, 512, 64));
    assert_eq!(device.write(7, &pattern(), ACTION), Status::SUCCESS);
    assert_eq!(device.read(7, 4, ACTION | CHECKS).unwrap(), pattern());
    let raw = device.raw_read(7, 4);
    for (index, block) in raw.chunks(520).enumerate() {
        assert_eq!(block[..512], pattern()[index * 512..][..512]);
        let guard = wire_nvme::protection::crc16(0, &block[..512]).to_be_bytes();
        assert_eq!(block[512..], [guard[0], guard[1], 0, 0, 0, 0, 0, 7 + index as u8], "block {index}");
    }
    assert_eq!(device.read(7, 4, CHECKS).unwrap(), raw);
    assert_eq!(device.write(7, &raw, CHECKS), Status::SUCCESS, "what was read may be written there");
    let elsewhere = device.write(8, &raw, CHECKS);
    assert!(elsewhere.same_code(Status::REFERENCE_TAG_CHECK_ERROR), "{elsewhere}");
}

#[test]
fn the_guard_of_a_foreign_block_is_the_specifications() {
    // The guards of 32 bytes of zeroes, of FFh and rising, from SCSI Block Commands. Zeroes before them
    // change nothing, and the CRC of data that ends with its CRC is zero.
    let mut device = ProtectedDevice::malloc(TYPE1);
    assert_eq!(device.write(0, &[0; 512], ACTION), Status::SUCCESS);
    assert_eq!(device.raw_read(0, 1)[512..514], [0, 0]);
    let mut block = vec![0; 512];
    block[478..510].fill(0xff);
    block[510..].copy_from_slice(&[0xa2, 0x93]);
    assert_eq!(device.write(0, &block, ACTION), Status::SUCCESS);
    assert_eq!(device.raw_read(0, 1)[512..514], [0, 0], "the data ends with its own CRC");
    let rising: Vec<u8> = (0..32).collect();
    let block = [&[0; 480][..], &rising].concat();
    assert_eq!(device.write(0, &block, ACTION), Status::SUCCESS);
    assert_eq!(device.raw_read(0, 1)[512..514], [0x02, 0x24]);
}

#[test]
fn each_corruption_fails_its_check_and_nothing_is_written() {
    let mut device = ProtectedDevice::malloc(TYPE1);
    device.write(4, &pattern(), ACTION);
    let good = device.raw_read(4, 4);
    for (at, flags, status) in [
        (520 + 100, GUARD, Status::GUARD_CHECK_ERROR),
        (520 + 512, GUARD, Status::GUARD_CHECK_ERROR),
        (520 + 514, APPLICATION, Status::APPLICATION_TAG_CHECK_ERROR),
        (520 + 519, REFERENCE, Status::REFERENCE_TAG_CHECK_ERROR),
    ] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        let tags = ProtectionTags { application_mask: 0xffff, ..reference(4) };
        let mut write = |flags| device.protected(Op::Write, (4, 4), (&bad, None), flags, tags).0;
        assert!(write(flags).same_code(status), "byte {at}");
        let others = (CHECKS | APPLICATION) - flags;
        let unnoticed = at > 520 + 513;
        assert_eq!(device.raw_read(4, 4), good, "nothing is written");
        // Other checks do not notice it, unless it is under the guard.
        if unnoticed {
            assert_eq!(device.protected(Op::Write, (4, 4), (&bad, None), others, tags).0, Status::SUCCESS);
            let read = device.protected(Op::Read, (4, 4), (&bad, None), flags, tags).0;
            assert!(read.same_code(status), "byte {at}: {read}");
        }
        assert_eq!(device.raw_write(4, &bad), Status::SUCCESS, "raw blocks are not checked");
        let read = device.protected(Op::Read, (4, 4), (&bad, None), flags, tags).0;
        assert!(read.same_code(status), "byte {at}: {read}");
        device.raw_write(4, &good);
    }
}

#[test]
fn blocks_that_were_never_written_or_were_deallocated_are_not_checked() {
    let mut device = ProtectedDevice::malloc(TYPE1);
    let empty = [vec![0; 512], vec![0xff; 8]].concat();
    assert_eq!(device.read(60, 1, CHECKS).unwrap(), empty);
    assert_eq!(device.read(60, 1, ACTION | CHECKS).unwrap(), vec![0; 512]);
    for op in [Op::Unmap, Op::WriteZeroes] {
        assert_eq!(device.write(10, &pattern(), ACTION), Status::SUCCESS);
        let done = device.rig.simple(&mut device.channel, op, 11, 2, block_io::RequestFlags::NONE);
        assert_eq!(done, Status::SUCCESS);
        assert_eq!(device.read(10, 4, ACTION | CHECKS).unwrap()[512..1536], [0; 1024]);
        assert_eq!(device.raw_read(11, 1), empty);
        assert_eq!(device.raw_read(13, 1)[..512], pattern()[1536..]);
    }
}

#[test]
fn every_format_generates_and_checks() {
    check_every_format(ProtectedDevice::malloc);
}

#[test]
fn modules_that_forward_requests_forward_every_format() {
    check_every_format(ProtectedDevice::stacked);
}

fn check_every_format(make: fn(MetadataConfig) -> ProtectedDevice) {
    for (md_size, md_interleave, dif_type, dif_is_head_of_md) in [
        (8, false, 1, false),
        (8, true, 2, true),
        (16, true, 1, true),
        (64, false, 3, false),
        (128, true, 3, true),
        (32, false, 2, true),
    ] {
        let config = MetadataConfig { md_size, md_interleave, dif_type, dif_is_head_of_md, dif_pi_format: 0 };
        let mut device = make(config);
        let md = md_size as usize;
        let strips = md == 8;
        let tags = ProtectionTags {
            reference: 99,
            application: 0x1234,
            application_mask: 0xff00,
            ..ProtectionTags::default()
        };
        // The metadata besides the protection information is the writer's.
        let metadata = vec![0x77; 2 * md];
        let interleaved: Vec<u8> =
            pattern().chunks(512).take(2).flat_map(|block| [block, &metadata[..md]].concat()).collect();
        let whole = md_interleave && !strips;
        let data = if whole { &interleaved } else { &pattern()[..1024].to_vec() };
        let separate = (!md_interleave && !strips).then_some(&metadata[..]);
        let generated = device.protected(Op::Write, (20, 2), (data, separate), ACTION, tags).0;
        assert_eq!(generated, Status::SUCCESS, "{config:?}");
        let all = CHECKS | APPLICATION;
        let mut read = |flags: ProtectionFlags, tags| {
            let strips = strips && flags.contains(ACTION);
            let whole = md_interleave && !strips;
            let empty = vec![0; if whole { interleaved.len() } else { 1024 }];
            let separate = (!md_interleave && !strips).then(|| vec![0; 2 * md]);
            device.protected(Op::Read, (20, 2), (&empty, separate.as_deref()), flags, tags)
        };
        let (status, content, behind) = read(all, tags);
        assert_eq!(status, Status::SUCCESS, "{config:?}");
        let behind = if md_interleave { content[512..520 + md - 8].to_vec() } else { behind[..md].to_vec() };
        let protection = if dif_is_head_of_md { 0 } else { md - 8 };
        assert_eq!(behind[protection + 2..protection + 8], [0x12, 0x34, 0, 0, 0, 99], "{config:?}");
        assert!((0..md).filter(|at| !(protection..protection + 8).contains(at)).all(|at| behind[at] == 0x77));
        let (status, stripped, _) = read(all | ACTION, tags);
        assert_eq!((status, &stripped[..512]), (Status::SUCCESS, &pattern()[..512]), "{config:?}");
        assert!(
            read(all, ProtectionTags { application: 0x9934, ..tags })
                .0
                .same_code(Status::APPLICATION_TAG_CHECK_ERROR)
        );
        let wrong = read(all, ProtectionTags { reference: 98, ..tags }).0;
        assert_eq!(wrong.is_success(), dif_type == 3, "{config:?}: {wrong}");
    }
}

/// What an error device changes on the way, the protection finds.
#[test]
fn corrupted_data_fails_the_guard_check() {
    let mut device = ProtectedDevice::stacked(TYPE1);
    device.write(2, &pattern(), ACTION);
    let inject = |device: &ProtectedDevice, op| {
        let injection = error::FaultInjection {
            op: Some(op),
            range: Some(3..4),
            action: error::FaultAction::Corrupt { offset: 600, xor: 1 },
            chance: error::Chance::Always,
            count: Some(1),
            queue_depth: 0,
        };
        error::inject(&device.rig.registry, "EE_D", injection).unwrap();
    };
    let raw = device.raw_read(2, 4);
    inject(&device, Op::Write);
    let written = device.protected(Op::Write, (2, 4), (&raw, None), CHECKS, reference(2)).0;
    assert!(written.same_code(Status::GUARD_CHECK_ERROR), "{written}");
    inject(&device, Op::Read);
    // It is corrupted above the device that checks, so that the reader finds it.
    let (status, read, _) = device.protected(Op::Read, (2, 4), (&[0; 4 * 520], None), CHECKS, reference(2));
    assert_eq!((status, read[600]), (Status::SUCCESS, raw[600] ^ 1));
    assert_eq!(device.read(2, 4, ACTION | CHECKS).unwrap(), pattern(), "the medium is as it was");
}

/// Separate metadata has no addresses in it: a part is a device of its own.
#[test]
fn a_part_of_a_device_has_its_separate_metadata() {
    let config = MetadataConfig {
        md_size: 16,
        md_interleave: false,
        dif_type: 0,
        dif_is_head_of_md: false,
        dif_pi_format: 0,
    };
    let ProtectedDevice { rig, channel } = ProtectedDevice::malloc(config);
    drop(channel);
    let parts = split::SplitConfig { base: "M".into(), count: 2, part_size: split::PartSize::Even };
    split::create(&rig.registry, &parts).unwrap();
    let mut device = ProtectedDevice::open(rig, "Mp1");
    let (data, metadata) = (&pattern()[..1024], [0x5a; 32]);
    let none = ProtectionTags::default();
    let written = device.protected(Op::Write, (3, 2), (data, Some(&metadata)), NONE, none);
    assert_eq!(written.0, Status::SUCCESS);
    let read = |device: &mut ProtectedDevice, lba| {
        device.protected(Op::Read, (lba, 2), (&[0; 1024], Some(&[0; 32])), NONE, none)
    };
    assert_eq!(read(&mut device, 3), (Status::SUCCESS, data.to_vec(), metadata.to_vec()));
    assert_eq!(read(&mut device, 5), (Status::SUCCESS, vec![0; 1024], vec![0; 32]));
    let mut first = ProtectedDevice::open(device.rig, "Mp0");
    assert_eq!(read(&mut first, 3).2, [0; 32]);
}

#[test]
fn copies_renew_the_protection_and_compares_ignore_it() {
    let mut device = ProtectedDevice::malloc(TYPE1);
    device.write(2, &pattern(), ACTION);
    assert_eq!(device.rig.one(&mut device.channel, Request::copy(Tag(1), 2, 4, 4)).status(), Status::SUCCESS);
    assert_eq!(device.read(4, 4, ACTION | CHECKS).unwrap(), pattern());
    let mut raw = device.raw_read(4, 4);
    raw[515] ^= 1;
    let compare = |device: &mut ProtectedDevice, raw: &[u8]| {
        let request = Request { op: Op::Compare, ..Request::read(Tag(1), 4, 4, device.data(raw)) };
        device.rig.one(&mut device.channel, request).status()
    };
    assert_eq!(compare(&mut device, &raw), Status::SUCCESS);
    raw[511] ^= 1;
    assert!(compare(&mut device, &raw).same_code(Status::COMPARE_FAILURE));
    // A copy of what fails its checks fails.
    device.raw_write(5, &raw[520..1040]);
    let mut bad = device.raw_read(6, 1);
    bad[0] ^= 1;
    device.raw_write(6, &bad);
    let copied = device.rig.one(&mut device.channel, Request::copy(Tag(1), 4, 20, 4)).status();
    assert!(
        copied.same_code(Status::GUARD_CHECK_ERROR) || copied.same_code(Status::REFERENCE_TAG_CHECK_ERROR)
    );
}

#[test]
fn invalid_protection_is_rejected() {
    let mut device = ProtectedDevice::malloc(TYPE1);
    let mut status = |op, data: &[u8], metadata, flags| {
        device.protected(op, (0, 1), (data, metadata), flags, ProtectionTags::default()).0
    };
    let length = Status::DATA_SGL_LENGTH_INVALID;
    assert!(status(Op::Write, &[0; 520], None, ACTION).same_code(length), "stripped");
    assert!(status(Op::Write, &[0; 512], None, GUARD).same_code(length));
    assert!(status(Op::Write, &[0; 520], Some(&[0; 8]), GUARD).same_code(length), "interleaved");
    assert!(status(Op::Compare, &[0; 520], None, GUARD).same_code(Status::INVALID_PROTECTION_INFORMATION));
    // A device without protection, with metadata and without.
    for metadata in [MetadataConfig::default(), MetadataConfig { dif_type: 0, ..TYPE1 }] {
        let mut device = ProtectedDevice::malloc(metadata);
        let data = vec![0; device.channel.block_size() as usize];
        let done = device.protected(Op::Write, (0, 1), (&data, None), GUARD, ProtectionTags::default()).0;
        assert!(done.same_code(Status::INVALID_PROTECTION_INFORMATION), "{done}");
    }
    let rig = Rig::new();
    for (metadata, field) in [
        (MetadataConfig { md_size: 12, ..TYPE1 }, "md_size"),
        (MetadataConfig { md_size: 0, ..TYPE1 }, "md_size"),
        (MetadataConfig { dif_type: 4, ..TYPE1 }, "dif_type"),
        (MetadataConfig { dif_pi_format: 3, ..TYPE1 }, "dif_pi_format"),
        (MetadataConfig { dif_pi_format: 2, ..TYPE1 }, "md_size"),
    ] {
        let config = malloc::MallocConfig { metadata, ..malloc::MallocConfig::new("M", 64, 512) };
        let error = malloc::create(&rig.registry, config).unwrap_err().to_string();
        assert!(error.starts_with(field), "{error}");
    }
    let config = malloc::MallocConfig { metadata: TYPE1, ..malloc::MallocConfig::new("M", 64, 512) };
    malloc::create(&rig.registry, config).unwrap();
    let parts = split::SplitConfig { base: "M".into(), count: 2, part_size: split::PartSize::Even };
    assert!(split::create(&rig.registry, &parts).unwrap_err().to_string().contains("protection information"));
}

#[test]
fn a_null_device_checks_writes_and_generates_what_is_read() {
    let mut rig = Rig::new();
    let config = null::NullConfig { metadata: TYPE1, ..null::NullConfig::new("N", 64, 512) };
    null::create(&rig.registry, config).unwrap();
    let channel = rig.registry.open("N", Access::ReadWrite).unwrap().channel(&rig.core).unwrap();
    let raw = {
        let mut channel = channel;
        let read = rig.read(&mut channel, 9, 2).unwrap();
        let mut device = ProtectedDevice { rig, channel };
        assert_eq!(device.write(9, &read, CHECKS), Status::SUCCESS);
        let moved = device.write(10, &read, CHECKS);
        assert!(moved.same_code(Status::REFERENCE_TAG_CHECK_ERROR), "{moved}");
        assert_eq!(device.read(9, 2, CHECKS).unwrap(), device.read(9, 2, CHECKS).unwrap());
        read
    };
    let geometry_guard = wire_nvme::protection::crc16(0, &raw[..512]).to_be_bytes();
    assert_eq!(raw[512..514], geometry_guard);
}

/// A reference tag beyond 32 bits, and one that carries into them.
const WIDE_LBA_TAGS: [u64; 2] = [0x0123_4567_89ab, 0xffff_ffff];

#[test]
fn wide_guards_have_the_layout_of_the_specification_and_find_every_corruption() {
    for (dif_pi_format, guard_bytes) in [(1, 4), (2, 8)] {
        for (dif_type, dif_is_head_of_md, md_size) in [(1, false, 16), (2, true, 64), (3, false, 32)] {
            let config =
                MetadataConfig { md_size, md_interleave: true, dif_type, dif_is_head_of_md, dif_pi_format };
            let mut device = ProtectedDevice::malloc(config);
            let md = md_size as usize;
            let data: Vec<u8> = match md_size {
                16 => pattern()[..1024].to_vec(),
                _ => pattern()
                    .chunks(512)
                    .take(2)
                    .flat_map(|block| [block, &vec![0x77; md]].concat())
                    .collect(),
            };
            for first in WIDE_LBA_TAGS {
                let tags = ProtectionTags {
                    reference: first,
                    storage: 0xbeef,
                    application: 0x1234,
                    application_mask: 0xffff,
                };
                let generated = device.protected(Op::Write, (20, 2), (&data, None), ACTION, tags).0;
                assert_eq!(generated, Status::SUCCESS, "{config:?}");
                let raw = device.raw_read(20, 2);
                let at = 512 + md + 512 + if dif_is_head_of_md { 0 } else { md - 16 };
                let reference = first + u64::from(dif_type != 3);
                // The storage tag of a guard of 32 bits has 16 bits, that of a guard of 64 bits none.
                let space = match dif_pi_format {
                    1 => [&[0xbe, 0xef][..], &reference.to_be_bytes()].concat(),
                    _ => reference.to_be_bytes()[2..].to_vec(),
                };
                let behind = &raw[at + guard_bytes..at + 16];
                assert_eq!(behind, [&[0x12, 0x34], &space[..]].concat(), "{config:?}");
                check_corruptions(&mut device, &raw, (at, guard_bytes), tags, config);
                assert_eq!(device.raw_write(20, &raw), Status::SUCCESS);
            }
        }
    }
}

/// Corrupts each field of the second block's protection information at `at`, and its data.
fn check_corruptions(
    device: &mut ProtectedDevice,
    raw: &[u8],
    (at, guard_bytes): (usize, usize),
    tags: ProtectionTags,
    config: MetadataConfig,
) {
    let all = CHECKS | APPLICATION | ProtectionFlags::CHECK_STORAGE_TAG;
    let all = if config.dif_type == 3 { all - REFERENCE } else { all };
    let storage = (config.dif_pi_format == 1).then_some(Status::STORAGE_TAG_CHECK_ERROR);
    let reference = (config.dif_type != 3).then_some(Status::REFERENCE_TAG_CHECK_ERROR);
    for (byte, expected) in [
        (raw.len() / 2 + 100, Some(Status::GUARD_CHECK_ERROR)),
        (at, Some(Status::GUARD_CHECK_ERROR)),
        (at + guard_bytes - 1, Some(Status::GUARD_CHECK_ERROR)),
        (at + guard_bytes + 1, Some(Status::APPLICATION_TAG_CHECK_ERROR)),
        (at + guard_bytes + 2, storage.or(reference)),
        (at + 15, reference),
    ] {
        let mut bad = raw.to_vec();
        bad[byte] ^= 0x20;
        let same = |status: Status| match expected {
            Some(expected) => status.same_code(expected),
            None => status.is_success(),
        };
        let written = device.protected(Op::Write, (20, 2), (&bad, None), all, tags).0;
        assert!(same(written), "byte {byte} of a write, {config:?}: {written}");
        assert_eq!(device.raw_write(20, &bad), Status::SUCCESS, "raw blocks are not checked");
        let read = device.protected(Op::Read, (20, 2), (&bad, None), all, tags).0;
        assert!(same(read), "byte {byte} of a read, {config:?}: {read}");
        assert_eq!(device.raw_write(20, raw), Status::SUCCESS);
    }
}

#[test]
fn blocks_without_a_wide_guard_are_not_checked() {
    let config = MetadataConfig { md_size: 16, dif_pi_format: 2, ..TYPE1 };
    let mut device = ProtectedDevice::malloc(config);
    let empty = [vec![0; 512], vec![0xff; 16]].concat();
    assert_eq!(device.read(60, 1, CHECKS).unwrap(), empty);
    assert_eq!(device.write(10, &pattern(), ACTION), Status::SUCCESS);
    assert_eq!(device.read(10, 4, ACTION | CHECKS).unwrap(), pattern());
    let done = device.rig.simple(&mut device.channel, Op::Unmap, 11, 2, block_io::RequestFlags::NONE);
    assert_eq!(done, Status::SUCCESS);
    assert_eq!(device.raw_read(11, 1), empty);
}
