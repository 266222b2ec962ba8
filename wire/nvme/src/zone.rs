//! The Zoned Namespace command set ("ZNS", revision 1.1).

use crate::identify::SIZE;
use crate::io::Prinfo;
use crate::le::{bit, put32, put64, sized, u32_at, u64_at};
use crate::opcode::ZonedOpcode;
use crate::{DecodeError, Sqe};

wire_enum! {
    /// Zone Send Action (ZSA) of Zone Management Send (ZNS 1.1, section 3.4.3).
    ZoneAction: u8 {
        /// Close Zone.
        Close = 0x01,
        /// Finish Zone.
        Finish = 0x02,
        /// Open Zone.
        Open = 0x03,
        /// Reset Zone.
        Reset = 0x04,
        /// Offline Zone.
        Offline = 0x05,
        /// Set Zone Descriptor Extension.
        SetExtension = 0x10,
        /// Flush explicit ZRWA range.
        FlushRandomWriteArea = 0x11,
    }
}

wire_enum! {
    /// Zone states (ZNS 1.1, section 2.1.1.2).
    ZoneState: u8 {
        /// Empty.
        Empty = 0x1,
        /// Implicitly Opened.
        ImplicitlyOpened = 0x2,
        /// Explicitly Opened.
        ExplicitlyOpened = 0x3,
        /// Closed.
        Closed = 0x4,
        /// Read Only.
        ReadOnly = 0xd,
        /// Full.
        Full = 0xe,
        /// Offline.
        Offline = 0xf,
    }
}

wire_enum! {
    /// Reporting options: the zones that a report lists (ZNS 1.1, section 3.4.2).
    ReportFilter: u8 {
        /// All.
        All = 0x0,
        /// Empty.
        Empty = 0x1,
        /// Implicitly Opened.
        ImplicitlyOpened = 0x2,
        /// Explicitly Opened.
        ExplicitlyOpened = 0x3,
        /// Closed.
        Closed = 0x4,
        /// Full.
        Full = 0x5,
        /// Read Only.
        ReadOnly = 0x6,
        /// Offline.
        Offline = 0x7,
    }
}

/// Zone Management Send (ZNS 1.1, section 3.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneManagementSend {
    /// First block of the zone.
    pub zone_lba: u64,
    /// The action.
    pub action: ZoneAction,
    /// Select All: the action applies to all zones in a suitable state.
    pub all: bool,
}

impl ZoneManagementSend {
    /// Decodes the command dwords; `None` for a reserved action.
    pub fn from_sqe(sqe: &Sqe) -> Option<ZoneManagementSend> {
        Some(ZoneManagementSend {
            zone_lba: lba(sqe),
            action: ZoneAction::from_wire(sqe.cdw13 as u8)?,
            all: bit(sqe.cdw13.into(), 8),
        })
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        Sqe {
            cdw10: self.zone_lba as u32,
            cdw11: (self.zone_lba >> 32) as u32,
            cdw13: u32::from(self.action.to_wire()) | u32::from(self.all) << 8,
            ..Sqe::new(ZonedOpcode::ManagementSend.to_wire())
        }
    }
}

/// Zone Management Receive: Report Zones (ZNS 1.1, section 3.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneManagementReceive {
    /// A logical block of the first zone to report.
    pub lba: u64,
    /// Bytes to return; a multiple of 4, at least 4.
    pub length_bytes: u64,
    /// Extended Report Zones: includes zone descriptor extensions.
    pub extended: bool,
    /// The zones to report.
    pub filter: ReportFilter,
    /// Partial Report: the number of zones counts those returned instead of those that match.
    pub partial: bool,
}

