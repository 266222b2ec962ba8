//! A run: changes, writes and a power failure, by a seed.

use std::collections::{BTreeMap, BTreeSet};

use wire_blob::{BlobId, Xattr};

use super::disk::{Dice, Disk, SECTOR, fill};
use super::model::{Change, Model, check, named};
use super::{CLUSTER, UNIT, UNITS};
use crate::write::Fault;
use crate::{
    BlobChange, BlobStore, BlobStoreDevice, BlobStoreFormat, ChangeError, ChangeId, ChangeOutcome,
    ClearMethod, OpenBlobStore, StoreAction, StoreEvent, StoreIoFailed,
};

const CLUSTERS: u64 = 72;
/// Changes in flight: with each, there are twice as many states that are right.
const CHANGES_MAX: usize = 3;
const BLOBS_MAX: usize = 9;
/// The ids of the runner's own I/O begin here.
const OWN: u64 = 1 << 40;
const EXTERNAL: &[u8] = b"external\0";

/// How a run is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunOptions {
    pub(super) fault: Option<Fault>,
    /// Steps before the power failure; by the seed if not given.
    pub(super) steps: Option<usize>,
    /// I/O of a hundred that fail.
    pub(super) failing: usize,
    /// Ends with the last power failure, and without unloading the store.
    pub(super) dirty: bool,
    /// Ends with a power failure, while changes are in flight.
    pub(super) cut: bool,
}

/// A write of data, by a channel.
#[derive(Clone, Debug)]
struct DataWrite {
    name: String,
    index: u32,
    units: std::ops::Range<usize>,
    tag: u64,
    epoch: u64,
    first: Option<ChangeId>,
}

pub(super) struct Run {
    dice: Dice,
    options: RunOptions,
    disk: Disk,
    open: OpenBlobStore,
    model: Model,
    ids: BTreeMap<String, BlobId>,
    changes: BTreeMap<ChangeId, Change>,
    /// First writes that wait for their end.
    firsts: BTreeMap<ChangeId, DataWrite>,
    writes: BTreeMap<u64, DataWrite>,
    flushes: BTreeSet<u64>,
    paused: BTreeSet<BlobId>,
    pauses: Vec<BlobId>,
    next: u64,
    formatting: Option<ChangeId>,
    unloading: Option<ChangeId>,
    unloaded: bool,
    names: usize,
    trace: bool,
}

fn xattrs(name: &str) -> Vec<Xattr> {
    vec![Xattr { name: b"name".to_vec(), value: name.as_bytes().to_vec() }]
}

/// Runs a seed: several power failures, one after another. Then the store is unloaded, and returned as a
/// device. `None` if there is none: the power failed before it was made.
pub(super) fn run_seed(seed: u64, options: RunOptions) -> Result<Option<Vec<u8>>, String> {
    let mut dice = Dice(seed);
    let device = BlobStoreDevice {
        bytes: CLUSTERS * CLUSTER as u64,
        block_bytes: 512,
        has_volatile_cache: dice.percent(60),
        atomic_write_bytes: [0, 4096][dice.below(2)],
    };
    let format = BlobStoreFormat {
        cluster_bytes: CLUSTER as u32,
        metadata_pages_percent: 70,
        clear: [ClearMethod::None, ClearMethod::Unmap][dice.below(2)],
        store_type: *b"crashes\0\0\0\0\0\0\0\0\0",
        super_blob: Some(xattrs("store")),
        ..BlobStoreFormat::default()
    };
    let (open, change) = OpenBlobStore::format(&format, device).unwrap();
    let mut run = Run {
        options,
        disk: Disk::new(device),
        open,
        model: Model::default(),
        ids: BTreeMap::new(),
        changes: BTreeMap::new(),
        firsts: BTreeMap::new(),
        writes: BTreeMap::new(),
        flushes: BTreeSet::new(),
        paused: BTreeSet::new(),
        pauses: Vec::new(),
        next: OWN,
        formatting: Some(change),
        unloading: None,
        unloaded: false,
        names: 0,
        trace: std::env::var_os("BLOBSTORE_TRACE").is_some(),
        dice,
    };
    run.plant();
    let rounds = 1 + run.dice.below(4);
    for _ in 0..rounds {
        let steps = match run.options.steps {
            Some(steps) => steps,
            None => [30, 200, 1200][run.dice.below(3)] * (1 + run.dice.below(100)) / 100,
        };
        if !run.round(steps)? {
            return Ok(None);
        }
    }
    run.finish()?;
    Ok(Some(run.disk.image()))
}

