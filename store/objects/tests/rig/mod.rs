//! A disk that crashes, an executor of plans, and a workload with its oracle.

mod disk;

use std::collections::BTreeMap;

use disk::Disk;
use objects::{
    BlockBase, Checkpoint, MetadataWrite, ObjectsError, Partition, PartitionLoader, PieceSource, ReadSource,
    WritePiece, entries_to_redo,
};
use random::WyRand;
use wire_store::{
    BLOCK_BYTES, DecodeError, EntryHeader, OBJECT_BYTES, ObjectId, Operation, SECTOR_BYTES, Superblock,
    crc32c,
};

/// What the executor does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Metadata is written before new blocks are durable.
    NoDataFlush,
    /// Entries are freed before the metadata is flushed.
    LogFreedEarly,
    /// The checksum of a changed block is not updated.
    NoChecksum,
    /// What an operation gives up is free at once, not after the next checkpoint.
    FreedAtOnce,
}

type Entry = (EntryHeader, Vec<u8>);

/// The written blocks of each object, with its version.
#[derive(Clone, Default)]
struct Oracle(BTreeMap<ObjectId, (u64, BTreeMap<usize, Vec<u8>>)>);

impl Oracle {
    fn apply(&mut self, (entry, data): &Entry) {
        if entry.operation == Operation::Remove {
            self.0.remove(&entry.object);
            return;
        }
        if entry.operation == Operation::WriteZeroes && !self.0.contains_key(&entry.object) {
            return;
        }
        let (version, blocks) = self.0.entry(entry.object).or_default();
        *version = entry.version;
        if entry.operation == Operation::Preallocate {
            return;
        }
        for index in 0..entry.length as usize {
            let at = entry.offset as usize + index;
            let block = blocks.entry(at / BLOCK_BYTES).or_insert_with(|| vec![0; BLOCK_BYTES]);
            block[at % BLOCK_BYTES] = data.get(index).copied().unwrap_or(0);
        }
    }

    /// Compares everything with what a partition says.
    fn compare(&self, partition: &mut Partition, disk: &Disk) -> Result<(), String> {
        let versions = partition.objects().map(|onode| (onode.id, onode.version));
        if !versions.eq(self.0.iter().map(|(id, (version, _))| (*id, *version))) {
            return Err("objects or versions differ".into());
        }
        for (id, (_, blocks)) in &self.0 {
            let mut pieces = Vec::new();
            partition.plan_read(*id, 0, OBJECT_BYTES as u32, &mut pieces).unwrap();
            let mut at = 0;
            for piece in &pieces {
                let length = piece.length as usize;
                let found = match &piece.source {
                    ReadSource::Zeroes => None,
                    ReadSource::Inline(bytes) => Some(bytes.clone()),
                    ReadSource::Stored { block, .. } => Some(read_verified(partition, disk, *block, length)?),
                };
                let mut from = at;
                while from < at + length {
                    let to = (from / BLOCK_BYTES + 1) * BLOCK_BYTES;
                    let to = to.min(at + length);
                    let within = from % BLOCK_BYTES;
                    let zeroes = [0; BLOCK_BYTES];
                    let expected = blocks.get(&(from / BLOCK_BYTES)).map_or(&zeroes[..], |block| block);
                    let found =
                        found.as_ref().map_or(&zeroes[..to - from], |found| &found[from - at..to - at]);
                    if found != &expected[within..within + to - from] {
                        return Err(format!("{id:?} differs in block {}", from / BLOCK_BYTES));
                    }
                    from = to;
                }
                at += length;
            }
            if at != OBJECT_BYTES {
                return Err(format!("{id:?}: a read is planned for {at} bytes"));
            }
        }
        Ok(())
    }
}

fn read_verified(
    partition: &mut Partition,
    disk: &Disk,
    block: u64,
    length: usize,
) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    for block in block..block + length.div_ceil(BLOCK_BYTES) as u64 {
        let stored = disk.read(block);
        if crc32c(stored) != checksum(partition, disk, block) {
            return Err(format!("block {block} has a wrong checksum"));
        }
        bytes.extend_from_slice(stored);
    }
    Ok(bytes)
}

