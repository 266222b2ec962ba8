//! Identify Namespace (CNS 00h, 05h and 08h).

use super::SIZE;
use crate::DecodeError;
use crate::le::{array_at, put, put16, put32, put64, u16_at, u32_at, u64_at, u128_at};
use crate::protection::{GuardFormat, InvalidFormat, MetadataFormat, Protection, ProtectionType};

/// Bits of NSFEAT.
pub mod nsfeat {
    /// Thin provisioning: NUSE and NCAP are valid.
    pub const THIN: u8 = 1 << 0;
    /// The namespace has its own atomic write units.
    pub const ATOMICS: u8 = 1 << 1;
    /// The Deallocated or Unwritten Logical Block error is supported.
    pub const DEALLOCATED_ERROR: u8 = 1 << 2;
    /// NGUID and EUI64 are never reused.
    pub const UNIQUE_FOREVER: u8 = 1 << 3;
    /// The preferred write and deallocate fields (NPWG to NOWS) are valid.
    pub const PREFERRED_SIZES: u8 = 1 << 4;
}

/// Bits of RESCAP: reservation capabilities (NVM 1.0, section 4.1.5.1).
pub mod rescap {
    /// Persist Through Power Loss is supported.
    pub const PERSIST: u8 = 1 << 0;
    /// All six reservation types.
    pub const ALL_TYPES: u8 = 0x7e;
    /// Ignore Existing Key as defined by NVM Express 1.3 and later.
    pub const IGNORE_KEY: u8 = 1 << 7;
}

/// Bits of DLFEAT.
pub mod dlfeat {
    /// Deallocated blocks read as zeroes.
    pub const READS_ZERO: u8 = 1;
    /// Deallocated blocks read as ones.
    pub const READS_ONES: u8 = 2;
    /// Write Zeroes can deallocate.
    pub const WRITE_ZEROES: u8 = 1 << 3;
}

/// An LBA format (NVM 1.0, section 4.1.5.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LbaFormat {
    /// Metadata bytes of a block.
    pub metadata_bytes: u16,
    /// Data bytes of a block as a power of two; 0 for an unused format, else at least 9.
    pub data_log2: u8,
    /// Relative performance: 0 best to 3 degraded.
    pub performance: u8,
}

/// Identify Namespace of the NVM command set (NVM 1.0, section 4.1.5.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentifyNamespace {
    /// Size in blocks.
    pub nsze: u64,
    /// Capacity in blocks.
    pub ncap: u64,
    /// Blocks in use.
    pub nuse: u64,
    /// Features; see [`nsfeat`].
    pub nsfeat: u8,
    /// LBA formats, 1 to 64 of them.
    pub formats: Vec<LbaFormat>,
    /// Index of the format in use (FLBAS bits 3:0 and 6:5).
    pub format: u8,
    /// Extended LBA: metadata follows the data of each block instead of a separate buffer (FLBAS bit 4).
    pub extended_lba: bool,
    /// Metadata capabilities.
    pub mc: u8,
    /// Protection information capabilities.
    pub dpc: u8,
    /// Protection information settings.
    pub dps: u8,
    /// Sharing: bit 0, attached to more than one controller at once.
    pub nmic: u8,
    /// Reservation capabilities.
    pub rescap: u8,
    /// Format progress.
    pub fpi: u8,
    /// Deallocate features; see [`dlfeat`].
    pub dlfeat: u8,
    /// Atomic Write Unit Power Fail of the namespace (NAWUPF) in blocks, 2 to 65536; 0 for that of the
    /// controller. Like the two that follow, valid with [`nsfeat::ATOMICS`].
    pub atomic_write_power_fail_blocks: u32,
    /// Atomic Boundary Offset (NABO) in blocks.
    pub atomic_boundary_offset: u16,
    /// Atomic Boundary Size Power Fail (NABSPF) in blocks, 2 to 65536; 0 for no boundary.
    pub atomic_boundary_blocks: u32,
    /// Optimal I/O boundary in blocks; 0 for none.
    pub noiob: u16,
    /// Capacity in bytes.
    pub nvmcap: u128,
    /// Preferred write granularity in blocks, 1 to 65536 (NPWG).
    pub preferred_write_blocks: u32,
    /// Preferred write alignment in blocks, 1 to 65536 (NPWA).
    pub preferred_write_alignment: u32,
    /// Preferred deallocate granularity in blocks, 1 to 65536 (NPDG).
    pub preferred_deallocate_blocks: u32,
    /// Preferred deallocate alignment in blocks, 1 to 65536 (NPDA).
    pub preferred_deallocate_alignment: u32,
    /// Optimal write size in blocks, 1 to 65536 (NOWS).
    pub optimal_write_blocks: u32,
    /// Maximum Single Source Range Length of Copy (MSSRL) in blocks; 0 if Copy is not supported.
    pub copy_range_blocks_max: u16,
    /// Maximum Copy Length (MCL) in blocks; 0 if Copy is not supported.
    pub copy_blocks_max: u32,
    /// Maximum Source Range Count of Copy (MSRC), 1 to 256.
    pub copy_ranges_max: u16,
    /// ANA group; 0 for none.
    pub anagrpid: u32,
    /// Attributes: bit 0, write protected.
    pub nsattr: u8,
    /// NVM set; 0 for none.
    pub nvmsetid: u16,
    /// Endurance group; 0 for none.
    pub endgid: u16,
    /// Globally unique identifier; zero for none.
    pub nguid: [u8; 16],
    /// Extended unique identifier; zero for none.
    pub eui64: [u8; 8],
}

