//! Services on the local network, by multicast DNS (RFC 6762) and DNS-based service discovery (RFC 6763) over
//! IPv4: a [`Publisher`] announces [`MdnsService`]s, a [`Discovery`] reports [`FoundService`]s.
//!
//! [`Responder`] and [`Browser`] are the protocol, without a socket and with a clock in milliseconds. A
//! publisher or a discovery runs one on a thread with a socket on port 5353, which other programs of the
//! machine may use too. Answers are multicast only, each service at most once a second, so that questions
//! with a forged source cost the local network little.
//!
//! ```
//! use mdns::{Browser, MdnsService, Responder};
//! let address = [192, 0, 2, 1].into();
//! let service = MdnsService::new("_nvme-disc._tcp", "one", "host-a", address, 8009, &["p=tcp"])?;
//! let mut responder = Responder::new(vec![service], 7);
//! let mut browser = Browser::new("_nvme-disc._tcp")?;
//! let query = browser.poll(0).expect("the first query is due");
//! responder.receive(&query, 0);
//! let answers = responder.poll(1000);
//! let found = browser.receive(&answers[0].1, 1000);
//! assert_eq!((found[0].port, found[0].attribute("P")), (8009, Some("tcp")));
//! # Ok::<(), mdns::MdnsError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod browser;
mod interfaces;
mod responder;
mod service;
mod socket;

pub use browser::{Browser, FoundService};
pub use interfaces::local_addresses;
pub use responder::{MdnsService, Responder};
pub use service::{Discovery, Publisher};

use wire_mdns::{DecodeError, DnsName};

/// Why a service cannot be published or browsed for.
#[derive(Debug)]
pub enum MdnsError {
    /// A name is not one of DNS.
    Name(DecodeError),
    /// The socket or the thread cannot be made.
    System(std::io::Error),
}

impl std::fmt::Display for MdnsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MdnsError::Name(error) => write!(f, "not a name of DNS: {error}"),
            MdnsError::System(error) => write!(f, "multicast DNS on port {}: {error}", socket::PORT),
        }
    }
}

impl std::error::Error for MdnsError {}

impl From<DecodeError> for MdnsError {
    fn from(error: DecodeError) -> MdnsError {
        MdnsError::Name(error)
    }
}

impl From<std::io::Error> for MdnsError {
    fn from(error: std::io::Error) -> MdnsError {
        MdnsError::System(error)
    }
}

/// The name of a type of service such as `_nvme-disc._tcp`, in the domain `local`.
fn service_kind(text: &str) -> Result<DnsName, DecodeError> {
    let text = text.trim_end_matches('.');
    let kind = match text.rsplit_once('.') {
        Some((kind, domain)) if domain.eq_ignore_ascii_case("local") => kind,
        _ => text,
    };
    format!("{kind}.local").parse()
}
