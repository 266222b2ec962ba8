//! Snapshots of images in use: the process that has an image attached makes them, at the request of a
//! command.
//!
//! The request is in the record of the image. The holder pauses all channels and waits until nothing is in
//! flight, raises the attach epoch and has every group know it, so that nothing that was sent before lands
//! later, and changes the record. Then its channels go on with the new head. Killed at any moment, it leaves
//! the image with the snapshot or without.

use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;
use std::time::Duration;

use cluster_map::{ImageEntry, MapError, random_volume};
use reactor::{Reactor, ReactorConfig};
use uuid::Uuid;

use super::ImageChain;
use crate::Cluster;
use crate::attach::{AttachState, AttachStatus, EntryFollower, HeldLock};
use crate::reclaim::sweep;
use crate::snapshots::{check_new, seconds_since_1970};
use crate::sweep::SweepKind;
use crate::watch::PoolWatch;

/// Requests that are in flight when a snapshot begins have this time; what needs longer is no snapshot.
const DRAIN_MAX: Duration = Duration::from_secs(4);
/// All groups know the attach epoch within this time, or there is no snapshot: the image waits meanwhile.
const FENCE_MAX: Duration = Duration::from_secs(4);
/// The map is asked again after this time whether it has a snapshot.
const RETRY: Duration = Duration::from_millis(200);

/// An image that this process has attached alone, and makes snapshots of.
pub(crate) struct HeldImage {
    pub(crate) cluster: Cluster,
    pub(crate) pool: String,
    pub(crate) uuid: Uuid,
    pub(crate) chain: Arc<ImageChain>,
    pub(crate) lock: Arc<HeldLock>,
    pub(crate) state: Arc<AttachState>,
    pub(crate) watch: Arc<PoolWatch>,
    /// This one.
    pub(crate) own: Weak<HeldImage>,
    /// The request that was seen last: each is answered once, and none from before the image was attached.
    pub(crate) seen: Mutex<Option<Uuid>>,
}

/// What became of a change of the map.
enum Outcome {
    /// Of an image of this size.
    Made(u64),
    /// Others have changed the record: it was not made, and will not be.
    Refused(&'static str),
}

impl EntryFollower for HeldImage {
    fn image(&self) -> Uuid {
        self.uuid
    }

    /// Makes the snapshot that the record asks for, on a thread of its own.
    fn read(&self, entry: &ImageEntry) {
        self.follow_head(entry);
        let Some(request) = &entry.layers.request else { return };
        let is_new = sync::lock(&self.seen).replace(request.id) != Some(request.id);
        let Some(image) = self.own.upgrade().filter(|_| is_new) else { return };
        if self.state.status() != AttachStatus::Live {
            return;
        }
        let (id, snapshot) = (request.id, request.name.clone());
        std::thread::spawn(move || {
            let reason = match image.make(id, &snapshot) {
                Ok(Outcome::Made(_)) => {
                    return log::info!("snapshot {snapshot} of an image of pool {} is made", image.pool);
                }
                Ok(Outcome::Refused(reason)) => reason.to_string(),
                Err(error) => error.to_string(),
            };
            log::warn!("snapshot {snapshot} of an image of pool {} is not made: {reason}", image.pool);
        });
    }
}

impl HeldImage {
    /// Ends where another client has taken the image by force and given it another head.
    fn follow_head(&self, entry: &ImageEntry) {
        let (chain, version) = self.chain.get();
        // While this makes a snapshot the two differ.
        if self.chain.is_paused() || entry.volume == chain.head() {
            return;
        }
        // The record may be older than a snapshot that this has just made: it is read again, and counts if
        // none was made meanwhile.
        let Ok(Some(head)) = self.head_in_map() else { return };
        if self.chain.is_paused() || self.chain.get().1 != version || head == chain.head() {
            return;
        }
        if self.state.end(AttachStatus::Fenced) {
            log::error!("an image of pool {} was given another head: its requests fail here", self.pool);
        }
    }

    /// The head of the image in the map; `None` if it has no such image, or is an older copy of itself.
    fn head_in_map(&self) -> Result<Option<u64>, MapError> {
        let map = self.cluster.map();
        if map.position()?.is_older() {
            return Ok(None);
        }
        Ok(map.images()?.values().find(|image| image.uuid == self.uuid).map(|image| image.volume))
    }

    fn make(&self, id: Uuid, snapshot: &str) -> Result<Outcome, MapError> {
        if !self.chain.pause(DRAIN_MAX) {
            self.chain.resume();
            return Ok(Outcome::Refused("requests in flight do not end"));
        }
        let made = self.make_paused(id, snapshot);
        self.chain.resume();
        made
    }