/// The checksum of a block, with its block of the table read if that is not cached.
fn checksum(partition: &mut Partition, disk: &Disk, block: u64) -> u32 {
    let checksums = partition.checksums_mut();
    if checksums.get(block).is_none() {
        let table_block = checksums.table_block(block);
        checksums.take_stored(table_block, disk.read(table_block));
    }
    checksums.get(block).unwrap()
}

/// A store with its disk and log, which counts the images that were checked.
struct Node {
    disk: Disk,
    partition: Partition,
    log: Vec<Entry>,
    oracle: Oracle,
    fault: Fault,
    random: WyRand,
    images: u64,
    /// Metadata that the next checkpoint writes too; for [`Fault::FreedAtOnce`].
    deferred: Option<Checkpoint>,
    in_checkpoint: bool,
    /// Images are checked after every write and flush.
    crashes: bool,
    /// Writes and flushes until the power fails.
    power: u64,
}

const POWER_FAILED: &str = "the power failed";

fn superblock(extents: u64) -> Superblock {
    let partition_blocks = 1 + 2 + 1 + extents * 16;
    Superblock {
        cluster: [1; 16],
        node: [2; 16],
        device: [3; 16],
        device_blocks: partition_blocks + 2,
        partition_blocks,
        partitions: 1,
        onodes_per_partition: 16,
        logs: 0,
        log_blocks: 0,
        checkpoint_blocks: 0,
        log_device: None,
    }
}

fn format(superblock: &Superblock) -> Disk {
    let mut disk = Disk::new(superblock.device_blocks);
    for location in [0, superblock.device_blocks - 1] {
        disk.write_part(location, &superblock.encode(location));
    }
    for partition in 0..superblock.partitions {
        let header = PartitionLoader::new(superblock.clone(), partition).unwrap().header();
        disk.write(header.block, &header.bytes[..]);
    }
    disk.flush();
    disk
}

fn load(disk: &Disk) -> Result<Partition, ObjectsError> {
    let invalid = |source: DecodeError| ObjectsError::Invalid { block: 0, source };
    let superblock = Superblock::decode(&disk.read(0)[..SECTOR_BYTES], 0).map_err(invalid)?;
    let mut loader = PartitionLoader::new(superblock, 0)?;
    for block in loader.start()..loader.start() + loader.blocks() {
        loader.push(disk.read(block))?;
    }
    // The table of the larger disks has two blocks.
    loader.finish(1)
}

