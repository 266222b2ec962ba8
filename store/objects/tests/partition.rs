//! What a partition accepts, plans and allocates.
#![allow(clippy::unwrap_used)]

use objects::{
    BlockBase, ObjectsError, Partition, PartitionLoader, PieceSource, SpaceUse, WritePiece, WrittenBlocks,
    entries_to_redo,
};
use random::WyRand;
use wire_store::*;

const ONODES: u32 = 16;
const EXTENTS: u64 = 4;

fn superblock() -> Superblock {
    let partition_blocks = 1 + 2 + 1 + EXTENTS * 16;
    Superblock {
        cluster: [1; 16],
        node: [2; 16],
        device: [3; 16],
        device_blocks: 2 * partition_blocks + 2,
        partition_blocks,
        partitions: 2,
        onodes_per_partition: ONODES,
        logs: 0,
        log_blocks: 0,
        checkpoint_blocks: 0,
        log_device: None,
    }
}

fn id(index: u32) -> ObjectId {
    ObjectId { group: 1, volume: 2, index, suffix: 0 }
}

/// Loads partition 1 with these onodes.
fn load(onodes: &[(u32, Onode)]) -> Result<Partition, ObjectsError> {
    let mut loader = PartitionLoader::new(superblock(), 1)?;
    let mut blocks = vec![[0; BLOCK_BYTES]; loader.blocks() as usize];
    blocks[0] = *loader.header().bytes;
    for (place, onode) in onodes {
        let at = (place % 8) as usize * SECTOR_BYTES;
        blocks[1 + *place as usize / 8][at..at + SECTOR_BYTES].copy_from_slice(&onode.encode(*place));
    }
    for block in &blocks {
        loader.push(block)?;
    }
    loader.finish(1)
}

fn mapped(index: u32, extents: &[u32]) -> Onode {
    let mut map = Box::<ObjectBlockMap>::default();
    map.extents[..extents.len()].copy_from_slice(extents);
    Onode::new(id(index), OnodeContent::Mapped(map))
}

fn entry(operation: Operation, index: u32, offset: u32, length: u32) -> EntryHeader {
    EntryHeader::new(operation, id(index), offset, length)
}

fn apply(partition: &mut Partition, entry: EntryHeader) -> Result<Vec<WritePiece>, ObjectsError> {
    let mut pieces = Vec::new();
    partition.apply(&entry, &vec![7; entry.data_bytes()], &mut pieces).map(|()| pieces)
}

#[test]
fn onodes_that_contradict_each_other_are_rejected() {
    // Partition 1 begins at block 69; its onodes are in blocks 70 and 71.
    let twice = load(&[(0, mapped(5, &[])), (9, mapped(5, &[]))]).unwrap_err();
    assert_eq!(twice, ObjectsError::Twice { block: 71, object: id(5) });
    for extents in [&[1, 1][..], &[2], &[EXTENTS as u32 + 1], &[u32::MAX]] {
        let error = load(&[(0, mapped(4, &[2])), (1, mapped(5, extents))]).unwrap_err();
        let extent = extents[extents.len() - 1];
        assert_eq!(error, ObjectsError::Extent { block: 70, extent, object: id(5) });
    }
    let partition = load(&[(0, mapped(4, &[2])), (1, mapped(5, &[0, 1, 4]))]).unwrap();
    let expected = SpaceUse {
        extents: 4,
        free_extents: 1,
        released_extents: 0,
        objects: 2,
        onodes: ONODES,
        free_onodes: ONODES - 2,
    };
    assert_eq!(partition.space_use(), expected);
}

#[test]
fn a_foreign_or_incomplete_partition_is_rejected() {
    assert_eq!(PartitionLoader::new(superblock(), 2).unwrap_err(), ObjectsError::Foreign { block: 0 });
    let header = |device, index, onodes| {
        let mut block = [0; BLOCK_BYTES];
        block[..SECTOR_BYTES].copy_from_slice(&PartitionHeader { device, index, onodes }.encode(69));
        PartitionLoader::new(superblock(), 1).unwrap().push(&block)
    };
    assert_eq!(header([3; 16], 1, ONODES), Ok(()));
    for other in [header([4; 16], 1, ONODES), header([3; 16], 0, ONODES), header([3; 16], 1, 8)] {
        assert_eq!(other, Err(ObjectsError::Foreign { block: 69 }));
    }
    let mut loader = PartitionLoader::new(superblock(), 1).unwrap();
    loader.push(&loader.header().bytes).unwrap();
    let mut damaged = [0; BLOCK_BYTES];
    damaged[600] = 1;
    let error = loader.push(&damaged).unwrap_err().to_string();
    assert_eq!(error, "block 70: the onode: the magic number is another");
    assert_eq!(loader.finish(1).unwrap_err(), ObjectsError::Incomplete);
}

