//! `ringbolt objects`: formats, checks and lists the object store on a file or block device.

use std::fs::File;
use std::io::{IsTerminal, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bdev::pmem::{self, PmemConfig};
use bdev::uring::{self, UringConfig};
use bdev::{Durability, Registry, Uuid};
use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table};
use control::JobHandle;
use reactor::{Reactor, ReactorConfig};
use serde_json::{Value, json};
use store_node::{
    FormatOptions, PartitionContents, StoreBdevs, StoreContents, StoreCores, StoreError, format_device,
    inspect, looks_encrypted,
};
use wire_store::{
    BLOCK_BYTES, BLOCKS_PER_EXTENT, EntryHeader, ImageRecord, Onode, OnodeContent, Operation, Superblock,
};

use crate::command_error::CommandError;
use crate::commands::store::DeviceKeys;
use crate::console::stdout_line;
use crate::options::parse_size;

/// The subcommands of `ringbolt objects`.
#[derive(Subcommand)]
pub(crate) enum ObjectsCommand {
    /// Write an empty store
    #[command(after_help = "Examples:\n  ringbolt objects format --size=10g store.img\n  \
        ringbolt objects format --partitions=4 --log-size=64m /dev/nvme0n1\n  \
        ringbolt objects format --log=/dev/pmem0 /dev/nvme0n1")]
    Format(FormatArgs),
    /// Read everything and compare it with its checksums; exit status 1 if something is damaged
    #[command(after_help = "Examples:\n  ringbolt objects check store.img\n  \
        ringbolt objects check --key-file ringbolt-store/node1/data.key /dev/nvme0n1")]
    Check(InspectArgs),
    /// List images, objects and the entries of the logs
    #[command(after_help = "Example:\n  ringbolt objects dump store.img")]
    Dump(InspectArgs),
}

/// Arguments of `ringbolt objects format`.
#[derive(Args)]
pub(crate) struct FormatArgs {
    /// File or block device
    path: PathBuf,
    /// Create the file with this size, as 10g
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// Partitions, each owned by one core of a server [default: one for each 16 GiB, 1 to 16]
    #[arg(long)]
    partitions: Option<u32>,
    /// Size of each partition's log [default: a 32nd of the partition, 1 MiB to 64 MiB; with --log, an equal
    /// share of it, at most 64 MiB]
    #[arg(long, value_parser = parse_size)]
    log_size: Option<u64>,
    /// File or block device for the logs; without, they are on the first one
    #[arg(long, value_name = "PATH")]
    log: Option<PathBuf>,
    /// Create the file for the logs with this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "log")]
    log_file_size: Option<u64>,
    /// Destroy a store that is there; use a block device that looks used
    #[arg(long)]
    force: bool,
}

/// Arguments of the subcommands that read.
#[derive(Args)]
pub(crate) struct InspectArgs {
    /// File or block device
    path: PathBuf,
    /// File or block device with the logs, if these are on one of their own
    #[arg(long, value_name = "PATH")]
    log: Option<PathBuf>,
    /// File with the key of an encrypted node, whose device this is
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Names of the devices in this process.
const DEVICE: &str = "device";
const LOG_DEVICE: &str = "log";

/// Runs a subcommand of `ringbolt objects`.
pub(crate) fn run(command: ObjectsCommand) -> Result<(), CommandError> {
    match command {
        ObjectsCommand::Format(options) => format(options),
        ObjectsCommand::Check(options) => check(&options),
        ObjectsCommand::Dump(options) => dump(&options),
    }
}

/// A file, and the size with which it is created if it is not there.
type StoreFile<'a> = (&'a Path, Option<u64>);

