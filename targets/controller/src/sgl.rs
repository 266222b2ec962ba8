//! SGL descriptors over message-based transports: where a command's data is.

use ring::Status;
use wire_nvme::DataPointer;

/// Where the data that a host sends with a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the capsule.
    Capsule {
        /// First byte, from the start of the capsule's data.
        offset: u32,
        /// Bytes.
        length: u32,
    },
    /// With the host, until the transport asks for it.
    Transport {
        /// Bytes.
        length: u32,
    },
}

impl Source {
    /// Bytes.
    pub const fn length(self) -> u32 {
        match self {
            Source::Capsule { length, .. } | Source::Transport { length } => length,
        }
    }
}

/// Finds the data of a command that sends some, over TCP (TCP 1.0, section 3.3).
///
/// `capsule` is how many bytes of data the capsule holds.
///
/// # Errors
/// A descriptor of another type, and one that reaches over the end of the capsule.
#[inline]
pub fn from_host(data: DataPointer, capsule: u32) -> Result<Source, Status> {
    let length = data.length();
    match data.identifier() {
        DataPointer::TRANSPORT => Ok(Source::Transport { length }),
        DataPointer::CAPSULE => {
            // ICDOFF is 0: offsets count from the byte behind the command (Base 2.0, section 4.1.2).
            if data.low > u64::from(capsule) {
                return Err(Status::SGL_OFFSET_INVALID.do_not_retry());
            }
            if u64::from(length) > u64::from(capsule) - data.low {
                return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
            }
            Ok(Source::Capsule { offset: data.low as u32, length })
        }
        _ => Err(Status::SGL_TYPE_INVALID.do_not_retry()),
    }
}

/// Bytes that a host has room for, over TCP.
///
/// # Errors
/// A descriptor of another type than Transport Data Block.
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
    fn capsule_descriptors_stay_within_the_capsule() {
        let at = |offset, length| {
            from_host(DataPointer::capsule(offset, length), 8192).map_err(|s| s.status_code())
        };
        assert_eq!(at(0, 8192), Ok(Source::Capsule { offset: 0, length: 8192 }));
        assert_eq!(at(8191, 1), Ok(Source::Capsule { offset: 8191, length: 1 }));
        assert_eq!(at(8192, 0), Ok(Source::Capsule { offset: 8192, length: 0 }));
        assert_eq!(at(1, 8192), Err(Status::DATA_SGL_LENGTH_INVALID.status_code()));
        assert_eq!(at(8193, 0), Err(Status::SGL_OFFSET_INVALID.status_code()));
        assert_eq!(at(u64::MAX, u32::MAX), Err(Status::SGL_OFFSET_INVALID.status_code()));
        assert_eq!(
            from_host(DataPointer::capsule(0, 1), 0),
            Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())
        );
    }

    #[test]
    fn descriptors_of_other_transports_are_refused() {
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
