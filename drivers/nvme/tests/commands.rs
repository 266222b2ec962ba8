//! Typed commands, metadata and protection information, against the simulated controller.
#![allow(clippy::unwrap_used)]

mod rig;

use block_io::{Request, Status, Tag};
use nvme::protection::{self, Tags};
use nvme::testing::SimulatedConfig;
use nvme::{Command, CommandCompletion, Namespace};
use reactor::Core;
use rig::{attach, buffer, execute, on_device, open, options, status};
use wire_nvme::identify::LbaFormat;
use wire_nvme::io::{COPY_RANGE_SIZE, CopyCommand, CopyRange, Prinfo, ReadWrite, WriteUncorrectable};

fn at(lba: u64, blocks: u32) -> ReadWrite {
    ReadWrite { lba, blocks, ..ReadWrite::default() }
}

async fn one(namespace: &mut Namespace, command: Command) -> CommandCompletion {
    execute(namespace, vec![command]).await.remove(0)
}

#[test]
fn fused_write_executes_only_if_its_compare_succeeds() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let fused = |expected: u8, new: u8| {
            let tags = (Tag(1), Tag(2));
            let (expected, new) = (buffer(&core, 512, expected), buffer(&core, 512, new));
            Vec::from(Command::compare_and_write(tags, 1, &at(5, 1), expected, new))
        };
        let done = execute(&mut namespace, fused(0, 7)).await;
        assert!(done.iter().all(|done| done.status().is_success()));
        assert_eq!(device.namespace_data(1)[5 * 512], 7);
        let mut done = execute(&mut namespace, fused(0, 9)).await;
        done.sort_by_key(CommandCompletion::tag);
        let statuses = [done[0].status(), done[1].status()];
        assert_eq!(statuses, [Status::COMPARE_FAILURE, Status::FUSED_FAILED]);
        assert_eq!(device.namespace_data(1)[5 * 512], 7);
        // A single fused command is rejected by the driver.
        let done = execute(&mut namespace, fused(0, 9).split_off(1)).await;
        assert!(done[0].status().same_code(Status::FUSED_MISSING));
        let mut half = fused(0, 9);
        half.truncate(1);
        assert!(execute(&mut namespace, half).await[0].status().same_code(Status::FUSED_MISSING));
    });
}

#[test]
fn fused_pairs_are_submitted_whole_or_not_at_all() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let options = nvme::Options { queue_depth: 3, ..options() };
        let mut namespace = open(&core, &device, &options).await;
        let mut batch = Vec::new();
        for pair in 0..5 {
            let tags = (Tag(2 * pair), Tag(2 * pair + 1));
            let (expected, new) = (buffer(&core, 512, 0), buffer(&core, 512, 0));
            batch.extend(Command::compare_and_write(tags, 1, &at(pair, 1), expected, new));
        }
        let pair = namespace.queue_pair().unwrap();
        pair.submit_commands(&mut batch);
        assert_eq!(batch.len(), 8, "a queue of three takes one pair, and no part of another");
        let mut done = Vec::new();
        while done.len() < 2 {
            pair.poll_commands(&mut done);
            rig::next_turn().await;
        }
        done.extend(execute(&mut namespace, batch).await);
        assert_eq!(done.len(), 10);
        assert!(done.iter().all(|done| done.status().is_success()));
    });
}

#[test]
fn copy_and_write_uncorrectable_change_blocks() {
    on_device(SimulatedConfig::new(1024, 512), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let write = Request::write(Tag(0), 0, 4, buffer(&core, 2048, 3));
        assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
        let mut ranges = buffer(&core, 2 * COPY_RANGE_SIZE, 0);
        for (index, lba) in [0, 2].into_iter().enumerate() {
            let range =
                CopyRange { lba, blocks: 2, reference_tag: 0, application_tag: 0, application_tag_mask: 0 };
            let place = &mut ranges.as_mut_slice()[index * COPY_RANGE_SIZE..][..COPY_RANGE_SIZE];
            range.encode(place.try_into().unwrap());
        }
        let copy = CopyCommand { lba: 100, ranges: 2, ..CopyCommand::default() };
        assert_eq!(
            one(&mut namespace, Command::copy(Tag(0), 1, &copy, ranges)).await.status(),
            Status::SUCCESS
        );
        assert!(device.namespace_data(1)[100 * 512..104 * 512].iter().all(|byte| *byte == 3));

        let bad = WriteUncorrectable { lba: 101, blocks: 1 };
        let bad = Command::write_uncorrectable(Tag(0), 1, &bad);
        assert_eq!(one(&mut namespace, bad).await.status(), Status::SUCCESS);
        let verify = |lba| Command::verify(Tag(0), 1, &at(lba, 2));
        assert_eq!(one(&mut namespace, verify(100)).await.status(), Status::UNRECOVERED_READ_ERROR);
        assert_eq!(one(&mut namespace, verify(102)).await.status(), Status::SUCCESS);
        let read = Request::read(Tag(0), 101, 1, buffer(&core, 512, 0));
        assert_eq!(status(&core, &mut namespace, read).await, Status::UNRECOVERED_READ_ERROR);
        let raw = wire_nvme::Sqe { nsid: 1, ..wire_nvme::Sqe::new(0xc1) };
        let done = one(&mut namespace, Command::raw(Tag(3), raw, None, None)).await;
        assert!(done.status().same_code(Status::INVALID_OPCODE));
        assert_eq!(done.tag(), Tag(3));
    });
}

