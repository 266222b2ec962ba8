//! Which requests went out together: what they share is kept once, and completions that share it are
//! counted at once.

use memory::Buffer;
use ring::Request;

/// The batches that have requests in flight. Each has one at least, so that there are never more than
/// requests.
pub(crate) struct Batches {
    /// By tag: the batch that the request is in.
    of: Box<[u32]>,
    batches: Box<[Batch]>,
    free: Vec<u32>,
    /// Those that the channel has not taken yet.
    waiting: Vec<u32>,
}

/// Requests that were started at one time and taken by the channel at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    /// When they were started, in ticks.
    pub(crate) issued: u64,
    /// When the channel had taken them; 0 where nobody looked.
    pub(crate) sent: u64,
    /// Requests that are not back.
    count: u32,
}

impl Batches {
    /// For requests with tags below `depth`.
    pub(crate) fn new(depth: usize) -> Batches {
        Batches {
            of: vec![0; depth].into(),
            batches: vec![Batch::default(); depth].into(),
            free: (0..depth as u32).rev().collect(),
            waiting: Vec::with_capacity(depth),
        }
    }

    /// These are started now.
    pub(crate) fn start(&mut self, requests: &mut [Request<Buffer>], now: u64) {
        let start = self.starting(requests.len(), now);
        requests.iter_mut().for_each(start);
    }

    /// So many requests are started now: what is to be done with each of them.
    #[inline]
    pub(crate) fn starting(&mut self, count: usize, now: u64) -> impl FnMut(&mut Request<Buffer>) {
        let number = if count > 0 { self.open(now, count as u32) } else { 0 };
        let of = &mut self.of;
        move |request| {
            request.issued = now;
            of[request.tag.0 as usize] = number;
        }
    }

    #[inline]
    fn open(&mut self, issued: u64, count: u32) -> u32 {
        let number = self.free.pop().expect("there are as many batches as requests");
        self.batches[number as usize] = Batch { issued, sent: 0, count };
        self.waiting.push(number);
        number
    }

    /// A request that is back starts again at once, on its own: gives the batch that it was in.
    #[inline]
    pub(crate) fn again(&mut self, request: &mut Request<Buffer>, now: u64) -> Batch {
        let number = self.number(request);
        let batch = &mut self.batches[number as usize];
        let ended = *batch;
        request.issued = now;
        if ended.count == 1 {
            // The last of its batch takes the batch over.
            *batch = Batch { issued: now, sent: 0, count: 1 };
            self.waiting.push(number);
        } else {
            batch.count -= 1;
            self.of[request.tag.0 as usize] = self.open(now, 1);
        }
        ended
    }

    /// The channel has taken all that was ready but `left`.
    #[inline]
    pub(crate) fn sent(&mut self, left: &[Request<Buffer>], now: u64) {
        for number in &self.waiting {
            self.batches[*number as usize].sent = now;
        }
        self.waiting.clear();
        if !left.is_empty() {
            self.keep(left);
        }
    }

    /// What was left goes out later than the others of its batch.
    #[cold]
    fn keep(&mut self, mut left: &[Request<Buffer>]) {
        while let Some(first) = left.first() {
            let whole = self.number(first);
            let length = left.iter().take_while(|request| self.number(request) == whole).count();
            let (run, rest) = left.split_at(length);
            left = rest;
            let (batch, count) = (&mut self.batches[whole as usize], run.len() as u32);
            if batch.count == count {
                self.waiting.push(whole);
                continue;
            }
            batch.count -= count;
            let issued = batch.issued;
            let number = self.open(issued, count);
            for request in run {
                self.of[request.tag.0 as usize] = number;
            }
        }
    }

    /// These do not go out after all.
    pub(crate) fn withdraw(&mut self, requests: &[Request<Buffer>]) {
        for request in requests {
            let number = self.number(request);
            self.end(number, 1);
        }
        self.waiting.clear();
    }

    /// The number of the batch that a request is in.
    #[inline]
    pub(crate) fn number(&self, request: &Request<Buffer>) -> u32 {
        self.of[request.tag.0 as usize]
    }

    /// When a request was started, and when the channel had taken it.
    pub(crate) fn batch(&self, request: &Request<Buffer>) -> Batch {
        self.batches[self.number(request) as usize]
    }

    /// So many of a batch are back.
    #[inline]
    pub(crate) fn end(&mut self, number: u32, count: u32) -> Batch {
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
    use ring::{Op, Tag};

    use super::*;

    fn requests(tags: std::ops::Range<u64>) -> Vec<Request<Buffer>> {
        tags.map(|tag| Request::new(Tag(tag), Op::Flush, 0, 0)).collect()
    }

    #[test]
    fn what_the_channel_leaves_is_sent_when_it_is_taken() {
        let mut batches = Batches::new(6);
        let (mut first, mut second) = (requests(0..4), requests(4..6));
        batches.start(&mut first, 10);
        batches.sent(&first[3..], 11);
        batches.start(&mut second, 20);
        // Tag 3 and the second batch: of these the last is left.
        batches.sent(&second[1..], 21);
        batches.sent(&[], 31);
        let mut times = |request: &Request<Buffer>| {
            let number = batches.number(request);
            let Batch { issued, sent, .. } = batches.end(number, 1);
            (issued, sent)
        };
        let all: Vec<_> = first.iter().chain(&second).map(&mut times).collect();
        assert_eq!(all, [(10, 11), (10, 11), (10, 11), (10, 21), (20, 21), (20, 31)]);
        assert_eq!((batches.free.len(), batches.waiting.len()), (6, 0));
    }

    #[test]
    fn requests_of_their_own_batches_come_back_in_any_order_for_ever() {
        let mut batches = Batches::new(4);
        let mut all = requests(0..4);
        let mut random = crate::Random::new(1);
        all.iter_mut().for_each(|request| batches.start(std::slice::from_mut(request), 0));
        batches.sent(&[], 1);
        for now in 1..1000 {
            let at = random.below(4) as usize;
            let number = batches.number(&all[at]);
            if random.below(2) == 0 {
                assert!(batches.again(&mut all[at], now).issued < now);
            } else {
                assert!(batches.end(number, 1).issued < now);
                batches.start(&mut all[at..=at], now);
            }
            assert_eq!((all[at].issued, batches.batch(&all[at]).sent), (now, 0));
            if random.below(3) == 0 {
                batches.withdraw(&all[at..=at]);
                batches.start(&mut all[at..=at], now);
            }
            batches.sent(&[], now);
        }
    }
}
