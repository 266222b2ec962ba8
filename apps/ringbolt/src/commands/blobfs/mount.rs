//! `ringbolt blobfs mount`: a store's files for ordinary programs, read-only, by FUSE.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use blobfs::{
    BlobFsError, BlockingBlobFs, BlockingDevice, DirectoryItem, FileStatus, NAME_BYTES_MAX, OpenHow,
    OpenNumber,
};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, Request, Session, SessionUnmounter,
};
use rustix::process::{getgid, getuid};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::command_error::CommandError;
use crate::console::{stderr_line, stdout_line};

/// How long the kernel may cache names and attributes: nothing changes in a store that is mounted.
const REMEMBERED: Duration = Duration::from_secs(3600);
const BLOCK_BYTES: u32 = 4096;
/// `FUSE_SUPER_MAGIC`, the type of a mount of FUSE in `statfs`.
const FUSE_MAGIC: u64 = 0x6573_5546;

/// Mounts files on a directory until they are unmounted, or a signal ends this process. While files below are
/// open the kernel does not unmount: the first signal says so, a second one detaches the directory, and this
/// ends when they are closed; a third ends the process.
///
/// # Errors
/// The kernel has no FUSE, the user may not mount, or there is no such directory.
pub(super) fn mount<D: BlockingDevice + 'static>(
    files: BlockingBlobFs<D>,
    image: &Path,
    directory: &Path,
) -> Result<(), CommandError> {
    check_directory(directory)?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(CommandError::environment)?;
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::RO,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::FSName(image.display().to_string()),
        MountOption::Subtype("blobfs".to_string()),
    ];
    let mut session = Session::new(MountedFiles::new(files), directory, &config)
        .map_err(|error| mount_error(directory, &error))?;
    let mut unmounter = session.unmount_callable();
    let ended = signals.handle();
    let mounted = directory.to_path_buf();
    let waiter = std::thread::spawn(move || {
        for (at, signal) in signals.forever().enumerate() {
            match at {
                0 => unmount(&mut unmounter, &mounted),
                1 => detach(&mounted),
                // Those that have files open get errors.
                _ => _ = signal_hook::low_level::emulate_default_handler(signal),
            }
        }
    });
    stdout_line!(
        "{} is on {}, read-only, until `umount {1}` or Ctrl-C",
        image.display(),
        directory.display()
    );
    let result = session.run();
    ended.close();
    // It has said itself what failed.
    _ = waiter.join();
    result.map_err(|error| CommandError::operation(format!("{}: {error}", directory.display())))
}

/// Refuses what FUSE would mount on although it hides something: a file, a directory with entries, another
/// mount of FUSE.
fn check_directory(directory: &Path) -> Result<(), CommandError> {
    let failed =
        |what: &str| CommandError::environment(format!("cannot mount on {}: {what}", directory.display()));
    let found = std::fs::metadata(directory).map_err(|error| match error.kind() {
        ErrorKind::NotConnected => {
            failed("a mount whose process was killed is still there; `umount` it first")
        }
        ErrorKind::NotFound => failed("there is no such directory; `mkdir` makes it"),
        _ => failed(&error.to_string()),
    })?;
    if !found.is_dir() {
        return Err(failed("it is not a directory"));
    }
    let above = std::fs::metadata(directory.join("..")).map_err(|error| failed(&error.to_string()))?;
    let system = rustix::fs::statfs(directory).map_err(|error| failed(&error.to_string()))?;
    if found.dev() != above.dev() && system.f_type as u64 == FUSE_MAGIC {
        return Err(failed(
            "something is mounted there already; `umount` it first, or give another directory",
        ));
    }
    let mut entries = std::fs::read_dir(directory).map_err(|error| failed(&error.to_string()))?;
    match entries.next() {
        Some(_) => Err(failed("it is not empty, and what is in it would be hidden")),
        None => Ok(()),
    }
}

