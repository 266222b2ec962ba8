//! Supported commands, features and log pages, and their effects.

use crate::le::{bit, put32, u32_at};

/// Effects of a command (Base 2.0, section 5.16.1.6). The default is an unsupported command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandEffects {
    /// The command is supported (CSUPP).
    pub supported: bool,
    /// Logical Block Content Change (LBCC).
    pub changes_blocks: bool,
    /// Namespace Capability Change (NCC).
    pub changes_namespace: bool,
    /// Namespace Inventory Change (NIC).
    pub changes_inventory: bool,
    /// Controller Capability Change (CCC).
    pub changes_controller: bool,
    /// Submission and execution restrictions (CSE): 0 none, 1 alone in its namespace, 2 alone.
    pub exclusive: u8,
    /// Scope bits (CSP).
    pub scope: u16,
}

impl CommandEffects {
    /// Supported, without effects.
    pub const PLAIN: CommandEffects = CommandEffects {
        supported: true,
        changes_blocks: false,
        changes_namespace: false,
        changes_inventory: false,
        changes_controller: false,
        exclusive: 0,
        scope: 0,
    };
    /// Supported, and changes the content of logical blocks.
    pub const CHANGES_BLOCKS: CommandEffects = CommandEffects { changes_blocks: true, ..Self::PLAIN };

    /// Decodes an entry.
    pub fn from_wire(value: u32) -> CommandEffects {
        let flag = |index| bit(value.into(), index);
        CommandEffects {
            supported: flag(0),
            changes_blocks: flag(1),
            changes_namespace: flag(2),
            changes_inventory: flag(3),
            changes_controller: flag(4),
            exclusive: (value >> 16 & 7) as u8,
            scope: (value >> 20) as u16,
        }
    }

    /// Encodes the entry.
    pub const fn to_wire(self) -> u32 {
        self.supported as u32
            | (self.changes_blocks as u32) << 1
            | (self.changes_namespace as u32) << 2
            | (self.changes_inventory as u32) << 3
            | (self.changes_controller as u32) << 4
            | (self.exclusive as u32 & 7) << 16
            | (self.scope as u32 & 0xfff) << 20
    }
}

/// Commands Supported and Effects (Base 2.0, section 5.16.1.6), by opcode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandEffectsLog {
    /// Admin commands.
    pub admin: [CommandEffects; 256],
    /// I/O commands of the requested command set.
    pub io: [CommandEffects; 256],
}

impl Default for CommandEffectsLog {
    fn default() -> Self {
        CommandEffectsLog { admin: [CommandEffects::default(); 256], io: [CommandEffects::default(); 256] }
    }
}

impl CommandEffectsLog {
    /// Size in bytes of the page.
    pub const SIZE: usize = 4096;

    /// Decodes 4096 bytes; every value is valid.
    pub fn decode(from: &[u8; Self::SIZE]) -> CommandEffectsLog {
        let mut log = CommandEffectsLog::default();
        for (index, effects) in log.admin.iter_mut().chain(&mut log.io).enumerate() {
            *effects = CommandEffects::from_wire(u32_at(from, 4 * index));
        }
        log
    }

    /// Encodes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        for (index, effects) in self.admin.iter().chain(&self.io).enumerate() {
            put32(into, 4 * index, effects.to_wire());
        }
    }
}

/// Effects of changing a feature (Base 2.0, section 5.16.1.18). The default is an unsupported feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeatureEffects {
    /// The feature is supported (FSUPP).
    pub supported: bool,
    /// User Data Content Change (UDCC).
    pub changes_data: bool,
    /// Namespace Capability Change (NCC).
    pub changes_namespace: bool,
    /// Namespace Inventory Change (NIC).
    pub changes_inventory: bool,
    /// Controller Capability Change (CCC).
    pub changes_controller: bool,
    /// Scope bits (FSP): bit 0 namespace, bit 1 controller.
    pub scope: u16,
}

impl FeatureEffects {
    /// Scope: one namespace.
    pub const NAMESPACE: u16 = 1 << 0;
    /// Scope: one controller.
    pub const CONTROLLER: u16 = 1 << 1;

    /// Decodes an entry.
    pub fn from_wire(value: u32) -> FeatureEffects {
        let flag = |index| bit(value.into(), index);
        FeatureEffects {
            supported: flag(0),
            changes_data: flag(1),
            changes_namespace: flag(2),
            changes_inventory: flag(3),
            changes_controller: flag(4),
            scope: (value >> 20) as u16,
        }
    }

    /// Encodes the entry.
    pub const fn to_wire(self) -> u32 {
        self.supported as u32
            | (self.changes_data as u32) << 1
            | (self.changes_namespace as u32) << 2
            | (self.changes_inventory as u32) << 3
            | (self.changes_controller as u32) << 4
            | (self.scope as u32 & 0xfff) << 20
    }
}

/// Feature Identifiers Supported and Effects (Base 2.0, section 5.16.1.18), by feature identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureEffectsLog(pub [FeatureEffects; 256]);

impl FeatureEffectsLog {
    /// Size in bytes of the page.
    pub const SIZE: usize = 1024;

    /// Decodes 1024 bytes; every value is valid.
    pub fn decode(from: &[u8; Self::SIZE]) -> FeatureEffectsLog {
        FeatureEffectsLog(std::array::from_fn(|index| FeatureEffects::from_wire(u32_at(from, 4 * index))))
    }

    /// Encodes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        for (index, effects) in self.0.iter().enumerate() {
            put32(into, 4 * index, effects.to_wire());
        }
    }
}

/// Support of a log page (Base 2.0, section 5.16.1.1). The default is an unsupported page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SupportedLogPage {
    /// The page is supported (LSUPP).
    pub supported: bool,
    /// Index Offset Supported (IOS).
    pub index_offset: bool,
    /// LID Specific Parameter (LIDSP).
    pub specific: u16,
}

/// Supported Log Pages (Base 2.0, section 5.16.1.1), by log page identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupportedLogPages(pub [SupportedLogPage; 256]);

impl SupportedLogPages {
    /// Size in bytes of the page.
    pub const SIZE: usize = 1024;

    /// Decodes 1024 bytes; every value is valid.
    pub fn decode(from: &[u8; Self::SIZE]) -> SupportedLogPages {
        SupportedLogPages(std::array::from_fn(|index| {
            let value = u32_at(from, 4 * index);
            SupportedLogPage {
                supported: value & 1 != 0,
                index_offset: value & 2 != 0,
                specific: (value >> 16) as u16,
            }
        }))
    }

    /// Encodes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        for (index, page) in self.0.iter().enumerate() {
            let value = u32::from(page.supported)
                | u32::from(page.index_offset) << 1
                | u32::from(page.specific) << 16;
            put32(into, 4 * index, value);
        }
    }
}
