//! One or two hosts with multipath, two targets, one disk with a volatile cache.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use bdev::testing::CrashDisk;
use bdev::{Access, Bdev, Registry};
use bdev_nvme::{Attach, Initiator, PathConfig, Policy, ReconnectPolicy, Selector, TransportId};
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
use random::WyRand;
use uuid::Uuid;

use super::{PlantedFault, RunFailure, SeedReport};
use crate::oracle::{BLOCK_BYTES, Oracle};
use crate::workload::{SimWorkload, WorkloadConfig};
use crate::{EarlyDisk, FabricOptions, LinkConfig, NodeId, SimulatedLinks, World, node_address};

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const DISK_UUID: Uuid = Uuid::from_u128(0x6d5c_7a3e_0a52_4d5f_9d0b_7d3a_1f7d_2c11);
const PORT: u16 = 4420;
const TARGETS: usize = 2;
const HOSTS_MAX: usize = 2;
const CORES: u32 = 2;
/// Blocks of each host core.
const BLOCKS: u64 = 48;
const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
/// Time within which everything must complete once everything works again: reconnection after a backoff, and
/// the timeouts of a connection attempt that was under way.
const RECOVERY_NS: u64 = 120 * SECOND;

/// A run: the world, its processes, and what the seed chose.
struct Run {
    seed: u64,
    world: World,
    random: WyRand,
    hosts: Vec<NodeId>,
    targets: Vec<Target>,
    disk: CrashDisk,
    fault: Option<PlantedFault>,
    oracle: Rc<RefCell<Oracle>>,
    loads: Vec<SimWorkload>,
    faults: u64,
    keep_alive_ms: u32,
}

struct Target {
    node: NodeId,
    process: Option<NvmfTarget<SimulatedLinks>>,
    /// When the fault that it has ends.
    recovers_ns: Option<u64>,
    paused: bool,
}

pub(super) fn run(seed: u64, fault: Option<PlantedFault>) -> Result<SeedReport, RunFailure> {
    let mut run = Run::new(seed, fault);
    let outcome = run.execute();
    run.world.end();
    outcome
}

impl Run {
    fn new(seed: u64, fault: Option<PlantedFault>) -> Run {
        let late_ns = [0, 300 * MILLISECOND][seed as usize % 2];
        let world = World::new(seed, FabricOptions { late_ns });
        let mut random = world.rng();
        let create = match fault {
            Some(PlantedFault::IgnoredFua) => CrashDisk::create_ignoring_fua,
            _ => CrashDisk::create,
        };
        // Its own registry: each target registers the disk as a process would.
        let enclosure = Registry::new();
        let blocks = BLOCKS * u64::from(CORES) * HOSTS_MAX as u64;
        let disk = create(&enclosure, "Disk", blocks, BLOCK_BYTES as u32, random.next_bits())
            .expect("a valid geometry");
        let hosts = (0..1 + random.index(HOSTS_MAX)).map(|_| world.add_node()).collect();
        let target = |node| Target { node, process: None, recovers_ns: None, paused: false };
        let targets = (0..TARGETS).map(|_| target(world.add_node())).collect();
        let keep_alive_ms = [500, 1000, 2000, 4000][random.index(4)];
        let oracle = Rc::new(RefCell::new(Oracle::new(blocks)));
        let (loads, faults) = (Vec::new(), 0);
        Run { seed, world, random, hosts, targets, disk, fault, oracle, loads, faults, keep_alive_ms }
    }

    fn execute(&mut self) -> Result<SeedReport, RunFailure> {
        self.start_targets();
        let mut initiators = Vec::new();
        for host in self.hosts.clone() {
            let (initiator, registry) = self.start_host(host)?;
            self.start_loads(host, &registry)?;
            initiators.push(initiator);
        }
        self.cause_faults()?;
        self.recover();
        self.loads.iter().for_each(SimWorkload::drain);
        self.wait_idle("after the faults")?;
        self.loads.iter().for_each(SimWorkload::verify);
        self.wait_idle("while reading everything back")?;
        initiators.iter().for_each(Initiator::stop_all);
        let counts = self.loads.iter().map(SimWorkload::counts);
        Ok(SeedReport {
            succeeded: counts.clone().map(|counts| counts.succeeded).sum(),
            failed: counts.map(|counts| counts.failed).sum(),
            faults: self.faults,
            simulated_ns: self.world.now_ns(),
            turns: self.world.turns(),
            trace: self.world.trace(),
            ..SeedReport::default()
        })
    }

