//! Format NVM, Namespace Management and Namespace Attachment.

use crate::Sqe;
use crate::identify::{Csi, IdentifyNamespace, SIZE};
use crate::le::{put16, put32, put64};
use crate::opcode::AdminOpcode;

wire_enum! {
    /// Secure Erase Settings of Format NVM (Base 2.0, section 5.14).
    SecureErase: u8 {
        /// None.
        None = 0,
        /// User Data Erase.
        UserData = 1,
        /// Cryptographic Erase.
        Cryptographic = 2,
    }
}

/// Format NVM (Base 2.0, section 5.14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatNvm {
    /// LBA Format index, 0 to 63 (LBAFL and LBAFU).
    pub format: u8,
    /// Extended LBA: metadata follows the data of each block (MSET).
    pub extended_lba: bool,
    /// Protection information type; 0 for none (PI).
    pub protection: u8,
    /// Protection information is in the first bytes of the metadata (PIL).
    pub protection_first: bool,
    /// Secure Erase Settings (SES).
    pub secure_erase: SecureErase,
}

impl FormatNvm {
    /// Decodes the command dwords; `None` for a reserved erase setting.
    pub fn from_sqe(sqe: &Sqe) -> Option<FormatNvm> {
        let value = sqe.cdw10;
        Some(FormatNvm {
            format: (value & 0xf) as u8 | ((value >> 12 & 3) as u8) << 4,
            extended_lba: value >> 4 & 1 != 0,
            protection: (value >> 5 & 7) as u8,
            protection_first: value >> 8 & 1 != 0,
            secure_erase: SecureErase::from_wire((value >> 9 & 7) as u8)?,
        })
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self, nsid: u32) -> Sqe {
        Sqe {
            flags: 0,
            nsid,
            cdw10: u32::from(self.format & 0xf)
                | u32::from(self.extended_lba) << 4
                | u32::from(self.protection & 7) << 5
                | u32::from(self.protection_first) << 8
                | u32::from(self.secure_erase.to_wire()) << 9
                | u32::from(self.format >> 4 & 3) << 12,
            ..Sqe::new(AdminOpcode::FormatNvm.to_wire())
        }
    }
}

/// Parameters of a new namespace: the data of Namespace Management, Create (Base 2.0, section 5.23;
/// NVM 1.0, section 4.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewNamespace {
    /// Size in blocks.
    pub nsze: u64,
    /// Capacity in blocks.
    pub ncap: u64,
    /// LBA format index, 0 to 15.
    pub format: u8,
    /// Metadata follows the data of each block.
    pub extended_lba: bool,
    /// Protection information settings.
    pub dps: u8,
    /// Sharing: bit 0, may be attached to more than one controller at once.
    pub nmic: u8,
    /// ANA group; 0 to let the controller choose.
    pub anagrpid: u32,
    /// NVM set; 0 to let the controller choose.
    pub nvmsetid: u16,
}

impl NewNamespace {
    /// Decodes the data of a command, which has the layout of Identify Namespace; every value is valid.
    pub fn decode(from: &[u8; SIZE]) -> NewNamespace {
        let word = |at: usize| crate::le::u64_at(from, at);
        NewNamespace {
            nsze: word(0),
            ncap: word(8),
            format: from[26] & 0xf,
            extended_lba: from[26] & 0x10 != 0,
            dps: from[29],
            nmic: from[30],
            anagrpid: crate::le::u32_at(from, 92),
            nvmsetid: crate::le::u16_at(from, 100),
        }
    }

    /// Encodes the data of a command.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        put64(into, 0, self.nsze);
        put64(into, 8, self.ncap);
        into[26] = self.format & 0xf | u8::from(self.extended_lba) << 4;
        into[29] = self.dps;
        into[30] = self.nmic;
        put32(into, 92, self.anagrpid);
        put16(into, 100, self.nvmsetid);
    }

    /// The parameters of an existing namespace.
    pub fn like(other: &IdentifyNamespace) -> NewNamespace {
        NewNamespace {
            nsze: other.nsze,
            ncap: other.ncap,
            format: other.format & 0xf,
            extended_lba: other.extended_lba,
            dps: other.dps,
            nmic: other.nmic,
            anagrpid: 0,
            nvmsetid: 0,
        }
    }

    /// Encodes the Create command. Its data is that of [`encode`](Self::encode), its result the NSID.
    pub fn to_create_sqe(command_set: Csi) -> Sqe {
        Sqe {
            flags: 0,
            cdw11: u32::from(command_set.to_wire()) << 24,
            ..Sqe::new(AdminOpcode::NamespaceManagement.to_wire())
        }
    }

    /// Encodes the Delete command.
    pub fn to_delete_sqe(nsid: u32) -> Sqe {
        Sqe { flags: 0, nsid, cdw10: 1, ..Sqe::new(AdminOpcode::NamespaceManagement.to_wire()) }
    }
}

/// Namespace Attachment (Base 2.0, section 5.22); the data is a
/// [`ControllerList`](crate::identify::ControllerList).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceAttachment {
    /// Attach the namespace; otherwise detach it.
    pub attach: bool,
}

impl NamespaceAttachment {
    /// Decodes the command dwords; `None` for a reserved selection.
    pub const fn from_sqe(sqe: &Sqe) -> Option<NamespaceAttachment> {
        match sqe.cdw10 & 0xf {
            0 => Some(NamespaceAttachment { attach: true }),
            1 => Some(NamespaceAttachment { attach: false }),
            _ => None,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(self, nsid: u32) -> Sqe {
        Sqe {
            flags: 0,
            nsid,
            cdw10: u32::from(!self.attach),
            ..Sqe::new(AdminOpcode::NamespaceAttachment.to_wire())
        }
    }
}
