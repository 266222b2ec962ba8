//! A device that takes longer: an average and a 99th percentile for reads and for writes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::Op;
use uuid::Uuid;

use super::base::{Base, Dice, follow};
use crate::{Bdev, BdevError, BoxedChannel, Completion, Device, Geometry, Registry, Request, Value};

/// How a delay device is made. Latencies are added to the base's own.
#[derive(Clone, Debug)]
pub struct DelayConfig {
    /// The device that it stands on.
    pub base: String,
    /// Its name.
    pub name: String,
    /// Its UUID; made up where none is given.
    pub uuid: Option<Uuid>,
    /// Added to 99 of 100 reads, in microseconds.
    pub avg_read_latency_us: u64,
    /// Added to 1 of 100 reads, by chance; at least the average.
    pub p99_read_latency_us: u64,
    /// Added to 99 of 100 writes.
    pub avg_write_latency_us: u64,
    /// Added to 1 of 100 writes, by chance; at least the average.
    pub p99_write_latency_us: u64,
    /// Decides which I/Os get the 99th percentile.
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

/// Which latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Latency {
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
/// Longest latency, an hour: beyond that a mistyped unit is likelier than a wish.
const LATENCY_US_MAX: u64 = 3_600_000_000;

/// The module's object.
pub struct Delay {
    name: String,
    base: Base,
    latencies_ns: Arc<[AtomicU64; CLASSES]>,
    seed: u64,
}

/// Makes a delay device on a base, which it claims.
pub fn create(registry: &Registry, config: DelayConfig) -> Result<Arc<Device>, BdevError> {
    let latencies_us = [
        config.avg_read_latency_us,
        config.p99_read_latency_us,
        config.avg_write_latency_us,
        config.p99_write_latency_us,
    ];
    check(latencies_us)?;
    let base = Base::claim(registry, &config.base, &format!("delay bdev {}", config.name))?;
    let below = base.device().clone();
    let latencies_ns = Arc::new(latencies_us.map(|us| AtomicU64::new(us * 1000)));
    let module = Delay { name: config.name.clone(), base, latencies_ns, seed: config.seed };
    let device = registry.register(&config.name, config.uuid, &[], Arc::new(module))?;
    follow(registry, &below, &device);
    Ok(device)
}

/// Changes one latency for the I/Os that the base completes from now on.
pub fn update_latency(
    registry: &Registry,
    name: &str,
    which: Latency,
    latency_us: u64,
) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    let Some(module) = device.module::<Delay>() else {
        return Err(BdevError::WrongKind { name: name.to_string(), wanted: "Delay bdev" });
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

impl Bdev for Delay {
    fn product_name(&self) -> &'static str {
        "Delay bdev"
    }

    fn geometry(&self) -> Geometry {
        self.base.device().geometry()
    }

    fn supports(&self, op: Op) -> bool {
        op == Op::Reset || self.base.device().bdev().supports(op)
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(Channel {
            base: self.base.channel(core)?,
            latencies_ns: self.latencies_ns.clone(),
            dice: Dice::new(self.seed ^ (core.index() as u64) << 32),
            forward: Vec::new(),
            held: std::array::from_fn(|_| VecDeque::new()),
            below: Vec::new(),
        }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        let us =
            |which: Latency| Value::Number(self.latencies_ns[which as usize].load(Ordering::Relaxed) / 1000);
        let object = vec![
            ("name", self.name.as_str().into()),
            ("base_bdev_name", self.base.device().name().into()),
            ("avg_read_latency", us(Latency::AvgRead)),
            ("p99_read_latency", us(Latency::P99Read)),
            ("avg_write_latency", us(Latency::AvgWrite)),
            ("p99_write_latency", us(Latency::P99Write)),
        ];
        vec![("delay", Value::Object(object))]
    }

    fn reads_undefined(&self) -> bool {
        self.base.device().bdev().reads_undefined()
    }

    fn read_only(&self) -> bool {
        self.base.device().bdev().read_only()
    }

    fn depth(&self) -> u32 {
        self.base.device().bdev().depth()
    }

    fn closed(&self) {
        self.base.release();
    }
}

struct Channel {
    base: crate::Channel,
    latencies_ns: Arc<[AtomicU64; CLASSES]>,
    dice: Dice,
    forward: Vec<Request>,
    /// A FIFO a class: within a class the latency is the same, so that the first is due first. An
    /// update keeps the order; a shorter latency then counts from behind the longer ones before it.
    held: [VecDeque<(u64, Completion)>; CLASSES],
    /// Empty between calls.
    below: Vec<Completion>,
}

impl Channel {
    /// Which latency an I/O gets, `None` for none.
    fn class_of(&mut self, op: Op) -> Option<usize> {
        let average = match op {
            Op::Read => Latency::AvgRead,
            Op::Write | Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable => Latency::AvgWrite,
            Op::Flush | Op::Reset | Op::Compare => return None,
        };
        Some(average as usize + usize::from(self.dice.below(100) == 0))
    }

    fn release_all(&mut self) {
        for held in &mut self.held {
            held.iter_mut().for_each(|(due_ns, _)| *due_ns = 0);
        }
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        if batch.iter().any(|request| request.op == Op::Reset) {
            // What is held has been done below; a reset waits for nobody.
            self.release_all();
        }
        self.forward.append(batch);
        self.base.submit(&mut self.forward);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        self.base.submit(&mut self.forward);
        let mut below = std::mem::take(&mut self.below);
        self.base.poll(&mut below);
        let now_ns = sys::clock::now_ns();
        for completion in below.drain(..) {
            match self.class_of(completion.request().op) {
                Some(class) => {
                    let due_ns = now_ns + self.latencies_ns[class].load(Ordering::Relaxed);
                    self.held[class].push_back((due_ns, completion));
                }
                None => sink.push(completion),
            }
        }
        self.below = below;
        for held in &mut self.held {
            while let Some((due_ns, _)) = held.front()
                && *due_ns <= now_ns
                && let Some((_, completion)) = held.pop_front()
            {
                sink.push(completion);
            }
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.forward.is_empty() && self.base.outstanding() == 0 {
            return Some(0);
        }
        let due = self.held.iter().filter_map(|held| held.front().map(|(due_ns, _)| *due_ns));
        due.chain(self.base.deadline()).min()
    }
}