#[test]
fn an_overwrite_of_a_preallocated_block_changes_no_block_map() {
    let mut partition = load(&[(3, mapped(0, &[2, 3]))]).unwrap();
    // Extents 2 and 3 are adjacent: 24 blocks from block 8 on are one piece.
    let pieces = apply(&mut partition, entry(Operation::Write, 0, 8 * 4096, 24 * 4096)).unwrap();
    let (source, base) = (PieceSource::Data(0), BlockBase::Whole);
    let block = 69 + 4 + 16 + 8;
    assert_eq!(pieces, [WritePiece { block, blocks: 24, skip: 0, length: 24 * 4096, source, base }]);
    assert!(partition.begin_checkpoint().flush_before_onodes);
    partition.finish_checkpoint();
    assert_eq!(apply(&mut partition, entry(Operation::Write, 0, 8 * 4096, 24 * 4096)).unwrap(), pieces);
    let checkpoint = partition.begin_checkpoint();
    assert!(!checkpoint.flush_before_onodes);
    assert_eq!((checkpoint.checksum_blocks.len(), checkpoint.onodes.len()), (0, 1));
}

#[test]
fn space_is_free_after_the_checkpoint_that_gives_it_up() {
    let mut partition = load(&[]).unwrap();
    apply(&mut partition, entry(Operation::Write, 0, 0, 4 * 65536)).unwrap();
    partition.begin_checkpoint();
    partition.finish_checkpoint();
    apply(&mut partition, entry(Operation::Remove, 0, 0, 0)).unwrap();
    let write = || entry(Operation::Write, 1, 0, 4096);
    assert_eq!(apply(&mut partition, write()), Err(ObjectsError::Full));
    partition.begin_checkpoint();
    assert_eq!(apply(&mut partition, write()), Err(ObjectsError::Full));
    partition.abort_checkpoint();
    assert_eq!(apply(&mut partition, write()), Err(ObjectsError::Full));
    assert_eq!(partition.space_use().released_extents, 4);
    partition.begin_checkpoint();
    partition.finish_checkpoint();
    apply(&mut partition, write()).unwrap();
    assert_eq!(partition.space_use().free_extents, 3);
}

#[test]
fn a_refused_operation_changes_nothing() {
    let mut partition = load(&[(0, mapped(0, &[1, 2, 3]))]).unwrap();
    let before = partition.space_use();
    // Two extents are needed, one is free.
    assert_eq!(apply(&mut partition, entry(Operation::Write, 1, 65536 - 512, 1024)), Err(ObjectsError::Full));
    assert_eq!(apply(&mut partition, entry(Operation::Preallocate, 1, 0, 0)), Err(ObjectsError::Full));
    let beyond = entry(Operation::Write, 0, OBJECT_BYTES as u32, 1);
    assert_eq!(apply(&mut partition, beyond), Err(ObjectsError::Range));
    assert_eq!(
        apply(&mut partition, entry(Operation::WriteZeroes, 0, 1, u32::MAX)),
        Err(ObjectsError::Range)
    );
    let short = partition.apply(&entry(Operation::Write, 0, 0, 4096), &[0; 10], &mut Vec::new());
    assert_eq!(short, Err(ObjectsError::Range));
    assert_eq!(partition.plan_read(id(0), 1, u32::MAX, &mut Vec::new()), Err(ObjectsError::Range));
    assert_eq!(partition.space_use(), before);
    let checkpoint = partition.begin_checkpoint();
    assert_eq!((checkpoint.checksum_blocks.len(), checkpoint.onodes.len()), (0, 0));
}

#[test]
fn redo_after_a_removal_needs_no_space_that_the_crash_took() {
    // What the last of three entries left, on a partition that is full: the object has no block at its start
    // any more.
    let after_crash = || {
        let mut map = Box::<ObjectBlockMap>::default();
        map.extents[16] = 1;
        load(&[(0, Onode::new(id(0), OnodeContent::Mapped(map))), (1, mapped(1, &[2, 3, 4]))]).unwrap()
    };
    let log: Vec<(EntryHeader, ())> = [
        entry(Operation::Write, 0, 0, 100),
        entry(Operation::Remove, 0, 0, 0),
        entry(Operation::Write, 0, 1 << 20, 4096),
    ]
    .into_iter()
    .zip(1..)
    .map(|(entry, sequence)| (EntryHeader { sequence, ..entry }, ()))
    .collect();
    assert_eq!(apply(&mut after_crash(), log[0].0.clone()), Err(ObjectsError::Full));
    let mut partition = after_crash();
    for (entry, ()) in entries_to_redo(&log) {
        apply(&mut partition, entry.clone()).unwrap();
    }
    assert_eq!(partition.space_use().free_extents, 0);
}

#[test]
fn what_operations_in_the_log_write_is_known_before_they_are_applied() {
    for seed in 0..300 {
        let mut random = WyRand::new(seed);
        let mut partition = load(&[]).unwrap();
        let mut foreseen = None;
        for step in 0..20 {
            let operation = match random.below(10) {
                0 => Operation::Remove,
                1 => Operation::Preallocate,
                2..5 => Operation::WriteZeroes,
                _ => Operation::Write,
            };
            // Within the onode, or in some blocks of the first three extents.
            let unit = [1, 512, BLOCK_BYTES as u32][random.below(3) as usize];
            let offset = random.below(40) as u32 * unit;
            let length = (1 + random.below(8) as u32) * unit;
            let entry = entry(operation, 5, offset, length);
            if apply(&mut partition, entry.clone()).is_ok() {
                foreseen = WrittenBlocks::after(foreseen, &entry);
            }
            let found = partition.onode(id(5)).map(|onode| WrittenBlocks::of(&onode.content));
            assert_eq!(found, foreseen, "seed {seed}, step {step}: {entry:?}");
        }
    }
}
