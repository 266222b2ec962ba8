//! What the channels of a store, on any core, share with its owner: the metadata that it has published, and
//! which of them use older metadata.
//!
//! What is published is an immutable [`BlobStore`] with a number, its epoch. A channel looks for a newer one
//! before each batch, which costs a load while there is none. A cluster that is free in it is used again when
//! no channel has I/O in flight by an older one: each channel publishes the oldest epoch of its I/O
//! ([`ChannelSeat`]). Before a snapshot is made of a volume, its writes pause: each channel publishes how
//! many it has in flight. Both are a store before I/O begins and a load of what the owner has published; the
//! owner stores first and loads after [`os::barrier::heavy`], so that one of both sees the other.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use bdev::stacking::BaseBdev;
use blobstore::{BlobId, BlobStore, ChangeId};
use reactor::MailboxSender;

use crate::chain_end::external_text;
use crate::owner::OwnerMessage;

/// No I/O in flight.
const IDLE: u64 = u64::MAX;

/// What the channels of all volumes of a store share.
pub(crate) struct StoreShared {
    /// Number of what is published.
    epoch: AtomicU64,
    published: Mutex<Arc<BlobStore>>,
    seats: Mutex<Vec<Arc<ChannelSeat>>>,
    /// The owner waits until writes have ended.
    is_awaited: AtomicBool,
    /// `None` of a store that is only read.
    owner: OnceLock<MailboxSender<OwnerMessage>>,
    /// The owner takes no messages any more.
    is_closed: AtomicBool,
    /// Counts changes of cluster maps that were written, and those of them that are durable.
    maps_written: AtomicU64,
    maps_durable: AtomicU64,
    /// The open external snapshots, by the name that is stored: of every volume that reads it.
    externals: Mutex<BTreeMap<String, Vec<Weak<BaseBdev>>>>,
    volumes: Mutex<BTreeMap<BlobId, Weak<VolumeShared>>>,
    /// Of a store that can be changed: free clusters, those included that are not cleared yet.
    free_clusters: AtomicU32,
    /// Percent of all clusters: with fewer free ones, the log has a warning. 0 for none.
    low_space_percent: AtomicU32,
    /// A channel was closed for which the owner prepares clusters.
    has_abandoned: AtomicBool,
}

/// What the channels of one volume share.
pub(crate) struct VolumeShared {
    pub(crate) blob: BlobId,
    pub(crate) store: Arc<StoreShared>,
    /// No write may begin.
    is_paused: AtomicBool,
    seats: Mutex<Vec<Arc<ChannelSeat>>>,
}

/// What the owner knows of a channel.
pub(crate) struct ChannelSeat {
    /// The oldest epoch of I/O in flight.
    oldest_epoch: AtomicU64,
    writes_in_flight: AtomicU64,
    waker: os::Waker,
    replies: MailboxSender<ChannelMessage>,
    /// The channel is closed.
    is_abandoned: AtomicBool,
}

/// A message of the owner to a channel about a cluster of its volume, by the index in the volume.
#[derive(Debug)]
pub(crate) enum ChannelMessage {
    /// The data of the first write is to be written to the new cluster, which begins at this offset of the
    /// store's device. [`OwnerMessage::Written`] follows.
    Write { index: u32, change: ChangeId, offset: u64 },
    /// The cluster map is written, or the change has failed. Otherwise: whether the data was written, or it
    /// is to be written to a cluster that is there now.
    Done { index: u32, result: Result<bool, block_io::Status> },
}

impl StoreShared {
    pub(crate) fn new(published: Arc<BlobStore>) -> Arc<StoreShared> {
        Arc::new(StoreShared {
            epoch: AtomicU64::new(0),
            published: Mutex::new(published),
            seats: Mutex::default(),
            is_awaited: AtomicBool::new(false),
            owner: OnceLock::new(),
            is_closed: AtomicBool::new(false),
            maps_written: AtomicU64::new(0),
            maps_durable: AtomicU64::new(0),
            externals: Mutex::default(),
            volumes: Mutex::default(),
            free_clusters: AtomicU32::new(0),
            low_space_percent: AtomicU32::new(0),
            has_abandoned: AtomicBool::new(false),
        })
    }

    /// The newest metadata.
    pub(crate) fn published(&self) -> Arc<BlobStore> {
        sync::lock(&self.published).clone()
    }

    /// The epoch of the newest metadata.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The newest metadata, and its epoch.
    pub(crate) fn newest(&self) -> (u64, Arc<BlobStore>) {
        let published = sync::lock(&self.published);
        (self.epoch.load(Ordering::Acquire), published.clone())
    }

