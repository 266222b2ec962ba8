//! Opening the shard of a replica: its newest checkpoint record, and the entries of its log.

use std::collections::VecDeque;
use std::sync::Arc;

use cluster_map::PoolClass;
use reactor::Core;
use replica::{
    AppliedRequests, CopyPacer, EntryId, RecoveredReplica, Replica, ReplicaCheckpoint, ReplicaId,
    ReplicaSettings, ReplicatedEntry, VolumeTotals,
};
use wire_store::{BLOCK_BYTES, CheckpointRecord, EntryHeader, SECTOR_BYTES, Superblock, UnsettledBlock};

use super::background::reset_log;
use super::recovery::{RecoveredBlocks, recover_blocks};
use super::{CommittedEntry, Outbox, READS_MAX, RecordPlaces, Replication};
use crate::StoreError;
use crate::device::StoreDevice;
use crate::disks::StoreDescriptors;
use crate::format::CHECKPOINT_BLOCKS;
use crate::shard::copies::{self, ObjectReads};
use crate::shard::overlay::EntryData;
use crate::shard::scrub;
use crate::shard::scrub_state::Scrubs;
use crate::shard::{Shard, ShardHandle, load, run};

/// The identity of a replica, and its way to others.
pub(crate) struct ReplicaOptions {
    pub(crate) id: ReplicaId,
    pub(crate) settings: ReplicaSettings,
    /// Shared by the replicas of the node.
    pub(crate) pacer: Arc<CopyPacer>,
    /// The same.
    pub(crate) volumes: Arc<VolumeTotals>,
    pub(crate) outbox: Box<dyn Outbox>,
    /// When a write is acknowledged.
    pub(crate) class: PoolClass,
    /// The boot of the machine: with class `memory`, a write is durable when the device's cache has it.
    pub(crate) boot: [u8; 16],
}

/// Opens the shard of a replica on this core, which owns it from now on.
pub(crate) async fn start(
    core: &Core,
    descriptors: &StoreDescriptors,
    superblock: &Superblock,
    index: u32,
    options: impl FnOnce(u32) -> ReplicaOptions,
) -> Result<ShardHandle, StoreError> {
    let (shard, mut disks, entries, damage) = load::load(core, descriptors, superblock, index).await?;
    let places = RecordPlaces {
        starts: [0, 1].map(|slot| superblock.checkpoint_start(index, slot) * BLOCK_BYTES as u64),
        bytes: superblock.checkpoint_blocks as usize * BLOCK_BYTES,
    };
    let (log_uuid, group) = (shard.borrow().log.uuid(), shard.borrow().log.group());
    let (record, applied, unsettled) = read_record(disks.log(), places, log_uuid, group).await?;
    let base = EntryId { sequence: record.sequence, epoch: record.epoch };
    let has_base = shard.borrow().log.epoch_of(base.sequence) == Some(base.epoch);
    // What is in place needs no entries, and others have those that are not.
    let is_cut = record.complete && shard.borrow().log.sequences().end <= base.sequence;
    if !has_base && record.complete && !is_cut {
        return Err(StoreError::Checkpoint { log: index, sequence: base.sequence });
    }
    let is_damaged = damage.is_some() || is_cut;
    if is_damaged {
        let why =
            damage.map_or_else(|| "its log ends before what is in place".to_string(), |it| it.to_string());
        log::error!("group {group}: {why}: its replica lacks entries, and gets them from others");
    }
    let (entries, unsettled) = match has_base {
        true => (entries, unsettled),
        false => {
            // A crash in the middle of a reset left entries that the replica gave up.
            reset_log(&shard, disks.log(), base).await?;
            (Vec::new(), if is_cut { unsettled } else { Vec::new() })
        }
    };
    let RecoveredBlocks { entries, replicated, unsettled, blocks } =
        recover_blocks(&shard, &disks.data, entries, unsettled, base.sequence).await?;
    let replication = {
        let shard = &mut *shard.borrow_mut();
        let mut options = options(shard.log.group());
        let has_records = superblock.checkpoint_blocks >= CHECKPOINT_BLOCKS;
        shard.placed.is_atomic = shard.channel.device().geometry().is_atomic(BLOCK_BYTES as u32);
        shard.reads_flush = options.settings.reads_flush;
        shard.placed.is_enabled = (options.settings.in_place || shard.placed.is_atomic) && has_records;
        // What the log has of an earlier run counts as well.
        options.settings.in_place = shard.placed.is_enabled
            || !unsettled.is_empty()
            || entries.iter().any(|(header, _)| header.in_place);
        let log = RecoveredLog { record, applied, replicated, unsettled, is_damaged };
        let mut replication = Replication::new(core, shard, places, log, options);
        shard.applied_below = base.sequence + 1;
        shard.stats.entries_redone = shard.log.sequences().end - shard.applied_below;
        for (header, data) in entries.into_iter().filter(|(header, _)| header.sequence > base.sequence) {
            let placed = blocks.get(&header.sequence).copied();
            shard.recover(&mut replication.durable, header, data, placed);
        }
        replication
    };
    let mut replication = Box::new(replication);
    let unsettled = shard.borrow_mut().placed.begin_record();
    replication.next_record(&unsettled).write(disks.log()).await?;
    if replication.boot != [0; 16] {
        // Whichever of later records a power failure leaves, the newest says that the machine was booted
        // again.
        replication.next_record(&unsettled).write(disks.log()).await?;
        disks.set_volatile();
        shard.borrow_mut().is_volatile = true;
    }
    shard.borrow_mut().placed.checkpointed(base.sequence);
    shard.borrow_mut().replication = Some(replication);
    copies::start(core, &shard)?;
    scrub::start(core, &shard)?;
    run(core, descriptors, index, shard, disks).await
}

