//! The table with a disk that loses power: no read is ever said to be wrong that is right, and what is
//! damaged is found where checksums were durable.

use std::collections::BTreeMap;

use random::WyRand;
use wire_blob::{CHECKSUM_BLOCK_BYTES, CHECKSUM_REGION_BYTES, ChecksumsId};

use super::fault::TableFault;
use super::{ChecksumTable, RegionHold, TableAction, TableIo, TableIoFailed, TableStart};
use crate::layout::ChecksumLayout;
use crate::region::{Verdict, Written};

const BLOCK: usize = CHECKSUM_BLOCK_BYTES as usize;
const SECTOR: usize = 512;
const BLOCKS_PER_REGION: u64 = CHECKSUM_REGION_BYTES / BLOCK as u64;
/// Blocks of each region that are used: few, so that writes meet.
const BLOCKS_USED: u64 = 5;
const REGIONS: u64 = 3;

struct Volatile {
    offset: usize,
    data: Vec<u8>,
}

/// A disk with a volatile cache, in which what was written is there in the order of completion.
#[derive(Default)]
struct Disk {
    durable: Vec<u8>,
    cached: Vec<Volatile>,
    has_cache: bool,
    unit: usize,
}

impl Disk {
    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let start = offset as usize;
        let mut out = self.durable[start..start + bytes].to_vec();
        for write in &self.cached {
            let (from, to) = (write.offset.max(start), (write.offset + write.data.len()).min(start + bytes));
            if from < to {
                out[from - start..to - start]
                    .copy_from_slice(&write.data[from - write.offset..to - write.offset]);
            }
        }
        out
    }

    fn write(&mut self, offset: u64, data: Vec<u8>) {
        let offset = offset as usize;
        match self.has_cache {
            true => self.cached.push(Volatile { offset, data }),
            false => self.durable[offset..offset + data.len()].copy_from_slice(&data),
        }
    }

    /// Makes durable what had completed when the flush began.
    fn flush(&mut self, count: usize) {
        for write in self.cached.drain(..count) {
            self.durable[write.offset..write.offset + write.data.len()].copy_from_slice(&write.data);
        }
    }

    /// What a power failure leaves of what was not durable: any sectors of it, in any order.
    fn crash(&mut self, in_flight: impl Iterator<Item = (u64, Vec<u8>)>, dice: &mut WyRand) {
        let cached = self.cached.drain(..).map(|write| (write.offset as u64, write.data));
        let writes: Vec<(u64, Vec<u8>)> = cached.chain(in_flight).collect();
        let chance = [0, 200, 500, 800, 1000][dice.index(5)];
        for (offset, data) in writes {
            for (at, unit) in data.chunks(self.unit).enumerate() {
                if dice.happens(chance) {
                    let at = offset as usize + at * self.unit;
                    self.durable[at..at + unit.len()].copy_from_slice(unit);
                }
            }
        }
    }
}

enum InFlight {
    Table { io: TableIo, cached: usize },
    Data { hold: RegionHold, offset: u64, data: Vec<u8>, block: Option<u64> },
}

struct Run {
    dice: WyRand,
    disk: Disk,
    layout: ChecksumLayout,
    table: ChecksumTable,
    id: ChecksumsId,
    /// What the store would say: which checksums are those of its data.
    mark: Option<ChecksumsId>,
    /// Writes that wait for their region: byte and data.
    waiting: BTreeMap<u64, (u64, Vec<u8>)>,
    reads: BTreeMap<u64, u64>,
    in_flight: Vec<InFlight>,
    last_token: u64,
    fault: Option<TableFault>,
    failing: u32,
    /// Blocks that were damaged, and found.
    found: u32,
}

fn id_of(dice: &mut WyRand) -> ChecksumsId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&dice.next_bits().to_le_bytes());
    id
}