impl ZoneManagementReceive {
    /// Decodes the command dwords; `None` for reserved values.
    pub fn from_sqe(sqe: &Sqe) -> Option<ZoneManagementReceive> {
        let action = sqe.cdw13 as u8;
        Some(ZoneManagementReceive {
            lba: lba(sqe),
            length_bytes: (u64::from(sqe.cdw12) + 1) * 4,
            extended: match action {
                0 => false,
                1 => true,
                _ => return None,
            },
            filter: ReportFilter::from_wire((sqe.cdw13 >> 8) as u8)?,
            partial: bit(sqe.cdw13.into(), 16),
        })
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `length_bytes` is not a multiple of 4 from 4 to 2^34.
    pub fn to_sqe(&self) -> Sqe {
        assert!(self.length_bytes.is_multiple_of(4), "{} bytes are not whole dwords", self.length_bytes);
        let numd = (self.length_bytes / 4).checked_sub(1).and_then(|numd| u32::try_from(numd).ok());
        Sqe {
            cdw10: self.lba as u32,
            cdw11: (self.lba >> 32) as u32,
            cdw12: numd.expect("a report is 4 bytes to 16 GiB"),
            cdw13: u32::from(self.extended)
                | u32::from(self.filter.to_wire()) << 8
                | u32::from(self.partial) << 16,
            ..Sqe::new(ZonedOpcode::ManagementReceive.to_wire())
        }
    }
}

/// Zone Append (ZNS 1.1, section 3.4.1); the completion's result is the first block written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneAppend {
    /// First block of the zone.
    pub zone_lba: u64,
    /// Number of blocks, 1 to 65536.
    pub blocks: u32,
    /// Force Unit Access.
    pub fua: bool,
    /// Protection information.
    pub prinfo: Prinfo,
    /// The reference tag is remapped to the LBAs written (PIREMAP).
    pub remap: bool,
    /// Initial reference tag.
    pub reference_tag: u32,
    /// Application tag.
    pub application_tag: u16,
    /// Mask of the application tag.
    pub application_tag_mask: u16,
}

impl ZoneAppend {
    /// Decodes the command dwords; every value is valid.
    pub fn from_sqe(sqe: &Sqe) -> ZoneAppend {
        let cdw12 = u64::from(sqe.cdw12);
        ZoneAppend {
            zone_lba: lba(sqe),
            blocks: (sqe.cdw12 & 0xffff) + 1,
            fua: bit(cdw12, 30),
            prinfo: Prinfo::from_prinfo(sqe.cdw12 >> 26),
            remap: bit(cdw12, 25),
            reference_tag: sqe.cdw14,
            application_tag: sqe.cdw15 as u16,
            application_tag_mask: (sqe.cdw15 >> 16) as u16,
        }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    ///
    /// # Panics
    /// If `blocks` is not 1 to 65536.
    pub fn to_sqe(&self) -> Sqe {
        assert!((1..=65536).contains(&self.blocks), "{} blocks are not 1 to 65536", self.blocks);
        Sqe {
            cdw10: self.zone_lba as u32,
            cdw11: (self.zone_lba >> 32) as u32,
            cdw12: (self.blocks - 1)
                | u32::from(self.remap) << 25
                | self.prinfo.prinfo() << 26
                | u32::from(self.fua) << 30,
            cdw14: self.reference_tag,
            cdw15: u32::from(self.application_tag) | u32::from(self.application_tag_mask) << 16,
            ..Sqe::new(ZonedOpcode::Append.to_wire())
        }
    }
}

/// Size in bytes of a zone descriptor.
pub const ZONE_SIZE: usize = 64;
/// Size in bytes of the header of a report.
pub const REPORT_HEADER_SIZE: usize = 64;

/// A zone descriptor of a report (ZNS 1.1, section 3.4.2.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneDescriptor {
    /// Zone state (ZS).
    pub state: ZoneState,
    /// Attributes (ZA).
    pub attributes: u8,
    /// Attributes information (ZAI).
    pub information: u8,
    /// Zone capacity in blocks (ZCAP).
    pub capacity_blocks: u64,
    /// Zone start LBA (ZSLBA).
    pub lba: u64,
    /// Write pointer (WP).
    pub write_pointer: u64,
}

