//! Identify data structures (Base 2.0, section 5.17.2; NVM 1.0, section 4.1.5).
//!
//! Every structure has 4096 bytes. Fields are named by the specification's acronyms; fields that are not
//! listed are reserved or zero.

mod controller;
mod list;
mod namespace;

pub use controller::{
    IdentifyController, NvmController, anacap, cmic, ctratt, fuses, lpa, oacs, oaes, ocfs, oncs, sgls, vwc,
};
pub use list::{
    CONTROLLER_LIST_MAX, CommandSetVectors, ControllerList, NAMESPACE_LIST_MAX, NamespaceDescriptor,
    NamespaceList,
};
pub use namespace::{
    ExtendedLbaFormat, IdentifyNamespace, LbaFormat, NamespaceIndependent, NvmNamespace, dlfeat, nsfeat,
    rescap,
};

/// Size in bytes of every Identify data structure.
pub const SIZE: usize = 4096;

wire_enum! {
    /// Controller or Namespace Structure (CNS): the data that Identify returns.
    Cns: u8 {
        /// Identify Namespace of the NVM command set.
        Namespace = 0x00,
        /// Identify Controller.
        Controller = 0x01,
        /// Active Namespace ID list.
        ActiveNamespaces = 0x02,
        /// Namespace Identification Descriptor list.
        NamespaceDescriptors = 0x03,
        /// NVM Set list.
        NvmSets = 0x04,
        /// I/O command set specific Identify Namespace.
        CommandSetNamespace = 0x05,
        /// I/O command set specific Identify Controller.
        CommandSetController = 0x06,
        /// I/O command set specific Active Namespace ID list.
        CommandSetActiveNamespaces = 0x07,
        /// I/O command set independent Identify Namespace.
        NamespaceIndependent = 0x08,
        /// Identify Namespace data for a user data format.
        NamespaceFormat = 0x09,
        /// I/O command set specific Identify Namespace data for a user data format.
        CommandSetNamespaceFormat = 0x0a,
        /// Allocated Namespace ID list.
        AllocatedNamespaces = 0x10,
        /// Identify Namespace of an allocated namespace.
        AllocatedNamespace = 0x11,
        /// Controllers that a namespace is attached to.
        NamespaceControllers = 0x12,
        /// Controllers of the subsystem.
        Controllers = 0x13,
        /// Primary Controller Capabilities.
        PrimaryCapabilities = 0x14,
        /// Secondary Controller list.
        SecondaryControllers = 0x15,
        /// Namespace Granularity list.
        NamespaceGranularity = 0x16,
        /// UUID list.
        Uuids = 0x17,
        /// Domain list.
        Domains = 0x18,
        /// Endurance Group list.
        EnduranceGroups = 0x19,
        /// I/O command set specific Allocated Namespace ID list.
        CommandSetAllocatedNamespaces = 0x1a,
        /// I/O command set specific Identify Namespace of an allocated namespace.
        CommandSetAllocatedNamespace = 0x1b,
        /// Identify I/O Command Set.
        CommandSets = 0x1c,
    }
}

wire_enum! {
    /// I/O command sets (Base 2.0, section 5.17.1).
    Csi: u8 {
        /// NVM command set.
        Nvm = 0x00,
        /// Key value command set.
        KeyValue = 0x01,
        /// Zoned namespace command set.
        Zoned = 0x02,
    }
}

wire_enum! {
    /// Controller types (CNTRLTYPE).
    ControllerType: u8 {
        /// Not reported.
        Unknown = 0,
        /// I/O controller.
        Io = 1,
        /// Discovery controller.
        Discovery = 2,
        /// Administrative controller.
        Administrative = 3,
    }
}

wire_enum! {
    /// Discovery controller types (DCTYPE).
    DiscoveryType: u8 {
        /// Not reported.
        Unknown = 0,
        /// Direct discovery controller.
        Direct = 1,
        /// Central discovery controller.
        Central = 2,
    }
}

/// `text` as an ASCII field, truncated or padded with spaces (Base 2.0, section 1.4: ASCII strings).
///
/// Characters other than printable ASCII become question marks.
pub fn ascii<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (to, from) in field.iter_mut().zip(text.chars()) {
        *to = if matches!(from, ' '..='~') { from as u8 } else { b'?' };
    }
    field
}
