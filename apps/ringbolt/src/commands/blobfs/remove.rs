//! `ringbolt blobfs rm`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use blobfs::BlobFsError;

use super::image::{Files, at, bytes};
use crate::command_error::CommandError;
use crate::console::stderr_line;

/// Names that are removed together, with a few flushes for all: more would not be noticeably faster.
const NAMES_AT_ONCE: usize = 256;
/// How often a long removal says how far it is.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

fn failed(path: &[u8], error: &BlobFsError) -> CommandError {
    at(Path::new(OsStr::from_bytes(path)), error)
}

/// Removes a file, or a directory; with all in it if that is wanted.
pub(super) fn remove(files: &Files, path: &Path, recursive: bool) -> Result<(), CommandError> {
    let path = bytes(path);
    let status = files.status(path).map_err(|error| failed(path, &error))?;
    match (status.is_directory, recursive) {
        (false, _) => files.unlink(path).map_err(|error| failed(path, &error)),
        (true, false) => files.remove_directory(path).map_err(|error| failed(path, &error)),
        (true, true) => remove_tree(files, path),
    }
}

/// The files below a directory, and the directories, each level after the one above it.
struct Tree {
    files: Vec<Vec<u8>>,
    levels: Vec<Vec<Vec<u8>>>,
}

impl Tree {
    fn find(files: &Files, path: &[u8]) -> Result<Tree, CommandError> {
        let mut tree = Tree { files: Vec::new(), levels: Vec::new() };
        let mut level = vec![path.to_vec()];
        while !level.is_empty() {
            let mut below = Vec::new();
            for directory in &level {
                for item in files.list(directory).map_err(|error| failed(directory, &error))? {
                    let path = [&directory[..], b"/", &item.name].concat();
                    if item.status.is_directory { below.push(path) } else { tree.files.push(path) }
                }
            }
            tree.levels.push(std::mem::replace(&mut level, below));
        }
        Ok(tree)
    }
}

fn remove_tree(files: &Files, path: &[u8]) -> Result<(), CommandError> {
    let tree = Tree::find(files, path)?;
    let all = tree.files.len() + tree.levels.iter().map(Vec::len).sum::<usize>();
    let (mut removed, mut reported) = (0, Instant::now());
    // Directories are removed after what is in them.
    for paths in [tree.files].into_iter().chain(tree.levels.into_iter().rev()) {
        for paths in paths.chunks(NAMES_AT_ONCE) {
            // A directory that was only a part of names is gone with the last of them.
            let left: Vec<_> = paths.iter().filter(|path| files.status(path).is_ok()).cloned().collect();
            files.remove_all(left).map_err(|error| failed(path, &error))?;
            removed += paths.len();
            if reported.elapsed() >= REPORT_INTERVAL {
                stderr_line!("{removed} of {all} files and directories are removed");
                reported = Instant::now();
            }
        }
    }
    Ok(())
}
