//! The checksums of a device, on the core that owns them. Sans-IO.
//!
//! A region's bit is set durably before the first write to it, and then its checksums are only in memory: a
//! write takes no second one. When the region was left alone for some time, its checksums are written, and
//! when they are durable, and all data with them, its bit is cleared. After a power failure, regions whose
//! bits are set are read, and their checksums computed anew.
//!
//! Two things are in progress at a time at most: a *round* writes bits, of all regions that are wanted and
//! all that are clean meanwhile; and a *batch* writes checksums of some regions. So first writes to regions
//! wait for no more than the round before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use wire_blob::{ChecksumHeader, ChecksumPage, ChecksumsId, DirtyRegions, PAGE_BYTES};

use crate::layout::ChecksumLayout;
use crate::region::ChecksumRegion;

#[cfg(test)]
mod crash;
#[cfg(test)]
mod fault;

/// Regions in memory, of 2 KiB each, above which unused ones are forgotten: 128 MiB, for 64 GiB of data.
const REGIONS_MAX: usize = 1 << 16;
/// Regions whose checksums are written together: with 1 MiB of data each that may have to be read.
const BATCH_MAX: usize = 16;

/// A region that a request uses: for writes, one is counted in it.
pub(crate) struct RegionHold {
    region: Arc<ChecksumRegion>,
    is_write: bool,
}

impl RegionHold {
    /// A hold for a write; `None` if the region is not open.
    pub(crate) fn write(region: &Arc<ChecksumRegion>) -> Option<RegionHold> {
        region.begin_write().then(|| RegionHold { region: region.clone(), is_write: true })
    }

    /// A hold for a read.
    pub(crate) fn read(region: &Arc<ChecksumRegion>) -> RegionHold {
        RegionHold { region: region.clone(), is_write: false }
    }

    pub(crate) fn region(&self) -> &Arc<ChecksumRegion> {
        &self.region
    }
}

impl Drop for RegionHold {
    fn drop(&mut self) {
        if self.is_write {
            self.region.end_write();
        }
    }
}

/// An I/O of the table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TableIo {
    pub(crate) id: u64,
    pub(crate) action: TableAction,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TableAction {
    Read {
        offset: u64,
        bytes: usize,
    },
    Write {
        offset: u64,
        data: Vec<u8>,
    },
    /// Asked for only where the device has a volatile cache; what has to be before has completed.
    Flush,
}

/// The I/O has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableIoFailed;

/// What a request gets that waited for regions: them, or the write of their bits has failed.
pub(crate) struct Granted {
    pub(crate) token: u64,
    pub(crate) result: Result<Vec<RegionHold>, TableIoFailed>,
}

/// How the checksums on the device are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TableStart {
    /// They are those of the data, but where bits are set.
    Believed,
    /// There are none, or they are of other data. The regions with data, a bit each, are computed.
    Anew(Vec<u8>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// A page of bits, at the start.
    StartRead(u32),
    StartWrite,
    StartFlush,
    HeaderWrite,
    HeaderFlush,
    Load(u32),
    BatchRead(u32),
    BatchWrite(u32),
    BatchFlush,
    RoundWrite,
    RoundFlush,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The checksums are being read.
    Loading,
    /// Its bit is not set.
    Clean,
    /// Its bit is to be set, or is being.
    Opening,
    /// Its bit is set.
    Dirty,
    /// In the batch; it is closed.
    Settling,
    /// Its checksums are durable, and its bit is to be cleared.
    Settled,
    /// Its bit is being cleared.
    Clearing,
}

struct Entry {
    region: Arc<ChecksumRegion>,
    phase: Phase,
    /// A write waits that needs the bit, in a phase in which it cannot be set.
    wants_open: bool,
    /// In the queue of those whose checksums are to be written.
    is_queued: bool,
    waiters: Vec<u64>,
}

struct Want {
    regions: Range<u32>,
    next: u32,
    is_write: bool,
    holds: Vec<RegionHold>,
}

struct Round {
    sets: Vec<u32>,
    clears: Vec<u32>,
    in_flight: usize,
    is_flushing: bool,
    has_failed: bool,
}

