//! Target port groups: parameter data of REPORT and SET TARGET PORT GROUPS (SPC-4, sections 6.37 and 6.45).

use crate::DecodeError;
use crate::bytes::be16;

/// The asymmetric access state of a target port group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AccessState {
    /// Active/optimized.
    #[default]
    Optimized = 0x0,
    /// Active/non-optimized.
    NonOptimized = 0x1,
    /// Standby: reads and writes are refused.
    Standby = 0x2,
    /// Unavailable: almost everything is refused.
    Unavailable = 0x3,
}

impl AccessState {
    /// The state with this code.
    pub const fn from_wire(code: u8) -> Option<AccessState> {
        Some(match code {
            0x0 => AccessState::Optimized,
            0x1 => AccessState::NonOptimized,
            0x2 => AccessState::Standby,
            0x3 => AccessState::Unavailable,
            _ => return None,
        })
    }
}

/// Why a group is in its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AccessReason {
    /// It was never changed.
    #[default]
    None = 0,
    /// A SET TARGET PORT GROUPS.
    Explicit = 1,
    /// The target.
    Implicit = 2,
}

/// A target port group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortGroupDescriptor {
    /// TARGET PORT GROUP.
    pub group: u16,
    /// Its state.
    pub state: AccessState,
    /// Why it is in it.
    pub reason: AccessReason,
    /// Relative identifiers of its ports, at most 255.
    pub ports: Vec<u16>,
}

/// T_SUP to AO_SUP: the four states of [`AccessState`] are supported.
const SUPPORTED: u8 = 0x0f;

/// REPORT TARGET PORT GROUPS; `extended` has the header with the time of a transition, which is none.
pub fn encode_port_groups(groups: &[PortGroupDescriptor], extended: bool) -> Vec<u8> {
    let mut content = if extended { vec![0x10, 0, 0, 0] } else { Vec::new() };
    for one in groups {
        let [high, low] = one.group.to_be_bytes();
        let count = one.ports.len().min(255);
        content.extend([one.state as u8, SUPPORTED, high, low, 0, one.reason as u8, 0, count as u8]);
        for port in &one.ports[..count] {
            content.extend([[0, 0], port.to_be_bytes()].concat());
        }
    }
    [(content.len() as u32).to_be_bytes().to_vec(), content].concat()
}

/// The groups of a SET TARGET PORT GROUPS with the codes of their new states.
///
/// # Errors
/// The list is cut off.
pub fn decode_set_port_groups(list: &[u8]) -> Result<Vec<(u16, u8)>, DecodeError> {
    let short =
        |need| DecodeError::Length { what: "SET TARGET PORT GROUPS parameter list", got: list.len(), need };
    let (_, descriptors) = list.split_first_chunk::<4>().ok_or(short(4))?;
    let (descriptors, rest) = descriptors.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(short(list.len() - rest.len() + 4));
    }
    Ok(descriptors.iter().map(|one| (be16(one, 2), one[0] & 0xf)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_fields_of_spc_4() {
        let groups = [
            PortGroupDescriptor {
                group: 1,
                state: AccessState::NonOptimized,
                reason: AccessReason::Explicit,
                ports: vec![1, 0x102],
            },
            PortGroupDescriptor {
                group: 0x203,
                state: AccessState::Standby,
                reason: AccessReason::Implicit,
                ports: Vec::new(),
            },
        ];
        let content = [1, 0xf, 0, 1, 0, 1, 0, 2, 0, 0, 0, 1, 0, 0, 1, 2, 2, 0xf, 2, 3, 0, 2, 0, 0];
        assert_eq!(encode_port_groups(&groups, false), [&[0, 0, 0, 24], &content[..]].concat());
        let extended = [&[0, 0, 0, 28, 0x10, 0, 0, 0], &content[..]].concat();
        assert_eq!(encode_port_groups(&groups, true), extended);
    }

    #[test]
    fn states_to_set_are_decoded() {
        let list = [0, 0, 0, 0, 0x02, 0, 0, 1, 0x00, 0, 1, 2];
        assert_eq!(decode_set_port_groups(&list).unwrap(), [(1, 2), (0x102, 0)]);
        assert_eq!(decode_set_port_groups(&list[..4]).unwrap(), []);
        assert!(decode_set_port_groups(&list[..7]).is_err() && decode_set_port_groups(&list[..3]).is_err());
        let states = (0..16).filter_map(AccessState::from_wire).map(|state| state as u8);
        assert!(states.eq(0..4));
    }
}