    /// Publishes metadata to all channels.
    pub(crate) fn publish(&self, epoch: u64, new: Arc<BlobStore>) {
        let mut published = sync::lock(&self.published);
        *published = new;
        self.epoch.store(epoch, Ordering::Release);
    }

    /// Sets who takes messages; once.
    pub(crate) fn set_owner(&self, owner: MailboxSender<OwnerMessage>) {
        // A store has one owner.
        _ = self.owner.set(owner);
    }

    /// Sends a message to the owner; returns it if the owner's mailbox is full, and `Ok(false)` if there is
    /// no owner any more.
    pub(crate) fn send(&self, message: OwnerMessage) -> Result<bool, OwnerMessage> {
        let Some(owner) = self.owner.get().filter(|_| !self.is_closed()) else { return Ok(false) };
        owner.send(message)?;
        // Otherwise it may have been sent after the owner's last look.
        fence(Ordering::SeqCst);
        Ok(!self.is_closed())
    }

    /// Whether the store has no owner any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Whether the store can be changed.
    pub(crate) fn is_writable(&self) -> bool {
        self.owner.get().is_some()
    }

    /// From now on no message is sent, or the sender knows that it may not be received.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Says that the owner waits for channels, or does not any more.
    pub(crate) fn set_awaited(&self, is_awaited: bool) {
        self.is_awaited.store(is_awaited, Ordering::Relaxed);
    }

    /// Makes what the owner has stored visible to channels on all cores before what it loads then.
    pub(crate) fn synchronize() {
        match os::barrier::is_supported() {
            true => os::barrier::heavy(),
            false => fence(Ordering::SeqCst),
        }
    }

    /// The oldest epoch of I/O in flight on all channels; after [`synchronize`](Self::synchronize).
    pub(crate) fn oldest_epoch(&self) -> u64 {
        let seats = sync::lock(&self.seats);
        seats.iter().map(|seat| seat.oldest_epoch.load(Ordering::Acquire)).min().unwrap_or(IDLE)
    }

    /// Counts a change of a cluster map that is written, and not durable before the next flush.
    pub(crate) fn map_written(&self) {
        self.maps_written.fetch_add(1, Ordering::Release);
    }

    /// What a flush that begins now makes durable.
    pub(crate) fn maps_written(&self) -> u64 {
        self.maps_written.load(Ordering::Acquire)
    }

    /// A flush has ended that began when this many changes were written.
    pub(crate) fn maps_flushed(&self, written: u64) {
        self.maps_durable.fetch_max(written, Ordering::Release);
    }

    /// Clusters that are not used.
    pub(crate) fn free_clusters(&self) -> u32 {
        match self.is_writable() {
            true => self.free_clusters.load(Ordering::Relaxed),
            false => self.published().free_clusters(),
        }
    }

    /// Percent of all clusters below which free ones are few; 0 for no limit.
    pub(crate) fn low_space_percent(&self) -> u32 {
        self.low_space_percent.load(Ordering::Relaxed)
    }

    /// Sets the limit of free clusters, of which the owner is to be notified by
    /// [`OwnerMessage::Look`].
    pub(crate) fn set_low_space_percent(&self, percent: u32) {
        self.low_space_percent.store(percent, Ordering::Relaxed);
    }

    /// Sets what [`free_clusters`](Self::free_clusters) reports of a store that can be changed.
    pub(crate) fn set_free_clusters(&self, clusters: u32) {
        self.free_clusters.store(clusters, Ordering::Relaxed);
    }

    /// Whether every change of a cluster map that is written is durable.
    pub(crate) fn are_maps_durable(&self) -> bool {
        self.maps_durable.load(Ordering::Acquire) >= self.maps_written()
    }

    /// Adds an open device of the external snapshot with this name.
    pub(crate) fn add_external(&self, name: &str, external: &Arc<BaseBdev>) {
        let mut externals = sync::lock(&self.externals);
        let opens = externals.entry(name.to_string()).or_default();
        opens.retain(|open| open.strong_count() > 0);
        opens.push(Arc::downgrade(external));
    }

    /// The device of the external snapshot that a blob names, if it is open: the one that was opened last.
    pub(crate) fn external(&self, clone: BlobId) -> Option<Arc<BaseBdev>> {
        let (name, _) = self.published().blob(clone).and_then(external_text)?;
        let externals = sync::lock(&self.externals);
        let mut opens = externals.get(&name)?.iter().rev().filter_map(Weak::upgrade);
        opens.find(|open| !open.device().is_removed())
    }
}

