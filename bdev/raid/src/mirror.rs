//! raid1 and raid5f: members with the same data, or with a parity of the others', some of which may be
//! missing, stale or failing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use accel::Accel;
use bdev::stacking::{BaseBdev, BaseChannels, BaseSet};
use bdev::{BdevGeometry, BlockDevice, BoxedChannel, Closing, InfoValue, Registry, Uuid};
use block_io::Op;
use reactor::{Core, ReactorHandle};
use wire_raid::{IntentPage, MemberState, RaidLevel, RaidSuperblock};

use crate::array::{ArraySlot, ArrayState, RaidArray};
use crate::assembly::has_room_for_bitmap;
use crate::member_age::{MemberOnDisk, is_same_era};
use crate::module::{RaidError, RaidOptions};
use crate::parity_layout::ParityLayout;

mod busy;
mod channel;
mod copy;
mod metadata;
mod parity;
mod regions;
mod xor;

use busy::BusyStripes;
use channel::MirrorChannel;
use copy::CopyProgress;
use parity::ParityChannel;
use regions::RegionMap;

/// Least bytes of a region of the bitmap.
const REGION_BYTES_MIN: u64 = 64 << 10;
/// Repairs of read errors at a time; others are left for the next read.
const REPAIRS_MAX: u64 = 16;

/// The members of a redundant array: which have all data, which of them the superblocks list so, and which
/// regions may differ.
///
/// Cores read the sets of members for each request, and change them when a member fails. One task at a time,
/// on one core, writes superblocks and the bitmap; another copies. Both are started when there is something
/// to do. A member is *in sync* if it has all data, a *target* while it is copied to. Requests go to both,
/// reads to members that are in sync only.
///
/// Regions, copies and offsets of members are counted in *rows*, blocks of a member's data. Those of raid1
/// are the blocks of the array; in raid5f a row of all members is a block of each strip of a stripe, and any
/// of them is the exclusive or of the others. So a member is copied to from all others, and what may differ
/// after a crash is the parity.
pub struct Mirror {
    array: Arc<RaidArray>,
    /// `None` of raid1.
    parity: Option<ParityLayout>,
    accel: Accel,
    /// Of raid5f.
    busy: BusyStripes,
    bases: Arc<BaseSet>,
    handle: ReactorHandle,
    block_bytes: u32,
    /// Rows of the array.
    blocks: u64,
    ops: Vec<Op>,
    options: RaidOptions,
    /// The bit of the member with the newest bitmap at the start, whose version of what may differ counts; 0
    /// for any.
    newest: u64,
    /// Bits of members that have all data.
    in_sync: AtomicU64,
    /// Bits of members of which the superblocks say so, or may say so in a moment: a write is acknowledged
    /// when all of them have it.
    recorded: AtomicU64,
    regions: RegionMap,
    /// Grows when superblocks or bitmap cannot be written: what waits for them fails.
    failures: AtomicU64,
    repairs: AtomicU64,
    meta: Mutex<MetaState>,
    /// Something of `meta` has changed.
    changed: Condvar,
    device: OnceLock<(Weak<BlockDevice>, Registry)>,
}

/// What the tasks of a mirror are to do, and where they are.
struct MetaState {
    run: TaskRun,
    /// Members that were lost, whose loss is not recorded yet.
    lost: Vec<(usize, MemberState)>,
    /// Bits of members that are copied to.
    targets: u64,
    /// Bits of targets that writes of before may still be without.
    unsettled: u64,
    /// Targets that the superblocks do not list yet.
    joined: Vec<JoinedMember>,
    /// Bits of targets that have all data now.
    promoted: u64,
    /// A bitmap is to be written.
    is_page_due: bool,
    /// Idle regions are to be taken: those of a while, or all at once.
    clean_due: Option<bool>,
    is_timer_set: bool,
    /// What the last look for idle regions has seen.
    seen: Vec<u64>,
    /// Number of passes that have ended.
    passes: u64,
    generation: u64,
    /// The regions of the last page.
    marked: Vec<u64>,
    /// Bits of members that lack the last page of before the start, and get that first.
    behind: u64,
    complete_since: u64,
    copies: CopyProgress,
}

