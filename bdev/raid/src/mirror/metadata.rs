//! What is written beside the data: superblocks when the members change, the bitmap when regions are written
//! or have become idle.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::AsyncChannel;
use block_io::Op;
use reactor::Core;
use wire_raid::{IntentPage, MemberState, RaidMember, RaidSuperblock};

use super::{JoinedMember, MetaState, Mirror, TaskRun};
use crate::member_age::next_generation;
use crate::on_disk::{MetadataWrite, page_write, superblock_write, wipe_pages, write_durably};

/// After this time without writes, a region leaves the bitmap; at most twice that.
const IDLE_NS: u64 = 5_000_000_000;

/// Neither superblocks nor bitmaps can be written to any member with all data.
struct NoMemberLeft;

impl Mirror {
    /// Wakes the task, which looks for work.
    pub(super) fn schedule(self: &Arc<Self>) {
        {
            let mut meta = self.meta();
            match meta.run {
                TaskRun::Idle => meta.run = TaskRun::Running,
                TaskRun::Running | TaskRun::RunningAndDue => {
                    meta.run = TaskRun::RunningAndDue;
                    return;
                }
            }
        }
        let mirror = self.clone();
        let start = move |core: &Core| {
            let (core_of_task, task) = (core.clone(), mirror.clone());
            if !core.spawn(async move { task.run(&core_of_task).await }) {
                mirror.cannot_run();
            }
        };
        if self.handle.post(start).is_err() {
            self.cannot_run();
        }
    }

    /// The core has stopped, or has too many tasks.
    fn cannot_run(&self) {
        self.meta().run = TaskRun::Idle;
        self.report_failure();
    }

    fn report_failure(&self) {
        self.failures.fetch_add(1, Ordering::AcqRel);
        self.bases.notify();
        self.changed.notify_all();
    }

    async fn run(self: Arc<Self>, core: &Core) {
        loop {
            if self.pass(core).await.is_err() {
                let name = self.array.name.as_str();
                log::error!(target: "bdev_raid", "no member of the array {name} takes its superblock or bitmap");
                self.report_failure();
            }
            let mut meta = self.meta();
            meta.passes += 1;
            let is_due = meta.run == TaskRun::RunningAndDue;
            meta.run = if is_due { TaskRun::Running } else { TaskRun::Idle };
            drop(meta);
            self.changed.notify_all();
            if !is_due {
                return;
            }
        }
    }

    /// Does the work that is due now.
    async fn pass(self: &Arc<Self>, core: &Core) -> Result<(), NoMemberLeft> {
        if self.bases.bases().is_empty() {
            // It is closed.
            return Ok(());
        }
        let change = MemberChange::take(&mut self.meta());
        if !change.is_empty() {
            self.record_members(core, change).await?;
        }
        if !self.regions.is_persistent() {
            return Ok(());
        }
        let clean_due = self.meta().clean_due.take();
        let cleaned = match clean_due {
            Some(at_once) => self.take_idle(core, at_once).await,
            None => Vec::new(),
        };
        let is_page_due = std::mem::take(&mut self.meta().is_page_due);
        if is_page_due || !cleaned.is_empty() {
            let written = self.write_page(core).await;
            if written.is_err() {
                self.regions.put_back(&cleaned);
                return written;
            }
        }
        self.set_timer(core);
        Ok(())
    }

