//! `ringbolt lvol`: the logical volumes of a running server.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};

use super::rpc;
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};
use crate::options::{DEFAULT_SOCKET, parse_size};

/// How long a call may take: metadata of a large store is written first.
const TIMEOUT: Duration = Duration::from_secs(600);
/// How often a job is asked for its progress.
const POLL: Duration = Duration::from_millis(100);
/// How often progress is printed.
const PROGRESS: Duration = Duration::from_secs(2);
const MIB: u64 = 1 << 20;

/// The subcommands of `ringbolt lvol`.
#[derive(Subcommand)]
pub(crate) enum LvolCommand {
    /// Create a store on a bdev, if nothing is on it, or a volume in a store
    #[command(after_help = "Examples:\n  ringbolt lvol create --on nvme0n1 pool\n  \
        ringbolt lvol create --on Malloc0 --cluster 64k pool\n  ringbolt lvol create pool/vol 10g\n  \
        ringbolt lvol create --thin pool/vol 10g")]
    Create {
        /// STORE, or STORE/VOLUME
        name: String,
        /// Size of a volume, as 10g, rounded up to clusters
        #[arg(value_parser = parse_size)]
        size: Option<u64>,
        /// Allocate clusters when they are written first, instead of now
        #[arg(long, conflicts_with = "on")]
        thin: bool,
        /// The bdev of a new store
        #[arg(long, value_name = "BDEV")]
        on: Option<String>,
        /// Bytes of a cluster of a new store, the unit of allocation [default: 4m]
        #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "on")]
        cluster: Option<u64>,
        /// Keep checksums of all data of a new store, and compare what is read with them
        #[arg(long, requires = "on")]
        data_checksums: bool,
        /// Also if something is on the bdev: a byte other than zero in its first 64 KiB
        #[arg(long, requires = "on")]
        force: bool,
        #[command(flatten)]
        server: LvolServer,
    },
    /// List stores, and the volumes in them
    #[command(after_help = "Examples:\n  ringbolt lvol list\n  ringbolt lvol list --json")]
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        server: LvolServer,
    },
    /// Make a snapshot of a volume
    #[command(after_help = "Example:\n  ringbolt lvol snapshot pool/vol before-update")]
    Snapshot {
        /// STORE/VOLUME
        volume: String,
        /// Name of the snapshot, without the store's
        name: String,
        #[command(flatten)]
        server: LvolServer,
    },
    /// Make a clone of a snapshot, which can be written
    #[command(after_help = "Examples:\n  ringbolt lvol clone pool/before-update test\n  \
        ringbolt lvol clone --whole pool/before-update copy")]
    Clone {
        /// STORE/SNAPSHOT
        snapshot: String,
        /// Name of the clone, without the store's
        name: String,
        /// Copy all data, so that the clone needs the snapshot no more
        #[arg(long)]
        whole: bool,
        #[command(flatten)]
        server: LvolServer,
    },
    /// Resize a volume, or extend a store to the size of its bdev; what a volume loses is gone
    #[command(after_help = "Examples:\n  ringbolt lvol resize pool/vol 20g\n  ringbolt lvol resize pool")]
    Resize {
        /// STORE/VOLUME, or STORE
        name: String,
        /// Size of a volume, as 20g, rounded up to clusters
        #[arg(value_parser = parse_size)]
        size: Option<u64>,
        #[command(flatten)]
        server: LvolServer,
    },
    /// Remove a volume or a snapshot with its data, or a store with all its volumes; what is served is
    /// refused
    #[command(
        after_help = "Examples:\n  ringbolt lvol remove pool/vol\n  ringbolt lvol remove --all pool\n  \
        ringbolt lvol remove --force pool/vol"
    )]
    Remove {
        /// STORE/VOLUME, or STORE
        name: String,
        /// Remove a store with all its volumes
        #[arg(long)]
        all: bool,
        /// Also if a volume is open, as when it is served: its users get errors
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        server: LvolServer,
    },
}

/// A running server.
#[derive(Args)]
pub(crate) struct LvolServer {
    /// UNIX socket of the server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    rpc_socket: PathBuf,
}

impl LvolServer {
    fn call(&self, method: &str, params: Value) -> Result<Value, CommandError> {
        rpc::call(&self.rpc_socket, method, params, TIMEOUT)
    }

    /// Calls a method that waits for no device.
    fn query(&self, method: &str) -> Result<Value, CommandError> {
        rpc::call(&self.rpc_socket, method, Value::Null, rpc::QUERY_TIMEOUT)
    }