/// Opens the devices of a store, that of the logs if it is another one; `change` completes the configuration
/// of each.
fn open(
    data: StoreFile<'_>,
    log: Option<StoreFile<'_>>,
    change: impl Fn(&mut UringConfig),
) -> Result<(Registry, StoreBdevs<'static>), CommandError> {
    let registry = Registry::new();
    let config = |name: &str, (path, create_bytes): StoreFile<'_>| {
        let mut config = UringConfig { create_bytes, ..UringConfig::new(name, path) };
        change(&mut config);
        config
    };
    let data = config(DEVICE, data);
    create_file(&data)?;
    uring::create(&registry, data).map_err(CommandError::environment)?;
    if let Some(log) = log {
        create_log(&registry, config(LOG_DEVICE, log))?;
    }
    Ok((registry, StoreBdevs { data: DEVICE, log: log.map(|_| LOG_DEVICE) }))
}

/// Creates the file of a device if there is none, and it is to be made. It gets data of users: its owner
/// alone may use it.
pub(super) fn create_file(wanted: &UringConfig) -> Result<(), CommandError> {
    if let (false, Some(bytes)) = (wanted.filename.exists(), wanted.create_bytes) {
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&wanted.filename);
        file.and_then(|file| file.set_len(bytes)).map_err(CommandError::environment)?;
    }
    Ok(())
}

/// Creates the device of a store's logs: on persistent memory if the file is there, else as the configuration
/// says.
pub(super) fn create_log(registry: &Registry, wanted: UringConfig) -> Result<(), CommandError> {
    // Only a file says whether it is on persistent memory.
    create_file(&wanted)?;
    let path = &wanted.filename;
    let created = match pmem::is_persistent(path) {
        true => {
            let config = PmemConfig { readonly: wanted.readonly, ..PmemConfig::new(&wanted.name, path) };
            pmem::create(registry, config)
        }
        false => uring::create(registry, wanted),
    };
    created.map(drop).map_err(CommandError::environment)
}

fn start_reactor() -> Result<Reactor, CommandError> {
    Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)
}

fn format(options: FormatArgs) -> Result<(), CommandError> {
    let log = options.log.as_deref().map(|log| (log, options.log_file_size));
    let (registry, bdevs) = open((&options.path, options.size), log, |config| config.force = options.force)?;
    let FormatArgs { path, partitions, log_size: log_bytes, force, .. } = options;
    let durability = bdevs.durability(&registry).map_err(CommandError::environment)?;
    let reactor = start_reactor()?;
    let core = reactor.core();
    let formatted = reactor.block_on(async move {
        let options = FormatOptions { partitions, log_bytes, force, replicas: None };
        format_device(&registry, bdevs, &StoreCores::This(&core), options, &JobHandle::standalone()).await
    });
    let superblock = formatted.map_err(|error| failed(&path, &error))?;
    stdout_line!("{}: {}", path.display(), division(&superblock));
    stdout_line!("durability: {}", durability_text(durability));
    Ok(())
}

fn failed(path: &Path, error: &dyn std::fmt::Display) -> CommandError {
    CommandError::operation(format!("{}: {error}", path.display()))
}

/// What a store on these devices promises, in words.
fn durability_text(durability: Durability) -> String {
    let name = durability.name();
    if durability.is_volatile() {
        format!("{name}: the store is on tmpfs or a RAM disk, and a power failure loses it")
    } else {
        format!("{name}: what is acknowledged survives a power failure")
    }
}

/// The division of a device, in words.
fn division(superblock: &Superblock) -> String {
    let extents = superblock.layout().map_or(0, |layout| layout.extents);
    let log_blocks = superblock.log_area_blocks();
    let on_device = superblock.log_device.map(|device| format!(" on device {}", Uuid::from_bytes(device)));
    format!(
        "device {}, {} partitions of {} MiB for data, each with a log of {} MiB{}",
        Uuid::from_bytes(superblock.device),
        superblock.partitions,
        (u64::from(extents) * (BLOCKS_PER_EXTENT * BLOCK_BYTES) as u64) >> 20,
        (log_blocks * BLOCK_BYTES as u64) >> 20,
        on_device.unwrap_or_default(),
    )
}

