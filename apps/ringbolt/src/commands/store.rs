//! `ringbolt store`: a cluster of the replicated store on this machine, and its state.

mod accept_loss;
mod arguments;
mod demo;
mod encryption;
mod key;
mod layout;
mod listen;
mod map;
mod nodes;
mod pool;
mod reclaim;
mod remove;
mod replace;
mod scrub;
mod scrub_records;
mod set;
mod space;
mod status;
mod stop;

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use cluster_map::{DeviceRecord, MapChange, NodeId, NodeRecord, OutReason, TlsPolicy};
use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Errno;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::command_error::CommandError;
use crate::console::stdout_line;
use accept_loss::AcceptLossArgs;
use arguments::{ClusterArgs, NewCluster, NodeOptions, NodeReactors, TlsOption};
pub(crate) use arguments::{EtcdArgs, POOL};
use demo::DemoArgs;
pub(crate) use encryption::DeviceKeys;
use key::KeyCommand;
pub(crate) use layout::ClusterLayout;
use map::MapCommand;
use nodes::RunningNodes;
use pool::PoolCommand;
use reclaim::ReclaimArgs;
use remove::RemoveNodeArgs;
use replace::ReplaceDeviceArgs;
use scrub::ScrubCommand;
use set::SetArgs;
use status::OkToStopArgs;
pub(crate) use status::{VolumeCounts, count_volumes};
use stop::{StartNodeArgs, StopNodeArgs};

/// The map's changes are waited for this long at a time.
const WATCH_TIME: Duration = Duration::from_secs(60);

