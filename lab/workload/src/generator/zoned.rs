//! Jobs on zones with write pointers.

use block_io::{Op, Request};
use dma::Data;
use os::clock;

use super::{Generator, UNLIMITED};
use crate::access_pattern::OpMix;
use crate::direction_stats::direction_index;
use crate::zoned::{Placement, ZonedJob};

/// How long a job waits before it tries a zone again that another I/O uses.
const RETRY_NS: u64 = 10_000;
/// How long it tries: as long as the drain waits for I/Os.
const BUSY_NS_MAX: u64 = 30_000_000_000;

/// A job's zones, and its drawn I/O that waits for one.
pub(super) struct ZonedState {
    job: ZonedJob,
    /// Operation, first block and blocks, as drawn.
    drawn: Option<(Op, u64, u32)>,
    /// When it is tried again, ticks; 0 for at once.
    retry_at: u64,
    /// When it was drawn, ticks.
    drawn_at: u64,
}

impl ZonedState {
    pub(super) fn new(job: ZonedJob) -> ZonedState {
        ZonedState { job, drawn: None, retry_at: 0, drawn_at: 0 }
    }

    /// No I/O starts before this time, ticks.
    pub(super) fn not_before(&self) -> u64 {
        self.retry_at
    }

    /// Whether a drawn I/O waits for a zone.
    pub(super) fn has_drawn(&self) -> bool {
        self.drawn.is_some()
    }

    pub(super) fn resets(&self) -> u64 {
        self.job.resets()
    }

    pub(super) fn completed(&mut self, request: &Request<Data>, block_bytes: u32, success: bool) {
        self.job.completed(request.op, request.lba * u64::from(block_bytes), success);
        self.retry_at = 0;
    }

    pub(super) fn cancel(&mut self, request: &Request<Data>, block_bytes: u32) {
        self.job.cancel(request.op, request.lba * u64::from(block_bytes));
    }
}

impl Generator {
    /// A sequential job has passed data that it does not read: one pass over the region is shorter by that, as in fio.
    fn skip(&mut self, skipped: u64, io_bytes: u64) {
        if self.spec.number_ios.is_some() {
            return;
        }
        // The I/O that was drawn is still to start.
        if self.remaining_ios != UNLIMITED {
            self.remaining_ios = self.remaining_ios.saturating_sub(skipped / io_bytes.max(1)).max(1);
        }
        if let Some(general) = self.general.as_mut().filter(|general| general.remaining_bytes != UNLIMITED) {
            general.remaining_bytes = general.remaining_bytes.saturating_sub(skipped).max(io_bytes);
        }
    }

    pub(super) fn is_on_zones(&self) -> bool {
        self.general.as_ref().is_some_and(|general| general.zoned.is_some())
    }

    /// Draws the next I/O into the request that is used next, and moves it to where the zones permit it. Returns whether it
    /// can start: otherwise the job waits for another I/O, or ends.
    pub(super) fn draw_in_zones(&mut self, op: Option<Op>, now: u64) -> bool {
        let Some(zoned) = self.general.as_mut().and_then(|general| general.zoned.as_mut()) else {
            return true;
        };
        let Some(request) = self.idle.last_mut() else { return false };
        if now < zoned.retry_at {
            return false;
        }
        let is_random = self.pattern.is_random();
        let is_mixed = matches!(self.pattern.mix, OpMix::Mixed(_));
        if let Some((op, lba, blocks)) = zoned.drawn.take() {
            (request.op, request.lba, request.blocks, request.flow) = (op, lba, blocks, 0);
        } else {
            let op = op.unwrap_or_else(|| self.pattern.draw_op());
            let op = if is_mixed { zoned.job.op_of_mix(op) } else { op };
            self.pattern.next_with_op(request, Some(op));
            zoned.drawn_at = now;
        }
        let unit = u64::from(self.block_bytes);
        let (op, lba, blocks) = (request.op, request.lba, request.blocks);
        let bytes = u64::from(blocks) * unit;
        let mut placement = zoned.job.place(op, lba * unit, bytes, is_random);
        if placement == Placement::Exhausted && op == Op::Read && is_mixed && !is_random {
            // It has read all that is written: it begins again.
            placement = zoned.job.place(op, zoned.job.region_start(), bytes, is_random);
        }
        let message = match placement {
            Placement::At(at, length) => {
                (request.lba, request.blocks) = (at / unit, (length / unit) as u32);
                self.pattern.moved_to(0, op, request.lba, request.blocks);
                if op == Op::Read && !is_mixed && !is_random {
                    self.skip(at.saturating_sub(lba * unit), bytes);
                }
                return true;
            }
            Placement::Busy if now.saturating_sub(zoned.drawn_at) < clock::ns_to_ticks(BUSY_NS_MAX) => {
                zoned.drawn = Some((op, lba, blocks));
                zoned.retry_at = now + clock::ns_to_ticks(RETRY_NS);
                return false;
            }
            Placement::Exhausted => {
                self.issue_no_more();
                self.start_draining(now);
                return false;
            }
            Placement::Busy => {
                "no zone could be used for 30 s: are all open ones outside of the job's region?".to_string()
            }
            Placement::Failed(message) => message,
        };
        self.break_limit(direction_index(op).min(2), || message);
        self.start_draining(now);
        false
    }
}