fn read(options: &InspectArgs, data: bool) -> Result<StoreContents, CommandError> {
    let log = options.log.as_deref().map(|log| (log, None));
    let keys = options.key_file.as_deref().map(DeviceKeys::read).transpose()?;
    let (registry, mut bdevs) = open((&options.path, None), log, |config| config.readonly = true)?;
    if let Some(keys) = &keys {
        bdevs = keys.encrypt(&registry, bdevs).map_err(CommandError::environment)?;
    }
    let reactor = start_reactor()?;
    let core = reactor.core();
    let shows = data && std::io::stderr().is_terminal();
    let contents = reactor.block_on(async move {
        let mut shown = std::time::Instant::now();
        let progress = |blocks: u64| {
            if shows && shown.elapsed().as_secs() > 0 {
                shown = std::time::Instant::now();
                let mib = (blocks * BLOCK_BYTES as u64) >> 20;
                let _ = write!(std::io::stderr(), "\r{mib} MiB compared");
            }
        };
        let contents = inspect(&core, &registry, bdevs, data, progress).await;
        if shows {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        contents
    });
    contents.map_err(|error| match error {
        StoreError::NoStore(_) if keys.is_none() && begins_encrypted(&options.path) => failed(
            &options.path,
            &"it is not read without a key: it looks encrypted, and --key-file names the key of an \
              encrypted node",
        ),
        error => failed(&options.path, &error),
    })
}

/// Whether a device begins with what may be the first block of an encrypted store.
fn begins_encrypted(path: &Path) -> bool {
    let mut block = [0; BLOCK_BYTES];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut block));
    read.is_ok() && looks_encrypted(&block)
}

fn check(options: &InspectArgs) -> Result<(), CommandError> {
    let contents = read(options, true)?;
    let blocks: u64 = contents.partitions.iter().map(|partition| partition.blocks_checked).sum();
    if options.json {
        let partitions = contents.partitions.iter().map(partition_json);
        stdout_line!(
            "{:#}",
            json!({
                "uuid": Uuid::from_bytes(contents.superblock.device).to_string(),
                "log_uuid": contents.superblock.log_device.map(|device| Uuid::from_bytes(device).to_string()),
                "partitions": partitions.collect::<Vec<_>>(),
                "blocks_checked": blocks,
                "problems": contents.problems,
            })
        );
    } else {
        stdout_line!("{}", division(&contents.superblock));
        stdout_line!("{}", partition_table(&contents.partitions));
        contents.problems.iter().for_each(|problem| stdout_line!("{problem}"));
        stdout_line!("{blocks} blocks of 4 KiB compared, {} problems", contents.problems.len());
    }
    match contents.problems.len() {
        0 => Ok(()),
        count => Err(failed(&options.path, &format!("{count} problems"))),
    }
}

fn partition_json(partition: &PartitionContents) -> Value {
    json!({
        "index": partition.index,
        "spare": partition.is_spare,
        "objects": partition.space.objects,
        "extents": partition.space.extents,
        "free_extents": partition.space.free_extents,
        "log_entries": partition.entries.len(),
        "log_used_bytes": partition.log_used_bytes,
        "blocks_checked": partition.blocks_checked,
        "damaged": partition.damaged.iter().map(|(block, ..)| *block).collect::<Vec<_>>(),
    })
}

