//! The exchange on one queue, as a controller sees it.

use wire_nvme::auth::{
    AuthBody, AuthChallenge, AuthFailure, AuthHash, AuthMessage, AuthMessageKind, AuthNegotiate, AuthReply,
    Concatenation, DHCHAP, DhGroup, transaction_of,
};

use crate::concatenation::{ConcatenationRule, generate};
use crate::group::DhSecret;
use crate::key::AuthKeys;
use crate::nonces::{NoRandomness, Nonces};
use crate::options::AuthOptions;
use crate::response::{AuthParties, Challenge, Responder, is_equal};
use crate::tls_key::TlsPsk;

/// Where an exchange is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthStatus {
    /// It has not begun, or goes on.
    Pending,
    /// The host is authenticated, and has accepted the controller if it challenged it.
    Authenticated,
    /// It has failed for good: the connection is closed. The step is the kind of the message that was wrong,
    /// or that reported the failure.
    Failed(AuthMessageKind, AuthFailure),
}

/// The answer to an Authentication Receive command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// A message for the host. The command's data is longer; zeroes follow.
    Message(Vec<u8>),
    /// No message is due now.
    NotExpected,
    /// The message is longer than the host takes; it stays due.
    TooShort,
}

/// The exchange of a controller with a host on one queue (Base 2.0, section 8.13.5).
///
/// The transport passes the data of each Authentication Send command to [`sent`](Self::sent) and answers each
/// Authentication Receive command by [`receive`](Self::receive). A message that is wrong is answered with
/// AUTH_Failure1 by the next [`receive`](Self::receive), and then the exchange [has
/// failed](AuthStatus::Failed). A host may begin anew when it is authenticated; it stays so until that
/// exchange fails. An exchange takes at most 3 KiB, and two exponentiations in the selected group, which
/// block: 1 ms in ffdhe2048, some 20 ms in ffdhe8192.
///
/// With secure channel concatenation it also generates a PSK of TLS, which
/// [`take_generated`](Self::take_generated) returns when the host is authenticated.
pub struct ControllerAuth {
    keys: AuthKeys,
    parties: AuthParties,
    options: AuthOptions,
    concatenation: ConcatenationRule,
    transaction: u16,
    state: State,
    status: AuthStatus,
    generated: Option<TlsPsk>,
}

enum State {
    /// AUTH_Negotiate is the next message.
    Idle,
    /// The challenge is due.
    Challenge(Box<Pending>, Vec<u8>),
    /// The challenge was sent.
    Reply(Box<Pending>),
    /// The reply was right: Success1 is due. The host has challenged the controller, or not. The PSK is that
    /// of secure channel concatenation.
    Success1(Vec<u8>, bool, Option<Box<TlsPsk>>),
    /// The host verifies the controller's response.
    Success2(Option<Box<TlsPsk>>),
    /// AUTH_Failure1 is due.
    Failure1(AuthMessageKind, AuthFailure),
    Failed,
}

/// What a challenge is verified with.
struct Pending {
    hash: AuthHash,
    challenge: Vec<u8>,
    sequence: u32,
    dh: DhSecret,
    concatenation: Concatenation,
}

impl From<NoRandomness> for AuthFailure {
    fn from(_: NoRandomness) -> AuthFailure {
        AuthFailure::Failed
    }
}

impl ControllerAuth {
    /// An exchange that the host has not begun.
    pub fn new(keys: AuthKeys, parties: AuthParties, options: AuthOptions) -> ControllerAuth {
        let (state, status) = (State::Idle, AuthStatus::Pending);
        let concatenation = ConcatenationRule::default();
        ControllerAuth {
            keys,
            parties,
            options,
            concatenation,
            transaction: 0,
            state,
            status,
            generated: None,
        }
    }

    /// With another rule for secure channel concatenation than to refuse it.
    pub fn with_concatenation(self, concatenation: ConcatenationRule) -> ControllerAuth {
        ControllerAuth { concatenation, ..self }
    }

    /// The rule.
    pub fn concatenation(&self) -> ConcatenationRule {
        self.concatenation
    }

    /// The PSK that the last exchange generated, once.
    pub fn take_generated(&mut self) -> Option<TlsPsk> {
        self.generated.take()
    }

    /// Where it is.
    pub fn status(&self) -> AuthStatus {
        self.status
    }

    /// Takes other keys and options for the next exchange. One that goes on keeps what was computed already.
    pub fn set_keys(&mut self, keys: AuthKeys, options: AuthOptions) {
        (self.keys, self.options) = (keys, options);
    }