/// A disk, several power failures, other programs, and clean ends. Returns how often damage was found.
fn run_seed(seed: u64, fault: Option<TableFault>, failing: u32) -> Result<u32, String> {
    let mut dice = WyRand::new(seed);
    let layout = ChecksumLayout { data_start: 4096, data_bytes: REGIONS * CHECKSUM_REGION_BYTES - 8192 };
    let disk = Disk {
        durable: vec![0xdd; layout.end() as usize],
        cached: Vec::new(),
        has_cache: dice.happens(600),
        unit: [SECTOR, BLOCK][dice.index(2)],
    };
    let id = id_of(&mut dice);
    let table = ChecksumTable::new(layout, id, TableStart::Anew(Vec::new()), disk.has_cache);
    let mut run = Run {
        dice,
        disk,
        layout,
        table,
        id,
        mark: None,
        waiting: BTreeMap::new(),
        reads: BTreeMap::new(),
        in_flight: Vec::new(),
        last_token: 0,
        fault,
        failing,
        found: 0,
    };
    run.table.fault = fault;
    for _ in 0..1 + run.dice.index(5) {
        let steps = 10 + run.dice.index(300);
        for _ in 0..steps {
            run.step()?;
        }
        match run.dice.index(3) {
            0 => run.end()?,
            _ => run.crash(),
        }
        run.others();
        run.restart();
    }
    run.end()?;
    Ok(run.found)
}

impl Run {
    fn block(&mut self) -> u64 {
        let region = self.dice.below(REGIONS);
        let first = u64::from(region == 0);
        region * BLOCKS_PER_REGION + first + self.dice.below(BLOCKS_USED)
    }

    fn token(&mut self) -> u64 {
        self.last_token += 1;
        self.last_token
    }

    fn step(&mut self) -> Result<(), String> {
        match self.dice.index(20) {
            0..5 => self.want_write(),
            5..8 => {
                let (token, block) = (self.token(), self.block());
                self.reads.insert(token, block);
                let region = (block / BLOCKS_PER_REGION) as u32;
                self.table.want(token, region..region + 1, false);
            }
            8 => _ = self.table.tick(),
            9 => self.damage()?,
            _ => self.complete(),
        }
        self.pump()
    }

    fn want_write(&mut self) {
        let (token, block) = (self.token(), self.block());
        let (mut offset, mut bytes) = (block * BLOCK as u64, BLOCK);
        if self.dice.happens(200) {
            // A part of it.
            offset += (self.dice.index(7) * SECTOR) as u64;
            bytes = SECTOR;
        }
        let tag = self.dice.next_bits();
        let data: Vec<u8> = tag.to_le_bytes().into_iter().cycle().take(bytes).collect();
        self.waiting.insert(token, (offset, data));
        let region = (block / BLOCKS_PER_REGION) as u32;
        self.table.want(token, region..region + 1, true);
    }

    /// Begins what may begin.
    fn pump(&mut self) -> Result<(), String> {
        loop {
            if let Some(granted) = self.table.next_granted() {
                let (write, read) = (self.waiting.remove(&granted.token), self.reads.remove(&granted.token));
                let Ok(holds) = granted.result else { continue };
                let hold = holds.into_iter().next().ok_or("no region was given")?;
                match (write, read) {
                    (Some((offset, data)), _) => self.begin_write(hold, offset, data),
                    (_, Some(block)) => _ = self.read(&hold, block)?,
                    _ => return Err("that was not asked for".to_string()),
                }
            } else if let Some(io) = self.table.next_io() {
                self.in_flight.push(InFlight::Table { io, cached: self.disk.cached.len() });
            } else {
                return Ok(());
            }
        }
    }

    fn begin_write(&mut self, hold: RegionHold, offset: u64, data: Vec<u8>) {
        let block = offset / BLOCK as u64;
        hold.region().begin_block((block % BLOCKS_PER_REGION) as usize);
        let whole = (data.len() == BLOCK).then_some(block);
        self.in_flight.push(InFlight::Data { hold, offset, data, block: whole });
    }

    /// Reads a block, and compares it. Returns whether its checksum is known.
    fn read(&mut self, hold: &RegionHold, block: u64) -> Result<bool, String> {
        let content = self.disk.read(block * BLOCK as u64, BLOCK);
        match hold.region().verify((block % BLOCKS_PER_REGION) as usize, || codec::crc32c(&content)) {
            Verdict::Match => Ok(true),
            Verdict::Unknown => Ok(false),
            Verdict::Mismatch(state) => Err(format!("block {block} is said to be wrong: {state:?}")),
        }
    }

