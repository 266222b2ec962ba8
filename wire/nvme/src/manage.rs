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
        /// User data is erased.
        UserData = 1,
        /// The key is erased.
        Cryptographic = 2,
    }
}

/// Format NVM (Base 2.0, section 5.14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatNvm {
    /// Which of the namespace's formats, 0 to 63.
    pub format: u8,
    /// Metadata follows the data of each block.
    pub extended_lba: bool,
    /// Protection information: 0 none, or its type.
    pub protection: u8,
    /// Protection information is first in the metadata.
    pub protection_first: bool,
    /// What is erased.
    pub secure_erase: SecureErase,
}

impl FormatNvm {
    /// The view of a command; `None` for a reserved erase setting.
    pub fn of(sqe: &Sqe) -> Option<FormatNvm> {
        let value = sqe.cdw10;
        Some(FormatNvm {
            format: (value & 0xf) as u8 | ((value >> 12 & 3) as u8) << 4,
            extended_lba: value >> 4 & 1 != 0,
            protection: (value >> 5 & 7) as u8,
            protection_first: value >> 8 & 1 != 0,
            secure_erase: SecureErase::from_wire((value >> 9 & 7) as u8)?,
        })
    }

    /// A command with this content.
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

/// What a new namespace is to be (Base 2.0, section 5.23; NVM 1.0, section 4.1.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewNamespace {
    /// Size in blocks.
    pub nsze: u64,
    /// Capacity in blocks.
    pub ncap: u64,
    /// Which format, 0 to 15.
    pub format: u8,
    /// Metadata follows the data of each block.
    pub extended_lba: bool,
    /// Protection information settings.
    pub dps: u8,
    /// Sharing: bit 0, may be attached to more than one controller at once.
    pub nmic: u8,
    /// ANA group; 0 for the controller's choice.
    pub anagrpid: u32,
    /// NVM set; 0 for the controller's choice.
    pub nvmsetid: u16,
}

impl NewNamespace {
    /// From the data of a command, which is laid out like Identify Namespace; any 4096 bytes are some.
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

    /// Writes the data of a command.
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

    /// One like another namespace.
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

    /// The command that makes one; its data is [`encode`](Self::encode)d, and its result the identifier.
    pub fn to_create_sqe(command_set: Csi) -> Sqe {
        Sqe {
            flags: 0,
            cdw11: u32::from(command_set.to_wire()) << 24,
            ..Sqe::new(AdminOpcode::NamespaceManagement.to_wire())
        }
    }

    /// The command that deletes a namespace.
    pub fn to_delete_sqe(nsid: u32) -> Sqe {
        Sqe { flags: 0, nsid, cdw10: 1, ..Sqe::new(AdminOpcode::NamespaceManagement.to_wire()) }
    }
}

/// Namespace Attachment (Base 2.0, section 5.22); the data is a
/// [`ControllerList`](crate::identify::ControllerList).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Whether the namespace is attached, rather than detached.
    pub attach: bool,
}

impl Attachment {
    /// The view of a command; `None` for a reserved selection.
    pub const fn of(sqe: &Sqe) -> Option<Attachment> {
        match sqe.cdw10 & 0xf {
            0 => Some(Attachment { attach: true }),
            1 => Some(Attachment { attach: false }),
            _ => None,
        }
    }

    /// A command with this content.
    pub fn to_sqe(self, nsid: u32) -> Sqe {
        Sqe {
            flags: 0,
            nsid,
            cdw10: u32::from(!self.attach),
            ..Sqe::new(AdminOpcode::NamespaceAttachment.to_wire())
        }
    }
}