impl Node {
    fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), String> {
        self.use_power()?;
        self.disk.write(block, bytes);
        self.maybe_crash()
    }

    fn flush(&mut self) -> Result<(), String> {
        self.use_power()?;
        self.disk.flush();
        self.maybe_crash()
    }

    fn use_power(&mut self) -> Result<(), String> {
        self.power = self.power.checked_sub(1).ok_or(POWER_FAILED)?;
        Ok(())
    }

    fn execute(&mut self, pieces: &[WritePiece], data: &[u8], again: bool) -> Result<(), String> {
        for piece in pieces {
            let mut bytes = match &piece.base {
                BlockBase::Whole => vec![0; piece.blocks as usize * BLOCK_BYTES],
                BlockBase::Zeroes => vec![0; BLOCK_BYTES],
                BlockBase::Stored if again => self.disk.read(piece.block).to_vec(),
                BlockBase::Stored => {
                    read_verified(&mut self.partition, &self.disk, piece.block, BLOCK_BYTES)?
                }
                BlockBase::Inline(inline) => {
                    let mut bytes = inline.clone();
                    bytes.resize(BLOCK_BYTES, 0);
                    bytes
                }
            };
            let (skip, length) = (piece.skip as usize, piece.length as usize);
            match piece.source {
                PieceSource::Data(from) => {
                    bytes[skip..skip + length].copy_from_slice(&data[from as usize..from as usize + length]);
                }
                PieceSource::Zeroes => bytes[skip..skip + length].fill(0),
            }
            for (block, bytes) in (piece.block..).zip(bytes.chunks(BLOCK_BYTES)) {
                if self.fault != Fault::NoChecksum || checksum(&mut self.partition, &self.disk, block) == 0 {
                    self.partition.checksums_mut().set(block, crc32c(bytes));
                }
            }
            self.write(piece.block, &bytes)?;
        }
        Ok(())
    }

    /// Logs and performs an operation, or neither if there is no space.
    fn perform(&mut self, entry: Entry) -> Result<(), String> {
        let mut pieces = Vec::new();
        match self.partition.apply(&entry.0, &entry.1, &mut pieces) {
            Ok(()) => {}
            Err(ObjectsError::Full) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
        self.oracle.apply(&entry);
        self.log.push(entry);
        let data = self.log.last().unwrap().1.clone();
        self.execute(&pieces, &data, false)?;
        if self.fault == Fault::FreedAtOnce && !self.in_checkpoint {
            let checkpoint = self.begin_checkpoint();
            // Only the onodes are late.
            for block in &checkpoint.checksum_blocks {
                let write = self.checkpoint_checksums(*block);
                self.disk.write(write.block, &write.bytes[..]);
            }
            self.deferred = Some(checkpoint);
            self.partition.finish_checkpoint();
        }
        Ok(())
    }

    /// What a checkpoint writes, with what was deferred.
    fn begin_checkpoint(&mut self) -> Checkpoint {
        let mut checkpoint = self.partition.begin_checkpoint();
        if let Some(deferred) = self.deferred.take() {
            checkpoint.flush_before_onodes |= deferred.flush_before_onodes;
            checkpoint.onodes = merged(deferred.onodes, checkpoint.onodes);
        }
        checkpoint
    }

    /// What a checkpoint writes to a block of the checksum table.
    fn checkpoint_checksums(&mut self, block: u64) -> MetadataWrite {
        let checksums = self.partition.checksums_mut();
        let cached = checksums.checkpoint_write(block, None);
        cached.or_else(|| checksums.checkpoint_write(block, Some(self.disk.read(block)))).unwrap()
    }

    /// A checkpoint, with operations while it is in progress.
    fn checkpoint(&mut self, meanwhile: Vec<Entry>) -> Result<(), String> {
        self.in_checkpoint = true;
        let result = self.write_checkpoint(meanwhile);
        self.in_checkpoint = false;
        result
    }

    fn write_checkpoint(&mut self, mut meanwhile: Vec<Entry>) -> Result<(), String> {
        let durable = self.log.len();
        let checkpoint = self.begin_checkpoint();
        for block in &checkpoint.checksum_blocks {
            let write = self.checkpoint_checksums(*block);
            self.write(write.block, &write.bytes[..])?;
        }
        if checkpoint.flush_before_onodes && self.fault != Fault::NoDataFlush {
            self.flush()?;
        }
        for write in &checkpoint.onodes {
            self.write(write.block, &write.bytes[..])?;
            if let Some(entry) = meanwhile.pop() {
                self.perform(entry)?;
            }
        }
        // The device reports that the flush failed: the log keeps its entries, and the next checkpoint
        // repeats this one. The deferred metadata of the planted fault would be lost: then it always
        // succeeds.
        if self.crashes && self.fault != Fault::FreedAtOnce && self.random.happens(200) {
            self.partition.abort_checkpoint();
            return self.maybe_crash();
        }
        if self.fault == Fault::LogFreedEarly {
            self.log.drain(..durable);
            self.maybe_crash()?;
            self.flush()?;
        } else {
            self.flush()?;
            self.log.drain(..durable);
        }
        self.partition.finish_checkpoint();
        self.maybe_crash()
    }

    /// Fails the power of a copy of the disk, and checks what the log makes of it.
    fn maybe_crash(&mut self) -> Result<(), String> {
        if !self.crashes {
            return Ok(());
        }
        self.images += 1;
        let mut disk = self.disk.image(&mut self.random);
        // Every few images, the power fails again while the entries are applied, or in the checkpoint after
        // them.
        if self.random.happens(250) {
            let mut node = self.recover(disk)?;
            node.power = self.random.below(40);
            let end = node.apply_log().and_then(|()| node.checkpoint(Vec::new()));
            end.or_else(|error| if error == POWER_FAILED { Ok(()) } else { Err(error) })?;
            disk = node.disk.image(&mut self.random);
        }
        let mut node = self.recover(disk)?;
        node.apply_log()?;
        node.oracle.compare(&mut node.partition, &node.disk)?;
        node.checkpoint(Vec::new())?;
        let mut partition = load(&node.disk).map_err(|error| error.to_string())?;
        node.oracle
            .compare(&mut partition, &node.disk)
            .map_err(|error| format!("after a checkpoint: {error}"))?;
        if partition.space_use() != node.partition.space_use() {
            return Err(format!("{:?} became {:?}", node.partition.space_use(), partition.space_use()));
        }
        Ok(())
    }

    fn recover(&mut self, disk: Disk) -> Result<Node, String> {
        let partition = load(&disk).map_err(|error| error.to_string())?;
        let (log, oracle, random) = (self.log.clone(), self.oracle.clone(), self.random.split());
        Ok(Node {
            disk,
            partition,
            log,
            oracle,
            fault: Fault::None,
            random,
            images: 0,
            deferred: None,
            in_checkpoint: false,
            crashes: false,
            power: u64::MAX,
        })
    }

    fn apply_log(&mut self) -> Result<(), String> {
        for (entry, data) in entries_to_redo(&self.log.clone()) {
            let mut pieces = Vec::new();
            let applied = self.partition.apply(entry, data, &mut pieces);
            applied.map_err(|error| format!("REDO of {}: {error}", entry.sequence))?;
            self.execute(&pieces, data, true)?;
        }
        Ok(())
    }
}

