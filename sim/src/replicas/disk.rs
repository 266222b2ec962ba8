//! The storage of a replica: a log and objects, of which a crash leaves what was durable and some of the rest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use random::WyRand;
use replica::{
    EntryId, PlantedReplicaFault, RecoveredReplica, ReplicaCheckpoint, ReplicaEvent, ReplicatedEntry,
};
use wire_store::{EntryHeader, ObjectId, crc32c};

use super::log_medium::LogMedium;

/// Contents of blocks, by object and offset. A block that was never written is not there.
pub(crate) type Blocks = BTreeMap<(ObjectId, u32), u64>;

/// What is written, in this order; a crash leaves the first few of those that are not complete.
enum LogWrite {
    Append { append: u64, entry: Arc<ReplicatedEntry> },
    Truncate { from: u64 },
    Free { through: EntryId },
    Checkpoint { checkpoint: u64, record: Box<ReplicaCheckpoint>, blocks: Blocks },
    Reset { session: u64, record: Box<ReplicaCheckpoint> },
}

/// A log with its objects.
pub(crate) struct ReplicaDisk {
    durable: DurableState,
    writes: VecDeque<LogWrite>,
    /// Blocks as of what was applied. Those written since the newest checkpoint may be durable or not.
    blocks: Blocks,
    /// Blocks that cannot be read until they are written again.
    damaged: BTreeSet<(ObjectId, u32)>,
    fault: Option<PlantedReplicaFault>,
}

struct DurableState {
    log: LogMedium,
    checkpoint: ReplicaCheckpoint,
    blocks: Blocks,
}

impl DurableState {
    fn carry_out(&mut self, write: LogWrite) -> Option<ReplicaEvent> {
        match write {
            LogWrite::Append { append, entry } => {
                self.log.append(&entry);
                Some(ReplicaEvent::Appended { append })
            }
            LogWrite::Truncate { from } => {
                self.log.truncate(from);
                None
            }
            LogWrite::Free { through } => {
                self.log.free(through);
                None
            }
            LogWrite::Checkpoint { checkpoint, record, blocks } => {
                self.checkpoint = *record;
                self.blocks = blocks;
                Some(ReplicaEvent::Checkpointed { checkpoint })
            }
            LogWrite::Reset { session, record } => {
                self.log.reset(record.through);
                self.checkpoint = *record;
                self.blocks.clear();
                Some(ReplicaEvent::ResetDone { session })
            }
        }
    }
}

/// The object of a copy as bytes: offsets and values.
pub(crate) fn encode_object(blocks: impl Iterator<Item = (u32, u64)>) -> Arc<[u8]> {
    blocks.flat_map(|(offset, value)| offset.to_le_bytes().into_iter().chain(value.to_le_bytes())).collect()
}

/// The value in the data of a write.
pub(crate) fn value_of(data: &[u8]) -> u64 {
    u64::from_le_bytes(data.try_into().expect("data of a write is a value"))
}

impl ReplicaDisk {
    pub(crate) fn new(fault: Option<PlantedReplicaFault>) -> ReplicaDisk {
        let RecoveredReplica { checkpoint, .. } = RecoveredReplica::default();
        let durable = DurableState { log: LogMedium::new(), checkpoint, blocks: Blocks::new() };
        ReplicaDisk {
            durable,
            writes: VecDeque::new(),
            blocks: Blocks::new(),
            damaged: BTreeSet::new(),
            fault,
        }
    }

