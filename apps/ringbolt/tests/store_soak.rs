//! Random faults, one or two at a time, on a cluster of the store on several machines (network namespaces) under
//! verified load. `RINGBOLT_SOAK_SECONDS` and `RINGBOLT_SOAK_SEED` set how long and which, as `./x soak` does. The seed decides
//! what is done when, not how the processes take turns: `sim` has failures that can be repeated.
#![allow(clippy::unwrap_used)]

#[path = "../../../store/cluster-map/tests/rig/mod.rs"]
mod etcd;
#[path = "rig/machines.rs"]
mod machines;
mod rig;
#[path = "rig/store.rs"]
mod store;
#[path = "rig/store_machines.rs"]
mod store_machines;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use random::WyRand;
use rig::{ringbolt, text};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use store_machines::{MACHINES, Machines, end_load, start_etcd, start_node, wait_until_healthy};

/// Seconds in `./x test`.
const SECONDS: u64 = 20;
/// How long a fault lasts at most, in milliseconds: several leases and graces.
const FAULT_MS_MAX: u64 = 3000;
/// Cases of 1,000 with a second fault while the first one lasts.
const SECOND_FAULT: u32 = 500;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    // Those that the second one of a round may be.
    /// A node is killed, and its supervisor starts it again.
    NodeKilled,
    /// A node is stopped by SIGSTOP.
    NodeStopped,
    /// What a machine sends to the next one is lost.
    LinkCutOneWay,
    /// A machine has no network.
    MachineCutOff,
    /// A server of etcd is stopped by SIGSTOP.
    EtcdServerStopped,
    /// Every server of etcd is killed.
    EtcdKilled,
    // The others begin in a healthy cluster.
    /// A node is killed twice.
    NodeKilledTwice,
    /// All nodes are killed.
    AllNodesKilled,
    /// Node and supervisor of a machine are killed, and started later.
    MachineCrashed,
    /// A machine's nodes end and are started later.
    MachineRestarted,
    /// An operator stops a node and starts it again.
    NodeInMaintenance,
    /// An operator takes a node out, and in again.
    NodeOut,
}

const FAULTS: [Fault; 12] = [
    Fault::NodeKilled,
    Fault::NodeStopped,
    Fault::LinkCutOneWay,
    Fault::MachineCutOff,
    Fault::EtcdServerStopped,
    Fault::EtcdKilled,
    Fault::NodeKilledTwice,
    Fault::AllNodesKilled,
    Fault::MachineCrashed,
    Fault::MachineRestarted,
    Fault::NodeInMaintenance,
    Fault::NodeOut,
];
/// The first of them may be the second fault of a round.
const SECOND_FAULTS: usize = 6;

impl Fault {
    /// Whether it can begin and end while another one lasts.
    fn may_follow(self, first: Fault) -> bool {
        let is_of_etcd = |fault| matches!(fault, Fault::EtcdServerStopped | Fault::EtcdKilled);
        let is_of_node = matches!(self, Fault::NodeKilled | Fault::NodeStopped);
        let is_machine_down = matches!(first, Fault::MachineCrashed | Fault::MachineRestarted);
        self != first && !(is_of_etcd(self) && is_of_etcd(first)) && !(is_of_node && is_machine_down)
    }
}

struct Soak {
    machines: Machines,
    random: WyRand,
}

/// Sends a signal to processes that may have ended.
fn signal_all(processes: &[u32], signal: Signal) {
    for process in processes {
        let _ = kill_process(Pid::from_raw(*process as i32).unwrap(), signal);
    }
}

/// Kills processes, and returns when they have ended.
fn kill_and_wait(processes: &[u32]) {
    let process = |id: &u32| pidfd_open(Pid::from_raw(*id as i32).unwrap(), PidfdFlags::empty()).ok();
    let running: Vec<OwnedFd> = processes.iter().filter_map(process).collect();
    signal_all(processes, Signal::KILL);
    for process in running {
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
    }
}

impl Soak {
    /// Lets time pass, which is when faults happen.
    fn pause(&mut self, ms_max: u64) {
        std::thread::sleep(Duration::from_millis(self.random.below(ms_max)));
    }

    fn node(&self, machine: usize) -> Vec<u32> {
        self.machines.clusters[machine].nodes()
    }

    fn start_machine(&mut self, machine: usize) {
        let Machines { network, directory, clusters, .. } = &mut self.machines;
        clusters.insert(machine, start_node(network, machine, directory, &[]));
    }

    fn operate(&self, machine: usize, command: &str) {
        self.machines.clusters[machine].ok(&["store", command, &(machine + 1).to_string()]);
    }

