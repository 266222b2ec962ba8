//! NVMe encodings: queue entries, data structures and NVMe/TCP PDUs. No I/O and no protocol state.
//!
//! Every type is a struct of decoded fields with `decode` and `encode`. 0's based values are converted
//! when they are decoded and exist nowhere else; reserved and unknown values are errors. Queue entries
//! are the exception: a controller must complete even an invalid command, so [`Sqe::decode`] accepts any
//! 64 bytes and its accessors return errors.
//!
//! The three main types are [`Sqe`] (a command), [`Cqe`] (its completion) and [`tcp::CommonHeader`] (the
//! header of the NVMe/TCP PDUs that carry them).
//!
//! ```
//! use block_io::Status;
//! use wire_nvme::{Cqe, DataPointer, Sqe, io::ReadWrite, opcode::NvmOpcode};
//! let mut sqe = ReadWrite { lba: 8, blocks: 8, ..ReadWrite::default() }.to_sqe(NvmOpcode::Read);
//! sqe.cid = 7;
//! sqe.nsid = 1;
//! sqe.data = DataPointer::transport(4096);
//! let bytes = sqe.to_bytes();
//! assert_eq!(ReadWrite::from_sqe(&Sqe::decode(&bytes)).blocks, 8);
//! let completion = Cqe::new(sqe.cid, Status::SUCCESS);
//! assert_eq!(Cqe::decode(&completion.to_bytes()), completion);
//! ```
//!
//! Section numbers refer to the NVM Express Base Specification 2.0 ("Base"), the NVM Command Set
//! Specification 1.0 ("NVM") and the NVMe/TCP Transport Specification 1.0 ("TCP").
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

/// Defines an enum with wire values, and the conversion from a value.
macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident: $repr:ty { $($(#[$vmeta:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr($repr)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)* }

        impl $name {
            /// Every variant, in ascending order of value.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// The variant with this wire value; `None` if it is reserved or unknown.
            #[inline]
            pub const fn from_wire(value: $repr) -> Option<Self> {
                Some(match value {
                    $($value => $name::$variant,)*
                    _ => return None,
                })
            }

            /// The wire value.
            #[inline]
            pub const fn to_wire(self) -> $repr {
                self as $repr
            }
        }
    };
}

pub mod admin;
pub mod aer;
pub mod auth;
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
pub mod protection;
pub mod queue;
pub mod rdma;
pub mod registers;
pub mod reservation;
pub mod sqe;
pub mod tcp;
pub mod zone;

mod extended_protection;
mod guard;
mod le;
mod metadata_format;

pub use codec::DecodeError;
pub use cqe::Cqe;
pub use sqe::{DataPointer, Sqe};

/// Broadcast namespace identifier: all namespaces (Base 2.0, section 3.2.1.2).
pub const NSID_ALL: u32 = 0xffff_ffff;
