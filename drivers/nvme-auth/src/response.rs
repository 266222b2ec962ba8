//! What both ends compute: responses to challenges.

use subtle::ConstantTimeEq;
use wire_nvme::auth::{AuthHash, Concatenation};

use crate::hash::{HashValue, digest, hmac};
use crate::key::AuthKey;

/// The names of the two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthParties {
    /// NQN of the host.
    pub hostnqn: String,
    /// NQN of the subsystem.
    pub subnqn: String,
}

impl AuthParties {
    /// The two ends with these names.
    pub fn new(hostnqn: impl Into<String>, subnqn: impl Into<String>) -> AuthParties {
        AuthParties { hostnqn: hostnqn.into(), subnqn: subnqn.into() }
    }
}

/// The end that responds to a challenge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Responder {
    Host,
    Controller,
}

/// A challenge with its numbers.
pub(crate) struct Challenge<'a> {
    pub(crate) hash: AuthHash,
    /// C1 or C2.
    pub(crate) value: &'a [u8],
    /// S1 or S2.
    pub(crate) sequence: u32,
    pub(crate) transaction: u16,
    /// The shared value of the group; `None` for the null group.
    pub(crate) shared: Option<&'a [u8]>,
    /// What the host has asked for (SC_C), so that a peer in between cannot change it.
    pub(crate) concatenation: Concatenation,
}

impl Challenge<'_> {
    /// The response of an end (Base 2.0, section 8.13.5.4 and 8.13.5.5). Its label and the order of the names
    /// make the two ends' differ, so that a response cannot be reflected.
    pub(crate) fn response(&self, by: Responder, key: &AuthKey, parties: &AuthParties) -> HashValue {
        let (host, subsystem) = (parties.hostnqn.as_str(), parties.subnqn.as_str());
        let (label, own, other) = match by {
            Responder::Host => ("HostHost", host, subsystem),
            Responder::Controller => ("Controller", subsystem, host),
        };
        let augmented = self.shared.map(|shared| hmac(self.hash, &digest(self.hash, shared), &[self.value]));
        let value = augmented.as_ref().map_or(self.value, |augmented| augmented.as_slice());
        hmac(
            self.hash,
            &key.transformed(own),
            &[
                value,
                &self.sequence.to_le_bytes(),
                &self.transaction.to_le_bytes(),
                &[self.concatenation.to_wire()],
                label.as_bytes(),
                own.as_bytes(),
                &[0],
                other.as_bytes(),
            ],
        )
    }
}

/// Whether two values are equal, in a time that depends on their lengths only.
pub(crate) fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.ct_eq(other).into()
}
