//! I/O counters of paths, written by the core of each channel.

use bdev::{Completion, OpCounters, OpStats};
use block_io::Op;

const OPS: usize = Op::ALL.len();

/// Counters of one channel's link to one path, by operation.
#[derive(Default)]
pub(crate) struct LinkCounts([OpCounters; OPS]);

impl LinkCounts {
    /// Counts completed commands: retried I/O counts on every path that it used. Latency is measured from the
    /// submission to the block layer.
    pub(crate) fn add(&self, completions: &[Completion], block_size: u32) {
        if completions.is_empty() {
            return;
        }
        let now_ticks = os::clock::ticks();
        for completion in completions {
            let request = completion.request();
            let counts = &self.0[request.op.index()];
            if !completion.status().is_success() {
                counts.fail(1);
                continue;
            }
            let blocks = if request.op.has_range() { request.blocks } else { 0 };
            let bytes = u64::from(blocks) * u64::from(block_size);
            counts.succeed(1, bytes, now_ticks.saturating_sub(request.issued_ticks));
        }
    }
}

/// I/O statistics of a path of a namespace, summed over all cores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathStats([OpStats; OPS]);

impl PathStats {
    /// Statistics of one operation.
    pub fn op(&self, op: Op) -> &OpStats {
        &self.0[op.index()]
    }

    /// Failed commands of all operations.
    pub fn errors(&self) -> u64 {
        self.0.iter().map(|op| op.errors).sum()
    }

    pub(crate) fn add(&mut self, link: &LinkCounts) {
        for (sum, counts) in self.0.iter_mut().zip(&link.0) {
            sum.add(&counts.load());
        }
    }
}

#[cfg(test)]
mod tests {
    use block_io::{Request, Status, Tag};

    use super::*;

    #[test]
    fn commands_are_counted_by_operation_and_summed_over_links() {
        let write = || Request::new(Tag(0), Op::Write, 0, 4);
        let one = LinkCounts::default();
        one.add(&[write().complete(Status::SUCCESS), write().complete(Status::WRITE_FAULT)], 512);
        one.add(&[Request::new(Tag(0), Op::Flush, 0, 9).complete(Status::SUCCESS)], 512);
        let mut stats = PathStats::default();
        stats.add(&one);
        stats.add(&one);
        let writes = stats.op(Op::Write);
        assert_eq!((writes.ops, writes.bytes, writes.errors, stats.errors()), (2, 4096, 2, 2));
        assert!(writes.latency_min_ticks <= writes.latency_max_ticks);
        assert_eq!((stats.op(Op::Flush).ops, stats.op(Op::Flush).bytes), (2, 0));
        assert_eq!(*stats.op(Op::Read), OpStats::default());
    }
}
