//! `ringbolt image export-diff` and `import-diff`: what differs between two snapshots of a cluster's image,
//! as a file or through a pipe.

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use reactor::{Core, Reactor, ReactorConfig};
use rustix::fs::{CWD, OFlags, RenameFlags};
use rustix::io::Errno;
use serde_json::json;
use store_client::{
    DIFF_MAGIC, DiffError, DiffExport, DiffPosition, ExportedDiff, ImageName, ImportOptions, import_diff,
    read_started,
};

use super::cluster::open;
use super::owner::ImageOwner;
use super::snapshots::parse_snapshot;
use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

/// What takes longer than this says how far it is, and again after each such time.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);
/// Bytes of a stream that are read at a time.
const READ_BYTES: usize = 256 << 10;

/// Arguments of `ringbolt image export-diff`.
#[derive(Args)]
pub(crate) struct ExportDiffArgs {
    /// Image and snapshot, as vol@tuesday
    #[arg(value_name = "IMAGE@SNAPSHOT", value_parser = parse_snapshot)]
    snapshot: (String, String),
    /// File to be made, or - for standard output
    file: PathBuf,
    /// An earlier snapshot of the image: what differs from it [default: all that the image had]
    #[arg(long, value_name = "SNAPSHOT")]
    from: Option<String>,
    /// Go on with FILE.partial, which an export that was interrupted has left; begins anew if there is none
    #[arg(long)]
    resume: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) of: ImageOwner,
}

/// Arguments of `ringbolt image import-diff`.
#[derive(Args)]
pub(crate) struct ImportDiffArgs {
    /// File of `image export-diff`, or - for standard input
    file: PathBuf,
    /// Name of the image; a diff of everything makes it
    name: String,
    /// Remove what the image has since its newest snapshot, and a part of another diff that it has
    #[arg(long)]
    discard_changes: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) of: ImageOwner,
}

/// Says how far it is, while that takes.
struct DiffProgress {
    what: String,
    said: Cell<Instant>,
}

impl DiffProgress {
    fn new(what: String) -> DiffProgress {
        DiffProgress { what, said: Cell::new(Instant::now()) }
    }

    fn is_due(&self) -> bool {
        let is_due = self.said.get().elapsed() >= PROGRESS_EVERY;
        if is_due {
            self.said.set(Instant::now());
        }
        is_due
    }
}

fn is_pipe(file: &Path) -> bool {
    file == Path::new("-")
}

fn at(file: &Path) -> impl Fn(io::Error) -> CommandError {
    move |error| CommandError::environment(format!("{}: {error}", file.display()))
}

fn run<T: 'static, F: Future<Output = Result<T, DiffError>> + 'static>(
    begin: impl FnOnce(Core) -> F,
) -> Result<Result<T, DiffError>, CommandError> {
    let reactor = Reactor::new(&ReactorConfig::default()).map_err(CommandError::environment)?;
    let work = begin(reactor.core());
    Ok(reactor.block_on(work))
}

