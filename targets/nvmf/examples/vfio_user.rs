//! Serves a controller over vfio-user, or measures one.
//!
//! `vfio_user serve DIRECTORY [MIB]` serves a malloc device on the socket `cntrl` in a directory, until the end
//! of standard input. `vfio_user measure [DEPTH [SECONDS [malloc]]]` serves a null or malloc device, reads 4 KiB
//! blocks from it on another thread at the given queue depth, and prints the throughput and the mean latency.
//! `vfio_user beside DEPTH BYTES [SECONDS]` serves a malloc device to two hosts, both on another thread: one that keeps
//! DEPTH reads of BYTES bytes in flight (0 for none), and one with a read of 4 KiB at a time, whose latencies it prints.
//! `vfio_user count [DEPTH [TURNS]]` runs the host on the target's core, polls both alternately, and exits after
//! TURNS polls. The instructions per command at a depth, or per idle poll (depth 0), are the difference between
//! two runs with different TURNS under `valgrind --tool=callgrind --toggle-collect='*GroupPoller*poll*'`.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use bdev::{Registry, malloc, null};
use dma::SharedRegion;
use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, VfioUserConfig};
use reactor::{IdlePolicy, Period, PollResult, Poller, ReactorConfig, Reactors, Shutdown};
use vfio_user::{BAR0, VfioUserClient};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::queue::{CreateIoCq, CreateIoSq};
use wire_nvme::sqe::Sgl;
use wire_nvme::{DataPointer, Sqe, io};

type ExampleError = Box<dyn std::error::Error>;

const NQN: &str = "nqn.2026-11.io.ringbolt:example";
const IOVA: u64 = 0x1000_0000;
const ENTRIES: u32 = 1024;
const SUBMISSION: u64 = 0x10_0000;
const COMPLETION: u64 = 0x20_0000;
const DATA: u64 = 0x40_0000;
const MEMORY: u64 = DATA + (ENTRIES as u64) * 4096;

fn target(
    registry: &Registry,
    reactors: &Reactors,
    device: &str,
    directory: &Path,
) -> Result<NvmfTarget, ExampleError> {
    let target = NvmfTarget::new(registry.clone(), reactors.handles());
    target.create_vfio_user(VfioUserConfig { max_queue_depth: ENTRIES, ..VfioUserConfig::default() })?;
    target.create_subsystem(NQN, SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() })?;
    target.add_namespace(NQN, NamespaceConfig::new(device))?;
    target.add_listener(NQN, ListenAddress::vfio_user(&directory.to_string_lossy()))?;
    Ok(target)
}

fn serve(directory: &Path, mib: u64) -> Result<(), ExampleError> {
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", mib << 11, 512))?;
    let reactors = Reactors::start(&ReactorConfig::default())?;
    let target = target(&registry, &reactors, "Malloc0", directory)?;
    println!("serving {mib} MiB on {}", directory.join("cntrl").display());
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    target.shutdown();
    Ok(())
}

/// A host with one I/O queue pair, in memory that it shares with the device.
struct ExampleHost {
    client: VfioUserClient,
    memory: SharedRegion,
    doorbells: SharedRegion,
    tail: u32,
    head: u32,
    phase: u64,
    /// Bytes of a read.
    bytes: u32,
}