/// A target that the superblocks are to list.
#[derive(Clone, Copy)]
struct JoinedMember {
    member: NewMember,
    /// All data is copied to it; otherwise the regions of the bitmap are.
    copies_all: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TaskRun {
    Idle,
    Running,
    /// There was more to do since the present pass began.
    RunningAndDue,
}

/// A member that joins a mirror.
#[derive(Clone, Copy)]
pub(crate) struct NewMember {
    pub(crate) place: usize,
    pub(crate) data_offset: u64,
    pub(crate) data_blocks: u64,
}

/// What a mirror starts with.
pub(crate) struct MirrorSetup {
    pub(crate) array: Arc<RaidArray>,
    pub(crate) bases: Arc<BaseSet>,
    pub(crate) parity: Option<ParityLayout>,
    pub(crate) accel: Accel,
    pub(crate) handle: ReactorHandle,
    pub(crate) geometry: BdevGeometry,
    pub(crate) ops: Vec<Op>,
    pub(crate) options: RaidOptions,
    /// Bits of its members, which all have the data.
    pub(crate) present: u64,
    /// The bitmaps of members, as far as they are to be believed.
    pub(crate) pages: Vec<IntentPage>,
    /// The highest generation of any bitmap of the array that was found.
    pub(crate) generation: u64,
    /// The bit of the member with the newest superblock and bitmap; 0 for any.
    pub(crate) newest: u64,
    /// Bits of members without the page of that generation.
    pub(crate) behind: u64,
    /// It was made just now.
    pub(crate) is_new: bool,
    /// The bitmap is to get the sequence number of the superblock, which is newer.
    pub(crate) is_page_due: bool,
}

impl Mirror {
    /// The first page of a bitmap, which has no bit set; `None` if the array has no room for one.
    pub(crate) fn first_page(superblock: &RaidSuperblock) -> Option<IntentPage> {
        let (region_shift, regions) =
            regions_of(parity_of(superblock), superblock.blocks, superblock.block_bytes);
        has_room_for_bitmap(superblock).then(|| IntentPage {
            array: superblock.uuid,
            sequence: superblock.sequence,
            complete_since: superblock.sequence,
            generation: 1,
            is_clean: true,
            region_shift,
            regions,
            bits: vec![0; (regions as usize).div_ceil(64)],
        })
    }

    pub(crate) fn new(setup: MirrorSetup) -> Arc<Mirror> {
        let MirrorSetup {
            array,
            bases,
            parity,
            accel,
            handle,
            geometry,
            ops,
            options,
            present,
            pages,
            generation,
            newest,
            behind,
            is_new,
            is_page_due,
        } = setup;
        let block_bytes = geometry.block_size;
        let (shift, count) = regions_of(parity, geometry.blocks, block_bytes);
        let blocks = rows_of(parity, geometry.blocks);
        let superblock = array.lock().superblock.clone();
        let is_persistent = superblock.as_ref().is_some_and(has_room_for_bitmap);
        let regions = RegionMap::new(shift, count, is_persistent);
        let is_of_regions = |page: &&IntentPage| page.region_shift == shift && page.regions == count;
        let pages: Vec<&IntentPage> = pages.iter().filter(is_of_regions).collect();
        let sequence = superblock.map_or(0, |superblock| superblock.sequence);
        let since = pages.iter().map(|page| page.complete_since).max().unwrap_or(sequence);
        let differ = can_differ(parity, present);
        if array.resyncs_all || (array.has_superblock && !is_new && pages.is_empty()) {
            regions.set_stale(&regions.all(), differ);
        } else {
            pages.iter().for_each(|page| regions.set_stale(&page.bits, differ));
        }
        let is_page_due = is_persistent && (is_page_due || behind != 0 || !regions.to_copy().is_empty());
        let meta = MetaState {
            run: TaskRun::Idle,
            lost: Vec::new(),
            targets: 0,
            unsettled: 0,
            joined: Vec::new(),
            promoted: 0,
            is_page_due,
            clean_due: None,
            is_timer_set: false,
            seen: Vec::new(),
            passes: 0,
            generation,
            marked: regions.marks(),
            behind,
            complete_since: since,
            copies: CopyProgress::default(),
        };
        Arc::new(Mirror {
            array,
            parity,
            accel,
            busy: BusyStripes::new(),
            bases,
            handle,
            block_bytes,
            blocks,
            ops,
            options,
            newest,
            in_sync: AtomicU64::new(present),
            recorded: AtomicU64::new(present),
            regions,
            failures: AtomicU64::new(0),
            repairs: AtomicU64::new(0),
            meta: Mutex::new(meta),
            changed: Condvar::new(),
            device: OnceLock::new(),
        })
    }

