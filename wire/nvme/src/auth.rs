//! Messages of in-band authentication, and the commands that carry them (Base 2.0, sections 6.1, 6.2 and
//! 8.13.5).
//!
//! An Authentication Send command has a message of the host as its data, an Authentication Receive command
//! one of the controller's. [`AuthMessage`] is all messages of DH-HMAC-CHAP; [`AuthMessageKind`] is the kind
//! alone, by which a message that comes at the wrong time differs from one that is malformed.

use crate::le::{array_at, sized, u16_at, u32_at};
use crate::opcode::{FABRICS, FabricsType};
use crate::{DecodeError, Sqe};

/// Security protocol that the commands name: NVMe's own (Base 2.0, figure 370).
pub const SECURITY_PROTOCOL: u8 = 0xe9;
/// Both bytes of the security protocol specific field (SPSP0, SPSP1).
pub const SECURITY_PROTOCOL_SPECIFIC: u8 = 0x01;
/// Identifier of DH-HMAC-CHAP in a protocol descriptor (AUTHID).
pub const DHCHAP: u8 = 0x01;
/// Most bytes of a message that any implementation sends: a negotiation with 63 protocols, of which hosts
/// offer one, or a reply with the largest value of a group.
pub const AUTH_MESSAGE_MAX: usize = 4096;
/// Most identifiers of hashes, and of groups, in a protocol descriptor.
pub const IDENTIFIERS_MAX: usize = 30;
/// Most bytes of the value of a group: 8192 bits.
pub const DH_VALUE_MAX: usize = 1024;

const DESCRIPTOR_SIZE: usize = 64;
const NEGOTIATE_SIZE: usize = 8;
const FAILURE_SIZE: usize = 8;
const FIXED_SIZE: usize = 16;
/// AUTH_TYPE of messages that all protocols share, and of those of DH-HMAC-CHAP.
const COMMON: u8 = 0;
const OF_DHCHAP: u8 = 1;

wire_enum! {
    /// Hash functions (Base 2.0, figure 462).
    AuthHash: u8 {
        /// SHA-256.
        Sha256 = 1,
        /// SHA-384.
        Sha384 = 2,
        /// SHA-512.
        Sha512 = 3,
    }
}

wire_enum! {
    /// Diffie-Hellman groups (Base 2.0, figure 463), by RFC 7919.
    DhGroup: u8 {
        /// None: the challenge is not augmented.
        Null = 0,
        /// 2048 bits.
        Ffdhe2048 = 1,
        /// 3072 bits.
        Ffdhe3072 = 2,
        /// 4096 bits.
        Ffdhe4096 = 3,
        /// 6144 bits.
        Ffdhe6144 = 4,
        /// 8192 bits.
        Ffdhe8192 = 5,
    }
}

wire_enum! {
    /// Secure channel concatenation (SC_C; Base 2.1, section 8.3.4.5.2): what becomes of the session key.
    Concatenation: u8 {
        /// Nothing.
        None = 0,
        /// A PSK with which the host connects anew, with TLS.
        NewTlsPsk = 2,
        /// A PSK which replaces the one that the connection's TLS was established with.
        ReplaceTlsPsk = 3,
    }
}

wire_enum! {
    /// Why an authentication fails (Base 2.0, figure 470): the explanation of reason code 1.
    AuthFailure: u8 {
        /// The peer has not proved its identity.
        Failed = 0x01,
        /// No protocol that both have.
        ProtocolNotUsable = 0x02,
        /// Secure channel concatenation is not what the peer wants.
        ConcatenationMismatch = 0x03,
        /// No hash function that both have.
        HashNotUsable = 0x04,
        /// No group that both have.
        GroupNotUsable = 0x05,
        /// A message has wrong contents.
        IncorrectPayload = 0x06,
        /// A message that cannot come now.
        IncorrectMessage = 0x07,
    }
}

impl AuthHash {
    /// Bytes of a value of the function.
    pub const fn bytes(self) -> usize {
        match self {
            AuthHash::Sha256 => 32,
            AuthHash::Sha384 => 48,
            AuthHash::Sha512 => 64,
        }
    }
}

impl DhGroup {
    /// Bytes of a value of the group; 0 for [`Null`](Self::Null).
    pub const fn bytes(self) -> usize {
        match self {
            DhGroup::Null => 0,
            DhGroup::Ffdhe2048 => 256,
            DhGroup::Ffdhe3072 => 384,
            DhGroup::Ffdhe4096 => 512,
            DhGroup::Ffdhe6144 => 768,
            DhGroup::Ffdhe8192 => 1024,
        }
    }
}