    /// Everything is lost: a new disk.
    pub(crate) fn replace(&mut self) {
        *self = ReplicaDisk::new(self.fault);
        self.durable.checkpoint.complete = false;
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.durable.checkpoint.complete
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Writes that are not complete.
    pub(crate) fn has_writes(&self) -> bool {
        !self.writes.is_empty()
    }

    /// The oldest write is complete.
    pub(crate) fn complete_write(&mut self) -> Option<ReplicaEvent> {
        let write = self.writes.pop_front().expect("there is a write");
        self.durable.carry_out(write)
    }

    pub(crate) fn append(&mut self, append: u64, entry: Arc<ReplicatedEntry>) {
        self.writes.push_back(LogWrite::Append { append, entry });
    }

    pub(crate) fn truncate(&mut self, from: u64) {
        self.writes.push_back(LogWrite::Truncate { from });
    }

    pub(crate) fn free(&mut self, through: EntryId) {
        self.writes.push_back(LogWrite::Free { through });
    }

    pub(crate) fn checkpoint(&mut self, checkpoint: u64, record: Box<ReplicaCheckpoint>) {
        self.writes.push_back(LogWrite::Checkpoint { checkpoint, record, blocks: self.blocks.clone() });
    }

    pub(crate) fn reset(&mut self, session: u64, record: Box<ReplicaCheckpoint>) {
        self.blocks.clear();
        self.damaged.clear();
        self.writes.push_back(LogWrite::Reset { session, record });
    }

    pub(crate) fn apply(&mut self, entry: &ReplicatedEntry) {
        let block = (entry.header.object, entry.header.offset);
        self.blocks.insert(block, value_of(&entry.data));
        self.damaged.remove(&block);
    }

    pub(crate) fn write_object(&mut self, object: ObjectId, content: &[u8]) {
        self.blocks.retain(|(other, _), _| *other != object);
        self.damaged.retain(|(other, _)| *other != object);
        for pair in content.chunks(12) {
            let offset = u32::from_le_bytes(pair[..4].try_into().expect("4 bytes"));
            self.blocks.insert((object, offset), value_of(&pair[4..]));
        }
    }

    /// The first object after another, with its content.
    pub(crate) fn object_after(&self, after: Option<ObjectId>) -> Option<(ObjectId, Arc<[u8]>)> {
        let mut keys = self.blocks.keys().map(|(object, _)| *object);
        let object = keys.find(|object| after.is_none_or(|after| *object > after))?;
        let blocks = self.blocks.iter().filter(|((other, _), _)| *other == object);
        Some((object, encode_object(blocks.map(|((_, offset), value)| (*offset, *value)))))
    }

    pub(crate) fn damage(&mut self, block: (ObjectId, u32)) {
        self.damaged.insert(block);
    }

    /// Whether a block can be read.
    pub(crate) fn is_readable(&self, object: ObjectId, offset: u32) -> bool {
        !self.damaged.contains(&(object, offset))
    }

    /// A block as of the entries up to a sequence, which are applied.
    pub(crate) fn read(&mut self, object: ObjectId, offset: u32, through: u64) -> u64 {
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
        });
        newest.next_back().map(|entry| value_of(&entry.data))
    }

    /// What a start finds after a crash: the first few of the writes that were not complete, maybe half of the next, and
    /// any of the blocks that were written in place since the checkpoint.
    pub(crate) fn crash(&mut self, random: &mut WyRand) -> RecoveredReplica {
        let count = random.index(self.writes.len() + 1);
        let applied = std::mem::take(&mut self.blocks);
        let mut is_reset = false;
        for _ in 0..count {
            let write = self.writes.pop_front().expect("it was counted");
            is_reset |= matches!(write, LogWrite::Reset { .. });
            self.durable.carry_out(write);
        }
        let torn = match self.writes.pop_front() {
            Some(LogWrite::Append { entry, .. }) if random.happens(500) => Some(entry),
            _ => None,
        };
        is_reset |= self.writes.iter().any(|write| matches!(write, LogWrite::Reset { .. }));
        self.writes.clear();
        match torn {
            Some(entry) if self.fault == Some(PlantedReplicaFault::TornTail) => {
                // A log without checksums takes what it finds, and sends it on as good.
                let data: Arc<[u8]> = (!0u64).to_le_bytes().into();
                let header = EntryHeader { data_crc32c: crc32c(&data), ..entry.header.clone() };
                self.durable.log.append(&ReplicatedEntry { header, data });
            }
            Some(entry) => self.durable.log.append_torn(&entry, random),
            None => {}
        }
        if !is_reset {
            for (key, value) in applied {
                if self.durable.blocks.get(&key) != Some(&value) && random.happens(500) {
                    self.durable.blocks.insert(key, value);
                }
            }
        }
        self.blocks = self.durable.blocks.clone();
        let (base, entries) = self.durable.log.recover();
        RecoveredReplica { checkpoint: self.durable.checkpoint.clone(), base, entries }
    }
}
