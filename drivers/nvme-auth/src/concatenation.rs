//! Secure channel concatenation: an exchange that generates a PSK of TLS (Base 2.1, section 8.3.4.5.9).

use wire_nvme::auth::{AuthFailure, AuthHash, AuthProtocol, Concatenation, DhGroup};
use zeroize::Zeroizing;

use crate::hash::{digest, hmac, is_hash_of_tls};
use crate::options::AuthOptions;
use crate::response::AuthParties;
use crate::tls_key::TlsPsk;

/// What a controller accepts of a host in AUTH_Negotiate (SC_C).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConcatenationRule {
    /// No concatenation: an I/O queue, or a connection that is to stay as it is.
    #[default]
    Refused,
    /// A new PSK alone: a connection without TLS, at an address that demands it.
    Required,
    /// None, or a PSK that replaces that of the connection, which was generated too.
    Replaces,
}

impl ConcatenationRule {
    /// What the host asks for.
    ///
    /// # Errors
    /// [`AuthFailure::ConcatenationMismatch`]: it is not accepted here, or unknown.
    pub(crate) fn check(self, sc_c: u8) -> Result<Concatenation, AuthFailure> {
        let accepted: &[Concatenation] = match self {
            ConcatenationRule::Refused => &[Concatenation::None],
            ConcatenationRule::Required => &[Concatenation::NewTlsPsk],
            ConcatenationRule::Replaces => &[Concatenation::None, Concatenation::ReplaceTlsPsk],
        };
        let asked = Concatenation::from_wire(sc_c).filter(|asked| accepted.contains(asked));
        asked.ok_or(AuthFailure::ConcatenationMismatch)
    }
}

impl AuthOptions {
    /// Those of the options with which a PSK can be generated: the null group has no session key.
    pub(crate) fn for_concatenation(&self, asked: Concatenation) -> AuthOptions {
        let mut options = self.clone();
        if asked != Concatenation::None {
            options.hashes.retain(|hash| is_hash_of_tls(*hash));
            options.groups.retain(|group| *group != DhGroup::Null);
        }
        options
    }

    /// The hash function and the group of an exchange, as a controller selects them: the strongest that both
    /// accept. For a PSK of TLS it is SHA-256, if both accept it: GnuTLS before 3.8.11, which many hosts'
    /// tlshd uses, knows no other.
    pub(crate) fn select(
        &self,
        protocol: &AuthProtocol,
        asked: Concatenation,
    ) -> Result<(AuthHash, DhGroup), AuthFailure> {
        let usable = self.for_concatenation(asked);
        let hash = match asked {
            Concatenation::None => usable.select_hash(&protocol.hashes),
            _ => usable.select_weakest_hash(&protocol.hashes),
        };
        let hash = hash.ok_or(AuthFailure::HashNotUsable)?;
        let group = usable.select_group(&protocol.groups).ok_or(AuthFailure::GroupNotUsable)?;
        Ok((hash, group))
    }
}

/// The PSK of TLS that both ends generate of the shared value of the group and their challenges. `None`
/// without a shared value, or with a hash function that TLS has not.
pub(crate) fn generate(
    hash: AuthHash,
    shared: Option<&[u8]>,
    challenges: [&[u8]; 2],
    parties: &AuthParties,
) -> Option<TlsPsk> {
    let session_key = digest(hash, shared?);
    let generated: Zeroizing<Vec<u8>> = hmac(hash, &session_key, &challenges);
    TlsPsk::generated(hash, &generated, &parties.hostnqn, &parties.subnqn)
}