mod at {
    pub(super) const NSZE: usize = 0;
    pub(super) const NCAP: usize = 8;
    pub(super) const NUSE: usize = 16;
    pub(super) const NSFEAT: usize = 24;
    pub(super) const NLBAF: usize = 25;
    pub(super) const FLBAS: usize = 26;
    pub(super) const MC: usize = 27;
    pub(super) const DPC: usize = 28;
    pub(super) const DPS: usize = 29;
    pub(super) const NMIC: usize = 30;
    pub(super) const RESCAP: usize = 31;
    pub(super) const FPI: usize = 32;
    pub(super) const DLFEAT: usize = 33;
    pub(super) const NAWUPF: usize = 36;
    pub(super) const NABO: usize = 42;
    pub(super) const NABSPF: usize = 44;
    pub(super) const NOIOB: usize = 46;
    pub(super) const NVMCAP: usize = 48;
    pub(super) const NPWG: usize = 64;
    pub(super) const NPWA: usize = 66;
    pub(super) const NPDG: usize = 68;
    pub(super) const NPDA: usize = 70;
    pub(super) const NOWS: usize = 72;
    pub(super) const MSSRL: usize = 74;
    pub(super) const MCL: usize = 76;
    pub(super) const MSRC: usize = 80;
    pub(super) const ANAGRPID: usize = 92;
    pub(super) const NSATTR: usize = 99;
    pub(super) const NVMSETID: usize = 100;
    pub(super) const ENDGID: usize = 102;
    pub(super) const NGUID: usize = 104;
    pub(super) const EUI64: usize = 120;
    pub(super) const LBAF: usize = 128;
}

const FORMATS_MAX: usize = 64;

const _: () = assert!(at::NGUID + 16 == at::EUI64 && at::EUI64 + 8 == at::LBAF);

impl Default for IdentifyNamespace {
    /// An inactive namespace: all zero, except for fields with a minimum of 1.
    fn default() -> Self {
        IdentifyNamespace::decode(&[0; SIZE]).expect("zeroes are an Identify Namespace structure")
    }
}

