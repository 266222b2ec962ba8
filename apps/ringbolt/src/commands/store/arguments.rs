//! Arguments that several subcommands of `ringbolt store` have: which cluster, and what new nodes are like.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use cluster_map::{ClusterSettings, EtcdFiles, EtcdOptions, TlsPolicy};
use os::CpuSet;
use store_node::{StoreTuning, ThreadMode};

use super::listen::{parse_listen, port_of};
use crate::command_error::CommandError;
use crate::options::{Idle, parse_ms, parse_size, parse_time};

/// The directory of the cluster, unless it is named.
const DEFAULT_DIRECTORY: &str = "ringbolt-store";
/// The pool that a new cluster has.
pub(crate) const POOL: &str = "pool";

/// Which cluster.
#[derive(Args)]
pub(crate) struct ClusterArgs {
    /// Directory of the cluster
    #[arg(long, value_name = "DIR", env = "RINGBOLT_CLUSTER", default_value = DEFAULT_DIRECTORY)]
    pub(super) cluster: PathBuf,
    #[command(flatten)]
    pub(super) etcd: EtcdArgs,
}

/// etcd, with the map of a cluster.
#[derive(Args)]
pub(crate) struct EtcdArgs {
    /// etcd, which has the map of the cluster: http://HOST:PORT[/PREFIX] or https://, several with commas
    /// between. The cluster's directory remembers it, with copies of the files below
    #[arg(long, value_name = "URL[,URL]")]
    pub(super) etcd: Option<String>,
    /// File with a user of etcd, a line NAME:PASSWORD, which its owner alone can read [default: etcd-user in
    /// the cluster's directory, if it is there]
    #[arg(long, value_name = "FILE")]
    pub(super) etcd_user_file: Option<PathBuf>,
    /// File with the certificates of the CAs of etcd's servers, which https:// needs [default: etcd-ca.pem
    /// there]
    #[arg(long, value_name = "FILE")]
    pub(super) etcd_ca_file: Option<PathBuf>,
    /// File with a client certificate, if etcd requires one [default: etcd-cert.pem there]
    #[arg(long, value_name = "FILE")]
    pub(super) etcd_cert_file: Option<PathBuf>,
    /// File with the key of the client certificate, which its owner alone can read [default: etcd-key.pem
    /// there]
    #[arg(long, value_name = "FILE")]
    pub(super) etcd_key_file: Option<PathBuf>,
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

/// What a new cluster is like.
#[derive(Args)]
pub(crate) struct NewCluster {
    /// Nodes of a new cluster [default: 3, or one for each --device]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "devices")]
    pub(super) nodes: Option<u32>,
    /// Block device of a new cluster's node, whose data is lost; repeat it for each node
    #[arg(long = "device", value_name = "PATH")]
    pub(super) devices: Vec<PathBuf>,
    /// Block device for the logs of a new cluster's node; repeat it for each node, in the order of the
    /// devices. Without, logs are where the data is
    #[arg(long = "log", value_name = "PATH")]
    pub(super) logs: Vec<PathBuf>,
    /// Replicas of each logical group of a new cluster [default: the nodes, at most 3]
    #[arg(long)]
    pub(super) replicas: Option<u32>,
    /// Logical groups of a new cluster
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) groups: u32,
    /// How long a replica's answer lets the primary of a new cluster's group serve, in whole ms. It never
    /// changes [default: 400ms]
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    pub(super) lease: Option<u32>,
    /// How long a replica of a new cluster waits for a silent primary before it takes over, at least 2.1 %
    /// longer than the lease; both together are below 1 s [default: 450ms]
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    pub(super) grace: Option<u32>,
    #[command(flatten)]
    pub(super) node: NodeOptions,
}

impl NewCluster {
    /// The lease and grace that are given, and else those of `known`.
    pub(super) fn settings(&self, known: ClusterSettings) -> ClusterSettings {
        let (lease_ms, grace_ms) =
            (self.lease.unwrap_or(known.lease_ms), self.grace.unwrap_or(known.grace_ms));
        ClusterSettings { lease_ms, grace_ms }
    }

    pub(super) fn node_count(&self) -> u32 {
        match self.devices.len() {
            0 => self.nodes.unwrap_or(3),
            devices => devices as u32,
        }
    }
}