impl Run {
    /// Prints what happens, if the environment says so.
    fn trace(&self, line: impl Fn() -> String) {
        if self.trace {
            println!("{}", line());
        }
    }

    fn plant(&mut self) {
        if let Some(fault) = self.options.fault {
            self.open.plant(fault);
        }
    }

    /// Runs until the power fails, and loads what is left. `false` if there is no store.
    fn round(&mut self, steps: usize) -> Result<bool, String> {
        for _ in 0..steps {
            self.step(true)?;
        }
        if self.formatting.is_none() && self.dice.percent(15) {
            self.unloading = Some(self.open.begin(BlobChange::Unload));
            for _ in 0..self.dice.below(100) {
                self.step(false)?;
            }
        }
        self.trace(|| format!("power failure on {:?}", self.disk.device));
        let left = self.disk.crash(&mut self.dice);
        let store = match left.load(false) {
            Ok(store) => store,
            Err(_) if self.formatting.is_some() => return Ok(false),
            Err(error) => return Err(format!("the store does not load: {error}")),
        };
        check(&store)?;
        let scanned = left.load(true).map_err(|error| error.to_string())?;
        if scanned.blobs() != store.blobs() || scanned.free_clusters() != store.free_clusters() {
            return Err("a scan of all pages finds another store".to_string());
        }
        self.resolve(&left, &store)?;
        self.disk = left;
        self.reopen(store);
        Ok(true)
    }

    /// Finds out which of the changes in flight are there.
    fn resolve(&mut self, left: &Disk, store: &BlobStore) -> Result<(), String> {
        let firsts = self.firsts.values().chain(self.writes.values());
        let writing: Vec<(String, u32, usize, u64)> = firsts
            .flat_map(|write| {
                write.units.clone().map(|unit| (write.name.clone(), write.index, unit, write.tag))
            })
            .collect();
        let changes: Vec<Change> = self.changes.values().cloned().collect();
        let mut problems = Vec::new();
        for choice in 0..1usize << changes.len() {
            let mut model = self.model.clone();
            let is_there = |at: &usize| choice >> at & 1 == 1;
            let there: Vec<&Change> = (0..changes.len()).filter(is_there).map(|at| &changes[at]).collect();
            there.iter().for_each(|change| model.apply(change));
            // A snapshot of a blob that is being written has the write or not.
            match model.compare(left, store, &inherited(&writing, &there)) {
                Ok(()) => {
                    self.model = Model::of(left, store, &model)?;
                    return Ok(());
                }
                Err(problem) => problems.push(format!("with {there:?}: {problem}")),
            }
        }
        Err(problems.join("\n"))
    }

    fn reopen(&mut self, store: BlobStore) {
        self.changes.clear();
        self.firsts.clear();
        self.writes.clear();
        self.flushes.clear();
        self.paused.clear();
        self.pauses.clear();
        (self.formatting, self.unloading) = (None, None);
        self.ids = named(&store).unwrap().into_iter().map(|(name, blob)| (name, blob.id())).collect();
        self.open = OpenBlobStore::open(store, self.disk.device);
        self.plant();
    }