impl IdentifyNamespace {
    /// Metadata and protection of the format in use. `nvm` is what the command set's own structure (CNS 05h)
    /// says, of a controller with [`ctratt::EXTENDED_FORMATS`](super::ctratt::EXTENDED_FORMATS).
    ///
    /// # Errors
    /// Why the fields contradict each other.
    pub fn metadata_format(&self, nvm: Option<&NvmNamespace>) -> Result<MetadataFormat, &'static str> {
        let format = self.formats.get(usize::from(self.format));
        let format = format.ok_or("its format index is not in its list of formats")?;
        let kind = match self.dps & 7 {
            0 => None,
            kind => Some(ProtectionType::from_wire(kind).ok_or("a reserved type of protection information")?),
        };
        let extended = nvm.map(|nvm| nvm.extended_formats[usize::from(self.format)]).unwrap_or_default();
        let guard =
            || GuardFormat::from_wire(extended.pif).ok_or("a reserved format of protection information");
        let protection = |kind| -> Result<Protection, &'static str> {
            let storage_tag_bits = extended.storage_tag_bits;
            Ok(Protection { kind, first: self.dps & 8 != 0, guard: guard()?, storage_tag_bits })
        };
        let metadata = MetadataFormat {
            bytes: format.metadata_bytes,
            extended: self.extended_lba && format.metadata_bytes > 0,
            protection: kind.map(protection).transpose()?,
        };
        metadata.validate().map_err(|invalid| match invalid {
            InvalidFormat::Metadata { .. } => "protection information without room for it in the metadata",
            InvalidFormat::StorageTag { .. } => "a storage tag that is too short or too long for its guard",
        })?;
        Ok(metadata)
    }

    /// Decodes the structure.
    ///
    /// # Errors
    /// More than 64 LBA formats, or a format in use that does not exist.
    pub fn decode(from: &[u8; SIZE]) -> Result<IdentifyNamespace, DecodeError> {
        let error = |what, at: usize| DecodeError::value(what, at as u32, from[at].into());
        let count = usize::from(from[at::NLBAF]) + 1;
        if count > FORMATS_MAX {
            return Err(error("NLBAF", at::NLBAF));
        }
        // The upper bits are valid only with more than 16 formats (NVM 1.0, section 4.1.5.1).
        let upper = if count > 16 { from[at::FLBAS] >> 5 & 3 } else { 0 };
        let format = from[at::FLBAS] & 0xf | upper << 4;
        if usize::from(format) >= count {
            return Err(error("FLBAS", at::FLBAS));
        }
        let formats = (0..count).map(|index| {
            let value = u32_at(from, at::LBAF + 4 * index);
            LbaFormat {
                metadata_bytes: value as u16,
                data_log2: (value >> 16) as u8,
                performance: (value >> 24 & 3) as u8,
            }
        });
        let blocks = |at| u32::from(u16_at(from, at)) + 1;
        let optional_blocks = |at| if u16_at(from, at) == 0 { 0 } else { blocks(at) };
        Ok(IdentifyNamespace {
            nsze: u64_at(from, at::NSZE),
            ncap: u64_at(from, at::NCAP),
            nuse: u64_at(from, at::NUSE),
            nsfeat: from[at::NSFEAT],
            formats: formats.collect(),
            format,
            extended_lba: from[at::FLBAS] & 0x10 != 0,
            mc: from[at::MC],
            dpc: from[at::DPC],
            dps: from[at::DPS],
            nmic: from[at::NMIC],
            rescap: from[at::RESCAP],
            fpi: from[at::FPI],
            dlfeat: from[at::DLFEAT],
            atomic_write_power_fail_blocks: optional_blocks(at::NAWUPF),
            atomic_boundary_offset: u16_at(from, at::NABO),
            atomic_boundary_blocks: optional_blocks(at::NABSPF),
            noiob: u16_at(from, at::NOIOB),
            nvmcap: u128_at(from, at::NVMCAP),
            preferred_write_blocks: blocks(at::NPWG),
            preferred_write_alignment: blocks(at::NPWA),
            preferred_deallocate_blocks: blocks(at::NPDG),
            preferred_deallocate_alignment: blocks(at::NPDA),
            optimal_write_blocks: blocks(at::NOWS),
            copy_range_blocks_max: u16_at(from, at::MSSRL),
            copy_blocks_max: u32_at(from, at::MCL),
            copy_ranges_max: u16::from(from[at::MSRC]) + 1,
            anagrpid: u32_at(from, at::ANAGRPID),
            nsattr: from[at::NSATTR],
            nvmsetid: u16_at(from, at::NVMSETID),
            endgid: u16_at(from, at::ENDGID),
            nguid: array_at(from, at::NGUID),
            eui64: array_at(from, at::EUI64),
        })
    }

    /// Encodes the structure.
    ///
    /// # Panics
    /// If a field is out of the range given in its documentation.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        assert!(
            (1..=FORMATS_MAX).contains(&self.formats.len()) && usize::from(self.format) < self.formats.len(),
            "format {} of {} formats",
            self.format,
            self.formats.len()
        );
        *into = [0; SIZE];
        put64(into, at::NSZE, self.nsze);
        put64(into, at::NCAP, self.ncap);
        put64(into, at::NUSE, self.nuse);
        into[at::NSFEAT] = self.nsfeat;
        into[at::NLBAF] = self.formats.len() as u8 - 1;
        into[at::FLBAS] = self.format & 0xf | self.format >> 4 << 5 | u8::from(self.extended_lba) << 4;
        into[at::MC] = self.mc;
        into[at::DPC] = self.dpc;
        into[at::DPS] = self.dps;
        into[at::NMIC] = self.nmic;
        into[at::RESCAP] = self.rescap;
        into[at::FPI] = self.fpi;
        into[at::DLFEAT] = self.dlfeat;
        put16(into, at::NAWUPF, zero_based_blocks(self.atomic_write_power_fail_blocks.max(1)));
        put16(into, at::NABO, self.atomic_boundary_offset);
        put16(into, at::NABSPF, zero_based_blocks(self.atomic_boundary_blocks.max(1)));
        put16(into, at::NOIOB, self.noiob);
        put(into, at::NVMCAP, &self.nvmcap.to_le_bytes());
        put16(into, at::NPWG, zero_based_blocks(self.preferred_write_blocks));
        put16(into, at::NPWA, zero_based_blocks(self.preferred_write_alignment));
        put16(into, at::NPDG, zero_based_blocks(self.preferred_deallocate_blocks));
        put16(into, at::NPDA, zero_based_blocks(self.preferred_deallocate_alignment));
        put16(into, at::NOWS, zero_based_blocks(self.optimal_write_blocks));
        put16(into, at::MSSRL, self.copy_range_blocks_max);
        put32(into, at::MCL, self.copy_blocks_max);
        let ranges = self.copy_ranges_max;
        assert!((1..=256).contains(&ranges), "{ranges} source ranges are not 1 to 256");
        into[at::MSRC] = (ranges - 1) as u8;
        put32(into, at::ANAGRPID, self.anagrpid);
        into[at::NSATTR] = self.nsattr;
        put16(into, at::NVMSETID, self.nvmsetid);
        put16(into, at::ENDGID, self.endgid);
        put(into, at::NGUID, &self.nguid);
        put(into, at::EUI64, &self.eui64);
        for (index, format) in self.formats.iter().enumerate() {
            let value = u32::from(format.metadata_bytes)
                | u32::from(format.data_log2) << 16
                | u32::from(format.performance & 3) << 24;
            put32(into, at::LBAF + 4 * index, value);
        }
    }
}