/// How the processes of the nodes of this machine run.
#[derive(Args, Clone)]
pub(crate) struct NodeReactors {
    /// What the nodes that run here do when they are idle; those that sleep leave the cores to each other and
    /// to clients
    #[arg(long, value_enum, default_value = "sleep")]
    pub(super) idle: Idle,
    /// Cores of a node, one pinned reactor each, as 0-3,5; repeat it for each node of this machine, in the
    /// order of their numbers, or give one list for all [default: one reactor, not pinned]
    #[arg(long, value_name = "LIST", value_parser = parse_cores)]
    pub(super) cores: Vec<CpuSet>,
}

impl Default for NodeReactors {
    fn default() -> NodeReactors {
        NodeReactors { idle: Idle::Sleep, cores: Vec::new() }
    }
}

fn parse_cores(text: &str) -> Result<CpuSet, String> {
    text.parse::<CpuSet>().and_then(CpuSet::checked).map_err(|error| error.to_string())
}

impl NodeReactors {
    /// Refuses lists that are neither one for each of the nodes of this machine nor one for all.
    pub(super) fn check(&self, nodes: usize) -> Result<(), CommandError> {
        match self.cores.len() {
            0 | 1 => Ok(()),
            lists if lists == nodes => Ok(()),
            lists => Err(CommandError::usage(format!(
                "{nodes} nodes run here: --cores is given once for all of them, or {nodes} times, and not {lists} times"
            ))),
        }
    }

    /// The cores of a node, by its place among those of this machine. One that was added later has none if
    /// each of the others has its own.
    pub(super) fn cores_of(&self, index: usize) -> Option<&CpuSet> {
        match &self.cores[..] {
            [all] => Some(all),
            each => each.get(index),
        }
    }
}

/// What a new node is like.
#[derive(Args, Clone)]
pub(crate) struct NodeOptions {
    /// Size of a new node's file [default: 10g]
    #[arg(long, value_parser = parse_size, conflicts_with = "devices")]
    pub(super) size: Option<u64>,
    /// Destroy stores that are on the devices; use devices that look used
    #[arg(long, requires = "devices")]
    pub(super) force: bool,
    /// Size of each group's log on a new node
    #[arg(long, default_value = "8m", value_parser = parse_size)]
    pub(super) log_size: u64,
    /// Groups for which a new node has space besides those that it gets at once; each takes an equal part of
    /// the file [default: half as many as it gets]
    #[arg(long, value_name = "GROUPS", value_parser = clap::value_parser!(u32).range(0..=1023))]
    pub(super) spare: Option<u32>,
    /// Failure domain of a new node, for example its machine or rack: replicas of a group are in different
    /// ones [default: the one that was given for all other nodes of the directory, else the node]
    #[arg(long)]
    pub(super) domain: Option<String>,
    /// Address that a new node listens on, and its port, which it keeps; several new nodes have ports one
    /// after the other from there on. Without a port each selects a free one, and keeps it while it can
    #[arg(long, value_name = "IP[:PORT]", default_value = "127.0.0.1", value_parser = parse_listen)]
    pub(super) listen: SocketAddr,
    /// Listen on an address that others than this machine reach, although data is not encrypted; not needed
    /// with `--tls required`
    #[arg(long)]
    pub(super) allow_plain_network: bool,
    /// Whether others connect to a new node with TLS; `ringbolt store tls` changes it
    #[arg(long, value_enum, default_value_t = TlsOption::Off)]
    pub(super) tls: TlsOption,
    /// The device of a new node writes each aligned 4 KiB whole or not at all, also when the power fails,
    /// although it does not report that: overwrites of 4 KiB then go in place, and the log has only their
    /// headers
    #[arg(long)]
    pub(super) atomic_blocks: bool,
    /// Encrypt what a new node has on its devices, logs too, with a key of its own. Without --key-file and
    /// --key-dir its file is data.key in the node's directory: keep that on another disk than the data
    #[arg(long)]
    pub(super) encrypt: bool,
    /// File of the key of one new node: the one that is there, 128 hexadecimal digits for AES-256-XTS, else a
    /// new one
    #[arg(long, value_name = "FILE", requires = "encrypt", conflicts_with = "key_dir")]
    pub(super) key_file: Option<PathBuf>,
    /// Directory for the files of new keys, which are nodeN-CHECKVALUE.key there
    #[arg(long, value_name = "DIR", requires = "encrypt")]
    pub(super) key_dir: Option<PathBuf>,
    /// What reads of a new node do of an object of which the log has entries: lay their bytes over the
    /// device's, or have them written in place and wait for that, as in the paper
    #[arg(long, value_enum, default_value_t = ReadPolicy::Overlay)]
    pub(super) read_policy: ReadPolicy,
    /// Most memory that a new node uses for checksums; 1 MiB has those of 1 GiB of data
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = parse_size)]
    pub(super) checksum_cache: u64,
    /// Entries of a replica of a new node beyond which they are written in place, at most 1024: few make the
    /// log short, many join writes of the same blocks
    #[arg(long, value_name = "ENTRIES", default_value_t = StoreTuning::default().flush_entries,
        value_parser = clap::value_parser!(u32).range(0..=StoreTuning::FLUSH_ENTRIES_MAX as i64))]
    pub(super) flush_entries: u32,
    /// How long an entry waits at most until it is written in place, at most a minute
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_time)]
    pub(super) flush_after: u64,
    /// Which threads of a new node do its work: the core that owns a replica, or as in the paper, a priority
    /// thread for connections, log and replication, and a non-priority thread for what is in place. With
    /// `store up` of a cluster that exists, all nodes of this machine from now on [default:
    /// run-to-completion]
    #[arg(long, value_enum)]
    pub(super) threads: Option<ThreadsOption>,
    /// How long another node is down before its replicas move to others
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_time)]
    pub(super) out_after: u64,
}