struct Batch {
    regions: Vec<u32>,
    in_flight: usize,
}

pub(crate) struct ChecksumTable {
    layout: ChecksumLayout,
    id: ChecksumsId,
    has_volatile_cache: bool,
    is_started: bool,
    /// The header or the first bits could not be written: every write fails.
    has_failed: bool,
    starting: usize,
    bits: Vec<u8>,
    /// The next region whose bit may be set since before the start.
    recovering: u32,
    entries: BTreeMap<u32, Entry>,
    wants: BTreeMap<u64, Want>,
    granted: VecDeque<Granted>,
    to_set: Vec<u32>,
    to_clear: Vec<u32>,
    round: Option<Round>,
    queue: VecDeque<u32>,
    batch: Option<Batch>,
    is_ending: bool,
    ready: VecDeque<TableIo>,
    in_flight: BTreeMap<u64, Purpose>,
    next_io: u64,
    /// Writes of checksums or bits that have failed since this was asked last.
    failures: u64,
    /// Pages of checksums that were damaged when they were read, likewise.
    damaged: u64,
    #[cfg(test)]
    fault: Option<fault::TableFault>,
}

impl ChecksumTable {
    /// Starts with the checksums that are on the device, or with none.
    pub(crate) fn new(
        layout: ChecksumLayout,
        id: ChecksumsId,
        start: TableStart,
        has_volatile_cache: bool,
    ) -> ChecksumTable {
        let mut table = ChecksumTable {
            bits: vec![0; layout.dirty_pages() as usize * DirtyRegions::BITS_BYTES],
            layout,
            id,
            has_volatile_cache,
            is_started: false,
            has_failed: false,
            starting: 0,
            recovering: 0,
            entries: BTreeMap::new(),
            wants: BTreeMap::new(),
            granted: VecDeque::new(),
            to_set: Vec::new(),
            to_clear: Vec::new(),
            round: None,
            queue: VecDeque::new(),
            batch: None,
            is_ending: false,
            ready: VecDeque::new(),
            in_flight: BTreeMap::new(),
            next_io: 0,
            failures: 0,
            damaged: 0,
            #[cfg(test)]
            fault: None,
        };
        table.starting = layout.dirty_pages() as usize;
        for page in 0..layout.dirty_pages() {
            let offset = layout.dirty_offset(page);
            match &start {
                TableStart::Believed => {
                    table.push(Purpose::StartRead(page), TableAction::Read { offset, bytes: PAGE_BYTES });
                }
                TableStart::Anew(dirty) => {
                    let length = dirty.len().min(table.bits.len());
                    table.bits[..length].copy_from_slice(&dirty[..length]);
                    table.write_bits(Purpose::StartWrite, page);
                }
            }
        }
        table
    }

    /// An I/O to begin now. Any number are in flight.
    pub(crate) fn next_io(&mut self) -> Option<TableIo> {
        self.ready.pop_front()
    }

    /// Requests that have what they wanted.
    pub(crate) fn next_granted(&mut self) -> Option<Granted> {
        self.granted.pop_front()
    }

    /// Asks for regions. `token` is none that is asked for now.
    pub(crate) fn want(&mut self, token: u64, regions: Range<u32>, is_write: bool) {
        let regions = regions.start..regions.end.min(self.layout.regions());
        let want = Want { next: regions.start, regions: regions.clone(), is_write, holds: Vec::new() };
        self.wants.insert(token, want);
        if self.is_started {
            // All at once, so that their bits are written together.
            regions.for_each(|region| self.need(region, is_write));
            self.advance(token);
            self.run();
        }
    }