/// A namespace of 512-byte blocks with metadata.
fn with_metadata(bytes: u16, extended: bool, dps: u8) -> SimulatedConfig {
    let mut config = SimulatedConfig::new(1024, 512);
    let namespace = &mut config.namespaces[0];
    namespace.formats = vec![LbaFormat { metadata_bytes: bytes, data_log2: 9, performance: 0 }];
    (namespace.extended_lba, namespace.dps) = (extended, dps);
    config
}

async fn info_and_pair(
    core: &Core,
    device: &nvme::testing::SimulatedController,
) -> (nvme::NamespaceInfo, nvme::QueuePair) {
    let controller = attach(core, device).await;
    let info = controller.namespace(1).await.unwrap();
    let pair = controller.qpair(core, &options()).await.unwrap();
    (info, pair)
}

async fn through(pair: &mut nvme::QueuePair, command: Command) -> CommandCompletion {
    let (mut batch, mut done) = (vec![command], Vec::new());
    while done.is_empty() {
        pair.submit_commands(&mut batch);
        pair.poll_commands(&mut done);
        rig::next_turn().await;
    }
    done.remove(0)
}

#[test]
fn separate_metadata_round_trips_with_valid_protection_information() {
    on_device(with_metadata(16, false, 1), async |core, device| {
        let (info, mut pair) = info_and_pair(&core, &device).await;
        let tags = Tags { reference: 40, application: 7, application_mask: 0xffff, ..Tags::default() };
        let (data, mut metadata) = (buffer(&core, 2048, 9), buffer(&core, 64, 1));
        protection::generate(&info.metadata, 512, data.as_slice(), metadata.as_mut_slice(), &tags);
        let write = Command::write(Tag(0), 1, &at(40, 4), data).with_metadata(metadata);
        assert_eq!(through(&mut pair, write).await.status(), Status::SUCCESS);
        let read = Command::read(Tag(0), 1, &at(40, 4), buffer(&core, 2048, 0));
        let done = through(&mut pair, read.with_metadata(buffer(&core, 64, 0))).await;
        assert_eq!(done.status(), Status::SUCCESS);
        let back = done.into_command();
        let (data, metadata) = (back.data.unwrap(), back.metadata.unwrap());
        let check =
            |tags: &Tags| protection::check(&info.metadata, 512, data.as_slice(), metadata.as_slice(), tags);
        assert_eq!(check(&tags), Ok(()));
        assert_eq!(check(&Tags { reference: 41, ..tags }), Err(Status::REFERENCE_TAG_CHECK_ERROR));
    });
}

#[test]
fn extended_lba_metadata_round_trips_with_the_data() {
    on_device(with_metadata(8, true, 0b1010), async |core, device| {
        let (info, mut pair) = info_and_pair(&core, &device).await;
        assert!(info.metadata.extended && info.metadata.protection.unwrap().first);
        let tags = Tags { reference: 3, ..Tags::default() };
        let mut blocks = buffer(&core, 3 * 520, 4);
        protection::generate_extended(&info.metadata, 512, blocks.as_mut_slice(), &tags);
        let write = Command::write(Tag(0), 1, &at(3, 3), blocks);
        assert_eq!(through(&mut pair, write).await.status(), Status::SUCCESS);
        let read = Command::read(Tag(0), 1, &at(3, 3), buffer(&core, 3 * 520, 0));
        let done = through(&mut pair, read).await;
        let blocks = done.into_command().data.unwrap();
        assert_eq!(protection::check_extended(&info.metadata, 512, blocks.as_slice(), &tags), Ok(()));
    });
}

#[test]
fn channel_requests_let_the_controller_insert_and_strip_protection_information() {
    on_device(with_metadata(8, false, 1), async |core, device| {
        let mut namespace = open(&core, &device, &options()).await;
        let write = Request::write(Tag(0), 9, 2, buffer(&core, 1024, 6));
        assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
        assert!(device.namespace_data(1)[9 * 512..11 * 512].iter().all(|byte| *byte == 6));
        assert_eq!(Prinfo::ACTION.bits(), 8);
    });
}
