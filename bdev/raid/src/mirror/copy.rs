//! Copies between members: to those that have returned or replace others, after a crash, and of what could
//! not be read.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::stacking::{BaseBdev, LockedRange};
use bdev::{AsyncChannel, BlockDevice, Request};
use block_io::{Status, Tag};
use dma::Data;
use reactor::Core;
use wire_raid::MemberState;

use super::xor::XorEngine;
use super::{Mirror, REPAIRS_MAX};
use crate::on_disk::BUFFER_RECHECK_NS;
use crate::parity_layout::ParityLayout;

/// Interval of the checks for a range lock, which no event announces.
const LOCK_RECHECK_NS: u64 = 20_000;
/// Longest wait of a copy without a look whether it is to end.
const TURN_NS: u64 = 50_000_000;
/// Most that is copied at a time, whatever the options say: writes of the range wait, and it needs memory.
const WINDOW_BYTES_MAX: u64 = 8 << 20;

/// The copies of a mirror: one task at a time, which has all to do that there is.
#[derive(Default)]
pub(super) struct CopyProgress {
    /// The number of the last task: an older one that still runs does nothing more.
    round: u64,
    is_running: bool,
    /// The array has gone: no copy starts.
    is_closed: bool,
    total: u64,
    done: u64,
}

/// How far a copy is, in blocks.
pub(super) struct Progress {
    pub(super) done: u64,
    pub(super) total: u64,
}

impl CopyProgress {
    /// What was copied is recorded.
    pub(super) fn end(&mut self) {
        self.is_running = false;
    }

    /// `None` if nothing is copied.
    pub(super) fn progress(&self) -> Option<Progress> {
        self.is_running.then_some(Progress { done: self.done, total: self.total })
    }
}

/// Why a copy ends.
enum CopyEnd {
    /// Another one has what is left to do, or the array has gone.
    Superseded,
    /// A range cannot be read from any member.
    Unreadable(Status),
    /// The machine has no range locks.
    NoLocks,
}

impl Mirror {
    /// Whether members are copied to.
    pub(crate) fn is_copying(&self) -> bool {
        self.meta().copies.is_running
    }

    /// Copies all stale regions, from the first that is left.
    pub(super) fn restart_copies(self: &Arc<Self>) {
        let round = {
            let mut meta = self.meta();
            meta.copies.round += 1;
            let has_work = meta.targets != 0 || self.regions.differing() > 0;
            meta.copies.is_running = has_work && !meta.copies.is_closed;
            (meta.copies.done, meta.copies.total) = (0, 0);
            if !meta.copies.is_running {
                return;
            }
            meta.copies.round
        };
        let mirror = self.clone();
        let start = move |core: &Core| {
            let core_of_task = core.clone();
            core.spawn(async move { mirror.copy(&core_of_task, round).await });
        };
        if self.handle.post(start).is_err() {
            self.meta().copies.is_running = false;
        }
    }

    /// Ends copies: the array has gone.
    pub(crate) fn end_copies(&self) {
        let mut meta = self.meta();
        meta.copies.round += 1;
        (meta.copies.is_running, meta.copies.is_closed) = (false, true);
    }

    fn runs(&self, round: u64) -> bool {
        self.meta().copies.round == round
    }

    async fn copy(self: Arc<Self>, core: &Core, round: u64) {
        let end = self.copy_all(core, round).await;
        let mut meta = self.meta();
        if meta.copies.round != round {
            return;
        }
        let targets = meta.targets;
        // Otherwise it ends when the targets are recorded as members with all data.
        meta.copies.is_running = end.is_ok() && targets != 0;
        let name = self.array.name.as_str();
        match end {
            Ok(()) => {
                meta.promoted |= targets;
                drop(meta);
                log::info!(target: "bdev_raid", "all members of the array {name} that are there have all data");
                self.schedule();
            }
            Err(CopyEnd::Superseded) => {}
            Err(CopyEnd::NoLocks) => {
                log::warn!(target: "bdev_raid", "{name} is not copied: the machine has no membarrier for range locks");
            }
            Err(CopyEnd::Unreadable(status)) => {
                drop(meta);
                log::warn!(target: "bdev_raid", "the copy of {name} has ended early: a member with all data cannot be read ({status})");
                for place in (0..self.places()).filter(|place| targets >> place & 1 != 0) {
                    self.lose(place, MemberState::Missing);
                }
            }
        }
    }