    /// Whether [`sent`](Self::sent) with this message computes an exponentiation.
    pub fn computes(&self, message: &[u8]) -> bool {
        let group = match (AuthMessageKind::of(message), &self.state) {
            (Some(AuthMessageKind::Reply), State::Reply(pending)) => Some(pending.dh.group()),
            (Some(AuthMessageKind::Negotiate), State::Idle) => match AuthMessage::decode(message) {
                Ok(AuthMessage { body: AuthBody::Negotiate(negotiate), .. }) => {
                    self.select(&negotiate).ok().map(|(_, group, _)| group)
                }
                _ => None,
            },
            _ => None,
        };
        group.is_some_and(|group| group != DhGroup::Null)
    }

    /// Whether an exchange has begun and not ended.
    pub fn is_in_progress(&self) -> bool {
        !matches!(self.state, State::Idle | State::Failed)
    }

    /// The message that was wrong and why, while AUTH_Failure1 is pending or after the exchange has failed.
    pub fn failure(&self) -> Option<(AuthMessageKind, AuthFailure)> {
        match (&self.state, self.status) {
            (State::Failure1(step, reason), _) => Some((*step, *reason)),
            (_, AuthStatus::Failed(step, reason)) => Some((step, reason)),
            _ => None,
        }
    }

    /// Takes a message of the host. One that is wrong is answered by [`receive`](Self::receive).
    pub fn sent(&mut self, message: &[u8], nonces: &mut dyn Nonces) {
        let state = std::mem::replace(&mut self.state, State::Failed);
        if matches!(state, State::Failed) {
            return;
        }
        let kind = AuthMessageKind::of(message);
        self.state = match (kind, state) {
            // A host that has begun an exchange may begin another only when the first has ended.
            (Some(AuthMessageKind::Negotiate), State::Idle) => {
                self.transaction = transaction_of(message);
                match self.negotiate(message, nonces) {
                    Ok(state) => state,
                    Err(reason) => State::Failure1(AuthMessageKind::Negotiate, reason),
                }
            }
            (Some(AuthMessageKind::Reply), State::Reply(pending)) => match self.reply(message, *pending) {
                Ok(state) => state,
                Err(reason) => State::Failure1(AuthMessageKind::Reply, reason),
            },
            (Some(AuthMessageKind::Success2), State::Success2(psk)) => match self.decode(message) {
                Ok(AuthBody::Success2) => {
                    self.succeed(psk);
                    State::Idle
                }
                Ok(_) => State::Failure1(AuthMessageKind::Success2, AuthFailure::IncorrectMessage),
                Err(reason) => State::Failure1(AuthMessageKind::Success2, reason),
            },
            // Some hosts send it though they have challenged nothing. They know what it would say already.
            (Some(AuthMessageKind::Success2), State::Idle) if self.status == AuthStatus::Authenticated => {
                State::Idle
            }
            (Some(AuthMessageKind::Failure2), _) => {
                let reason = match AuthMessage::decode(message).map(|message| message.body) {
                    Ok(AuthBody::Failure2(reason)) => reason,
                    _ => AuthFailure::IncorrectPayload,
                };
                self.status = AuthStatus::Failed(AuthMessageKind::Failure2, reason);
                State::Failed
            }
            (kind, State::Idle) => {
                self.transaction = transaction_of(message);
                unexpected(kind)
            }
            (kind, _) => unexpected(kind),
        };
    }

    /// The message for a host that takes `bytes_max` bytes.
    pub fn receive(&mut self, bytes_max: usize) -> Received {
        let length = match &self.state {
            State::Challenge(_, message) | State::Success1(message, ..) => message.len(),
            State::Failure1(..) => 8,
            _ => return Received::NotExpected,
        };
        if length > bytes_max {
            return Received::TooShort;
        }
        let (message, state) = match std::mem::replace(&mut self.state, State::Failed) {
            State::Challenge(pending, message) => (message, State::Reply(pending)),
            State::Success1(message, true, psk) => (message, State::Success2(psk)),
            State::Success1(message, false, psk) => {
                self.succeed(psk);
                (message, State::Idle)
            }
            State::Failure1(step, reason) => {
                self.status = AuthStatus::Failed(step, reason);
                let body = AuthBody::Failure1(reason);
                (AuthMessage { transaction: self.transaction, body }.encode(), State::Failed)
            }
            _ => return Received::NotExpected,
        };
        self.state = state;
        Received::Message(message)
    }

    fn succeed(&mut self, psk: Option<Box<TlsPsk>>) {
        self.status = AuthStatus::Authenticated;
        self.generated = psk.map(|psk| *psk);
    }

