//! The delay device: a virtual device that adds an average and a 99th percentile latency to reads and writes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block_io::Op;
use random::WyRand;
use uuid::Uuid;

use crate::stacking::{BaseBdev, BaseChannel, VirtualBdev, create_on};
use crate::{BdevError, BlockDevice, BoxedChannel, Completion, InfoValue, Registry, Request};

/// Configuration of a delay device. Latencies are added to those of the base.
#[derive(Clone, Debug)]
pub struct DelayConfig {
    /// Name of the base bdev.
    pub base: String,
    /// Name of the device.
    pub name: String,
    /// UUID; derived from the base's if none is given.
    pub uuid: Option<Uuid>,
    /// Added to 99 of 100 reads, in microseconds.
    pub avg_read_latency_us: u64,
    /// Added to 1 of 100 reads, chosen at random, in microseconds; at least the average.
    pub p99_read_latency_us: u64,
    /// Added to 99 of 100 writes, in microseconds.
    pub avg_write_latency_us: u64,
    /// Added to 1 of 100 writes, chosen at random, in microseconds; at least the average.
    pub p99_write_latency_us: u64,
    /// Seed of the random choice of I/Os that get the 99th percentile.
    pub seed: u64,
}

impl DelayConfig {
    /// A device that adds `latency_us` to every read and write of `base`.
    pub fn new(base: &str, name: &str, latency_us: u64) -> DelayConfig {
        DelayConfig {
            base: base.to_string(),
            name: name.to_string(),
            uuid: None,
            avg_read_latency_us: latency_us,
            p99_read_latency_us: latency_us,
            avg_write_latency_us: latency_us,
            p99_write_latency_us: latency_us,
            seed: 0,
        }
    }
}

/// Selects one of the four latencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatencyClass {
    /// 99 of 100 reads.
    AvgRead,
    /// 1 of 100 reads.
    P99Read,
    /// 99 of 100 writes.
    AvgWrite,
    /// 1 of 100 writes.
    P99Write,
}

const CLASSES: usize = 4;
/// Maximum latency, one hour: a longer one is more likely a wrong unit.
const LATENCY_US_MAX: u64 = 3_600_000_000;

/// The module's object of a delay device.
pub struct DelayBdev {
    name: String,
    uuid: Uuid,
    base: BaseBdev,
    latencies_ns: Arc<[AtomicU64; CLASSES]>,
    seed: u64,
}

/// Namespace of the UUIDs, which are made of the base's: SPDK's, so that a volume that moves here keeps its UUID.
const UUID_NAMESPACE: Uuid = Uuid::from_u128(0x4009_b574_6430_4f1b_bc40_ace8_1109_1027);

/// Creates a delay device on a base, which it claims.
pub fn create(registry: &Registry, config: DelayConfig) -> Result<Arc<BlockDevice>, BdevError> {
    let latencies_us = [
        config.avg_read_latency_us,
        config.p99_read_latency_us,
        config.avg_write_latency_us,
        config.p99_write_latency_us,
    ];
    check(latencies_us)?;
    let latencies_ns = Arc::new(latencies_us.map(|us| AtomicU64::new(us * 1000)));
    create_on(registry, "delay", &config.base, &config.name, |base| {
        let derived = || Uuid::new_v5(&UUID_NAMESPACE, base.device().uuid().as_bytes());
        let uuid = config.uuid.unwrap_or_else(derived);
        (uuid, DelayBdev { name: config.name.clone(), uuid, base, latencies_ns, seed: config.seed })
    })
}

/// Changes one latency, for I/Os that the base completes from now on.
pub fn update_latency(
    registry: &Registry,
    name: &str,
    which: LatencyClass,
    latency_us: u64,
) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    let Some(module) = device.module::<DelayBdev>() else {
        return Err(BdevError::WrongKind { name: name.to_string(), expected: "delay" });
    };
    if latency_us > LATENCY_US_MAX {
        return Err(too_long(latency_us));
    }
    module.latencies_ns[which as usize].store(latency_us * 1000, Ordering::Relaxed);
    Ok(())
}