pub(super) fn zero_based_blocks(blocks: u32) -> u16 {
    assert!((1..=65536).contains(&blocks), "{blocks} blocks are not 1 to 65536");
    (blocks - 1) as u16
}

/// An extended LBA format: the protection information that an LBA format has if it is enabled (NVM 1.0,
/// section 4.1.5.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtendedLbaFormat {
    /// Protection information format (PIF): see [`GuardFormat::from_wire`].
    pub pif: u8,
    /// Bits of the storage tag (STS).
    pub storage_tag_bits: u8,
}

impl ExtendedLbaFormat {
    fn decode(value: u32) -> ExtendedLbaFormat {
        ExtendedLbaFormat { pif: (value >> 7 & 3) as u8, storage_tag_bits: value as u8 & 0x7f }
    }

    fn encode(self) -> u32 {
        u32::from(self.storage_tag_bits & 0x7f) | u32::from(self.pif & 3) << 7
    }
}

/// Identify Namespace, I/O command set specific, for the NVM command set (CNS 05h, CSI 00h; NVM 1.0,
/// section 4.1.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmNamespace {
    /// Logical block storage tag mask: the bits of the storage tag that are compared.
    pub lbstm: u64,
    /// Protection information capabilities.
    pub pic: u8,
    /// Extended LBA format of each LBA format.
    pub extended_formats: [ExtendedLbaFormat; FORMATS_MAX],
}

