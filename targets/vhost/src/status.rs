//! The translation of NVMe status codes into those of virtio-blk.

use block_io::Status;
use wire_virtio::blk::BlkStatus;

/// The status that a driver gets. The only such table.
#[inline]
pub(crate) fn blk_status(status: Status) -> BlkStatus {
    if status.is_success() { BlkStatus::Ok } else { failed(status) }
}

#[cold]
fn failed(status: Status) -> BlkStatus {
    if status.same_code(Status::INVALID_OPCODE) { BlkStatus::Unsupported } else { BlkStatus::IoError }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_one_of_virtio_blk() {
        for status_code_type in 0..8 {
            for code in 0..=u8::MAX {
                let status = Status::new(status_code_type, code);
                let expected = match (status_code_type, code) {
                    (0, 0) => BlkStatus::Ok,
                    (0, 1) => BlkStatus::Unsupported,
                    _ => BlkStatus::IoError,
                };
                assert_eq!(blk_status(status), expected, "{status}");
                if !status.is_success() {
                    assert_eq!(blk_status(status.do_not_retry()), expected, "{status}");
                }
            }
        }
    }
}
