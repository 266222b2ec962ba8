//! `ringbolt store`: a cluster of the replicated store on this machine, and its state.

mod accept_loss;
mod demo;
mod key;
mod layout;
mod map;
mod nodes;
mod pool;
mod reclaim;
mod space;
mod status;
mod stop;

use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use cluster_map::{
    ClusterSettings, DeviceRecord, EtcdFiles, EtcdOptions, MapChange, NodeId, NodeRecord, OutReason,
    TlsPolicy,
};
use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Errno;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use store_node::StoreTuning;

use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::{Idle, parse_ms, parse_size, parse_time};
use accept_loss::AcceptLossArgs;
use key::KeyCommand;
use layout::ClusterLayout;
use map::MapCommand;
use nodes::RunningNodes;
use pool::PoolCommand;
use reclaim::ReclaimArgs;
use stop::{StartNodeArgs, StopNodeArgs};

/// The directory of the cluster, unless it is named.
const DEFAULT_DIRECTORY: &str = "ringbolt-store";
/// The map's changes are waited for this long at a time.
const WATCH_TIME: Duration = Duration::from_secs(60);
/// The pool that a new cluster has.
pub(super) const POOL: &str = "pool";

/// The subcommands of `ringbolt store`.
#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// Run a cluster on this machine until Ctrl-C; a new one is made first
    #[command(after_help = "Examples:\n  ringbolt store up\n  \
        ringbolt store up --cluster /srv/store --nodes 4 --replicas 2 --size 100g\n  \
        ringbolt store up --device /dev/nvme0n1 --device /dev/nvme1n1 --device /dev/nvme2n1\n\n\
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
        ringbolt store add-node --etcd http://10.0.0.1:2379 --key key --listen 10.0.0.2 \\\n      \
        --tls required")]
    AddNode(AddNodeArgs),
    /// Stop a node of this machine for maintenance: others take over first, and `ringbolt store up` does not
    /// start it again
    #[command(
        after_help = "Examples:\n  ringbolt store stop-node 2\n  ringbolt store stop-node 2 --force --json\n\n\
        Clients wait for no lease. It is refused where too few replicas would be in sync."
    )]
    StopNode(StopNodeArgs),
    /// Start a node that was stopped; `ringbolt store up` in the same directory runs it
    #[command(after_help = "Example:\n  ringbolt store start-node 2")]
    StartNode(StartNodeArgs),
    /// Move the replicas of a node to other nodes, so that it can be taken away
    #[command(after_help = "Example:\n  ringbolt store out 2")]
    Out(OutArgs),
    /// Let a node have replicas again
    #[command(after_help = "Example:\n  ringbolt store in 2")]
    In(OutArgs),
    /// Remove a node for good: one that is stopped or lost, and whose replicas are on others
    #[command(
        after_help = "Example:\n  ringbolt store out 2\n  ringbolt store stop-node 2\n  ringbolt store remove-node 2\n\n\
        Its number is not used again. Its directory and its device stay as they are."
    )]
    RemoveNode(OutArgs),
    /// Give a node another share of the data: some replicas move to it, or from it to others
    #[command(after_help = "Example:\n  ringbolt store weight 2 5120")]
    Weight(WeightArgs),
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

/// Which cluster.
#[derive(Args)]
pub(crate) struct ClusterArgs {
    /// Directory of the cluster
    #[arg(long, value_name = "DIR", env = "RINGBOLT_CLUSTER", default_value = DEFAULT_DIRECTORY)]
    cluster: PathBuf,
    #[command(flatten)]
    etcd: EtcdArgs,
}

/// etcd, with the map of a cluster.
#[derive(Args)]
pub(crate) struct EtcdArgs {
    /// etcd, which has the map of the cluster: http://HOST:PORT[/PREFIX] or https://, several with commas
    /// between. The cluster's directory remembers it, with copies of the files below
    #[arg(long, value_name = "URL[,URL]")]
    etcd: Option<String>,
    /// File with a user of etcd, a line NAME:PASSWORD, which its owner alone can read [default: etcd-user in
    /// the cluster's directory, if it is there]
    #[arg(long, value_name = "FILE")]
    etcd_user_file: Option<PathBuf>,
    /// File with the certificates of the CAs of etcd's servers, which https:// needs [default: etcd-ca.pem
    /// there]
    #[arg(long, value_name = "FILE")]
    etcd_ca_file: Option<PathBuf>,
    /// File with a client certificate, if etcd requires one [default: etcd-cert.pem there]
    #[arg(long, value_name = "FILE")]
    etcd_cert_file: Option<PathBuf>,
    /// File with the key of the client certificate, which its owner alone can read [default: etcd-key.pem
    /// there]
    #[arg(long, value_name = "FILE")]
    etcd_key_file: Option<PathBuf>,
}

