//! `ringbolt blob`: lists, prints and checks SPDK's blobstores, read-only, and repairs them.

mod data;
mod repair;

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blobstore::{
    Blob, BlobParent, BlobStore, LoadError, LoadOptions, StoreFinding, StoreSeverity, Xattr, load_with,
};
use clap::{Args, Subcommand};
use comfy_table::Table;
use file_lock::LockMode;
use serde_json::{Map, Value, json};

use crate::command_error::CommandError;
use crate::console::stdout_line;

/// The subcommands of `ringbolt blob`.
#[derive(Subcommand)]
pub(crate) enum BlobCommand {
    /// List the blobs, their sizes and relations
    #[command(after_help = "Example:\n  ringbolt blob list disk.img")]
    List(BlobArgs),
    /// Print the metadata: super block, xattrs, pages and clusters of each blob
    #[command(after_help = "Example:\n  ringbolt blob dump --json /dev/nvme0n1")]
    Dump(BlobArgs),
    /// Read all metadata and say what is wrong; exit status 1 if something is
    #[command(
        after_help = "Examples:\n  ringbolt blob check disk.img\n  ringbolt blob check --data disk.img"
    )]
    Check(CheckArgs),
    /// Print what can be repaired, or repair it with --apply; exit status 1 if something is left
    #[command(
        after_help = "Example:\n  ringbolt blob repair disk.img\n  ringbolt blob repair --apply disk.img"
    )]
    Repair(repair::RepairArgs),
}

/// Arguments of `ringbolt blob`.
#[derive(Args)]
pub(crate) struct BlobArgs {
    /// File or block device that has the store from its first byte
    #[arg(value_name = "IMAGE")]
    path: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `ringbolt blob check`.
#[derive(Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    blob: BlobArgs,
    /// Read all data too, and compare it with the checksums that the store was made with
    #[arg(long)]
    data: bool,
}

/// Runs a subcommand of `ringbolt blob`.
pub(crate) fn run(command: BlobCommand) -> Result<(), CommandError> {
    match command {
        BlobCommand::List(options) => list(&options),
        BlobCommand::Dump(options) => dump(&options),
        BlobCommand::Check(options) => check(&options),
        BlobCommand::Repair(options) => repair::run(&options),
    }
}

/// Why a store is not loaded.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error("{0}")]
    Load(#[from] LoadError),
    #[error("{length} bytes at {offset} cannot be read: {source}; the kernel's log says why")]
    Read { offset: u64, length: usize, source: io::Error },
}

/// What to do about a store that cannot be loaded.
fn advice(error: &LoadError) -> &'static str {
    match error {
        LoadError::SuperBlock(_) | LoadError::NoSuperBlock { .. } => {
            "name the device or file that SPDK's store was made on"
        }
        LoadError::DeviceTooSmall { .. } => "a copy needs the whole device",
        _ => "the super block is damaged",
    }
}

fn load(path: &Path, scan: bool) -> Result<BlobStore, CommandError> {
    Image::open(path, false)?.load(LoadOptions { scan, ..LoadOptions::default() })
}

/// The file or device of a store, locked while it is open.
struct Image<'a> {
    path: &'a Path,
    file: File,
    /// The file behind a loop device, which is locked too.
    _backing: Option<File>,
    bytes: u64,
}

impl Image<'_> {
    /// Opens it to read with other readers, or to write alone.
    fn open(path: &Path, write: bool) -> Result<Image<'_>, CommandError> {
        let failed =
            |what: &dyn std::fmt::Display| CommandError::environment(format!("{}: {what}", path.display()));
        // Opening a pipe would wait for its other end.
        let kind = std::fs::metadata(path).map_err(|error| failed(&error))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(failed(&"neither a file nor a block device"));
        }
        let mut options = File::options();
        options.read(true).write(write);
        if write && kind.is_block_device() {
            // The kernel refuses what is mounted, or a part of another device.
            options.custom_flags(rustix::fs::OFlags::EXCL.bits().cast_signed());
        }
        let opened = options.open(path).and_then(|mut file| Ok((file.seek(SeekFrom::End(0))?, file)));
        let (bytes, file) = opened.map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => {
                failed(&"the kernel uses the device; unmount it, and remove it from what is made of it")
            }
            _ => failed(&error),
        })?;
        let (mode, what) = match write {
            false => (LockMode::Shared, "has it open for writing; end that first, or check a copy"),
            true => (LockMode::Exclusive, "has it open; end that first, or repair a copy"),
        };
        let locked = file_lock::lock_device(&file, mode, Duration::ZERO);
        let backing = locked.map_err(|holder| failed(&format!("{holder} {what}")))?;
        Ok(Image { path, file, _backing: backing, bytes })
    }

    fn load(&self, options: LoadOptions) -> Result<BlobStore, CommandError> {
        let failed = |what: &dyn std::fmt::Display| {
            CommandError::operation(format!("{}: {what}", self.path.display()))
        };
        let store = load_with(self.bytes, options, |offset, out| {
            let length = out.len();
            let read = self.file.read_exact_at(out, offset);
            read.map_err(|source| OpenError::Read { offset, length, source })
        });
        store.map_err(|error| match &error {
            OpenError::Load(load) => failed(&format!("{error}; {}", advice(load))),
            OpenError::Read { .. } => failed(&error),
        })
    }
}

