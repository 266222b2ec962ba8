//! `ringbolt image`: the images of a running server's stores.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table};
use serde_json::{Value, json};

use super::rpc;
use crate::cli::{DEFAULT_SOCKET, parse_size};
use crate::command_error::CommandError;
use crate::console::stdout_line;

/// How long a call may take: the removal of a large image removes its objects one by one.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The subcommands of `ringbolt image`.
#[derive(Subcommand)]
pub(crate) enum ImageCommand {
    /// Create a thin image, and print the name of its bdev
    #[command(after_help = "Example:\n  ringbolt image create vol 10g")]
    Create(SizedImage),
    /// List the images of all stores
    #[command(after_help = "Example:\n  ringbolt image list --json")]
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        server: Server,
    },
    /// Resize an image; what is cut off is gone
    #[command(after_help = "Example:\n  ringbolt image resize vol 20g")]
    Resize(SizedImage),
    /// Remove an image with its data
    #[command(after_help = "Example:\n  ringbolt image remove vol")]
    Remove(NamedImage),
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
    of: Store,
}

/// An image.
#[derive(Args)]
pub(crate) struct NamedImage {
    /// Name
    name: String,
    #[command(flatten)]
    of: Store,
}

/// A store of a server.
#[derive(Args)]
pub(crate) struct Store {
    /// Name of the store
    #[arg(long, default_value = "store")]
    store: String,
    #[command(flatten)]
    server: Server,
}

/// A running server.
#[derive(Args)]
pub(crate) struct Server {
    /// UNIX socket of the server
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    rpc_socket: PathBuf,
}

impl Server {
    fn call(&self, method: &str, params: Value) -> Result<Value, CommandError> {
        rpc::call(&self.rpc_socket, method, params, TIMEOUT)
    }
}

/// Runs a subcommand of `ringbolt image`.
pub(crate) fn run(command: ImageCommand) -> Result<(), CommandError> {
    match command {
        ImageCommand::Create(image) => {
            let bdev = change_size("store_image_create", &image)?;
            stdout_line!("{}", bdev.as_str().unwrap_or_default());
        }
        ImageCommand::Resize(image) => _ = change_size("store_image_resize", &image)?,
        ImageCommand::Remove(NamedImage { name, of }) => {
            of.server.call("store_image_delete", json!({ "store": of.store, "name": name }))?;
        }
        ImageCommand::List { json, server } => list(&server.call("store_get_stores", Value::Null)?, json),
    }
    Ok(())
}

fn change_size(method: &str, image: &SizedImage) -> Result<Value, CommandError> {
    let SizedImage { name, size, of } = image;
    of.server.call(method, json!({ "store": of.store, "name": name, "size": size }))
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
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["bdev", "MiB", "state", "uuid"]);
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    for (_, image) in images {
        let mib = image["size"].as_u64().unwrap_or_default().div_ceil(1 << 20);
        let cells = [text(&image["bdev_name"]), mib.to_string(), text(&image["state"]), text(&image["uuid"])];
        table.add_row(cells);
    }
    stdout_line!("{table}");
}
