//! Files that are there whole or not at all.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Replaces a file's content, or makes the file, and returns when that is on the medium. It is written beside
/// the file, under its name with `.new` behind, and renamed over it: whenever the process is killed there is
/// either what was or what is.
///
/// # Errors
/// Those of writing, syncing and renaming; what was there is there still.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = File::create(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_or_left_alone() {
        let folder = std::env::temp_dir().join(format!("replace-file-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("content");
        replace_file(&path, b"a long first content").unwrap();
        replace_file(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        // Nothing can be written beside it: the file stays.
        std::fs::create_dir(folder.join("content.new")).unwrap();
        assert!(replace_file(&path, b"third").is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        assert!(replace_file(&folder.join("none/content"), b"").is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
