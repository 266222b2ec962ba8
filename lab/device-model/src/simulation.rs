//! Discrete-event simulation of loads on models in virtual time: closed and open loops.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use block_io::Op;

use crate::latency::LatencyHistogram;
use crate::profile::{DeviceProfile, MediaState, Rw};
use crate::rng::ModelRng;
use crate::timing::{IoCommand, TimingModel};

/// Arrival process of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// Closed loop: each completion issues the next command.
    Closed {
        /// Queue depth: commands in flight.
        depth: u32,
    },
    /// Open loop: Poisson arrivals, independent of completions. At most [`OPEN_IN_FLIGHT_MAX`] commands
    /// are in flight; later ones wait in a host queue, and the wait counts as latency.
    Open {
        /// Mean arrivals per second.
        per_second: f64,
    },
}

/// Maximum commands in flight of an open loop.
pub const OPEN_IN_FLIGHT_MAX: u32 = 4096;

/// A load: access pattern, block size and arrival process, as a job of fio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Access pattern and direction.
    pub rw: Rw,
    /// Block size in bytes.
    pub bytes: u32,
    /// Arrival process.
    pub arrival: Arrival,
    /// Host CPU time per command in nanoseconds, serialized on one core.
    pub host_ns: u64,
    /// Further host latency per command in nanoseconds that occupies no core.
    pub wait_ns: u64,
}

/// The simulated devices and the duration of the measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulationConfig {
    /// Number of devices; commands are distributed round robin.
    pub devices: u32,
    /// Capacity of each device in bytes.
    pub bytes: u64,
    /// Preconditioning of the devices.
    pub state: MediaState,
    /// Ramp time in nanoseconds, before the measurement.
    pub ramp_ns: u64,
    /// When the measurement ends.
    pub end: MeasurementEnd,
    /// Seed of offsets and latencies.
    pub seed: u64,
}

/// When a measurement ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasurementEnd {
    /// This many nanoseconds after the ramp.
    AfterNs(u64),
    /// With this many commands of the first load, however long they take.
    AfterCommands(u64),
}

/// Measured results of one load.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadResult {
    /// Commands per second.
    pub iops: f64,
    /// Latency from issue to completion, including the host.
    pub latency: LatencyHistogram,
}

/// Runtime state of a load.
struct RunningLoad {
    load: Load,
    random: ModelRng,
    /// Block index of the next sequential command.
    position: u64,
    /// Device of the next command.
    device: usize,
    in_flight: u32,
    /// Arrival times of commands that wait for [`OPEN_IN_FLIGHT_MAX`]; open loop only.
    host_queue: VecDeque<u64>,
    /// When the host core is next free.
    host_free_at: u64,
    latency: LatencyHistogram,
}

/// A scheduled event: time, sequence number, and kind.
type SimulationEvent = Reverse<(u64, u64, EventKind)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EventKind {
    /// A command completes; `issued` is its issue time.
    Complete { load: usize, issued: u64 },
    /// A closed loop issues a command.
    Issue { load: usize },
    /// A command of an open loop arrives.
    Arrive { load: usize },
}

struct Simulation {
    devices: Vec<TimingModel>,
    bytes: u64,
    loads: Vec<RunningLoad>,
    events: BinaryHeap<SimulationEvent>,
    sequence: u64,
}

