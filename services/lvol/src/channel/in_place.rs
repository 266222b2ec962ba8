//! Requests that are in one place of the store's device: they are passed on with another tag and range, and
//! completed with their own again, in the batch and the sink of the caller. They cost no look-up but that of
//! the cluster, no move and no allocation.

use bdev::{Completion, Request};
use block_io::{Op, Payload, RequestFlags, Tag};
use slots::Slot;

use super::LvolChannel;
use crate::volume_view::RangePlace;

/// Set in the tags of requests that are in the table of [`WholeRequest`]s; slots of both tables are smaller.
const WHOLE: u64 = 1 << 31;
/// The largest number of slots of a table.
pub(super) const SLOTS_MAX: u32 = 1 << 31;

/// A request that was passed on, as it was submitted.
#[derive(Clone, Copy)]
pub(super) struct WholeRequest {
    tag: Tag,
    lba: u64,
    blocks: u32,
    epoch: u64,
}

impl LvolChannel {
    /// Gives requests the tags and ranges that they have on the store's device, up to the first that is not in
    /// one place there. Returns how many.
    #[inline]
    pub(super) fn translate(&mut self, batch: &mut [Request]) -> usize {
        let Some(shift) = self.base.block_shift else { return 0 };
        let epoch = self.in_use.epoch();
        let (mut count, mut writes) = (0, 0);
        for request in batch {
            let is_write = request.op == Op::Write;
            let Payload::Data(_) = request.payload else { break };
            let offset = request.lba.wrapping_mul(self.block_bytes);
            let length = u64::from(request.blocks) * self.block_bytes;
            let place = match request.op {
                Op::Read => self.view.read_at(offset, length),
                Op::Write if !self.is_paused => {
                    self.view.write_at(offset, length).map_or(RangePlace::Unknown, RangePlace::Device)
                }
                _ => break,
            };
            let RangePlace::Device(at) = place else { break };
            let whole = WholeRequest { tag: request.tag, lba: request.lba, blocks: request.blocks, epoch };
            let Ok(slot) = self.whole.insert(whole) else { break };
            request.tag = Tag(slot.to_bits() | WHOLE);
            // The volume's limit of a request has fewer bytes than 2^32.
            (request.lba, request.blocks) = (at >> shift, (length >> shift) as u32);
            count += 1;
            writes += u32::from(is_write);
        }
        self.in_use.begin_many(count);
        self.writes_in_flight += writes;
        count as usize
    }

    /// As [`translate`](Self::translate), of a request for a device whose range is known already. Its table has
    /// a place.
    pub(super) fn insert_whole(&mut self, request: &mut Request) {
        let epoch = self.in_use.begin();
        let whole = WholeRequest { tag: request.tag, lba: request.lba, blocks: request.blocks, epoch };
        match self.whole.insert(whole) {
            Ok(slot) => request.tag = Tag(slot.to_bits() | WHOLE),
            Err(_) => {
                unreachable!("the layer has at most as many requests in flight as the table has places")
            }
        }
    }

    /// Gives completions of devices from `start` on their own tags and ranges again. Those of pieces, and of
    /// writes that need more than that, are moved to `completions`. Returns whether there are any.
    #[inline]
    pub(super) fn restore(&mut self, sink: &mut Vec<Completion>, start: usize) -> bool {
        let (mut index, mut epoch, mut count, mut writes) = (start, 0, 0, 0);
        let mut has_more = false;
        while let Some(completion) = sink.get_mut(index) {
            let bits = completion.tag().0;
            if bits & WHOLE == 0 {
                self.completions.push(sink.swap_remove(index));
                has_more = true;
                continue;
            }
            let slot = Slot::from_bits(bits & !WHOLE);
            let Some(whole) = self.whole.drop_value(slot, |whole| *whole) else {
                unreachable!("slot {slot:?} was completed by a device and is not in the table")
            };
            if whole.epoch != epoch {
                self.in_use.end_many(epoch, std::mem::take(&mut count));
                epoch = whole.epoch;
            }
            count += 1;
            let is_success = completion.status().is_success();
            let request = completion.request_mut();
            (request.tag, request.lba, request.blocks) = (whole.tag, whole.lba, whole.blocks);
            if request.op.is_write() {
                writes += 1;
                if request.flags.contains(RequestFlags::FUA)
                    && is_success
                    && !self.volume.store.are_maps_durable()
                {
                    self.flush_maps(sink.swap_remove(index).into_request());
                    has_more = true;
                    continue;
                }
            }
            index += 1;
        }
        self.in_use.end_many(epoch, count);
        self.writes_in_flight -= writes;
        has_more
    }
}