/// The subcommands of `ringbolt store`.
#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// Run a cluster on this machine until Ctrl-C; a new one is made first
    #[command(after_help = "Examples:\n  ringbolt store up\n  \
        ringbolt store up --cluster /srv/store --nodes 4 --replicas 2 --size 100g\n  \
        ringbolt store up --device /dev/nvme0n1 --device /dev/nvme1n1 --device /dev/nvme2n1\n  \
        ringbolt store up --nodes 2 --listen 10.0.0.1:7001 --tls required\n  \
        ringbolt store up --nodes 2 --cores 0-3 --cores 4-7\n  \
        ringbolt store up --device /dev/nvme0n1 --encrypt --key-dir /etc/ringbolt/keys\n\n\
        Each node is a process with a file, or a device. A node that ends is started again. In another terminal:\n  \
        ringbolt image create --cluster ringbolt-store vol 1g\n  \
        ringbolt perf --filename=store:pool/vol --rw=randwrite --iodepth=16 --runtime=5 --time_based\n  \
        ringbolt store status")]
    Up(UpArgs),
    /// Show what is degraded, and why a group is not served
    #[command(after_help = "Example:\n  ringbolt store status --json")]
    Status(StatusArgs),
    /// Add an empty node to a cluster, or replace one that is lost; `ringbolt store up` in the same directory
    /// runs it
    #[command(after_help = "Examples:\n  ringbolt store add-node\n  \
        ringbolt store add-node --replace 2\n  \
        ringbolt store add-node --device /dev/nvme3n1 --encrypt\n  \
        ringbolt store add-node --etcd http://10.0.0.1:2379 --key key --listen 10.0.0.2:7001 \\\n      \
        --tls required")]
    AddNode(AddNodeArgs),
    /// Stop a node of this machine for maintenance: others take over first, and `ringbolt store up` does not
    /// start it again
    #[command(
        after_help = "Examples:\n  ringbolt store stop-node 2\n  ringbolt store stop-node 2 --force --json\n\n\
        Clients wait for no lease. It is refused where too few replicas would be in sync."
    )]
    StopNode(StopNodeArgs),
    /// Say whether some nodes may be stopped together now: whether all groups would be served without them
    #[command(after_help = "Examples:\n  ringbolt store ok-to-stop 2\n  \
        ringbolt store ok-to-stop 2 5 && reboot-machine-b\n  ringbolt store ok-to-stop 2 3 --json\n\n\
        The exit status is 0 if they may be stopped, and 1 if a group would not be served. It changes \
        nothing, and what it says holds until another node fails or stops.")]
    OkToStop(OkToStopArgs),
    /// Start a node that was stopped; `ringbolt store up` in the same directory runs it
    #[command(after_help = "Examples:\n  ringbolt store start-node 2\n  \
        ringbolt store start-node 2 --listen 10.0.0.1:7002\n\n\
        Other nodes and clients find the new address in the map.")]
    StartNode(StartNodeArgs),
    /// Move the replicas of a node to other nodes, so that it can be taken away
    #[command(after_help = "Example:\n  ringbolt store out 2")]
    Out(OutArgs),
    /// Let a node have replicas again
    #[command(after_help = "Example:\n  ringbolt store in 2")]
    In(OutArgs),
    /// Remove a node for good: one whose replicas are on others and that is stopped or lost; `--wait` sees to
    /// both
    #[command(after_help = "Examples:\n  ringbolt store remove-node 2 --wait\n  \
        ringbolt store out 2 && ringbolt store stop-node 2 && ringbolt store remove-node 2\n\n\
        Its number is not used again, and it is refused if it comes back. Its directory and its device stay as \
        they are. With --wait it is refused at once where other nodes are too few for a pool; interrupted, the \
        node is out, and the same command goes on.")]
    RemoveNode(RemoveNodeArgs),
    /// Give a node of this machine an empty device in the place of the one that it has: it hands over, and
    /// gets copies from the others, which serve meanwhile
    #[command(after_help = "Examples:\n  ringbolt store replace-device 3 --device /dev/nvme2n1\n  \
        ringbolt store replace-device 3 --size 100g --json\n  \
        ringbolt store replace-device 3 --device /dev/nvme2n1 --encrypt\n\n\
        `ringbolt store up` of the directory runs it, at the address and in the domain that it had. It is \
        refused where too few replicas would be in sync without it, or none. An encrypted node stays \
        encrypted, with a new key. The old device is refused if it comes back: it is that of a node which is \
        replaced.")]
    ReplaceDevice(ReplaceDeviceArgs),
    /// Give a node another share of the data: some replicas move to it, or from it to others
    #[command(after_help = "Example:\n  ringbolt store weight 2 5120")]
    Weight(WeightArgs),
    /// Read every copy of every block and compare them: damaged ones are written again, and copies that
    /// differ are reported
    #[command(subcommand)]
    Scrub(ScrubCommand),
    /// Change how the cluster recovers and scrubs while it runs: `noout` keeps replicas of nodes that are
    /// down where they are, `recovery-rate` bounds what nodes copy, `scrub-every` and `scrub-rate` say when
    /// groups are scrubbed and how fast
    #[command(after_help = "Examples:\n  ringbolt store set noout=on\n  \
        ringbolt store set noout=off recovery-rate=50m\n  ringbolt store set recovery-rate=off --json\n  \
        ringbolt store set scrub-every=14d scrub-rate=50m\n\n\
        All nodes follow, and `ringbolt store status` shows it. A node that is out already stays out: \
        `ringbolt store in` takes it in.")]
    Set(SetArgs),
    /// Have connections to nodes use TLS, in a running cluster too: `on`, and `required` when all use it
    #[command(after_help = "Examples:\n  ringbolt store tls on\n  ringbolt store tls required --node 2\n\n\
        Keys follow from those of the cluster and its clients; there are no certificates. Nodes and clients \
        follow at once. `ringbolt store status --json` counts the connections of each node \
        with and without TLS.")]
    Tls(TlsArgs),
    /// Let a replica serve that lacks what its group had, and whose group waits: says what that costs, and
    /// needs --yes
    #[command(after_help = "Example:\n  ringbolt store accept-loss 3 --yes")]
    AcceptLoss(AcceptLossArgs),
    /// Give back the space of images whose removal was interrupted, and name volumes that no image has
    #[command(after_help = "Examples:\n  ringbolt store reclaim\n  ringbolt store reclaim --volume 17\n\n\
        Volumes that no image has were left by older versions, or belong to images that a restored map has lost: they are named, \
        and removed only with --volume.")]
    Reclaim(ReclaimArgs),
    /// Create, list and remove pools
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Create, list and delete the keys of clients with rights on some pools
    #[command(subcommand)]
    Key(KeyCommand),
    /// Back up and restore the map of a cluster
    #[command(subcommand)]
    Map(MapCommand),
    /// Run a cluster in a temporary directory, with a verified load during which a node is killed
    #[command(after_help = "Example:\n  ringbolt store demo")]
    Demo(DemoArgs),
}

/// Arguments of `ringbolt store up`.
#[derive(Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    of: ClusterArgs,
    #[command(flatten)]
    new: NewCluster,
    #[command(flatten)]
    reactors: NodeReactors,
}

/// Arguments of `ringbolt store add-node`.
#[derive(Args)]
pub(crate) struct AddNodeArgs {
    #[command(flatten)]
    of: ClusterArgs,
    /// The cluster's key, copied from another machine: makes the directory of a cluster whose map is in etcd
    #[arg(long, value_name = "FILE", requires = "etcd")]
    key: Option<PathBuf>,
    /// Put the empty node in the place of this one, which is lost
    #[arg(long, value_name = "NODE")]
    replace: Option<u32>,
    /// Block device of the node, whose data is lost, instead of a file
    #[arg(long = "device", value_name = "PATH")]
    devices: Option<PathBuf>,
    /// Block device or file for the logs of the node; without, they are where the data is
    #[arg(long, value_name = "PATH")]
    log: Option<PathBuf>,
    #[command(flatten)]
    node: NodeOptions,
}