impl Default for NvmNamespace {
    /// 16-bit guards, and no storage tags.
    fn default() -> Self {
        NvmNamespace { lbstm: 0, pic: 0, extended_formats: [ExtendedLbaFormat::default(); FORMATS_MAX] }
    }
}

impl NvmNamespace {
    /// Decodes 4096 bytes; every value is valid.
    pub fn decode(from: &[u8; SIZE]) -> NvmNamespace {
        let mut extended_formats = [ExtendedLbaFormat::default(); FORMATS_MAX];
        for (index, format) in extended_formats.iter_mut().enumerate() {
            *format = ExtendedLbaFormat::decode(u32_at(from, 12 + 4 * index));
        }
        NvmNamespace { lbstm: u64_at(from, 0), pic: from[8], extended_formats }
    }

    /// Encodes the structure.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        put64(into, 0, self.lbstm);
        into[8] = self.pic;
        for (index, format) in self.extended_formats.iter().enumerate() {
            put32(into, 12 + 4 * index, format.encode());
        }
    }
}

/// Identify Namespace, I/O command set independent (CNS 08h; Base 2.0, section 5.17.2.8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceIndependent {
    /// Features common to all command sets: bit 3 identifiers never reused, bit 4 rotational medium,
    /// bit 5 no volatile write cache.
    pub nsfeat: u8,
    /// Sharing: bit 0, attached to more than one controller at once.
    pub nmic: u8,
    /// Reservation capabilities.
    pub rescap: u8,
    /// Format progress.
    pub fpi: u8,
    /// ANA group; 0 for none.
    pub anagrpid: u32,
    /// Attributes: bit 0, write protected.
    pub nsattr: u8,
    /// NVM set; 0 for none.
    pub nvmsetid: u16,
    /// Endurance group; 0 for none.
    pub endgid: u16,
    /// Status: bit 0, ready.
    pub nstat: u8,
}

impl NamespaceIndependent {
    /// NSFEAT: no volatile write cache (VWCNP).
    pub const NO_VOLATILE_CACHE: u8 = 1 << 5;
    /// NSTAT: ready (NRDY).
    pub const READY: u8 = 1 << 0;

    /// Decodes 4096 bytes; every value is valid.
    pub fn decode(from: &[u8; SIZE]) -> NamespaceIndependent {
        NamespaceIndependent {
            nsfeat: from[0],
            nmic: from[1],
            rescap: from[2],
            fpi: from[3],
            anagrpid: u32_at(from, 4),
            nsattr: from[8],
            nvmsetid: u16_at(from, 10),
            endgid: u16_at(from, 12),
            nstat: from[14],
        }
    }

    /// Encodes the structure.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        into[0] = self.nsfeat;
        into[1] = self.nmic;
        into[2] = self.rescap;
        into[3] = self.fpi;
        put32(into, 4, self.anagrpid);
        into[8] = self.nsattr;
        put16(into, 10, self.nvmsetid);
        put16(into, 12, self.endgid);
        into[14] = self.nstat;
    }
}
