//! Requests that were started and submitted together share one pair of time stamps, and their completions are
//! counted together.

use block_io::Request;
use dma::Data;

/// The batches with requests in flight. Each has at least one, so there are never more batches than requests.
pub(crate) struct SubmissionBatches {
    /// By tag: the index of the request's batch.
    batch_by_tag: Box<[u32]>,
    batches: Box<[SubmissionBatch]>,
    free: Vec<u32>,
    /// Batches that the channel has not accepted yet.
    unsubmitted: Vec<u32>,
}

/// Requests that were started at one time and accepted by the channel at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SubmissionBatch {
    /// When they were started, in ticks of [`os::clock`].
    pub(crate) issued: u64,
    /// When the channel had accepted them, in ticks; 0 if not yet or not measured.
    pub(crate) submitted: u64,
    /// Requests that have not completed.
    count: u32,
}

impl SubmissionBatches {
    /// For requests with tags below `depth`.
    pub(crate) fn new(depth: usize) -> SubmissionBatches {
        SubmissionBatches {
            batch_by_tag: vec![0; depth].into(),
            batches: vec![SubmissionBatch::default(); depth].into(),
            free: (0..depth as u32).rev().collect(),
            unsubmitted: Vec::with_capacity(depth),
        }
    }

    /// Starts these requests at `now`, as one batch.
    pub(crate) fn start(&mut self, requests: &mut [Request<Data>], now: u64) {
        let start = self.starter(requests.len(), now);
        requests.iter_mut().for_each(start);
    }

    /// Opens a batch of `count` requests that start at `now`; the closure assigns one request to it.
    #[inline]
    pub(crate) fn starter(&mut self, count: usize, now: u64) -> impl FnMut(&mut Request<Data>) {
        let number = if count > 0 { self.open(now, count as u32) } else { 0 };
        let batch_by_tag = &mut self.batch_by_tag;
        move |request| {
            request.issued_ticks = now;
            batch_by_tag[request.tag.0 as usize] = number;
        }
    }

    #[inline]
    fn open(&mut self, issued: u64, count: u32) -> u32 {
        let number = self.free.pop().expect("there are as many batches as requests");
        self.batches[number as usize] = SubmissionBatch { issued, submitted: 0, count };
        self.unsubmitted.push(number);
        number
    }

    /// Completes a request and restarts it at once in a batch of its own; returns the batch that it was in.
    #[inline]
    pub(crate) fn restart(&mut self, request: &mut Request<Data>, now: u64) -> SubmissionBatch {
        let number = self.batch_index(request);
        let batch = &mut self.batches[number as usize];
        let ended = *batch;
        request.issued_ticks = now;
        if ended.count == 1 {
            // The last request of a batch reuses the batch.
            *batch = SubmissionBatch { issued: now, submitted: 0, count: 1 };
            self.unsubmitted.push(number);
        } else {
            batch.count -= 1;
            self.batch_by_tag[request.tag.0 as usize] = self.open(now, 1);
        }
        ended
    }

    /// The channel accepted all ready requests except `left` at `now`; 0 if the time is not measured.
    #[inline]
    pub(crate) fn mark_submitted(&mut self, left: &[Request<Data>], now: u64) {
        for number in &self.unsubmitted {
            self.batches[*number as usize].submitted = now;
        }
        self.unsubmitted.clear();
        if !left.is_empty() {
            self.split_unsubmitted(left);
        }
    }

    /// Moves requests that the channel did not accept to batches of their own, as they are submitted later.
    #[cold]
    fn split_unsubmitted(&mut self, mut left: &[Request<Data>]) {
        while let Some(first) = left.first() {
            let whole = self.batch_index(first);
            let length = left.iter().take_while(|request| self.batch_index(request) == whole).count();
            let (run, rest) = left.split_at(length);
            left = rest;
            let (batch, count) = (&mut self.batches[whole as usize], run.len() as u32);
            if batch.count == count {
                self.unsubmitted.push(whole);
                continue;
            }
            batch.count -= count;
            let issued = batch.issued;
            let number = self.open(issued, count);
            for request in run {
                self.batch_by_tag[request.tag.0 as usize] = number;
            }
        }
    }

    /// Removes requests that were started and will not be submitted.
    pub(crate) fn cancel(&mut self, requests: &[Request<Data>]) {
        for request in requests {
            let number = self.batch_index(request);
            self.complete(number, 1);
        }
        self.unsubmitted.clear();
    }

    /// The index of a request's batch.
    #[inline]
    pub(crate) fn batch_index(&self, request: &Request<Data>) -> u32 {
        self.batch_by_tag[request.tag.0 as usize]
    }

    /// The batch of a request, with its time stamps.
    pub(crate) fn batch(&self, request: &Request<Data>) -> SubmissionBatch {
        self.batches[self.batch_index(request) as usize]
    }

    /// Counts `count` completions of a batch and returns it; frees it after the last.
    #[inline]
    pub(crate) fn complete(&mut self, number: u32, count: u32) -> SubmissionBatch {
        let batch = &mut self.batches[number as usize];
        batch.count -= count;
        let ended = *batch;
        if ended.count == 0 {
            self.free.push(number);
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use block_io::{Op, Tag};

    use super::*;

    fn requests(tags: std::ops::Range<u64>) -> Vec<Request<Data>> {
        tags.map(|tag| Request::new(Tag(tag), Op::Flush, 0, 0)).collect()
    }

    #[test]
    fn requests_that_a_full_channel_leaves_get_their_own_submission_time() {
        let mut batches = SubmissionBatches::new(6);
        let (mut first, mut second) = (requests(0..4), requests(4..6));
        batches.start(&mut first, 10);
        batches.mark_submitted(&first[3..], 11);
        batches.start(&mut second, 20);
        // Tag 3 and the second batch are submitted; the channel leaves the last request.
        batches.mark_submitted(&second[1..], 21);
        batches.mark_submitted(&[], 31);
        let mut times = |request: &Request<Data>| {
            let number = batches.batch_index(request);
            let SubmissionBatch { issued, submitted: sent, .. } = batches.complete(number, 1);
            (issued, sent)
        };
        let all: Vec<_> = first.iter().chain(&second).map(&mut times).collect();
        assert_eq!(all, [(10, 11), (10, 11), (10, 11), (10, 21), (20, 21), (20, 31)]);
        assert_eq!((batches.free.len(), batches.unsubmitted.len()), (6, 0));
    }

    #[test]
    fn single_request_batches_complete_in_any_order() {
        let mut batches = SubmissionBatches::new(4);
        let mut all = requests(0..4);
        let mut random = crate::WyRand::new(1);
        all.iter_mut().for_each(|request| batches.start(std::slice::from_mut(request), 0));
        batches.mark_submitted(&[], 1);
        for now in 1..1000 {
            let at = random.below(4) as usize;
            let number = batches.batch_index(&all[at]);
            if random.below(2) == 0 {
                assert!(batches.restart(&mut all[at], now).issued < now);
            } else {
                assert!(batches.complete(number, 1).issued < now);
                batches.start(&mut all[at..=at], now);
            }
            assert_eq!((all[at].issued_ticks, batches.batch(&all[at]).submitted), (now, 0));
            if random.below(3) == 0 {
                batches.cancel(&all[at..=at]);
                batches.start(&mut all[at..=at], now);
            }
            batches.mark_submitted(&[], now);
        }
    }
}