    async fn copy_all(self: &Arc<Self>, core: &Core, round: u64) -> Result<(), CopyEnd> {
        let device = self.device().ok_or(CopyEnd::Superseded)?;
        self.settle(core, &device, round).await?;
        let runs = self.runs_to_copy();
        let total = runs.iter().map(|run| self.blocks_of(run).end - self.blocks_of(run).start).sum();
        self.meta().copies.total = total;
        let window_bytes = u64::from(self.options.process_window_size_kb) * 1024;
        // With a parity, of all members together.
        let sources = if self.parity.is_some() { self.places() as u64 } else { 1 };
        let window_bytes = window_bytes.min(WINDOW_BYTES_MAX) / sources;
        let window = window_bytes.div_ceil(self.block_bytes.into()).max(1);
        let mut pace = CopyPace::new(self.options.process_max_bandwidth_mb_sec, core.now_ns());
        let mut channels = MemberChannels::new(self, core);
        for run in runs {
            let Range { start, end } = self.blocks_of(&run);
            let mut next = run.start;
            // The same of all regions of the run, until they are copied.
            let differs = self.regions.differs(run.start);
            for lba in (start..end).step_by(window as usize) {
                let blocks = window.min(end - lba);
                let bytes = blocks * u64::from(self.block_bytes);
                self.wait_turn(core, pace.wait_ns(core.now_ns(), bytes), round).await?;
                let locked = self.lock(core, &device, lba..lba + blocks, round).await?;
                match self.parity {
                    None => {
                        let sources = self.in_sync();
                        let source = self.first_of(sources);
                        let others = if differs { sources & !source } else { 0 };
                        let sides = (sources, self.meta().targets | others);
                        self.copy_range(core, &mut channels, lba, blocks as u32, sides).await?;
                    }
                    Some(layout) => {
                        let rows = lba..lba + blocks;
                        self.copy_rows(core, &mut channels, layout, rows, differs).await?;
                    }
                }
                if !self.runs(round) {
                    return Err(CopyEnd::Superseded);
                }
                let is_everywhere = !self.regions.is_persistent() || self.has_all_members();
                while next < run.end && self.blocks_of(&(next..next + 1)).end <= lba + blocks {
                    self.regions.copied(next, is_everywhere);
                    next += 1;
                }
                drop(locked);
                self.meta().copies.done += blocks;
            }
        }
        drop(channels);
        // Before it counts as a member: writes that were completed are its.
        self.flush_all(core).await;
        if self.runs(round) { Ok(()) } else { Err(CopyEnd::Superseded) }
    }

    /// Runs of regions that are to be copied, in the same way.
    fn runs_to_copy(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for region in self.regions.to_copy() {
            match runs.last_mut() {
                Some(last)
                    if last.end == region
                        && self.regions.differs(last.start) == self.regions.differs(region) =>
                {
                    last.end += 1;
                }
                _ => runs.push(region..region + 1),
            }
        }
        runs
    }

    /// Waits in short turns, so that a member can go meanwhile.
    async fn wait_turn(&self, core: &Core, wait_ns: u64, round: u64) -> Result<(), CopyEnd> {
        let end_ns = core.now_ns() + wait_ns;
        while core.now_ns() < end_ns {
            core.sleep_ns((end_ns - core.now_ns()).min(TURN_NS)).await;
            if !self.runs(round) {
                return Err(CopyEnd::Superseded);
            }
        }
        Ok(())
    }

    /// The rows of a run of regions.
    fn blocks_of(&self, run: &Range<usize>) -> Range<u64> {
        let blocks = match self.parity {
            // It may have shrunk.
            None => self.device().map_or(self.blocks, |device| device.geometry().blocks.min(self.blocks)),
            Some(_) => self.blocks,
        };
        self.regions.blocks_of(run.start, blocks).start..self.regions.blocks_of(run.end - 1, blocks).end
    }

    fn has_all_members(&self) -> bool {
        let meta = self.meta();
        let present = self.in_sync() | meta.targets;
        meta.lost.is_empty() && present.count_ones() as usize == self.places()
    }

    /// Waits until every write of before the members came has ended. What the bitmap has then is what they
    /// may lack.
    async fn settle(&self, core: &Core, device: &Arc<BlockDevice>, round: u64) -> Result<(), CopyEnd> {
        let unsettled = self.meta().unsettled;
        if unsettled == 0 {
            return Ok(());
        }
        let locked = self.lock(core, device, 0..self.blocks.max(1), round).await?;
        // Nothing is taken out of the bitmap meanwhile.
        if self.regions.is_persistent() {
            self.regions.set_stale(&self.regions.marks(), false);
        }
        self.meta().unsettled &= !unsettled;
        drop(locked);
        Ok(())
    }

    /// Keeps writes from some rows, of which there is one at least.
    async fn lock(
        &self,
        core: &Core,
        device: &Arc<BlockDevice>,
        rows: Range<u64>,
        round: u64,
    ) -> Result<LockedRange, CopyEnd> {
        let range = self.parity.map_or(rows.clone(), |layout| layout.blocks_of_rows(&rows));
        if !bdev::supports_fused() {
            return Err(CopyEnd::NoLocks);
        }
        let mut locked = None;
        while self.runs(round) {
            if locked.is_none() {
                locked = device.lock_range(range.clone());
            }
            match locked.take() {
                Some(granted) if granted.is_granted() => return Ok(granted),
                waiting => locked = waiting,
            }
            core.sleep_ns(LOCK_RECHECK_NS).await;
        }
        Err(CopyEnd::Superseded)
    }