/// Why the kernel has not mounted, with what to do about it.
fn mount_error(directory: &Path, error: &std::io::Error) -> CommandError {
    let advice = match error.kind() {
        ErrorKind::NotFound => {
            "; is there a /dev/fuse? `modprobe fuse` makes it, and fusermount3 is in the package fuse3"
        }
        ErrorKind::PermissionDenied => {
            "; root has to be allowed to open /dev/fuse, which containers forbid; another user has to own \
             the directory, and needs fusermount3"
        }
        _ => "",
    };
    CommandError::environment(format!("cannot mount on {}: {error}{advice}", directory.display()))
}

/// Unmounts, and says what to do if that fails.
fn unmount(unmounter: &mut SessionUnmounter, directory: &Path) {
    if let Err(error) = unmounter.unmount() {
        stderr_line!(
            "{} stays mounted: {error}; end what has files open there, and `umount` it, or signal this once \
             more: then it is detached, and this ends when they are closed",
            directory.display()
        );
    }
}

/// Takes the directory away, and leaves the files to those that have them open.
fn detach(directory: &Path) {
    let run = |program: &str, option: &str| {
        let output = Command::new(program).arg(option).arg("--").arg(directory).output();
        match output {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_string()),
            Err(error) => Err(format!("{program}: {error}")),
        }
    };
    match run("umount", "-l").or_else(|error| run("fusermount3", "-uz").map_err(|_| error)) {
        Ok(()) => stderr_line!(
            "{} is detached; this ends when the files of it are closed, or at once with another signal",
            directory.display()
        ),
        Err(error) => stderr_line!("{} stays mounted: {error}", directory.display()),
    }
}

/// Paths by their inode numbers, which are given out as paths are looked up.
struct Inodes {
    paths: Vec<Arc<[u8]>>,
    numbers: HashMap<Arc<[u8]>, u64>,
}

impl Inodes {
    fn new() -> Inodes {
        // The root is 1.
        let root: Arc<[u8]> = Arc::from(&b"/"[..]);
        Inodes { paths: vec![root.clone()], numbers: HashMap::from([(root, 1)]) }
    }

    fn path(&self, inode: INodeNo) -> Option<Arc<[u8]>> {
        let at = usize::try_from(inode.0.checked_sub(1)?).ok()?;
        self.paths.get(at).cloned()
    }

    fn number(&mut self, path: &[u8]) -> INodeNo {
        if let Some(number) = self.numbers.get(path) {
            return INodeNo(*number);
        }
        let path: Arc<[u8]> = path.into();
        self.paths.push(path.clone());
        self.numbers.insert(path, self.paths.len() as u64);
        INodeNo(self.paths.len() as u64)
    }
}

struct MountedFiles<D> {
    files: BlockingBlobFs<D>,
    inodes: Mutex<Inodes>,
    /// What an open directory had when it was opened.
    directories: Mutex<BTreeMap<u64, Arc<Vec<DirectoryItem>>>>,
    opened_directories: AtomicU64,
    owner: (u32, u32),
}

fn errno(error: &BlobFsError) -> Errno {
    Errno::from_i32(error.errno())
}

fn child(parent: &[u8], name: &[u8]) -> Vec<u8> {
    let separator: &[u8] = if parent.ends_with(b"/") { b"" } else { b"/" };
    [parent, separator, name].concat()
}

impl<D: BlockingDevice> MountedFiles<D> {
    fn new(files: BlockingBlobFs<D>) -> MountedFiles<D> {
        MountedFiles {
            files,
            inodes: Mutex::new(Inodes::new()),
            directories: Mutex::default(),
            opened_directories: AtomicU64::new(0),
            owner: (getuid().as_raw(), getgid().as_raw()),
        }
    }

    fn path(&self, inode: INodeNo) -> Result<Arc<[u8]>, Errno> {
        sync::lock(&self.inodes).path(inode).ok_or(Errno::ENOENT)
    }

