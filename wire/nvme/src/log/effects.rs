//! Which commands, features and log pages there are, and what they do.

use crate::le::{bit, put32, u32_at};

/// What a command does (Base 2.0, section 5.16.1.6). Default is: not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandEffects {
    /// The command is supported (CSUPP).
    pub supported: bool,
    /// It may change the content of blocks (LBCC).
    pub changes_blocks: bool,
    /// It may change what a namespace can do (NCC).
    pub changes_namespace: bool,
    /// It may change which namespaces there are (NIC).
    pub changes_inventory: bool,
    /// It may change what the controller can do (CCC).
    pub changes_controller: bool,
    /// Restriction of submission: 0 none, 1 alone in its namespace, 2 alone (CSE).
    pub exclusive: u8,
    /// Scope bits (CSP).
    pub scope: u16,
}

impl CommandEffects {
    /// Supported, and changes nothing.
    pub const PLAIN: CommandEffects = CommandEffects {
        supported: true,
        changes_blocks: false,
        changes_namespace: false,
        changes_inventory: false,
        changes_controller: false,
        exclusive: 0,
        scope: 0,
    };
    /// Supported, and changes the content of blocks.
    pub const CHANGES_BLOCKS: CommandEffects = CommandEffects { changes_blocks: true, ..Self::PLAIN };

    /// From an entry.
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

    /// The entry.
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
    /// I/O commands of the command set asked for.
    pub io: [CommandEffects; 256],
}

impl Default for CommandEffectsLog {
    fn default() -> Self {
        CommandEffectsLog { admin: [CommandEffects::default(); 256], io: [CommandEffects::default(); 256] }
    }
}

impl CommandEffectsLog {
    /// Bytes of the page.
    pub const SIZE: usize = 4096;

    /// Reads the page; any 4096 bytes are one.
    pub fn decode(from: &[u8; Self::SIZE]) -> CommandEffectsLog {
        let mut log = CommandEffectsLog::default();
        for (index, effects) in log.admin.iter_mut().chain(&mut log.io).enumerate() {
            *effects = CommandEffects::from_wire(u32_at(from, 4 * index));
        }
        log
    }

    /// Writes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        for (index, effects) in self.admin.iter().chain(&self.io).enumerate() {
            put32(into, 4 * index, effects.to_wire());
        }
    }
}

/// What changing a feature does (Base 2.0, section 5.16.1.18). Default is: not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeatureEffects {
    /// The feature is supported (FSUPP).
    pub supported: bool,
    /// It may change user data (UDCC).
    pub changes_data: bool,
    /// It may change what a namespace can do (NCC).
    pub changes_namespace: bool,
    /// It may change which namespaces there are (NIC).
    pub changes_inventory: bool,
    /// It may change what the controller can do (CCC).
    pub changes_controller: bool,
    /// Scope bits (FSP): bit 0 namespace, bit 1 controller.
    pub scope: u16,
}

impl FeatureEffects {
    /// Scope: one namespace.
    pub const NAMESPACE: u16 = 1 << 0;
    /// Scope: one controller.
    pub const CONTROLLER: u16 = 1 << 1;

    /// From an entry.
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

    /// The entry.
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
    /// Bytes of the page.
    pub const SIZE: usize = 1024;

    /// Reads the page; any 1024 bytes are one.
    pub fn decode(from: &[u8; Self::SIZE]) -> FeatureEffectsLog {
        FeatureEffectsLog(std::array::from_fn(|index| FeatureEffects::from_wire(u32_at(from, 4 * index))))
    }

    /// Writes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        for (index, effects) in self.0.iter().enumerate() {
            put32(into, 4 * index, effects.to_wire());
        }
    }
}

/// How a log page is supported (Base 2.0, section 5.16.1.1). Default is: not at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SupportedLogPage {
    /// The page is supported (LSUPP).
    pub supported: bool,
    /// Its offset may be an index (IOS).
    pub index_offset: bool,
    /// Specific to the page (LIDSP).
    pub specific: u16,
}

/// Supported Log Pages (Base 2.0, section 5.16.1.1), by log page identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupportedLogPages(pub [SupportedLogPage; 256]);

impl SupportedLogPages {
    /// Bytes of the page.
    pub const SIZE: usize = 1024;

    /// Reads the page; any 1024 bytes are one.
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

    /// Writes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        for (index, page) in self.0.iter().enumerate() {
            let value = u32::from(page.supported)
                | u32::from(page.index_offset) << 1
                | u32::from(page.specific) << 16;
            put32(into, 4 * index, value);
        }
    }
}