    fn begin(&mut self, fault: Fault, machine: usize) {
        let next = (machine + 1) % MACHINES;
        match fault {
            Fault::NodeKilled => signal_all(&self.node(machine), Signal::KILL),
            Fault::NodeStopped => signal_all(&self.node(machine), Signal::STOP),
            Fault::LinkCutOneWay => {
                let machines = &self.machines.network.machines;
                machines[machine].cut_to(&machines[next]);
            }
            Fault::MachineCutOff => self.machines.network.machines[machine].set_link(false),
            Fault::EtcdServerStopped => signal_all(&[self.machines.etcd.pid(machine)], Signal::STOP),
            Fault::EtcdKilled => (0..MACHINES).for_each(|server| self.machines.etcd.kill_server(server)),
            Fault::NodeKilledTwice => {
                signal_all(&self.node(machine), Signal::KILL);
                self.pause(1000);
                signal_all(&self.node(machine), Signal::KILL);
            }
            Fault::AllNodesKilled => {
                let nodes: Vec<u32> = (0..MACHINES).flat_map(|machine| self.node(machine)).collect();
                signal_all(&nodes, Signal::KILL);
            }
            Fault::MachineCrashed => {
                let nodes = self.node(machine);
                // The supervisor first: it would start another node.
                drop(self.machines.clusters.remove(machine));
                kill_and_wait(&nodes);
            }
            Fault::MachineRestarted => self.machines.clusters.remove(machine).end(),
            Fault::NodeInMaintenance => self.operate(machine, "stop-node"),
            Fault::NodeOut => self.operate(machine, "out"),
        }
    }

    fn end(&mut self, fault: Fault, machine: usize) {
        let next = (machine + 1) % MACHINES;
        match fault {
            Fault::NodeKilled | Fault::NodeKilledTwice | Fault::AllNodesKilled => {}
            Fault::NodeStopped => signal_all(&self.node(machine), Signal::CONT),
            Fault::LinkCutOneWay => {
                let machines = &self.machines.network.machines;
                machines[machine].mend_to(&machines[next]);
            }
            Fault::MachineCutOff => self.machines.network.machines[machine].set_link(true),
            Fault::EtcdServerStopped => signal_all(&[self.machines.etcd.pid(machine)], Signal::CONT),
            Fault::EtcdKilled => start_etcd(&self.machines.network, &mut self.machines.etcd),
            Fault::MachineCrashed | Fault::MachineRestarted => self.start_machine(machine),
            Fault::NodeInMaintenance => self.operate(machine, "start-node"),
            Fault::NodeOut => self.operate(machine, "in"),
        }
    }

    /// One or two faults under load, from a healthy cluster to a healthy one.
    fn round(&mut self, number: u32) {
        let depth = [1, 4, 16][self.random.index(3)];
        let load = ["--rw=randrw", "--time_based", "--runtime=600", "--output-format=json"];
        // By the configuration of a machine that runs all the time.
        let first = (FAULTS[self.random.index(FAULTS.len())], self.random.index(MACHINES));
        let client = &self.machines.clusters[(first.1 + 1) % MACHINES];
        let load = client.perf(&load).arg(format!("--iodepth={depth}")).spawn().unwrap();
        self.pause(1500);
        self.begin(first.0, first.1);
        let second = (FAULTS[self.random.index(SECOND_FAULTS)], self.random.index(MACHINES));
        let happens = self.random.happens(SECOND_FAULT) && second.0.may_follow(first.0);
        let second = Some(second).filter(|_| happens);
        if let Some((fault, machine)) = second {
            self.pause(1000);
            self.begin(fault, machine);
            self.pause(FAULT_MS_MAX);
            self.end(fault, machine);
        }
        self.pause(FAULT_MS_MAX);
        self.end(first.0, first.1);
        let ended = Instant::now();
        wait_until_healthy(&self.machines.clusters);
        let healthy = ended.elapsed();
        let output = end_load(load);
        let json: Value = serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output}"));
        let longest = ["read", "write"].map(|kind| json["jobs"][0][kind]["clat_ns"]["max"].as_u64().unwrap());
        let name = |(fault, machine): (Fault, usize)| format!("{fault:?} {}", machine + 1);
        println!(
            "{number}: {}{}, depth {depth}: healthy after {:.1} s, longest request {:.1} s",
            name(first),
            second.map_or_else(String::new, |second| format!(" with {}", name(second))),
            healthy.as_secs_f64(),
            longest.into_iter().max().unwrap() as f64 / 1e9
        );
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

#[test]
fn verified_load_outlives_random_faults() {
    let (seconds, seed) = (setting("RINGBOLT_SOAK_SECONDS", SECONDS), setting("RINGBOLT_SOAK_SEED", 1));
    println!("seed {seed}, {seconds} s");
    let Some(machines) = Machines::start("soak") else { return };
    let mut soak = Soak { machines, random: WyRand::new(seed) };
    let started = Instant::now();
    for number in 1.. {
        soak.round(number);
        if started.elapsed() >= Duration::from_secs(seconds) {
            break;
        }
    }
    let Machines { directory, clusters, .. } = &mut soak.machines;
    for (number, cluster) in (1..).zip(clusters.drain(..)) {
        let device = cluster.directory.join(format!("node{number}/store.img"));
        cluster.end();
        let checked = ringbolt(&["objects", "check", device.to_str().unwrap()]);
        assert!(checked.status.success(), "{}{}", text(&checked.stdout), text(&checked.stderr));
    }
    std::fs::remove_dir_all(directory).unwrap();
}
