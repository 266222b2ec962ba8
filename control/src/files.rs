//! Files that are read because a request names them.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Reads a regular file of at most `bytes_max` bytes. Anything else is an error: a device or a FIFO would give data
/// without end, or none. To be called without a lock: a file system may be slow.
pub fn read_regular(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    // NONBLOCK: opening a FIFO must not wait for a writer. It has no effect on a regular file.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    read_limited(file, bytes_max)
}

/// Reads at most `bytes_max` bytes; more are an error. Files of some file systems have more than they say, devices and pipes
/// say nothing, so the limit holds for what is read.
pub fn read_limited(file: impl Read, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let message = format!("more than the maximum of {bytes_max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_up_to_the_limit_are_read() {
        let directory = std::env::temp_dir().join(format!("ringbolt-files-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (file, fifo) = (directory.join("file"), directory.join("fifo"));
        std::fs::write(&file, "12345").unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(read_regular(&file, 5).unwrap(), b"12345");
        assert_eq!(read_regular(&file, 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        for path in [fifo.as_path(), Path::new("/dev/zero"), &directory] {
            assert!(
                read_regular(path, 5).unwrap_err().to_string().contains("not a regular file"),
                "{path:?}"
            );
        }
        assert_eq!(read_regular(&directory.join("x"), 5).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::remove_dir_all(directory).unwrap();
    }
}
