//! The exchange on one queue, as a host sees it.

use wire_nvme::auth::{
    AuthBody, AuthChallenge, AuthFailure, AuthHash, AuthMessage, AuthMessageKind, AuthNegotiate,
    AuthProtocol, AuthReply, Concatenation, DHCHAP,
};

use crate::concatenation::generate;
use crate::group::DhSecret;
use crate::hash::HashValue;
use crate::key::AuthKeys;
use crate::nonces::Nonces;
use crate::options::AuthOptions;
use crate::response::{AuthParties, Challenge, Responder, is_equal};
use crate::tls_key::TlsPsk;

/// Why a host is not authenticated, or does not accept the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostAuthError {
    /// The controller has sent AUTH_Failure1.
    #[error("the controller rejects the host: {}", explain(*.0))]
    Rejected(AuthFailure),
    /// The host has found a message of the controller wrong.
    #[error("{} of the controller: {}", .0.name(), explain(*.1))]
    Refused(AuthMessageKind, AuthFailure),
    /// The controller's response does not prove that it has its key.
    #[error("the controller has not proved that it has its key")]
    ControllerNotProven,
}

/// A failure as it is said to users.
pub fn explain(reason: AuthFailure) -> &'static str {
    match reason {
        AuthFailure::Failed => "the keys do not match",
        AuthFailure::ProtocolNotUsable => "DH-HMAC-CHAP is not offered",
        AuthFailure::ConcatenationMismatch => "secure channel concatenation is not possible",
        AuthFailure::HashNotUsable => "no digest is accepted by both",
        AuthFailure::GroupNotUsable => "no group is accepted by both",
        AuthFailure::IncorrectPayload => "a message has wrong contents",
        AuthFailure::IncorrectMessage => "a message came at the wrong time",
    }
}

/// What a host does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostAction {
    /// Send this message, and then receive the controller's.
    Send(Vec<u8>),
    /// Send this message; then the exchange has ended well.
    SendLast(Vec<u8>),
    /// The exchange has ended well.
    Authenticated,
    /// The exchange has failed. The message is sent first, if there is one, and then the queue is closed.
    Failed(HostAuthError, Option<Vec<u8>>),
}

/// The exchange of a host with a controller on one queue (Base 2.0, section 8.13.5).
///
/// [`new`](Self::new) makes the first message. After each one that it sends, the host receives one and passes
/// it to [`receive`](Self::receive), which says what follows. With secure channel concatenation
/// ([`concatenating`](Self::concatenating)) it has a PSK of TLS afterwards.
pub struct HostAuth {
    keys: AuthKeys,
    parties: AuthParties,
    options: AuthOptions,
    concatenation: Concatenation,
    transaction: u16,
    state: State,
    generated: Option<TlsPsk>,
}

enum State {
    Challenge,
    /// The function's length, the response that the controller has to give, and the generated PSK.
    Success1(AuthHash, Option<HashValue>, Option<Box<TlsPsk>>),
    Ended,
}

impl HostAuth {
    /// Begins an exchange. `transaction` is another number for each exchange of an association. Returns it
    /// with its first message.
    pub fn new(
        keys: AuthKeys,
        parties: AuthParties,
        options: &AuthOptions,
        transaction: u16,
    ) -> (HostAuth, Vec<u8>) {
        HostAuth::concatenating(keys, parties, options, transaction, Concatenation::None)
    }

    /// Begins an exchange that generates a PSK of TLS, unless `concatenation` is none. Of `options` it uses
    /// those for which there is one: not SHA-512, and not the null group.
    pub fn concatenating(
        keys: AuthKeys,
        parties: AuthParties,
        options: &AuthOptions,
        transaction: u16,
        concatenation: Concatenation,
    ) -> (HostAuth, Vec<u8>) {
        let options = options.for_concatenation(concatenation);
        let protocol = AuthProtocol {
            id: DHCHAP,
            hashes: options.hashes.iter().map(|hash| hash.to_wire()).collect(),
            groups: options.groups.iter().map(|group| group.to_wire()).collect(),
        };
        let negotiate = AuthNegotiate { concatenation: concatenation.to_wire(), protocols: vec![protocol] };
        let message = AuthMessage { transaction, body: AuthBody::Negotiate(negotiate) }.encode();
        let (state, generated) = (State::Challenge, None);
        (HostAuth { keys, parties, options, concatenation, transaction, state, generated }, message)
    }

    /// The PSK that an exchange which has ended well has generated, once.
    pub fn take_generated(&mut self) -> Option<TlsPsk> {
        self.generated.take()
    }

