//! Which images a command is for.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use comfy_table::{CellAlignment, Table};
use serde_json::Value;

use crate::command_error::CommandError;
use crate::commands::rpc;
use crate::commands::store::{EtcdArgs, POOL};
use crate::console::stdout_line;
use crate::options::DEFAULT_SOCKET;

/// How long a call may take: a server removes the objects of an image of its store one by one.
const TIMEOUT: Duration = Duration::from_secs(600);

/// A store of a server, or a pool of a cluster.
#[derive(Args)]
pub(crate) struct ImageOwner {
    /// Name of the store [default: store]
    #[arg(long)]
    pub(super) store: Option<String>,
    #[command(flatten)]
    pub(super) server: Server,
    /// Directory of a cluster (`ringbolt store up`), instead of a server's store [default: RINGBOLT_CLUSTER,
    /// if it is set and neither --store nor --rpc-socket is given]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["store", "rpc_socket"])]
    cluster: Option<PathBuf>,
    #[command(flatten)]
    pub(super) etcd: EtcdArgs,
    /// Pool of the cluster
    #[arg(long, default_value = POOL)]
    pub(super) pool: String,
}

/// A running server.
#[derive(Args)]
pub(crate) struct Server {
    /// UNIX socket of the server [default: /var/tmp/ringbolt.sock]
    #[arg(short, long, value_name = "PATH")]
    rpc_socket: Option<PathBuf>,
}

impl Server {
    pub(super) fn call(&self, method: &str, params: Value) -> Result<Value, CommandError> {
        rpc::call(self.socket(), method, params, TIMEOUT)
    }

    /// Calls a method that waits for no device.
    pub(super) fn query(&self, method: &str) -> Result<Value, CommandError> {
        rpc::call(self.socket(), method, Value::Null, rpc::QUERY_TIMEOUT)
    }

    fn socket(&self) -> &Path {
        self.rpc_socket.as_deref().unwrap_or(Path::new(DEFAULT_SOCKET))
    }
}

impl ImageOwner {
    /// Whether the image is a cluster's, and not a server's.
    pub(super) fn is_cluster(&self) -> bool {
        self.cluster.is_some() || self.variable().is_some()
    }

    /// The cluster that the environment names, unless a server is named.
    fn variable(&self) -> Option<PathBuf> {
        let is_server = self.store.is_some() || self.server.rpc_socket.is_some();
        let directory = std::env::var_os("RINGBOLT_CLUSTER").filter(|it| !it.is_empty() && !is_server);
        directory.map(PathBuf::from)
    }

    pub(super) fn cluster_directory(&self) -> PathBuf {
        self.cluster.clone().or_else(|| self.variable()).unwrap_or_default()
    }

    pub(super) fn store(&self) -> &str {
        self.store.as_deref().unwrap_or("store")
    }
}

pub(super) fn mib(bytes: u64) -> String {
    bytes.div_ceil(1 << 20).to_string()
}

/// Prints a table whose second column has numbers.
pub(super) fn print_table<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header);
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    rows.for_each(|row| _ = table.add_row(row));
    stdout_line!("{table}");
}
