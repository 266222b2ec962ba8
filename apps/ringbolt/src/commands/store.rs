//! `ringbolt store`: a cluster of the replicated store on this machine, and its state.

mod demo;
mod layout;
mod nodes;
mod status;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::cli::{parse_size, parse_time};
use crate::command_error::CommandError;
use crate::console::stdout_line;
use layout::ClusterLayout;
use nodes::RunningNodes;

/// The directory of the cluster, unless it is named.
const DEFAULT_DIRECTORY: &str = "ringbolt-store";
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
        ringbolt perf --filename=store:pool/vol --rw=randwrite --bs=4k --iodepth=16 --runtime=5 --time_based\n  \
        ringbolt store status")]
    Up(UpArgs),
    /// Show what is degraded, and why a group is not served
    #[command(after_help = "Example:\n  ringbolt store status --json")]
    Status(StatusArgs),
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
    /// etcd, which has the map of a new cluster: http://HOST:PORT[/PREFIX], several with commas between. The directory
    /// remembers it
    #[arg(long, value_name = "URL[,URL]")]
    etcd: Option<String>,
}

/// Arguments of `ringbolt store up`.
#[derive(Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    of: ClusterArgs,
    #[command(flatten)]
    new: NewCluster,
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
    /// Destroy stores that are on the devices; use devices that look used
    #[arg(long, requires = "devices")]
    force: bool,
    /// Replicas of each logical group of a new cluster [default: the nodes, at most 3]
    #[arg(long)]
    replicas: Option<u32>,
    /// Logical groups of a new cluster
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    groups: u32,
    /// Size of each node's file in a new cluster [default: 10g]
    #[arg(long, value_parser = parse_size, conflicts_with = "devices")]
    size: Option<u64>,
    /// Size of each group's log in a new cluster
    #[arg(long, default_value = "8m", value_parser = parse_size)]
    log_size: u64,
    #[command(flatten)]
    network: NodeNetwork,
}

/// Where nodes of a new cluster listen.
#[derive(Args, Clone)]
pub(crate) struct NodeNetwork {
    /// Address that nodes of a new cluster listen on
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Listen on an address that others than this machine reach, although data is not encrypted
    #[arg(long)]
    allow_plain_network: bool,
}

impl NodeNetwork {
    /// This machine alone.
    pub(super) fn loopback() -> NodeNetwork {
        NodeNetwork { listen: Ipv4Addr::LOCALHOST.into(), allow_plain_network: false }
    }
}

impl NewCluster {
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
        StoreCommand::Demo(options) => demo::run(&options),
    }
}

fn up(options: &UpArgs) -> Result<(), CommandError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGCHLD]).map_err(CommandError::environment)?;
    let ClusterArgs { cluster: directory, etcd } = &options.of;
    let layout = if directory.exists() {
        etcd.iter().try_for_each(|urls| layout::set_etcd(directory, urls))?;
        ClusterLayout::open(directory, etcd.as_deref())?
    } else {
        let layout = ClusterLayout::create(directory, etcd.as_deref(), &options.new)?;
        stdout_line!("made a cluster in {}", directory.display());
        layout
    };
    let mut nodes = RunningNodes::start(&layout)?;
    stdout_line!("{}", layout.describe()?);
    stdout_line!("ready; Ctrl-C ends it, `ringbolt store status` shows its state");
    while let Some(SIGCHLD) = signals.forever().next() {
        nodes.restart_ended()?;
    }
    stdout_line!("stopping");
    nodes.stop();
    Ok(())
}