/// An Authentication Send or Receive command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthCommand {
    /// Security protocol (SECP).
    pub protocol: u8,
    /// Protocol specific (SPSP0, SPSP1).
    pub specific: [u8; 2],
    /// Bytes of the message, or most bytes of it that the host takes (TL, AL).
    pub length_bytes: u32,
}

impl AuthCommand {
    /// A command for a message of DH-HMAC-CHAP.
    pub const fn new(length_bytes: u32) -> AuthCommand {
        let specific = [SECURITY_PROTOCOL_SPECIFIC; 2];
        AuthCommand { protocol: SECURITY_PROTOCOL, specific, length_bytes }
    }

    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> AuthCommand {
        let [_, spsp0, spsp1, protocol] = sqe.cdw10.to_le_bytes();
        AuthCommand { protocol, specific: [spsp0, spsp1], length_bytes: sqe.cdw11 }
    }

    /// Whether it is for NVMe's own protocols.
    pub fn is_of_nvme(&self) -> bool {
        self.protocol == SECURITY_PROTOCOL && self.specific == [SECURITY_PROTOCOL_SPECIFIC; 2]
    }

    /// Encodes Authentication Send; CID and data pointer are left to the caller.
    pub fn to_send(&self) -> Sqe {
        self.to_sqe(FabricsType::AuthenticationSend)
    }

    /// Encodes Authentication Receive; CID and data pointer are left to the caller.
    pub fn to_receive(&self) -> Sqe {
        self.to_sqe(FabricsType::AuthenticationReceive)
    }

    fn to_sqe(self, kind: FabricsType) -> Sqe {
        let cdw10 = u32::from_le_bytes([0, self.specific[0], self.specific[1], self.protocol]);
        Sqe { nsid: kind.to_wire().into(), cdw10, cdw11: self.length_bytes, ..Sqe::new(FABRICS) }
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthMessageKind {
    /// AUTH_Negotiate, the host's first.
    Negotiate,
    /// DH-HMAC-CHAP_Challenge.
    Challenge,
    /// DH-HMAC-CHAP_Reply.
    Reply,
    /// DH-HMAC-CHAP_Success1, of the controller.
    Success1,
    /// DH-HMAC-CHAP_Success2, of the host.
    Success2,
    /// AUTH_Failure1, of the controller.
    Failure1,
    /// AUTH_Failure2, of the host.
    Failure2,
}

impl AuthMessageKind {
    const ALL: [(AuthMessageKind, [u8; 2]); 7] = [
        (AuthMessageKind::Negotiate, [COMMON, 0x00]),
        (AuthMessageKind::Challenge, [OF_DHCHAP, 0x01]),
        (AuthMessageKind::Reply, [OF_DHCHAP, 0x02]),
        (AuthMessageKind::Success1, [OF_DHCHAP, 0x03]),
        (AuthMessageKind::Success2, [OF_DHCHAP, 0x04]),
        (AuthMessageKind::Failure2, [COMMON, 0xf0]),
        (AuthMessageKind::Failure1, [COMMON, 0xf1]),
    ];

    /// The kind of a message by its first two bytes (AUTH_TYPE, AUTH_ID); `None` for one that DH-HMAC-CHAP
    /// does not have.
    pub fn of(message: &[u8]) -> Option<AuthMessageKind> {
        let start: [u8; 2] = *message.first_chunk()?;
        Self::ALL.iter().find(|(_, bytes)| *bytes == start).map(|(kind, _)| *kind)
    }

    /// The name in the specification.
    pub const fn name(self) -> &'static str {
        match self {
            AuthMessageKind::Negotiate => "AUTH_Negotiate",
            AuthMessageKind::Challenge => "DH-HMAC-CHAP_Challenge",
            AuthMessageKind::Reply => "DH-HMAC-CHAP_Reply",
            AuthMessageKind::Success1 => "DH-HMAC-CHAP_Success1",
            AuthMessageKind::Success2 => "DH-HMAC-CHAP_Success2",
            AuthMessageKind::Failure1 => "AUTH_Failure1",
            AuthMessageKind::Failure2 => "AUTH_Failure2",
        }
    }

    fn start(self) -> [u8; 2] {
        let found = Self::ALL.iter().find(|(kind, _)| *kind == self);
        found.map_or([0; 2], |(_, bytes)| *bytes)
    }
}

/// A protocol that the host offers. Identifiers are as they were sent: a host may have hashes and groups that
/// this crate does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthProtocol {
    /// [`DHCHAP`] or another.
    pub id: u8,
    /// Hash functions; at most [`IDENTIFIERS_MAX`].
    pub hashes: Vec<u8>,
    /// Groups; at most [`IDENTIFIERS_MAX`].
    pub groups: Vec<u8>,
}

