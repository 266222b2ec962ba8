//! I/O vectors of data in several slices.

use dma::{Buffer, Data};

/// Most vectors of one operation: the kernel's limit (`UIO_MAXIOV`).
pub const IO_VECTORS_MAX: usize = 1024;

/// The vectors of one operation in flight. The kernel may read them until it completes, so they belong to its slot,
/// like the data that they describe.
#[derive(Default)]
pub(crate) struct IoVectors(Vec<libc::iovec>);

impl IoVectors {
    /// Describes the first `bytes` bytes of one buffer, as [`describe`](Self::describe) does.
    #[inline]
    pub(crate) fn describe_one(&mut self, buffer: &Buffer, bytes: u32) -> (*const libc::iovec, u32) {
        self.0.clear();
        self.0.push(libc::iovec { iov_base: buffer.as_ptr().cast(), iov_len: bytes as usize });
        (self.0.as_ptr(), 1)
    }

    /// Describes `bytes` bytes of the slices from `start` on; returns the address and the number of vectors, which
    /// are valid until the next call. The slices must stay held as long.
    ///
    /// # Panics
    /// If the slices have fewer bytes, or the range has more than [`IO_VECTORS_MAX`] slices.
    pub(crate) fn describe(
        &mut self,
        slices: &[Buffer],
        start: usize,
        bytes: usize,
    ) -> (*const libc::iovec, u32) {
        self.0.clear();
        let (mut skip, mut left) = (start, bytes);
        for slice in slices {
            if skip >= slice.len() {
                skip -= slice.len();
                continue;
            }
            let length = left.min(slice.len() - skip);
            if length == 0 {
                break;
            }
            self.0.push(libc::iovec { iov_base: slice.as_ptr().wrapping_add(skip).cast(), iov_len: length });
            (skip, left) = (0, left - length);
        }
        assert!(left == 0, "{bytes} bytes at {start} are beyond the slices");
        assert!(self.0.len() <= IO_VECTORS_MAX, "{} slices in one operation", self.0.len());
        (self.0.as_ptr(), self.0.len() as u32)
    }
}

/// Checks that the kernel may access `bytes` bytes of the data from `start` on, and write them for a read.
///
/// # Panics
/// If the data is shorter, or a read's data is shared: its other holders may borrow it.
#[inline]
pub(crate) fn check_access(data: Option<&Data>, start: usize, bytes: u64, is_read: bool) {
    let room = data.map_or(0, |data| data.len().saturating_sub(start));
    assert!(bytes <= room as u64, "{bytes} bytes in a buffer of {room}");
    assert!(!is_read || data.is_none_or(Data::is_writable), "a read into memory that is shared");
}

#[cfg(test)]
mod tests {
    use dma::{Arena, Pool};

    use super::*;

    #[test]
    fn vectors_describe_a_range_of_the_slices() {
        let config =
            dma::ArenaConfig { limit_bytes: 2 << 20, hugepages: false, ..dma::ArenaConfig::default() };
        let pool = Pool::new(&Arena::new(config));
        let slices: Vec<Buffer> = [512, 4096, 1024].map(|bytes| pool.take(bytes).unwrap()).into();
        let mut vectors = IoVectors::default();
        let mut lengths = |start, bytes| {
            let count = vectors.describe(&slices, start, bytes).1;
            let list: Vec<(usize, usize)> =
                vectors.0.iter().map(|vector| (vector.iov_base as usize, vector.iov_len)).collect();
            assert_eq!(count as usize, list.len());
            list
        };
        let at = |slice: usize, offset: usize| slices[slice].as_ptr() as usize + offset;
        assert_eq!(lengths(0, 5632), [(at(0, 0), 512), (at(1, 0), 4096), (at(2, 0), 1024)]);
        assert_eq!(lengths(512, 4096), [(at(1, 0), 4096)]);
        assert_eq!(lengths(600, 4100), [(at(1, 88), 4008), (at(2, 0), 92)]);
        assert_eq!(lengths(5631, 1), [(at(2, 1023), 1)]);
    }

    #[test]
    #[should_panic(expected = "beyond the slices")]
    fn a_range_beyond_the_slices_panics() {
        let config =
            dma::ArenaConfig { limit_bytes: 2 << 20, hugepages: false, ..dma::ArenaConfig::default() };
        let slices = [Pool::new(&Arena::new(config)).take(512).unwrap()];
        IoVectors::default().describe(&slices, 1, 512);
    }
}
