//! The storage of a replica: a log and objects, of which a crash leaves what was durable and some of the rest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use random::WyRand;
use replica::{
    CopiedPart, EntryId, ObjectPart, PlantedReplicaFault, RecoveredReplica, ReplicaCheckpoint, ReplicaEvent,
    ReplicatedEntry, SessionChange,
};
use wire_store::{EntryHeader, ObjectId, crc32c};

use super::clients::VALUE_BYTES;
use super::log_medium::LogMedium;
use super::placed::PlacedBlocks;

/// Contents of blocks, by object and offset. A block that was never written is not there.
pub(crate) type Blocks = BTreeMap<BlockKey, u64>;
pub(super) type BlockKey = (ObjectId, u32);

/// What is written, in this order; a crash leaves the first few of those that are not complete.
enum LogWrite {
    Append {
        append: u64,
        entry: Arc<ReplicatedEntry>,
        in_place: bool,
    },
    Truncate {
        truncation: u64,
        from: u64,
        unsettled: Vec<Arc<ReplicatedEntry>>,
    },
    Free {
        through: EntryId,
    },
    Checkpoint {
        checkpoint: u64,
        record: Box<ReplicaCheckpoint>,
        blocks: Blocks,
        /// Writes in place up to this count are in `blocks`, or what replaced them.
        placings: u64,
        unsettled: Vec<Arc<ReplicatedEntry>>,
    },
    Reset {
        session: u64,
        record: Box<ReplicaCheckpoint>,
    },
}

/// A log with its objects.
pub(crate) struct ReplicaDisk {
    durable: DurableState,
    writes: VecDeque<LogWrite>,
    /// Appends whose header is durable, while their data is written in place, in any order; each with its count.
    placing: Vec<(u64, Arc<ReplicatedEntry>, u64)>,
    /// Writes in place that were begun.
    placings: u64,
    /// Appends that are not complete, in their order.
    appends: VecDeque<PendingAppend>,
    /// Blocks as of what was applied or written in place. Those written since the newest checkpoint may be durable or not.
    blocks: Blocks,
    placed: PlacedBlocks,
    /// Entries up to here were applied since the start.
    applied: u64,
    /// Blocks that cannot be read until they are written again.
    damaged: BTreeSet<BlockKey>,
    /// Reads that wait until an entry is committed.
    pub(super) waiting_reads: Vec<WaitingRead>,
    fault: Option<PlantedReplicaFault>,
    /// Starts of the node with this disk, as the disk knows them.
    pub(crate) incarnation: u64,
}

/// A copy of a disk at some time: what a crash would have left then.
pub(crate) struct DiskSnapshot {
    durable: DurableState,
    pub(crate) incarnation: u64,
}

/// What waits until no uncommitted entry has changed a block in place.
#[derive(Clone, Copy)]
pub(super) enum WaitingRead {
    Block { read: u64, key: BlockKey, through: u64 },
    Object { read: u64, after: Option<ObjectPart> },
}

struct PendingAppend {
    append: u64,
    sequence: u64,
    is_done: bool,
}

#[derive(Clone)]
struct DurableState {
    log: LogMedium,
    checkpoint: ReplicaCheckpoint,
    blocks: Blocks,
    /// When a block was last written in place, by the count of such writes.
    placed: BTreeMap<BlockKey, u64>,
    /// Entries up to here are durable.
    through: u64,
    unsettled: Vec<Arc<ReplicatedEntry>>,
}