    /// Calls a method as a job, and prints how far it is.
    fn run_job(&self, method: &str, mut params: Value) -> Result<(), CommandError> {
        params["background"] = true.into();
        let job = self.call(method, params)?["job"].clone();
        let mut printed = Instant::now();
        loop {
            let state = self.call("job_get", json!({ "job": job }))?[0].clone();
            match state["state"].as_str() {
                Some("running") => {}
                Some("done") => return Ok(()),
                _ => {
                    let message = state["error"]["message"].as_str().unwrap_or("it was cancelled");
                    return Err(CommandError::operation(format!("{method}: {message}")));
                }
            }
            if printed.elapsed() >= PROGRESS {
                printed = Instant::now();
                let (done, total) = (&state["done"], state["total"].as_u64().unwrap_or(0));
                stderr_line!("{done} of {total} clusters");
            }
            std::thread::sleep(POLL);
        }
    }
}

/// The store and the volume of a name.
fn split(name: &str) -> (&str, Option<&str>) {
    match name.split_once('/') {
        Some((store, volume)) => (store, Some(volume)),
        None => (name, None),
    }
}

/// The name of a volume that is made in the store of another, which may be written with that store, too.
fn within<'a>(of: &str, name: &'a str) -> &'a str {
    match split(name) {
        (store, Some(volume)) if store == split(of).0 => volume,
        _ => name,
    }
}

/// Runs a subcommand of `ringbolt lvol`.
pub(crate) fn run(command: LvolCommand) -> Result<(), CommandError> {
    match command {
        LvolCommand::Create { name, size, thin, on, cluster, data_checksums, force, server } => {
            match (split(&name), size, on) {
                ((store, None), None, Some(bdev)) => {
                    create_store(&server, store, &bdev, cluster, data_checksums, force)
                }
                ((store, Some(volume)), Some(size), None) => {
                    create_volume(&server, store, volume, size, thin)
                }
                ((_, None), _, None) => Err(CommandError::usage(
                    "name the bdev of a new store with --on, or a volume as STORE/VOLUME",
                )),
                ((_, Some(_)), _, Some(_)) => {
                    Err(CommandError::usage("--on is for a store, whose name has no /"))
                }
                ((_, Some(_)), None, None) => Err(CommandError::usage("give the size of the volume, as 10g")),
                ((_, None), Some(_), Some(_)) => {
                    Err(CommandError::usage("a store has the size of its bdev; leave the size out"))
                }
            }
        }
        LvolCommand::List { json, server } => list(&server, json),
        LvolCommand::Snapshot { volume, name, server } => {
            let name = within(&volume, &name);
            let params = json!({ "lvol_name": volume, "snapshot_name": name });
            let uuid = server.call("bdev_lvol_snapshot", params)?;
            print_made(split(&volume).0, name, &uuid);
            Ok(())
        }
        LvolCommand::Clone { snapshot, name, whole, server } => {
            let name = within(&snapshot, &name);
            let params = json!({ "snapshot_name": snapshot, "clone_name": name });
            let uuid = server.call("bdev_lvol_clone", params)?;
            if whole {
                server.run_job("bdev_lvol_inflate", json!({ "name": uuid }))?;
            }
            print_made(split(&snapshot).0, name, &uuid);
            Ok(())
        }
        LvolCommand::Resize { name, size, server } => match (split(&name), size) {
            ((_, Some(_)), Some(size)) => {
                let params = json!({ "name": name, "size_in_mib": size.div_ceil(MIB) });
                server.call("bdev_lvol_resize", params).map(drop)
            }
            ((store, None), None) => {
                server.call("bdev_lvol_grow_lvstore", json!({ "lvs_name": store })).map(drop)
            }
            ((_, Some(_)), None) => Err(CommandError::usage("give the size of the volume, as 20g")),
            ((_, None), Some(_)) => {
                Err(CommandError::usage("a store has the size of its bdev; leave the size out"))
            }
        },
        LvolCommand::Remove { name, all, force, server } => match split(&name) {
            (_, Some(_)) => {
                let params = json!({ "name": name, "only_unused": !force });
                server.call("bdev_lvol_delete", params).map(drop)
            }
            (store, None) if all => {
                let params = json!({ "lvs_name": store, "only_unused": !force });
                server.call("bdev_lvol_delete_lvstore", params).map(drop)
            }
            _ => Err(CommandError::usage(
                "a volume is STORE/VOLUME; --all removes a store with all its volumes",
            )),
        },
    }
}

fn print_made(store: &str, name: &str, uuid: &Value) {
    stdout_line!("{store}/{name}  {}", uuid.as_str().unwrap_or_default());
}