/// Exports what differs between two snapshots.
pub(super) fn export(options: ExportDiffArgs) -> Result<(), CommandError> {
    let ExportDiffArgs { snapshot: (image, snapshot), file, from, resume, json: as_json, of } = options;
    if is_pipe(&file) && (resume || as_json) {
        let reason = "--resume and --json are for a file: standard output has the diff";
        return Err(CommandError::usage(reason));
    }
    let cluster = open(&of)?;
    let export = DiffExport::new(&cluster, (&of.pool, &image), &snapshot, from.as_deref());
    let export = export.map_err(CommandError::operation)?;
    let name = format!("{}/{image}@{snapshot}", of.pool);
    if is_pipe(&file) {
        let stdout = io::stdout();
        if stdout.is_terminal() {
            return Err(CommandError::usage("standard output is a terminal: name a file, or use a pipe"));
        }
        if is_closed(&stdout) {
            return Err(CommandError::usage(
                "standard output is closed, or discards it: name a file, or use a pipe",
            ));
        }
        let stdout = File::from(stdout.as_fd().try_clone_to_owned().map_err(at(&file))?);
        write(export, stdout, DiffPosition::default(), name)?.map_err(CommandError::operation)?;
        return Ok(());
    }
    let partial = PartialFile::open(&file, &export, resume)?;
    let exported = match write(export, partial.file.try_clone().map_err(at(&file))?, partial.position, name)?
    {
        Ok(exported) => exported,
        Err(error) => return Err(partial.failed(&error)),
    };
    partial.finish()?;
    let ExportedDiff { objects, data_bytes, zero_bytes, stream_bytes } = exported;
    if as_json {
        let described = json!({
            "file": file.display().to_string(),
            "snapshot": snapshot,
            "from": from,
            "objects": objects,
            "data_bytes": data_bytes,
            "zero_bytes": zero_bytes,
            "stream_bytes": stream_bytes,
            "resumed_at": partial.position.stream_bytes,
        });
        stdout_line!("{described:#}");
    } else {
        stdout_line!("{}: {stream_bytes} bytes, {data_bytes} of data", file.display());
    }
    Ok(())
}

/// Whether standard output was closed: the standard library opens /dev/null in its place, for reads and
/// writes. A shell that is to discard the stream opens it for writes only.
fn is_closed(stdout: &impl AsFd) -> bool {
    let is_null = |stat: rustix::fs::Stat| {
        std::fs::metadata("/dev/null").is_ok_and(|null| stat.st_rdev == null.rdev() && null.rdev() != 0)
    };
    let is_read = |flags: OFlags| flags & OFlags::ACCMODE == OFlags::RDWR;
    rustix::fs::fstat(stdout).is_ok_and(is_null) && rustix::fs::fcntl_getfl(stdout).is_ok_and(is_read)
}

fn write(
    export: DiffExport,
    file: File,
    position: DiffPosition,
    name: String,
) -> Result<Result<ExportedDiff, DiffError>, CommandError> {
    let progress = DiffProgress::new(name);
    run(move |core| async move {
        let progress = |done: u64, objects: u64| {
            if progress.is_due() {
                stderr_line!("{}: {done} of {objects} objects are exported", progress.what);
            }
        };
        export.write(&core, file, position, progress).await.map(|(exported, _)| exported)
    })
}

/// The file of an export that is not whole.
struct PartialFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    position: DiffPosition,
}