impl DurableState {
    fn carry_out(&mut self, write: LogWrite) -> Option<ReplicaEvent> {
        match write {
            LogWrite::Append { append, entry, in_place } => {
                self.log.append(&entry, in_place, self.through);
                Some(ReplicaEvent::Appended { append })
            }
            LogWrite::Truncate { truncation, from, unsettled } => {
                let in_place = unsettled.iter().map(|entry| entry.header.sequence).collect();
                self.unsettled.extend(unsettled);
                self.log.truncate(from);
                self.through = self.through.min(from - 1);
                Some(ReplicaEvent::Truncated { truncation, in_place })
            }
            LogWrite::Free { through } => {
                self.log.free(through);
                None
            }
            LogWrite::Checkpoint { checkpoint, record, blocks, placings, unsettled } => {
                self.checkpoint = *record;
                // Sequences do not tell: a log that was truncated has them again.
                self.placed.retain(|_, count| *count > placings);
                // What was written in place since is newer.
                let placed = self.placed.keys().filter_map(|key| Some((*key, *self.blocks.get(key)?)));
                let placed: Vec<_> = placed.collect();
                self.blocks = blocks;
                self.blocks.extend(placed);
                self.unsettled = unsettled;
                Some(ReplicaEvent::Checkpointed { checkpoint })
            }
            LogWrite::Reset { session, record } => {
                self.log.reset(record.through);
                self.through = record.through.sequence;
                self.checkpoint = *record;
                self.blocks.clear();
                self.placed.clear();
                self.unsettled.clear();
                Some(ReplicaEvent::ResetDone { session })
            }
        }
    }
}

/// The value in the data of a write.
pub(crate) fn value_of(data: &[u8]) -> u64 {
    u64::from_le_bytes(data.try_into().expect("data of a write is a value"))
}

pub(super) fn key_of(header: &EntryHeader) -> BlockKey {
    (header.object, header.offset)
}

impl ReplicaDisk {
    /// An empty disk. With `in_place`, blocks are overwritten before their entries are committed.
    pub(crate) fn new(in_place: bool, fault: Option<PlantedReplicaFault>) -> ReplicaDisk {
        let RecoveredReplica { checkpoint, .. } = RecoveredReplica::default();
        let durable = DurableState {
            log: LogMedium::new(),
            checkpoint,
            blocks: Blocks::new(),
            placed: BTreeMap::new(),
            through: 0,
            unsettled: Vec::new(),
        };
        ReplicaDisk {
            durable,
            writes: VecDeque::new(),
            placing: Vec::new(),
            placings: 0,
            appends: VecDeque::new(),
            blocks: Blocks::new(),
            placed: PlacedBlocks::new(in_place),
            applied: 0,
            damaged: BTreeSet::new(),
            waiting_reads: Vec::new(),
            fault,
            incarnation: 0,
        }
    }

    pub(crate) fn snapshot(&self) -> DiskSnapshot {
        DiskSnapshot { durable: self.durable.clone(), incarnation: self.incarnation }
    }

    /// The disk of a stopped node is what it was before.
    pub(crate) fn roll_back(&mut self, snapshot: &DiskSnapshot) {
        *self = ReplicaDisk {
            durable: snapshot.durable.clone(),
            blocks: snapshot.durable.blocks.clone(),
            incarnation: snapshot.incarnation,
            ..ReplicaDisk::new(self.placed.is_enabled(), self.fault)
        };
        self.placed.is_complete = self.durable.checkpoint.complete;
    }

    /// Flips a bit of the last entry in the log of a stopped node, if that is not in place for certain.
    pub(crate) fn damage_log(&mut self, random: &mut WyRand) -> bool {
        if self.writes.iter().any(|write| matches!(write, LogWrite::Reset { .. })) {
            return false;
        }
        // The crash lost all that was not complete: nothing is appended after the damage.
        self.writes.clear();
        self.placing.clear();
        self.appends.clear();
        let through = self.durable.checkpoint.through.sequence;
        self.durable.log.damage_last(through, random)
    }

    /// Whether blocks are overwritten in place, with only the headers of entries in the log.
    pub(crate) fn is_overwritten(&self) -> bool {
        self.placed.is_enabled()
    }

    /// Everything is lost: a new disk.
    pub(crate) fn replace(&mut self) {
        let incarnation = self.incarnation;
        *self = ReplicaDisk { incarnation, ..ReplicaDisk::new(self.placed.is_enabled(), self.fault) };
        self.durable.checkpoint.complete = false;
        self.placed.is_complete = false;
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.durable.checkpoint.complete
    }