    /// Ends what is in flight, unloads the store, and loads it.
    fn finish(&mut self) -> Result<(), String> {
        if self.options.cut {
            for _ in 0..self.dice.below(300) {
                self.step(true)?;
            }
            self.disk = self.disk.crash(&mut self.dice);
            return Ok(());
        }
        self.drain()?;
        if self.options.dirty {
            return Ok(());
        }
        if self.open.is_closed() {
            return Ok(());
        }
        let own: usize = self.model.blobs.values().map(|blob| blob.own.len()).sum();
        let free = self.open.published().data_clusters() as usize - own;
        if self.options.failing == 0 && self.open.free_clusters() as usize != free {
            return Err(format!("{} clusters are free, expected {free}", self.open.free_clusters()));
        }
        self.unloading = Some(self.open.begin(BlobChange::Unload));
        self.drain()?;
        if !self.unloaded {
            return Ok(());
        }
        self.disk = self.disk.crash(&mut self.dice);
        let store = self.disk.load(true).map_err(|error| error.to_string())?;
        if !store.super_block().clean || !store.findings().is_empty() {
            return Err(format!("after unloading: {:?}", store.findings()));
        }
        self.model.compare(&self.disk, &store, &[])
    }

    /// Completes all that is in flight.
    pub(super) fn drain(&mut self) -> Result<(), String> {
        for _ in 0..100_000 {
            let is_idle = self.open.is_idle() && self.writes.is_empty() && self.disk.in_flight().is_empty();
            if is_idle && (self.changes.is_empty() || self.open.is_closed()) {
                return Ok(());
            }
            self.step(false)?;
        }
        Err(format!("it does not end: {:?}", self.changes))
    }