/// Runs loads concurrently on the same devices and returns their results in the same order.
///
/// # Panics
/// If there is no load or no device, or a command is larger than a device.
pub fn simulate(profile: &DeviceProfile, config: &SimulationConfig, loads: &[Load]) -> Vec<LoadResult> {
    assert!(!loads.is_empty() && config.devices > 0, "{} loads on {} devices", loads.len(), config.devices);
    for load in loads {
        assert!(u64::from(load.bytes) <= config.bytes, "{} bytes on {}", load.bytes, config.bytes);
    }
    let seed = |number: usize| config.seed.wrapping_add((number as u64 + 1) << 40);
    let device = |number| TimingModel::whole_device(profile, config.bytes, config.state, seed(number));
    let running = |(number, load): (usize, &Load)| RunningLoad {
        load: *load,
        random: ModelRng::new(!seed(number)),
        position: 0,
        device: 0,
        in_flight: 0,
        host_queue: VecDeque::new(),
        host_free_at: 0,
        latency: LatencyHistogram::default(),
    };
    let mut simulation = Simulation {
        devices: (0..config.devices as usize).map(device).collect(),
        bytes: config.bytes,
        loads: loads.iter().enumerate().map(running).collect(),
        events: BinaryHeap::new(),
        sequence: 0,
    };
    for (load, spec) in loads.iter().enumerate() {
        match spec.arrival {
            Arrival::Closed { depth } => {
                (0..depth).for_each(|_| simulation.push(0, EventKind::Issue { load }))
            }
            Arrival::Open { .. } => simulation.push(0, EventKind::Arrive { load }),
        }
    }
    let is_over = |now: u64, loads: &[RunningLoad]| match config.end {
        MeasurementEnd::AfterNs(ns) => now > config.ramp_ns.saturating_add(ns),
        MeasurementEnd::AfterCommands(count) => loads[0].latency.count() >= count,
    };
    let mut last = config.ramp_ns;
    while let Some(Reverse((now, _, kind))) = simulation.events.pop() {
        if is_over(now, &simulation.loads) {
            break;
        }
        simulation.handle(now, kind, config.ramp_ns);
        last = last.max(now);
    }
    let seconds = (last - config.ramp_ns).max(1) as f64 / 1e9;
    let measured =
        |load: RunningLoad| LoadResult { iops: load.latency.count() as f64 / seconds, latency: load.latency };
    simulation.loads.into_iter().map(measured).collect()
}

impl Simulation {
    fn push(&mut self, at: u64, kind: EventKind) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, kind)));
    }

    fn handle(&mut self, now: u64, kind: EventKind, ramp_ns: u64) {
        match kind {
            EventKind::Issue { load } => self.issue(now, now, load),
            EventKind::Arrive { load } => {
                let Arrival::Open { per_second } = self.loads[load].load.arrival else { return };
                // Exponential interarrival time: 53 random bits give a number in (0, 1].
                let chance = ((self.loads[load].random.next_u64() >> 11) + 1) as f64 / 2f64.powi(53);
                let interarrival_ns = (-chance.ln() * 1e9 / per_second) as u64;
                self.push(now + interarrival_ns, EventKind::Arrive { load });
                if self.loads[load].in_flight < OPEN_IN_FLIGHT_MAX {
                    self.issue(now, now, load);
                } else {
                    self.loads[load].host_queue.push_back(now);
                }
            }
            EventKind::Complete { load, issued } => {
                let running = &mut self.loads[load];
                running.in_flight -= 1;
                // The host core processes one command at a time.
                running.host_free_at = running.host_free_at.max(now) + running.load.host_ns;
                let completed_at = running.host_free_at;
                if completed_at >= ramp_ns {
                    running.latency.record(completed_at - issued);
                }
                match running.load.arrival {
                    Arrival::Closed { .. } if completed_at == now => self.issue(now, now, load),
                    Arrival::Closed { .. } => self.push(completed_at, EventKind::Issue { load }),
                    Arrival::Open { .. } => {
                        if let Some(arrived) = running.host_queue.pop_front() {
                            self.issue(now, arrived, load);
                        }
                    }
                }
            }
        }
    }

    fn issue(&mut self, now: u64, issued: u64, load: usize) {
        let running = &mut self.loads[load];
        running.in_flight += 1;
        let length = u64::from(running.load.bytes);
        let blocks = self.bytes / length;
        let block = if running.load.rw.is_random() {
            running.random.below(blocks)
        } else {
            let block = running.position % blocks;
            // Each device sees its own sequential stream.
            if running.device + 1 == self.devices.len() {
                running.position += 1;
            }
            block
        };
        let op = if running.load.rw.writes() { Op::Write } else { Op::Read };
        let io = IoCommand { op, offset: block * length, bytes: running.load.bytes, fua: false };
        let due = self.devices[running.device].schedule(now, &io) + running.load.wait_ns;
        running.device = (running.device + 1) % self.devices.len();
        self.push(due, EventKind::Complete { load, issued });
    }
}

#[cfg(test)]
mod tests;