fn create_store(
    server: &LvolServer,
    store: &str,
    bdev: &str,
    cluster: Option<u64>,
    data_checksums: bool,
    force: bool,
) -> Result<(), CommandError> {
    let mut params = json!({ "bdev_name": bdev, "lvs_name": store, "only_blank": !force });
    if let Some(cluster) = cluster {
        params["cluster_sz"] = cluster.into();
    }
    if data_checksums {
        params["data_checksums"] = "crc32c".into();
    }
    let uuid = server.call("bdev_lvol_create_lvstore", params)?;
    stdout_line!("{store}  {}", uuid.as_str().unwrap_or_default());
    Ok(())
}

fn create_volume(
    server: &LvolServer,
    store: &str,
    volume: &str,
    size: u64,
    thin: bool,
) -> Result<(), CommandError> {
    let params = json!({
        "lvs_name": store, "lvol_name": volume, "size_in_mib": size.div_ceil(MIB), "thin_provision": thin
    });
    let uuid = server.call("bdev_lvol_create", params)?;
    print_made(store, volume, &uuid);
    Ok(())
}

fn list(server: &LvolServer, as_json: bool) -> Result<(), CommandError> {
    let stores = server.query("bdev_lvol_get_lvstores")?;
    let lvols = server.query("bdev_lvol_get_lvols")?;
    if as_json {
        stdout_line!("{:#}", json!({ "lvstores": stores, "lvols": lvols }));
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["name", "clusters", "cluster", "kind", "on"]);
    for index in [1, 2] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for store in stores.as_array().into_iter().flatten() {
        table.add_row(store_row(store));
        let is_in = |lvol: &&Value| lvol["lvs"]["uuid"] == store["uuid"];
        for lvol in lvols.as_array().into_iter().flatten().filter(is_in) {
            table.add_row(volume_row(lvol));
        }
    }
    stdout_line!("{table}");
    Ok(())
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

fn store_row(store: &Value) -> [String; 5] {
    let number = |key: &str| store[key].as_u64().unwrap_or(0);
    let (total, free) = (number("total_data_clusters"), number("free_clusters"));
    let cluster = format!("{}k", number("cluster_size") >> 10);
    let used = format!("{} of {total}", total - free.min(total));
    let kind = if store["is_read_only"] == true { "store read-only" } else { "store" };
    [text(&store["name"]), used, cluster, kind.into(), text(&store["base_bdev"])]
}

fn volume_row(lvol: &Value) -> [String; 5] {
    let kinds = [
        ("is_snapshot", "snapshot"),
        ("is_clone", "clone"),
        ("is_esnap_clone", "external-clone"),
        ("is_read_only", "read-only"),
        ("is_degraded", "degraded"),
    ];
    let allocation = if lvol["is_thin_provisioned"] == true { "thin" } else { "thick" };
    let marks = kinds.iter().filter(|(key, _)| lvol[*key] == true).map(|(_, kind)| *kind);
    let kind = std::iter::once(allocation).chain(marks).collect::<Vec<&str>>().join(" ");
    [
        text(&lvol["alias"]),
        text(&lvol["num_allocated_clusters"]),
        String::new(),
        kind,
        text(&lvol["lvs"]["name"]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_listed_with_what_it_is() {
        let marks = |lvol: Value| volume_row(&lvol)[3].clone();
        assert_eq!(marks(json!({})), "thick");
        assert_eq!(marks(json!({ "is_thin_provisioned": true, "is_clone": true })), "thin clone");
        let snapshot = json!({ "is_snapshot": true, "is_read_only": true, "is_degraded": true });
        assert_eq!(marks(snapshot), "thick snapshot read-only degraded");
        assert_eq!(store_row(&json!({ "is_read_only": true }))[3], "store read-only");
        assert_eq!(store_row(&json!({ "is_read_only": false }))[3], "store");
    }

    #[test]
    fn a_volume_is_named_with_its_store() {
        assert_eq!(split("pool/vol"), ("pool", Some("vol")));
        assert_eq!(split("pool/a/b"), ("pool", Some("a/b")));
        assert_eq!(split("pool"), ("pool", None));
    }

    #[test]
    fn a_snapshot_may_be_named_with_its_store() {
        assert_eq!(within("pool/vol", "pool/before"), "before");
        assert_eq!(within("pool/vol", "before"), "before");
        // Another store is not meant: the name is used as it is.
        assert_eq!(within("pool/vol", "other/before"), "other/before");
    }

    #[test]
    fn what_a_volume_is_follows_from_its_flags() {
        let lvol = |thin: bool, snapshot: bool| {
            json!({ "alias": "pool/v", "num_allocated_clusters": 3, "is_thin_provisioned": thin,
                "is_snapshot": snapshot, "is_clone": false, "lvs": { "name": "pool" } })
        };
        assert_eq!(volume_row(&lvol(false, false))[3], "thick");
        assert_eq!(volume_row(&lvol(true, true)), ["pool/v", "3", "", "thin snapshot", "pool"]);
    }
}
