//! The cost of a logical volume: random 4 KiB I/Os on a device in memory, and on volumes of a store there.
//!
//! `volume_cost [MIB [DEPTH [OP DEVICE]]]` measures the device and the volumes in turn, 25 rounds at queue
//! depth 32, or one volume (`thick`, `thin`, `chain`) with `Read` or `Write` in turn with the device. The
//! time is the CPU time of the core, which others on the machine disturb least. It prints the median
//! nanoseconds of an I/O, and of the rounds' ratios to the device alone the median, the lower and the upper
//! quartile: for a split bdev, which adds a number to the address and is the least that a layer does; for a
//! thick volume, a thin one with all clusters, and one that reads through ten snapshots, each of which has a
//! tenth of the clusters.
//!
//! `volume_cost count DEVICE OP DEPTH ROUNDS` executes rounds of DEPTH reads or writes on `bare`, `wholep0`
//! (a split bdev), `thick`, `thin` or `chain`, for `valgrind --tool=callgrind --fair-sched=yes
//! --collect-atstart=no --toggle-collect='*submit_and_poll*' …`

use bdev::rpc::BdevModule;
use bdev::{Access, AsyncChannel, BdevChannel, Completion, Registry, Request};
use block_io::{Channel as _, Op, Tag};
use control::ControlPlane;
use control::json::json;
use random::WyRand;
use reactor::{Core, ReactorConfig, ReactorHandle, Reactors};

/// Rounds of a measurement.
const ROUNDS: usize = 25;
/// I/Os of a device in a round.
const ROUND_IOS: u64 = 64_000;
const CLUSTER_BYTES: u64 = 1 << 20;
const SNAPSHOTS: u64 = 10;
/// The device alone, the least layer above one, and volumes.
const DEVICES: [&str; 5] = ["bare", "wholep0", "lvs/thick", "lvs/thin", "lvs/chain"];

/// The measured part: the layer, the module and what is below it.
#[inline(never)]
fn submit_and_poll(channel: &mut BdevChannel, batch: &mut Vec<Request>, sink: &mut Vec<Completion>) {
    let count = batch.len();
    channel.submit(batch);
    while sink.len() < count {
        channel.poll(sink);
    }
}

/// A device with requests that are used again and again.
struct Load {
    channel: BdevChannel,
    batch: Vec<Request>,
    sink: Vec<Completion>,
    rng: WyRand,
}

impl Load {
    fn new(core: &Core, registry: &Registry, name: &str, op: Op, depth: u64) -> Option<Load> {
        let channel = registry.open(name, Access::ReadWrite).ok()?.channel(core).ok()?;
        let blocks = 4096 / channel.block_size();
        let mut batch: Vec<Request> = Vec::new();
        for tag in 0..depth {
            let mut request = Request::new(Tag(tag), op, 0, blocks);
            request.set_data(Some(core.pool().take(4096)?));
            batch.push(request);
        }
        Some(Load { channel, batch, sink: Vec::new(), rng: WyRand::new(1) })
    }

    fn round(&mut self, batches: u64) {
        let blocks = 4096 / u64::from(self.channel.block_size());
        let places = self.channel.blocks() / blocks;
        for _ in 0..batches {
            for request in &mut self.batch {
                request.lba = self.rng.below(places) * blocks;
                request.issued_ticks = 0;
            }
            submit_and_poll(&mut self.channel, &mut self.batch, &mut self.sink);
            self.batch.extend(self.sink.drain(..).map(|completion| {
                assert!(completion.status().is_success(), "{}", completion.status());
                completion.into_request()
            }));
        }
    }
}

/// Writes the clusters of which the index modulo `modulus` is `remainder`. The owner of the store is polled
/// between the writes.
fn fill(reactor: &ReactorHandle, registry: &Registry, name: &'static str, modulus: u64, remainder: u64) {
    let (registry, (sender, result)) = (registry.clone(), std::sync::mpsc::channel());
    let start = move |core: &Core| {
        let core = core.clone();
        core.clone().spawn(async move {
            let device = registry.open(name, Access::ReadWrite).expect("the device is there");
            let io = AsyncChannel::new(&core, device.channel(&core).expect("a device in memory"));
            let (block_size, blocks) =
                (device.device().geometry().block_size, device.device().geometry().blocks);
            let cluster_blocks = CLUSTER_BYTES / u64::from(block_size);
            let clusters = (0..blocks / cluster_blocks).filter(|index| index % modulus == remainder);
            for index in clusters {
                let mut data = core.pool().take(CLUSTER_BYTES as usize).expect("memory for a cluster");
                data.as_mut_slice().fill(index as u8 | 1);
                let written = io.write(index * cluster_blocks, data).await;
                assert!(written.is_ok(), "cluster {index} of {name} is not written");
            }
            _ = sender.send(());
        });
    };
    reactor.post(start).expect("the reactor runs");
    result.recv().expect("all clusters are written");
}

/// Quartiles of some numbers.
fn quartiles(mut numbers: Vec<f64>) -> [f64; 3] {
    numbers.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| numbers[numbers.len() * quarter / 4])
}