impl ExampleHost {
    fn connect(directory: &Path) -> Result<ExampleHost, ExampleError> {
        let client = VfioUserClient::connect(directory, &vfio_user::ClientConfig::default())?;
        let file = rustix::fs::memfd_create("example", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, MEMORY)?;
        let memory = SharedRegion::map(file.as_fd(), 0, MEMORY, true)?;
        client.dma_map_file(IOVA, file.as_fd(), 0, MEMORY, true)?;
        let doorbells = client.map_region(BAR0, 0x1000, 0x1000)?;
        // Enable the controller with an admin queue of 32 entries.
        client.write_u32(BAR0, 0x24, 0x001f_001f)?;
        client.write_u64(BAR0, 0x28, IOVA)?;
        client.write_u64(BAR0, 0x30, IOVA + 0x1000)?;
        client.write_u32(BAR0, 0x14, 0x0046_0001)?;
        let completion = CreateIoCq {
            address: IOVA + COMPLETION,
            qid: 1,
            entries: ENTRIES,
            contiguous: true,
            ..Default::default()
        };
        let submission = CreateIoSq {
            address: IOVA + SUBMISSION,
            qid: 1,
            entries: ENTRIES,
            contiguous: true,
            priority: 0,
            cqid: 1,
        };
        for (index, sqe) in [completion.to_sqe(), submission.to_sqe()].iter().enumerate() {
            memory.write(index as u64 * 64, &sqe.to_bytes());
            doorbells.store_u32(0, index as u32 + 1);
            let phase_address = 0x1008 + index as u64 * 16;
            while memory.load_u64(phase_address) >> 48 & 1 == 0 {
                std::thread::yield_now();
            }
            if memory.load_u64(phase_address) >> 49 != 0 {
                return Err(format!("command {index} failed").into());
            }
        }
        Ok(ExampleHost { client, memory, doorbells, tail: 0, head: 0, phase: 1, bytes: 4096 })
    }

    fn push_read(&mut self, cid: u16) {
        let read = io::ReadWrite { lba: u64::from(cid) * 8, blocks: self.bytes / 512, ..Default::default() };
        let (flags, data) = match self.bytes {
            4096 => (0, DataPointer::prp(IOVA + DATA + u64::from(cid) * 4096, 0)),
            // All to the same place.
            length => (Sqe::FLAGS_SGL, DataPointer::from(Sgl::DataBlock { address: IOVA + DATA, length })),
        };
        let sqe = Sqe { cid, nsid: 1, flags, data, ..read.to_sqe(NvmOpcode::Read) };
        self.memory.write(SUBMISSION + u64::from(self.tail) * 64, &sqe.to_bytes());
        self.tail = (self.tail + 1) % ENTRIES;
    }

    fn ring_doorbell(&self) {
        self.doorbells.store_u32(8, self.tail);
    }

    /// Reaps completions and submits a new read for each. Returns their number.
    fn poll(&mut self) -> u64 {
        let mut count = 0;
        loop {
            let high = self.memory.load_u64(COMPLETION + u64::from(self.head) * 16 + 8);
            if high >> 48 & 1 != self.phase {
                break;
            }
            assert_eq!(high >> 49, 0, "a read failed");
            self.head += 1;
            if self.head == ENTRIES {
                (self.head, self.phase) = (0, self.phase ^ 1);
            }
            self.push_read((high >> 32) as u16);
            count += 1;
        }
        if count > 0 {
            self.doorbells.store_u32(12, self.head);
            self.ring_doorbell();
        }
        count
    }

    fn start(&mut self, depth: u16) {
        (0..depth).for_each(|cid| self.push_read(cid));
        self.ring_doorbell();
    }
}

/// Polls a host on the target's core.
struct HostPoller {
    host: ExampleHost,
    turns: u64,
    commands: u64,
    /// Receives the number of completed commands at the end.
    done: SyncSender<u64>,
}