    /// Reads a range from one of the `sources`, and writes it to the `targets`. One that cannot be written is
    /// lost.
    async fn copy_range(
        self: &Arc<Self>,
        core: &Core,
        channels: &mut MemberChannels<'_>,
        lba: u64,
        blocks: u32,
        (sources, targets): (u64, u64),
    ) -> Result<(), CopyEnd> {
        if targets == 0 {
            return Ok(());
        }
        let mut data = loop {
            match core.pool().take_data(blocks as usize * self.block_bytes as usize) {
                Some(data) => break data,
                None => core.sleep_ns(BUFFER_RECHECK_NS).await,
            }
        };
        let mut result = Err(Status::INTERNAL_PATH_ERROR);
        let first = self.first_of(sources);
        let places = (0..self.places()).filter(|place| (sources & !first) >> place & 1 != 0);
        let first = (first != 0).then(|| first.trailing_zeros() as usize);
        for place in first.into_iter().chain(places) {
            let (status, returned) = channels.submit(place, Request::read(Tag(0), lba, blocks, data)).await;
            let Some(returned) = returned else { return Err(CopyEnd::Superseded) };
            data = returned;
            result = if status.is_success() { Ok(()) } else { Err(status) };
            if result.is_ok() {
                break;
            }
        }
        result.map_err(CopyEnd::Unreadable)?;
        for place in (0..self.places()).filter(|place| targets >> place & 1 != 0) {
            let (status, returned) = channels.submit(place, Request::write(Tag(0), lba, blocks, data)).await;
            let Some(returned) = returned else { return Err(CopyEnd::Superseded) };
            data = returned;
            if !status.is_success() {
                self.lose(place, MemberState::Failed);
            }
        }
        Ok(())
    }

    /// Makes some rows of members that are copied to, and their parity anew where it may be of other data.
    async fn copy_rows(
        self: &Arc<Self>,
        core: &Core,
        channels: &mut MemberChannels<'_>,
        layout: ParityLayout,
        rows: Range<u64>,
        differs: bool,
    ) -> Result<(), CopyEnd> {
        let targets = self.meta().targets;
        for place in (0..self.places()).filter(|place| targets >> place & 1 != 0) {
            self.make_rows(core, channels, rows.clone(), place).await?;
        }
        let mut next = rows.start;
        while differs && targets == 0 && next < rows.end && self.in_sync() == self.all_places() {
            let stripe = layout.stripe_of_row(next);
            let end = layout.rows_of(stripe).end.min(rows.end);
            self.make_rows(core, channels, next..end, layout.parity_place(stripe)).await?;
            next = end;
        }
        Ok(())
    }

    /// Writes the exclusive or of all other members to one. If it cannot be written, it is lost.
    async fn make_rows(
        self: &Arc<Self>,
        core: &Core,
        channels: &mut MemberChannels<'_>,
        rows: Range<u64>,
        target: usize,
    ) -> Result<(), CopyEnd> {
        let sources = self.in_sync() & !(1 << target);
        if sources != self.all_places() & !(1 << target) {
            return Err(CopyEnd::Unreadable(Status::INTERNAL_PATH_ERROR));
        }
        let blocks = (rows.end - rows.start) as u32;
        let bytes = blocks as usize * self.block_bytes as usize;
        let count = self.places();
        let mut memory: Vec<Data> = loop {
            // All or none: what others wait for is not kept.
            let taken: Vec<Data> = (0..count).map_while(|_| core.pool().take_data(bytes)).collect();
            if taken.len() == count {
                break taken;
            }
            drop(taken);
            core.sleep_ns(BUFFER_RECHECK_NS).await;
        };
        let Some(mut result) = memory.pop() else { return Err(CopyEnd::Superseded) };
        let mut read = Vec::with_capacity(count);
        for (place, data) in (0..self.places()).filter(|place| *place != target).zip(memory) {
            let request = Request::read(Tag(0), rows.start, blocks, data);
            let (status, returned) = channels.submit(place, request).await;
            if !status.is_success() {
                return Err(CopyEnd::Unreadable(status));
            }
            read.extend(returned);
        }
        let mut engine = XorEngine::new(self.accel.channel(core.index()));
        if engine.xor(&mut result, read.iter()).is_err() {
            return Err(CopyEnd::Unreadable(Status::INTERNAL_ERROR));
        }
        let request = Request::write(Tag(0), rows.start, blocks, result);
        let (status, _) = channels.submit(target, request).await;
        if !status.is_success() {
            self.lose(target, MemberState::Failed);
        }
        Ok(())
    }

