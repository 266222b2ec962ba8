//! Messages of multicast DNS (RFC 6762), with the records of services (RFC 6763): a [`DnsMessage`] of
//! [`DnsQuestion`]s and [`DnsRecord`]s about [`DnsName`]s.
//!
//! Decoding is bounded by the message: a compressed name points backward only, and a message has at most
//! [`RECORDS_MAX`] questions and records. Encoding does not compress.
//!
//! ```
//! use wire_mdns::{DnsMessage, DnsQuestion, kind};
//! let name = "_nvme-disc._tcp.local".parse()?;
//! let questions = vec![DnsQuestion { name, kind: kind::PTR }];
//! let query = DnsMessage { questions, ..DnsMessage::default() };
//! assert_eq!(DnsMessage::decode(&query.encode())?, query);
//! # Ok::<(), wire_mdns::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod message;
mod name;

pub use codec::DecodeError;
pub use message::{DnsMessage, DnsQuestion, DnsRecord, MESSAGE_BYTES_MAX, RECORDS_MAX, RecordData, kind};
pub use name::{DnsName, LABEL_BYTES_MAX, NAME_BYTES_MAX};
