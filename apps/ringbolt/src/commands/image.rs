//! `ringbolt image`: the images of a running server's stores, and those of a cluster.

pub(super) mod cluster;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};

use super::rpc;
use super::store::{EtcdArgs, POOL};
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::{DEFAULT_SOCKET, parse_size};

/// How long a call may take: a server removes the objects of an image of its store one by one.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The subcommands of `ringbolt image`.
#[derive(Subcommand)]
pub(crate) enum ImageCommand {
    /// Create an image, thin unless it is preallocated, and print the name of its bdev
    #[command(
        after_help = "Examples:\n  ringbolt image create vol 10g\n  ringbolt image create --preallocate vol 10g\n  ringbolt image create --cluster ringbolt-store vol 10g"
    )]
    Create {
        /// Allocate the space of the whole image now, instead of that of each block when it is written first
        #[arg(long)]
        preallocate: bool,
        #[command(flatten)]
        image: SizedImage,
    },
    /// List the images of all stores
    #[command(after_help = "Example:\n  ringbolt image list --json")]
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        of: ImageOwner,
    },
    /// Resize an image; what is cut off is gone
    #[command(
        after_help = "Examples:\n  ringbolt image resize vol 20g\n  ringbolt image resize --cluster ringbolt-store --allow-shrink vol 5g"
    )]
    Resize {
        /// Of a cluster: remove what the image has behind a smaller size for good; without, a smaller size is
        /// refused
        #[arg(long)]
        allow_shrink: bool,
        /// Of a cluster: shrink it although a server has it attached, whose requests fail from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        image: SizedImage,
    },
    /// Describe an image of a cluster: its size, and who has it open, since when and from where
    #[command(after_help = "Example:\n  ringbolt image info --cluster ringbolt-store vol")]
    Info {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        image: NamedImage,
    },
    /// Protect an image of a cluster: it can be neither removed nor made smaller
    #[command(after_help = "Example:\n  ringbolt image protect --cluster ringbolt-store vol")]
    Protect {
        #[command(flatten)]
        image: NamedImage,
    },
    /// End the protection of an image of a cluster
    #[command(after_help = "Example:\n  ringbolt image unprotect --cluster ringbolt-store vol")]
    Unprotect {
        #[command(flatten)]
        image: NamedImage,
    },
    /// Remove an image with its data
    #[command(after_help = "Example:\n  ringbolt image remove vol")]
    Remove {
        /// Of a cluster: remove it although a server has it attached, whose requests fail from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        image: NamedImage,
    },
}

/// An image and its size.
#[derive(Args)]
pub(crate) struct SizedImage {
    /// Name
    name: String,
    /// Size, as 10g
    #[arg(value_parser = parse_size)]
    size: u64,
    #[command(flatten)]
    of: ImageOwner,
}

/// An image.
#[derive(Args)]
pub(crate) struct NamedImage {
    /// Name
    name: String,
    #[command(flatten)]
    of: ImageOwner,
}

/// A store of a server, or a pool of a cluster.
#[derive(Args)]
pub(crate) struct ImageOwner {
    /// Name of the store [default: store]
    #[arg(long)]
    store: Option<String>,
    #[command(flatten)]
    server: Server,
    /// Directory of a cluster (`ringbolt store up`), instead of a server's store [default: RINGBOLT_CLUSTER,
    /// if it is set and neither --store nor --rpc-socket is given]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["store", "rpc_socket"])]
    cluster: Option<PathBuf>,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Pool of the cluster
    #[arg(long, default_value = POOL)]
    pool: String,
}

/// A running server.
#[derive(Args)]
pub(crate) struct Server {
    /// UNIX socket of the server [default: /var/tmp/ringbolt.sock]
    #[arg(short, long, value_name = "PATH")]
    rpc_socket: Option<PathBuf>,
}

impl Server {
    fn call(&self, method: &str, params: Value) -> Result<Value, CommandError> {
        let socket = self.rpc_socket.clone().unwrap_or_else(|| DEFAULT_SOCKET.into());
        rpc::call(&socket, method, params, TIMEOUT)
    }
}

impl ImageCommand {
    fn owner(&self) -> &ImageOwner {
        match self {
            ImageCommand::Create { image, .. } | ImageCommand::Resize { image, .. } => &image.of,
            ImageCommand::Remove { image, .. }
            | ImageCommand::Info { image, .. }
            | ImageCommand::Protect { image }
            | ImageCommand::Unprotect { image } => &image.of,
            ImageCommand::List { of, .. } => of,
        }
    }
}