    /// Whether it has what was committed in a block: it can be read, and no lost entry was written over it.
    pub(crate) fn has(&self, block: &BlockKey) -> bool {
        self.is_complete() && !self.damaged.contains(block) && !self.placed.is_unsettled(block)
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Writes that are not complete.
    pub(crate) fn has_writes(&self) -> bool {
        !self.writes.is_empty() || !self.placing.is_empty()
    }

    /// A write is complete: of those in place any, of the others the oldest.
    pub(crate) fn complete_write(&mut self, random: &mut WyRand) -> Option<ReplicaEvent> {
        let is_append = matches!(self.writes.front(), Some(LogWrite::Append { .. }));
        if !self.placing.is_empty() && (!is_append || random.happens(500)) {
            let (append, entry, count) = self.placing.swap_remove(random.index(self.placing.len()));
            let key = key_of(&entry.header);
            self.durable.blocks.insert(key, value_of(&entry.data));
            self.durable.placed.insert(key, count);
            return self.appended(append);
        }
        let write = self.writes.pop_front().expect("there is a write");
        match &write {
            LogWrite::Append { append, entry, in_place } => {
                let (append, in_place) = (*append, *in_place);
                if in_place {
                    self.blocks.insert(key_of(&entry.header), value_of(&entry.data));
                    self.damaged.remove(&key_of(&entry.header));
                    self.placings += 1;
                    self.placing.push((append, entry.clone(), self.placings));
                }
                self.durable.carry_out(write);
                return if in_place { None } else { self.appended(append) };
            }
            LogWrite::Truncate { from, .. } => self.placed.truncate(*from),
            LogWrite::Checkpoint { record, .. } => {
                self.placed.is_complete = record.complete;
                self.placed.checkpointed(record.through.sequence);
            }
            LogWrite::Reset { .. } | LogWrite::Free { .. } => {}
        }
        self.durable.carry_out(write)
    }

    /// An append is complete; those up to the first that is not are durable.
    fn appended(&mut self, append: u64) -> Option<ReplicaEvent> {
        let mut pending = self.appends.iter_mut();
        pending.find(|pending| pending.append == append).expect("it is pending").is_done = true;
        let mut newest = None;
        while let Some(PendingAppend { append, sequence, .. }) = self.appends.pop_front_if(|it| it.is_done) {
            newest = Some(append);
            self.durable.through = sequence;
        }
        newest.map(|append| ReplicaEvent::Appended { append })
    }

    pub(crate) fn append(&mut self, append: u64, entry: Arc<ReplicatedEntry>) {
        let key = key_of(&entry.header);
        // Recovery would take it for what the record lists.
        let is_listed = self.durable.unsettled.iter().any(|other| key_of(&other.header) == key);
        let in_place = self.placed.append(&entry, self.blocks.contains_key(&key) && !is_listed);
        let sequence = entry.header.sequence;
        self.appends.push_back(PendingAppend { append, sequence, is_done: false });
        self.writes.push_back(LogWrite::Append { append, entry, in_place });
    }

    pub(crate) fn truncate(&mut self, truncation: u64, from: u64) {
        let unsettled = self.placed.begin_truncate(from);
        self.writes.push_back(LogWrite::Truncate { truncation, from, unsettled });
    }

    pub(crate) fn free(&mut self, through: EntryId) {
        self.writes.push_back(LogWrite::Free { through });
    }

    pub(crate) fn checkpoint(&mut self, checkpoint: u64, record: Box<ReplicaCheckpoint>) {
        let (blocks, unsettled) = (self.blocks.clone(), self.placed.unsettled.clone());
        let placings = self.placings;
        self.writes.push_back(LogWrite::Checkpoint { checkpoint, record, blocks, placings, unsettled });
    }

    pub(crate) fn reset(&mut self, session: u64, record: Box<ReplicaCheckpoint>) {
        self.blocks.clear();
        self.damaged.clear();
        self.waiting_reads.clear();
        self.placed.clear();
        self.writes.push_back(LogWrite::Reset { session, record });
    }

    pub(crate) fn apply(&mut self, entry: &ReplicatedEntry) {
        let key = key_of(&entry.header);
        self.applied = self.applied.max(entry.header.sequence);
        let redoes_over = self.fault == Some(PlantedReplicaFault::RedoOverPlaced);
        if let Some(in_place) = self.placed.apply(&entry.header)
            && !(redoes_over && in_place > entry.header.sequence)
        {
            return;
        }
        if SessionChange::of(&entry.header).is_some() {
            // It changes no block.
            return;
        }
        self.blocks.insert(key, value_of(&entry.data));
        self.damaged.remove(&key);
    }

    /// Entries up to a sequence are never given up.
    pub(crate) fn stable(&mut self, through: u64) {
        self.placed.stable = through;
    }

    /// A block gets what the primary has there.
    pub(crate) fn settle(&mut self, object: ObjectId, offset: u32, data: &[u8]) {
        let key = (object, offset);
        // Others of the log's lost entries were not in place.
        if self.placed.settle(key) {
            self.blocks.insert(key, value_of(data));
            self.damaged.remove(&key);
        }
    }

    pub(crate) fn write_part(&mut self, part: ObjectPart, content: &[u8]) {
        let key = (part.object, part.number * VALUE_BYTES);
        self.blocks.insert(key, value_of(content));
        self.damaged.remove(&key);
    }

    /// The first part of an object after another one: a block.
    fn part_after(&self, after: Option<ObjectPart>) -> Option<CopiedPart> {
        let after = after.map(|part| (part.object, part.number * VALUE_BYTES));
        let mut blocks = self.blocks.iter().skip_while(|(key, _)| after.is_some_and(|after| **key <= after));
        let ((object, offset), value) = blocks.next()?;
        let is_last = blocks.next().is_none_or(|((next, _), _)| next != object);
        let part = ObjectPart { object: *object, number: offset / VALUE_BYTES };
        Some(CopiedPart { part, is_last, content: value.to_le_bytes().into() })
    }

    /// The results of reads that wait for nothing.
    pub(crate) fn take_reads(&mut self) -> Vec<ReplicaEvent> {
        let mut done = Vec::new();
        let early = self.fault == Some(PlantedReplicaFault::PlacedReadEarly);
        for waiting in std::mem::take(&mut self.waiting_reads) {
            match waiting {
                WaitingRead::Block { read, key, through } if early || !self.placed.is_uncertain(key) => {
                    let value = self.read(key.0, key.1, through);
                    let data = (!self.damaged.contains(&key)).then(|| value.to_le_bytes().into());
                    done.push(ReplicaEvent::ReadDone { read, data });
                }
                WaitingRead::Object { read, after } => {
                    let part = self.part_after(after);
                    let is_waiting =
                        |part: ObjectPart| self.placed.is_uncertain((part.object, part.number * VALUE_BYTES));
                    if part.as_ref().is_some_and(|copied| is_waiting(copied.part)) {
                        self.waiting_reads.push(waiting);
                    } else {
                        done.push(ReplicaEvent::ObjectRead { read, part });
                    }
                }
                WaitingRead::Block { .. } => self.waiting_reads.push(waiting),
            }
        }
        done
    }

    /// Damages a block, unless the log has the header only of what it has: a crash would lose that then.
    pub(crate) fn damage(&mut self, block: BlockKey) {
        if !self.placed.is_listed(block) {
            self.damaged.insert(block);
        }
    }

    /// A block as of the entries up to a sequence, which are applied.
    fn read(&mut self, object: ObjectId, offset: u32, through: u64) -> u64 {
        let applied = self.blocks.get(&(object, offset)).copied().unwrap_or(0);
        if self.fault == Some(PlantedReplicaFault::DirtyRead) {
            self.newest_logged(object, offset, through).unwrap_or(applied)
        } else {
            applied
        }
    }

    /// The planted error: what the log has of a block, committed or not.
    fn newest_logged(&mut self, object: ObjectId, offset: u32, through: u64) -> Option<u64> {
        let written = self.writes.iter().filter_map(|write| match write {
            LogWrite::Append { entry, .. } => Some(entry.clone()),
            _ => None,
        });
        let (_, logged) = self.durable.log.recover();
        let mut newest = logged.into_iter().chain(written).filter(|entry| {
            let header = &entry.header;
            header.object == object
                && header.offset == offset
                && header.sequence <= through
                && !header.withheld
                && !header.in_place
        });
        newest.next_back().map(|entry| value_of(&entry.data))
    }

    /// What a start finds after a crash: the first few of the writes that were not complete, maybe half of the next, any of
    /// the writes in place whose headers are durable, and any of the blocks that were applied since the checkpoint.
    pub(crate) fn crash(&mut self, random: &mut WyRand) -> RecoveredReplica {
        let count = random.index(self.writes.len() + 1);
        let mut applied = std::mem::take(&mut self.blocks);
        let mut is_reset = false;
        for _ in 0..count {
            let write = self.writes.pop_front().expect("it was counted");
            is_reset |= matches!(write, LogWrite::Reset { .. });
            // Others come after what is written in place.
            if !matches!(write, LogWrite::Append { .. }) {
                for (_, entry, _) in self.placing.drain(..) {
                    self.durable.blocks.insert(key_of(&entry.header), value_of(&entry.data));
                }
            }
            if let LogWrite::Append { append, entry, in_place: true } = &write {
                applied.insert(key_of(&entry.header), value_of(&entry.data));
                self.placings += 1;
                self.placing.push((*append, entry.clone(), self.placings));
            }
            self.durable.carry_out(write);
        }
        let torn = match self.writes.pop_front() {
            Some(LogWrite::Append { entry, in_place, .. }) if random.happens(500) => Some((entry, in_place)),
            _ => None,
        };
        is_reset |= self.writes.iter().any(|write| matches!(write, LogWrite::Reset { .. }));
        match torn {
            Some((entry, _)) if self.fault == Some(PlantedReplicaFault::TornTail) => {
                // A log without checksums takes what it finds, and sends it on as good.
                let data: Arc<[u8]> = (!0u64).to_le_bytes().into();
                let header = EntryHeader { data_crc32c: crc32c(&data), ..entry.header.clone() };
                self.durable.log.append(&ReplicatedEntry { header, data }, false, 0);
            }
            Some((entry, in_place)) => self.durable.log.append_torn(&entry, in_place, random),
            None => {}
        }
        self.writes.clear();
        self.placing.clear();
        self.appends.clear();
        self.waiting_reads.clear();
        self.durable.placed.clear();
        let (base, entries) = self.durable.log.recover();
        let through = self.durable.checkpoint.through.sequence;
        let evidence = |of: &[Arc<ReplicatedEntry>]| {
            of.iter().map(|entry| entry.header.commit_point).max().unwrap_or(0).max(through)
        };
        // What other entries prove may be given up with them.
        let applied_entries = entries.iter().take_while(|entry| entry.header.sequence <= self.applied);
        let proven = evidence(&entries[..applied_entries.count()]);
        self.applied = 0;
        if !is_reset {
            for (key, value) in applied {
                let is_durable = self.durable.blocks.get(&key) == Some(&value);
                if !is_durable && self.placed.may_be_replaced(key, value, proven) && random.happens(500) {
                    self.durable.blocks.insert(key, value);
                }
            }
        }
        let is_checked = self.fault != Some(PlantedReplicaFault::PlacedUnchecked);
        self.placed.is_complete = self.durable.checkpoint.complete;
        let unsettled = std::mem::take(&mut self.durable.unsettled);
        let recovered = {
            let evidence = evidence(&entries);
            self.placed.recover(entries, unsettled, &self.durable.blocks, through, evidence, is_checked)
        };
        if let Some(from) = recovered.cut {
            self.durable.log.truncate(from);
        }
        self.durable.through = base.sequence + recovered.entries.len() as u64;
        self.durable.unsettled = self.placed.unsettled.clone();
        self.blocks = self.durable.blocks.clone();
        RecoveredReplica {
            checkpoint: self.durable.checkpoint.clone(),
            base,
            entries: recovered.entries,
            unsettled: self.placed.unsettled.clone(),
            is_damaged: false,
        }
    }
}