    /// Nothing is in flight, and nothing begins.
    fn make_paused(&self, id: Uuid, snapshot: &str) -> Result<Outcome, MapError> {
        let before = self.state.epoch();
        // What was given up earlier may be on its way still.
        self.lock.abort_in_flight()?;
        if self.state.epoch() <= before {
            return Ok(Outcome::Refused("another client has attached the image"));
        }
        if let Err(reason) = self.fence() {
            return Ok(Outcome::Refused(reason));
        }
        let changed = self.lock.while_attached(|| self.change(id, snapshot));
        changed.unwrap_or(Ok(Outcome::Refused("the image is not attached any more")))
    }

    /// Changes the record, and goes on with the new head if it has. The image stays attached meanwhile.
    fn change(&self, id: Uuid, snapshot: &str) -> Result<Outcome, MapError> {
        if !self.lock.is_only_holder()? {
            return Ok(Outcome::Refused("others have attached the image"));
        }
        let head = random_volume();
        if !self.lock.hold_volume(head, self.state.epoch())? {
            return Ok(Outcome::Refused("the lock of its new volume is another one's"));
        }
        let outcome = self.change_record(id, snapshot, head);
        match outcome {
            Ok(Outcome::Made(bytes)) => {
                let (chain, _) = self.chain.get();
                self.chain.replace(chain.with_head(head, bytes));
                self.lock.move_to(head);
            }
            _ => self.lock.release_volume(head),
        }
        outcome
    }

    /// Has every group know the attach epoch.
    fn fence(&self) -> Result<(), &'static str> {
        let reactor = Reactor::new(&ReactorConfig::default()).map_err(|_| "there is no memory for I/O")?;
        let (core, watch, state) = (reactor.core(), self.watch.clone(), self.state.clone());
        let volume = self.chain.get().0.head();
        let swept = reactor.block_on(async move {
            let kind = SweepKind::Indices { end: 0 };
            let mut swept = std::pin::pin!(sweep(&core, watch, volume, state, kind, |_, _| {}));
            let mut limit = std::pin::pin!(core.sleep_ns(FENCE_MAX.as_nanos() as u64));
            let either = std::future::poll_fn(|context| match swept.as_mut().poll(context) {
                Poll::Ready(swept) => Poll::Ready(swept.is_ok()),
                Poll::Pending => limit.as_mut().poll(context).map(|()| false),
            });
            either.await
        });
        if swept { Ok(()) } else { Err("a logical group does not answer") }
    }

    /// Changes the record. If the map does not answer, it is asked until it says what became of it: a change
    /// that comes later would take what is written meanwhile.
    fn change_record(&self, id: Uuid, snapshot: &str, head: u64) -> Result<Outcome, MapError> {
        let map = self.cluster.map();
        let mut is_uncertain = false;
        loop {
            let images = match map.images() {
                Ok(images) => images,
                Err(error) if !is_uncertain => return Err(error),
                Err(error) => {
                    self.wait_for_map(&error);
                    continue;
                }
            };
            let is_it =
                |(of, image): &(&(String, String), &ImageEntry)| of.0 == self.pool && image.uuid == self.uuid;
            let Some(((_, name), image)) = images.iter().find(is_it) else {
                return Ok(Outcome::Refused("the image is gone"));
            };
            if image.volume == head {
                let bytes = image.layers.parent.map_or(image.bytes, |parent| parent.bytes);
                return Ok(Outcome::Made(bytes));
            }
            let is_wanted = image.layers.request.as_ref().is_some_and(|request| request.id == id);
            if !is_wanted || image.volume != self.chain.get().0.head() {
                return Ok(Outcome::Refused("it is not asked for any more"));
            }
            if check_new(&images, &self.pool, name, image).is_err() {
                return Ok(Outcome::Refused("the image has too many snapshots"));
            }
            let to = image.with_snapshot(snapshot, seconds_since_1970(), head);
            match map.change_image(&self.pool, name, image, &to) {
                Ok(true) => return Ok(Outcome::Made(image.bytes)),
                Ok(false) => {}
                Err(error) => {
                    is_uncertain = true;
                    self.wait_for_map(&error);
                }
            }
        }
    }

    fn wait_for_map(&self, error: &MapError) {
        log::warn!("an image of pool {} waits for the cluster map: {error}", self.pool);
        std::thread::sleep(RETRY);
    }
}