    /// Completes an I/O in flight, if there is one.
    fn complete(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let at = self.dice.index(self.in_flight.len());
        let fails = self.dice.happens(self.failing);
        match self.in_flight.swap_remove(at) {
            InFlight::Data { hold, offset, data, block } => {
                let sum = codec::crc32c(&data);
                let at = (offset / BLOCK as u64 % BLOCKS_PER_REGION) as usize;
                // What fails may have been done.
                if !fails || self.dice.happens(500) {
                    self.disk.write(offset, data);
                }
                let is_data = block.is_some() && !fails;
                hold.region().end_block(at, if is_data { Written::Data(sum) } else { Written::Other });
            }
            InFlight::Table { io: TableIo { id, action }, cached } => {
                let result = match action {
                    TableAction::Read { offset, bytes } => Ok(Some(self.disk.read(offset, bytes))),
                    TableAction::Write { offset, data } => {
                        if !fails || self.dice.happens(500) {
                            self.disk.write(offset, data);
                        }
                        Ok(None)
                    }
                    TableAction::Flush => {
                        if !fails {
                            self.flush(cached);
                        }
                        Ok(None)
                    }
                };
                self.table.complete(id, if fails { Err(TableIoFailed) } else { result });
            }
        }
    }

    /// A flush that began when this many writes were in the cache.
    fn flush(&mut self, cached: usize) {
        self.disk.flush(cached);
        for io in &mut self.in_flight {
            if let InFlight::Table { cached: other, .. } = io {
                *other = other.saturating_sub(cached);
            }
        }
    }

    /// Damages a block whose checksum is known, sees that it is found, and undoes it.
    fn damage(&mut self) -> Result<(), String> {
        let block = self.block();
        let region = (block / BLOCKS_PER_REGION) as u32;
        let Some(entry) = self.table.entries.get(&region) else { return Ok(()) };
        let hold = RegionHold::read(&entry.region);
        if entry.phase == super::Phase::Loading || !self.read(&hold, block)? {
            return Ok(());
        }
        let mut content = self.disk.read(block * BLOCK as u64, BLOCK);
        content[self.dice.index(BLOCK)] ^= 1;
        match hold.region().verify((block % BLOCKS_PER_REGION) as usize, || codec::crc32c(&content)) {
            Verdict::Mismatch(_) => self.found += 1,
            other => return Err(format!("damage of block {block} is not found: {other:?}")),
        }
        Ok(())
    }

    /// Ends without writes in flight, and with all checksums durable. Then each block that is known is
    /// verified.
    fn end(&mut self) -> Result<(), String> {
        self.failing = 0;
        for _ in 0..10_000 {
            if self.in_flight.is_empty() && self.waiting.is_empty() {
                break;
            }
            self.complete();
            self.pump()?;
        }
        self.table.settle();
        for _ in 0..10_000 {
            self.pump()?;
            if self.table.is_settled() {
                break;
            }
            self.table.settle();
            self.complete();
        }
        if !self.table.is_settled() {
            return Err("it does not end".to_string());
        }
        let cached = self.disk.cached.len();
        self.disk.flush(cached);
        if self.dice.happens(500) {
            self.mark = Some(self.id);
        }
        Ok(())
    }

    fn crash(&mut self) {
        let in_flight = std::mem::take(&mut self.in_flight);
        let writes = in_flight.into_iter().filter_map(|io| match io {
            InFlight::Data { offset, data, .. } => Some((offset, data)),
            InFlight::Table { io: TableIo { action: TableAction::Write { offset, data }, .. }, .. } => {
                Some((offset, data))
            }
            InFlight::Table { .. } => None,
        });
        let writes: Vec<_> = writes.collect();
        self.disk.crash(writes.into_iter(), &mut self.dice);
    }