/// Arguments of `ringbolt store out` and `in`.
#[derive(Args)]
pub(crate) struct OutArgs {
    /// Number of the node
    node: u32,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store tls`.
#[derive(Args)]
pub(crate) struct TlsArgs {
    /// Whether others connect to a node with TLS
    policy: TlsOption,
    /// Number of a node; may be given more than once [default: all nodes]
    #[arg(long = "node", value_name = "NODE")]
    nodes: Vec<u32>,
    /// Serve without TLS on addresses that others than this machine reach. A node starts there without
    /// required TLS only if its configuration has `allow_plain_network` too
    #[arg(long)]
    allow_plain_network: bool,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store weight`.
#[derive(Args)]
pub(crate) struct WeightArgs {
    /// Number of the node
    node: u32,
    /// Its share in proportion to those of the others; a node begins with the MiB of its device
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    weight: u32,
    #[command(flatten)]
    of: ClusterArgs,
}

/// Arguments of `ringbolt store status`.
#[derive(Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    of: ClusterArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs a subcommand of `ringbolt store`.
pub(crate) fn run(command: StoreCommand) -> Result<(), CommandError> {
    match command {
        StoreCommand::Up(options) => up(&options),
        StoreCommand::Status(options) => status::run(&options.of, options.json),
        StoreCommand::AddNode(options) => add_node(&options),
        StoreCommand::StopNode(options) => stop::stop_node(&options),
        StoreCommand::OkToStop(options) => status::ok_to_stop(&options),
        StoreCommand::StartNode(options) => stop::start_node(&options),
        StoreCommand::Out(options) => set_out(&options, Some(OutReason::Operator)),
        StoreCommand::In(options) => set_out(&options, None),
        StoreCommand::RemoveNode(options) => remove::run(&options),
        StoreCommand::ReplaceDevice(options) => replace::run(&options),
        StoreCommand::Weight(options) => set_weight(&options),
        StoreCommand::Scrub(command) => scrub::run(&command),
        StoreCommand::Set(options) => set::run(&options),
        StoreCommand::Tls(options) => set_tls(&options),
        StoreCommand::AcceptLoss(options) => accept_loss::run(&options),
        StoreCommand::Reclaim(options) => reclaim::run(&options),
        StoreCommand::Pool(command) => pool::run(command),
        StoreCommand::Key(command) => key::run(command),
        StoreCommand::Map(command) => map::run(command),
        StoreCommand::Demo(options) => demo::run(&options),
    }
}

fn up(options: &UpArgs) -> Result<(), CommandError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGCHLD]).map_err(CommandError::environment)?;
    let ClusterArgs { cluster: directory, etcd } = &options.of;
    let is_new = !directory.exists();
    if is_new {
        options.reactors.check(options.new.node_count() as usize)?;
    }
    let layout = if !is_new {
        if etcd.is_given() {
            layout::set_etcd(directory, &etcd.options())?;
        }
        let layout = ClusterLayout::open(directory, &etcd.options())?;
        layout.check_settings(&options.new)?;
        if options.new.node.encrypt {
            layout.check_encrypted()?;
        }
        if let Some(threads) = options.new.node.threads {
            layout.set_threads(threads)?;
        }
        if let Some(line) = layout.settle()? {
            stdout_line!("{line}");
        }
        layout
    } else {
        let layout = ClusterLayout::create(directory, &etcd.options(), &options.new)?;
        stdout_line!("made a cluster in {}", directory.display());
        layout
    };
    let mut nodes = RunningNodes::start(&layout, &options.reactors, is_new)?;
    watch_nodes(&layout);
    space::watch(&layout);
    // The nodes serve without the map.
    match layout.describe().and_then(|line| Ok((line, layout.nodes_in_memory()?))) {
        Ok((line, in_memory)) => {
            stdout_line!("{line}");
            warn_of_memory(&in_memory);
        }
        Err(error) => stdout_line!("{error}"),
    }
    stdout_line!("ready; Ctrl-C ends it, `ringbolt store status` shows its state");
    while let Some(SIGCHLD) = signals.forever().next() {
        nodes.restart_ended();
        nodes.start_added();
    }
    stdout_line!("stopping");
    nodes.stop();
    Ok(())
}

/// Says that writes of pools of class `disk` are in memory, where that is so.
fn warn_of_memory(nodes: &[u32]) {
    if !nodes.is_empty() {
        let nodes = nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        stdout_line!(
            "durability: memory, whatever the class of a pool: node {nodes} is on tmpfs or a RAM disk, and a power failure loses \
             what it acknowledged; --cluster or --device names another place"
        );
    }
}