/// Nanoseconds of an I/O by round and device; 0 for those that are not measured.
fn compare(
    core: &Core,
    registry: &Registry,
    op: Op,
    depth: u64,
    only: Option<&str>,
) -> Option<Vec<[f64; DEVICES.len()]>> {
    let mut loads = Vec::new();
    for (at, name) in DEVICES.into_iter().enumerate() {
        let is_wanted = at < 2 || only.is_none_or(|only| only == name);
        // Writes to the chain would take it apart.
        if is_wanted && (op == Op::Read || name != "lvs/chain") {
            loads.push((at, Load::new(core, registry, name, op, depth)?));
        }
    }
    let mut rounds = vec![[0.0; DEVICES.len()]; ROUNDS];
    loads.iter_mut().for_each(|(_, load)| load.round(ROUND_IOS / depth));
    for round in &mut rounds {
        for (at, load) in &mut loads {
            let start = os::thread_cpu_ns();
            load.round(ROUND_IOS / depth);
            round[*at] = (os::thread_cpu_ns() - start) as f64 / ROUND_IOS as f64;
        }
    }
    Some(rounds)
}

fn call<R: Send + 'static>(
    reactor: &ReactorHandle,
    registry: &Registry,
    run: impl FnOnce(&Core, &Registry) -> Option<R> + Send + 'static,
) -> R {
    let registry = registry.clone();
    let result = reactor.call(move |core| run(core, &registry)).ok().flatten();
    result.expect("the device can be opened, and the core has memory")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |text| text.parse());
    let counts = arguments.first() == Some(&"count");
    let mib = if counts { 10 } else { number(0, 256)? };
    let mut config = ReactorConfig::default();
    if counts {
        // Valgrind does not expect a call that enters an io_uring to block.
        config.event_loop.backend = Some(os::EventBackend::Epoll);
        config.idle = reactor::IdlePolicy::Sleep;
    }
    let reactors = Reactors::start(&config)?;
    let (registry, reactor) = (Registry::new(), reactors.handles()[0].clone());
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let lvols = lvol::LvolModule::new(registry.clone(), reactors.handles());
    let plane = builder.module(&bdevs).module(&lvols).start(None)?;
    for (name, mib) in [("bare", mib), ("whole", mib), ("disk", 4 * mib + 64)] {
        let params = json!({ "name": name, "num_blocks": mib * 2048, "block_size": 512 });
        plane.invoke("bdev_malloc_create", params)?;
    }
    plane.invoke("bdev_split_create", json!({ "base_bdev": "whole", "split_count": 1 }))?;
    let params = json!({ "bdev_name": "disk", "lvs_name": "lvs", "cluster_sz": CLUSTER_BYTES });
    plane.invoke("bdev_lvol_create_lvstore", params)?;
    for (name, thin) in [("thick", false), ("thin", true), ("chain", true)] {
        let params =
            json!({ "lvol_name": name, "size_in_mib": mib, "thin_provision": thin, "lvs_name": "lvs" });
        plane.invoke("bdev_lvol_create", params)?;
    }
    for name in &DEVICES[..4] {
        fill(&reactor, &registry, name, 1, 0);
    }
    for index in 0..SNAPSHOTS {
        fill(&reactor, &registry, "lvs/chain", SNAPSHOTS, index);
        let params = json!({ "lvol_name": "lvs/chain", "snapshot_name": format!("s{index}") });
        plane.invoke("bdev_lvol_snapshot", params)?;
    }
    if counts {
        let [_, device, op, ..] = arguments[..] else { return Err("count DEVICE OP DEPTH ROUNDS".into()) };
        let name = DEVICES.into_iter().find(|name| name.trim_start_matches("lvs/") == device);
        let name = name.ok_or("bare, wholep0, thick, thin or chain")?;
        let op = if op == "write" { Op::Write } else { Op::Read };
        let (depth, rounds) = (number(3, 32)?, number(4, 1000)?);
        call(&reactor, &registry, move |core, registry| {
            Load::new(core, registry, name, op, depth).map(|mut load| load.round(rounds))
        });
    } else {
        let depth = number(1, 32)?;
        for op in [Op::Read, Op::Write] {
            if arguments.get(2).is_some_and(|wanted| *wanted != format!("{op:?}")) {
                continue;
            }
            let only = arguments.get(3).map(|device| format!("lvs/{device}"));
            let rounds = call(&reactor, &registry, move |core, registry| {
                compare(core, registry, op, depth, only.as_deref())
            });
            for (at, name) in DEVICES.into_iter().enumerate().filter(|(at, _)| rounds[0][*at] > 0.0) {
                let [_, nanoseconds, _] = quartiles(rounds.iter().map(|round| round[at]).collect());
                let ratio = |base: usize| {
                    let [low, ratio, high] =
                        quartiles(rounds.iter().map(|round| 100.0 * round[base] / round[at]).collect());
                    format!("{ratio:.1} % ({low:.1} to {high:.1})")
                };
                let (bare, split) = (ratio(0), ratio(1));
                println!("{op:?} {name}: {nanoseconds:.1} ns, {bare} of bare, {split} of split");
            }
        }
    }
    plane.drain();
    drop(reactors);
    plane.stop();
    Ok(())
}
