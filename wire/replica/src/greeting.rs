//! The first bytes of a connection: both ends prove that they know the cluster's key.

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

/// A message before the first [`FrameHeader`](crate::FrameHeader) of a connection.
///
/// A proof is the HMAC-SHA-256, with the cluster's key, of a label (`acceptor` or `connector`) and the bytes of the
/// Hello and of the Challenge, the proof in it taken as zero.
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
        put_field(&mut rest, &self.proof);
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
        let greeting = Greeting {
            kind: known.ok_or(DecodeError::value("the kind of the greeting", 6, kind.into()))?,
            sender: (sender != CLIENT).then_some(ReplicaId(sender)),
            cluster: next_field(&mut rest),
            nonce: next_field(&mut rest),
            proof: next_field(&mut rest),
        };
        let is_empty = match greeting.kind {
            GreetingKind::Hello => greeting.proof == [0; 32],
            GreetingKind::Challenge => true,
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