    /// Begins to write the bitmap and to copy, when the device is registered.
    pub(crate) fn start(self: &Arc<Self>, device: &Arc<BlockDevice>, registry: &Registry) {
        // It starts once.
        _ = self.device.set((Arc::downgrade(device), registry.clone()));
        let is_page_due = self.meta().is_page_due;
        if is_page_due {
            self.schedule();
        }
        self.restart_copies();
    }

    pub(crate) fn open(self: &Arc<Self>, core: &Core, channels: BaseChannels, depth: u32) -> BoxedChannel {
        match self.parity {
            None => Box::new(MirrorChannel::new(self.clone(), channels, depth)),
            Some(layout) => Box::new(ParityChannel::new(self.clone(), layout, channels, core, depth)),
        }
    }

    pub(crate) fn parity(&self) -> Option<ParityLayout> {
        self.parity
    }

    /// Least members with all data.
    fn members_min(&self) -> u32 {
        self.parity.map_or(1, |layout| layout.members() as u32 - 1)
    }

    /// Bits of all places.
    fn all_places(&self) -> u64 {
        let places = self.places();
        if places == 64 { u64::MAX } else { (1 << places) - 1 }
    }

    pub(crate) fn places(&self) -> usize {
        self.bases.places()
    }

    #[inline]
    pub(crate) fn in_sync(&self) -> u64 {
        self.in_sync.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn recorded(&self) -> u64 {
        self.recorded.load(Ordering::Acquire)
    }

    /// The bit of the one of some members from which regions are read and copied that may differ; 0 of none.
    #[inline]
    fn first_of(&self, members: u64) -> u64 {
        match members & self.newest {
            0 => members & members.wrapping_neg(),
            newest => newest,
        }
    }

    #[inline]
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    #[inline]
    fn regions(&self) -> &RegionMap {
        &self.regions
    }

    fn meta(&self) -> MutexGuard<'_, MetaState> {
        // Each change is whole before anything can panic.
        sync::lock(&self.meta)
    }

    /// A member has failed a write.
    #[cold]
    fn fail(self: &Arc<Self>, place: usize) {
        // A write of before the member came, which another has failed. What it is without is copied.
        if self.meta().unsettled >> place & 1 == 0 {
            self.lose(place, MemberState::Failed);
        }
    }

    /// A member has failed or gone. `false` if there is no array without it: then it stays one with all data.
    pub(crate) fn lose(self: &Arc<Self>, place: usize, state: MemberState) -> bool {
        let bit = 1 << place;
        let mut meta = self.meta();
        let in_sync = self.in_sync();
        if in_sync & bit != 0 {
            let rest = in_sync & !bit;
            if rest.count_ones() < self.members_min() {
                return false;
            }
            self.in_sync.store(rest, Ordering::Release);
            if self.parity.is_none() && !can_differ(None, rest) {
                // What the member lacks stays stale, and is copied to it when it returns. A parity that is
                // not made yet says nothing of a member that is missing, and stays marked.
                self.regions.clear_differing();
            }
        } else if meta.targets & bit == 0 {
            return true;
        }
        meta.targets &= !bit;
        meta.unsettled &= !bit;
        meta.promoted &= !bit;
        meta.joined.retain(|joined| joined.member.place != place);
        meta.lost.push((place, state));
        drop(meta);
        let name = self.array.name.as_str();
        log::warn!(target: "bdev_raid", "the array {name} does without its member in slot {place}");
        self.schedule();
        self.restart_copies();
        true
    }