fn check(latencies_us: [u64; CLASSES]) -> Result<(), BdevError> {
    if let Some(us) = latencies_us.into_iter().find(|us| *us > LATENCY_US_MAX) {
        return Err(too_long(us));
    }
    for (average, p99, field) in [(0, 1, "p99_read_latency"), (2, 3, "p99_write_latency")]
        .map(|(average, p99, field)| (latencies_us[average], latencies_us[p99], field))
    {
        if p99 < average {
            let reason = format!("{p99} us is below the average of {average} us");
            return Err(BdevError::invalid(field, reason));
        }
    }
    Ok(())
}

fn too_long(us: u64) -> BdevError {
    BdevError::invalid("latency", format!("{us} us is over an hour"))
}

impl VirtualBdev for DelayBdev {
    const PRODUCT_NAME: &'static str = "delay";

    fn base(&self) -> &BaseBdev {
        &self.base
    }

    fn open_on(&self, base: BaseChannel, core: &reactor::Core) -> BoxedChannel {
        Box::new(DelayChannel {
            base,
            clock: core.clock().clone(),
            latencies_ns: self.latencies_ns.clone(),
            rng: WyRand::new(self.seed ^ (core.index() as u64) << 32),
            delayed: std::array::from_fn(|_| VecDeque::new()),
        })
    }

    fn describe(&self) -> Vec<(&'static str, InfoValue)> {
        let us = |which: LatencyClass| {
            InfoValue::Number(self.latencies_ns[which as usize].load(Ordering::Relaxed) / 1000)
        };
        let object = vec![
            ("name", self.name.as_str().into()),
            ("base_bdev_name", self.base.device().name().into()),
            ("uuid", InfoValue::Text(self.uuid.to_string())),
            ("avg_read_latency", us(LatencyClass::AvgRead)),
            ("p99_read_latency", us(LatencyClass::P99Read)),
            ("avg_write_latency", us(LatencyClass::AvgWrite)),
            ("p99_write_latency", us(LatencyClass::P99Write)),
        ];
        vec![("delay", InfoValue::Object(object))]
    }
}

struct DelayChannel {
    base: BaseChannel,
    clock: os::clock::Clock,
    latencies_ns: Arc<[AtomicU64; CLASSES]>,
    rng: WyRand,
    /// Delayed completions with their due time, one FIFO a class: the latency in a class is constant, so that the
    /// oldest is due first. After an update to a shorter latency, newer completions still wait for older ones.
    delayed: [VecDeque<(u64, Completion)>; CLASSES],
}

/// The latency class of an I/O; `None` for no delay.
fn class_of(op: Op, rng: &mut WyRand) -> Option<usize> {
    let average = match op {
        Op::Read => LatencyClass::AvgRead,
        Op::Write | Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable => LatencyClass::AvgWrite,
        _ => return None,
    };
    Some(average as usize + usize::from(rng.below(100) == 0))
}

impl DelayChannel {
    fn release_all(&mut self) {
        for delayed in &mut self.delayed {
            delayed.iter_mut().for_each(|(due_ns, _)| *due_ns = 0);
        }
    }
}

impl block_io::Channel for DelayChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        if batch.iter().any(|request| request.op == Op::Reset) {
            // The base has already completed the delayed I/Os; a reset does not wait for them.
            self.release_all();
        }
        self.base.append(batch);
        self.base.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let DelayChannel { base, clock, latencies_ns, rng, delayed } = self;
        let completions = base.poll();
        let now_ns = clock.now_ns();
        for completion in completions {
            match class_of(completion.request().op, rng) {
                Some(class) => {
                    let due_ns = now_ns + latencies_ns[class].load(Ordering::Relaxed);
                    delayed[class].push_back((due_ns, completion));
                }
                None => sink.push(completion),
            }
        }
        for delayed in delayed {
            while let Some((due_ns, _)) = delayed.front()
                && *due_ns <= now_ns
                && let Some((_, completion)) = delayed.pop_front()
            {
                sink.push(completion);
            }
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        let due = self.delayed.iter().filter_map(|delayed| delayed.front().map(|(due_ns, _)| *due_ns));
        due.chain(self.base.deadline()).min()
    }
}