/// The name of the whole, if the store has one: that of a volume store is an attribute of the super blob.
fn owner(store: &BlobStore) -> Option<&Blob> {
    store.super_block().super_blob.and_then(|id| store.blob(id))
}

fn text(blob: Option<&Blob>, name: &str) -> Value {
    blob.and_then(|blob| blob.xattr_text(name.as_bytes())).map_or(Value::Null, Value::from)
}

fn heading(store: &BlobStore) -> String {
    let super_block = store.super_block();
    let name = match (text(owner(store), "name"), super_block.store_type_text()) {
        (Value::String(name), kind) => format!("{kind} {name}"),
        (_, kind) if kind.is_empty() => "blobstore".into(),
        (_, kind) => kind,
    };
    let state = if super_block.clean { "unloaded" } else { "not unloaded" };
    format!(
        "{name}: {} of {} clusters of {} KiB are free; version {}, {state}",
        store.free_clusters(),
        store.data_clusters(),
        super_block.cluster_bytes >> 10,
        super_block.version,
    )
}

fn list(options: &BlobArgs) -> Result<(), CommandError> {
    let store = load(&options.path, false)?;
    if options.json {
        stdout_line!("{:#}", store_json(&store, false));
        return Ok(());
    }
    stdout_line!("{}", heading(&store));
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["blob", "name", "bytes", "clusters", "kind", "parent", "clones"]);
    for blob in store.blobs().values() {
        table.add_row(row(&store, blob));
    }
    stdout_line!("{table}");
    store.findings().iter().for_each(|finding| stdout_line!("{finding}"));
    Ok(())
}

/// A blob's name, or its id.
fn name(store: &BlobStore, id: blobstore::BlobId) -> String {
    let name = store.blob(id).and_then(|blob| blob.xattr_text(b"name")).filter(|name| !name.is_empty());
    name.map_or_else(|| id.to_string(), |name| name.into_owned())
}

fn row(store: &BlobStore, blob: &Blob) -> [String; 7] {
    let clones: Vec<String> = store.clones(blob.id()).iter().map(|id| name(store, *id)).collect();
    let is_super = store.super_block().super_blob == Some(blob.id());
    let kinds = [
        (is_super, "super"),
        (blob.is_thin(), "thin"),
        (blob.is_read_only(), "read-only"),
        (!clones.is_empty(), "snapshot"),
    ];
    let kinds: Vec<&str> = kinds.iter().filter(|(is, _)| *is).map(|(_, kind)| *kind).collect();
    let parent = match blob.parent() {
        BlobParent::None => String::new(),
        BlobParent::Snapshot(parent) => name(store, *parent),
        BlobParent::External(name) => format!("external {}", printable(name)),
    };
    let clusters = blob.clusters();
    [
        blob.id().to_string(),
        text(Some(blob), "name").as_str().unwrap_or_default().to_string(),
        store.blob_bytes(blob).to_string(),
        format!("{} of {}", clusters.allocated(), clusters.length()),
        kinds.join(" "),
        parent,
        clones.join(" "),
    ]
}

/// A value as text up to its terminator if it is one, else in hexadecimal.
fn printable(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    match std::str::from_utf8(&value[..end]) {
        Ok(text)
            if end > 0 && value[end..].iter().all(|byte| *byte == 0) && !text.contains(char::is_control) =>
        {
            text.to_string()
        }
        _ => format!("0x{}", value.iter().map(|byte| format!("{byte:02x}")).collect::<String>()),
    }
}