    /// Another program may change data, and does not know of checksums.
    fn others(&mut self) {
        if !self.dice.happens(300) {
            return;
        }
        for _ in 0..4 {
            let offset = self.block() as usize * BLOCK;
            self.disk.durable[offset] ^= 0x40;
        }
        if self.fault != Some(TableFault::BelievedAfterOthers) {
            self.mark = None;
        }
    }

    fn restart(&mut self) {
        self.waiting.clear();
        self.reads.clear();
        let start = match self.mark == Some(self.id) {
            true => TableStart::Believed,
            false => {
                self.id = id_of(&mut self.dice);
                let regions = self.dice.index(1 << REGIONS) as u8;
                TableStart::Anew(vec![regions])
            }
        };
        self.table = ChecksumTable::new(self.layout, self.id, start, self.disk.has_cache);
        self.table.fault = self.fault;
        // Whether the store says so before the next power failure.
        if self.dice.happens(700) {
            self.mark_when_started();
        }
    }

    /// The store's mark is written after the header.
    fn mark_when_started(&mut self) {
        for _ in 0..1000 {
            if self.table.is_started {
                self.mark = Some(self.id).filter(|_| !self.table.has_failed);
                return;
            }
            // Nothing was asked for: no read can be wrong.
            _ = self.pump();
            self.complete();
        }
    }
}

fn seeds(otherwise: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("CHECKSUM_FIRST_SEED").unwrap_or(0);
    first..first + number("CHECKSUM_SEEDS").unwrap_or(otherwise)
}

#[test]
fn no_read_is_said_to_be_wrong_that_is_right() {
    let mut found = 0;
    for seed in seeds(1500) {
        for failing in [0, 30] {
            found += run_seed(seed, None, failing)
                .unwrap_or_else(|problem| panic!("seed {seed} with {failing} failures in 1000: {problem}"));
        }
    }
    assert!(found > 100, "damage was found {found} times");
}

#[test]
fn each_planted_fault_is_found() {
    let all = [
        TableFault::BitAfterWrite,
        TableFault::ClearedBeforeDurable,
        TableFault::ClosedDuringWrites,
        TableFault::BelievedAfterOthers,
    ];
    for fault in all {
        let found = (0..20_000).find(|seed| run_seed(*seed, Some(fault), 0).is_err());
        println!("{fault:?} was found by seed {found:?}");
        assert!(found.is_some(), "{fault:?} was not found");
    }
}

#[test]
fn what_a_run_leaves_dirty_is_computed_by_the_next_one() {
    let layout = ChecksumLayout { data_start: 4096, data_bytes: 2 << 20 };
    let mut disk = Disk { durable: vec![7; layout.end() as usize], unit: SECTOR, ..Disk::default() };
    let run = |disk: &mut Disk, table: &mut ChecksumTable| {
        while let Some(TableIo { id, action }) = table.next_io() {
            let result = match action {
                TableAction::Read { offset, bytes } => Some(disk.read(offset, bytes)),
                TableAction::Write { offset, data } => {
                    disk.write(offset, data);
                    None
                }
                TableAction::Flush => unreachable!("the device has no cache"),
            };
            table.complete(id, Ok(result));
        }
    };
    let mut table = ChecksumTable::new(layout, [1; 16], TableStart::Anew(vec![0b10]), false);
    run(&mut disk, &mut table);
    assert!(!table.is_recovering() && table.is_settled());
    assert_eq!(table.dirty_regions(), 0);
    // Another run believes it: of the second region, as it was asked for.
    let mut table = ChecksumTable::new(layout, [1; 16], TableStart::Believed, false);
    table.want(1, 0..2, false);
    run(&mut disk, &mut table);
    let holds = table.next_granted().unwrap().result.ok().unwrap();
    let sum = codec::crc32c(&[7; BLOCK]);
    assert_eq!(holds[0].region().verify(1, || sum), Verdict::Unknown);
    assert_eq!(holds[1].region().verify(1, || sum), Verdict::Match);
    assert!(matches!(holds[1].region().verify(1, || sum + 1), Verdict::Mismatch(_)));
}
