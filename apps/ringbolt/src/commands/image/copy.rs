//! `ringbolt image copy`: copies an image of a cluster, within it or to another cluster.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use reactor::{Reactor, ReactorConfig};
use serde_json::json;
use store_client::{Cluster, CopiedImage, EtcdOptions, ImageName, copy_image};

use super::cluster::open;
use super::owner::ImageOwner;
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

/// What takes longer than this says how far it is, and again after each such time.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// Arguments of `ringbolt image copy`.
#[derive(Args)]
pub(crate) struct CopyArgs {
    /// Name
    name: String,
    /// Name of the copy; no image may have it
    to: String,
    /// Pool of the copy [default: that of the image]
    #[arg(long, value_name = "POOL")]
    to_pool: Option<String>,
    /// Directory of the cluster of the copy, with its key [default: the cluster of the image]
    #[arg(long, value_name = "DIR")]
    to_cluster: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) of: ImageOwner,
}

/// Copies an image, and prints how clients name the copy.
pub(super) fn run(options: CopyArgs) -> Result<(), CommandError> {
    let CopyArgs { name, to, to_pool, to_cluster, json: as_json, of } = options;
    let from = open(&of)?;
    let to_cluster = match to_cluster {
        Some(directory) => {
            Cluster::open(&directory, &EtcdOptions::default()).map_err(CommandError::operation)?
        }
        None => from.clone(),
    };
    let (pool, to_pool) = (of.pool.clone(), to_pool.unwrap_or_else(|| of.pool.clone()));
    let copy = format!("store:{to_pool}/{to}");
    let reactor = Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)?;
    let core = reactor.core();
    let copied = reactor.block_on(async move {
        let source = ImageName { cluster: &from, pool: &pool, name: &name };
        let target = ImageName { cluster: &to_cluster, pool: &to_pool, name: &to };
        let mut said = Instant::now();
        let progress = |copied: u64, objects: u64| {
            if said.elapsed() >= PROGRESS_EVERY {
                said = Instant::now();
                stderr_line!("{pool}/{name}: {copied} of {objects} objects are copied");
            }
        };
        copy_image(&core, source, target, progress).await
    });
    let CopiedImage { bytes, objects, written_bytes } = copied.map_err(CommandError::operation)?;
    if as_json {
        let described = json!({
            "image": copy,
            "size": bytes,
            "objects": objects,
            "written_bytes": written_bytes,
        });
        stdout_line!("{described:#}");
    } else {
        stdout_line!("{copy}");
    }
    Ok(())
}
