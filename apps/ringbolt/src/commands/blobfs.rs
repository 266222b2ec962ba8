//! `ringbolt blobfs`: files on a blobstore, on a file or block device that no other program uses.

mod bdev_device;
mod copy;
mod image;
mod mount;
mod remove;

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use blobfs::{
    BlobFs, BlobFsError, BlobFsOpenError, BlobFsOptions, BlockingBlobFs, DeviceContent, DirectoryItem,
    MetadataPages, OpenHow, content_of, format_options,
};
use blobstore::{BlobStoreFormat, LoadError, LoadOptions, StoreSeverity};
use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table};
use file_lock::LockMode;
use serde_json::{Value, json};

use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::parse_size;
use bdev_device::BdevDevice;
use image::{COPY_BYTES, Files, ImageDevice, StoreDevice, at, bytes};

/// Metadata pages of a file with up to 512 clusters: one has its name, one where its clusters are.
const PAGES_OF_A_FILE: u32 = 2;

/// The subcommands of `ringbolt blobfs`.
#[derive(Subcommand)]
pub(crate) enum BlobFsCommand {
    /// Make an empty store of files; what is on the device is lost
    #[command(after_help = "Examples:\n  ringbolt blobfs format --size=10g files.img\n  \
        ringbolt blobfs format --cluster=4m /dev/nvme0n1\n  \
        ringbolt blobfs format --max-files=100000 /dev/nvme0n1\n  ringbolt blobfs format --force old.img")]
    Format(FormatArgs),
    /// List a directory
    #[command(after_help = "Examples:\n  ringbolt blobfs ls files.img\n  \
        ringbolt blobfs ls --json /dev/nvme0n1 /db")]
    Ls {
        #[command(flatten)]
        image: ImageArgs,
        /// Directory in the store
        #[arg(default_value = "/")]
        path: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Write a file to standard output
    #[command(after_help = "Example:\n  ringbolt blobfs cat files.img /db/CURRENT")]
    Cat {
        #[command(flatten)]
        image: ImageArgs,
        /// File in the store
        path: PathBuf,
    },
    /// Copy a file into the store, out of it, or within it: paths in the store begin with a colon
    #[command(after_help = "Examples:\n  ringbolt blobfs cp files.img notes.txt :/notes.txt\n  \
        ringbolt blobfs cp files.img :/db/LOG /tmp/LOG\n  ringbolt blobfs cp files.img :/a :/b\n\n\
        A file of the new name is replaced at once.")]
    Cp {
        #[command(flatten)]
        image: ImageArgs,
        /// What to copy
        from: PathBuf,
        /// Where to
        to: PathBuf,
    },
    /// Make a directory
    #[command(after_help = "Example:\n  ringbolt blobfs mkdir files.img /db")]
    Mkdir {
        #[command(flatten)]
        image: ImageArgs,
        /// Directory in the store
        path: PathBuf,
    },
    /// Remove a file, or a directory
    #[command(after_help = "Examples:\n  ringbolt blobfs rm files.img /notes.txt\n  \
        ringbolt blobfs rm --recursive files.img /db")]
    Rm {
        #[command(flatten)]
        image: ImageArgs,
        /// File or directory in the store
        path: PathBuf,
        /// Remove a directory with all in it
        #[arg(short, long)]
        recursive: bool,
    },
    /// Mount the files on a directory, read-only, until they are unmounted
    #[command(after_help = "Examples:\n  ringbolt blobfs mount files.img /mnt &\n  ls -lR /mnt\n  \
        sst_dump --file=/mnt/db --command=check\n  umount /mnt\n  \
        ringbolt blobfs mount --config=db.json Nvme0n1 /mnt\n\n\
        It needs FUSE in the kernel (/dev/fuse) and, without root, fusermount3. Nothing may write to \
        the store meanwhile.")]
    Mount {
        #[command(flatten)]
        image: ImageArgs,
        /// Directory to mount on
        #[arg(value_name = "DIRECTORY")]
        directory: PathBuf,
    },
    /// Read all metadata and say what is wrong; exit status 1 if something is
    #[command(after_help = "Example:\n  ringbolt blobfs check files.img")]
    Check {
        #[command(flatten)]
        image: ImageArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// The store.
#[derive(Args)]
pub(crate) struct ImageArgs {
    /// File or block device that has the store from its first byte; with --config the name of a bdev
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Configuration file, as `ringbolt serve --config` takes it, whose bdev IMAGE has the store
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Arguments of `ringbolt blobfs format`.
#[derive(Args)]
pub(crate) struct FormatArgs {
    /// File or block device
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Size of a file, which is made if there is none
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Bytes of a cluster, the unit of allocation
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1m")]
    cluster: u64,
    /// Files that there is metadata for [default: 1.25 for each MiB]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_files: Option<u32>,
    /// Also if something is on the device
    #[arg(long)]
    force: bool,
}

/// Runs a subcommand of `ringbolt blobfs`.
pub(crate) fn run(command: BlobFsCommand) -> Result<(), CommandError> {
    match command {
        BlobFsCommand::Format(options) => format(&options),
        BlobFsCommand::Ls { image, path, json } => image.ls(&path, json),
        BlobFsCommand::Cat { image, path } => image.cat(&path),
        BlobFsCommand::Cp { image, from, to } => image.cp(&from, &to),
        BlobFsCommand::Mkdir { image, path } => {
            image.change(|files| files.make_directory(bytes(&path)).map_err(|error| at(&path, &error)))
        }
        BlobFsCommand::Rm { image, path, recursive } => {
            image.change(|files| remove::remove(files, &path, recursive))
        }
        BlobFsCommand::Mount { image, directory } => {
            mount::mount(image.read(LoadOptions::default())?, &image.image, &directory)
        }
        BlobFsCommand::Check { image, json } => image.check(json),
    }
}

/// What to do about a store that cannot be opened.
fn advice(error: &BlobFsOpenError) -> &'static str {
    match error {
        BlobFsOpenError::Load(LoadError::SuperBlock(_) | LoadError::NoSuperBlock { .. }) => {
            "; `ringbolt blobfs format` makes a store, `ringbolt blob check` looks at one"
        }
        BlobFsOpenError::Load(LoadError::DeviceTooSmall { .. }) => {
            "; a part of the device is missing, or it is another"
        }
        BlobFsOpenError::Load(_) => "; `ringbolt blob check` says what is wrong",
        BlobFsOpenError::NoFiles(_) => "; `ringbolt blob list` shows what it has",
        BlobFsOpenError::Device { .. } => "; the kernel's log says why",
        BlobFsOpenError::Format(_) | BlobFsOpenError::Request(_) => "",
    }
}

/// A file that a failed format removes, or gives its old size.
enum FormatUndo<'a> {
    Nothing,
    Remove(&'a Path),
    Shrink(File, u64),
}

impl FormatUndo<'_> {
    fn run(self) {
        // What failed first is reported.
        _ = match self {
            FormatUndo::Nothing => Ok(()),
            FormatUndo::Remove(path) => std::fs::remove_file(path),
            FormatUndo::Shrink(file, bytes) => file.set_len(bytes),
        };
    }
}

fn format(options: &FormatArgs) -> Result<(), CommandError> {
    let path = &options.image;
    let cluster_bytes =
        u32::try_from(options.cluster).map_err(|_| CommandError::usage("a cluster has less than 4 GiB"))?;
    let mut undo = FormatUndo::Nothing;
    let (free, pages) = match format_device(options, cluster_bytes, &mut undo) {
        Ok(made) => made,
        Err(error) => {
            undo.run();
            return Err(error);
        }
    };
    stdout_line!(
        "{}: {} MiB for files in clusters of {} KiB, and metadata for {} files",
        path.display(),
        free >> 20,
        cluster_bytes >> 10,
        pages / PAGES_OF_A_FILE
    );
    Ok(())
}

/// How a store is made on a device of this size.
fn store_format(cluster_bytes: u32, max_files: Option<u32>, device_bytes: u64) -> BlobStoreFormat {
    let defaults = format_options();
    let pages_percent = match max_files {
        Some(files) => {
            let clusters = (device_bytes / u64::from(cluster_bytes).max(1)).max(1);
            (u64::from(files) * u64::from(PAGES_OF_A_FILE) * 100).div_ceil(clusters)
        }
        // As many for each MiB, if clusters are larger.
        None => {
            let larger = u64::from(cluster_bytes).max(defaults.cluster_bytes.into());
            u64::from(defaults.metadata_pages_percent) * larger / u64::from(defaults.cluster_bytes)
        }
    };
    // A number that is too large is refused.
    let metadata_pages_percent = u32::try_from(pages_percent).unwrap_or(u32::MAX);
    BlobStoreFormat { cluster_bytes, metadata_pages_percent, ..defaults }
}

/// Formats a device, and returns the bytes for files and the metadata pages.
fn format_device<'a>(
    options: &'a FormatArgs,
    cluster_bytes: u32,
    undo: &mut FormatUndo<'a>,
) -> Result<(u64, u32), CommandError> {
    let path = &options.image;
    let failed = |error: &dyn std::fmt::Display| at(path, error);
    let store = |bytes: u64| store_format(cluster_bytes, options.max_files, bytes);
    let check_space = |bytes: u64| {
        let device = ImageDevice::properties_of(bytes);
        let planned = BlobFs::format(&store(bytes), device, BlobFsOptions::default());
        match planned.map_err(|error| failed(&error))?.free_bytes() {
            0 => Err(failed(&format!("{bytes} bytes have no space for a file beside the metadata"))),
            _ => Ok(()),
        }
    };
    let is_new = std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    if let (true, Some(size)) = (is_new, options.size) {
        check_space(size)?;
        let made = File::options().write(true).create_new(true).open(path);
        made.map_err(|error| CommandError::environment(format!("{}: {error}", path.display())))?;
        *undo = FormatUndo::Remove(path);
    }
    // Nothing is changed before the lock and the look at what is there.
    let mut device = ImageDevice::open(path, LockMode::Exclusive)?;
    let is_file = device.file.metadata().map_err(|error| failed(&error))?.is_file();
    let bytes = match options.size {
        Some(_) if !is_file => {
            return Err(CommandError::usage("--size is for files; a block device has its own"));
        }
        Some(size) if device.bytes > size => {
            return Err(CommandError::usage(format!(
                "{} has {} bytes already; leave --size out, or remove it",
                path.display(),
                device.bytes
            )));
        }
        size => size.unwrap_or(device.bytes),
    };
    if !options.force {
        match content_of(&mut device).map_err(|error| failed(&error))? {
            DeviceContent::Blank => {}
            DeviceContent::Blobstore => {
                return Err(failed(&"there is a blobstore on it; --force overwrites it"));
            }
            DeviceContent::Other { at } => {
                let what = format!("there is something on it, at byte {at}; --force overwrites it");
                return Err(failed(&what));
            }
        }
    }
    check_space(bytes)?;
    if bytes > device.bytes {
        if matches!(undo, FormatUndo::Nothing) {
            let file = device.file.try_clone().map_err(|error| failed(&error))?;
            *undo = FormatUndo::Shrink(file, device.bytes);
        }
        device.file.set_len(bytes).map_err(|error| failed(&error))?;
        device.bytes = bytes;
    }
    let files = BlockingBlobFs::format(&store(bytes), device, BlobFsOptions::default())
        .map_err(|error| failed(&error))?;
    let made = files.inspect(|fs| (fs.free_bytes(), fs.metadata_pages().all));
    files.unload().map_err(|error| failed(&error))?;
    Ok(made)
}

impl ImageArgs {
    fn device(&self, mode: LockMode) -> Result<StoreDevice, CommandError> {
        match &self.config {
            Some(config) => {
                let name = self.image.to_string_lossy();
                BdevDevice::open(config, &name, mode == LockMode::Exclusive).map(StoreDevice::Bdev)
            }
            None => ImageDevice::open(&self.image, mode).map(StoreDevice::Image),
        }
    }

