//! Data with metadata and end-to-end protection information (NVM Command Set Specification 1.0, section 5.2).

bitflags::bitflags! {
    /// What a device does with protection information: the bits of PRINFO, and STC (NVM 1.0, section 3.2).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct ProtectionFlags: u8 {
        /// PRACT: the device generates the protection information of a write, and checks and strips that of a
        /// read. The data is then without metadata if that is nothing else.
        const ACTION = 1 << 3;
        /// PRCHK: check the guard.
        const CHECK_GUARD = 1 << 2;
        /// PRCHK: check the application tag.
        const CHECK_APPLICATION_TAG = 1 << 1;
        /// PRCHK: check the reference tag.
        const CHECK_REFERENCE_TAG = 1 << 0;
        /// STC: check the storage tag. Not a bit of PRINFO.
        const CHECK_STORAGE_TAG = 1 << 4;
    }
}

impl ProtectionFlags {
    /// Of the four bits of PRINFO; others are ignored.
    #[inline]
    pub const fn from_prinfo(bits: u32) -> ProtectionFlags {
        ProtectionFlags::from_bits_truncate(bits as u8 & 0xf)
    }

    /// The four bits of PRINFO.
    #[inline]
    pub const fn prinfo(self) -> u32 {
        self.bits() as u32 & 0xf
    }
}

/// The tags of a range of blocks: generated, or expected where they are checked. Bits beyond those that a tag
/// has in the format of a device are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtectionTags {
    /// Reference tag of the first block; for type 1 the low bits of its LBA.
    pub reference: u64,
    /// Storage tag of every block.
    pub storage: u64,
    /// Application tag of every block.
    pub application: u16,
    /// Mask of the application tag bits that are compared.
    pub application_mask: u16,
}

/// The payload of a read or write with metadata or protection:
/// [`Payload::Protected`](crate::Payload::Protected).
///
/// Requests without either carry their data in place; this one costs an allocation, less than the checksum of
/// a block.
#[derive(Debug)]
pub struct ProtectedData<D> {
    /// The blocks: data with interleaved metadata, or data alone if the metadata is separate or stripped.
    pub data: D,
    /// The metadata of all blocks, if it is separate and not stripped.
    pub metadata: Option<D>,
    /// What the device does.
    pub flags: ProtectionFlags,
    /// Tags to generate or to expect.
    pub tags: ProtectionTags,
}