impl Drop for VolumeShared {
    fn drop(&mut self) {
        let mut volumes = sync::lock(&self.store.volumes);
        if volumes.get(&self.blob).is_some_and(|volume| volume.strong_count() == 0) {
            volumes.remove(&self.blob);
        }
    }
}

impl VolumeShared {
    /// What the channels of the volume with this blob share. A new object takes the place of an earlier one
    /// that is not used any more.
    pub(crate) fn new(store: &Arc<StoreShared>, blob: BlobId) -> Arc<VolumeShared> {
        let volume = Arc::new(VolumeShared {
            blob,
            store: store.clone(),
            is_paused: AtomicBool::new(false),
            seats: Mutex::default(),
        });
        sync::lock(&store.volumes).insert(blob, Arc::downgrade(&volume));
        volume
    }

    /// Adds a channel, whose core is `waker`'s.
    pub(crate) fn add_seat(
        &self,
        waker: os::Waker,
        replies: MailboxSender<ChannelMessage>,
    ) -> Arc<ChannelSeat> {
        let seat = Arc::new(ChannelSeat {
            oldest_epoch: AtomicU64::new(IDLE),
            writes_in_flight: AtomicU64::new(0),
            waker,
            replies,
            is_abandoned: AtomicBool::new(false),
        });
        sync::lock(&self.seats).push(seat.clone());
        sync::lock(&self.store.seats).push(seat.clone());
        seat
    }

    /// Removes a channel, whose I/O has ended as far as it knows.
    pub(crate) fn remove_seat(&self, seat: &Arc<ChannelSeat>) {
        seat.is_abandoned.store(true, Ordering::Release);
        self.store.has_abandoned.store(true, Ordering::Release);
        sync::lock(&self.seats).retain(|other| !Arc::ptr_eq(other, seat));
        sync::lock(&self.store.seats).retain(|other| !Arc::ptr_eq(other, seat));
        self.store.wake_owner();
    }

    /// Whether no write may begin.
    #[inline]
    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Acquire)
    }

    /// Lets no write begin, or lets them begin again.
    pub(crate) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Release);
        if !is_paused {
            sync::lock(&self.seats).iter().for_each(|seat| seat.waker.wake());
        }
    }

    /// Whether no channel has writes in flight; after [`StoreShared::synchronize`].
    pub(crate) fn has_no_writes(&self) -> bool {
        let seats = sync::lock(&self.seats);
        seats.iter().all(|seat| seat.writes_in_flight.load(Ordering::Acquire) == 0)
    }
}

impl StoreShared {
    /// The volume with this blob, if it has a block device.
    pub(crate) fn volume(&self, blob: BlobId) -> Option<Arc<VolumeShared>> {
        sync::lock(&self.volumes).get(&blob).and_then(Weak::upgrade)
    }

    /// Whether a channel was closed since the last call.
    pub(crate) fn take_abandoned(&self) -> bool {
        self.has_abandoned.load(Ordering::Relaxed) && self.has_abandoned.swap(false, Ordering::AcqRel)
    }

    /// Wakes the owner if it waits for channels.
    pub(crate) fn wake_owner(&self) {
        // Once: the owner sets it again if it has to wait on.
        if self.is_awaited.load(Ordering::Relaxed)
            && self.is_awaited.swap(false, Ordering::Relaxed)
            && let Some(owner) = self.owner.get()
        {
            // A full mailbox has woken it.
            _ = owner.send(OwnerMessage::Look);
        }
    }
}

impl ChannelSeat {
    /// Sends a message. It is lost if the channel is closed.
    pub(crate) fn reply(&self, message: ChannelMessage) {
        if self.replies.send(message).is_err() && !self.is_abandoned() {
            unreachable!("a channel has space for all replies that it waits for");
        }
    }

    /// Whether the channel is closed.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    /// Publishes the oldest epoch of I/O in flight.
    #[inline]
    fn publish_epoch(&self, epoch: u64) {
        self.oldest_epoch.store(epoch, Ordering::Release);
    }

    /// Publishes the number of writes in flight.
    #[inline]
    pub(crate) fn publish_writes(&self, writes: u32) {
        self.writes_in_flight.store(writes.into(), Ordering::Release);
    }