/// Blocks of metadata, the newest of each.
fn merged(older: Vec<MetadataWrite>, newer: Vec<MetadataWrite>) -> Vec<MetadataWrite> {
    let by_block = older.into_iter().chain(newer).map(|write| (write.block, write));
    by_block.collect::<BTreeMap<_, _>>().into_values().collect()
}

fn random_entry(random: &mut WyRand, sequence: u64) -> Entry {
    let index = random.below(5) as u32;
    let object = ObjectId { group: index % 2, volume: 7, index, suffix: 0 };
    let operation = match random.below(20) {
        0..14 => Operation::Write,
        14..17 => Operation::WriteZeroes,
        17 => Operation::Preallocate,
        _ => Operation::Remove,
    };
    let (offset, length) = match random.below(4) {
        // Whole blocks in a few extents, and at the end of the object.
        0 => (random.below(40) * 4096, (1 + random.below(20)) * 4096),
        1 => (OBJECT_BYTES as u64 - 8192, 8192),
        // Anything, and little at the start, which may be inline.
        2 => (random.below(40 * 4096), 1 + random.below(10_000)),
        _ => (random.below(300), 1 + random.below(80)),
    };
    let ranged = match operation {
        Operation::Write | Operation::WriteZeroes => true,
        Operation::Preallocate => random.below(2) == 0,
        Operation::Remove => false,
    };
    let length = if ranged { length as u32 } else { 0 };
    let data: Vec<u8> = if operation == Operation::Write {
        (0..length).map(|_| random.below(256) as u8).collect()
    } else {
        Vec::new()
    };
    let entry = EntryHeader {
        operation,
        object,
        version: sequence,
        sequence,
        epoch: 1,
        offset: if ranged { offset as u32 } else { 0 },
        length,
        commit_point: sequence,
        client: 1,
        client_number: sequence,
        mtime_ns: sequence,
        data_crc32c: crc32c(&data),
        previous_crc32c: 0,
        withheld: false,
        in_place: false,
    };
    (entry, data)
}

/// Runs a workload with a crash after every write and flush; returns the number of images.
pub(crate) fn run_seed(seed: u64, fault: Fault) -> Result<u64, String> {
    let mut random = WyRand::new(seed);
    // Few extents, so that they are soon used again, or enough for a preallocated object.
    let extents = if seed % 8 == 3 { 80 } else { 14 };
    let disk = format(&superblock(extents));
    let partition = load(&disk).map_err(|error| error.to_string())?;
    let (log, oracle, images) = (Vec::new(), Oracle::default(), 0);
    let mut node = Node {
        disk,
        partition,
        log,
        oracle,
        fault,
        random: random.split(),
        images,
        deferred: None,
        in_checkpoint: false,
        crashes: true,
        power: u64::MAX,
    };
    let mut sequence = 0;
    let mut next = |random: &mut WyRand| {
        sequence += 1;
        random_entry(random, sequence)
    };
    for _ in 0..40 {
        if random.happens(200) {
            let meanwhile = (0..random.below(3)).map(|_| next(&mut random)).rev().collect();
            node.checkpoint(meanwhile)?;
        }
        let entry = next(&mut random);
        node.perform(entry)?;
    }
    Ok(node.images)
}