    /// The attributes of what is at a path. A store has no times and no owners.
    fn attributes(&self, inode: INodeNo, status: &FileStatus) -> FileAttr {
        let (kind, perm, nlink) = match status.is_directory {
            true => (FileType::Directory, 0o555, 2),
            false => (FileType::RegularFile, 0o444, 1),
        };
        FileAttr {
            ino: inode,
            size: status.size,
            blocks: status.allocated_bytes / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        }
    }

    fn find(&self, path: &[u8]) -> Result<FileAttr, Errno> {
        let status = self.files.status(path).map_err(|error| errno(&error))?;
        let inode = sync::lock(&self.inodes).number(path);
        Ok(self.attributes(inode, &status))
    }

    fn open_file(&self, inode: INodeNo) -> Result<OpenNumber, Errno> {
        self.files.open(&self.path(inode)?, OpenHow::READ).map_err(|error| errno(&error))
    }

    fn open_directory(&self, inode: INodeNo) -> Result<u64, Errno> {
        let items = self.files.list(&self.path(inode)?).map_err(|error| errno(&error))?;
        let number = self.opened_directories.fetch_add(1, Ordering::Relaxed) + 1;
        sync::lock(&self.directories).insert(number, Arc::new(items));
        Ok(number)
    }

    /// Adds the entries from `offset` on, as many as the reply has space for.
    fn fill(
        &self,
        inode: INodeNo,
        directory: u64,
        offset: u64,
        reply: &mut ReplyDirectory,
    ) -> Result<(), Errno> {
        let path = self.path(inode)?;
        let items = sync::lock(&self.directories).get(&directory).cloned().ok_or(Errno::EBADF)?;
        let parent = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) if at > 0 => &path[..at],
            _ => b"/",
        };
        let mut inodes = sync::lock(&self.inodes);
        for at in offset..items.len() as u64 + 2 {
            let (number, kind, name) = match at {
                0 => (inode, FileType::Directory, &b"."[..]),
                1 => (inodes.number(parent), FileType::Directory, &b".."[..]),
                _ => {
                    let item = &items[at as usize - 2];
                    let kind = match item.status.is_directory {
                        true => FileType::Directory,
                        false => FileType::RegularFile,
                    };
                    (inodes.number(&child(&path, &item.name)), kind, &item.name[..])
                }
            };
            if reply.add(number, at + 1, kind, OsStr::from_bytes(name)) {
                break;
            }
        }
        Ok(())
    }
}

impl<D: BlockingDevice + 'static> Filesystem for MountedFiles<D> {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let path = self.path(parent).map(|parent| child(&parent, name.as_bytes()));
        match path.and_then(|path| self.find(&path)) {
            Ok(attributes) => reply.entry(&REMEMBERED, &attributes, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.path(inode).and_then(|path| self.find(&path)) {
            Ok(attributes) => reply.attr(&REMEMBERED, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.open_file(inode) {
            Ok(open) => reply.opened(FileHandle(open.0), FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        open: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.files.read(OpenNumber(open.0), offset, size as usize) {
            Ok(data) => reply.data(&data),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Nothing of an opener is in memory.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        open: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        match self.files.close(OpenNumber(open.0)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn opendir(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.open_directory(inode) {
            Ok(number) => reply.opened(FileHandle(number), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        inode: INodeNo,
        directory: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        match self.fill(inode, directory.0, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn releasedir(&self, _: &Request, _: INodeNo, directory: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        sync::lock(&self.directories).remove(&directory.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let (all, free, pages) = self.files.inspect(|fs| {
            let store = fs.blobs();
            let all = u64::from(store.data_clusters()) * u64::from(store.layout().cluster_bytes);
            (all, fs.free_bytes(), fs.metadata_pages())
        });
        let blocks = |bytes: u64| bytes / u64::from(BLOCK_BYTES);
        let name = NAME_BYTES_MAX as u32;
        let (files, files_free) = (pages.all.into(), pages.all.saturating_sub(pages.used).into());
        reply.statfs(
            blocks(all),
            blocks(free),
            blocks(free),
            files,
            files_free,
            BLOCK_BYTES,
            name,
            BLOCK_BYTES,
        );
    }
}