impl EtcdArgs {
    pub(crate) fn options(&self) -> EtcdOptions {
        let files = EtcdFiles {
            user: self.etcd_user_file.clone(),
            ca: self.etcd_ca_file.clone(),
            certificate: self.etcd_cert_file.clone(),
            key: self.etcd_key_file.clone(),
        };
        EtcdOptions { urls: self.etcd.clone(), files }
    }

    /// Whether one of them is given.
    pub(crate) fn is_given(&self) -> bool {
        self.options() != EtcdOptions::default()
    }
}

/// Arguments of `ringbolt store up`.
#[derive(Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    of: ClusterArgs,
    #[command(flatten)]
    new: NewCluster,
    /// What the nodes that run here do when they are idle; those that sleep leave the cores to each other and
    /// to clients
    #[arg(long, value_enum, default_value = "sleep")]
    idle: Idle,
}

/// What a new cluster is like.
#[derive(Args)]
pub(crate) struct NewCluster {
    /// Nodes of a new cluster [default: 3, or one for each --device]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "devices")]
    nodes: Option<u32>,
    /// Block device of a new cluster's node, whose data is lost; repeat it for each node
    #[arg(long = "device", value_name = "PATH")]
    devices: Vec<PathBuf>,
    /// Block device for the logs of a new cluster's node; repeat it for each node, in the order of the
    /// devices. Without, logs are where the data is
    #[arg(long = "log", value_name = "PATH")]
    logs: Vec<PathBuf>,
    /// Replicas of each logical group of a new cluster [default: the nodes, at most 3]
    #[arg(long)]
    replicas: Option<u32>,
    /// Logical groups of a new cluster
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    groups: u32,
    /// How long a replica's answer lets the primary of a new cluster's group serve, in whole ms. It never
    /// changes [default: 400ms]
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    lease: Option<u32>,
    /// How long a replica of a new cluster waits for a silent primary before it takes over, at least 2.1 %
    /// longer than the lease; both together are below 1 s [default: 450ms]
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    grace: Option<u32>,
    #[command(flatten)]
    node: NodeOptions,
}

/// What a new node is like.
#[derive(Args, Clone)]
pub(crate) struct NodeOptions {
    /// Size of a new node's file [default: 10g]
    #[arg(long, value_parser = parse_size, conflicts_with = "devices")]
    size: Option<u64>,
    /// Destroy stores that are on the devices; use devices that look used
    #[arg(long, requires = "devices")]
    force: bool,
    /// Size of each group's log on a new node
    #[arg(long, default_value = "8m", value_parser = parse_size)]
    log_size: u64,
    /// Groups for which a new node has room besides those that it gets at once; each takes an equal part of
    /// the file [default: half as many as it gets]
    #[arg(long, value_name = "GROUPS", value_parser = clap::value_parser!(u32).range(0..=1023))]
    spare: Option<u32>,
    /// Failure domain of a new node, for example its machine or rack: replicas of a group are in different
    /// ones [default: the one that was given for all other nodes of the directory, else the node]
    #[arg(long)]
    domain: Option<String>,
    /// Address that a new node listens on
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Listen on an address that others than this machine reach, although data is not encrypted; not needed
    /// with `--tls required`
    #[arg(long)]
    allow_plain_network: bool,
    /// Whether others connect to a new node with TLS; `ringbolt store tls` changes it
    #[arg(long, value_enum, default_value_t = TlsOption::Off)]
    tls: TlsOption,
    /// The device of a new node writes each aligned 4 KiB whole or not at all, also when the power fails,
    /// although it does not report that: overwrites of 4 KiB then go in place, and the log has only their
    /// headers
    #[arg(long)]
    atomic_blocks: bool,
    /// What reads of a new node do of an object of which the log has entries: lay their bytes over the
    /// device's, or have them written in place and wait for that, as in the paper
    #[arg(long, value_enum, default_value_t = ReadPolicy::Overlay)]
    read_policy: ReadPolicy,
    /// Most memory that a new node uses for checksums; 1 MiB has those of 1 GiB of data
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = parse_size)]
    checksum_cache: u64,
    /// Entries of a replica of a new node beyond which they are written in place, at most 1024: few make the
    /// log short, many join writes of the same blocks
    #[arg(long, value_name = "ENTRIES", default_value_t = StoreTuning::default().flush_entries,
        value_parser = clap::value_parser!(u32).range(0..=StoreTuning::FLUSH_ENTRIES_MAX as i64))]
    flush_entries: u32,
    /// How long an entry waits at most until it is written in place, at most a minute
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_time)]
    flush_after: u64,
    /// How long another node is down before its replicas move to others
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_time)]
    out_after: u64,
}

/// What a read does of an object of which the log has entries.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ReadPolicy {
    Overlay,
    Flush,
}