    /// Starts the targets, with links of one speed.
    fn start_targets(&mut self) {
        let link = LinkConfig {
            delay_ns: 2_000 + self.random.below(200_000),
            jitter_ns: self.random.below(300_000),
            byte_ps: [80, 800, 8000][self.random.index(3)],
            blocked: false,
        };
        for index in 0..TARGETS {
            let node = self.targets[index].node;
            for host in self.hosts.clone() {
                self.world.set_link(host, node, link);
                self.world.set_link(node, host, link);
            }
            self.start_target(index);
        }
    }

    fn failure(&self, why: String) -> RunFailure {
        RunFailure { seed: self.seed, at_ns: self.world.now_ns(), why }
    }

    /// Boots a target's node and configures it as an administrator would.
    fn start_target(&mut self, index: usize) {
        let node = self.targets[index].node;
        let handles = self.world.boot(node, CORES);
        let registry = Registry::new();
        let disk: Arc<dyn Bdev> = Arc::new(self.disk.clone());
        let disk = match self.fault {
            Some(PlantedFault::EarlyAcknowledge) => Arc::new(EarlyDisk(disk)),
            _ => disk,
        };
        registry.register("Disk", Some(DISK_UUID), &[], disk).expect("a new registry");
        let target = NvmfTarget::<SimulatedLinks>::with_network(registry, &handles);
        let configure = || {
            target.create_transport(TcpTransportConfig::default())?;
            let first = index as u16 * 1000 + 1;
            let subsystem = SubsystemConfig {
                allow_any_host: true,
                // Controllers of one subsystem have different identifiers.
                min_cntlid: first,
                max_cntlid: first + 999,
                ..SubsystemConfig::default()
            };
            target.create_subsystem(NQN, subsystem)?;
            target.add_namespace(NQN, NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new("Disk") })?;
            let address = ListenAddress::tcp(&node_address(node).to_string(), &PORT.to_string());
            target.add_listener(NQN, address)
        };
        configure().expect("the configuration is valid and the target runs");
        self.targets[index].process = Some(target);
    }

    /// Boots a host and attaches both paths.
    fn start_host(&mut self, host: NodeId) -> Result<(Initiator, Registry), RunFailure> {
        let handles = self.world.boot(host, CORES);
        let registry = Registry::new();
        let initiator = Initiator::with_network::<SimulatedLinks>(registry.clone(), &handles);
        let policy = match self.random.index(3) {
            0 => Policy::ActivePassive,
            1 => Policy::ActiveActive(Selector::RoundRobin { min_io: 1 + self.random.below(8) as u32 }),
            _ => Policy::ActiveActive(Selector::QueueDepth),
        };
        let fast_fail_ns =
            self.random.happens(300).then(|| 500 * MILLISECOND + self.random.below(2 * SECOND));
        let reconnect = ReconnectPolicy {
            loss_timeout_ns: None,
            delay_ns: 20 * MILLISECOND + self.random.below(400 * MILLISECOND),
            fast_fail_ns,
        };
        let options = nvme::Options {
            host_id: [host as u8 + 1; 16],
            queue_depth: 16,
            keep_alive_ms: self.keep_alive_ms,
            timeout_ns: SECOND,
            quiesce_wait: self.fault != Some(PlantedFault::LateCommand),
            ..nvme::Options::default()
        };
        for target in &self.targets {
            let address = node_address(target.node);
            let uri = format!("nvme+tcp://{address}:{PORT}/{NQN}").parse().expect("a valid URI");
            let path = PathConfig {
                options: options.clone(),
                reconnect,
                num_io_queues: CORES as u16,
                ..PathConfig::new(TransportId(uri))
            };
            let attached = initiator.attach(Attach { policy, ..Attach::new("Nvme0", path) });
            attached.map_err(|error| self.failure(format!("attaching {address}: {error}")))?;
        }
        Ok((initiator, registry))
    }

    fn start_loads(&mut self, host: NodeId, registry: &Registry) -> Result<(), RunFailure> {
        for core in &self.world.cores(host) {
            let opened = registry.open("Nvme0n1", Access::ReadWrite).and_then(|device| device.channel(core));
            let channel = opened.map_err(|error| self.failure(format!("opening the namespace: {error}")))?;
            let config = WorkloadConfig {
                start: self.loads.len() as u64 * BLOCKS,
                blocks: BLOCKS,
                depth: 1 + self.random.index(8),
                pause_ns: MILLISECOND + self.random.below(20 * MILLISECOND),
            };
            self.loads.push(SimWorkload::start(core, channel, &self.oracle, config));
        }
        Ok(())
    }

    /// Lets the loads run while faults begin and end.
    fn cause_faults(&mut self) -> Result<(), RunFailure> {
        let count = 2 + self.random.below(8);
        for _ in 0..count {
            let pause_ns = (self.random.exponential() * 400e6) as u64;
            self.run_for(pause_ns.min(3 * SECOND))?;
            self.cause_fault();
        }
        self.run_for(SECOND)
    }

    /// Runs for a time, and ends the faults whose time is over.
    fn run_for(&mut self, time_ns: u64) -> Result<(), RunFailure> {
        let end_ns = self.world.now_ns() + time_ns;
        loop {
            let next_ns = self.targets.iter().filter_map(|target| target.recovers_ns).min();
            let stop_ns =
                next_ns.unwrap_or(u64::MAX).clamp(self.world.now_ns(), end_ns.max(self.world.now_ns()));
            self.world.run_until(stop_ns);
            self.check()?;
            let now_ns = self.world.now_ns();
            for index in 0..TARGETS {
                if self.targets[index].recovers_ns.is_some_and(|at_ns| at_ns <= now_ns) {
                    self.heal(index);
                }
            }
            if now_ns >= end_ns {
                return Ok(());
            }
        }
    }

    fn check(&self) -> Result<(), RunFailure> {
        match self.loads.iter().find_map(SimWorkload::violation) {
            Some(why) => Err(self.failure(why)),
            None => Ok(()),
        }
    }

    fn cause_fault(&mut self) {
        self.faults += 1;
        if self.random.happens(120) {
            return self.fail_power();
        }
        let index = self.random.index(TARGETS);
        if self.targets[index].recovers_ns.is_some() {
            return;
        }
        let (host, node) = (self.hosts[self.random.index(self.hosts.len())], self.targets[index].node);
        match self.random.index(5) {
            0 | 1 => self.crash(index),
            2 => {
                self.world.pause(node, true);
                self.targets[index].paused = true;
            }
            3 => self.world.block(host, node, true),
            _ if self.random.happens(500) => self.world.block(node, host, true),
            _ => {
                self.world.block(host, node, true);
                self.world.block(node, host, true);
            }
        }
        // Mostly short, some longer than the keep-alive timeout.
        let longest_ns = u64::from(self.keep_alive_ms) * 2 * MILLISECOND;
        // A late command needs a target that comes back after the host has given it up.
        let is_short = self.fault != Some(PlantedFault::LateCommand) && self.random.happens(600);
        let lasts_ns = match is_short {
            true => self.random.below(100 * MILLISECOND),
            false => self.random.below(longest_ns),
        };
        self.targets[index].recovers_ns = Some(self.world.now_ns() + lasts_ns);
    }

    /// The enclosure loses power: both targets end, and the disk loses its cache.
    fn fail_power(&mut self) {
        (0..TARGETS).for_each(|index| self.crash(index));
        self.disk.fail_power(self.random.next_bits());
        self.oracle.borrow_mut().power_failed();
        let back_ns = self.world.now_ns() + self.random.below(500 * MILLISECOND);
        for target in &mut self.targets {
            target.recovers_ns = Some(target.recovers_ns.unwrap_or(0).max(back_ns));
        }
    }

    fn crash(&mut self, index: usize) {
        let target = &mut self.targets[index];
        if self.world.is_running(target.node) {
            self.world.crash(target.node);
        }
        target.paused = false;
        target.process = None;
    }

    /// Ends the faults of a target: it runs, and its links pass everything.
    fn heal(&mut self, index: usize) {
        let node = self.targets[index].node;
        self.targets[index].recovers_ns = None;
        for host in &self.hosts {
            self.world.block(*host, node, false);
            self.world.block(node, *host, false);
        }
        if std::mem::take(&mut self.targets[index].paused) {
            self.world.pause(node, false);
        }
        if !self.world.is_running(node) {
            self.start_target(index);
        }
    }

    fn recover(&mut self) {
        (0..TARGETS).for_each(|index| self.heal(index));
    }

    fn wait_idle(&mut self, when: &str) -> Result<(), RunFailure> {
        let end_ns = self.world.now_ns() + RECOVERY_NS;
        while !self.loads.iter().all(SimWorkload::is_idle) {
            if self.world.now_ns() >= end_ns {
                let in_flight: usize = self.loads.iter().map(SimWorkload::in_flight).sum();
                let time = RECOVERY_NS / SECOND;
                return Err(self.failure(format!("{in_flight} requests are in flight {time} s {when}")));
            }
            self.run_for(10 * MILLISECOND)?;
        }
        self.check()
    }
}

#[cfg(test)]
mod tests;