    /// Completes an I/O: with what was read.
    ///
    /// # Panics
    /// If no such I/O is in flight.
    pub(crate) fn complete(&mut self, id: u64, result: Result<Option<Vec<u8>>, TableIoFailed>) {
        let purpose = self.in_flight.remove(&id).expect("an I/O that is in flight");
        let is_ok = result.is_ok();
        let content = result.ok().flatten();
        self.failures += u64::from(!is_ok && !matches!(purpose, Purpose::BatchRead(_) | Purpose::Load(_)));
        match purpose {
            Purpose::StartRead(page) => self.start_read(page, content),
            Purpose::StartWrite => self.start_written(is_ok),
            Purpose::StartFlush => self.write_header(is_ok),
            Purpose::HeaderWrite if is_ok && self.has_volatile_cache => {
                self.push(Purpose::HeaderFlush, TableAction::Flush);
            }
            Purpose::HeaderWrite | Purpose::HeaderFlush => self.end_start(is_ok),
            Purpose::Load(region) => self.loaded(region, content),
            Purpose::BatchRead(region) => self.batch_read(region, content),
            Purpose::BatchWrite(region) => self.batch_written(region, is_ok),
            Purpose::BatchFlush => self.batch_flushed(is_ok),
            Purpose::RoundWrite | Purpose::RoundFlush => self.round_io(is_ok),
        }
        self.run();
    }

    /// Writes the checksums of regions that were not written to since the last call. To be called every
    /// second or so. Returns whether there are more regions in memory than there should be: channels then
    /// forget those that they do not use.
    pub(crate) fn tick(&mut self) -> bool {
        let is_full = self.entries.len() > REGIONS_MAX;
        let closes_early = self.closes_early();
        let dirty =
            self.entries.iter_mut().filter(|(_, entry)| entry.phase == Phase::Dirty && !entry.is_queued);
        for (region, entry) in dirty {
            if !entry.region.take_touched() || is_full || closes_early {
                entry.is_queued = true;
                self.queue.push_back(*region);
            }
        }
        if is_full {
            self.entries.retain(|_, entry| !entry.is_unused());
        }
        self.run();
        self.entries.len() > REGIONS_MAX
    }

    /// Writes the checksums of all regions, and clears their bits, until [`is_settled`](Self::is_settled).
    /// What is written to then is done again.
    pub(crate) fn settle(&mut self) {
        self.is_ending = true;
        self.run();
    }