    /// Writes superblocks that say who the members are now.
    async fn record_members(self: &Arc<Self>, core: &Core, change: MemberChange) -> Result<(), NoMemberLeft> {
        // From now on they are to have each write that is acknowledged.
        self.recorded.fetch_or(change.promoted, Ordering::AcqRel);
        let known = self.array.lock().superblock.clone();
        if let Some(known) = known {
            let superblock = change.apply(&known, |place| self.array.lock().slots[place].uuid);
            let is_full = change.joined.iter().any(|joined| joined.copies_all);
            let joined = change.joined.iter().filter(|_| self.regions.is_persistent());
            for joined in joined {
                // Of another array, or of before.
                let wiped = [wipe_pages(self.block_bytes)];
                self.write_to(core, 1 << joined.member.place, &wiped).await?;
            }
            self.write_to(core, u64::MAX, &[superblock_write(&superblock)]).await?;
            let has_data = |member: &RaidMember| member.state == MemberState::Configured;
            let mut meta = self.meta();
            if is_full || superblock.members.iter().all(has_data) {
                meta.complete_since = superblock.sequence;
            }
            meta.is_page_due = true;
            drop(meta);
            self.array.lock().superblock = Some(superblock);
        }
        {
            let mut meta = self.meta();
            // One that was lost meanwhile is recorded next.
            let promoted = change.promoted & meta.targets;
            meta.targets &= !promoted;
            if promoted != 0 && meta.targets == 0 {
                meta.copies.end();
            }
            self.in_sync.fetch_or(promoted, Ordering::AcqRel);
            let lost = change.lost.iter().fold(0, |bits, (place, _)| bits | 1 << place);
            self.recorded.fetch_and(!lost, Ordering::AcqRel);
        }
        for (place, _) in &change.lost {
            self.release(*place);
        }
        self.bases.notify();
        Ok(())
    }

    /// Lets go of a member whose loss is recorded.
    fn release(&self, place: usize) {
        let base = self.bases.remove(place);
        self.array.lock().slots[place].clear();
        self.meta().lost.retain(|(lost, _)| *lost != place);
        if let Some(base) = base
            && let (Some(device), Some((_, registry))) = (self.device(), self.device.get())
        {
            registry.unstack(base.device(), &device);
        }
    }

    /// Writes to the members of `places` that are there. One that fails is lost.
    ///
    /// # Errors
    /// No member with all data was written to, though one was meant.
    async fn write_to(
        self: &Arc<Self>,
        core: &Core,
        places: u64,
        writes: &[MetadataWrite],
    ) -> Result<(), NoMemberLeft> {
        let mut written = 0u64;
        for place in (0..self.places()).filter(|place| places >> place & 1 != 0) {
            let in_use = self.in_sync() | self.meta().targets;
            if in_use >> place & 1 == 0 {
                continue;
            }
            let Some(base) = self.bases.base(place) else { continue };
            let result = match base.channel(core) {
                Ok(channel) => {
                    let channel = AsyncChannel::new(core, channel);
                    write_durably(core, &channel, writes).await.map_err(|status| status.to_string())
                }
                Err(error) => Err(error.to_string()),
            };
            match result {
                Ok(()) => written |= 1 << place,
                Err(error) => {
                    let name = base.device().name();
                    log::warn!(target: "bdev_raid", "the superblock or bitmap of {name} is not written: {error}");
                    self.lose(place, MemberState::Failed);
                }
            }
        }
        let meant = places & self.in_sync();
        if meant != 0 && written & self.in_sync() == 0 { Err(NoMemberLeft) } else { Ok(()) }
    }

    /// Takes regions out of the bitmap that have been idle, once all members have them durably.
    async fn take_idle(self: &Arc<Self>, core: &Core, at_once: bool) -> Vec<usize> {
        let all = self.all_places();
        let taken = {
            let mut meta = self.meta();
            // What a missing member lacks is to stay.
            let is_whole = (self.in_sync() | meta.targets) == all;
            if !is_whole || !meta.lost.is_empty() || meta.unsettled != 0 {
                return Vec::new();
            }
            let mut seen = std::mem::take(&mut meta.seen);
            let taken = self.regions.take_idle(&mut seen, at_once);
            meta.seen = seen;
            taken
        };
        if taken.is_empty() {
            return taken;
        }
        if self.flush_all(core).await {
            return taken;
        }
        self.regions.put_back(&taken);
        Vec::new()
    }

    /// Flushes all members. `false` if one fails, which is lost.
    pub(super) async fn flush_all(self: &Arc<Self>, core: &Core) -> bool {
        let mut is_flushed = true;
        for place in 0..self.places() {
            let Some(base) = self.bases.base(place) else { continue };
            if !base.device().supports(Op::Flush) {
                continue;
            }
            let result = match base.channel(core) {
                Ok(channel) => AsyncChannel::new(core, channel).flush().await.is_ok(),
                Err(_) => false,
            };
            if !result {
                is_flushed = false;
                self.lose(place, MemberState::Failed);
            }
        }
        is_flushed
    }

