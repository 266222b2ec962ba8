//! Loads in virtual time: closed and open loops over models, as fast as the processor computes them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use ring::Op;

use crate::latency::Latencies;
use crate::profile::{Profile, Rw, State};
use crate::random::Random;
use crate::timing::{Io, Timing};

/// When commands are issued.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// The next when one completes, so that always as many are in flight.
    Closed {
        /// How many.
        depth: u32,
    },
    /// By chance, so many a second on average, whatever completes. No more than
    /// [`OPEN_IN_FLIGHT_MAX`] are in flight; what comes then waits outside, and its latency counts.
    Open {
        /// Commands a second.
        per_second: f64,
    },
}

/// Most commands of an open loop inside the devices at a time.
pub const OPEN_IN_FLIGHT_MAX: u32 = 4096;

/// One load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Order and direction.
    pub rw: Rw,
    /// Bytes of a command.
    pub bytes: u32,
    /// When commands are issued.
    pub arrival: Arrival,
    /// Processor time of the host for each command, one after the other on one core.
    pub host_ns: u64,
    /// Further time of each command on the host.
    pub wait_ns: u64,
}

/// The devices under the loads, and how long it is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Number of devices; commands go to them in turn.
    pub devices: u32,
    /// Bytes of each.
    pub bytes: u64,
    /// What was written to them before.
    pub state: State,
    /// Time before anything is counted.
    pub ramp_ns: u64,
    /// Time for which is counted,
    pub measure_ns: u64,
    /// or as many commands of the first load, where that is sooner.
    pub commands_max: u64,
    /// Decides positions and latencies.
    pub seed: u64,
}

/// What a load saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Commands a second.
    pub iops: f64,
    /// From issue to completion, host included.
    pub latency: Latencies,
}

/// A load under way.
struct Running {
    load: Load,
    random: Random,
    /// Where the next sequential command goes.
    position: u64,
    /// The device that the next command goes to.
    device: usize,
    in_flight: u32,
    /// Arrived and not issued, of an open loop.
    outside: VecDeque<u64>,
    /// When the host's core is free.
    core: u64,
    latency: Latencies,
}

/// What happens next: time, order, and what.
type Event = Reverse<(u64, u64, What)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// A command that was issued at a time completes.
    Completes { load: usize, issued: u64 },
    /// A closed loop issues.
    Issues { load: usize },
    /// An open loop is given a command.
    Arrives { load: usize },
}

struct Drive {
    devices: Vec<Timing>,
    bytes: u64,
    loads: Vec<Running>,
    events: BinaryHeap<Event>,
    order: u64,
}

/// Runs loads side by side on the same devices and says what each saw, in their order.
///
/// # Panics
/// If there is no load or no device, or a command is larger than a device.
pub fn drive(profile: &Profile, setting: &Setting, loads: &[Load]) -> Vec<Measured> {
    assert!(!loads.is_empty() && setting.devices > 0, "{} loads on {} devices", loads.len(), setting.devices);
    for load in loads {
        assert!(u64::from(load.bytes) <= setting.bytes, "{} bytes on {}", load.bytes, setting.bytes);
    }
    let seed = |number: usize| setting.seed.wrapping_add((number as u64 + 1) << 40);
    let device = |number| Timing::alone(profile, setting.bytes, setting.state, seed(number));
    let running = |(number, load): (usize, &Load)| Running {
        load: *load,
        random: Random::new(!seed(number)),
        position: 0,
        device: 0,
        in_flight: 0,
        outside: VecDeque::new(),
        core: 0,
        latency: Latencies::default(),
    };
    let mut drive = Drive {
        devices: (0..setting.devices as usize).map(device).collect(),
        bytes: setting.bytes,
        loads: loads.iter().enumerate().map(running).collect(),
        events: BinaryHeap::new(),
        order: 0,
    };
    for (load, spec) in loads.iter().enumerate() {
        match spec.arrival {
            Arrival::Closed { depth } => (0..depth).for_each(|_| drive.push(0, What::Issues { load })),
            Arrival::Open { .. } => drive.push(0, What::Arrives { load }),
        }
    }
    let end = setting.ramp_ns.saturating_add(setting.measure_ns);
    let mut last = setting.ramp_ns;
    while let Some(Reverse((now, _, what))) = drive.events.pop() {
        if now > end || drive.loads[0].latency.count() >= setting.commands_max {
            break;
        }
        drive.handle(now, what, setting.ramp_ns);
        last = last.max(now);
    }
    let seconds = (last - setting.ramp_ns).max(1) as f64 / 1e9;
    let measured =
        |load: Running| Measured { iops: load.latency.count() as f64 / seconds, latency: load.latency };
    drive.loads.into_iter().map(measured).collect()
}

impl Drive {
    fn push(&mut self, at: u64, what: What) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, what)));
    }

    fn handle(&mut self, now: u64, what: What, ramp_ns: u64) {
        match what {
            What::Issues { load } => self.issue(now, now, load),
            What::Arrives { load } => {
                let Arrival::Open { per_second } = self.loads[load].load.arrival else { return };
                // An exponential pause: 53 random bits are a number above 0 and up to 1.
                let chance = ((self.loads[load].random.bits() >> 11) + 1) as f64 / 2f64.powi(53);
                let pause = (-chance.ln() * 1e9 / per_second) as u64;
                self.push(now + pause, What::Arrives { load });
                if self.loads[load].in_flight < OPEN_IN_FLIGHT_MAX {
                    self.issue(now, now, load);
                } else {
                    self.loads[load].outside.push_back(now);
                }
            }
            What::Completes { load, issued } => {
                let running = &mut self.loads[load];
                running.in_flight -= 1;
                // The host works on one command at a time.
                running.core = running.core.max(now) + running.load.host_ns;
                let seen = running.core;
                if seen >= ramp_ns {
                    running.latency.add(seen - issued);
                }
                match running.load.arrival {
                    Arrival::Closed { .. } if seen == now => self.issue(now, now, load),
                    Arrival::Closed { .. } => self.push(seen, What::Issues { load }),
                    Arrival::Open { .. } => {
                        if let Some(arrived) = running.outside.pop_front() {
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
        let places = self.bytes / length;
        let place = if running.load.rw.is_random() {
            running.random.below(places)
        } else {
            let place = running.position % places;
            // Each device sees a sequence of its own.
            if running.device + 1 == self.devices.len() {
                running.position += 1;
            }
            place
        };
        let op = if running.load.rw.writes() { Op::Write } else { Op::Read };
        let io = Io { op, offset: place * length, bytes: running.load.bytes, fua: false };
        let due = self.devices[running.device].book(now, &io) + running.load.wait_ns;
        running.device = (running.device + 1) % self.devices.len();
        self.push(due, What::Completes { load, issued });
    }
}

#[cfg(test)]
mod tests;