impl ReadPolicy {
    /// As `store_node_start` names it.
    fn name(self) -> &'static str {
        match self {
            ReadPolicy::Overlay => "overlay",
            ReadPolicy::Flush => "flush",
        }
    }
}

impl NodeOptions {
    /// On this machine alone.
    pub(super) fn local(size: u64) -> NodeOptions {
        NodeOptions {
            size: Some(size),
            force: false,
            log_size: 8 << 20,
            spare: None,
            domain: None,
            listen: Ipv4Addr::LOCALHOST.into(),
            allow_plain_network: false,
            tls: TlsOption::Off,
            atomic_blocks: false,
            read_policy: ReadPolicy::Overlay,
            checksum_cache: StoreTuning::default().checksum_cache_bytes,
            flush_entries: StoreTuning::default().flush_entries,
            flush_after: StoreTuning::default().flush_after.as_nanos() as u64,
            out_after: 600_000_000_000,
        }
    }

    /// What clap cannot check.
    fn check(&self) -> Result<(), CommandError> {
        if self.flush_after > StoreTuning::FLUSH_AFTER_MAX.as_nanos() as u64 {
            return Err(CommandError::usage("--flush-after: at most a minute"));
        }
        if self.listen.is_loopback() || self.allow_plain_network || self.tls == TlsOption::Required {
            return Ok(());
        }
        Err(CommandError::usage(format!(
            "{} is not this machine alone, and data is not encrypted: --tls required encrypts it, and \
             --allow-plain-network permits it",
            self.listen
        )))
    }
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

/// Arguments of `ringbolt store out`, `in` and `remove-node`.
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

/// Whether connections to a node use TLS.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum TlsOption {
    /// Others connect without it; those that use it are served too
    Off,
    /// Others connect with it; those that do not are served too
    On,
    /// Others connect with it, and none is served without
    Required,
}

impl From<TlsOption> for TlsPolicy {
    fn from(option: TlsOption) -> TlsPolicy {
        match option {
            TlsOption::Off => TlsPolicy::Off,
            TlsOption::On => TlsPolicy::On,
            TlsOption::Required => TlsPolicy::Required,
        }
    }
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

impl NewCluster {
    /// The lease and grace that are given, and else those of `known`.
    fn settings(&self, known: ClusterSettings) -> ClusterSettings {
        let (lease_ms, grace_ms) =
            (self.lease.unwrap_or(known.lease_ms), self.grace.unwrap_or(known.grace_ms));
        ClusterSettings { lease_ms, grace_ms }
    }

    fn node_count(&self) -> u32 {
        match self.devices.len() {
            0 => self.nodes.unwrap_or(3),
            devices => devices as u32,
        }
    }
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

/// Arguments of `ringbolt store demo`.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Duration of the load
    #[arg(long, default_value = "10s", value_parser = parse_time)]
    runtime: u64,
}

/// Runs a subcommand of `ringbolt store`.
pub(crate) fn run(command: StoreCommand) -> Result<(), CommandError> {
    match command {
        StoreCommand::Up(options) => up(&options),
        StoreCommand::Status(options) => status::run(&options.of, options.json),
        StoreCommand::AddNode(options) => add_node(&options),
        StoreCommand::StopNode(options) => stop::stop_node(&options),
        StoreCommand::StartNode(options) => stop::start_node(&options),
        StoreCommand::Out(options) => set_out(&options, Some(OutReason::Operator)),
        StoreCommand::In(options) => set_out(&options, None),
        StoreCommand::RemoveNode(options) => remove_node(&options),
        StoreCommand::Weight(options) => set_weight(&options),
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
    let layout = if !is_new {
        if etcd.is_given() {
            layout::set_etcd(directory, &etcd.options())?;
        }
        let layout = ClusterLayout::open(directory, &etcd.options())?;
        layout.check_settings(&options.new)?;
        if let Some(line) = layout.settle()? {
            stdout_line!("{line}");
        }
        layout
    } else {
        let layout = ClusterLayout::create(directory, &etcd.options(), &options.new)?;
        stdout_line!("made a cluster in {}", directory.display());
        layout
    };
    let mut nodes = RunningNodes::start(&layout, options.idle, is_new)?;
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
    let node = layout::add_node(&layout, options.replace, devices, &options.node)?;
    let place = layout.node(node);
    stdout_line!("node {node} is in {}; `ringbolt store up` of this directory runs it", place.display());
    Ok(())
}

fn remove_node(options: &OutArgs) -> Result<(), CommandError> {
    let layout = ClusterLayout::open(&options.of.cluster, &options.of.etcd.options())?;
    let node = options.node;
    layout::remove_node(&layout, node)?;
    let place = layout.node(node);
    match place.exists() {
        true => {
            stdout_line!("node {node} is removed; {} and its device are for you to delete", place.display())
        }
        false => stdout_line!("node {node} is removed"),
    }
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
