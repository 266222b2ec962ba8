//! Requests of a connection to a virtio block device.

use block_io::Tag;
use slots::{Slab, Slot};
use wire_virtio::blk::BlkStatus;

use crate::backend::BlkBackend;
use crate::blk::{self, BlkStep};
use crate::device::{FetchedChain, GuestView, UsedChain, VhostContext};
use crate::failure::RingError;
use crate::limits::REQUESTS_MAX;
use crate::memory::{GuestPlace, RemovedRegions};
use crate::status::blk_status;
use crate::tags::tag_of;
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
        let plan = blk::plan(guest.memory, chain, backend, write_through)?;
        let (status, written) = match plan.step {
            BlkStep::Complete(status, written) => (status, written),
            BlkStep::Submit(mut request, written) => {
                let entry = InflightRequest { queue, id, status: plan.status.clone(), written };
                match self.requests.insert(entry) {
                    // The caller has looked whether there is room.
                    Err(_) => (BlkStatus::IoError, 0),
                    Ok(slot) => {
                        request.tag = Tag(tag_of(slot));
                        request.flow = flow;
                        let bytes = u64::from(request.blocks) * u64::from(backend.block_size);
                        match context.submit(backend.key, request) {
                            Ok(()) => return Ok(Started::InFlight(bytes)),
                            Err(status) => {
                                self.requests.remove(slot);
                                (blk_status(status), 0)
                            }
                        }
                    }
                }
            }
        };
        plan.status.region.store_u8(plan.status.offset, status.to_wire());
        if let Some(log) = guest.log {
            // Not all that it could write: a driver may describe any lengths.
            chain.written(written).for_each(|range| log.mark(range.address, range.length.into()));
            guest.mark_place(&plan.status);
        }
        Ok(Started::Used(written + 1))
    }

    /// A device request has completed.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        completion: &bdev::Completion,
        guest: &GuestView<'_>,
    ) -> Option<UsedChain> {
        let request = self.slot_of(completion.tag().0).and_then(|slot| self.requests.remove(slot))?;
        let status = blk_status(completion.status());
        if guest.log.is_some() {
            guest.mark_place(&request.status);
            guest.mark_read(completion);
        }
        request.status.region.store_u8(request.status.offset, status.to_wire());
        let written = if status == BlkStatus::Ok { request.written } else { 0 };
        Some(UsedChain { queue: request.queue, id: request.id, written: written + 1 })
    }

    #[inline]
    fn slot_of(&self, tag: u64) -> Option<Slot> {
        crate::tags::find(&self.requests, tag)
    }
}