fn xattrs_json(xattrs: &[Xattr]) -> Value {
    let pairs = xattrs.iter().map(|xattr| (printable(&xattr.name), Value::from(printable(&xattr.value))));
    Value::Object(pairs.collect::<Map<_, _>>())
}

fn blob_json(store: &BlobStore, blob: &Blob, details: bool) -> Value {
    let (parent, external) = match blob.parent() {
        BlobParent::None => (Value::Null, Value::Null),
        BlobParent::Snapshot(parent) => (parent.to_string().into(), Value::Null),
        BlobParent::External(name) => (Value::Null, printable(name).into()),
    };
    let clones: Vec<String> = store.clones(blob.id()).iter().map(ToString::to_string).collect();
    let mut members = json!({
        "id": blob.id().to_string(),
        "name": text(Some(blob), "name"),
        "uuid": text(Some(blob), "uuid"),
        "bytes": store.blob_bytes(blob),
        "clusters": blob.clusters().length(),
        "allocated_clusters": blob.clusters().allocated(),
        "thin": blob.is_thin(),
        "read_only": blob.is_read_only(),
        "snapshot": parent,
        "external_snapshot": external,
        "clones": clones,
    });
    if details {
        let flags = blob.flags();
        members["flags"] = json!({
            "invalid": flags.invalid,
            "data_read_only": flags.data_read_only,
            "metadata_read_only": flags.metadata_read_only,
        });
        members["xattrs"] = xattrs_json(blob.xattrs());
        members["internal_xattrs"] = xattrs_json(blob.internal_xattrs());
        members["pages"] = blob.pages().into();
        let extents = blob.extent_pages().iter().map(|(index, page)| json!({"index": index, "page": page}));
        members["extent_pages"] = extents.collect();
        let runs = runs(blob).into_iter();
        members["runs"] = runs
            .map(|(index, cluster, length)| json!({"index": index, "cluster": cluster, "length": length}))
            .collect();
    }
    members
}

/// Allocated clusters as runs: the index in the blob, the cluster of the store, and how many.
fn runs(blob: &Blob) -> Vec<(u32, u32, u32)> {
    let mut runs: Vec<(u32, u32, u32)> = Vec::new();
    for (index, cluster) in blob.clusters().iter() {
        match runs.last_mut() {
            Some((first, start, length)) if *first + *length == index && *start + *length == cluster => {
                *length += 1
            }
            _ => runs.push((index, cluster, 1)),
        }
    }
    runs
}

fn findings_json(store: &BlobStore) -> Value {
    store.findings().iter().map(finding_json).collect()
}

fn finding_json(finding: &StoreFinding) -> Value {
    let severity = match finding.severity() {
        StoreSeverity::Note => "note",
        StoreSeverity::Leak => "leak",
        StoreSeverity::Damage => "damage",
    };
    json!({"severity": severity, "text": finding.to_string()})
}

fn store_json(store: &BlobStore, details: bool) -> Value {
    let super_block = store.super_block();
    let unusable = store.unusable().iter();
    json!({
        "type": super_block.store_type_text(),
        "name": text(owner(store), "name"),
        "uuid": text(owner(store), "uuid"),
        "version": super_block.version,
        "clean": super_block.clean,
        "super_blob": super_block.super_blob.map(|id| id.to_string()),
        "store_bytes": store.layout().store_bytes,
        "cluster_bytes": super_block.cluster_bytes,
        "io_unit_bytes": super_block.io_unit_bytes,
        "metadata_page_bytes": super_block.metadata_page_bytes,
        "metadata_pages": store.layout().pages,
        "used_metadata_pages": store.used_pages().count_ones(),
        "data_clusters": store.data_clusters(),
        "free_clusters": store.free_clusters(),
        "blobs": store.blobs().values().map(|blob| blob_json(store, blob, details)).collect::<Vec<_>>(),
        "unusable": unusable
            .map(|(id, blob)| json!({"id": id.to_string(), "reason": blob.damage().to_string()}))
            .collect::<Vec<_>>(),
        "findings": findings_json(store),
    })
}

fn dump(options: &BlobArgs) -> Result<(), CommandError> {
    let store = load(&options.path, false)?;
    if options.json {
        stdout_line!("{:#}", store_json(&store, true));
        return Ok(());
    }
    stdout_line!("{}", heading(&store));
    let super_block = store.super_block();
    for (part, range) in [
        ("mask of pages", Some(super_block.used_pages)),
        ("mask of clusters", Some(super_block.used_clusters)),
        ("mask of blob ids", super_block.used_blob_ids),
        ("metadata", Some(super_block.metadata)),
    ] {
        let Some(range) = range else { continue };
        stdout_line!(
            "{part}: {} pages of {} bytes at page {}",
            range.pages,
            super_block.metadata_page_bytes,
            range.start
        );
    }
    for blob in store.blobs().values() {
        dump_blob(&store, blob);
    }
    store.findings().iter().for_each(|finding| stdout_line!("{finding}"));
    Ok(())
}