/// What a read does of an object of which the log has entries.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ReadPolicy {
    Overlay,
    Flush,
}

impl ReadPolicy {
    /// As `store_node_start` names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            ReadPolicy::Overlay => "overlay",
            ReadPolicy::Flush => "flush",
        }
    }
}

/// Which threads do the work of a node.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ThreadsOption {
    RunToCompletion,
    Prioritized,
}

impl ThreadsOption {
    /// As `store_node_start` names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            ThreadsOption::RunToCompletion => ThreadMode::RunToCompletion.name(),
            ThreadsOption::Prioritized => ThreadMode::Prioritized.name(),
        }
    }
}

impl NodeOptions {
    /// The options of one of the nodes that are made together. Ports that do not exist were refused.
    pub(super) fn of_index(&self, index: u32) -> NodeOptions {
        let mut options = self.clone();
        options.listen.set_port(port_of(self.listen, index).unwrap_or(0));
        options
    }

    /// On this machine alone.
    pub(super) fn local(size: u64) -> NodeOptions {
        NodeOptions {
            size: Some(size),
            force: false,
            log_size: 8 << 20,
            spare: None,
            domain: None,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            allow_plain_network: false,
            tls: TlsOption::Off,
            atomic_blocks: false,
            encrypt: false,
            key_file: None,
            key_dir: None,
            read_policy: ReadPolicy::Overlay,
            checksum_cache: StoreTuning::default().checksum_cache_bytes,
            flush_entries: StoreTuning::default().flush_entries,
            flush_after: StoreTuning::default().flush_after.as_nanos() as u64,
            threads: None,
            out_after: 600_000_000_000,
        }
    }

    /// What clap cannot check.
    pub(super) fn check(&self) -> Result<(), CommandError> {
        if self.flush_after > StoreTuning::FLUSH_AFTER_MAX.as_nanos() as u64 {
            return Err(CommandError::usage("--flush-after: at most a minute"));
        }
        let ip = self.listen.ip();
        if ip.is_loopback() || self.allow_plain_network || self.tls == TlsOption::Required {
            return Ok(());
        }
        Err(CommandError::usage(format!(
            "{ip} is not this machine alone, and data is not encrypted: --tls required encrypts it, and \
             --allow-plain-network permits it"
        )))
    }
}

/// Whether connections to a node use TLS.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TlsOption {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_has_cores_of_its_own_or_all_the_same() {
        let sets = |lists: &[&str]| lists.iter().map(|list| list.parse().unwrap()).collect::<Vec<CpuSet>>();
        let of = |lists: &[&str]| NodeReactors { idle: Idle::Sleep, cores: sets(lists) };
        let cores = |reactors: &NodeReactors, index| reactors.cores_of(index).map(CpuSet::to_string);
        assert_eq!(cores(&of(&[]), 0), None);
        assert_eq!(
            [0, 5].map(|index| cores(&of(&["1"]), index)),
            [Some("1".to_string()), Some("1".to_string())]
        );
        let two = of(&["0", "1"]);
        assert_eq!(
            [0, 1, 2].map(|index| cores(&two, index)),
            [Some("0".to_string()), Some("1".to_string()), None]
        );
        assert!(two.check(2).is_ok() && of(&["0"]).check(3).is_ok() && of(&[]).check(3).is_ok());
        assert!(two.check(3).unwrap_err().to_string().contains("3 nodes run here"));
        assert!(parse_cores("first").is_err() && parse_cores("1000").is_err());
    }
}