impl Poller for HostPoller {
    fn name(&self) -> &str {
        "host"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        if self.turns > 0 {
            self.turns -= 1;
            self.commands += self.host.poll();
            if self.turns == 0 {
                let _ = self.done.send(self.commands);
            }
        }
        PollResult::Busy(1)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

fn with_device(
    in_memory: bool,
    job: impl FnOnce(&Path, &Reactors) -> Result<(), ExampleError>,
) -> Result<(), ExampleError> {
    let directory = std::env::temp_dir().join(format!("ringbolt-vfio-user-{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let registry = Registry::new();
    if in_memory {
        malloc::create(&registry, malloc::MallocConfig::new("Device0", 1 << 17, 512))?;
    } else {
        null::create(&registry, null::NullConfig::new("Device0", 1 << 20, 512))?;
    }
    let cpus = "0".parse()?;
    let reactors =
        Reactors::start(&ReactorConfig { cpus, idle: IdlePolicy::Spin, ..ReactorConfig::default() })?;
    let target = target(&registry, &reactors, "Device0", &directory)?;
    let other = directory.with_extension("greedy");
    std::fs::create_dir(&other)?;
    target.add_listener(NQN, ListenAddress::vfio_user(&other.to_string_lossy()))?;
    let done = job(&directory, &reactors);
    target.shutdown();
    drop(reactors);
    std::fs::remove_dir_all(&directory)?;
    std::fs::remove_dir_all(&other)?;
    done
}

fn measure(depth: u16, seconds: u64, in_memory: bool) -> Result<(), ExampleError> {
    with_device(in_memory, |directory, _| {
        let mut host = ExampleHost::connect(directory)?;
        host.start(depth);
        let (start, mut count) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_secs(seconds) {
            for _ in 0..1000 {
                count += host.poll();
            }
        }
        let ns = start.elapsed().as_nanos() as f64;
        let (rate, latency) = (count as f64 * 1e9 / ns, ns * f64::from(depth) / count as f64);
        println!("depth {depth}: {:.2} M reads/s, {latency:.0} ns each ({})", rate / 1e6, host.client);
        Ok(())
    })
}

fn beside(depth: u16, bytes: u32, seconds: u64) -> Result<(), ExampleError> {
    with_device(true, |directory, _| {
        let other = directory.with_extension("greedy");
        let mut honest = ExampleHost::connect(directory)?;
        let mut greedy = ExampleHost::connect(&other)?;
        greedy.bytes = bytes;
        honest.start(1);
        greedy.start(depth);
        let (start, mut sent, mut others) = (Instant::now(), Instant::now(), 0);
        let mut latencies = Vec::new();
        while start.elapsed() < Duration::from_secs(seconds) {
            if honest.poll() > 0 {
                latencies.push(sent.elapsed());
                sent = Instant::now();
            }
            others += greedy.poll();
        }
        latencies.sort_unstable();
        let at = |part: usize| latencies[(latencies.len() - 1) * part / 1000];
        let (median, p99, longest) = (at(500), at(990), at(1000));
        println!(
            "{} reads beside {others}: median {median:?}, p99 {p99:?}, longest {longest:?}",
            latencies.len()
        );
        Ok(())
    })
}

fn count(depth: u16, turns: u64) -> Result<(), ExampleError> {
    with_device(false, |directory, reactors| {
        let mut host = ExampleHost::connect(directory)?;
        host.start(depth);
        let (done, commands) = std::sync::mpsc::sync_channel(1);
        reactors.handles()[0].call(move |core| {
            core.add_poller(Box::new(HostPoller { host, turns, commands: 0, done }), Period::EveryTurn);
        })?;
        println!("{} reads at depth {depth} in {turns} turns", commands.recv()?);
        Ok(())
    })
}

fn main() -> Result<(), ExampleError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u64| arguments.get(index).map_or(Ok(default), |text| text.parse());
    match arguments.first().map(String::as_str) {
        Some("serve") if arguments.len() > 1 => serve(arguments[1].as_ref(), number(2, 64)?),
        Some("measure") => {
            let in_memory = arguments.get(3).is_some_and(|kind| kind == "malloc");
            measure(number(1, 32)?.try_into()?, number(2, 5)?, in_memory)
        }
        Some("beside") if arguments.len() > 2 => {
            beside(number(1, 0)?.try_into()?, number(2, 4096)?.try_into()?, number(3, 5)?)
        }
        Some("count") => count(number(1, 32)?.try_into()?, number(2, 10_000)?),
        _ => Err(
            "vfio_user serve DIRECTORY [MIB] | measure [DEPTH [SECONDS [malloc]]] | beside DEPTH BYTES [SECONDS] | \
             count [DEPTH [TURNS]]"
                .into(),
        ),
    }
}
