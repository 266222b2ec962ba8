//! Requests of a connection to a virtio block device.

use block_io::Tag;
use slots::Slab;
use wire_virtio::blk::BlkStatus;

use crate::backend::BlkBackend;
use crate::blk::{self, BlkPlan, BlkStep, Transfer};
use crate::device::{FetchedChain, GuestView, UsedChain, VhostContext};
use crate::failure::RingError;
use crate::limits::REQUESTS_MAX;
use crate::memory::{GuestPlace, RemovedRegions};
use crate::status::blk_status;
use crate::tags::{self, tag_of};
use crate::vring::ChainId;

/// The requests of a connection in flight.
pub(crate) struct BlkRequests {
    requests: Slab<InflightRequest>,
}

/// A request that a block device executes.
struct InflightRequest {
    queue: u16,
    id: ChainId,
    status: GuestPlace,
    /// Bytes of data that are written if it succeeds.
    written: u32,
}

/// What has become of a chain.
pub(crate) enum Started {
    /// It is in flight, with so many bytes of data.
    InFlight(u64),
    /// It is to be returned, with so many bytes written.
    Used(u32),
}

impl BlkRequests {
    pub(crate) fn new() -> BlkRequests {
        BlkRequests { requests: Slab::with_capacity(REQUESTS_MAX) }
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.requests.is_full()
    }

    /// Forgets all; their completions are ignored.
    pub(crate) fn clear(&mut self) {
        self.requests = Slab::with_capacity(1);
    }

    /// Whether one writes to removed memory. `is_unmapped` says whether the areas of a virtqueue may be there.
    pub(crate) fn use_removed(&self, removed: &RemovedRegions, is_unmapped: impl Fn(u16) -> bool) -> bool {
        self.requests
            .iter()
            .any(|(_, request)| removed.contain(&request.status) || is_unmapped(request.queue))
    }

    /// Executes the request of a chain.
    #[inline]
    pub(crate) fn start(
        &mut self,
        fetched: &FetchedChain<'_>,
        backend: &BlkBackend,
        write_through: bool,
        flow: u16,
        context: &mut VhostContext<'_>,
    ) -> Result<Started, RingError> {
        let FetchedChain { queue, id, chain, guest } = *fetched;
        let transfer = match blk::transfer(guest.memory, chain, backend, write_through) {
            Some(transfer) => transfer,
            None => match blk::plan(guest.memory, chain, backend, write_through)? {
                BlkPlan { status, step: BlkStep::Submit(request, written) } => {
                    Transfer { request, written, status }
                }
                BlkPlan { status: place, step: BlkStep::Complete(status, written) } => {
                    return Ok(end_at_once(fetched, &place, status, written));
                }
            },
        };
        let Transfer { mut request, written, status } = transfer;
        let slot = match self.requests.insert(InflightRequest { queue, id, status, written }) {
            Ok(slot) => slot,
            // The caller has looked whether there is room.
            Err(entry) => return Ok(end_at_once(fetched, &entry.status, BlkStatus::IoError, 0)),
        };
        request.tag = Tag(tag_of(slot));
        request.flow = flow;
        let bytes = u64::from(request.blocks) * u64::from(backend.block_size);
        if let Err(status) = context.submit(backend.key, request)
            && let Some(entry) = self.requests.remove(slot)
        {
            return Ok(end_at_once(fetched, &entry.status, blk_status(status), 0));
        }
        Ok(Started::InFlight(bytes))
    }

    /// A device request has completed.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        completion: &bdev::Completion,
        guest: &GuestView<'_>,
    ) -> Option<UsedChain> {
        let slot = tags::find(&self.requests, completion.tag().0)?;
        let status = blk_status(completion.status());
        self.requests.drop_value_at(slot.index(), |request| {
            if guest.log.is_some() {
                guest.mark_place(&request.status);
                guest.mark_read(completion);
            }
            request.status.region.store_u8(request.status.offset, status.to_wire());
            let written = if status == BlkStatus::Ok { request.written } else { 0 };
            UsedChain { queue: request.queue, id: request.id, written: written + 1 }
        })
    }
}

/// Ends a request that its device does not get: writes its status, with `written` bytes of data before it.
#[cold]
fn end_at_once(fetched: &FetchedChain<'_>, place: &GuestPlace, status: BlkStatus, written: u32) -> Started {
    let FetchedChain { chain, guest, .. } = *fetched;
    place.region.store_u8(place.offset, status.to_wire());
    if let Some(log) = guest.log {
        // Not all that it could write: a driver may describe any lengths.
        chain.written(written).for_each(|range| log.mark(range.address, range.length.into()));
        guest.mark_place(place);
    }
    Started::Used(written + 1)
}
