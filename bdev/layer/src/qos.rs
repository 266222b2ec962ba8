//! Rate limits of a device: reads and writes a second, and bytes a second.
//!
//! Each limit of a device is a bucket of tokens, I/Os or bytes. A channel borrows tokens in lots of a millisecond's worth
//! and spends them without touching a shared line, so that a limit that is not reached costs a few instructions a batch.
//! A request that needs more than a lot borrows that at once, and the bucket then lends nothing until the time for it has
//! passed. A batch goes past the queue only if tokens and one lot cover it all.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use block_io::Op;
use os::clock::Clock;

use crate::Request;

/// Limits of a device; 0 is no limit. Reads and writes count, as in SPDK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Reads and writes a second.
    pub rw_ios: u64,
    /// Bytes a second of reads and writes together.
    pub rw_bytes: u64,
    /// Bytes a second of reads.
    pub read_bytes: u64,
    /// Bytes a second of writes.
    pub write_bytes: u64,
}

const BUCKETS: usize = 4;
/// Tokens that a batch or request needs: I/Os, bytes, bytes read, bytes written.
type Tokens = [u64; BUCKETS];

/// A lot is a millisecond's worth.
const LOTS_PER_SECOND: u64 = 1000;
/// Unused time that still counts: a busy machine wakes a core milliseconds late, and what it could not lend meanwhile
/// would be lost.
const BURST_NS: u64 = 10_000_000;

/// The buckets of one device, shared by its channels.
#[derive(Default)]
pub(crate) struct DeviceQos {
    buckets: [TokenBucket; BUCKETS],
    /// Counts changes of the limits: a channel then drops its tokens.
    generation: AtomicU32,
}

/// A bucket, as the time up to which its tokens are lent. It fills by the time that passes.
#[derive(Default)]
struct TokenBucket {
    /// Tokens a second; 0 is no limit.
    rate: AtomicU64,
    lent_until_ns: AtomicU64,
}

/// The tokens of one channel.
#[derive(Default)]
pub(crate) struct ChannelQos {
    tokens: Tokens,
    generation: u32,
    /// When tokens can be borrowed for the request that did not get them.
    pub(crate) retry_at_ns: u64,
}

impl RateLimits {
    fn rates(self) -> Tokens {
        [self.rw_ios, self.rw_bytes, self.read_bytes, self.write_bytes]
    }

    /// Whether there is no limit.
    pub fn is_none(self) -> bool {
        self == RateLimits::default()
    }
}

impl DeviceQos {
    pub(crate) fn limits(&self) -> RateLimits {
        let [rw_ios, rw_bytes, read_bytes, write_bytes] =
            self.buckets.each_ref().map(|bucket| bucket.rate.load(Ordering::Relaxed));
        RateLimits { rw_ios, rw_bytes, read_bytes, write_bytes }
    }

    pub(crate) fn set_limits(&self, limits: RateLimits) {
        for (bucket, rate) in self.buckets.iter().zip(limits.rates()) {
            bucket.rate.store(rate, Ordering::Relaxed);
            // What was lent at the old rate says nothing at the new one.
            bucket.lent_until_ns.store(0, Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::Relaxed);
    }
}

impl TokenBucket {
    /// Borrows tokens, or returns when to try again.
    fn borrow(&self, rate: u64, tokens: u64, now_ns: u64) -> Result<(), u64> {
        let cost_ns = (u128::from(tokens) * 1_000_000_000 / u128::from(rate)) as u64;
        let mut lent_until = self.lent_until_ns.load(Ordering::Relaxed);
        loop {
            if lent_until > now_ns {
                return Err(lent_until);
            }
            // Of an idle time only a burst counts.
            let start = lent_until.max(now_ns.saturating_sub(BURST_NS));
            let exchanged = self.lent_until_ns.compare_exchange_weak(
                lent_until,
                start.saturating_add(cost_ns),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => return Ok(()),
                Err(other) => lent_until = other,
            }
        }
    }
}

impl ChannelQos {
    /// Takes the tokens for a whole batch, or none. With `same_shape` all requests are of one operation and length, and
    /// the cost does not depend on their number.
    pub(crate) fn admit_batch(
        &mut self,
        device: &DeviceQos,
        clock: &Clock,
        batch: &[Request],
        same_shape: bool,
        block_size: u32,
    ) -> bool {
        let mut needed = Tokens::default();
        if same_shape && let Some(first) = batch.first() {
            needed = tokens_of(first, block_size).map(|tokens| tokens * batch.len() as u64);
        } else {
            for request in batch {
                for (sum, tokens) in needed.iter_mut().zip(tokens_of(request, block_size)) {
                    *sum += tokens;
                }
            }
        }
        self.take(device, clock, needed, false)
    }

    /// Takes the tokens for one request, or none.
    pub(crate) fn admit(
        &mut self,
        device: &DeviceQos,
        clock: &Clock,
        request: &Request,
        block_size: u32,
    ) -> bool {
        self.take(device, clock, tokens_of(request, block_size), true)
    }

    /// Drops the tokens if the limits have changed.
    pub(crate) fn exchange(&mut self, device: &DeviceQos) {
        let generation = device.generation.load(Ordering::Relaxed);
        if self.generation != generation {
            (self.generation, self.tokens) = (generation, Tokens::default());
        }
    }

