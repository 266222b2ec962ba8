//! Asymmetric Namespace Access log page (Base 2.0, section 5.16.1.13).

use crate::DecodeError;
use crate::le::{put16, put32, put64, u16_at, u32_at, u64_at};

wire_enum! {
    /// ANA state: access of a controller to the namespaces of a group (Base 2.0, section 8.1.3).
    AnaState: u8 {
        /// Optimized.
        Optimized = 0x1,
        /// Not optimized.
        NonOptimized = 0x2,
        /// Inaccessible.
        Inaccessible = 0x3,
        /// Persistent loss.
        PersistentLoss = 0x4,
        /// Changing.
        Change = 0xf,
    }
}

/// ANA Group Descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    /// ANA group identifier.
    pub id: u32,
    /// Change count of the group; 0 if not reported.
    pub change_count: u64,
    /// ANA state.
    pub state: AnaState,
    /// Namespaces in ascending order; empty with Return Groups Only.
    pub nsids: Vec<u32>,
}

/// The Asymmetric Namespace Access log page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnaLog {
    /// Change count of the page.
    pub change_count: u64,
    /// The groups, in ascending order of identifier.
    pub groups: Vec<AnaGroup>,
}

impl AnaLog {
    /// Size in bytes of the page's header.
    pub const HEADER_SIZE: usize = 16;
    /// Size in bytes of a group without its namespaces.
    pub const GROUP_SIZE: usize = 32;
    /// Log specific parameter: Return Groups Only (RGO).
    pub const GROUPS_ONLY: u8 = 1;

    /// Decodes a page.
    ///
    /// # Errors
    /// Data shorter than its counts require, and reserved states.
    pub fn decode(from: &[u8]) -> Result<AnaLog, DecodeError> {
        let need = |need: usize| -> Result<(), DecodeError> {
            if need > from.len() {
                return Err(DecodeError::Length { what: "ANA log page", got: from.len(), need });
            }
            Ok(())
        };
        need(Self::HEADER_SIZE)?;
        let count = u16_at(from, 8);
        let mut groups = Vec::new();
        let mut at = Self::HEADER_SIZE;
        for _ in 0..count {
            need(at + Self::GROUP_SIZE)?;
            let state = from[at + 16] & 0xf;
            let bad = DecodeError::value("ANA state", at as u32, state.into());
            let list = at + Self::GROUP_SIZE;
            let end = list + 4 * u32_at(from, at + 4) as usize;
            need(end)?;
            groups.push(AnaGroup {
                id: u32_at(from, at),
                change_count: u64_at(from, at + 8),
                state: AnaState::from_wire(state).ok_or(bad)?,
                nsids: (list..end).step_by(4).map(|at| u32_at(from, at)).collect(),
            });
            at = end;
        }
        Ok(AnaLog { change_count: u64_at(from, 0), groups })
    }

    /// Size in bytes of the page.
    pub fn encoded_length(&self) -> usize {
        let groups = self.groups.iter().map(|group| Self::GROUP_SIZE + 4 * group.nsids.len());
        Self::HEADER_SIZE + groups.sum::<usize>()
    }

    /// Encodes the page.
    ///
    /// # Panics
    /// When `into` is shorter than [`encoded_length`](Self::encoded_length), or with 65536 groups.
    pub fn encode(&self, into: &mut [u8]) {
        into[..self.encoded_length()].fill(0);
        put64(into, 0, self.change_count);
        put16(into, 8, u16::try_from(self.groups.len()).expect("at most 65535 ANA groups"));
        let mut at = Self::HEADER_SIZE;
        for group in &self.groups {
            put32(into, at, group.id);
            put32(into, at + 4, group.nsids.len() as u32);
            put64(into, at + 8, group.change_count);
            into[at + 16] = group.state.to_wire();
            at += Self::GROUP_SIZE;
            for &nsid in &group.nsids {
                put32(into, at, nsid);
                at += 4;
            }
        }
    }
}