    /// Whether no region has a bit that this run has set, and nothing is in progress.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_started
            && self.in_flight.is_empty()
            && (self.entries.values().all(|entry| entry.phase == Phase::Clean) || self.has_failed)
    }

    /// Whether the bits are known, and regions are given.
    pub(crate) fn is_started(&self) -> bool {
        self.is_started
    }

    /// Regions with bits: those that are not verified after the program is killed.
    pub(crate) fn dirty_regions(&self) -> u32 {
        self.bits.iter().map(|byte| byte.count_ones()).sum()
    }

    /// Whether regions of an earlier run are left whose checksums are to be computed.
    pub(crate) fn is_recovering(&self) -> bool {
        self.recovering < self.layout.regions()
    }

    pub(crate) fn take_failures(&mut self) -> u64 {
        std::mem::take(&mut self.failures)
    }

    pub(crate) fn take_damaged(&mut self) -> u64 {
        std::mem::take(&mut self.damaged)
    }

    fn push(&mut self, purpose: Purpose, action: TableAction) {
        self.in_flight.insert(self.next_io, purpose);
        self.ready.push_back(TableIo { id: self.next_io, action });
        self.next_io += 1;
    }

    fn write_bits(&mut self, purpose: Purpose, page: u32) {
        let from = page as usize * DirtyRegions::BITS_BYTES;
        let bits = &self.bits[from..from + DirtyRegions::BITS_BYTES];
        let data = DirtyRegions::encode(page, self.id, bits).to_vec();
        self.push(purpose, TableAction::Write { offset: self.layout.dirty_offset(page), data });
    }

    fn bit(&self, region: u32) -> bool {
        self.bits[region as usize / 8] >> (region % 8) & 1 == 1
    }

    fn set_bit(&mut self, region: u32, is_set: bool) {
        let (byte, mask) = (&mut self.bits[region as usize / 8], 1 << (region % 8));
        *byte = if is_set { *byte | mask } else { *byte & !mask };
    }

    fn start_read(&mut self, page: u32, content: Option<Vec<u8>>) {
        let from = page as usize * DirtyRegions::BITS_BYTES;
        // What cannot be read is not believed.
        let bits = DirtyRegions::decode(&content.unwrap_or_default(), page, self.id);
        self.bits[from..from + DirtyRegions::BITS_BYTES].copy_from_slice(&bits);
        self.starting -= 1;
        if self.starting == 0 {
            let regions = self.layout.regions();
            // Bits after the last one are of no region.
            for region in regions..self.layout.dirty_pages() * DirtyRegions::REGIONS {
                self.set_bit(region, false);
            }
            self.end_start(true);
        }
    }

    fn start_written(&mut self, is_ok: bool) {
        self.starting -= 1;
        self.has_failed |= !is_ok;
        if self.starting > 0 {
            return;
        }
        match self.has_failed || !self.has_volatile_cache {
            true => self.write_header(!self.has_failed),
            false => self.push(Purpose::StartFlush, TableAction::Flush),
        }
    }

    /// The bits of new checksums are durable before the header says that there are some.
    fn write_header(&mut self, is_ok: bool) {
        if !is_ok {
            return self.end_start(false);
        }
        let ChecksumLayout { data_start, data_bytes } = self.layout;
        let data = ChecksumHeader { id: self.id, data_start, data_bytes }.encode().to_vec();
        self.push(Purpose::HeaderWrite, TableAction::Write { offset: self.layout.header_offset(), data });
    }

    fn end_start(&mut self, is_ok: bool) {
        self.is_started = true;
        self.has_failed |= !is_ok;
        let tokens: Vec<u64> = self.wants.keys().copied().collect();
        for token in tokens {
            let Some(want) = self.wants.get(&token) else { continue };
            let (regions, is_write) = (want.regions.clone(), want.is_write);
            regions.for_each(|region| self.need(region, is_write));
            self.advance(token);
        }
    }

    /// Begins what a region needs before it can be read or written.
    fn need(&mut self, region: u32, is_write: bool) {
        if !self.entries.contains_key(&region) {
            let is_dirty = self.bit(region) && !self.has_failed;
            let (phase, shared) = match is_dirty {
                true => (Phase::Dirty, ChecksumRegion::stale(region)),
                false => (Phase::Loading, ChecksumRegion::new(region, None)),
            };
            let entry =
                Entry { region: shared, phase, wants_open: false, is_queued: false, waiters: Vec::new() };
            self.entries.insert(region, entry);
            if !is_dirty {
                let offset = self.layout.checksums_offset(region);
                self.push(Purpose::Load(region), TableAction::Read { offset, bytes: PAGE_BYTES });
            }
        }
        let Some(entry) = self.entries.get_mut(&region).filter(|_| is_write) else { return };
        match entry.phase {
            Phase::Loading | Phase::Clearing => entry.wants_open = true,
            Phase::Clean => self.begin_opening(region),
            Phase::Opening => {}
            // Its bit is set.
            Phase::Dirty | Phase::Settling | Phase::Settled => {
                entry.phase = Phase::Dirty;
                entry.region.open();
            }
        }
    }

    fn begin_opening(&mut self, region: u32) {
        self.set_bit(region, true);
        self.to_set.push(region);
        let is_early = self.opens_early();
        if let Some(entry) = self.entries.get_mut(&region) {
            entry.wants_open = false;
            entry.phase = Phase::Opening;
            if is_early {
                entry.region.open();
            }
        }
    }

    /// Gives a request the regions that it can have, and ends its wait with the last one.
    fn advance(&mut self, token: u64) {
        let Some(mut want) = self.wants.remove(&token) else { return };
        while want.next < want.regions.end {
            let region = want.next;
            self.need(region, want.is_write);
            let Some(entry) = self.entries.get_mut(&region) else { return };
            let hold = match want.is_write {
                true if self.has_failed => {
                    return self.granted.push_back(Granted { token, result: Err(TableIoFailed) });
                }
                true => RegionHold::write(&entry.region),
                false => (entry.phase != Phase::Loading).then(|| RegionHold::read(&entry.region)),
            };
            let Some(hold) = hold else {
                entry.waiters.push(token);
                self.wants.insert(token, want);
                return;
            };
            want.holds.push(hold);
            want.next += 1;
        }
        self.granted.push_back(Granted { token, result: Ok(want.holds) });
    }

    fn wake(&mut self, region: u32) {
        let waiters = self.entries.get_mut(&region).map(|entry| std::mem::take(&mut entry.waiters));
        waiters.into_iter().flatten().for_each(|token| self.advance(token));
    }

    /// Fails the writes that wait for a region.
    fn fail_writes(&mut self, region: u32) {
        let Some(entry) = self.entries.get_mut(&region) else { return };
        for token in std::mem::take(&mut entry.waiters) {
            match self.wants.get(&token).is_some_and(|want| want.is_write) {
                true => {
                    self.wants.remove(&token);
                    self.granted.push_back(Granted { token, result: Err(TableIoFailed) });
                }
                false => self.advance(token),
            }
        }
    }

    fn loaded(&mut self, region: u32, content: Option<Vec<u8>>) {
        let is_damaged = |content: &Vec<u8>| ChecksumPage::is_damaged(content, region, self.id);
        self.damaged += u64::from(content.as_ref().is_some_and(is_damaged));
        let page = content.and_then(|content| ChecksumPage::decode(&content, region, self.id));
        let Some(entry) = self.entries.get_mut(&region) else { return };
        entry.region = ChecksumRegion::new(region, page.as_ref());
        entry.phase = Phase::Clean;
        if entry.wants_open {
            self.begin_opening(region);
        }
        self.wake(region);
    }

    fn run(&mut self) {
        if !self.is_started || self.has_failed {
            return;
        }
        self.start_round();
        if self.batch.is_none() {
            self.start_batch();
        }
    }

    /// Writes the bits of regions that are wanted, and of those that are clean.
    fn start_round(&mut self) {
        if self.round.is_some() {
            return;
        }
        let mut sets = std::mem::take(&mut self.to_set);
        sets.retain(|region| self.entries.get(region).is_some_and(|entry| entry.phase == Phase::Opening));
        let mut clears = std::mem::take(&mut self.to_clear);
        clears.retain(|region| {
            let entry = self.entries.get_mut(region).filter(|entry| entry.phase == Phase::Settled);
            entry.map(|entry| entry.phase = Phase::Clearing).is_some()
        });
        if sets.is_empty() && clears.is_empty() {
            return;
        }
        clears.iter().for_each(|region| self.set_bit(*region, false));
        let pages: BTreeSet<u32> =
            sets.iter().chain(&clears).map(|region| region / DirtyRegions::REGIONS).collect();
        let in_flight = pages.len();
        pages.into_iter().for_each(|page| self.write_bits(Purpose::RoundWrite, page));
        self.round = Some(Round { sets, clears, in_flight, is_flushing: false, has_failed: false });
    }

    fn round_io(&mut self, is_ok: bool) {
        let Some(round) = &mut self.round else { return };
        round.in_flight -= 1;
        round.has_failed |= !is_ok;
        if round.in_flight > 0 {
            return;
        }
        let is_durable = round.is_flushing || !self.has_volatile_cache || round.sets.is_empty();
        if !is_durable && !round.has_failed {
            (round.in_flight, round.is_flushing) = (1, true);
            return self.push(Purpose::RoundFlush, TableAction::Flush);
        }
        let Some(Round { sets, clears, has_failed, .. }) = self.round.take() else { return };
        for region in clears {
            let Some(entry) = self.entries.get_mut(&region) else { continue };
            // If the write has failed, the bit may be set: then its checksums are computed again.
            entry.phase = Phase::Clean;
            if entry.wants_open {
                self.begin_opening(region);
            }
        }
        for region in sets {
            let Some(entry) = self.entries.get_mut(&region) else { continue };
            if has_failed {
                entry.phase = Phase::Clean;
                self.set_bit(region, false);
                self.fail_writes(region);
            } else {
                entry.phase = Phase::Dirty;
                entry.region.open();
                self.wake(region);
            }
        }
    }

    /// Writes the checksums of some regions.
    fn start_batch(&mut self) {
        let mut regions = Vec::new();
        if self.is_ending && self.queue.is_empty() {
            let dirty = self.entries.iter().filter(|(_, entry)| entry.phase == Phase::Dirty);
            self.queue.extend(dirty.map(|(region, _)| *region));
        }
        while regions.len() < BATCH_MAX
            && let Some(region) = self.queue.pop_front()
        {
            let Some(entry) = self.entries.get_mut(&region) else { continue };
            entry.is_queued = false;
            if entry.phase == Phase::Dirty && (entry.region.close() || self.closes_early()) {
                regions.push(region);
            }
        }
        while regions.is_empty() && !self.is_ending && self.is_recovering() {
            self.recover(&mut regions);
        }
        if regions.is_empty() {
            return;
        }
        let mut in_flight = 0;
        for region in &regions {
            let Some(entry) = self.entries.get_mut(region) else { continue };
            entry.phase = Phase::Settling;
            in_flight += 1;
            match entry.region.has_stale() {
                true => {
                    let (offset, bytes) = self.layout.region_range(*region);
                    self.push(Purpose::BatchRead(*region), TableAction::Read { offset, bytes });
                }
                false => self.write_page(*region),
            }
        }
        self.batch = Some(Batch { regions, in_flight });
    }

    /// Takes regions whose bits were set before the start.
    fn recover(&mut self, regions: &mut Vec<u32>) {
        while regions.len() < BATCH_MAX && self.is_recovering() {
            let region = self.recovering;
            self.recovering += 1;
            if !self.bit(region) || self.entries.contains_key(&region) {
                // Those in memory have their turn when nothing writes to them.
                continue;
            }
            self.need(region, false);
            regions.push(region);
        }
    }

    fn write_page(&mut self, region: u32) {
        let Some(entry) = self.entries.get(&region) else { return };
        let data = entry.region.page().encode(self.id).to_vec();
        let offset = self.layout.checksums_offset(region);
        self.push(Purpose::BatchWrite(region), TableAction::Write { offset, data });
    }

    fn batch_read(&mut self, region: u32, content: Option<Vec<u8>>) {
        match self.entries.get(&region) {
            Some(entry) if entry.phase == Phase::Settling => {
                entry.region.set_read(content.as_deref());
                self.write_page(region);
            }
            // It is being written to.
            _ => self.batch_written(region, true),
        }
    }

    fn batch_written(&mut self, region: u32, is_ok: bool) {
        if let Some(entry) = self.entries.get_mut(&region)
            && entry.phase == Phase::Settling
            && !is_ok
        {
            entry.phase = Phase::Dirty;
            entry.region.open();
        }
        let is_early = self.clears_early();
        let Some(batch) = &mut self.batch else { return };
        batch.in_flight -= 1;
        if batch.in_flight > 0 {
            return;
        }
        match self.has_volatile_cache && !is_early {
            true => {
                batch.in_flight = 1;
                self.push(Purpose::BatchFlush, TableAction::Flush);
            }
            false => self.batch_flushed(true),
        }
    }

    fn batch_flushed(&mut self, is_ok: bool) {
        let Some(Batch { regions, .. }) = self.batch.take() else { return };
        for region in regions {
            let Some(entry) = self.entries.get_mut(&region) else { continue };
            match entry.phase {
                Phase::Settling if is_ok => {
                    entry.phase = Phase::Settled;
                    self.to_clear.push(region);
                }
                Phase::Settling => {
                    entry.phase = Phase::Dirty;
                    entry.region.open();
                }
                _ => {}
            }
        }
    }

    #[cfg(test)]
    fn opens_early(&self) -> bool {
        self.fault == Some(fault::TableFault::BitAfterWrite)
    }

    #[cfg(not(test))]
    fn opens_early(&self) -> bool {
        false
    }

    #[cfg(test)]
    fn clears_early(&self) -> bool {
        self.fault == Some(fault::TableFault::ClearedBeforeDurable)
    }

    #[cfg(not(test))]
    fn clears_early(&self) -> bool {
        false
    }

    #[cfg(test)]
    fn closes_early(&self) -> bool {
        self.fault == Some(fault::TableFault::ClosedDuringWrites)
    }

    #[cfg(not(test))]
    fn closes_early(&self) -> bool {
        false
    }
}

impl Entry {
    /// Whether nothing but the table has it, and its checksums are on the device.
    fn is_unused(&self) -> bool {
        self.phase == Phase::Clean && self.waiters.is_empty() && Arc::strong_count(&self.region) == 1
    }
}