impl PartialFile {
    /// Opens `FILE.partial`, which no other process writes, at its end if it is to be gone on with.
    fn open(path: &Path, export: &DiffExport, resume: bool) -> Result<PartialFile, CommandError> {
        let exists = |path: &Path| path.symlink_metadata().is_ok();
        if exists(path) {
            return Err(CommandError::operation(format!("{} exists: name another file", path.display())));
        }
        let mut partial: OsString = path.into();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let mut options = File::options();
        // It has the data of an image.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(&partial).map_err(at(&partial))?;
        let in_use = || {
            let what = "another export writes it";
            CommandError::operation(format!("{}: {what}", partial.display()))
        };
        file.try_lock().map_err(|error| match error {
            std::fs::TryLockError::WouldBlock => in_use(),
            std::fs::TryLockError::Error(error) => at(&partial)(error),
        })?;
        // It may have become the whole file of another one since it was opened.
        let opened = file.metadata().map_err(at(&partial))?;
        let is_it = partial
            .symlink_metadata()
            .is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino()));
        if !is_it || exists(path) || !opened.is_file() {
            return Err(in_use());
        }
        let mut begin = [0; DIFF_MAGIC.len()];
        let length = file.read_at(&mut begin, 0).map_err(at(&partial))?;
        if !DIFF_MAGIC.starts_with(&begin[..length]) {
            return Err(CommandError::operation(format!(
                "{} is no export that was interrupted: remove it, or name another file",
                partial.display()
            )));
        }
        let mut position = DiffPosition::default();
        if resume {
            let started = read_started(BufReader::with_capacity(READ_BYTES, &file));
            if let Some(started) = started.map_err(CommandError::operation)? {
                if started.header != *export.header() {
                    return Err(CommandError::operation(format!(
                        "{} is the begin of another export: of other snapshots, or of one from which older \
                         snapshots were removed since; export without --resume",
                        partial.display()
                    )));
                }
                position = started.position;
            }
        }
        file.set_len(position.stream_bytes).map_err(at(&partial))?;
        file.seek(SeekFrom::Start(position.stream_bytes)).map_err(at(&partial))?;
        Ok(PartialFile { path: path.to_path_buf(), partial, file, position })
    }

    /// The export has ended with an error.
    fn failed(&self, error: &DiffError) -> CommandError {
        let advice = match error {
            DiffError::SnapshotRemoved { .. } => String::new(),
            _ if self.file.metadata().is_ok_and(|it| it.len() == 0) => String::new(),
            _ => format!("; {} has what was exported, and --resume goes on with it", self.partial.display()),
        };
        if advice.is_empty() {
            let _ = std::fs::remove_file(&self.partial);
        }
        CommandError::operation(format!("{}: {error}{advice}", self.path.display()))
    }

    /// Gives the file its name.
    fn finish(&self) -> Result<(), CommandError> {
        let directory = match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        self.file.sync_all().map_err(at(&self.partial))?;
        name_new(&self.partial, &self.path).map_err(|error| {
            let reason = match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    "it was made by another one since the export began".to_string()
                }
                _ => error.to_string(),
            };
            CommandError::operation(format!(
                "{}: {reason}; {} has the whole export, and --resume gives it the name once that is free",
                self.path.display(),
                self.partial.display()
            ))
        })?;
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(at(&self.path))
    }
}

/// Gives a file another name, which no file may have.
fn name_new(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // As of NFS, which has hard links.
        Err(Errno::INVAL | Errno::NOSYS) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)
        }
        renamed => Ok(renamed?),
    }
}

/// Imports a diff, and prints the name of the snapshot that the image has then.
pub(super) fn import(options: ImportDiffArgs) -> Result<(), CommandError> {
    let ImportDiffArgs { file, name, discard_changes, json: as_json, of } = options;
    let cluster = open(&of)?;
    let pool = of.pool.clone();
    let stream: File = if is_pipe(&file) {
        let stdin = io::stdin();
        if stdin.is_terminal() {
            return Err(CommandError::usage("standard input is a terminal: name a file, or use a pipe"));
        }
        File::from(stdin.as_fd().try_clone_to_owned().map_err(at(&file))?)
    } else {
        File::open(&file).map_err(at(&file))?
    };
    let stream = BufReader::with_capacity(READ_BYTES, stream);
    let progress = DiffProgress::new(format!("{pool}/{name}"));
    let image = format!("store:{pool}/{name}");
    let imported = run(move |core| async move {
        let progress = |offset: u64, bytes: u64| {
            if progress.is_due() {
                let mib = |bytes: u64| bytes >> 20;
                stderr_line!("{}: imported up to {} of {} MiB", progress.what, mib(offset), mib(bytes));
            }
        };
        let to = ImageName { cluster: &cluster, pool: &pool, name: &name };
        import_diff(&core, to, stream, ImportOptions { discard_changes }, progress).await
    })?;
    let imported =
        imported.map_err(|error| CommandError::operation(format!("{}: {error}", file.display())))?;
    let snapshot = format!("{image}@{}", imported.snapshot);
    if as_json {
        let described = json!({
            "image": image,
            "snapshot": imported.snapshot,
            "size": imported.bytes,
            "written_bytes": imported.written_bytes,
            "zeroed_bytes": imported.zeroed_bytes,
            "resumed_at": imported.resumed_at,
        });
        stdout_line!("{described:#}");
    } else {
        stdout_line!("{snapshot}");
    }
    Ok(())
}