    fn take(&mut self, device: &DeviceQos, clock: &Clock, needed: Tokens, may_exceed_lot: bool) -> bool {
        self.exchange(device);
        let rates = device.limits().rates();
        let mut now_ns = 0;
        for (index, bucket) in device.buckets.iter().enumerate() {
            let missing = needed[index].saturating_sub(self.tokens[index]);
            if rates[index] == 0 || missing == 0 {
                continue;
            }
            let lot = (rates[index] / LOTS_PER_SECOND).max(1);
            if missing > lot && !may_exceed_lot {
                return false;
            }
            if now_ns == 0 {
                now_ns = clock.now_ns();
            }
            if let Err(retry_at_ns) = bucket.borrow(rates[index], lot.max(missing), now_ns) {
                self.retry_at_ns = retry_at_ns;
                return false;
            }
            self.tokens[index] += lot.max(missing);
        }
        for (index, tokens) in self.tokens.iter_mut().enumerate() {
            if rates[index] > 0 {
                *tokens -= needed[index];
            }
        }
        true
    }
}

fn tokens_of(request: &Request, block_size: u32) -> Tokens {
    let bytes = u64::from(request.blocks) * u64::from(block_size);
    match request.op {
        Op::Read => [1, bytes, bytes, 0],
        Op::Write => [1, bytes, 0, bytes],
        _ => [0; BUCKETS],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_bucket_lends_its_rate_and_a_burst_after_idle_time() {
        let bucket = TokenBucket::default();
        let (mut now_ns, mut lent) = (3_600_000 * MS, 0);
        // A thousandth of the rate each time that it lends: in a second the rate, and one burst.
        let end = now_ns + 1000 * MS;
        while now_ns < end {
            match bucket.borrow(10_000, 10, now_ns) {
                Ok(()) => lent += 10,
                Err(retry_at_ns) => {
                    assert!(retry_at_ns > now_ns && retry_at_ns <= now_ns + MS);
                    now_ns = retry_at_ns;
                }
            }
        }
        assert!((10_000..=10_120).contains(&lent), "{lent}");
    }

    #[test]
    fn a_large_loan_is_repaid_before_the_next() {
        let bucket = TokenBucket::default();
        let now_ns = 3_600_000 * MS;
        assert_eq!(bucket.borrow(1000, 500, now_ns), Ok(()));
        let retry_at_ns = now_ns - BURST_NS + 500 * MS;
        assert_eq!(bucket.borrow(1000, 1, now_ns), Err(retry_at_ns));
        assert_eq!(bucket.borrow(1000, 1, retry_at_ns), Ok(()));
    }

    #[test]
    fn a_batch_borrows_one_lot_and_a_request_what_it_needs() {
        let device = DeviceQos::default();
        device.set_limits(RateLimits { rw_bytes: 512_000, ..RateLimits::default() });
        let mut channel = ChannelQos::default();
        let read = |blocks| Request::new(block_io::Tag(0), Op::Read, 0, blocks);
        assert!(
            !channel.admit_batch(&device, &Clock::monotonic(), &[read(1), read(1)], false, 512),
            "a lot is one block"
        );
        assert!(channel.admit_batch(&device, &Clock::monotonic(), &[read(1)], false, 512));
        let device = DeviceQos::default();
        device.set_limits(RateLimits { rw_bytes: 512_000, ..RateLimits::default() });
        assert!(channel.admit(&device, &Clock::monotonic(), &read(100), 512));
        assert!(
            !channel.admit(&device, &Clock::monotonic(), &read(1), 512),
            "until the time for 100 has passed"
        );
    }

    #[test]
    fn a_batch_of_one_shape_takes_the_tokens_of_all_its_requests() {
        let read = |blocks| Request::new(block_io::Tag(0), Op::Read, 0, blocks);
        let batches = [vec![read(8)], (0..100).map(|_| read(8)).collect()];
        let left = batches.each_ref().map(|batch| {
            [false, true].map(|same_shape| {
                let (device, mut channel) = (DeviceQos::default(), ChannelQos::default());
                let limits = RateLimits { rw_ios: 1_000_000, read_bytes: 1 << 40, ..RateLimits::default() };
                device.set_limits(limits);
                assert!(channel.admit_batch(&device, &Clock::monotonic(), batch, same_shape, 512));
                channel.tokens
            })
        });
        let bytes = (1 << 40) / LOTS_PER_SECOND;
        assert_eq!(left[0], [[999, 0, bytes - 4096, 0]; 2]);
        assert_eq!(left[1], [[900, 0, bytes - 409_600, 0]; 2]);
    }

    #[test]
    fn a_channel_drops_its_tokens_when_the_limits_change() {
        let device = DeviceQos::default();
        let mut channel = ChannelQos::default();
        device.set_limits(RateLimits { rw_ios: 1, ..RateLimits::default() });
        let flush = Request::new(block_io::Tag(0), Op::Flush, 0, 0);
        assert!(channel.take(&device, &Clock::monotonic(), [1, 0, 0, 0], false), "the first lot");
        assert!(!channel.take(&device, &Clock::monotonic(), [1, 0, 0, 0], false));
        assert!(channel.admit(&device, &Clock::monotonic(), &flush, 512), "a flush is not limited");
        device.set_limits(RateLimits::default());
        assert!(channel.take(&device, &Clock::monotonic(), [1, 1, 1, 1], false));
        assert_eq!(channel.tokens, [0; BUCKETS]);
    }
}