    /// Writes the bitmap as it is now to all members.
    async fn write_page(self: &Arc<Self>, core: &Core) -> Result<(), NoMemberLeft> {
        let Some(sequence) = self.array.lock().superblock.as_ref().map(|superblock| superblock.sequence)
        else {
            return Ok(());
        };
        let marks = self.regions.marks();
        let (page, behind) = {
            let meta = self.meta();
            let drops = meta.marked.iter().zip(&marks).any(|(before, now)| before & !now != 0);
            let page = IntentPage {
                array: self.array.uuid,
                sequence,
                complete_since: meta.complete_since,
                generation: next_generation(meta.generation, drops),
                is_clean: marks.iter().all(|word| *word == 0),
                region_shift: self.regions.shift(),
                regions: self.regions.len() as u32,
                bits: marks.clone(),
            };
            let (generation, bits) = (meta.generation, meta.marked.clone());
            let is_clean = bits.iter().all(|word| *word == 0);
            let behind = IntentPage { generation, bits, is_clean, ..page.clone() };
            (page, behind)
        };
        let places_behind = std::mem::take(&mut self.meta().behind) & self.in_sync();
        if places_behind != 0 {
            // The next one would leave them two behind if a crash cuts it, too.
            self.write_to(core, places_behind, &[page_write(&behind, self.block_bytes)]).await?;
        }
        self.write_to(core, u64::MAX, &[page_write(&page, self.block_bytes)]).await?;
        {
            let mut meta = self.meta();
            (meta.generation, meta.marked) = (page.generation, page.bits);
        }
        self.regions.set_stored(&marks);
        self.bases.notify();
        Ok(())
    }

    /// Looks for idle regions after a while, if there may be any.
    fn set_timer(self: &Arc<Self>, core: &Core) {
        if !self.regions.has_stored() || std::mem::replace(&mut self.meta().is_timer_set, true) {
            return;
        }
        let (mirror, core_of_task) = (Arc::downgrade(self), core.clone());
        core.spawn(async move {
            core_of_task.sleep_ns(IDLE_NS).await;
            if let Some(mirror) = mirror.upgrade() {
                let mut meta = mirror.meta();
                meta.is_timer_set = false;
                meta.clean_due.get_or_insert(false);
                drop(meta);
                mirror.schedule();
            }
        });
    }
}

/// A change of the members that is to be recorded.
struct MemberChange {
    lost: Vec<(usize, MemberState)>,
    joined: Vec<JoinedMember>,
    promoted: u64,
}

impl MemberChange {
    /// Takes the work that is due; lost members stay listed until their loss is recorded.
    fn take(meta: &mut MetaState) -> MemberChange {
        MemberChange {
            lost: meta.lost.clone(),
            joined: std::mem::take(&mut meta.joined),
            promoted: std::mem::take(&mut meta.promoted),
        }
    }

    fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.joined.is_empty() && self.promoted == 0
    }

    /// The next superblock.
    fn apply(&self, known: &RaidSuperblock, uuid_of: impl Fn(usize) -> wire_raid::Uuid) -> RaidSuperblock {
        let mut next = known.clone();
        next.sequence += 1;
        for (place, state) in &self.lost {
            let of_place = |member: &&mut RaidMember| usize::from(member.slot) == *place;
            if let Some(member) = next.members.iter_mut().find(of_place)
                && member.state == MemberState::Configured
            {
                member.state = *state;
            }
        }
        for joined in self.joined.iter().map(|joined| joined.member) {
            next.members.retain(|member| usize::from(member.slot) != joined.place);
            next.members.push(RaidMember {
                uuid: uuid_of(joined.place),
                data_offset: joined.data_offset,
                data_blocks: joined.data_blocks,
                state: MemberState::Missing,
                slot: joined.place as u8,
            });
        }
        next.members.sort_by_key(|member| member.slot);
        for member in &mut next.members {
            if self.promoted >> member.slot & 1 != 0 {
                member.state = MemberState::Configured;
            }
        }
        next
    }
}