    /// What an exchange uses of what the host offers.
    fn select(&self, negotiate: &AuthNegotiate) -> Result<(AuthHash, DhGroup, Concatenation), AuthFailure> {
        let concatenation = self.concatenation.check(negotiate.concatenation)?;
        let protocol = negotiate.protocols.iter().find(|protocol| protocol.id == DHCHAP);
        let protocol = protocol.ok_or(AuthFailure::ProtocolNotUsable)?;
        let (hash, group) = self.options.select(protocol, concatenation)?;
        Ok((hash, group, concatenation))
    }

    /// Decodes a message of this exchange.
    fn decode<'a>(&self, message: &'a [u8]) -> Result<AuthBody<'a>, AuthFailure> {
        let message = AuthMessage::decode(message).map_err(|_| AuthFailure::IncorrectPayload)?;
        match message.transaction == self.transaction {
            true => Ok(message.body),
            false => Err(AuthFailure::IncorrectPayload),
        }
    }

    fn negotiate(&mut self, message: &[u8], nonces: &mut dyn Nonces) -> Result<State, AuthFailure> {
        let AuthBody::Negotiate(negotiate) = self.decode(message)? else {
            return Err(AuthFailure::IncorrectMessage);
        };
        let (hash, group, concatenation) = self.select(&negotiate)?;
        self.challenge(hash, group, concatenation, nonces)
    }

    fn challenge(
        &self,
        hash: AuthHash,
        group: DhGroup,
        concatenation: Concatenation,
        nonces: &mut dyn Nonces,
    ) -> Result<State, AuthFailure> {
        let mut challenge = vec![0; hash.bytes()];
        nonces.fill(&mut challenge)?;
        let sequence = nonces.sequence()?;
        let dh = DhSecret::new(group, nonces)?;
        let body = AuthBody::Challenge(AuthChallenge {
            hash,
            group,
            sequence,
            challenge: &challenge,
            dh_value: &dh.public,
        });
        let message = AuthMessage { transaction: self.transaction, body }.encode();
        Ok(State::Challenge(Box::new(Pending { hash, challenge, sequence, dh, concatenation }), message))
    }

    fn reply(&mut self, message: &[u8], pending: Pending) -> Result<State, AuthFailure> {
        let AuthBody::Reply(AuthReply { sequence, response, challenge, dh_value }) = self.decode(message)?
        else {
            return Err(AuthFailure::IncorrectMessage);
        };
        let Pending { hash, challenge: own, sequence: own_sequence, dh, concatenation } = pending;
        if response.len() != hash.bytes() {
            return Err(AuthFailure::IncorrectPayload);
        }
        let shared = dh.shared(dh_value).map_err(|_| AuthFailure::IncorrectPayload)?;
        let shared = shared.as_ref().map(|shared| shared.as_slice());
        let transaction = self.transaction;
        let c1 = Challenge { hash, value: &own, sequence: own_sequence, transaction, shared, concatenation };
        if !is_equal(response, &c1.response(Responder::Host, &self.keys.host, &self.parties)) {
            return Err(AuthFailure::Failed);
        }
        // A challenge that is this controller's own is reflected.
        if challenge.is_some_and(|value| is_equal(value, &own)) {
            return Err(AuthFailure::Failed);
        }
        let generated = match (concatenation, challenge) {
            (Concatenation::None, _) => None,
            (_, None) => return Err(AuthFailure::IncorrectPayload),
            (_, Some(value)) => {
                let psk = generate(hash, shared, [&own, value], &self.parties);
                Some(Box::new(psk.ok_or(AuthFailure::ConcatenationMismatch)?))
            }
        };
        // With sequence number 0 the challenge is for the generated PSK alone, and otherwise belongs to none.
        let Some(value) = challenge.filter(|_| sequence != 0 || generated.is_none()) else {
            let body = AuthBody::Success1(hash.bytes() as u8, None);
            return Ok(State::Success1(AuthMessage { transaction, body }.encode(), false, generated));
        };
        // Without a key the controller cannot prove anything.
        let key = self.keys.controller.as_ref().ok_or(AuthFailure::Failed)?;
        if sequence == 0 {
            return Err(AuthFailure::Failed);
        }
        let c2 = Challenge { hash, value, sequence, transaction, shared, concatenation };
        let response = c2.response(Responder::Controller, key, &self.parties);
        let body = AuthBody::Success1(hash.bytes() as u8, Some(&response));
        Ok(State::Success1(AuthMessage { transaction, body }.encode(), true, generated))
    }
}

/// A message of a kind that cannot come now, or of none.
fn unexpected(kind: Option<AuthMessageKind>) -> State {
    State::Failure1(kind.unwrap_or(AuthMessageKind::Negotiate), AuthFailure::IncorrectMessage)
}