impl ImageOwner {
    /// Whether the image is a cluster's, and not a server's.
    fn is_cluster(&self) -> bool {
        self.cluster.is_some() || self.variable().is_some()
    }

    /// The cluster that the environment names, unless a server is named.
    fn variable(&self) -> Option<PathBuf> {
        let is_server = self.store.is_some() || self.server.rpc_socket.is_some();
        let directory = std::env::var_os("RINGBOLT_CLUSTER").filter(|it| !it.is_empty() && !is_server);
        directory.map(PathBuf::from)
    }

    fn cluster_directory(&self) -> PathBuf {
        self.cluster.clone().or_else(|| self.variable()).unwrap_or_default()
    }

    fn store(&self) -> &str {
        self.store.as_deref().unwrap_or("store")
    }
}

/// Runs a subcommand of `ringbolt image`.
pub(crate) fn run(command: ImageCommand) -> Result<(), CommandError> {
    let owner = command.owner();
    if !owner.is_cluster() && owner.etcd.is_given() {
        return Err(CommandError::usage("etcd has the map of a cluster: --cluster names its directory"));
    }
    if !owner.is_cluster() && owner.pool != POOL {
        return Err(CommandError::usage("a pool is a cluster's: --cluster names its directory"));
    }
    match command {
        ImageCommand::Create { preallocate, image: SizedImage { name, size, of } } if of.is_cluster() => {
            cluster::create(&of, &name, size, preallocate)
        }
        ImageCommand::Resize { allow_shrink, force, image: SizedImage { name, size, of } }
            if of.is_cluster() =>
        {
            cluster::resize(&of, &name, size, allow_shrink, force)
        }
        ImageCommand::Remove { force, image: NamedImage { name, of } } if of.is_cluster() => {
            cluster::remove(&of, &name, force)
        }
        ImageCommand::List { json, of } if of.is_cluster() => cluster::list(&of, json),
        ImageCommand::Info { json, image: NamedImage { name, of } } if of.is_cluster() => {
            cluster::info(&of, &name, json)
        }
        ImageCommand::Protect { image: NamedImage { name, of } } if of.is_cluster() => {
            cluster::protect(&of, &name, true)
        }
        ImageCommand::Unprotect { image: NamedImage { name, of } } if of.is_cluster() => {
            cluster::protect(&of, &name, false)
        }
        ImageCommand::Info { .. } | ImageCommand::Protect { .. } | ImageCommand::Unprotect { .. } => {
            Err(CommandError::usage("this is for images of a cluster: --cluster names its directory"))
        }
        ImageCommand::Create { preallocate, image: SizedImage { name, size, of } } => {
            let params =
                json!({ "store": of.store(), "name": name, "size": size, "preallocate": preallocate });
            let bdev = of.server.call("store_image_create", params)?;
            stdout_line!("{}", bdev.as_str().unwrap_or_default());
            Ok(())
        }
        ImageCommand::Resize { image: SizedImage { name, size, of }, .. } => {
            let params = json!({ "store": of.store(), "name": name, "size": size });
            of.server.call("store_image_resize", params).map(drop)
        }
        ImageCommand::Remove { image: NamedImage { name, of }, .. } => {
            let params = json!({ "store": of.store(), "name": name });
            of.server.call("store_image_delete", params).map(drop)
        }
        ImageCommand::List { json, of } => {
            list(&of.server.call("store_get_stores", Value::Null)?, json);
            Ok(())
        }
    }
}

fn list(stores: &Value, as_json: bool) {
    let images = stores.as_array().into_iter().flatten().flat_map(|store| {
        let images = store["images"].as_array().into_iter().flatten();
        images.map(|image| (&store["name"], image))
    });
    if as_json {
        let all = images.map(|(store, image)| {
            let mut image = image.clone();
            image["store"] = store.clone();
            image
        });
        stdout_line!("{:#}", Value::Array(all.collect()));
        return;
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let rows = images.map(|(_, image)| {
        let bytes = image["size"].as_u64().unwrap_or_default();
        [text(&image["bdev_name"]), mib(bytes), text(&image["state"]), text(&image["uuid"])]
    });
    print_table(["bdev", "MiB", "state", "uuid"], rows);
}

fn mib(bytes: u64) -> String {
    bytes.div_ceil(1 << 20).to_string()
}

/// Prints a table whose second column has numbers.
fn print_table<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header);
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    rows.for_each(|row| _ = table.add_row(row));
    stdout_line!("{table}");
}