    /// Takes a message of the controller.
    pub fn receive(&mut self, message: &[u8], nonces: &mut dyn Nonces) -> HostAction {
        let state = std::mem::replace(&mut self.state, State::Ended);
        let kind = AuthMessageKind::of(message);
        let decoded = AuthMessage::decode(message).ok();
        let decoded = decoded.filter(|message| message.transaction == self.transaction);
        let handled = match (kind, state) {
            (Some(AuthMessageKind::Failure1), _) => {
                let reason = match decoded.map(|message| message.body) {
                    Some(AuthBody::Failure1(reason)) => reason,
                    _ => AuthFailure::IncorrectPayload,
                };
                return HostAction::Failed(HostAuthError::Rejected(reason), None);
            }
            (Some(AuthMessageKind::Challenge), State::Challenge) => match decoded.map(|one| one.body) {
                Some(AuthBody::Challenge(challenge)) => self.challenge(&challenge, nonces),
                _ => Err(AuthFailure::IncorrectPayload),
            },
            (Some(AuthMessageKind::Success1), State::Success1(hash, expected, psk)) => {
                match decoded.map(|one| one.body) {
                    Some(AuthBody::Success1(length, response)) if usize::from(length) == hash.bytes() => {
                        return self.success(response, expected, psk);
                    }
                    _ => Err(AuthFailure::IncorrectPayload),
                }
            }
            _ => Err(AuthFailure::IncorrectMessage),
        };
        handled.unwrap_or_else(|reason| {
            let kind = kind.unwrap_or(AuthMessageKind::Challenge);
            self.fail(HostAuthError::Refused(kind, reason), reason)
        })
    }

    fn fail(&self, error: HostAuthError, reason: AuthFailure) -> HostAction {
        let body = AuthBody::Failure2(reason);
        HostAction::Failed(error, Some(AuthMessage { transaction: self.transaction, body }.encode()))
    }

    fn challenge(
        &mut self,
        message: &AuthChallenge<'_>,
        nonces: &mut dyn Nonces,
    ) -> Result<HostAction, AuthFailure> {
        let AuthChallenge { hash, group, sequence, challenge, dh_value } = *message;
        if !self.options.hashes.contains(&hash) {
            return Err(AuthFailure::HashNotUsable);
        }
        if !self.options.groups.contains(&group) {
            return Err(AuthFailure::GroupNotUsable);
        }
        let dh = DhSecret::new(group, nonces)?;
        let shared = dh.shared(dh_value).map_err(|_| AuthFailure::IncorrectPayload)?;
        let shared = shared.as_ref().map(|shared| shared.as_slice());
        let transaction = self.transaction;
        let concatenation = self.concatenation;
        let c1 = Challenge { hash, value: challenge, sequence, transaction, shared, concatenation };
        let response = c1.response(Responder::Host, &self.keys.host, &self.parties);
        let (mut own, mut own_sequence, mut expected) = (None, 0, None);
        if self.keys.controller.is_some() || concatenation != Concatenation::None {
            let mut value = vec![0; hash.bytes()];
            nonces.fill(&mut value)?;
            if let Some(key) = &self.keys.controller {
                own_sequence = nonces.sequence()?;
                let sequence = own_sequence;
                let c2 = Challenge { hash, value: &value, sequence, transaction, shared, concatenation };
                expected = Some(c2.response(Responder::Controller, key, &self.parties));
            }
            own = Some(value);
        }
        let psk = match own.as_ref().filter(|_| concatenation != Concatenation::None) {
            Some(own) => {
                let psk = generate(hash, shared, [challenge, own], &self.parties);
                Some(Box::new(psk.ok_or(AuthFailure::ConcatenationMismatch)?))
            }
            None => None,
        };
        self.state = State::Success1(hash, expected, psk);
        let body = AuthBody::Reply(AuthReply {
            sequence: own_sequence,
            response: &response,
            challenge: own.as_deref(),
            dh_value: &dh.public,
        });
        Ok(HostAction::Send(AuthMessage { transaction, body }.encode()))
    }

    fn success(
        &mut self,
        response: Option<&[u8]>,
        expected: Option<HashValue>,
        psk: Option<Box<TlsPsk>>,
    ) -> HostAction {
        let is_mutual = expected.is_some();
        if expected.is_some_and(|expected| !response.is_some_and(|response| is_equal(response, &expected))) {
            return self.fail(HostAuthError::ControllerNotProven, AuthFailure::Failed);
        }
        self.generated = psk.map(|psk| *psk);
        match is_mutual {
            false => HostAction::Authenticated,
            true => {
                let message = AuthMessage { transaction: self.transaction, body: AuthBody::Success2 };
                HostAction::SendLast(message.encode())
            }
        }
    }
}
