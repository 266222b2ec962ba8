//! Machines of a small network: network namespaces on a bridge, each with its own links and routes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use std::os::fd::AsFd;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace, which ends with its holder and what runs in it.
pub(crate) struct Machine {
    /// A process that keeps the namespace; it ends when its standard input does, so it never outlives the test.
    holder: Child,
    pub(crate) address: String,
}

/// The network, in whose middle the thread that made it stays: the test and the clients that it starts are there.
pub(crate) struct MachineNetwork {
    _bridge: Machine,
    pub(crate) machines: Vec<Machine>,
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Machine {
    /// A namespace with nothing but a loopback interface that is up; else why there is none.
    fn new(address: String) -> Result<Machine, String> {
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "ip link set lo up && echo up && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line == "up\n" {
            return Ok(Machine { holder, address });
        }
        let output = holder.wait_with_output().unwrap();
        Err(format!("no network namespaces: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }

    /// Moves this thread, and what it starts from now on, into the namespace.
    fn enter(&self) {
        let namespace = std::fs::File::open(format!("/proc/{}/ns/net", self.holder.id())).unwrap();
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }

    /// Runs a function, and what it starts, on this machine.
    pub(crate) fn run<T: Send>(&self, function: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter();
                function()
            });
            thread.join().unwrap()
        })
    }

    /// What it sends to another machine is lost from now on, and not the other way.
    pub(crate) fn cut_to(&self, other: &Machine) {
        self.run(|| ip(&format!("route add blackhole {}/32", other.address)));
    }

    pub(crate) fn mend_to(&self, other: &Machine) {
        self.run(|| ip(&format!("route del blackhole {}/32", other.address)));
    }

    /// Pulls the plug of its network, or puts it back.
    pub(crate) fn set_link(&self, is_up: bool) {
        self.run(|| ip(if is_up { "link set eth0 up" } else { "link set eth0 down" }));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl MachineNetwork {
    /// Makes machines, and moves this thread among them; `None`, with a line that says so, where that is not allowed.
    pub(crate) fn new(count: usize) -> Option<MachineNetwork> {
        let skipped = |why: String| println!("SKIPPED: {why}");
        let bridge = Machine::new("10.77.0.254".into()).map_err(skipped).ok()?;
        bridge.enter();
        let made = Command::new("ip").args(["link", "add", "bridge0", "type", "bridge"]).output().unwrap();
        if !made.status.success() {
            println!("SKIPPED: no bridge: {}", String::from_utf8_lossy(&made.stderr).trim());
            return None;
        }
        ip(&format!("addr add {}/24 dev bridge0", bridge.address));
        ip("link set bridge0 up");
        let mut machines = Vec::new();
        for number in 1..=count {
            let machine = Machine::new(format!("10.77.0.{number}")).unwrap();
            let holder = machine.holder.id();
            ip(&format!("link add port{number} type veth peer name eth0 netns {holder}"));
            ip(&format!("link set port{number} master bridge0 up"));
            machine.run(|| {
                ip(&format!("addr add {}/24 dev eth0", machine.address));
                machine.set_link(true);
            });
            machines.push(machine);
        }
        Some(MachineNetwork { _bridge: bridge, machines })
    }
}
