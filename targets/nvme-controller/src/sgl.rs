//! SGL descriptors of message-based transports: where the data of a command is.

use block_io::Status;
use wire_nvme::DataPointer;

/// Where the host data of a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSource {
    /// In-capsule data.
    Capsule {
        /// First byte, relative to the start of the in-capsule data.
        offset: u32,
        /// Bytes.
        length: u32,
    },
    /// Still at the host; the transport requests it (R2T).
    Transport {
        /// Bytes.
        length: u32,
    },
}

impl DataSource {
    /// Length in bytes.
    pub const fn length(self) -> u32 {
        match self {
            DataSource::Capsule { length, .. } | DataSource::Transport { length } => length,
        }
    }
}

/// Locates the host data of a command over TCP (TCP 1.0, section 3.3).
///
/// `capsule` is the length of the in-capsule data in bytes.
///
/// # Errors
/// An unsupported descriptor type, or a range beyond the end of the capsule.
#[inline]
pub fn from_host(data: DataPointer, capsule: u32) -> Result<DataSource, Status> {
    let length = data.length();
    match data.identifier() {
        DataPointer::TRANSPORT => Ok(DataSource::Transport { length }),
        DataPointer::CAPSULE => {
            // ICDOFF is 0: offsets are relative to the end of the SQE (Base 2.0, section 4.1.2).
            if data.low > u64::from(capsule) {
                return Err(Status::SGL_OFFSET_INVALID.do_not_retry());
            }
            if u64::from(length) > u64::from(capsule) - data.low {
                return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
            }
            Ok(DataSource::Capsule { offset: data.low as u32, length })
        }
        _ => Err(Status::SGL_TYPE_INVALID.do_not_retry()),
    }
}

/// Length of the host's buffer in bytes, over TCP.
///
/// # Errors
/// The descriptor type is not Transport SGL Data Block.
#[inline]
pub fn to_host(data: DataPointer) -> Result<u32, Status> {
    match data.identifier() {
        DataPointer::TRANSPORT => Ok(data.length()),
        _ => Err(Status::SGL_TYPE_INVALID.do_not_retry()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire_nvme::sqe::Sgl;

    #[test]
    fn in_capsule_range_must_fit_the_capsule() {
        let source = |offset, length| {
            from_host(DataPointer::capsule(offset, length), 8192).map_err(|s| s.status_code())
        };
        assert_eq!(source(0, 8192), Ok(DataSource::Capsule { offset: 0, length: 8192 }));
        assert_eq!(source(8191, 1), Ok(DataSource::Capsule { offset: 8191, length: 1 }));
        assert_eq!(source(8192, 0), Ok(DataSource::Capsule { offset: 8192, length: 0 }));
        assert_eq!(source(1, 8192), Err(Status::DATA_SGL_LENGTH_INVALID.status_code()));
        assert_eq!(source(8193, 0), Err(Status::SGL_OFFSET_INVALID.status_code()));
        assert_eq!(source(u64::MAX, u32::MAX), Err(Status::SGL_OFFSET_INVALID.status_code()));
        assert_eq!(
            from_host(DataPointer::capsule(0, 1), 0),
            Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())
        );
    }

    #[test]
    fn other_descriptor_types_are_rejected() {
        for sgl in [
            Sgl::DataBlock { address: 0, length: 512 },
            Sgl::BitBucket { length: 512 },
            Sgl::Keyed { address: 0, length: 512, key: 1, invalidate: false },
            Sgl::Segment { offset: true, last: true, address: 0, length: 16 },
        ] {
            assert_eq!(from_host(sgl.into(), 8192), Err(Status::SGL_TYPE_INVALID.do_not_retry()), "{sgl:?}");
            assert_eq!(to_host(sgl.into()), Err(Status::SGL_TYPE_INVALID.do_not_retry()), "{sgl:?}");
        }
        assert_eq!(to_host(DataPointer::capsule(0, 512)), Err(Status::SGL_TYPE_INVALID.do_not_retry()));
        assert_eq!(to_host(DataPointer::transport(512)), Ok(512));
    }
}
