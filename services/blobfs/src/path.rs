//! Paths: components between slashes, from the root. There is no current directory.

use crate::error::BlobFsError;

/// Bytes of a component of a path, at most: those of SPDK's names.
pub const NAME_BYTES_MAX: usize = 255;

/// The components of a path. Empty ones and `.` are left out, so that `/a//b/` is `a/b`.
///
/// # Errors
/// A component is `..`, has a byte 0, or is too long.
pub(crate) fn components(path: &[u8]) -> Result<Vec<&[u8]>, BlobFsError> {
    let all = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".");
    let check = |name: &[u8]| match name {
        b".." => Err(BlobFsError::Invalid("a path has no ..")),
        name if name.contains(&0) => Err(BlobFsError::Invalid("a path has no byte 0")),
        name if name.len() > NAME_BYTES_MAX => Err(BlobFsError::NameTooLong),
        _ => Ok(()),
    };
    all.map(|name| check(name).map(|()| name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_name_the_same_have_the_same_components() {
        for path in ["a/b", "/a/b", "//a///b/", "./a/./b/."] {
            assert_eq!(components(path.as_bytes()), Ok(vec![&b"a"[..], b"b"]), "{path}");
        }
        assert_eq!(components(b"/"), Ok(vec![]));
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        assert_eq!(components(b"a/../b"), Err(BlobFsError::Invalid("a path has no ..")));
        assert_eq!(components(b"a\0b"), Err(BlobFsError::Invalid("a path has no byte 0")));
        assert_eq!(components(&[b'x'; 256]), Err(BlobFsError::NameTooLong));
        assert!(components(&[b'x'; 255]).is_ok());
    }
}
