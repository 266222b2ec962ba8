//! Images that are chains of volumes: the head is written, and has what its parents have until it is written.
//!
//! [`LayerChain`] says which volumes an image consists of. What is known of its objects, which blocks the
//! head has from parents ([`ObjectLayers`]), is shared by all channels of the image on all cores.
//! [`LayeredChannel`] carries out requests with the channel of the volumes. Parents never change, so that
//! what is known of them holds for as long as the chain does; what is known of the head is exact because one
//! process alone writes it.
//!
//! A block that the head lacks is written as a whole: a write of a part of it reads the rest from the parent
//! first. The first write of such a block claims it, so that no other one, on any core, does the same
//! meanwhile. Zeroes in the place of a parent's data are written as data.

mod channel;
mod follow;
mod in_use;
mod lookup;
mod object;
mod plan;
mod pull;
#[cfg(test)]
mod tests;
mod volume_io;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

use bdev::{Completion, Request};
use block_io::{Channel, Status};
use cluster_map::ParentVolume;
use foldhash::HashMap;
use wire_store::BlockBitmap;

pub(crate) use channel::{LayeredChannel, zero_from};
pub(crate) use follow::follow_chain;
pub(crate) use in_use::HeldImage;
pub(crate) use lookup::{FoundImage, find_image};
use object::ObjectLayers;
pub(crate) use object::limit_in;
pub(crate) use pull::pull;
pub(crate) use volume_io::VolumeIo;

/// Objects of which it is kept what the head has, for all channels: 64 GiB, in 7 MiB of memory. Those that a
/// channel uses are kept besides.
const OBJECTS_MAX: usize = 16_384;

/// A channel of the volumes of a pool.
pub(crate) trait VolumeChannel: Channel<Request = Request, Completion = Completion> {
    /// Accepts a read of another volume than the head; gives it back if too many requests are in flight.
    fn read_volume(&mut self, volume: u64, request: Request) -> Result<(), Request>;

    /// Begins to read which blocks of an object are written. Returns whether it does: not while too much is
    /// in flight.
    fn list_written(&mut self, key: u64, volume: u64, index: u32) -> bool;

    /// The answer to a list, with its key.
    fn take_written(&mut self) -> Option<(u64, Result<BlockBitmap, Status>)>;

    /// Requests are for another head from now on. None is in flight.
    fn set_head(&mut self, volume: u64);
}

/// The volumes of an image, and what is known of its objects.
pub(crate) struct LayerChain {
    head: u64,
    /// The nearest first.
    parents: Vec<ParentVolume>,
    /// Another process writes the head: what it has is read anew for each request.
    is_volatile: bool,
    objects: Mutex<HashMap<u32, Arc<ObjectLayers>>>,
}

impl LayerChain {
    pub(crate) fn new(head: u64, parents: Vec<ParentVolume>, is_volatile: bool) -> LayerChain {
        LayerChain { head, parents, is_volatile, objects: Mutex::default() }
    }

    /// The volume that is written.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// All volumes, the head first.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = u64> {
        [self.head].into_iter().chain(self.parents.iter().map(|parent| parent.volume))
    }

    /// Whether it is the head alone.
    pub(crate) fn is_plain(&self) -> bool {
        self.parents.is_empty()
    }

    /// The chain after a snapshot of this one, of an image of this size.
    pub(crate) fn with_head(&self, head: u64, bytes: u64) -> LayerChain {
        let below = self.parents.iter().map(|it| ParentVolume { bytes: it.bytes.min(bytes), ..*it });
        let parents = [ParentVolume { volume: self.head, bytes }].into_iter().chain(below).collect();
        LayerChain::new(head, parents, self.is_volatile)
    }

    /// Whether it has the same volumes as another one.
    pub(crate) fn is_same(&self, other: &LayerChain) -> bool {
        (self.head, &self.parents) == (other.head, &other.parents)
    }

    /// What is known of an object. Those that no channel uses are forgotten when there are many.
    fn object(&self, index: u32) -> Arc<ObjectLayers> {
        let mut objects = sync::lock(&self.objects);
        if objects.len() >= OBJECTS_MAX && !objects.contains_key(&index) {
            objects.retain(|_, object| Arc::strong_count(object) > 1);
        }
        objects.entry(index).or_default().clone()
    }
}

/// What a channel has in flight.
#[derive(Default)]
struct ChannelSeat {
    in_flight: AtomicUsize,
}

/// The chain of an image, which its channels follow. They can be paused, so that nothing is in flight.
pub(crate) struct ImageChain {
    chain: Mutex<Arc<LayerChain>>,
    /// Counts chains.
    version: AtomicU64,
    is_paused: AtomicBool,
    seats: Mutex<Vec<Weak<ChannelSeat>>>,
    /// A channel has nothing in flight any more, while they are paused.
    drained: Condvar,
}

impl ImageChain {
    pub(crate) fn new(chain: LayerChain) -> ImageChain {
        ImageChain {
            chain: Mutex::new(Arc::new(chain)),
            version: AtomicU64::new(0),
            is_paused: AtomicBool::new(false),
            seats: Mutex::default(),
            drained: Condvar::new(),
        }
    }

    /// The newest chain, and its version.
    pub(crate) fn get(&self) -> (Arc<LayerChain>, u64) {
        let chain = sync::lock(&self.chain);
        (chain.clone(), self.version())
    }

    fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Channels use another chain once what they have in flight is done.
    pub(crate) fn replace(&self, chain: LayerChain) {
        let mut current = sync::lock(&self.chain);
        *current = Arc::new(chain);
        self.version.fetch_add(1, Ordering::Release);
    }

    fn add_seat(&self) -> Arc<ChannelSeat> {
        let seat = Arc::new(ChannelSeat::default());
        let mut seats = sync::lock(&self.seats);
        seats.retain(|seat| seat.strong_count() > 0);
        seats.push(Arc::downgrade(&seat));
        seat
    }

    /// Has channels begin nothing, and waits until nothing is in flight, on any core. Returns whether that is
    /// so in time. [`resume`](Self::resume) ends it.
    pub(crate) fn pause(&self, limit: Duration) -> bool {
        // A channel counts what it is about to begin before it looks at this, and this is set before the
        // counts are read: one of the two sees the other.
        self.is_paused.store(true, Ordering::SeqCst);
        let is_busy = |seats: &mut Vec<Weak<ChannelSeat>>| {
            let mut seats = seats.iter().filter_map(Weak::upgrade);
            seats.any(|seat| seat.in_flight.load(Ordering::SeqCst) > 0)
        };
        let seats = sync::lock(&self.seats);
        let waited = self.drained.wait_timeout_while(seats, limit, is_busy);
        let (_seats, outcome) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        !outcome.timed_out()
    }

    /// Channels begin requests again.
    pub(crate) fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::SeqCst)
    }

    /// A channel has nothing in flight.
    fn notify_drained(&self) {
        if self.is_paused() {
            // Whoever waits has looked at the counts before this, or looks again.
            drop(sync::lock(&self.seats));
            self.drained.notify_all();
        }
    }
}
