//! NVMe on the wire: encodings of queue entries, data structures and NVMe/TCP PDUs, nothing else.
//!
//! Every type is a struct of decoded fields with `decode` and `encode`. Values that the
//! specifications count from 0 are converted when they are decoded and exist nowhere else; reserved
//! and unknown values are errors. A queue entry is the exception: any 64 bytes are a command, because
//! even a bad one must be answered, so [`Sqe::decode`] cannot fail and its accessors can.
//!
//! The three types to start from are [`Sqe`] (what a host asks), [`Cqe`] (what it is answered) and
//! [`tcp::CommonHeader`] (what both travel in).
//!
//! ```
//! use ring::Status;
//! use wire_nvme::{Cqe, DataPointer, Sqe, io::ReadWrite, opcode::NvmOpcode};
//! let mut sqe = ReadWrite { lba: 8, blocks: 8, ..ReadWrite::default() }.to_sqe(NvmOpcode::Read);
//! sqe.cid = 7;
//! sqe.nsid = 1;
//! sqe.data = DataPointer::transport(4096);
//! let bytes = sqe.to_bytes();
//! assert_eq!(ReadWrite::of(&Sqe::decode(&bytes)).blocks, 8);
//! let answer = Cqe::new(sqe.cid, Status::SUCCESS);
//! assert_eq!(Cqe::decode(&answer.to_bytes()), answer);
//! ```
//!
//! Clauses are those of the NVM Express Base Specification 2.0 ("Base"), the NVM Command Set
//! Specification 1.0 ("NVM") and the NVMe/TCP Transport Specification 1.0 ("TCP").
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

/// An enum whose variants have numbers on the wire, and the way back from the number.
macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident: $repr:ty { $($(#[$vmeta:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr($repr)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)* }

        impl $name {
            /// Every variant, by rising value.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// The variant with this value.
            #[inline]
            pub const fn from_wire(value: $repr) -> Option<Self> {
                Some(match value {
                    $($value => $name::$variant,)*
                    _ => return None,
                })
            }

            /// Its value.
            #[inline]
            pub const fn to_wire(self) -> $repr {
                self as $repr
            }
        }
    };
}

pub mod admin;
pub mod aer;
pub mod cqe;
pub mod digest;
pub mod doorbell;
pub mod fabrics;
pub mod feature;
pub mod identify;
pub mod io;
pub mod log;
pub mod manage;
pub mod opcode;
pub mod queue;
pub mod registers;
pub mod reservation;
pub mod sqe;
pub mod tcp;
pub mod zone;

mod le;

pub use cqe::Cqe;
pub use sqe::{DataPointer, Sqe};

/// Namespace identifier that means every namespace (Base 2.0, section 3.2.1.2).
pub const NSID_ALL: u32 = 0xffff_ffff;

/// Why bytes are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Fewer bytes than the structure has.
    #[error("{what} is {got} bytes long, but {need} are needed")]
    Length {
        /// The structure.
        what: &'static str,
        /// Bytes that were there.
        got: usize,
        /// Bytes that it has.
        need: usize,
    },
    /// A reserved or impossible value.
    #[error("{what} at byte {at} has the value {value:#x}")]
    Value {
        /// The field.
        what: &'static str,
        /// Its first byte, counted from the start of the structure.
        at: u16,
        /// What was there.
        value: u64,
    },
}

impl DecodeError {
    pub(crate) const fn value(what: &'static str, at: u16, value: u64) -> Self {
        DecodeError::Value { what, at, value }
    }
}
