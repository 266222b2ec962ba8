//! The first bytes of a connection: both ends prove that they know the cluster's key, or a client's key.

use std::fmt;

use codec::{DecodeError, next_field, put_field};

use crate::{MESSAGE_VERSION, ReplicaId};

const MAGIC: [u8; 4] = *b"RBGR";
/// The sender of a client.
const CLIENT: u32 = u32::MAX;

/// What a greeting is. A connection has one of each, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GreetingKind {
    /// From the end that connects: its nonce.
    Hello = 1,
    /// From the end that accepts: its nonce, and its proof.
    Challenge = 2,
    /// From the end that connects: its proof.
    Proof = 3,
}

impl GreetingKind {
    /// Every kind.
    pub const ALL: [GreetingKind; 3] = [GreetingKind::Hello, GreetingKind::Challenge, GreetingKind::Proof];
}

/// The name of a client's key: 1 to 32 letters, digits, `-`, `_` and `.` of ASCII.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyName([u8; KeyName::SIZE]);

impl KeyName {
    /// Size of an encoded name, which zeroes follow.
    pub const SIZE: usize = 32;

    /// A name; `None` if it is none.
    pub fn new(name: &str) -> Option<KeyName> {
        let mut bytes = [0; KeyName::SIZE];
        bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        KeyName::decode(bytes)
    }

    fn decode(bytes: [u8; KeyName::SIZE]) -> Option<KeyName> {
        let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        let length = bytes.iter().position(|byte| !is_allowed(byte)).unwrap_or(bytes.len());
        (length > 0 && bytes[length..].iter().all(|byte| *byte == 0)).then_some(KeyName(bytes))
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        let length = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        str::from_utf8(&self.0[..length]).expect("a name is ASCII")
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// A message before the first [`FrameHeader`](crate::FrameHeader) of a connection.
///
/// A proof is the HMAC-SHA-256, with the cluster's key or that of the client which the Hello names, of a label (`acceptor` or
/// `connector`) and the bytes of the Hello and of the Challenge, the proof in it taken as zero.
///
/// The name is where the proof is in other greetings, and zero for the cluster's key: a Hello without a name is what every
/// version sends and takes, and one with a name is refused as malformed by versions that know no keys of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// What it is.
    pub kind: GreetingKind,
    /// The node that sends it; `None` for a client.
    pub sender: Option<ReplicaId>,
    /// The cluster, a UUID.
    pub cluster: [u8; 16],
    /// Random bytes; zeroes in a Proof.
    pub nonce: [u8; 32],
    /// The proof; zeroes in a Hello.
    pub proof: [u8; 32],
    /// The client's key of a Hello; `None` for the cluster's key, and in other greetings.
    pub key: Option<KeyName>,
}

impl Greeting {
    /// Size of a greeting.
    pub const SIZE: usize = 96;

    /// Encodes the greeting.
    pub fn encode(&self) -> [u8; Greeting::SIZE] {
        let mut bytes = [0; Greeting::SIZE];
        let mut rest = &mut bytes[..];
        put_field(&mut rest, &MAGIC);
        put_field(&mut rest, &MESSAGE_VERSION.to_le_bytes());
        put_field(&mut rest, &[self.kind as u8, 0]);
        put_field(&mut rest, &self.sender.map_or(CLIENT, |node| node.0).to_le_bytes());
        put_field(&mut rest, &[0; 4]);
        put_field(&mut rest, &self.cluster);
        put_field(&mut rest, &self.nonce);
        put_field(&mut rest, self.key.as_ref().map_or(&self.proof, |key| &key.0));
        bytes
    }

    /// Decodes a greeting. The proof is for the receiver to check.
    ///
    /// # Errors
    /// The first field that no greeting of this version has.
    pub fn decode(from: &[u8; Greeting::SIZE]) -> Result<Greeting, DecodeError> {
        let mut rest = &from[..];
        let magic: [u8; 4] = next_field(&mut rest);
        if magic != MAGIC {
            return Err(DecodeError::Text { what: "the greeting", reason: "the magic number is another" });
        }
        let version = u16::from_le_bytes(next_field(&mut rest));
        if version != MESSAGE_VERSION {
            return Err(DecodeError::value("the version of the greeting", 4, version.into()));
        }
        let [kind, reserved] = next_field(&mut rest);
        let sender = u32::from_le_bytes(next_field(&mut rest));
        let reserved = u32::from_le_bytes(next_field(&mut rest)) | u32::from(reserved);
        if reserved != 0 {
            return Err(DecodeError::value("a reserved field of the greeting", 7, reserved.into()));
        }
        let known = GreetingKind::ALL.into_iter().find(|known| *known as u8 == kind);
        let mut greeting = Greeting {
            kind: known.ok_or(DecodeError::value("the kind of the greeting", 6, kind.into()))?,
            sender: (sender != CLIENT).then_some(ReplicaId(sender)),
            cluster: next_field(&mut rest),
            nonce: next_field(&mut rest),
            proof: next_field(&mut rest),
            key: None,
        };
        if greeting.kind == GreetingKind::Hello && greeting.proof != [0; 32] {
            let name = KeyName::decode(std::mem::take(&mut greeting.proof));
            greeting.key = name.filter(|_| greeting.sender.is_none());
            if greeting.key.is_none() {
                return Err(DecodeError::Text {
                    what: "the greeting",
                    reason: "it has no name of a client's key, or is of a node",
                });
            }
        }
        let is_empty = match greeting.kind {
            GreetingKind::Hello | GreetingKind::Challenge => true,
            GreetingKind::Proof => greeting.nonce == [0; 32],
        };
        if !is_empty {
            return Err(DecodeError::Text {
                what: "the greeting",
                reason: "a field of another kind is not zero",
            });
        }
        Ok(greeting)
    }
}