    /// Writes what was read from other members to members that have failed to read it.
    #[cold]
    pub(super) fn repair(self: &Arc<Self>, lba: u64, blocks: u32, failed: u64) {
        if self.repairs.fetch_add(1, Ordering::AcqRel) >= REPAIRS_MAX {
            self.repairs.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let mirror = self.clone();
        let start = move |core: &Core| {
            let core_of_task = core.clone();
            core.spawn(async move {
                mirror.repair_range(&core_of_task, lba, blocks, failed).await;
                mirror.repairs.fetch_sub(1, Ordering::AcqRel);
            });
        };
        if self.handle.post(start).is_err() {
            self.repairs.fetch_sub(1, Ordering::AcqRel);
        }
    }

    async fn repair_range(self: &Arc<Self>, core: &Core, lba: u64, blocks: u32, failed: u64) {
        let Some(device) = self.device() else { return };
        let round = self.meta().copies.round;
        // A copy that begins meanwhile is as good, and the next read asks for the repair otherwise.
        let Ok(locked) = self.lock(core, &device, lba..lba + u64::from(blocks), round).await else { return };
        let in_sync = self.in_sync();
        let sides = (in_sync & !failed, in_sync & failed);
        let name = self.array.name.as_str();
        let mut channels = MemberChannels::new(self, core);
        let repaired = match self.parity {
            None => self.copy_range(core, &mut channels, lba, blocks, sides).await,
            Some(_) if sides.1 == 0 => Ok(()),
            Some(_) => {
                let rows = lba..lba + u64::from(blocks);
                self.make_rows(core, &mut channels, rows, sides.1.trailing_zeros() as usize).await
            }
        };
        match repaired {
            Ok(()) => {
                log::warn!(target: "bdev_raid", "{blocks} blocks at {lba} of {name} are written again to the member that could not read them")
            }
            Err(_) => {
                log::warn!(target: "bdev_raid", "{blocks} blocks at {lba} of {name} cannot be written again to the member that could not read them")
            }
        }
        drop(locked);
    }
}

/// The channels of a copy to members, opened when they are first used.
struct MemberChannels<'a> {
    mirror: &'a Mirror,
    core: &'a Core,
    open: Vec<Option<(Arc<BaseBdev>, AsyncChannel)>>,
}

impl MemberChannels<'_> {
    fn new<'a>(mirror: &'a Mirror, core: &'a Core) -> MemberChannels<'a> {
        MemberChannels { mirror, core, open: (0..mirror.places()).map(|_| None).collect() }
    }

    /// Submits a request to the member in a place. Returns its status and its data.
    async fn submit(&mut self, place: usize, mut request: Request) -> (Status, Option<Data>) {
        let base = self.mirror.bases.base(place);
        let is_open = match (&self.open[place], &base) {
            (Some((open, _)), Some(base)) => Arc::ptr_eq(open, base),
            _ => false,
        };
        if !is_open {
            let channel = base.and_then(|base| {
                let channel = base.channel(self.core).ok()?;
                Some((base, AsyncChannel::new(self.core, channel)))
            });
            self.open[place] = channel;
        }
        let Some((base, channel)) = &self.open[place] else {
            return (Status::INTERNAL_PATH_ERROR, request.take_data());
        };
        request.lba += base.first_lba();
        let completion = channel.submit(request).await;
        (completion.status(), completion.into_request().take_data())
    }
}

/// Keeps a copy to its bandwidth, without bursts.
struct CopyPace {
    bytes_per_second: u64,
    next_ns: u64,
}

impl CopyPace {
    fn new(mib_per_second: u32, now_ns: u64) -> CopyPace {
        CopyPace { bytes_per_second: u64::from(mib_per_second) << 20, next_ns: now_ns }
    }

    /// How long to wait before the next `bytes`.
    fn wait_ns(&mut self, now_ns: u64, bytes: u64) -> u64 {
        if self.bytes_per_second == 0 {
            return 0;
        }
        let start = self.next_ns.max(now_ns);
        let takes_ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        self.next_ns = start + takes_ns as u64;
        start - now_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_to_its_bandwidth_from_the_first_window_on() {
        let mut pace = CopyPace::new(1, 1000);
        assert_eq!(pace.wait_ns(1000, 1 << 20), 0);
        assert_eq!(pace.wait_ns(1000, 1 << 20), 1_000_000_000);
        // A disk that was slower does not catch up.
        assert_eq!(pace.wait_ns(9_000_000_000, 1 << 19), 0);
        assert_eq!(pace.wait_ns(9_000_000_000, 1), 500_000_000);
        assert_eq!(CopyPace::new(0, 0).wait_ns(0, u64::MAX), 0);
    }
}
