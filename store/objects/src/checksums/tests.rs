use std::collections::BTreeMap;

use random::WyRand;
use wire_store::{BLOCK_BYTES, SECTOR_BYTES};

use super::{CHANGES_MIN, ChecksumTable, PER_BLOCK};

const BLOCKS: u32 = 6;

type Bytes = [u8; BLOCK_BYTES];

/// A table with its device: reads and writes of a block of the table take a while, and see each other's sectors in any
/// order.
struct Rig {
    table: ChecksumTable,
    oracle: Vec<u32>,
    device: Vec<Bytes>,
    /// Reads in flight, with the sectors that they have so far.
    reads: BTreeMap<u32, BTreeMap<usize, Vec<u8>>>,
    /// Blocks that the checkpoint in progress has to write, and those that are being written, with sectors to write.
    to_write: Option<Vec<u32>>,
    writing: BTreeMap<u32, (Box<Bytes>, Vec<usize>)>,
}

fn sector(bytes: &Bytes, index: usize) -> &[u8] {
    &bytes[index * SECTOR_BYTES..][..SECTOR_BYTES]
}

impl Rig {
    fn new(cached_max: usize) -> Rig {
        Rig {
            table: ChecksumTable::new(BLOCKS as usize, cached_max),
            oracle: vec![0; BLOCKS as usize * PER_BLOCK],
            device: vec![[0; BLOCK_BYTES]; BLOCKS as usize],
            reads: BTreeMap::new(),
            to_write: None,
            writing: BTreeMap::new(),
        }
    }

    /// Few of the checksums of each block, in all its sectors.
    fn index(random: &mut WyRand) -> u64 {
        random.below(BLOCKS.into()) * PER_BLOCK as u64 + random.below(32) * 32
    }

    fn check(&self, index: u64) -> bool {
        let found = self.table.get(index);
        assert!(
            found.is_none_or(|found| found == self.oracle[index as usize]),
            "checksum {index}: {found:?}"
        );
        found.is_some()
    }

    fn step(&mut self, random: &mut WyRand) {
        match random.below(10) {
            0..3 => {
                let (index, crc32c) = (Rig::index(random), random.below(5) as u32);
                self.table.set(index, crc32c);
                self.oracle[index as usize] = crc32c;
                assert!(self.check(index));
            }
            3..5 => {
                let index = Rig::index(random);
                let block = index as u32 / PER_BLOCK as u32;
                if !self.check(index) && self.table.begin_load(block) {
                    self.reads.insert(block, BTreeMap::new());
                }
            }
            5..7 => self.read_on(random),
            _ => self.checkpoint_on(random),
        }
    }

    fn read_on(&mut self, random: &mut WyRand) {
        let Some((&block, sectors)) = self.reads.iter_mut().nth(random.index(BLOCKS as usize)) else {
            return;
        };
        let of_block = BLOCK_BYTES / SECTOR_BYTES;
        for _ in 0..random.below(20) {
            let index = random.index(of_block);
            sectors.entry(index).or_insert_with(|| sector(&self.device[block as usize], index).to_vec());
        }
        if random.happens(50) {
            self.reads.remove(&block);
            return self.table.cancel_load(block);
        }
        if sectors.len() == of_block {
            let bytes = self.reads.remove(&block).unwrap().into_values().flatten().collect::<Vec<u8>>();
            self.table.finish_load(block, &bytes.try_into().unwrap());
            for index in super::range_of(block) {
                assert!(self.check(index), "what was loaded is there");
            }
        }
    }

    fn checkpoint_on(&mut self, random: &mut WyRand) {
        let Some(to_write) = &mut self.to_write else {
            self.to_write = Some(self.table.begin_checkpoint());
            return;
        };
        if let Some(block) = to_write.pop() {
            let bytes = self.table.checkpoint_bytes(block, None).unwrap_or_else(|| {
                let stored = self.device[block as usize];
                self.table.checkpoint_bytes(block, Some(&stored)).unwrap()
            });
            self.writing.insert(block, (bytes, (0..BLOCK_BYTES / SECTOR_BYTES).collect()));
        } else if let Some((&block, (bytes, left))) = self.writing.iter_mut().next() {
            let index = left.swap_remove(random.index(left.len()));
            self.device[block as usize][index * SECTOR_BYTES..][..SECTOR_BYTES]
                .copy_from_slice(sector(bytes, index));
            if left.is_empty() {
                self.writing.remove(&block);
            }
            // Half of the writes of a checkpoint may be there when it fails.
            if random.happens(5) {
                self.writing.clear();
                self.to_write = None;
                self.table.abort_checkpoint();
            }
        } else {
            self.to_write = None;
            self.table.finish_checkpoint();
        }
        assert!(self.table.cached() <= self.table.cached_max);
    }

    /// Finishes what is in progress and a checkpoint of the rest: then the device has everything.
    fn end(mut self, random: &mut WyRand) {
        while self.to_write.is_some() {
            self.checkpoint_on(random);
        }
        self.checkpoint_on(random);
        while self.to_write.is_some() {
            self.checkpoint_on(random);
            if self.to_write.is_none() && !self.table.changed.is_empty() {
                self.checkpoint_on(random);
            }
        }
        let device = self.device.as_flattened().as_chunks::<4>().0.iter();
        assert!(device.map(|bytes| u32::from_le_bytes(*bytes)).eq(self.oracle));
    }
}

#[test]
fn checksums_are_those_of_an_oracle_while_blocks_are_evicted_read_and_written() {
    let seeds = match std::env::var("RINGBOLT_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..seed + 1).unwrap(),
        Err(_) => 0..400,
    };
    for seed in seeds {
        println!("RINGBOLT_SEED={seed}");
        let mut random = WyRand::new(seed);
        let mut rig = Rig::new(1 + seed as usize % 4);
        for _ in 0..2000 {
            rig.step(&mut random);
        }
        rig.end(&mut random);
    }
}

#[test]
fn a_block_that_is_used_again_stays_cached() {
    let mut table = ChecksumTable::new(5, 3);
    let at = |block: u64| block * PER_BLOCK as u64;
    let load = |table: &mut ChecksumTable, block| {
        assert!(table.begin_load(block) && !table.begin_load(block));
        table.finish_load(block, &[block as u8; BLOCK_BYTES]);
    };
    for block in 0..3 {
        load(&mut table, block);
    }
    // The first round takes the marks of all, and evicts the first.
    load(&mut table, 3);
    assert_eq!((table.get(at(0)), table.get(at(1))), (None, Some(0x0101_0101)));
    // Block 1 was used since.
    load(&mut table, 4);
    assert_eq!((table.get(at(1)), table.get(at(2))), (Some(0x0101_0101), None));
    assert!(!table.begin_load(1));
    assert_eq!(table.cached(), 3);
}

#[test]
fn many_changes_make_a_checkpoint_due() {
    let mut table = ChecksumTable::new(8, 1);
    for index in 0..CHANGES_MIN as u64 {
        table.set(index * 2, 7);
    }
    assert!(!table.has_many_changes());
    table.set(1, 7);
    assert!(table.has_many_changes());
    assert_eq!(table.begin_checkpoint(), [0, 1]);
    assert!(!table.has_many_changes());
    table.abort_checkpoint();
    assert!(table.has_many_changes());
}

#[test]
fn what_changes_nothing_is_not_written() {
    let mut table = ChecksumTable::new(8, 1);
    table.cache_stored(2, &[7; BLOCK_BYTES]);
    table.set(2 * PER_BLOCK as u64, 0x0707_0707);
    assert!(table.begin_checkpoint().is_empty());
}
