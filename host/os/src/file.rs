//! Atomic replacement of files.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Creates or atomically replaces a file with this mode (less the umask); returns once it is durable.
///
/// The content is written to a file in the same directory, with `.new` appended to the name, and renamed over the
/// old file. If the process is killed, the file has either the old or the new content.
///
/// # Errors
/// Errors of writing, syncing and renaming; unless only the last sync of the directory failed, the old file is
/// unchanged.
pub fn replace_file(path: &Path, mode: u32, bytes: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_or_unchanged() {
        let directory = std::env::temp_dir().join(format!("replace-file-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("content");
        replace_file(&path, 0o600, b"a long first content").unwrap();
        replace_file(&path, 0o600, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // The temporary file cannot be created: the old file is unchanged.
        std::fs::create_dir(directory.join("content.new")).unwrap();
        assert!(replace_file(&path, 0o600, b"third").is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        assert!(replace_file(&directory.join("none/content"), 0o600, b"").is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
