//! Virtqueues, as the device sees them.

mod inflight;
mod packed;
mod split;

use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use dma::SharedRegion;
use wire_vhost_user::VringAddress;
use wire_virtio::Features;

pub(crate) use packed::PackedRing;
pub(crate) use split::SplitRing;

use crate::chain::Chain;
use crate::failure::RingError;
use crate::memory::{GuestMemory, GuestPlace};

/// An area of a virtqueue in guest memory. The guest may write it at any moment.
#[derive(Clone)]
pub(crate) struct RingArea {
    region: Rc<SharedRegion>,
    offset: u64,
}

impl RingArea {
    /// The area of `bytes` bytes at an address of the front-end, if it is mapped and aligned.
    fn resolve(memory: &GuestMemory, address: u64, bytes: u64, alignment: u64) -> Option<RingArea> {
        let GuestPlace { region, offset } = memory.by_user_address(address, bytes)?;
        offset.is_multiple_of(alignment).then_some(RingArea { region, offset })
    }

    /// The area at an offset of a region, which must be inside and aligned.
    pub(crate) fn at(place: GuestPlace) -> RingArea {
        RingArea { region: place.region, offset: place.offset }
    }

    #[inline]
    fn snapshot_u64_pair(&self, offset: u64) -> [u64; 2] {
        self.region.snapshot_u64_pair(self.offset + offset)
    }

    /// The descriptors of a table that it begins with, as words.
    #[inline]
    fn descriptors(&self, size: u16) -> &[[AtomicU64; 2]] {
        self.region.u64_pairs(self.offset, size.into())
    }

    #[inline]
    fn store_u32_pair(&self, offset: u64, first: u32, second: u32) {
        self.region.store_u32_pair(self.offset + offset, first, second);
    }
}

macro_rules! words {
    ($($load:ident, $store:ident, $word:ident;)*) => {
        impl RingArea {
            $(
                #[inline]
                fn $load(&self, offset: u64) -> $word {
                    self.region.$load(self.offset + offset)
                }

                #[inline]
                fn $store(&self, offset: u64, value: $word) {
                    self.region.$store(self.offset + offset, value);
                }
            )*
        }
    };
}

words! {
    load_u8, store_u8, u8;
    load_u16, store_u16, u16;
    load_u32, store_u32, u32;
    load_u64, store_u64, u64;
}

/// A chain that was fetched from a virtqueue: how it is returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChainId {
    /// First descriptor of a split virtqueue's chain; the driver's identifier in a packed one.
    pub(crate) id: u16,
    /// Descriptors of the ring that it occupies, in a packed virtqueue.
    descriptors: u16,
    /// Its entry in the area of requests in flight, of a packed virtqueue that has one.
    entry: u16,
}

/// How a virtqueue begins.
pub(crate) struct RingSetup {
    /// Number of descriptors.
    pub(crate) size: u16,
    /// What `SET_VRING_BASE` said.
    pub(crate) base: u32,
    pub(crate) features: Features,
    /// Its area of requests in flight.
    pub(crate) inflight: Option<RingArea>,
}

/// A running virtqueue.
///
/// [`look`](Self::look), then [`fetch`](Self::fetch) chains, [`push_used`](Self::push_used) them in any order, then
/// [`publish`](Self::publish). While the driver's notifications are disabled the ring must be polled;
/// [`enable_notifications`](Self::enable_notifications) may find that there is work already.
pub(crate) enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

macro_rules! forward {
    ($self:ident, $ring:ident => $call:expr) => {
        match $self {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

impl Ring {
    /// The ring at these addresses; `None` if they are not mapped or the size is invalid.
    ///
    /// It begins at `setup.base`. With an area of requests in flight it begins with these, and then where they end.
    pub(crate) fn new(memory: &GuestMemory, address: &VringAddress, setup: RingSetup) -> Option<Ring> {
        if setup.features.contains(Features::RING_PACKED) {
            PackedRing::new(memory, address, setup).map(Ring::Packed)
        } else {
            SplitRing::new(memory, address, setup).map(Ring::Split)
        }
    }

    /// Moves the ring to where its addresses are now; `None`, without effect, if they are not mapped.
    pub(crate) fn relocate(&mut self, memory: &GuestMemory, address: &VringAddress) -> Option<()> {
        forward!(self, ring => ring.relocate(memory, address))
    }

    /// Looks which chains are available: [`fetch`](Self::fetch) returns no later ones.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    #[inline]
    pub(crate) fn look(&mut self) -> Result<(), RingError> {
        match self {
            Ring::Split(ring) => ring.look(),
            // Each descriptor says whether it is available.
            Ring::Packed(_) => Ok(()),
        }
    }

    /// Fetches the next chain; `None` if there is none.
    ///
    /// # Errors
    /// The driver violates the specification; the ring must not be used any more.
    #[inline]
    pub(crate) fn fetch(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<ChainId>, RingError> {
        forward!(self, ring => ring.fetch(memory, chain))
    }

    /// A maximum of the chains that are available now: there may be fewer.
    pub(crate) fn available_max(&self) -> u16 {
        forward!(self, ring => ring.available_max())
    }

    /// Returns a chain to the driver, with the number of bytes written from the start of its writable part.
    #[inline]
    pub(crate) fn push_used(&mut self, id: ChainId, written: u32) {
        forward!(self, ring => ring.push_used(id, written))
    }

    /// Makes returned chains visible, as far as they are not. Returns whether the driver wants a notification.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        forward!(self, ring => ring.publish())
    }

    /// Disables the driver's notifications: the ring is polled.
    pub(crate) fn disable_notifications(&mut self) {
        forward!(self, ring => ring.disable_notifications())
    }

    /// Enables the driver's notifications. Returns whether a chain arrived before: no notification announces that.
    pub(crate) fn enable_notifications(&mut self) -> bool {
        forward!(self, ring => ring.enable_notifications())
    }

    /// The addresses of the front-end and bytes of what the device writes.
    pub(crate) fn written_areas(&self, address: &VringAddress) -> [(u64, u64); 2] {
        forward!(self, ring => ring.written_areas(address))
    }

    /// Whether a driver has used it before.
    pub(crate) fn has_begun(&self) -> bool {
        forward!(self, ring => ring.has_begun())
    }

    /// Ends it, with nothing in flight. Returns what `GET_VRING_BASE` answers.
    pub(crate) fn stop(self) -> u32 {
        forward!(self, ring => ring.stop())
    }
}
