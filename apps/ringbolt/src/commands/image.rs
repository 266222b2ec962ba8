//! `ringbolt image`: the images of a running server's stores, and those of a cluster.

pub(super) mod cluster;
mod copy;
mod diff;
mod layers;
mod owner;
mod snapshots;
mod stats;
mod trash;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::store::POOL;
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::{parse_size, parse_time};
use copy::CopyArgs;
use diff::{ExportDiffArgs, ImportDiffArgs};
use owner::{ImageOwner, mib, print_table};
use snapshots::{CloneArgs, SnapshotCommand};
use stats::StatsArgs;

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
        /// Of a cluster: what is in the trash
        #[arg(long)]
        trash: bool,
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
    /// Show the reads and writes of the images of a cluster, as its nodes count them
    #[command(after_help = "Examples:\n  ringbolt image stats --cluster ringbolt-store\n  \
        ringbolt image stats --cluster ringbolt-store vol --interval 10s --json\n\n\
        Each node is asked twice; it needs the cluster's key, and the map for addresses and names only.")]
    Stats(StatsArgs),
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
    /// Give an image of a cluster another name; those that have it open keep it
    #[command(after_help = "Example:\n  ringbolt image rename --cluster ringbolt-store vol data")]
    Rename {
        /// Name
        name: String,
        /// Another name
        to: String,
        #[command(flatten)]
        of: ImageOwner,
    },
    /// Copy an image of a cluster, to another pool or cluster too; what is not written in it takes no space
    /// in the copy either
    #[command(after_help = "Examples:\n  ringbolt image copy --cluster ringbolt-store vol vol-of-monday\n  \
        ringbolt image copy --cluster ringbolt-store vol vol --to-pool scratch\n  \
        ringbolt image copy --cluster ringbolt-store vol vol --to-cluster /srv/other-store\n\n\
        No server may have the image attached meanwhile. A copy that was interrupted has no name of its own: \
        the same command begins anew, and `ringbolt image purge --expired` removes it.")]
    Copy(CopyArgs),
    /// Export a snapshot of an image of a cluster, or what differs between two, as a file or through a pipe
    #[command(after_help = "Examples:\n  \
        ringbolt image export-diff --cluster ringbolt-store vol@monday vol-monday\n  \
        ringbolt image export-diff --cluster ringbolt-store vol@tuesday vol-tuesday --from monday\n  \
        ringbolt image export-diff vol@tuesday - --from monday \\\n      \
        | ssh backup ringbolt image import-diff --cluster /srv/store - vol\n\n\
        A server may have the image attached. What was written between the snapshots is read, and nothing \
        else. A file is FILE.partial until it is whole.")]
    ExportDiff(ExportDiffArgs),
    /// Bring an image of a cluster up to date with what `image export-diff` has exported
    #[command(
        after_help = "Examples:\n  ringbolt image import-diff --cluster ringbolt-store vol-monday backup\n  \
        ringbolt image import-diff --cluster ringbolt-store vol-tuesday backup\n\n\
        The newest snapshot of the image must be the one that the diff begins at, without changes since; \
        afterwards it has the one that the diff leads to. A diff of everything makes the image. No server \
        may have the image attached meanwhile. An import that was interrupted goes on when it is repeated."
    )]
    ImportDiff(ImportDiffArgs),
    /// Snapshots of the images of a cluster
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Make an image of a cluster that has what a snapshot has, and is written apart from it; no data is
    /// copied
    #[command(after_help = "Example:\n  ringbolt image clone --cluster ringbolt-store vol@monday test\n\n\
        The clone is in the pool of the snapshot, which is not removed before `image flatten` of the clone.")]
    Clone(CloneArgs),
    /// Copy to an image of a cluster what it has from its parents, so that it needs them no more
    #[command(after_help = "Example:\n  ringbolt image flatten --cluster ringbolt-store test\n\n\
        No server may have the image attached meanwhile. A command that was interrupted goes on when it is \
        repeated.")]
    Flatten {
        /// Do it although a server has the image attached, whose requests fail from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        image: NamedImage,
    },
    /// Take an image of a cluster out of the trash (`image remove --keep`)
    #[command(after_help = "Examples:\n  ringbolt image list --cluster ringbolt-store --trash\n  \
        ringbolt image restore --cluster ringbolt-store vol\n  \
        ringbolt image restore --cluster ringbolt-store vol --as vol-of-monday")]
    Restore {
        #[command(flatten)]
        image: TrashedName,
        /// Its name from now on [default: the one that it had]
        #[arg(long = "as", value_name = "NAME")]
        to: Option<String>,
    },
    /// Remove images that are in the trash of a cluster, with their data
    #[command(after_help = "Examples:\n  ringbolt image purge --cluster ringbolt-store --expired\n  \
        ringbolt image purge --cluster ringbolt-store vol --force")]
    Purge {
        /// All whose time is over, of all pools
        #[arg(long, conflicts_with_all = ["name", "force", "volume"])]
        expired: bool,
        /// Remove it although its time is not over
        #[arg(long)]
        force: bool,
        /// The name that it had
        #[arg(required_unless_present = "expired")]
        name: Option<String>,
        /// Its volume, if several had this name
        #[arg(long, value_name = "NUMBER")]
        volume: Option<u64>,
        #[command(flatten)]
        of: ImageOwner,
    },
    /// Remove an image with its data
    #[command(after_help = "Examples:\n  ringbolt image remove vol\n  \
        ringbolt image remove --cluster ringbolt-store --keep 7d vol")]
    Remove {
        /// Of a cluster: put it into the trash, where `image restore` finds it; its data stays at least this
        /// long, and until `image purge`
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        keep: Option<u64>,
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

/// An image in the trash.
#[derive(Args)]
pub(crate) struct TrashedName {
    /// The name that it had
    name: String,
    /// Its volume, if several had this name
    #[arg(long, value_name = "NUMBER")]
    volume: Option<u64>,
    #[command(flatten)]
    of: ImageOwner,
}

impl ImageCommand {
    fn owner(&self) -> &ImageOwner {
        match self {
            ImageCommand::Create { image, .. } | ImageCommand::Resize { image, .. } => &image.of,
            ImageCommand::Remove { image, .. }
            | ImageCommand::Info { image, .. }
            | ImageCommand::Flatten { image, .. }
            | ImageCommand::Protect { image }
            | ImageCommand::Unprotect { image } => &image.of,
            ImageCommand::Restore { image, .. } => &image.of,
            ImageCommand::Copy(options) => &options.of,
            ImageCommand::ExportDiff(options) => &options.of,
            ImageCommand::ImportDiff(options) => &options.of,
            ImageCommand::Clone(options) => &options.of,
            ImageCommand::Snapshot(command) => command.owner(),
            ImageCommand::Stats(options) => &options.of,
            ImageCommand::List { of, .. }
            | ImageCommand::Rename { of, .. }
            | ImageCommand::Purge { of, .. } => of,
        }
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
        ImageCommand::Remove { keep: Some(keep_ns), force, image: NamedImage { name, of } }
            if of.is_cluster() =>
        {
            trash::remove(&of, &name, keep_ns, force)
        }
        ImageCommand::Remove { force, image: NamedImage { name, of }, .. } if of.is_cluster() => {
            cluster::remove(&of, &name, force)
        }
        ImageCommand::List { trash: true, json, of } if of.is_cluster() => trash::list(&of, json),
        ImageCommand::List { json, of, .. } if of.is_cluster() => cluster::list(&of, json),
        ImageCommand::Rename { name, to, of } if of.is_cluster() => trash::rename(&of, &name, &to),
        ImageCommand::Copy(options) if options.of.is_cluster() => copy::run(options),
        ImageCommand::ExportDiff(options) if options.of.is_cluster() => diff::export(options),
        ImageCommand::ImportDiff(options) if options.of.is_cluster() => diff::import(options),
        ImageCommand::Clone(options) if options.of.is_cluster() => snapshots::clone(&options),
        ImageCommand::Snapshot(command) if command.owner().is_cluster() => snapshots::run_snapshot(command),
        ImageCommand::Flatten { force, image: NamedImage { name, of } } if of.is_cluster() => {
            snapshots::flatten(&of, &name, force)
        }
        ImageCommand::Stats(options) if options.of.is_cluster() => stats::run(&options),
        ImageCommand::Restore { image: TrashedName { name, volume, of }, to } if of.is_cluster() => {
            trash::restore(&of, &name, volume, to.as_deref())
        }
        ImageCommand::Purge { force, name, volume, of, .. } if of.is_cluster() => {
            trash::purge(&of, name.as_deref(), volume, force)
        }
        ImageCommand::Info { json, image: NamedImage { name, of } } if of.is_cluster() => {
            cluster::info(&of, &name, json)
        }
        ImageCommand::Protect { image: NamedImage { name, of } } if of.is_cluster() => {
            cluster::protect(&of, &name, true)
        }
        ImageCommand::Unprotect { image: NamedImage { name, of } } if of.is_cluster() => {
            cluster::protect(&of, &name, false)
        }
        ImageCommand::Info { .. }
        | ImageCommand::Protect { .. }
        | ImageCommand::Unprotect { .. }
        | ImageCommand::Rename { .. }
        | ImageCommand::Copy(_)
        | ImageCommand::ExportDiff(_)
        | ImageCommand::ImportDiff(_)
        | ImageCommand::Clone(_)
        | ImageCommand::Snapshot(_)
        | ImageCommand::Flatten { .. }
        | ImageCommand::Stats(_)
        | ImageCommand::Restore { .. }
        | ImageCommand::Purge { .. }
        | ImageCommand::List { trash: true, .. }
        | ImageCommand::Remove { keep: Some(_), .. } => {
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
        ImageCommand::List { json, of, .. } => {
            list(&of.server.query("store_get_stores")?, json);
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