    /// Whether a place has a member, also one whose loss is not recorded.
    pub(crate) fn has_member(&self, place: usize) -> bool {
        let meta = self.meta();
        let is_lost = meta.lost.iter().any(|(lost, _)| *lost == place);
        is_lost || self.bases.base(place).is_some()
    }

    /// UUIDs of the members with all data.
    pub(crate) fn in_sync_uuids(&self) -> Vec<Uuid> {
        let in_sync = self.in_sync();
        let state = self.array.lock();
        let has_data = |(place, _): &(usize, &ArraySlot)| in_sync >> place & 1 != 0;
        state.slots.iter().enumerate().filter(has_data).map(|(_, slot)| slot.uuid).collect()
    }

    /// An operation that the array supports, and a device does not.
    pub(crate) fn lacks_op(&self, device: &BlockDevice) -> Option<Op> {
        self.ops.iter().copied().find(|op| !device.bdev().supports(*op))
    }

    /// Takes a member, which gets writes from now on and is copied to: what it lacks, if it returns and that
    /// is known.
    ///
    /// # Errors
    /// The place has a member.
    pub(crate) fn join(
        self: &Arc<Self>,
        base: BaseBdev,
        member: NewMember,
        found: Option<&MemberOnDisk>,
    ) -> Result<(), RaidError> {
        let (place, bit) = (member.place, 1 << member.place);
        let no_slot = || RaidError::NoFreeSlot { name: self.array.name.clone() };
        if self.has_member(place) {
            return Err(no_slot());
        }
        let device = base.device().clone();
        let (since, generation) = {
            let meta = self.meta();
            (meta.complete_since, meta.generation)
        };
        let known = found.and_then(|found| {
            let page = found.page.as_ref()?;
            let is_ours = page.array == self.array.uuid && page.sequence == found.superblock.sequence;
            let is_complete = found.superblock.sequence >= since && is_same_era(page.generation, generation);
            let fits =
                page.region_shift == self.regions.shift() && page.bits.len() == self.regions.all().len();
            (self.regions.is_persistent() && is_ours && is_complete && fits && !self.array.resyncs_all)
                .then_some(page)
        });
        match known {
            // The rest is in the bitmap.
            Some(page) => self.regions.set_stale(&page.bits, false),
            None => self.regions.set_stale(&self.regions.all(), false),
        }
        let all = if known.is_some() { "what it lacks" } else { "all data" };
        let (name, own) = (device.name().to_string(), &self.array.name);
        log::info!(target: "bdev_raid", "{name} joins the array {own} in slot {place}: {all} is copied to it");
        {
            let mut state = self.array.lock();
            let slot = &mut state.slots[place];
            (slot.name, slot.uuid) = (Some(name), device.uuid());
            (slot.data_offset, slot.is_configured) = (member.data_offset, true);
        }
        {
            let mut meta = self.meta();
            meta.targets |= bit;
            meta.unsettled |= bit;
        }
        if self.bases.insert(place, base).is_err() {
            self.lose(place, MemberState::Missing);
            return Err(no_slot());
        }
        // It gets the superblock that lists it.
        self.meta().joined.push(JoinedMember { member, copies_all: known.is_none() });
        self.schedule();
        self.restart_copies();
        Ok(())
    }

    /// The end of the use of a place's member, which is to be lost.
    pub(crate) fn closing(&self, place: usize) -> Closing {
        self.bases.base(place).map_or_else(Closing::default, |base| base.closing())
    }