fn partition_table(partitions: &[PartitionContents]) -> Table {
    let mut table = table(&["partition", "objects", "extents", "free", "log entries", "compared", "damaged"]);
    for partition in partitions {
        let spare = if partition.is_spare { " (spare)" } else { "" };
        table.add_row([
            format!("{}{spare}", partition.index),
            partition.space.objects.to_string(),
            partition.space.extents.to_string(),
            partition.space.free_extents.to_string(),
            partition.entries.len().to_string(),
            partition.blocks_checked.to_string(),
            partition.damaged.len().to_string(),
        ]);
    }
    table
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.iter().map(|name| name.to_string()));
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn dump(options: &InspectArgs) -> Result<(), CommandError> {
    let contents = read(options, false)?;
    if options.json {
        let object = |onode: &Onode| members(&OBJECT_COLUMNS, object_row(onode));
        let entry = |entry: &EntryHeader| members(&ENTRY_COLUMNS, entry_row(entry));
        let partition = |partition: &PartitionContents| {
            json!({
                "index": partition.index,
                "objects": partition.objects.iter().map(object).collect::<Vec<_>>(),
                "log": partition.entries.iter().map(entry).collect::<Vec<_>>(),
            })
        };
        let image = |image: &ImageRecord| {
            json!({
                "name": image.name,
                "uuid": Uuid::from_bytes(image.uuid).to_string(),
                "volume": image.volume,
                "size": image.bytes,
                "removing": image.removing,
            })
        };
        stdout_line!(
            "{:#}",
            json!({
                "uuid": Uuid::from_bytes(contents.superblock.device).to_string(),
                "log_uuid": contents.superblock.log_device.map(|device| Uuid::from_bytes(device).to_string()),
                "images": contents.images.iter().map(image).collect::<Vec<_>>(),
                "partitions": contents.partitions.iter().map(partition).collect::<Vec<_>>(),
                "problems": contents.problems,
            })
        );
        return Ok(());
    }
    stdout_line!("{}", division(&contents.superblock));
    if !contents.images.is_empty() {
        let mut images = table(&["volume", "size", "name"]);
        for image in &contents.images {
            let name = if image.removing { format!("{} (removing)", image.name) } else { image.name.clone() };
            images.add_row([image.volume.to_string(), image.bytes.to_string(), name]);
        }
        stdout_line!("\nImages\n{images}");
    }
    for partition in &contents.partitions {
        let mut objects = table(&OBJECT_COLUMNS);
        for onode in &partition.objects {
            objects.add_row(cells(object_row(onode)));
        }
        stdout_line!("\nPartition {}: {} objects\n{objects}", partition.index, partition.objects.len());
        let mut entries = table(&ENTRY_COLUMNS);
        for entry in &partition.entries {
            entries.add_row(cells(entry_row(entry)));
        }
        stdout_line!("Log {}: {} entries\n{entries}", partition.index, partition.entries.len());
    }
    contents.problems.iter().for_each(|problem| stdout_line!("{problem}"));
    Ok(())
}

const OBJECT_COLUMNS: [&str; 7] =
    ["volume", "index", "version", "sequence", "inline_bytes", "extents", "blocks"];
const ENTRY_COLUMNS: [&str; 6] = ["sequence", "operation", "volume", "index", "offset", "length"];

/// An object as the columns of a table or the members of a JSON object.
fn object_row(onode: &Onode) -> Vec<Value> {
    let (inline, extents, blocks) = match &onode.content {
        OnodeContent::Inline(bytes) => (bytes.len(), 0, 0),
        OnodeContent::Mapped(map) => {
            let extents = map.extents.iter().filter(|extent| **extent != 0).count();
            (0, extents, (0..wire_store::BLOCKS_PER_OBJECT).filter(|block| map.is_written(*block)).count())
        }
    };
    let id = onode.id;
    let numbers = [onode.version, onode.sequence, inline as u64, extents as u64, blocks as u64];
    [id.volume, id.index.into()].into_iter().chain(numbers).map(Value::from).collect()
}

fn entry_row(entry: &EntryHeader) -> Vec<Value> {
    let operation = match entry.operation {
        Operation::Write => "write",
        Operation::WriteZeroes => "write_zeroes",
        Operation::Preallocate => "preallocate",
        Operation::Remove => "remove",
    };
    vec![
        entry.sequence.into(),
        operation.into(),
        entry.object.volume.into(),
        entry.object.index.into(),
        entry.offset.into(),
        entry.length.into(),
    ]
}

/// A row as the members of a JSON object.
fn members(columns: &[&str], row: Vec<Value>) -> Value {
    Value::Object(columns.iter().map(|name| name.to_string()).zip(row).collect())
}

/// A row as the cells of a table.
fn cells(row: Vec<Value>) -> impl Iterator<Item = String> {
    row.into_iter().map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_string))
}