impl ZoneDescriptor {
    /// Decodes a descriptor.
    ///
    /// # Errors
    /// Types other than Sequential Write Required, and reserved states.
    pub fn decode(from: &[u8; ZONE_SIZE]) -> Result<ZoneDescriptor, DecodeError> {
        if from[0] & 0xf != 2 {
            return Err(DecodeError::value("zone type", 0, from[0].into()));
        }
        let state = ZoneState::from_wire(from[1] >> 4);
        Ok(ZoneDescriptor {
            state: state.ok_or(DecodeError::value("zone state", 1, from[1].into()))?,
            attributes: from[2],
            information: from[3],
            capacity_blocks: u64_at(from, 8),
            lba: u64_at(from, 16),
            write_pointer: u64_at(from, 24),
        })
    }

    /// Encodes the descriptor.
    pub fn encode(&self, into: &mut [u8; ZONE_SIZE]) {
        *into = [0; ZONE_SIZE];
        into[0] = 2;
        into[1] = self.state.to_wire() << 4;
        into[2] = self.attributes;
        into[3] = self.information;
        put64(into, 8, self.capacity_blocks);
        put64(into, 16, self.lba);
        put64(into, 24, self.write_pointer);
    }

    /// Decodes a report without extensions: the total number of zones, and the descriptors that the data
    /// contains.
    ///
    /// # Errors
    /// Data shorter than the header, and the errors of [`decode`](Self::decode).
    pub fn list(from: &[u8]) -> Result<(u64, Vec<ZoneDescriptor>), DecodeError> {
        let header = sized::<REPORT_HEADER_SIZE>("Report Zones", from)?;
        let count = u64_at(header, 0);
        let zones = from[REPORT_HEADER_SIZE..].as_chunks::<ZONE_SIZE>().0.iter();
        let zones: Result<_, _> =
            zones.take(usize::try_from(count).unwrap_or(usize::MAX)).map(ZoneDescriptor::decode).collect();
        Ok((count, zones?))
    }
}

/// Identify Namespace of the zoned command set (CNS 05h, CSI 02h; ZNS 1.1, section 4.1.5.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZonedNamespace {
    /// Optional Zoned Command Support (OZCS): bit 0, reads may cross zone boundaries.
    pub optional: u16,
    /// Maximum active zones; `None` for no limit (MAR).
    pub active_max: Option<u32>,
    /// Maximum open zones; `None` for no limit (MOR).
    pub open_max: Option<u32>,
    /// Zone size in blocks, and size in bytes of a zone descriptor extension, by LBA format.
    pub formats: Vec<(u64, u32)>,
}

const FORMATS_AT: usize = 2816;
const FORMATS: usize = 64;
const _: () = assert!(FORMATS_AT + 16 * FORMATS == 3840);

impl ZonedNamespace {
    /// Decodes 4096 bytes; every value is valid.
    pub fn decode(from: &[u8; SIZE]) -> ZonedNamespace {
        let limit = |at| u32_at(from, at).checked_add(1);
        let formats = from[FORMATS_AT..FORMATS_AT + 16 * FORMATS].chunks_exact(16);
        ZonedNamespace {
            optional: crate::le::u16_at(from, 2),
            active_max: limit(4),
            open_max: limit(8),
            formats: formats.map(|format| (u64_at(format, 0), u32::from(format[8]) * 64)).collect(),
        }
    }

    /// Encodes the structure.
    ///
    /// # Panics
    /// With more than 64 formats, a limit of 0, or extensions that are not a multiple of 64 below 16 KiB.
    pub fn encode(&self, into: &mut [u8; SIZE]) {
        *into = [0; SIZE];
        let limit = |limit: Option<u32>| match limit {
            None => u32::MAX,
            Some(count) => count.checked_sub(1).expect("a limit is at least 1"),
        };
        crate::le::put16(into, 2, self.optional);
        put32(into, 4, limit(self.active_max));
        put32(into, 8, limit(self.open_max));
        assert!(self.formats.len() <= FORMATS, "{} formats", self.formats.len());
        for (index, &(blocks, extension)) in self.formats.iter().enumerate() {
            put64(into, FORMATS_AT + 16 * index, blocks);
            assert!(extension.is_multiple_of(64), "an extension of {extension} bytes");
            into[FORMATS_AT + 16 * index + 8] =
                u8::try_from(extension / 64).expect("an extension below 16 KiB");
        }
    }
}

fn lba(sqe: &Sqe) -> u64 {
    u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32
}