/// What a start found in the newest checkpoint record and in the log.
struct RecoveredLog {
    record: CheckpointRecord,
    applied: AppliedRequests,
    replicated: Vec<Arc<ReplicatedEntry>>,
    unsettled: Vec<Arc<ReplicatedEntry>>,
    is_damaged: bool,
}

impl Replication {
    /// The replica of a shard whose log was read, before any of its entries is applied.
    fn new(
        core: &Core,
        shard: &Shard,
        places: RecordPlaces,
        recovered: RecoveredLog,
        options: ReplicaOptions,
    ) -> Replication {
        let RecoveredLog { record, applied, replicated, unsettled, is_damaged } = recovered;
        let ReplicaOptions { id, settings, pacer, volumes, outbox, class, boot } = options;
        let sequences = shard.log.sequences();
        let through = EntryId { sequence: record.sequence, epoch: record.epoch };
        let recovered = RecoveredReplica {
            checkpoint: ReplicaCheckpoint { through, applied: applied.clone(), complete: record.complete },
            base: EntryId { sequence: sequences.start - 1, epoch: shard.log.base_epoch() },
            entries: replicated,
            unsettled,
            is_damaged,
        };
        // Each start writes a record, so that its generation counts starts.
        let incarnation = (record.generation + 1) as u32;
        let (sender, replies) = core.mailbox(READS_MAX);
        let mut replica = Replica::new(id, incarnation, settings, recovered, core.now_ns());
        replica.set_copy_pacer(pacer.clone());
        replica.set_volume_totals(volumes);
        Replication {
            group: shard.log.group(),
            partitions: Vec::new(),
            learners: Vec::new(),
            refused_copy: None,
            copies_to_place: 0,
            replica,
            outbox,
            events: VecDeque::new(),
            replica_deadline: None,
            leave_outcome: None,
            node_leaves: false,
            hangs: false,
            actions: Vec::new(),
            log_queue: VecDeque::new(),
            object_queue: VecDeque::new(),
            reads: VecDeque::new(),
            waiting: VecDeque::new(),
            waiting_names: Default::default(),
            appends: VecDeque::new(),
            durable: VecDeque::new(),
            committed: through,
            in_place: through,
            applied,
            complete: record.complete,
            checkpoint: None,
            is_recording: false,
            recorded_through: record.sequence,
            settles: VecDeque::new(),
            given_up: None,
            free_through: 0,
            reset: None,
            is_resetting: false,
            log_low_sent: false,
            recovered_through: sequences.end - 1,
            log_uuid: shard.log.uuid(),
            generation: record.generation,
            places,
            class,
            boot: if class == PoolClass::Memory { boot } else { [0; 16] },
            reading: 0,
            sender,
            replies,
            object_reads: ObjectReads::default(),
            scrubs: Scrubs::default(),
            pacer,
        }
    }
}

/// The newest record.
async fn read_record(
    device: &StoreDevice,
    places: RecordPlaces,
    log: [u8; 16],
    group: u32,
) -> Result<(CheckpointRecord, AppliedRequests, Vec<UnsettledBlock>), StoreError> {
    let invalid = |source| StoreError::CheckpointRecord { group, source };
    let mut found = Vec::new();
    for (slot, start) in (0..).zip(places.starts) {
        let bytes = device.read_of_two(start, places.bytes).await?;
        found.push(CheckpointRecord::decode(bytes.as_slice(), log, slot).map(|record| {
            let following = &bytes.as_slice()[SECTOR_BYTES..];
            let (applied, unsettled) = following.split_at(record.applied_bytes as usize);
            let unsettled = &unsettled[..record.unsettled as usize * UnsettledBlock::SIZE];
            (record, applied.to_vec(), unsettled.to_vec())
        }));
    }
    let first_error = found[0].clone().err();
    let newest = found.into_iter().flatten().max_by_key(|(record, ..)| record.generation);
    let Some((record, applied, unsettled)) = newest else {
        return Err(invalid(first_error.expect("neither is valid")));
    };
    let applied = AppliedRequests::decode(&applied).map_err(invalid)?;
    Ok((record, applied, UnsettledBlock::decode_all(&unsettled).map_err(invalid)?))
}

impl Shard {
    /// An entry that the log had at the start, which is not in place for certain.
    fn recover(
        &mut self,
        durable: &mut VecDeque<CommittedEntry>,
        header: EntryHeader,
        data: Vec<u8>,
        placed: Option<u64>,
    ) {
        let need = self.space_of_entry(&header, false);
        let bytes = oplog::entry_bytes(data.len(), self.log.sector());
        self.reserve(&header, need);
        self.unplaced.add(bytes);
        let data = if data.is_empty() { EntryData::None } else { EntryData::Recovered(Arc::new(data)) };
        durable.push_back(CommittedEntry { header, data, bytes, need, copied: None, placed });
    }
}