fn dump_blob(store: &BlobStore, blob: &Blob) {
    let flags = blob.flags();
    stdout_line!("\nblob {}: {} bytes", blob.id(), store.blob_bytes(blob));
    stdout_line!(
        "  flags: invalid {:#x}, data read-only {:#x}, metadata read-only {:#x}",
        flags.invalid,
        flags.data_read_only,
        flags.metadata_read_only
    );
    stdout_line!("  metadata pages: {}", join(blob.pages().iter()));
    if blob.has_extent_table() {
        stdout_line!(
            "  extent pages: {}",
            join(blob.extent_pages().iter().map(|(index, page)| format!("{index}: {page}")))
        );
    }
    for (kind, xattrs) in [("xattr", blob.xattrs()), ("internal xattr", blob.internal_xattrs())] {
        xattrs.iter().for_each(|xattr| {
            stdout_line!("  {kind} {}: {}", printable(&xattr.name), printable(&xattr.value))
        });
    }
    for (index, cluster, length) in runs(blob) {
        stdout_line!("  clusters {index} to {}: {cluster} to {}", index + length - 1, cluster + length - 1);
    }
}

fn join(items: impl Iterator<Item = impl ToString>) -> String {
    items.map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

fn check(options: &CheckArgs) -> Result<(), CommandError> {
    let CheckArgs { blob: options, data } = options;
    let image = Image::open(&options.path, false)?;
    let store = image.load(LoadOptions { scan: true, ..LoadOptions::default() })?;
    let failed = |why: String| CommandError::operation(format!("{}: {why}", options.path.display()));
    let image = data::DataImage {
        bytes: image.bytes,
        read_at: &|offset, out| image.file.read_exact_at(out, offset),
        name: &|id| name(&store, id),
    };
    let data = if *data { Some(data::check(&image, &store).map_err(failed)?) } else { None };
    let problems = store.findings().iter().filter(|finding| finding.severity() > StoreSeverity::Note).count();
    let damaged = data.as_ref().map_or(0, |data| data.damaged);
    if options.json {
        let mut members = store_json(&store, false);
        if let Some(members) = members.as_object_mut() {
            members.remove("blobs");
            members.insert("problems".into(), problems.into());
            let counts = |data: data::DataCheck| {
                json!({
                    "verified_blocks": data.verified,
                    "blocks_without_checksum": data.unknown,
                    "damaged_blocks": data.damaged,
                    "damaged": data.named,
                })
            };
            members.extend(data.map(|data| ("data".to_string(), counts(data))));
        }
        stdout_line!("{members:#}");
    } else {
        stdout_line!("{}", heading(&store));
        store.findings().iter().for_each(|finding| stdout_line!("{finding}"));
        let (blobs, pages) = (store.blobs().len(), store.used_pages().count_ones());
        stdout_line!("{blobs} blobs in {pages} metadata pages, {problems} problems");
        if let Some(data) = data {
            data.named.iter().for_each(|place| stdout_line!("other data than was written: {place}"));
            let data::DataCheck { verified, unknown, .. } = data;
            stdout_line!(
                "{verified} blocks of 4 KiB are as they were written, {damaged} are not, {unknown} have no checksum"
            );
        }
    }
    match (problems, damaged) {
        (0, 0) => Ok(()),
        (0, blocks) => {
            Err(CommandError::operation(format!("{}: {blocks} damaged blocks", options.path.display())))
        }
        (count, _) => Err(CommandError::operation(format!("{}: {count} problems", options.path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn values_are_printed_as_text_only_if_nothing_is_lost() {
        assert_eq!(printable(b"thin\0\0\0"), "thin");
        assert_eq!(printable("ä".as_bytes()), "ä");
        assert_eq!(printable(b"a\0b"), "0x610062");
        assert_eq!(printable(&[9, 0, 0, 0, 1, 0, 0, 0]), "0x0900000001000000");
        assert_eq!(printable(b""), "0x");
        assert_eq!(printable(b"\xff"), "0xff");
    }
}