    /// What was published is visible to the owner, if what the channel loads now is older than what the owner
    /// has stored before it looks.
    #[inline]
    pub(crate) fn barrier(is_asymmetric: bool) {
        match is_asymmetric {
            true => os::barrier::light(),
            false => fence(Ordering::SeqCst),
        }
    }
}

/// The metadata that a channel uses, and the epochs of its I/O in flight.
pub(crate) struct PublishedUse {
    pub(crate) published: Arc<BlobStore>,
    epoch: u64,
    /// I/O in flight by epoch, ascending; the newest has no entry before its first I/O.
    in_flight: VecDeque<(u64, u32)>,
    is_asymmetric: bool,
    /// What other cores see: the oldest epoch, and writes.
    announced: (u64, u32),
}

impl PublishedUse {
    pub(crate) fn new(store: &StoreShared) -> PublishedUse {
        let (epoch, published) = store.newest();
        let is_asymmetric = os::barrier::is_supported();
        PublishedUse { published, epoch, in_flight: VecDeque::new(), is_asymmetric, announced: (IDLE, 0) }
    }

    /// To be called before I/O begins, with the number of writes that are in flight or may begin: publishes
    /// both, and follows to the newest metadata. [`publish`](Self::publish) is to be called after. Returns
    /// whether writes have to wait.
    #[inline]
    pub(crate) fn enter(&mut self, volume: &VolumeShared, seat: &ChannelSeat, writes: u32) -> bool {
        seat.publish_writes(writes);
        self.announced.1 = writes;
        if self.in_flight.is_empty() {
            seat.publish_epoch(self.epoch);
            self.announced.0 = self.epoch;
        }
        ChannelSeat::barrier(self.is_asymmetric);
        // Before the epoch: writes that begin after a pause are by what was published before its end.
        let is_paused = volume.is_paused();
        if volume.store.epoch() != self.epoch {
            self.follow(&volume.store, seat);
        }
        is_paused
    }

    #[cold]
    fn follow(&mut self, store: &StoreShared, seat: &ChannelSeat) {
        loop {
            (self.epoch, self.published) = store.newest();
            if !self.in_flight.is_empty() {
                // Older than the newest, so that it is published right.
                return;
            }
            seat.publish_epoch(self.epoch);
            self.announced.0 = self.epoch;
            ChannelSeat::barrier(self.is_asymmetric);
            if store.epoch() == self.epoch {
                return;
            }
        }
    }

    /// The epoch of the present metadata.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Counts an I/O that begins by the present metadata, and returns its epoch.
    #[inline]
    pub(crate) fn begin(&mut self) -> u64 {
        self.begin_many(1);
        self.epoch
    }

    /// Counts I/Os that begin by the present metadata.
    #[inline]
    pub(crate) fn begin_many(&mut self, ios: u32) {
        if ios == 0 {
            return;
        }
        match self.in_flight.back_mut() {
            Some((epoch, count)) if *epoch == self.epoch => *count += ios,
            _ => self.in_flight.push_back((self.epoch, ios)),
        }
    }

    /// An I/O of this epoch has ended.
    #[inline]
    pub(crate) fn end(&mut self, epoch: u64) {
        self.end_many(epoch, 1);
    }

    /// I/Os of this epoch have ended.
    #[inline]
    pub(crate) fn end_many(&mut self, epoch: u64, ios: u32) {
        if ios == 0 {
            return;
        }
        let index = match self.in_flight.front() {
            Some((first, _)) if *first == epoch => 0,
            _ => self.in_flight.partition_point(|(other, _)| *other < epoch),
        };
        match self.in_flight.get_mut(index) {
            Some((other, count)) if *other == epoch && *count >= ios => *count -= ios,
            _ => unreachable!("fewer than {ios} I/Os of epoch {epoch} are in flight"),
        }
    }

    /// To be called after I/O has begun or ended: publishes which metadata is used.
    #[inline]
    pub(crate) fn publish(&mut self, store: &StoreShared, seat: &ChannelSeat, writes: u32) {
        while self.in_flight.front().is_some_and(|(_, count)| *count == 0) {
            self.in_flight.pop_front();
        }
        let oldest = self.in_flight.front().map_or(IDLE, |(epoch, _)| *epoch);
        let before = std::mem::replace(&mut self.announced, (oldest, writes));
        if before == self.announced {
            return;
        }
        seat.publish_epoch(oldest);
        seat.publish_writes(writes);
        if writes == 0 && before.1 > 0 {
            ChannelSeat::barrier(self.is_asymmetric);
            store.wake_owner();
        }
    }
}