    fn step(&mut self, may_begin: bool) -> Result<(), String> {
        self.take_events()?;
        while let Some(io) = self.open.next_io() {
            self.trace(|| format!("begin {} {}", io.id, brief(&io.action)));
            self.disk.begin(io.id, io.action);
        }
        match self.dice.below(10) {
            0..5 => self.complete()?,
            5 => {
                // Data writes in flight are by states that are in use.
                let epoch = self.writes.values().map(|write| write.epoch).min();
                self.open.release(epoch.unwrap_or(self.open.epoch()));
            }
            6 => {
                let is_writing =
                    |blob: &BlobId| self.writes.values().any(|write| self.ids.get(&write.name) == Some(blob));
                if let Some(blob) = self.dice.pick(&self.pauses)
                    && !is_writing(&blob)
                {
                    self.pauses.retain(|other| *other != blob);
                    self.open.paused(blob);
                }
            }
            7 if may_begin && self.formatting.is_none() => self.begin_change(),
            _ if may_begin && self.formatting.is_none() => self.begin_write(),
            _ => self.complete()?,
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<(), String> {
        let mut in_flight = self.disk.in_flight();
        // Some data writes take long, so that the store changes around them.
        if self.dice.percent(50) && in_flight.iter().any(|id| *id < OWN) {
            in_flight.retain(|id| *id < OWN);
        }
        let Some(id) = self.dice.pick(&in_flight) else { return Ok(()) };
        let is_ok = !self.dice.percent(self.options.failing);
        self.trace(|| format!("complete {id} {is_ok}"));
        self.disk.complete(id, is_ok);
        let result = if is_ok { Ok(()) } else { Err(StoreIoFailed) };
        if id < OWN {
            self.open.complete(id, result);
        } else if let Some(write) = self.writes.remove(&id) {
            self.data_written(write, is_ok);
        } else if self.flushes.remove(&id) && is_ok && self.options.failing == 0 {
            self.model.flushed();
        }
        self.take_events()
    }

    fn data_written(&mut self, write: DataWrite, is_ok: bool) {
        match write.first {
            Some(change) => {
                let result = if is_ok { Ok(()) } else { Err(StoreIoFailed) };
                self.open.cluster_written(change, result);
            }
            None => self.wrote(&write, is_ok && !self.disk.device.has_volatile_cache),
        }
    }

    /// A write was acknowledged, or may have been done.
    fn wrote(&mut self, write: &DataWrite, is_durable: bool) {
        // Writes by a state from before the blob was deleted or made smaller have no effect.
        let is_there = self.model.blobs.get(&write.name).is_some_and(|blob| write.index < blob.clusters);
        if !is_there {
            return;
        }
        let below = self.model.cluster(&write.name, write.index);
        let Some(blob) = self.model.blobs.get_mut(&write.name) else { return };
        let own = blob.own.entry(write.index).or_insert(below);
        write.units.clone().for_each(|unit| own[unit].write(write.tag, is_durable));
    }

    fn take_events(&mut self) -> Result<(), String> {
        while let Some(event) = self.open.next_event() {
            self.trace(|| format!("{event:?}"));
            match event {
                StoreEvent::Done { change, result } => self.done(change, result)?,
                StoreEvent::Published { .. } | StoreEvent::LowSpace { .. } => {}
                StoreEvent::Pause { blob } => {
                    self.paused.insert(blob);
                    self.pauses.push(blob);
                }
                StoreEvent::Resume { blob } => {
                    self.paused.remove(&blob);
                    self.resumed(blob);
                }
                StoreEvent::WriteCluster { change, offset } => {
                    let write = self.firsts.get_mut(&change).ok_or("a write that nothing asked for")?;
                    write.first = Some(change);
                    let write = write.clone();
                    self.write_data(write, offset);
                }
            }
        }
        Ok(())
    }

    /// A snapshot exists when writes begin again.
    fn resumed(&mut self, blob: BlobId) {
        let is_it = |change: &&Change| match change {
            Change::Snapshot { name, .. } => self.ids.get(name) == Some(&blob),
            _ => false,
        };
        let change = self.changes.values().find(is_it).cloned();
        if let Some(change @ Change::Snapshot { .. }) = change
            && self.open.published().clones_of_named(&change)
        {
            self.model.apply(&change);
            let id =
                self.changes.iter().find(|(_, other)| other.names() == change.names()).map(|(id, _)| *id);
            let id = id.unwrap();
            // The rest of it changes nothing that the model has.
            self.changes.insert(id, Change::Grow);
            if let Change::Snapshot { name, snapshot } = change {
                let parent = self.open.published().blob(self.ids[&name]).unwrap().parent().clone();
                let crate::BlobParent::Snapshot(parent) = parent else { panic!("{name} has no snapshot") };
                self.ids.insert(snapshot, parent);
            }
        }
    }

    fn done(&mut self, id: ChangeId, result: Result<ChangeOutcome, ChangeError>) -> Result<(), String> {
        if self.options.failing == 0 && matches!(result, Err(ChangeError::Io | ChangeError::Broken)) {
            return Err(format!("{:?} failed with {result:?}", self.changes.get(&id)));
        }
        if self.formatting == Some(id) {
            // After a failure, there may be a store or not.
            self.formatting = self.formatting.filter(|_| result.is_err());
            return Ok(());
        }
        if self.unloading == Some(id) {
            self.unloaded = result.is_ok();
            return Ok(());
        }
        if let Some(write) = self.firsts.remove(&id) {
            match result {
                // Another allocation was first: the write goes where any other does.
                Ok(ChangeOutcome::Cluster(cluster)) if write.first.is_none() => {
                    let write = DataWrite { epoch: self.open.epoch(), ..write };
                    self.write_data(write, u64::from(cluster) * CLUSTER as u64);
                }
                Ok(_) => self.wrote(&write, !self.disk.device.has_volatile_cache),
                // The cluster map may have been written.
                Err(ChangeError::Io | ChangeError::Broken)
                    if self.open.is_closed() && write.first.is_some() =>
                {
                    self.wrote(&write, false)
                }
                Err(_) => {}
            }
            return Ok(());
        }
        let change = self.changes.remove(&id).ok_or("an end of nothing")?;
        match result {
            Ok(outcome) => {
                self.model.apply(&change);
                let new = match (&change, outcome) {
                    (Change::Delete { name }, _) => {
                        self.ids.remove(name);
                        None
                    }
                    (_, ChangeOutcome::Blob(blob)) => {
                        change.names().last().map(|name| ((*name).clone(), blob))
                    }
                    _ => None,
                };
                self.ids.extend(new);
                Ok(())
            }
            Err(ChangeError::NoBlob(blob)) => Err(format!("{change:?}: there is no blob {blob}")),
            // `Invalid`: the blob or its parent was changed at the same time.
            Err(ChangeError::NoClusters { .. } | ChangeError::Cancelled | ChangeError::Invalid(_))
                if matches!(change, Change::Inflate { .. } | Change::Decouple { .. }) =>
            {
                self.copied(&change);
                Ok(())
            }
            // What is on the device is not known.
            Err(ChangeError::Io | ChangeError::Broken) => {
                self.changes.insert(id, change);
                Ok(())
            }
            Err(_) => Ok(()),
        }
    }

    /// What an inflation has copied before it failed stays.
    fn copied(&mut self, change: &Change) {
        let Some(name) = change.names().first().map(|name| (*name).clone()) else { return };
        let published = self.open.published().clone();
        let Some(blob) = self.ids.get(&name).and_then(|id| published.blob(*id)) else { return };
        for (index, _) in blob.clusters().iter() {
            let cluster = self.model.cluster(&name, index);
            let own = self.model.blobs.get_mut(&name).map(|blob| &mut blob.own);
            own.into_iter().for_each(|own| _ = own.entry(index).or_insert(cluster.clone()));
        }
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("blob{}", self.names)
    }

    fn busy(&self) -> BTreeSet<String> {
        self.changes.values().flat_map(|change| change.names().into_iter().cloned()).collect()
    }

    fn begin_change(&mut self) {
        if self.changes.len() == CHANGES_MAX || self.open.is_closed() {
            return;
        }
        let Some(change) = self.random_change() else { return };
        let clones = |name: &String| self.model.clones(name);
        let mut names: BTreeSet<String> = change.names().into_iter().cloned().collect();
        names.extend(change.names().into_iter().flat_map(clones));
        // One change of a blob at a time, so that the states that are right are few.
        if self.busy().iter().any(|busy| names.contains(busy)) {
            return;
        }
        let is_write = |write: &DataWrite| names.contains(&write.name);
        let writes = self.writes.values().chain(self.firsts.values()).any(is_write);
        let may_have_writes = match &change {
            Change::Snapshot { .. } | Change::Inflate { .. } | Change::Resize { .. } => true,
            Change::Delete { name } => self.model.clones(name).is_empty(),
            _ => false,
        };
        if writes && !may_have_writes {
            return;
        }
        let blob = |name: &String| self.ids[name];
        let clear = [ClearMethod::Default, ClearMethod::None, ClearMethod::WriteZeroes][self.names % 3];
        let begun = match &change {
            Change::Create { name, thin, clusters } => {
                BlobChange::Create { thin: *thin, clusters: *clusters, clear, xattrs: xattrs(name) }
            }
            Change::Delete { name } => BlobChange::Delete { blob: blob(name) },
            Change::Resize { name, clusters } => BlobChange::Resize { blob: blob(name), clusters: *clusters },
            Change::Set { name, value } => {
                let set = vec![Xattr { name: b"value".to_vec(), value: value.clone() }];
                BlobChange::SetXattrs { blob: blob(name), set, remove: Vec::new() }
            }
            Change::ReadOnly { name } => BlobChange::SetReadOnly { blob: blob(name) },
            Change::Snapshot { name, snapshot } => {
                BlobChange::Snapshot { blob: blob(name), xattrs: xattrs(snapshot) }
            }
            Change::Clone { of, name } => BlobChange::Clone { of: blob(of), xattrs: xattrs(name) },
            Change::CloneExternal { name, clusters } => BlobChange::CloneExternal {
                name: EXTERNAL.to_vec(),
                clusters: *clusters,
                xattrs: xattrs(name),
            },
            Change::Inflate { name } => BlobChange::Inflate { blob: blob(name) },
            Change::Decouple { name } => BlobChange::Decouple { blob: blob(name) },
            Change::SetParent { name, parent } => {
                BlobChange::SetParent { blob: blob(name), parent: blob(parent) }
            }
            Change::SetParentExternal { name } => {
                BlobChange::SetParentExternal { blob: blob(name), name: EXTERNAL.to_vec() }
            }
            Change::Release { name, index } => {
                BlobChange::ReleaseClusters { blob: blob(name), clusters: *index..index + 1 }
            }
            Change::Grow => {
                let bytes = self.disk.device.bytes + 3 * CLUSTER as u64;
                self.disk.grow(bytes);
                BlobChange::Grow { device_bytes: bytes }
            }
        };
        let id = self.open.begin(begun);
        self.trace(|| format!("change {id:?} {change:?}"));
        self.changes.insert(id, change);
    }

    fn random_change(&mut self) -> Option<Change> {
        let names: Vec<String> = self.model.blobs.keys().cloned().collect();
        let is_full = names.len() + self.changes.len() >= BLOBS_MAX;
        let name = self.dice.pick(&names);
        let new = self.name();
        let sizes = [0, 1, 3, 8, 20, 511, 512, 513, 600, 1030];
        let clusters = sizes[self.dice.below(sizes.len())];
        Some(match (self.dice.below(20), name) {
            (0..2, _) | (_, None) if !is_full => Change::Create { name: new, thin: true, clusters },
            (2, _) if !is_full => Change::Create { name: new, thin: false, clusters: clusters.min(8) },
            (3, _) if !is_full => Change::CloneExternal { name: new, clusters: clusters.min(30) },
            (4..7, Some(name)) if !is_full => Change::Snapshot { name, snapshot: new },
            (7..9, Some(of)) if !is_full => Change::Clone { of, name: new },
            (9, Some(name)) => Change::Resize { name, clusters },
            (10, Some(name)) => {
                let bytes = [0, 5, 40, 3000, 4030][self.dice.below(5)];
                Change::Set { name, value: vec![self.dice.next() as u8; bytes] }
            }
            (11, Some(name)) => Change::Inflate { name },
            (12, Some(name)) => Change::Decouple { name },
            (13, Some(name)) => Change::SetParent { name, parent: self.dice.pick(&names)? },
            (14, Some(name)) => Change::SetParentExternal { name },
            (15, Some(name)) => {
                let own: Vec<u32> = self.model.blobs[&name].own.keys().copied().collect();
                Change::Release { index: self.dice.pick(&own)?, name }
            }
            (16, Some(name)) if self.dice.percent(20) => Change::ReadOnly { name },
            (17, _) if self.dice.percent(10) => Change::Grow,
            (_, Some(name)) => Change::Delete { name },
            _ => return None,
        })
    }

    fn begin_write(&mut self) {
        if self.writes.len() + self.firsts.len() > 6 || self.open.is_closed() {
            return;
        }
        if self.dice.percent(10) {
            self.next += 1;
            self.disk.begin(self.next, StoreAction::Flush);
            // Only what completed before it began: nothing else may be in flight.
            if self.writes.is_empty() && self.firsts.is_empty() && self.changes.is_empty() {
                self.flushes.insert(self.next);
            }
            return;
        }
        let names: Vec<String> = self.model.blobs.keys().cloned().collect();
        let Some(name) = self.dice.pick(&names) else { return };
        let blob = self.model.blobs[&name].clone();
        let Some(id) = self.ids.get(&name).copied() else { return };
        let is_shared = |change: &Change| {
            let writes = matches!(change, Change::Snapshot { .. } | Change::Inflate { .. });
            !writes && change.names().contains(&&name)
        };
        // The clone of a snapshot that is being deleted is changed too, and so is a snapshot's reader.
        let has_change = self.changes.values().any(|change| {
            is_shared(change)
                || matches!(change, Change::Delete { name: other } if self.model.clones(other).contains(&name))
        });
        let is_flushing = !self.flushes.is_empty();
        if blob.read_only || blob.clusters == 0 || self.paused.contains(&id) || has_change || is_flushing {
            return;
        }
        let indexes = [0, 1, 2, 3, 7, 511, 512, 1029];
        let index = indexes[self.dice.below(indexes.len())].min(blob.clusters - 1);
        let from = self.dice.below(UNITS);
        let units = from..from + 1 + self.dice.below(UNITS - from);
        let units = if self.dice.percent(30) { 0..UNITS } else { units };
        // One write to a cluster at a time, so that their order is certain.
        let mut others = self.writes.values().chain(self.firsts.values());
        if others.any(|write| write.name == name && write.index == index) {
            return;
        }
        self.next += 1;
        let epoch = self.open.epoch();
        let write = DataWrite { name, index, units, tag: self.next, epoch, first: None };
        let published = self.open.published().clone();
        match published.blob(id).and_then(|blob| blob.clusters().get(index)) {
            Some(cluster) => self.write_data(write, u64::from(cluster) * CLUSTER as u64),
            None => {
                let written = (write.units.start * UNIT) as u32..(write.units.end * UNIT) as u32;
                let change = self.open.begin(BlobChange::AllocateCluster { blob: id, index, written });
                self.trace(|| format!("first write {change:?} {write:x?}"));
                self.firsts.insert(change, write);
            }
        }
    }

    fn write_data(&mut self, write: DataWrite, cluster_offset: u64) {
        let mut data = vec![0; write.units.len() * UNIT];
        data.chunks_mut(SECTOR).for_each(|sector| fill(sector, write.tag));
        let offset = cluster_offset + (write.units.start * UNIT) as u64;
        self.next += 1;
        self.trace(|| format!("data {} at {} {write:x?}", self.next, offset / CLUSTER as u64));
        self.disk.begin(self.next, StoreAction::Write { offset, data });
        self.writes.insert(self.next, write);
    }
}

/// The tags of writes in flight, also for the snapshots that changes make of what is written.
fn inherited(writing: &[(String, u32, usize, u64)], there: &[&Change]) -> Vec<(String, u32, usize, u64)> {
    let mut all = writing.to_vec();
    for change in there {
        if let Change::Snapshot { name, snapshot } = change {
            let of = writing.iter().filter(|(other, ..)| other == name);
            all.extend(of.map(|(_, index, unit, tag)| (snapshot.clone(), *index, *unit, *tag)));
        }
    }
    all
}

impl BlobStore {
    /// Whether a snapshot of a change exists.
    fn clones_of_named(&self, change: &Change) -> bool {
        let names = change.names();
        named(self).is_ok_and(|named| names.iter().all(|name| named.contains_key(*name)))
    }
}

/// An action in a line: metadata by page, data by cluster.
fn brief(action: &StoreAction) -> String {
    let place =
        |offset: &u64| format!("cluster {} page {}", offset / CLUSTER as u64, *offset as i64 / 4096 - 4);
    match action {
        StoreAction::Write { offset, .. } => format!("write {}", place(offset)),
        StoreAction::WriteZeroes { offset, bytes } => format!("zero {} {bytes}", place(offset)),
        StoreAction::Deallocate { offset, bytes } => format!("deallocate {} {bytes}", place(offset)),
        StoreAction::Copy { from, offset } => format!("copy {} from {from:?}", place(offset)),
        StoreAction::Flush => "flush".to_string(),
    }
}
