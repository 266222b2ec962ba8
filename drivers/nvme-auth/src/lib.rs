//! In-band authentication of NVMe, DH-HMAC-CHAP, for hosts and controllers (Base 2.0, section 8.13.5).
//! Sans-IO.
//!
//! An [`AuthKey`] is a secret of a host or a controller. [`HostAuth`] is the exchange of a host on one queue,
//! [`ControllerAuth`] that of a controller: each takes the messages of the other and makes those that answer.
//! Randomness comes from a [`Nonces`], time and queues are the caller's. A [`TlsKey`] is a pre-shared key of
//! TLS, and makes the [`TlsPsk`] of a host and a subsystem. An exchange with secure channel [`Concatenation`]
//! generates one.
//!
//! ```
//! use nvme_auth::{AuthKey, AuthKeys, AuthOptions, AuthParties, ControllerAuth, HostAction, HostAuth, SystemNonces};
//! use nvme_auth::{AuthStatus, Received};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let key = AuthKey::parse("DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:")?;
//! let keys = AuthKeys { host: key, controller: None };
//! let parties = AuthParties::new("nqn.2014-08.org.nvmexpress:h", "nqn.2026-11.io.ringbolt:a");
//! let options = AuthOptions { groups: vec![nvme_auth::DhGroup::Null], ..AuthOptions::default() };
//! let nonces = &mut SystemNonces;
//! let mut controller = ControllerAuth::new(keys.clone(), parties.clone(), options.clone());
//! let (mut host, negotiate) = HostAuth::new(keys, parties, &options, 1);
//! let mut message = negotiate;
//! while controller.status() == AuthStatus::Pending {
//!     controller.sent(&message, nonces);
//!     let Received::Message(answer) = controller.receive(4096) else { break };
//!     match host.receive(&answer, nonces) {
//!         HostAction::Send(next) => message = next,
//!         HostAction::Authenticated => break,
//!         other => panic!("{other:?}"),
//!     }
//! }
//! assert_eq!(controller.status(), AuthStatus::Authenticated);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod concatenation;
mod controller;
mod group;
mod hash;
mod host;
mod key;
mod nonces;
mod options;
mod response;
mod tls_key;

#[cfg(test)]
mod tests;

pub use concatenation::ConcatenationRule;
pub use controller::{AuthStatus, ControllerAuth, Received};
pub use host::{HostAction, HostAuth, HostAuthError, explain};
pub use key::{AuthKey, AuthKeyError, AuthKeys};
pub use nonces::{NoRandomness, Nonces, SystemNonces};
pub use options::{AuthOptions, AuthOptionsError};
pub use response::AuthParties;
pub use tls_key::{TlsDerivation, TlsIdentityVersion, TlsKey, TlsKeyError, TlsPsk};
pub use wire_nvme::auth::{AuthFailure, AuthHash, AuthMessageKind, Concatenation, DhGroup};