    fn read(&self, load: LoadOptions) -> Result<Files, CommandError> {
        let device = self.device(LockMode::Shared)?;
        let files = BlockingBlobFs::load_read_only(device, BlobFsOptions::default(), load);
        files.map_err(|error| at(&self.image, &format!("{error}{}", advice(&error))))
    }

    /// Opens the store, changes it, and closes it.
    fn change(&self, with: impl FnOnce(&Files) -> Result<(), CommandError>) -> Result<(), CommandError> {
        let device = self.device(LockMode::Exclusive)?;
        let files = BlockingBlobFs::load(device, BlobFsOptions::default());
        let files = files.map_err(|error| at(&self.image, &format!("{error}{}", advice(&error))))?;
        let result = with(&files);
        let unloaded = files.unload().map_err(|error| at(&self.image, &error));
        result.and(unloaded)
    }

    fn ls(&self, path: &Path, as_json: bool) -> Result<(), CommandError> {
        let files = self.read(LoadOptions::default())?;
        let items = files.list(bytes(path)).map_err(|error| at(path, &error))?;
        if as_json {
            stdout_line!("{:#}", items.iter().map(item_json).collect::<Value>());
            return Ok(());
        }
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        table.set_header(["name", "bytes", "allocated"]);
        for index in [1, 2] {
            if let Some(column) = table.column_mut(index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        items.iter().for_each(|item| _ = table.add_row(item_row(item)));
        stdout_line!("{table}");
        let (free, pages) = files.inspect(|fs| (fs.free_bytes(), fs.metadata_pages()));
        stdout_line!("{} MiB free, {}", free >> 20, pages_text(pages));
        Ok(())
    }

    fn cat(&self, path: &Path) -> Result<(), CommandError> {
        let files = self.read(LoadOptions::default())?;
        let mut out = io::stdout().lock();
        copy::each(&files, path, |data| match out.write_all(data) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            result => result.map(|()| true),
        })
    }

    fn cp(&self, from: &Path, to: &Path) -> Result<(), CommandError> {
        let inside = |path: &Path| {
            bytes(path).strip_prefix(b":").map(|path| PathBuf::from(std::ffi::OsStr::from_bytes(path)))
        };
        match (inside(from), inside(to)) {
            (None, None) => Err(CommandError::usage("paths in the store begin with a colon, as :/notes.txt")),
            (Some(path), None) => copy::out(&self.read(LoadOptions::default())?, &self.image, &path, to),
            (None, Some(path)) => {
                let mut file = File::open(from).map_err(|error| at(from, &error))?;
                let mut data = vec![0; COPY_BYTES];
                self.change(|files| {
                    copy::into(files, &path, |_| {
                        let length = file.read(&mut data).map_err(|error| at(from, &error))?;
                        Ok(data[..length].to_vec())
                    })
                })
            }
            (Some(source), Some(path)) => self.change(|files| {
                let failed = |error: BlobFsError| at(&source, &error);
                let reader = files.open(bytes(&source), OpenHow::READ).map_err(failed)?;
                let result =
                    copy::into(files, &path, |offset| files.read(reader, offset, COPY_BYTES).map_err(failed));
                result.and(files.close(reader).map_err(failed))
            }),
        }
    }

    fn check(&self, as_json: bool) -> Result<(), CommandError> {
        let files = self.read(LoadOptions { scan: true, ..LoadOptions::default() })?;
        let found: Vec<(bool, String)> = files.inspect(|fs| {
            let blobs = fs.blobs().findings().iter();
            let blobs = blobs.map(|found| (found.severity() > StoreSeverity::Note, found.to_string()));
            let names = fs.findings().iter().map(|found| (found.is_damage(), found.to_string()));
            blobs.chain(names).collect()
        });
        let problems = found.iter().filter(|(is_problem, _)| *is_problem).count();
        let (blobs, free) = files.inspect(|fs| (fs.blobs().blobs().len(), fs.free_bytes()));
        let pages = files.inspect(BlobFs::metadata_pages);
        if as_json {
            let list: Value = found.iter().map(|(is, text)| json!({ "problem": is, "text": text })).collect();
            stdout_line!(
                "{:#}",
                json!({
                    "blobs": blobs,
                    "free_bytes": free,
                    "metadata_pages": pages.all,
                    "metadata_pages_used": pages.used,
                    "problems": problems,
                    "findings": list,
                })
            );
        } else {
            found.iter().for_each(|(_, text)| stdout_line!("{text}"));
            let (free, pages) = (free >> 20, pages_text(pages));
            stdout_line!("{blobs} files and directories, {free} MiB free, {pages}, {problems} problems");
        }
        match problems {
            0 => Ok(()),
            count => Err(at(&self.image, &format!("{count} problems"))),
        }
    }
}

fn pages_text(pages: MetadataPages) -> String {
    format!("{} of {} metadata pages used", pages.used, pages.all)
}

fn item_json(item: &DirectoryItem) -> Value {
    json!({
        "name": String::from_utf8_lossy(&item.name),
        "directory": item.status.is_directory,
        "bytes": item.status.size,
        "allocated_bytes": item.status.allocated_bytes,
    })
}

fn item_row(item: &DirectoryItem) -> [String; 3] {
    let name = String::from_utf8_lossy(&item.name).replace(char::is_control, "?");
    match item.status.is_directory {
        true => [format!("{name}/"), String::new(), String::new()],
        false => [name, item.status.size.to_string(), item.status.allocated_bytes.to_string()],
    }
}