    /// Blocks until a place has no member; `false` after `timeout`. Not for reactors.
    pub(crate) fn wait_removed(&self, place: usize, timeout: Duration) -> bool {
        let is_removed = |meta: &mut MetaState| {
            let is_lost = meta.lost.iter().any(|(lost, _)| *lost == place);
            (!is_lost && self.bases.base(place).is_none()).then_some(())
        };
        reactor::blocking::wait_until(&self.meta, &self.changed, timeout, is_removed).is_ok()
    }

    /// Marks the members clean, as far as no writes are in flight; blocks until then, for `timeout` at most.
    /// Not for reactors.
    pub(crate) fn clean_now(self: &Arc<Self>, timeout: Duration) {
        if !self.regions.is_persistent() {
            return;
        }
        let mut meta = self.meta();
        meta.clean_due = Some(true);
        let before = meta.passes;
        let is_busy = meta.run != TaskRun::Idle;
        drop(meta);
        self.schedule();
        // The present pass may have begun before.
        let enough = before + 1 + u64::from(is_busy);
        let is_done =
            |meta: &mut MetaState| (meta.passes >= enough && meta.clean_due.is_none()).then_some(());
        if reactor::blocking::wait_until(&self.meta, &self.changed, timeout, is_done).is_err() {
            let name = self.array.name.as_str();
            log::warn!(target: "bdev_raid", "the array {name} could not be marked clean in time");
        }
    }

    /// Writes wait for their regions.
    #[cold]
    fn request_marks(self: &Arc<Self>) {
        self.meta().is_page_due = true;
        self.schedule();
    }

    fn device(&self) -> Option<Arc<BlockDevice>> {
        self.device.get().and_then(|(device, _)| device.upgrade())
    }

    /// What `driver_specific.raid` has of a mirror: SPDK's `process`, while members are copied to.
    pub(crate) fn describe(&self, state: &ArrayState) -> Vec<(&'static str, InfoValue)> {
        let meta = self.meta();
        let Some(progress) = meta.copies.progress() else { return Vec::new() };
        let targets =
            if meta.targets != 0 { meta.targets } else { self.in_sync() & !self.first_of(self.in_sync()) };
        let target = state.slots.get(targets.trailing_zeros() as usize);
        let target = target.and_then(|slot| slot.name.clone());
        let kind = if meta.targets != 0 { "rebuild" } else { "resync" };
        let percent = (progress.done * 100).checked_div(progress.total).unwrap_or(0);
        vec![(
            "process",
            InfoValue::Object(vec![
                ("type", kind.into()),
                ("target", target.map_or(InfoValue::Null, InfoValue::Text)),
                (
                    "progress",
                    InfoValue::Object(vec![
                        ("blocks", InfoValue::Number(progress.done)),
                        ("percent", InfoValue::Number(percent)),
                    ]),
                ),
            ]),
        )]
    }
}

/// Whether members with all data can have different versions of it.
fn can_differ(parity: Option<ParityLayout>, in_sync: u64) -> bool {
    match parity {
        None => in_sync.count_ones() > 1,
        // It is made of all data, and is all that is left of a member that is missing.
        Some(layout) => in_sync.count_ones() as usize == layout.members(),
    }
}

/// Where the blocks of an array are, if it has a parity and members enough.
fn parity_of(superblock: &RaidSuperblock) -> Option<ParityLayout> {
    let is_parity = superblock.level == RaidLevel::Raid5f;
    is_parity.then(|| ParityLayout::new(superblock.slots.into(), superblock.strip_blocks))
}

/// Rows of an array of `blocks`.
fn rows_of(parity: Option<ParityLayout>, blocks: u64) -> u64 {
    parity.map_or(blocks, |layout| blocks / layout.stripe_blocks() * layout.strip_blocks())
}

/// The binary logarithm of the rows of a region, which are whole stripes, and the number of regions.
fn regions_of(parity: Option<ParityLayout>, blocks: u64, block_bytes: u32) -> (u32, u32) {
    let strip_bytes = parity.map_or(0, |layout| layout.strip_blocks() * u64::from(block_bytes));
    IntentPage::regions_of(rows_of(parity, blocks), block_bytes, REGION_BYTES_MIN.max(strip_bytes))
}