/// Sends this process SIGCHLD when the map or the directory has changed: a node may have been added, or is to
/// start.
fn watch_nodes(layout: &ClusterLayout) {
    let directory = layout.directory.clone();
    std::thread::spawn(move || {
        // Without it, changes of a map in a directory are noticed all the same: it is read again and again.
        if let Err(error) = watch_directory(&directory) {
            stdout_line!("{} is not watched: {error}", directory.display());
        }
    });
    let mut changes = layout.map.changes();
    std::thread::spawn(move || {
        loop {
            match changes.wait(WATCH_TIME) {
                Ok(changes) if changes.iter().all(|change| matches!(change, MapChange::Group(..))) => {}
                Ok(_) => _ = signal_hook::low_level::raise(SIGCHLD),
                // Nothing says when the map can be used again.
                Err(_) => std::thread::sleep(changes.retry_after()),
            }
        }
    });
}

/// Sends this process SIGCHLD for each name that comes to the directory or goes.
fn watch_directory(directory: &Path) -> std::io::Result<()> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    let (come, gone) =
        (WatchFlags::CREATE | WatchFlags::MOVED_TO, WatchFlags::DELETE | WatchFlags::MOVED_FROM);
    inotify::add_watch(&watch, directory, come | gone)?;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    loop {
        match events.next() {
            Ok(_) => signal_hook::low_level::raise(SIGCHLD)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn add_node(options: &AddNodeArgs) -> Result<(), CommandError> {
    let ClusterArgs { cluster: directory, etcd } = &options.of;
    match &options.key {
        Some(key) if !directory.exists() => layout::join(directory, &etcd.options(), key)?,
        Some(_) => {
            let directory = directory.display();
            return Err(CommandError::usage(format!("{directory} is there: it has the key already")));
        }
        None => {}
    }
    let layout = ClusterLayout::open(directory, &etcd.options())?;
    let devices = (options.devices.as_deref(), options.log.as_deref());
    let node = layout::add_node(&layout, options.replace, devices, &options.node, None)?;
    let place = layout.node(node);
    stdout_line!("node {node} is in {}; `ringbolt store up` of this directory runs it", place.display());
    Ok(())
}

fn set_out(options: &OutArgs, reason: Option<OutReason>) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let node = NodeId(options.node);
    if !layout.map.nodes().map_err(CommandError::operation)?.contains_key(&node) {
        return Err(CommandError::operation(format!("the cluster has no node {}", node.0)));
    }
    layout.map.set_out(node, reason).map_err(CommandError::operation)
}

/// Nodes and clients read the record, and follow.
fn set_tls(options: &TlsArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let nodes = layout.map.nodes().map_err(CommandError::operation)?;
    if let Some(unknown) = options.nodes.iter().find(|node| !nodes.contains_key(&NodeId(**node))) {
        return Err(CommandError::operation(format!("the cluster has no node {unknown}")));
    }
    let tls = TlsPolicy::from(options.policy);
    let is_chosen = |id: NodeId| options.nodes.is_empty() || options.nodes.contains(&id.0);
    let chosen: Vec<_> = nodes.into_iter().filter(|(id, _)| is_chosen(*id)).collect();
    let is_exposed = |record: &NodeRecord| {
        let mut addresses = record.addresses.iter().filter_map(|address| address.parse::<SocketAddr>().ok());
        record.tls == TlsPolicy::Required && addresses.any(|address| !address.ip().is_loopback())
    };
    if let Some((id, record)) = chosen.iter().find(|(_, record)| is_exposed(record))
        && tls != TlsPolicy::Required
        && !options.allow_plain_network
    {
        let address = record.addresses.join(", ");
        return Err(CommandError::operation(format!(
            "node {} listens on {address}, which others than this machine reach, and would serve without \
             TLS: --allow-plain-network permits it",
            id.0
        )));
    }
    for (id, record) in chosen {
        if record.tls != tls {
            layout.map.put_node(id, &NodeRecord { tls, ..record }).map_err(CommandError::operation)?;
        }
    }
    Ok(())
}

/// Placement follows: every node reads the devices again when one of them has changed.
fn set_weight(options: &WeightArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let devices = layout.map.devices().map_err(CommandError::operation)?;
    let (id, device) = devices
        .into_iter()
        .find(|(_, device)| device.node == NodeId(options.node))
        .ok_or_else(|| CommandError::operation(format!("the cluster has no node {}", options.node)))?;
    let device = DeviceRecord { weight: options.weight, ..device };
    layout.map.put_device(id, &device).map_err(CommandError::operation)
}