/// AUTH_Negotiate (Base 2.0, section 8.13.5.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthNegotiate {
    /// Secure channel concatenation (SC_C), a [`Concatenation`] or another.
    pub concatenation: u8,
    /// The protocols; at most 255.
    pub protocols: Vec<AuthProtocol>,
}

/// DH-HMAC-CHAP_Challenge (Base 2.0, section 8.13.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthChallenge<'a> {
    /// The hash function.
    pub hash: AuthHash,
    /// The group.
    pub group: DhGroup,
    /// Sequence number (S1).
    pub sequence: u32,
    /// The challenge (C1), as long as a value of the hash function.
    pub challenge: &'a [u8],
    /// The controller's value of the group, as long as the group's values are.
    pub dh_value: &'a [u8],
}

/// DH-HMAC-CHAP_Reply (Base 2.0, section 8.13.5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthReply<'a> {
    /// Sequence number (S2); 0 without a challenge, and with one that is for the generated PSK alone.
    pub sequence: u32,
    /// The host's response (R1).
    pub response: &'a [u8],
    /// The host's challenge (C2); `None` if neither the controller has to authenticate nor a PSK is
    /// generated.
    pub challenge: Option<&'a [u8]>,
    /// The host's value of the group.
    pub dh_value: &'a [u8],
}

/// A message with its transaction identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthMessage<'a> {
    /// Transaction identifier (T_ID), the same in all messages of an authentication.
    pub transaction: u16,
    /// The rest.
    pub body: AuthBody<'a>,
}

