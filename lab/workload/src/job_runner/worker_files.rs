//! The job files of a run, which its process passes to those of the jobs: a line `files COUNT`, and for each
//! a line with the lengths of its path and its text in bytes, and both.

use std::io::{self, BufRead, Read as _, Write};

/// Path and text of each file.
type Files = Vec<(String, String)>;

/// Longest line of lengths.
const LINE_BYTES_MAX: u64 = 64;

pub(super) fn send(files: &[(String, String)], to: &mut impl Write) -> io::Result<()> {
    writeln!(to, "files {}", files.len())?;
    for (path, text) in files {
        writeln!(to, "{} {}", path.len(), text.len())?;
        to.write_all(path.as_bytes())?;
        to.write_all(text.as_bytes())?;
    }
    to.flush()
}

/// # Errors
/// `UnexpectedEof` if the sender has ended, `InvalidData` for anything but what [`send`] writes.
pub(super) fn receive(from: &mut impl BufRead) -> io::Result<Files> {
    let line = read_line(from)?;
    let count: usize =
        line.strip_prefix("files ").and_then(|count| count.parse().ok()).ok_or_else(invalid)?;
    let mut files = Vec::new();
    for _ in 0..count {
        let line = read_line(from)?;
        let lengths = line.split_once(' ').ok_or_else(invalid)?;
        files.push((read_text(from, lengths.0)?, read_text(from, lengths.1)?));
    }
    Ok(files)
}

fn read_line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    from.take(LINE_BYTES_MAX).read_line(&mut line)?;
    match line.strip_suffix('\n') {
        Some(line) => Ok(line.to_string()),
        None if line.is_empty() => Err(io::ErrorKind::UnexpectedEof.into()),
        None => Err(invalid()),
    }
}

fn read_text(from: &mut impl BufRead, length: &str) -> io::Result<String> {
    let length: u64 = length.parse().map_err(|_| invalid())?;
    let mut text = String::new();
    let read = from.take(length).read_to_string(&mut text)?;
    if read as u64 == length { Ok(text) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the parent process sent no job files")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_arrive_as_sent_and_nothing_behind_them_is_read() {
        let pair = |path: &str, text: &str| (path.to_string(), text.to_string());
        for files in
            [vec![], vec![pair("/dev/fd/63", "[a]\nrw=read\n"), pair("-", ""), pair("ä\n b", "2 2\n")]]
        {
            let mut sent = Vec::new();
            send(&files, &mut sent).unwrap();
            sent.extend(b"go\n");
            let mut from = sent.as_slice();
            assert_eq!(receive(&mut from).unwrap(), files);
            assert_eq!(from, b"go\n");
            for end in 0..sent.len() - 3 {
                assert!(receive(&mut &sent[..end]).is_err(), "{end} bytes of {sent:?}");
            }
        }
        for text in ["go\n", "files x\n", "files 1\n3\n", "files 1\n1 18446744073709551615\na"] {
            assert!(receive(&mut text.as_bytes()).is_err(), "{text}");
        }
    }
}
