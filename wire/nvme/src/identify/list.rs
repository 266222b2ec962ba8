//! Identify lists: namespaces, controllers, namespace descriptors and command sets.

use super::{Csi, SIZE};
use crate::DecodeError;
use crate::le::{array_at, put, put16, put32, put64, u16_at, u64_at};

/// Maximum number of namespace identifiers per list.
pub const NAMESPACE_LIST_MAX: usize = SIZE / 4;
/// Maximum number of controller identifiers per list.
pub const CONTROLLER_LIST_MAX: usize = SIZE / 2 - 1;

/// Namespace identifiers, in ascending order (CNS 02h, 07h, 10h and 1Ah, and the Changed Namespace List log;
/// Base 2.0, section 4.4: namespace list).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceList(pub Vec<u32>);

impl NamespaceList {
    /// Decodes a list, which is terminated by 0.
    ///
    /// # Errors
    /// Identifiers that are not in ascending order.
    pub fn decode(from: &[u8; SIZE]) -> Result<NamespaceList, DecodeError> {
        let mut list = Vec::new();
        for (index, entry) in from.as_chunks::<4>().0.iter().enumerate() {
            let nsid = u32::from_le_bytes(*entry);
            if nsid == 0 {
                break;
            }
            if list.last().is_some_and(|&last| last >= nsid) {
                return Err(DecodeError::value("namespace list", 4 * index as u32, nsid.into()));
            }
            list.push(nsid);
        }
        Ok(NamespaceList(list))
    }

    /// Encodes the list.
    ///
    /// # Panics
    /// If there are more than 1024 identifiers.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        assert!(self.0.len() <= NAMESPACE_LIST_MAX, "{} namespaces in one list", self.0.len());
        *into = [0; SIZE];
        for (index, &nsid) in self.0.iter().enumerate() {
            put32(into, 4 * index, nsid);
        }
    }
}

/// Controller identifiers, in ascending order (CNS 12h and 13h; Base 2.0, section 4.4: controller list).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerList(pub Vec<u16>);

impl ControllerList {
    /// Decodes a list.
    ///
    /// # Errors
    /// A count above the maximum.
    pub fn decode(from: &[u8; SIZE]) -> Result<ControllerList, DecodeError> {
        let count = usize::from(u16_at(from, 0));
        if count > CONTROLLER_LIST_MAX {
            return Err(DecodeError::value("controller list", 0, count as u64));
        }
        Ok(ControllerList((1..=count).map(|index| u16_at(from, 2 * index)).collect()))
    }

    /// Encodes the list.
    ///
    /// # Panics
    /// If there are more than 2047 identifiers.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        assert!(self.0.len() <= CONTROLLER_LIST_MAX, "{} controllers in one list", self.0.len());
        *into = [0; SIZE];
        put16(into, 0, self.0.len() as u16);
        for (index, &cntlid) in self.0.iter().enumerate() {
            put16(into, 2 * (index + 1), cntlid);
        }
    }
}

/// One descriptor of the Namespace Identification Descriptor list (CNS 03h; Base 2.0, section
/// 5.17.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceDescriptor {
    /// IEEE extended unique identifier (type 1).
    Eui64([u8; 8]),
    /// Globally unique identifier (type 2).
    Nguid([u8; 16]),
    /// UUID (type 3).
    Uuid([u8; 16]),
    /// Command set identifier (type 4).
    Csi(Csi),
}

impl NamespaceDescriptor {
    /// Decodes a list, which is terminated by a descriptor of length 0. Unknown types are ignored, as
    /// the specification allows new ones.
    ///
    /// # Errors
    /// A known type with a wrong length, and a reserved command set.
    pub fn decode_list(from: &[u8; SIZE]) -> Result<Vec<NamespaceDescriptor>, DecodeError> {
        let mut list = Vec::new();
        let mut at = 0;
        while at + 4 <= SIZE && from[at + 1] != 0 {
            let (kind, length) = (from[at], usize::from(from[at + 1]));
            let body = at + 4;
            let bad = |what, value: u64| DecodeError::value(what, at as u32, value);
            if body + length > SIZE {
                return Err(bad("descriptor length", length as u64));
            }
            match (kind, length) {
                (1, 8) => list.push(NamespaceDescriptor::Eui64(array_at(from, body))),
                (2, 16) => list.push(NamespaceDescriptor::Nguid(array_at(from, body))),
                (3, 16) => list.push(NamespaceDescriptor::Uuid(array_at(from, body))),
                (4, 1) => {
                    let csi = Csi::from_wire(from[body]).ok_or(bad("CSI", from[body].into()))?;
                    list.push(NamespaceDescriptor::Csi(csi));
                }
                (1..=4, _) => return Err(bad("descriptor length", length as u64)),
                _ => {}
            }
            at = body + length;
        }
        Ok(list)
    }

    /// Encodes a list.
    ///
    /// # Panics
    /// If it does not fit, which takes more than 200 descriptors.
    pub fn encode_list(list: &[NamespaceDescriptor], into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        let mut at = 0;
        for descriptor in list {
            let csi;
            let (kind, body): (u8, &[u8]) = match descriptor {
                NamespaceDescriptor::Eui64(id) => (1, id),
                NamespaceDescriptor::Nguid(id) => (2, id),
                NamespaceDescriptor::Uuid(id) => (3, id),
                NamespaceDescriptor::Csi(id) => {
                    csi = [id.to_wire()];
                    (4, &csi)
                }
            };
            into[at] = kind;
            into[at + 1] = body.len() as u8;
            put(into, at + 4, body);
            at += 4 + body.len();
        }
    }
}

/// Identify I/O Command Set (CNS 1Ch; Base 2.0, section 5.17.2.21): the combinations of command sets
/// that can be enabled together, as bit vectors indexed by CSI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandSetVectors(pub Vec<u64>);

impl CommandSetVectors {
    /// The vector of the NVM command set alone.
    pub const NVM: u64 = 1 << Csi::Nvm as u64;

    /// Decodes the vectors, which are terminated by 0.
    pub fn decode(from: &[u8; SIZE]) -> CommandSetVectors {
        let vectors = (0..SIZE / 8).map(|index| u64_at(from, 8 * index));
        CommandSetVectors(vectors.take_while(|&vector| vector != 0).collect())
    }

    /// Encodes the vectors.
    ///
    /// # Panics
    /// If there are more than 512.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        for (index, &vector) in self.0.iter().enumerate() {
            put64(into, 8 * index, vector);
        }
    }
}