/// What a message has besides its transaction identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthBody<'a> {
    /// AUTH_Negotiate.
    Negotiate(AuthNegotiate),
    /// DH-HMAC-CHAP_Challenge.
    Challenge(AuthChallenge<'a>),
    /// DH-HMAC-CHAP_Reply.
    Reply(AuthReply<'a>),
    /// DH-HMAC-CHAP_Success1 (Base 2.0, section 8.13.5.5), with the hash function's length in bytes and the
    /// controller's response (R2) if the host has challenged it.
    Success1(u8, Option<&'a [u8]>),
    /// DH-HMAC-CHAP_Success2 (Base 2.0, section 8.13.5.6).
    Success2,
    /// AUTH_Failure1 (Base 2.0, section 8.13.5.7).
    Failure1(AuthFailure),
    /// AUTH_Failure2 (Base 2.0, section 8.13.5.8).
    Failure2(AuthFailure),
}

/// The transaction identifier of a message that need not be valid otherwise; 0 if it is too short.
pub fn transaction_of(message: &[u8]) -> u16 {
    message.get(..6).map_or(0, |message| u16_at(message, 4))
}

/// Reads `length` bytes at `at` of a message that ends behind them or later.
fn part<'a>(what: &'static str, from: &'a [u8], at: usize, length: usize) -> Result<&'a [u8], DecodeError> {
    let need = at + length;
    from.get(at..need).ok_or(DecodeError::Length { what, got: from.len(), need })
}

fn hash_length(from: &[u8], at: usize) -> Result<usize, DecodeError> {
    let length = usize::from(from[at]);
    let is_of_hash = AuthHash::ALL.iter().any(|hash| hash.bytes() == length);
    is_of_hash.then_some(length).ok_or(DecodeError::value("hash length (HL)", at as u32, length as u64))
}

fn flag(what: &'static str, from: &[u8], at: usize) -> Result<bool, DecodeError> {
    match from[at] {
        0 => Ok(false),
        1 => Ok(true),
        value => Err(DecodeError::value(what, at as u32, value.into())),
    }
}

fn dh_length(from: &[u8]) -> Result<usize, DecodeError> {
    let length = usize::from(u16_at(from, 10));
    let is_of_group = DhGroup::ALL.iter().any(|group| group.bytes() == length);
    is_of_group.then_some(length).ok_or(DecodeError::value("length of a value (DHVLEN)", 10, length as u64))
}

impl<'a> AuthMessage<'a> {
    /// Decodes a message. Bytes behind it are ignored: a controller fills the host's buffer.
    ///
    /// # Errors
    /// It is too short, of an unknown kind, or a field has a value that is reserved or contradicts another.
    pub fn decode(from: &'a [u8]) -> Result<AuthMessage<'a>, DecodeError> {
        let header = sized::<FAILURE_SIZE>("authentication message", from)?;
        let kind = AuthMessageKind::of(header);
        let kind = kind.ok_or(DecodeError::value("authentication message", 0, u16_at(header, 0).into()))?;
        let body = match kind {
            AuthMessageKind::Negotiate => AuthBody::Negotiate(AuthNegotiate::decode(from)?),
            AuthMessageKind::Challenge => AuthBody::Challenge(AuthChallenge::decode(from)?),
            AuthMessageKind::Reply => AuthBody::Reply(AuthReply::decode(from)?),
            AuthMessageKind::Success1 => {
                let fixed = sized::<FIXED_SIZE>("DH-HMAC-CHAP_Success1", from)?;
                let length = hash_length(fixed, 6)?;
                let has_response = flag("response valid (RVALID)", fixed, 8)?;
                let response = has_response.then(|| part("DH-HMAC-CHAP_Success1", from, FIXED_SIZE, length));
                AuthBody::Success1(length as u8, response.transpose()?)
            }
            AuthMessageKind::Success2 => {
                sized::<FIXED_SIZE>("DH-HMAC-CHAP_Success2", from)?;
                AuthBody::Success2
            }
            AuthMessageKind::Failure1 => AuthBody::Failure1(failure(header)?),
            AuthMessageKind::Failure2 => AuthBody::Failure2(failure(header)?),
        };
        Ok(AuthMessage { transaction: u16_at(header, 4), body })
    }

    /// Encodes the message.
    ///
    /// # Panics
    /// If a value is longer than its length field can say, or a reply's response and challenge differ in
    /// length.
    pub fn encode(&self) -> Vec<u8> {
        let mut into = self.kind().start().to_vec();
        into.extend([0; 2]);
        into.extend(self.transaction.to_le_bytes());
        match &self.body {
            AuthBody::Negotiate(negotiate) => negotiate.encode(&mut into),
            AuthBody::Challenge(challenge) => challenge.encode(&mut into),
            AuthBody::Reply(reply) => reply.encode(&mut into),
            AuthBody::Success1(length, response) => {
                into.extend([*length, 0, u8::from(response.is_some())]);
                into.resize(FIXED_SIZE, 0);
                into.extend(response.unwrap_or_default());
            }
            AuthBody::Success2 => into.resize(FIXED_SIZE, 0),
            // Reason code 1: the authentication failed.
            AuthBody::Failure1(reason) | AuthBody::Failure2(reason) => into.extend([1, reason.to_wire()]),
        }
        into
    }

    /// Its kind.
    pub fn kind(&self) -> AuthMessageKind {
        match self.body {
            AuthBody::Negotiate(_) => AuthMessageKind::Negotiate,
            AuthBody::Challenge(_) => AuthMessageKind::Challenge,
            AuthBody::Reply(_) => AuthMessageKind::Reply,
            AuthBody::Success1(..) => AuthMessageKind::Success1,
            AuthBody::Success2 => AuthMessageKind::Success2,
            AuthBody::Failure1(_) => AuthMessageKind::Failure1,
            AuthBody::Failure2(_) => AuthMessageKind::Failure2,
        }
    }
}

fn failure(from: &[u8; FAILURE_SIZE]) -> Result<AuthFailure, DecodeError> {
    if from[6] != 1 {
        return Err(DecodeError::value("reason code", 6, from[6].into()));
    }
    let reason = AuthFailure::from_wire(from[7]);
    reason.ok_or(DecodeError::value("reason code explanation", 7, from[7].into()))
}

impl AuthNegotiate {
    fn decode(from: &[u8]) -> Result<AuthNegotiate, DecodeError> {
        const WHAT: &str = "AUTH_Negotiate";
        let header = sized::<NEGOTIATE_SIZE>(WHAT, from)?;
        let count = usize::from(header[7]);
        let descriptors = part(WHAT, from, NEGOTIATE_SIZE, count * DESCRIPTOR_SIZE)?;
        let mut protocols = Vec::with_capacity(count);
        for (index, one) in descriptors.chunks_exact(DESCRIPTOR_SIZE).enumerate() {
            let at = (NEGOTIATE_SIZE + index * DESCRIPTOR_SIZE) as u32;
            let one: [u8; DESCRIPTOR_SIZE] = array_at(one, 0);
            let list = |length_at: usize, list_at: usize| match usize::from(one[length_at]) {
                length @ ..=IDENTIFIERS_MAX => Ok(one[list_at..list_at + length].to_vec()),
                length => {
                    Err(DecodeError::value("number of identifiers", at + length_at as u32, length as u64))
                }
            };
            let (hashes, groups) = match one[0] {
                DHCHAP => (list(2, 4)?, list(3, 34)?),
                _ => Default::default(),
            };
            protocols.push(AuthProtocol { id: one[0], hashes, groups });
        }
        Ok(AuthNegotiate { concatenation: header[6], protocols })
    }

    fn encode(&self, into: &mut Vec<u8>) {
        let count = u8::try_from(self.protocols.len()).expect("at most 255 protocols");
        into.extend([self.concatenation, count]);
        for AuthProtocol { id, hashes, groups } in &self.protocols {
            let (halen, dhlen) = (hashes.len(), groups.len());
            assert!(halen.max(dhlen) <= IDENTIFIERS_MAX, "{halen} hashes, {dhlen} groups");
            let mut one = [0; DESCRIPTOR_SIZE];
            one[..4].copy_from_slice(&[*id, 0, halen as u8, dhlen as u8]);
            one[4..4 + halen].copy_from_slice(hashes);
            one[34..34 + dhlen].copy_from_slice(groups);
            into.extend(one);
        }
    }
}

impl<'a> AuthChallenge<'a> {
    fn decode(from: &'a [u8]) -> Result<AuthChallenge<'a>, DecodeError> {
        const WHAT: &str = "DH-HMAC-CHAP_Challenge";
        let fixed = sized::<FIXED_SIZE>(WHAT, from)?;
        let length = hash_length(fixed, 6)?;
        let hash = AuthHash::from_wire(fixed[8]).filter(|hash| hash.bytes() == length);
        let hash = hash.ok_or(DecodeError::value("hash function (HASHID)", 8, fixed[8].into()))?;
        let dh_bytes = dh_length(fixed)?;
        let group = DhGroup::from_wire(fixed[9]).filter(|group| group.bytes() == dh_bytes);
        let group = group.ok_or(DecodeError::value("group (DHGID)", 9, fixed[9].into()))?;
        Ok(AuthChallenge {
            hash,
            group,
            sequence: u32_at(fixed, 12),
            challenge: part(WHAT, from, FIXED_SIZE, length)?,
            dh_value: part(WHAT, from, FIXED_SIZE + length, dh_bytes)?,
        })
    }

    fn encode(&self, into: &mut Vec<u8>) {
        into.extend([self.challenge.len() as u8, 0, self.hash.to_wire(), self.group.to_wire()]);
        into.extend(dh_bytes(self.dh_value).to_le_bytes());
        into.extend(self.sequence.to_le_bytes());
        into.extend(self.challenge);
        into.extend(self.dh_value);
    }
}

impl<'a> AuthReply<'a> {
    fn decode(from: &'a [u8]) -> Result<AuthReply<'a>, DecodeError> {
        const WHAT: &str = "DH-HMAC-CHAP_Reply";
        let fixed = sized::<FIXED_SIZE>(WHAT, from)?;
        let length = hash_length(fixed, 6)?;
        let has_challenge = flag("challenge valid (CVALID)", fixed, 8)?;
        // The field of the challenge is there in either case.
        let challenge = part(WHAT, from, FIXED_SIZE + length, length)?;
        Ok(AuthReply {
            sequence: u32_at(fixed, 12),
            response: part(WHAT, from, FIXED_SIZE, length)?,
            challenge: has_challenge.then_some(challenge),
            dh_value: part(WHAT, from, FIXED_SIZE + 2 * length, dh_length(fixed)?)?,
        })
    }

    fn encode(&self, into: &mut Vec<u8>) {
        let length = self.response.len();
        into.extend([length as u8, 0, u8::from(self.challenge.is_some()), 0]);
        into.extend(dh_bytes(self.dh_value).to_le_bytes());
        into.extend(self.sequence.to_le_bytes());
        into.extend(self.response);
        let end = into.len() + length;
        into.extend(self.challenge.unwrap_or_default());
        assert!(self.challenge.is_none() || into.len() == end, "a challenge is as long as a response");
        into.resize(end, 0);
        into.extend(self.dh_value);
    }
}

fn dh_bytes(value: &[u8]) -> u16 {
    u16::try_from(value.len()).expect("a value of a group has at most 1024 bytes")
}

#[cfg(test)]
mod tests;
